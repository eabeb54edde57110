"""What batches are waited for: by what was counted of samples, and seen of the workers and of this
process.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from colab_utils.diagnosis.cures import Cause, make_cause
from colab_utils.diagnosis.looks import HANDOFF, SAMPLE, WORKERS, Looks
from colab_utils.diagnosis.memory_growth import Growth
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.timing import CpuUse
from colab_utils.machine import count_cores
from colab_utils.units import format_bytes

Array = NDArray[Any]
# Of the batches.
_RARE = 0.25
# Of what a part of the loop takes, by rare batches.
_HOLDS = 0.6
# Seconds from which a batch may be called slow.
_LEAST_SLOW_S = 0.05
# A third of what Drive gives where it is reached (`slow_drive.DRIVE_PROFILES`).
_SENDS_MB_PER_S = 20
# Looks at workers that tell what they wait for.
_LEAST_LOOKS = 5
# A part of the time of samples that is worth a word.
_WORTH_A_WORD = 0.1
# Of the time of samples. Two workers that only take turns wait for half of it.
_IN_TURN = 0.3
# Workers that were at work for less than this part of the waits were idle.
_IDLE = 0.5
# What takes the time of samples, by the names of `find_wait`: the cause, and its words.
_EVIDENCE = {
    "work": ("work", "of work"),
    "queue": ("work", "until a core is free"),
    "read": ("read", "in reads of files"),
    "lock": ("lock", "for a lock that other processes hold"),
    "process": ("other_process", "for another process or the network"),
    "sleep": ("sleep", "asleep, in a call of sleep"),
    "thread": ("wait", "for a lock, or a thread of its own"),
    "unseen": ("wait", "for what was not seen"),
    "collate": ("collate", "of work after it, in collate_fn or on the way here"),
}


class LoopFacts(Protocol):
    """What was noted while a loop ran, beside its times."""

    workers: int
    """Worker processes of the loader."""
    restarts: bool
    """Whether these start anew in each pass."""
    use: CpuUse
    """Of the cores, in all passes."""
    is_slowed: bool
    """Whether the dataset's folder is slowed by `slow_down`, which sleeps in each read."""
    times: SampleTimes
    looks: Looks
    seen: dict[int, tuple[int, ...]]
    """Batch to the samples that were loaded while it was waited for."""
    stalls: list[Any]
    growth: Growth | None


def find_rare(seconds: Array) -> NDArray[np.int64]:
    """Return the few batches that hold most of it; none where many share it."""
    large = np.flatnonzero(seconds > max(5 * float(np.median(seconds)), _LEAST_SLOW_S))
    holds = seconds[large].sum() >= _HOLDS * seconds.sum()
    return large if 0 < len(large) <= _RARE * len(seconds) and holds else large[:0]


def explain_starts(starts: Array, loop_s: float, facts: LoopFacts) -> Cause:
    """Explain why the first batch of each later pass is late: this process is at a line of its own,
    or workers start anew.
    """
    share = float(starts.sum()) / loop_s
    each_s = f"{starts.mean():.2g} s each"
    why = f"Passes after the first ({len(starts)}) wait {each_s} for their first batch"
    line = _find_own_line("start", facts)
    if line:
        return make_cause("main_process", share, f"{why}: {line}.")
    if facts.restarts:
        return make_cause("restarts", share, f"{why}: workers start anew.")
    return make_cause("restarts", share, f"{why}.", cure="starts")


def _find_own_line(phase: str, facts: LoopFacts) -> str:
    """Return in words at which line of its own this process was in a phase; "" where it waited."""
    place, looks = facts.looks.find_place(phase)
    if place in ("", WORKERS, HANDOFF, SAMPLE):
        return ""
    return f"this process is at {place} ({looks})"


def explain_waits(waits: Array, loop_s: float, facts: LoopFacts) -> Cause:
    """Explain why batches come late: by this process, a slow sample, or what takes the time of all
    samples.
    """
    share = float(waits.sum()) / loop_s
    times = facts.times
    line = _find_own_line("wait", facts)
    if line:
        return make_cause("main_process", share, f"Before it takes a batch, {line}.")
    at_work_s = times.wall_s + max(0.0, times.worker_cpu_s - times.cpu_s)
    is_idle = at_work_s < _IDLE * float(waits.sum())
    place, looks = facts.looks.find_place("wait")
    if is_idle and place == HANDOFF:
        why = f"This process takes in what workers send ({looks} at a wait)."
        return make_cause("hand-off", share, why)
    if is_idle and times.samples and facts.looks.works_outside:
        why = "Workers are busy after their samples, in collate_fn or on the way here."
        return make_cause("collate", share, why)
    if is_idle and times.samples:
        why = "Workers are idle while a batch is waited for: what it waits for was not seen."
        return make_cause("wait", share, why, cure="idle")
    return _explain_slow_sample(waits, share, facts) or _explain_samples(share, loop_s, facts)


def _explain_samples(share: float, loop_s: float, facts: LoopFacts) -> Cause:
    """Name what takes most of the time of samples, by the evidence for each."""
    times = facts.times
    evidence = weigh_evidence(facts)
    # Where a worker waits for a core, others may wait for what it holds.
    rest = {name: seconds for name, seconds in evidence.items() if name != "queue"}
    largest = max(rest, key=lambda name: rest[name])
    if waits_for_cores(evidence):
        largest = "queue"
    # What a worker does while it holds a lock, the others wait for.
    if evidence.get("lock", 0.0) >= _IN_TURN * sum(evidence.values()):
        largest = "lock"
    id, _ = _EVIDENCE[largest]
    cure = id
    why = _describe_evidence(evidence, times, facts.looks)
    if not facts.workers:
        why = f"This process loads the samples itself, between its steps. {why}"
        cure = "alone" if id in ("work", "wait") else id
    if id == "work":
        why += f" {facts.use.own_s / loop_s:.1f} of {count_cores()} cores are busy with it."
    if id == "read" and times.samples:
        mb_per_s = times.bytes_read / 1e6 / max(times.wall_s - times.cpu_s, 1e-9)
        limit = "it waits mostly for the first byte of each file"
        if mb_per_s > _SENDS_MB_PER_S:
            cure = "bandwidth"
            limit = "it is the bandwidth"
        why += f" It reads {format_bytes(times.bytes_read / times.samples)}, "
        why += f"at {mb_per_s:.2g} MB/s: {limit}."
    return make_cause(id, share, why, cure=cure)


def waits_for_cores(evidence: Mapping[str, float]) -> bool:
    """Return whether samples wait for a core for more than half of their time."""
    return 2 * evidence.get("queue", 0.0) > sum(evidence.values())


def weigh_evidence(facts: LoopFacts) -> dict[str, float]:
    """Return seconds of samples by what takes them, a key of `_EVIDENCE`; where no samples were
    seen, looks.
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
    for name, number in looks.waits.items():
        if not name:
            continue
        if facts.is_slowed and name == "sleep":
            name = "read"
        seconds = min(left_s, wall_s * number / count)
        evidence[name] = evidence.get(name, 0.0) + seconds
        left_s -= seconds
    # In the other looks a thread of the worker could run, and had no core.
    evidence["queue"] = left_s
    return evidence


def _describe_evidence(evidence: Mapping[str, float], times: SampleTimes, looks: Looks) -> str:
    """Say what takes the time of a sample, the most first; what takes little is left out."""
    whole = sum(evidence.values())
    unit = "%"
    scale = 100 / whole
    start = f"In {looks.waits.total()} looks at samples"
    if times.samples:
        unit = " ms"
        scale = 1000 / times.samples
        start = f"A sample takes {scale * whole:.3g} ms"
    parts = []
    for name in sorted(evidence, key=lambda name: -evidence[name]):
        if evidence[name] >= _WORTH_A_WORD * whole:
            parts.append(f"{scale * evidence[name]:.3g}{unit} {_EVIDENCE[name][1]}")
    return f"{start}: {', '.join(parts)}."


def _explain_slow_sample(waits: Array, share: float, facts: LoopFacts) -> Cause | None:
    """Name the sample that a few batches wait for, which hold most of all waits."""
    batches: dict[int, list[int]] = {}
    # The watch goes on to note samples.
    for number, samples in [*facts.seen.items()]:
        for sample in samples:
            if number < len(waits):
                batches.setdefault(sample, []).append(number)
    slow = []
    for sample, numbers in batches.items():
        is_rare = 1 < len(numbers) <= _RARE * len(waits)
        if is_rare and waits[numbers].sum() > _HOLDS * waits.sum():
            slow.append(sample)
    # Of samples that are always in one batch, nobody knows which is slow.
    if len(slow) != 1:
        return None
    slow_waits = waits[batches[slow[0]]]
    part = slow_waits.sum() / waits.sum()
    why = f"{len(slow_waits)} batches waited {slow_waits.mean():.2g} s each while sample {slow[0]} "
    why += f"was loaded: {part:.0%} of all waits."
    return make_cause("slow_sample", share, why, sample=slow[0])
