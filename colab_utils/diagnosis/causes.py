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
# A share of the loop, and seconds of all of it, below which a cause is not worth a cure.
_LEAST_SHARE = 0.1
_LEAST_S = 0.5
_RARE = 0.25  # of the batches
_HOLDS = 0.6  # of what a part of the loop takes, by rare batches
_TIMES_SLOWER = 8  # than the mean of the others: a slow sample
_LEAST_SLOW_S = 0.05
# A third of what Drive gives where it is reached (`slow_drive.DRIVE_PROFILES`)
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
    causes = [_explain_between(between, loop_s)]
    crowd = _explain_crowd(waits, loop_s, facts)
    if crowd is not None:
        causes.append(crowd)
    else:
        causes.append(_explain_waits(np.where(is_first, 0.0, waits), loop_s, facts))
        if is_first.sum() > 1:  # every run starts once
            causes.append(_explain_starts(waits[is_first], loop_s))
    if loop_s < _LEAST_S:
        causes = []
    causes = [cause for cause in causes if cause.share >= _LEAST_SHARE]
    causes.sort(key=lambda cause: -cause.share)
    for stall in facts.stalls:
        causes.append(Cause("hang", 0.0, str(stall).removesuffix(stall.cure).strip(), stall.cure))
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
    refined = []
    works = False
    for cause in causes:
        if cause.id in ("between", "periodic"):  # a diagnosis copies batches there
            continue
        if largest and cause.id in ("work", "collate") and largest.name in _STAGES:
            works = True
            waits_for_data = largest.name == "sample" and largest.cpu_ms < largest.mean_ms / 2
            id, cure = _STAGES["read" if waits_for_data else largest.name]
            whole_ms = sum(stage.mean_ms for stage in stages)
            part = f"{largest.name} takes {largest.mean_ms:.3g} of {whole_ms:.3g} ms an image."
            cause = Cause(id, cause.share, f"{cause.why} {part}", cure)
        refined.append(cause)
    if slower > _SLOWER:
        contention = Cause(
            "contention",
            (1 - 1 / slower) * step_share,
            f"Beside the loader the step takes {slower:.1f} times as long as alone.",
            "Use fewer workers, torch.set_num_threads(1) in each, or make loading cheaper.",
        )
        refined.append(contention)
    # loading that takes the cores from the step is cured by cheaper loading: it comes first
    return sorted(refined, key=lambda cause: (works and cause.id == "contention", -cause.share))


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
        return Cause(
            "periodic",
            share,
            f"About every {every:.0f} batches this process is busy {each_s:.2g} s after the step.",
            "If it writes checkpoints, write them in a thread or less often; if it evaluates, "
            "evaluate less often.",
        )
    return Cause(
        "between",
        share,
        f"After each step this process is busy for {1000 * between.mean():.3g} ms before it "
        "asks for a batch.",
        "Look at what follows optimizer.step(): log or read losses (.item()) less often, or "
        "move it to a thread.",
    )


def _explain_starts(starts: _Array, loop_s: float) -> Cause:
    """The first batch of each pass came so late."""
    return Cause(
        "restarts",
        float(starts.sum()) / loop_s,
        f"Each of the {len(starts)} passes waits {starts.mean():.2g} s for its first batch.",
        "Where workers start anew, make the loader once, with persistent_workers=True; else "
        "make passes longer.",
    )


def _explain_crowd(waits: _Array, loop_s: float, facts: LoopFacts) -> Cause | None:
    """More workers than cores, which wait for one another, at the start of a pass most of all."""
    cores = count_cores()
    times = facts.times
    is_busy = facts.cpu_s >= _ALL_CORES * cores * loop_s
    if facts.workers <= cores or not (is_busy or times.queued_s >= times.cpu_s):
        return None
    return Cause(
        "too_many_workers",
        float(waits[1:].sum()) / loop_s,
        f"{facts.workers} workers share {cores} cores, and wait for one another.",
        f"Use fewer workers: num_workers={cores}. Make a sample cheaper: more workers only "
        "take turns.",
    )


def _explain_waits(waits: _Array, loop_s: float, facts: LoopFacts) -> Cause:
    """Why batches come late: a slow sample, no workers, what happens to whole batches, reads, or
    work.
    """
    share = float(waits.sum()) / loop_s
    times = facts.times
    slow = _explain_slow_sample(waits, share, facts)
    if slow is not None:
        return slow
    if not (facts.workers or times.samples):
        return Cause(
            "work",
            share,
            "This process loads the samples itself, between its steps.",
            "Use worker processes (num_workers): they load while this process trains.",
        )
    outside_s = times.worker_cpu_s - times.cpu_s
    if outside_s > max(times.cpu_s, times.data_s):
        return Cause(
            "collate",
            share,
            f"Workers spend {outside_s / times.worker_cpu_s:.0%} of their CPU time outside of "
            "samples: in collate_fn, or on the way here.",
            "Make collate_fn cheaper, and batches smaller: diagnose(loader, step) times both.",
        )
    if times.data_s > max(times.cpu_s, times.queued_s):
        return _explain_reads(share, times)
    return _explain_work(share, facts.cpu_s / loop_s, times)


def _explain_work(share: float, busy: float, times: SampleTimes) -> Cause:
    """Say how much work a sample is, and whether cores are free for more workers."""
    cores = count_cores()
    why = "Workers deliver too slowly."
    if times.samples:
        each_ms = 1000 / times.samples
        why = (
            f"A sample takes {each_ms * times.wall_s:.3g} ms: {each_ms * times.cpu_s:.3g} ms of "
            f"work, {each_ms * times.queued_s:.3g} ms until a core is free."
        )
    cure = "Use more workers"
    if times.queued_s > times.cpu_s or busy > _ALL_CORES * cores:
        cure = "Make the work cheaper, or do it once, offline: more workers would not help"
    return Cause(
        "work",
        share,
        f"{why} {busy:.1f} of {cores} cores are busy.",
        f"{cure}; diagnose(loader, step) says which stage takes the time.",
    )


def _explain_reads(share: float, times: SampleTimes) -> Cause:
    """Whether the first byte of a file is late, or all of them: a disk that sends gives
    `_SENDS_MB_PER_S` at least.
    """
    each_ms = 1000 / times.samples
    size = format_bytes(times.bytes_read / times.samples)
    mb_per_s = times.bytes_read / 1e6 / times.data_s
    why = (
        f"A sample takes {each_ms * times.wall_s:.3g} ms, and waits {each_ms * times.data_s:.3g} "
        "ms of it for its data"
    )
    cure = "Store the data on the local disk, in few large files; until then use more workers."
    if mb_per_s > _SENDS_MB_PER_S:
        why += f": {size}, at {mb_per_s:.2g} MB/s. It is the bandwidth"
        cure = f"{_STAGES['decode'][1]} Store them on the local disk."
    elif times.bytes_read:
        why += f": only {size}, so mostly for the first byte of each file"
    return Cause("read", share, f"{why}.", cure)


def _explain_slow_sample(waits: _Array, share: float, facts: LoopFacts) -> Cause | None:
    """The slowest sample, where a few samples hold much of the time of all, and of the waits."""
    times = facts.times
    count, slow_s = _count_slow(times, float(waits.sum()))
    if count:
        seconds, index = times.slowest
        evidence = (
            f"loads as slow ({count:,.0f} of {times.samples:,.0f}) hold "
            f"{slow_s / times.wall_s:.0%} of the time of all samples"
        )
    else:
        rare = [number for number in _find_rare(waits).tolist() if facts.seen.get(number)]
        if times.samples or not rare:  # seen in the workers, or nowhere
            return None
        worst = max(rare, key=lambda number: waits[number])
        seconds = waits[worst]
        index = facts.seen[worst][0]
        evidence = f"{len(rare)} of {len(waits)} batches are so slow"
    return Cause(
        "slow_sample",
        share,
        f"Sample {index} takes {seconds:.2g} s: {evidence}.",
        f"Look at sample {index}: make it smaller, store it on the local disk, or leave it out.",
    )


def _count_slow(times: SampleTimes, waits_s: float) -> tuple[float, float]:
    """Return how many samples are slow, and their seconds; 0 where these are not few, or do not
    hold much of the time.
    """
    slow = (0.0, 0.0)
    count = 0.0
    slow_s = 0.0
    for bits in reversed(range(len(times.spread))):
        count += times.spread[bits][0]
        slow_s += times.spread[bits][1]
        least_s = 2**bits * 0.5e-9
        rest_s = (times.wall_s - slow_s) / max(times.samples - count, 1)
        is_rare = 0 < count <= _RARE * times.samples
        is_slow = least_s > max(_TIMES_SLOWER * rest_s, _LEAST_SLOW_S)
        if is_rare and is_slow and slow_s > (1 - _HOLDS) * max(times.wall_s, waits_s):
            slow = (count, slow_s)
    return slow
