"""Why a loop takes longer than its steps, from its clock and what was seen beside it; and what to do about it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.diagnosis.resources import Resources
from colab_utils.diagnosis.stacks import SampleTimes
from colab_utils.diagnosis.timing import Stage
from colab_utils.runtime import count_cores, format_bytes

__all__ = ["Cause", "Facts", "find_causes", "refine_causes"]

_LEAST_SHARE, _LEAST_S = 0.1, 0.5  # of the loop, and of all of it: less is not worth a cure
_RARE = 0.25  # of the batches
_HOLDS = 0.6  # of what a part of the loop takes, by rare batches
_TIMES_SLOWER = 8  # than the mean of the others: a slow sample
_LEAST_SLOW_S = 0.05
_SENDS_MB_PER_S = 20  # a third of what Drive gives where it is reached (`drive.DRIVE_PROFILES`)
_ALL_CORES = 0.85  # of the cores are busy
_SLOWER = 1.3  # times, for a step beside a loader
_STAGES = {  # what takes most, and what to do
    "read": ("read", "Store the data on the local disk, in few large files: preprocess, then copy."),
    "sample": ("work", "Do what never changes once, offline: decode, resize, parse. Use more workers where cores are "
               "free."),
    "decode": ("decode", "Shrink images once, offline (preprocess), to the size that training needs."),
    "masks": ("masks", "Load shards with make_loader: masks stay packed until the device has them."),
    "transform": ("transform", "Make transforms cheaper, or run them on the device; do what is not random once, "
                  "offline."),
    "collate": ("collate", "Make collate_fn cheaper: stack tensors, and do all else in the dataset."),
    "hand-off": ("hand-off", "Make batches smaller in bytes: uint8 images, packed masks; or make_loader's own "
                 "buffers."),
    "collate and hand-off": ("hand-off", "Make batches smaller in bytes: uint8 images, packed masks."),
}  # fmt: skip


@dataclass(frozen=True)
class Cause:
    """Why the loop takes longer than its steps, and what to do."""

    id: str
    share: float
    """Of the loop's time, 0 to 1."""
    why: str
    next: str

    def __str__(self) -> str:
        return f"{self.share:.0%} {self.id}\n  why:  {self.why}\n  next: {self.next}"


@dataclass(frozen=True)
class Facts:
    """What was seen beside the clock."""

    workers: int
    """Worker processes of the loader."""
    persistent: bool
    """Whether they live on between two passes."""
    cpu_s: float
    """CPU time of this process and its workers, in all passes."""
    main_cpu_s: float
    """CPU time of the thread that trains."""
    wait_cpu: float
    """Cores that it kept busy while it waited, in the mean."""
    passes_s: float
    """Wall time of all passes."""
    times: SampleTimes
    """Of samples in workers."""
    seen: dict[int, tuple[int, ...]]
    """Batch to the samples that were loaded while it was waited for."""
    resources: Resources | None
    stalls: tuple[Any, ...]
    """Every `Stall`."""
    unseen: tuple[str, ...]
    """What could not be looked at, in words."""

    @property
    def busy(self) -> float:
        """Cores that this process and its workers kept busy, in the mean."""
        return self.cpu_s / max(self.passes_s, 1e-9)


def find_causes(
    waits: NDArray[np.float64], between: NDArray[np.float64], is_first: NDArray[np.bool_], loop_s: float, facts: Facts
) -> list[Cause]:
    """What costs a tenth of the loop or more, the most first; and growing memory, whatever it costs.

    Args:
        waits: seconds of each batch.
        between: seconds after each step.
        is_first: whether a batch began a pass.
        loop_s: seconds of the whole loop without what lay between the passes.
        facts: what else was seen.
    """
    crowded = _explain_crowd(waits, loop_s, facts)
    found = [_explain_between(between, loop_s), crowded]
    if crowded is None:
        late = np.where(is_first, 0.0, waits)
        found += [_explain_starts(waits, is_first, loop_s, facts), _explain_waits(late, loop_s, facts)]
    worth = [cause for cause in found if cause and cause.share >= _LEAST_SHARE and loop_s >= _LEAST_S]
    causes = sorted(worth, key=lambda cause: -cause.share)
    for stall in facts.stalls:
        causes.append(Cause("hang", 0.0, str(stall).removesuffix(stall.cure).strip(), stall.cure))
    for danger in facts.resources.dangers if facts.resources else ():
        why, _, cure = danger.partition(". ")
        causes.append(Cause("memory", 0.0, f"{why}.", cure))
    return causes


def refine_causes(causes: Sequence[Cause], stages: Sequence[Stage], *, slower: float, waits: bool) -> list[Cause]:
    """Name the stage of loading that takes most, and contention where a step takes ``slower`` times as long as alone.

    Args:
        causes: of `find_causes`.
        stages: of loading, timed alone.
        slower: 1 where the step is as fast beside the loader as without it.
        waits: whether loading has something to win; else only what will end the run is left.
    """
    if not waits:
        return [cause for cause in causes if cause.id in ("hang", "memory")]
    largest = max(stages, key=lambda stage: stage.mean_ms, default=None)
    found, works = [], False
    for cause in causes:
        if cause.id in ("between", "periodic"):  # a diagnosis copies batches there
            continue
        if largest and cause.id in ("work", "collate") and largest.name in _STAGES:
            waits_for_data = largest.name == "sample" and largest.cpu_ms < largest.mean_ms / 2
            id, cure = _STAGES["read" if waits_for_data else largest.name]
            whole_ms = sum(stage.mean_ms for stage in stages)
            why = f"{cause.why} {largest.name} takes {largest.mean_ms:.3g} of {whole_ms:.3g} ms an image."
            cause, works = Cause(id, cause.share, why, cure), True
        found.append(cause)
    if slower > _SLOWER:
        found.append(Cause(
            "contention", 1 - 1 / slower, f"Beside the loader the step takes {slower:.1f} times as long as alone.",
            "Use fewer workers, torch.set_num_threads(1) in each, or make loading cheaper.",
        ))  # fmt: skip
    # loading that takes the cores from the step is cured by cheaper loading: it comes first
    return sorted(found, key=lambda cause: (works and cause.id == "contention", -cause.share))


def _find_rare(seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """The few batches that hold most of it; none where many share it."""
    large = np.flatnonzero(seconds > max(5 * float(np.median(seconds)), _LEAST_SLOW_S))
    holds = seconds[large].sum() >= _HOLDS * seconds.sum()
    return large if 0 < len(large) <= _RARE * len(seconds) and holds else large[:0]


def _explain_between(between: NDArray[np.float64], loop_s: float) -> Cause | None:
    share, rare = float(between.sum()) / loop_s, _find_rare(between)
    if len(rare) > 1:
        every, each_s = len(between) / len(rare), float(between[rare].mean())
        return Cause(
            "periodic", share, f"About every {every:.0f} batches this process is busy {each_s:.2g} s after the step.",
            "If it writes checkpoints, write them in a thread or less often; if it evaluates, evaluate less often.",
        )  # fmt: skip
    each_ms = 1000 * float(between.mean())
    return Cause(
        "between", share, f"After each step this process is busy for {each_ms:.3g} ms before it asks for a batch.",
        "Look at what follows optimizer.step(): log less often, read losses (.item()) less often, move it to a thread.",
    )  # fmt: skip


def _explain_starts(
    waits: NDArray[np.float64], is_first: NDArray[np.bool_], loop_s: float, facts: Facts
) -> Cause | None:
    passes = int(is_first.sum())
    if passes < 2:  # every run starts once
        return None
    each_s = float(waits[is_first].mean())
    why = f"Each of the {passes} passes waits {each_s:.2g} s for its first batch"
    if facts.workers and not facts.persistent:
        why, cure = f"{why}: workers start anew.", "Make the loader once, with persistent_workers=True."
    else:
        why, cure = f"{why}.", "Make passes longer: a sampler that repeats the data, or more images."
    return Cause("restarts", each_s * passes / loop_s, why, cure)


def _explain_crowd(waits: NDArray[np.float64], loop_s: float, facts: Facts) -> Cause | None:
    """More workers than cores, which wait for one another, at the start of a pass most of all."""
    cores = count_cores()
    if facts.workers <= cores or (facts.busy < _ALL_CORES * cores and facts.times.queued_s < facts.times.cpu_s):
        return None
    return Cause(
        "too_many_workers", float(waits[1:].sum()) / loop_s,
        f"{facts.workers} workers share {cores} cores, and wait for one another.",
        f"Use fewer workers: num_workers={cores}. Make a sample cheaper: more workers only take turns.",
    )  # fmt: skip


def _explain_waits(waits: NDArray[np.float64], loop_s: float, facts: Facts) -> Cause | None:
    """Why batches come late: a slow sample, too many workers, what happens to whole batches, reads, or work."""
    share, times = float(waits.sum()) / loop_s, facts.times
    if slow := _find_slow_sample(waits, facts):
        name = slow.partition(" takes")[0].lower()
        cure = f"Look at {name}: make it smaller, store it on the local disk, or leave it out."
        return Cause("slow_sample", share, slow, cure)
    outside_s, data_s = facts.cpu_s - facts.main_cpu_s - times.cpu_s, times.wall_s - times.cpu_s - times.queued_s
    if not times.samples:
        return _explain_unseen(share, facts)
    if outside_s > max(times.cpu_s, data_s):
        return Cause(
            "collate", share, f"Workers spend {outside_s / facts.cpu_s:.0%} of the CPU time outside of samples, in "
            "collate_fn or on the way to this process.",
            "Make collate_fn cheaper, and batches smaller: diagnose(loader, step) times both.",
        )  # fmt: skip
    wall_ms, cpu_ms, queued_ms, data_ms = (
        1000 * seconds / times.samples for seconds in (times.wall_s, times.cpu_s, times.queued_s, data_s)
    )
    if data_ms > max(cpu_ms, queued_ms):
        why = f"A sample takes {wall_ms:.3g} ms, and waits {data_ms:.3g} ms of it for its data"
        return _explain_reads(share, why, 1000 * data_ms, times.bytes_read / times.samples)
    why = f"A sample takes {wall_ms:.3g} ms: {cpu_ms:.3g} ms of work, {queued_ms:.3g} ms until a core is free."
    return _explain_work(share, why, facts, is_queued=queued_ms > cpu_ms)


def _explain_reads(share: float, why: str, data_us: float, size: float) -> Cause:
    """Whether the first byte of a file is late, or all of them: a disk that sends gives `_SENDS_MB_PER_S` at least."""
    if size / data_us > _SENDS_MB_PER_S:
        why = f"{why}: {format_bytes(size)}, at {size / data_us:.2g} MB/s. It is the bandwidth."
        cure = (
            "Shrink images once, offline (preprocess), to the size that training needs; store them on the local disk."
        )
        return Cause("read", share, why, cure)
    if size > 0:
        why = f"{why}: only {format_bytes(size)}, so mostly for the first byte of each file"
    return Cause(
        "read", share, f"{why}.", "Store the data on the local disk, in few large files; until then use more workers."
    )


def _explain_unseen(share: float, facts: Facts) -> Cause:
    if facts.workers:
        return _explain_work(share, "Workers deliver too slowly.", facts)
    if facts.wait_cpu < 0.5:
        return Cause(
            "read", share, "This process loads the samples itself, and mostly waits for their data.",
            "Use worker processes (num_workers), and store the data on the local disk.",
        )  # fmt: skip
    why = "This process loads the samples itself, between its steps."
    return Cause("work", share, why, "Use worker processes (num_workers): they load while this process trains.")


def _explain_work(share: float, why: str, facts: Facts, *, is_queued: bool = False) -> Cause:
    cores = count_cores()
    if is_queued or facts.busy > _ALL_CORES * cores:
        return Cause(
            "work", share, f"{why} All {cores} cores are busy: more workers would not help.",
            "Do the work once, offline, or make it cheaper: diagnose(loader, step) says which stage takes it.",
        )  # fmt: skip
    return Cause(
        "work", share, f"{why} {facts.busy:.1f} of {cores} cores are busy.",
        "Use more workers; diagnose(loader, step) says which stage takes the time.",
    )  # fmt: skip


def _find_slow_sample(waits: NDArray[np.float64], facts: Facts) -> str:
    """The slowest sample in words, where a few samples hold much of the time of all; else nothing."""
    times = facts.times
    slow = [(seconds, index) for seconds, index in times.slowest if seconds >= _LEAST_SLOW_S]
    if times.samples > len(slow) > 0:
        rest_s = (times.wall_s - sum(seconds for seconds, _ in slow)) / (times.samples - len(slow))
        slow = [(seconds, index) for seconds, index in slow if seconds > _TIMES_SLOWER * rest_s]
        held = sum(seconds for seconds, _ in slow) / times.wall_s
        if slow and held > 1 - _HOLDS:
            seconds, index = slow[0]
            count = len({index for _, index in slow})
            others = f"{count} samples hold" if count > 1 else "it holds"
            return f"Sample {index} takes {seconds:.2g} s: {others} {held:.0%} of the time of all samples."
    rare = [number for number in _find_rare(waits).tolist() if facts.seen.get(number)]
    if times.samples or not rare:
        return ""
    worst = max(rare, key=lambda number: waits[number])  # loaded in this process
    return f"Sample {facts.seen[worst][0]} takes {waits[worst]:.2g} s: {len(rare)} of {len(waits)} batches are so slow."
