"""Why a loop takes longer than its steps: each cause with its share, its evidence, and what to do
next.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colab_utils.diagnosis.memory_growth import Growth
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.stages import Stage
from colab_utils.machine import count_cores
from colab_utils.units import format_bytes

_Array = NDArray[Any]
# of the loop, and of all of it: less is not worth a cure
_LEAST_SHARE = 0.1
_LEAST_S = 0.5
_RARE = 0.25  # of the batches
_HOLDS = 0.6  # of what a part of the loop takes, by rare batches
_TIMES_SLOWER = 8  # than the mean of the others: a slow sample
_LEAST_SLOW_S = 0.05
# a third of what Drive gives where it is reached (`slow_drive.DRIVE_PROFILES`)
_SENDS_MB_PER_S = 20
_ALL_CORES = 0.85  # of the cores are busy
_SLOWER = 1.3  # times, for a step beside a loader
_STAGES = {  # what takes most: the cause, and what to do
    "read": (
        "read",
        "Store the data on the local disk, in few large files: preprocess, then copy.",
    ),
    "sample": (
        "work",
        "Decode, resize and parse once, offline. Use more workers where cores are free.",
    ),
    "decode": (
        "decode",
        "Shrink images once, offline (preprocess), to the size that training needs.",
    ),
    "masks": (
        "masks",
        "Load shards with make_loader: masks stay packed until the device has them.",
    ),
    "transform": (
        "transform",
        "Make transforms cheaper, run them on the device, or do what is not random offline.",
    ),
    "collate": (
        "collate",
        "Make collate_fn cheaper: stack tensors, and do all else in the dataset.",
    ),
    "hand-off": (
        "hand-off",
        "Make batches smaller: uint8 images, packed masks; or use make_loader's own buffers.",
    ),
    "collate and hand-off": ("hand-off", "Make batches smaller: uint8 images, packed masks."),
}


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


class LoopFacts(Protocol):
    """What was noted while a loop ran, beside its times."""

    workers: int
    """Worker processes of the loader."""
    cpu_s: float
    """CPU seconds of this process and its children in all passes."""
    times: SampleTimes
    seen: dict[int, tuple[int, ...]]
    """The samples that were loaded while a batch was waited for, by its number."""
    stalls: list[Any]
    growth: Growth | None


def find_causes(
    waits: _Array, between: _Array, is_first: _Array, loop_s: float, facts: LoopFacts
) -> list[Cause]:
    """What costs a tenth of the loop or more, the most first; and growing memory, whatever it
    costs.

    Args:
        waits: seconds of each batch.
        between: seconds after each step.
        is_first: whether a batch began a pass.
        loop_s: seconds of the whole loop without what lay between the passes.
        facts: what else was seen.
    """
    found = [_explain_between(between, loop_s)]
    if crowded := _explain_crowd(waits, loop_s, facts):
        found.append(crowded)
    else:
        found.append(_explain_waits(np.where(is_first, 0.0, waits), loop_s, facts))
        if is_first.sum() > 1:  # every run starts once
            found.append(_explain_starts(waits[is_first], loop_s))
    worth = [cause for cause in found if cause.share >= _LEAST_SHARE and loop_s >= _LEAST_S]
    causes = sorted(worth, key=lambda cause: -cause.share)
    causes += [
        Cause("hang", 0.0, str(stall).removesuffix(stall.cure).strip(), stall.cure)
        for stall in facts.stalls
    ]
    if facts.growth:
        cure = "Keep no lists of Python objects in the dataset, and no losses with their graphs."
        causes.append(Cause("memory", 0.0, str(facts.growth), cure))
    return causes


def refine_causes(
    causes: Sequence[Cause],
    stages: Sequence[Stage],
    *,
    slower: float,
    step_share: float,
    waits: bool,
) -> list[Cause]:
    """Name the stage of loading that takes most, and contention where a step takes ``slower`` times
    as long as alone.

    Args:
        causes: of `find_causes`.
        stages: of loading, timed alone.
        slower: 1 where the step is as fast beside the loader as without it.
        step_share: of the loop's time.
        waits: whether loading has something to win; else only what will end the run is left.
    """
    if not waits:
        return [cause for cause in causes if cause.id in ("hang", "memory")]
    largest = max(stages, key=lambda stage: stage.mean_ms, default=None)
    found = []
    works = False
    for cause in causes:
        if cause.id in ("between", "periodic"):  # a diagnosis copies batches there
            continue
        if largest and cause.id in ("work", "collate") and largest.name in _STAGES:
            waits_for_data = largest.name == "sample" and largest.cpu_ms < largest.mean_ms / 2
            id, cure = _STAGES["read" if waits_for_data else largest.name]
            whole_ms = sum(stage.mean_ms for stage in stages)
            why = (
                f"{cause.why} {largest.name} takes {largest.mean_ms:.3g} of {whole_ms:.3g} ms "
                "an image."
            )
            cause = Cause(id, cause.share, why, cure)
            works = True
        found.append(cause)
    if slower > _SLOWER:
        why = f"Beside the loader the step takes {slower:.1f} times as long as alone."
        cure = "Use fewer workers, torch.set_num_threads(1) in each, or make loading cheaper."
        found.append(Cause("contention", (1 - 1 / slower) * step_share, why, cure))
    # loading that takes the cores from the step is cured by cheaper loading: it comes first
    return sorted(found, key=lambda cause: (works and cause.id == "contention", -cause.share))


def _find_rare(seconds: _Array) -> NDArray[np.int64]:
    """The few batches that hold most of it; none where many share it."""
    large = np.flatnonzero(seconds > max(5 * float(np.median(seconds)), _LEAST_SLOW_S))
    holds = seconds[large].sum() >= _HOLDS * seconds.sum()
    return large if 0 < len(large) <= _RARE * len(seconds) and holds else large[:0]


def _explain_between(between: _Array, loop_s: float) -> Cause:
    share = float(between.sum()) / loop_s
    rare = _find_rare(between)
    if len(rare) > 1:
        every = len(between) / len(rare)
        each_s = float(between[rare].mean())
        why = f"About every {every:.0f} batches this process is busy {each_s:.2g} s after the step."
        cure = (
            "If it writes checkpoints, write them in a thread or less often; if it evaluates, "
            "evaluate less often."
        )
        return Cause("periodic", share, why, cure)
    why = (
        f"After each step this process is busy for {1000 * between.mean():.3g} ms before it "
        "asks for a batch."
    )
    cure = (
        "Look at what follows optimizer.step(): log or read losses (.item()) less often, or "
        "move it to a thread."
    )
    return Cause("between", share, why, cure)


def _explain_starts(starts: _Array, loop_s: float) -> Cause:
    """The first batch of each pass came so late."""
    why = f"Each of the {len(starts)} passes waits {starts.mean():.2g} s for its first batch."
    cure = (
        "Where workers start anew, make the loader once, with persistent_workers=True; else "
        "make passes longer."
    )
    return Cause("restarts", float(starts.sum()) / loop_s, why, cure)


def _explain_crowd(waits: _Array, loop_s: float, facts: LoopFacts) -> Cause | None:
    """More workers than cores, which wait for one another, at the start of a pass most of all."""
    cores = count_cores()
    times = facts.times
    is_busy = facts.cpu_s >= _ALL_CORES * cores * loop_s
    if facts.workers <= cores or not (is_busy or times.queued_s >= times.cpu_s):
        return None
    why = f"{facts.workers} workers share {cores} cores, and wait for one another."
    cure = (
        f"Use fewer workers: num_workers={cores}. Make a sample cheaper: more workers only "
        "take turns."
    )
    return Cause("too_many_workers", float(waits[1:].sum()) / loop_s, why, cure)


def _explain_waits(waits: _Array, loop_s: float, facts: LoopFacts) -> Cause:
    """Why batches come late: a slow sample, no workers, what happens to whole batches, reads, or
    work.
    """
    share = float(waits.sum()) / loop_s
    times = facts.times
    cores = count_cores()
    if slow := _explain_slow_sample(waits, share, facts):
        return slow
    if not (facts.workers or times.samples):
        why = "This process loads the samples itself, between its steps."
        return Cause(
            "work",
            share,
            why,
            "Use worker processes (num_workers): they load while this process trains.",
        )
    outside_s = times.worker_cpu_s - times.cpu_s
    data_s = times.wall_s - times.cpu_s - times.queued_s
    if outside_s > max(times.cpu_s, data_s):
        part = outside_s / times.worker_cpu_s
        why = (
            f"Workers spend {part:.0%} of their CPU time outside of samples: in collate_fn, or "
            "on the way here."
        )
        cure = "Make collate_fn cheaper, and batches smaller: diagnose(loader, step) times both."
        return Cause("collate", share, why, cure)
    wall_ms, cpu_ms, queued_ms, data_ms = (
        1000 * seconds / max(times.samples, 1)
        for seconds in (times.wall_s, times.cpu_s, times.queued_s, data_s)
    )
    if data_ms > max(cpu_ms, queued_ms):
        why = f"A sample takes {wall_ms:.3g} ms, and waits {data_ms:.3g} ms of it for its data"
        return _explain_reads(share, why, 1000 * data_ms, times.bytes_read / times.samples)
    why = "Workers deliver too slowly."
    busy = facts.cpu_s / loop_s
    cure = "Use more workers"
    if times.samples:
        why = (
            f"A sample takes {wall_ms:.3g} ms: {cpu_ms:.3g} ms of work, {queued_ms:.3g} ms "
            "until a core is free."
        )
    if queued_ms > cpu_ms or busy > _ALL_CORES * cores:
        cure = "Make the work cheaper, or do it once, offline: more workers would not help"
    why = f"{why} {busy:.1f} of {cores} cores are busy."
    return Cause(
        "work", share, why, f"{cure}; diagnose(loader, step) says which stage takes the time."
    )


def _explain_reads(share: float, why: str, data_us: float, size: float) -> Cause:
    """Whether the first byte of a file is late, or all of them: a disk that sends gives
    `_SENDS_MB_PER_S` at least.
    """
    cure = "Store the data on the local disk, in few large files; until then use more workers."
    if size / data_us > _SENDS_MB_PER_S:
        why = f"{why}: {format_bytes(size)}, at {size / data_us:.2g} MB/s. It is the bandwidth"
        cure = f"{_STAGES['decode'][1]} Store them on the local disk."
    elif size > 0:
        why = f"{why}: only {format_bytes(size)}, so mostly for the first byte of each file"
    return Cause("read", share, f"{why}.", cure)


def _explain_slow_sample(waits: _Array, share: float, facts: LoopFacts) -> Cause | None:
    """The slowest sample, where a few samples hold much of the time of all, and of the waits."""
    times = facts.times
    # of these and slower ones
    count, slow_s = np.cumsum(np.array(times.spread).reshape(-1, 2)[::-1], axis=0)[::-1].T
    least_s = np.ldexp(0.5e-9, np.arange(len(count)))
    rest_s = (times.wall_s - slow_s) / np.maximum(times.samples - count, 1)
    fits = (count > 0) & (count <= _RARE * times.samples) & (least_s > _TIMES_SLOWER * rest_s)
    fits &= (least_s > _LEAST_SLOW_S) & (
        slow_s > (1 - _HOLDS) * max(times.wall_s, float(waits.sum()))
    )
    rare = [number for number in _find_rare(waits).tolist() if facts.seen.get(number)]
    if fits.any():
        found = fits.argmax()
        seconds, index = times.slowest
        slow = f"{count[found]:,.0f} of {times.samples:,.0f}"
        told = (
            f"loads as slow ({slow}) hold {slow_s[found] / times.wall_s:.0%} of the time of "
            "all samples"
        )
    elif rare and not times.samples:  # loaded in this process
        worst = max(rare, key=lambda number: waits[number])
        seconds = waits[worst]
        index = facts.seen[worst][0]
        told = f"{len(rare)} of {len(waits)} batches are so slow"
    else:
        return None
    cure = f"Look at sample {index}: make it smaller, store it on the local disk, or leave it out."
    return Cause("slow_sample", share, f"Sample {index} takes {seconds:.2g} s: {told}.", cure)
