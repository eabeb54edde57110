"""Why a loop waits for batches, as told by the times of samples and by looks at the processes."""

from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.diagnosis.cures import Cause, make_cause
from colab_utils.diagnosis.looks import HANDOFF, LEAST_LOOKS, THREAD, WORKERS, Looks
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.record import LoopRecord

Array = NDArray[Any]
# Slow batches count as rare if they are at most this share of all batches.
_RARE = 0.25
# Rare batches are the reason if they take at least this share of the time.
_HOLDS = 0.6
# A batch is not called slow below this many seconds.
_LEAST_SLOW_S = 0.05
# A message leaves out what takes less than this share of the time of samples.
_WORTH_A_WORD = 0.1
# A lock is the cause if samples wait for it for at least this share of their time. If two workers
# only take turns, each waits for the lock for half of its time.
_IN_TURN = 0.3
# Workers are idle if they are at work for less than this share of their time, and most looks at the
# waits saw no worker at a sample.
_IDLE = 0.25
# The hand-off is the cause if it was seen in this share of the looks. Its calls let other threads
# run, so looks meet it more often than its share of the time.
_TAKES_IN = 0.75
# What may take the time of a sample: "queue", or the id of a cause, and the words for a message.
_EVIDENCE = {
    "work": "of work",
    "queue": "until a core is free",
    "read": "in reads of files",
    "lock": "for a lock that other processes hold",
    "other_process": "for another process or the network",
    "sleep": "asleep, in a call of sleep",
    "wait": "for another thread of the process, or for a reason that was not seen",
    "collate": "of work after it (collate_fn, or the hand-off of the batch)",
}


def find_rare(seconds: Array) -> NDArray[np.int64]:
    """Return the numbers of the few batches that together take most of the time; none if the time
    is spread over many batches.
    """
    large = np.flatnonzero(seconds > max(5 * float(np.median(seconds)), _LEAST_SLOW_S))
    holds = seconds[large].sum() >= _HOLDS * seconds.sum()
    return large if 0 < len(large) <= _RARE * len(seconds) and holds else large[:0]


def explain_waits(waits: Array, loop_s: float, record: LoopRecord) -> Cause:
    """Explain why batches come late. The cause lies in this process, in the work after samples, in
    one slow sample, or in all samples.
    """
    share = float(waits.sum()) / loop_s
    looks = record.looks
    line = looks.describe_line("wait")
    if line:
        why = f"The loop is late because of what this process does before it takes a batch.{line}"
        return make_cause("main_process", share, why)
    slow_sample = _explain_slow_sample(waits, share, record)
    if slow_sample:
        return slow_sample
    times = record.monitor.read_times()
    at_work_s = times.wall_s + times.other_cpu_s
    is_at_sample = looks.is_usual("sample")
    is_idle = not is_at_sample and at_work_s < _IDLE * record.workers * loop_s
    part, seen = looks.measure_place("wait", HANDOFF)
    if is_idle and part >= _TAKES_IN:
        why = f"During waits, this process is busy receiving what workers send ({seen})."
        return make_cause("hand-off", part * share, why)
    if times.samples and looks.is_usual("collate") and not is_at_sample:
        why = "Workers are busy after their samples, in collate_fn or handing over batches."
        return make_cause("collate", share, why + looks.describe_line("collate", "A worker"))
    if times.samples and is_idle:
        why = "Workers are mostly idle, and the loop waits for a batch. The reason was not seen."
        return make_cause("wait", share, why, cure="idle")
    return _explain_samples(share, times, record)


def _explain_samples(share: float, times: SampleTimes, record: LoopRecord) -> Cause:
    """Explain what takes most of the time of samples."""
    looks = record.looks
    evidence = weigh_evidence(record)
    # A wait for a core may come together with a wait for a lock: while the worker that holds the
    # lock waits for a core, other workers wait for the lock. So the wait for a core counts only if
    # it takes more than half of the time. What waits for a core is at work.
    rest = {name: seconds for name, seconds in evidence.items() if name not in ("queue", "lock")}
    id = max(rest, key=rest.__getitem__)
    # A lock may be the cause even if work takes longer than the wait for the lock: the worker that
    # holds the lock is at work. It may itself wait for another process, as at a queue of
    # multiprocessing.
    if evidence.get("lock", 0.0) >= _IN_TURN * sum(evidence.values()):
        id = "other_process" if id == "other_process" else "lock"
    elif waits_for_cores(evidence):
        id = max(("work", "collate"), key=rest.__getitem__)
    why = _describe_evidence(evidence, times, looks)
    place = looks.find_place("wait")
    is_alone = not record.workers and place not in (WORKERS, HANDOFF)
    if place == THREAD:
        why = f"A thread of this process loads the samples. {why}"
    elif is_alone:
        why = f"This process loads the samples itself, between its steps. {why}"
    # A worker looks at its main thread four times a second, and another thread sends its batches.
    # So work after samples that fewer than one look a second saw is the sending.
    if id == "collate" and looks.places[id].total() < evidence[id]:
        id = "hand-off"
        why += " Workers were hardly seen in collate_fn, so it is the hand-off."
    who = "A worker" if record.workers else "This process"
    why += looks.describe_line("collate" if id == "collate" else "sample", who)
    # Workers load while this process trains, whatever a sample waits for.
    return make_cause(id, share, why, cure="alone" if is_alone and id != "read" else id)


def waits_for_cores(evidence: Mapping[str, float]) -> bool:
    """Return whether samples wait for a core for more than half of their time."""
    return 2 * evidence.get("queue", 0.0) > sum(evidence.values())


def weigh_evidence(record: LoopRecord) -> dict[str, float]:
    """Return how many seconds of the samples' time each key of `_EVIDENCE` takes. If no samples
    were timed, return looks in place of seconds.
    """
    times = record.monitor.read_times()
    waits = record.looks.waits
    count = waits.total()
    if not times.samples and count >= LEAST_LOOKS:
        times = SampleTimes(0, float(count), float(waits[""]))
    left_s = max(0.0, times.wall_s - times.cpu_s)
    evidence = {"work": times.cpu_s, "collate": times.other_cpu_s}
    if count < LEAST_LOOKS:
        return {**evidence, "wait": left_s or 1.0}
    for seen in filter(None, [*waits]):
        name = "read" if record.is_slowed and seen == "sleep" else seen
        seconds = min(left_s, times.wall_s * waits[seen] / count)
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
    whole = sum(evidence.values())
    unit = "%"
    scale = 100 / whole
    start = f"In {looks.waits.total()} looks at samples"
    if times.samples:
        unit = " ms"
        scale = 1000 / times.samples
        start = f"A sample takes {scale * whole:,.1f} ms"
    parts = [
        f"{scale * evidence[name]:,.1f}{unit} {_EVIDENCE[name]}"
        for name in sorted(evidence, key=evidence.__getitem__, reverse=True)
        if evidence[name] >= _WORTH_A_WORD * whole
    ]
    return f"{start}: {', '.join(parts)}."


def _explain_slow_sample(waits: Array, share: float, record: LoopRecord) -> Cause | None:
    """Explain that one sample is slow, if most of the waiting time belongs to a few batches, and
    the loop waited for each of them while this sample was loaded.
    """
    late = defaultdict[int, list[float]](list)
    for number in find_rare(waits).tolist():
        for sample in record.seen.get(number, ()):
            late[sample].append(waits[number])
    slow = [
        sample
        for sample, seconds in late.items()
        if len(seconds) > 1 and sum(seconds) > _HOLDS * waits.sum()
    ]
    # If several samples always come together, it is not known which of them is slow.
    if len(slow) != 1:
        return None
    (sample,) = slow
    why = (
        f"{len(late[sample])} batches waited {np.mean(late[sample]):.2g} s each while sample "
        f"{sample} was loaded: {sum(late[sample]) / waits.sum():.0%} of all waits."
    )
    return make_cause("slow_sample", share, why, sample=sample)
