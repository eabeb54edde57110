"""Why a loop waits for batches, as told by the times of samples and by looks at the processes."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.diagnosis.cures import Cause, Stall, make_cause
from colab_utils.diagnosis.looks import HANDOFF, LOADER_THREAD, THREAD, WORKERS, Looks
from colab_utils.diagnosis.memory_growth import Growth
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.timing import CpuUse
from colab_utils.machine import count_cores
from colab_utils.units import format_bytes

Array = NDArray[Any]
# Slow batches count as rare if they are at most this share of all batches.
_RARE = 0.25
# Rare batches are the reason if they take at least this share of the time.
_HOLDS = 0.6
# A batch is not called slow below this many seconds.
_LEAST_SLOW_S = 0.05
# Reads that are slower than this wait mostly for the first byte of each file. Faster reads of large
# files are limited by the bandwidth. Small files say neither: their reads may have begun before
# their sample. This is a third of the bandwidth of Drive (`slow_drive.DRIVE_PROFILES`).
_SENDS_BYTES_PER_S = 20e6
_LARGE_BYTES = 1e6
# With fewer looks than this, it is not known what samples wait for.
_LEAST_LOOKS = 5
# A message leaves out what takes less than this share of the time of samples.
_WORTH_A_WORD = 0.1
# A lock is the cause if samples wait for it for at least this share of their time. If two workers
# only take turns, each waits for the lock for half of its time.
_IN_TURN = 0.3
# Workers count as idle if they were at work for less than `_IDLE` of the time of the waits. If most
# looks at the waits saw no worker at a sample, workers also count as idle if they were at work for
# less than `_MOSTLY_IDLE` of their time.
_IDLE = 0.5
_MOSTLY_IDLE = 0.25
# The hand-off is the cause if it was seen in this share of the looks. Its calls let other threads
# run, so looks meet it more often than its share of the time.
_TAKES_IN = 0.75
# What may take the time of a sample. The keys are the waits that `find_wait` names, and a few more.
# The values are the id of the cause, and the words for a message.
_EVIDENCE = {
    "work": ("work", "of work"),
    "queue": ("work", "until a core is free"),
    "read": ("read", "in reads of files"),
    "lock": ("lock", "for a lock that other processes hold"),
    "process": ("other_process", "for another process or the network"),
    "sleep": ("sleep", "asleep, in a call of sleep"),
    "thread": ("wait", "for another thread of the process, or a lock of its threads"),
    "unseen": ("wait", "for a reason that was not seen"),
    "collate": ("collate", "of work after it (collate_fn, or the hand-off of the batch)"),
}
_LOADED_BY = {
    "": "This process loads the samples itself, between its steps.",
    THREAD: "A thread of this process loads the samples.",
    LOADER_THREAD: "A thread of this process takes batches from a DataLoader.",
}


@dataclass(eq=False)
class LoopFacts:
    """What was noted of a loop, besides the times of its batches."""

    workers: int
    """Number of worker processes of the loader."""
    restarts: bool
    """Whether the workers start again in each pass."""
    is_slowed: bool
    """Whether the dataset's folder is slowed by `slow_down`, which sleeps in each read."""
    looks: Looks
    """Looks at the loop and its workers."""
    use: CpuUse = field(default_factory=CpuUse)
    """Use of the cores in all passes."""
    times: SampleTimes = field(default_factory=SampleTimes)
    """Times of samples in workers."""
    growth: Growth | None = None
    """How memory grows; None if it does not."""
    seen: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The samples that workers were loading while the loop waited for a batch, by the number of the
    batch.
    """
    stalls: list[Stall] = field(default_factory=list)
    """Every stall so far."""
    left_at_once: int = 0
    """Number of passes that the loop left after one batch."""


def find_rare(seconds: Array) -> NDArray[np.int64]:
    """Return the numbers of the few batches that together take most of the time; none if the time
    is spread over many batches.
    """
    large = np.flatnonzero(seconds > max(5 * float(np.median(seconds)), _LEAST_SLOW_S))
    holds = seconds[large].sum() >= _HOLDS * seconds.sum()
    return large if 0 < len(large) <= _RARE * len(seconds) and holds else large[:0]


def explain_starts(starts: Array, batches: int, loop_s: float, facts: LoopFacts) -> Cause:
    """Explain why the first batch of each later pass is late: this process is busy with other code,
    workers start again, or any batch takes about as long to load. ``batches`` were loaded in all.
    """
    share = float(starts.sum()) / loop_s
    # A loop that ends by itself may leave one pass like this.
    if facts.left_at_once > max(1, len(starts) / 2):
        why = (
            f"The loop left {facts.left_at_once} passes after one batch, and waited "
            f"{starts.mean():.2g} s for each."
        )
        return make_cause("restarts", share, why, cure="iterator")
    why = (
        f"Each pass after the first waits {starts.mean():.2g} s for its first batch (later "
        f"passes: {len(starts)})."
    )
    line = facts.looks.describe_line("start")
    if line:
        return make_cause("main_process", share, why + line)
    load_s = facts.times.wall_s / batches
    if 2 * load_s > starts.mean():
        why += f" A worker takes {load_s:.2g} s to load any batch."
    elif facts.restarts:
        return make_cause("restarts", share, why)
    return make_cause("starts", share, why)


def explain_waits(waits: Array, loop_s: float, facts: LoopFacts) -> Cause:
    """Explain why batches come late. The cause lies in this process, in the work after samples, in
    one slow sample, or in all samples.
    """
    share = float(waits.sum()) / loop_s
    times = facts.times
    line = facts.looks.describe_line("wait")
    if line:
        why = f"The loop is late because of what this process does before it takes a batch.{line}"
        return make_cause("main_process", share, why)
    at_work_s = times.wall_s + max(0.0, times.worker_cpu_s - times.cpu_s)
    is_idle = at_work_s < _IDLE * float(waits.sum())
    if not is_idle:
        slow_sample = _explain_slow_sample(waits, share, facts)
        if slow_sample:
            return slow_sample
        is_rare = at_work_s < _MOSTLY_IDLE * facts.workers * loop_s
        is_idle = is_rare and not facts.looks.is_usual("sample")
    part, looks = facts.looks.measure_place("wait", HANDOFF)
    if is_idle and part >= _TAKES_IN:
        why = f"During waits, this process is busy receiving what workers send ({looks})."
        return make_cause("hand-off", part * share, why)
    is_after = facts.looks.is_usual("collate") and not facts.looks.is_usual("sample")
    if not times.samples or not (is_idle or is_after):
        return _explain_samples(share, loop_s, facts)
    if is_after:
        why = "Workers are busy after their samples, in collate_fn or handing over batches."
        return make_cause("collate", share, why + facts.looks.describe_line("collate", "A worker"))
    why = "Workers are mostly idle, and the loop waits for a batch. The reason was not seen."
    return make_cause("wait", share, why, cure="idle")


def _explain_samples(share: float, loop_s: float, facts: LoopFacts) -> Cause:
    """Explain what takes most of the time of samples."""
    times = facts.times
    evidence = weigh_evidence(facts)
    # A wait for a core may come together with a wait for a lock: while the worker that holds the
    # lock waits for a core, other workers wait for the lock. So the wait for a core counts only if
    # it takes more than half of the time. What waits for a core is at work.
    rest = {name: seconds for name, seconds in evidence.items() if name != "queue"}
    largest = max(rest, key=rest.__getitem__)
    if waits_for_cores(evidence):
        largest = max(("work", "collate"), key=rest.__getitem__)
    # A lock may be the cause even if work takes longer than the wait for the lock: the worker that
    # holds the lock is at work.
    if evidence.get("lock", 0.0) >= _IN_TURN * sum(evidence.values()):
        largest = "lock"
    id, _ = _EVIDENCE[largest]
    cure = id
    if id == "lock":
        del rest["lock"]
        # The worker that has the lock may itself wait for another process, as at a queue of
        # multiprocessing.
        if max(rest, key=rest.__getitem__) == "process":
            id = "other_process"
            cure = "turns"
    why = _describe_evidence(evidence, times, facts.looks)
    place = facts.looks.find_place("wait")
    is_alone = not facts.workers and place not in (WORKERS, HANDOFF)
    if is_alone or place in (THREAD, LOADER_THREAD):
        why = f"{_LOADED_BY.get(place, _LOADED_BY[''])} {why}"
    # Workers load while this process trains, whatever a sample waits for.
    if is_alone and id != "read" and (id, place) != ("wait", LOADER_THREAD):
        cure = "alone"
    # A worker looks at its main thread four times a second, and another thread sends its batches.
    # So work after samples that fewer than one look a second saw is the sending.
    if id == "collate" and facts.looks.places[id].kinds.total() < evidence[id]:
        id = "hand-off"
        cure = id
        why += " Workers were hardly seen in collate_fn, so it is the hand-off."
    if id == "work":
        why += f" {facts.use.own_s / loop_s:.1f} of {count_cores()} cores are busy with it."
    if id == "read" and times.samples:
        cure, speed = _explain_reads(times)
        why += speed
    phase = "collate" if id == "collate" else "sample"
    why += facts.looks.describe_line(phase, "A worker" if facts.workers else "This process")
    return make_cause(id, share, why, cure=cure)


def _explain_reads(times: SampleTimes) -> tuple[str, str]:
    """Return the key of the cure of slow reads, and a sentence on their speed."""
    read_bytes = times.bytes_read / times.samples
    bytes_per_s = times.bytes_read / max(times.wall_s - times.cpu_s, 1e-9)
    speed = f" A sample reads {format_bytes(read_bytes)} at {format_bytes(bytes_per_s)}/s"
    if bytes_per_s <= _SENDS_BYTES_PER_S:
        return "read", f"{speed}: most of the wait is for the first byte of each file."
    if read_bytes < _LARGE_BYTES:
        return "read", f"{speed}."
    return "bandwidth", f"{speed}: the bandwidth is the limit."


def waits_for_cores(evidence: Mapping[str, float]) -> bool:
    """Return whether samples wait for a core for more than half of their time."""
    return 2 * evidence.get("queue", 0.0) > sum(evidence.values())


def weigh_evidence(facts: LoopFacts) -> dict[str, float]:
    """Return how many seconds of the samples' time each key of `_EVIDENCE` takes. If no samples
    were timed, return looks in place of seconds.
    """
    times = facts.times
    looks = facts.looks
    count = looks.waits.total()
    is_seen = count >= _LEAST_LOOKS
    wall_s = times.wall_s
    cpu_s = times.cpu_s
    if not times.samples:
        if not is_seen:
            return {"unseen": 1.0}
        wall_s = float(count)
        cpu_s = float(looks.waits[""])
    evidence = {"work": cpu_s, "collate": max(0.0, times.worker_cpu_s - times.cpu_s)}
    left_s = max(0.0, wall_s - cpu_s)
    if not is_seen:
        return {**evidence, "unseen": left_s}
    for seen in filter(None, [*looks.waits]):
        name = "read" if facts.is_slowed and seen == "sleep" else seen
        seconds = min(left_s, wall_s * looks.waits[seen] / count)
        evidence[name] = evidence.get(name, 0.0) + seconds
        left_s -= seconds
    # The rest of the time is neither CPU time nor a wait that was seen. A thread of the worker was
    # ready to run then, but had no core.
    evidence["queue"] = left_s
    return evidence


def _describe_evidence(evidence: Mapping[str, float], times: SampleTimes, looks: Looks) -> str:
    """Return in words what takes the time of a sample, the largest part first. Small parts are left
    out.
    """
    if [*evidence] == ["unseen"]:
        return "What samples wait for was not seen."
    whole = sum(evidence.values())
    unit = "%"
    scale = 100 / whole
    start = f"In {looks.waits.total()} looks at samples"
    if times.samples:
        unit = " ms"
        scale = 1000 / times.samples
        start = f"A sample takes {_round(scale * whole)} ms"
    parts = [
        f"{_round(scale * evidence[name])}{unit} {_EVIDENCE[name][1]}"
        for name in sorted(evidence, key=evidence.__getitem__, reverse=True)
        if evidence[name] >= _WORTH_A_WORD * whole
    ]
    return f"{start}: {', '.join(parts)}."


def _round(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _explain_slow_sample(waits: Array, share: float, facts: LoopFacts) -> Cause | None:
    """Explain that one sample is slow, if most of the waiting time belongs to a few batches, and
    the loop waited for each of them while this sample was loaded.
    """
    late = defaultdict[int, list[int]](list)
    for number in find_rare(waits).tolist():
        for sample in facts.seen.get(number, ()):
            late[sample].append(number)
    parts = {sample: waits[late[sample]].sum() / waits.sum() for sample in late}
    slow = [sample for sample in late if len(late[sample]) > 1 and parts[sample] > _HOLDS]
    # If several samples always come together, it is not known which of them is slow.
    if len(slow) != 1:
        return None
    (sample,) = slow
    why = (
        f"{len(late[sample])} batches waited {waits[late[sample]].mean():.2g} s each while sample "
        f"{sample} was loaded: {parts[sample]:.0%} of all waits."
    )
    return make_cause("slow_sample", share, why, sample=sample)
