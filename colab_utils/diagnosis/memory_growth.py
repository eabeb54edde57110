"""Growing memory of a loop's processes: how fast it grows, and when it will be full."""

import os
from collections.abc import Mapping, Sequence
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np

from colab_utils.diagnosis.cures import Cause
from colab_utils.diagnosis.system_calls import measure_memory, measure_memory_part
from colab_utils.machine import find_free_memory
from colab_utils.processes import list_pids

# Two readings are this many seconds apart, or this share of the time since the log began, whichever
# is longer.
_PAUSE_S = 0.25
_PAUSE_SHARE = 1 / 12
# To measure workers is costly, because Linux goes through all of their pages. So the pause is also
# this many times the CPU time of a reading; fewer if memory has grown by `_GROWN_BYTES`.
_STEADY_TIMES = 500
_GROWING_TIMES = 25
_GROWN_BYTES = 2_000_000
_LEAST_READINGS = 5
# A slope counts if it is more than this many standard errors above 0.
_SURE = 3
# Growth counts if it is more than this share of the memory of all processes. Allocators cause
# smaller changes.
_LEAST_GROWTH = 0.05


class Reading(NamedTuple):
    """Memory that was used at one moment, after ``batches`` batches."""

    batches: int
    own_bytes: Mapping[int, int]
    """Bytes of each process, by its pid, without files. Batches of workers lie in /dev/shm, and
    count for this process while somebody keeps them. Several workers may share a page of memory;
    each then counts a part of it. When a worker writes to the page, it gets its own copy and counts
    all of it. Reading a Python object writes too: it changes the count of references.
    """


_KEPT = "Keep no batches. Keep losses as numbers (loss.item()), without their graphs."
_COPIED = (
    "Keep no samples in the dataset. Use numpy arrays in place of lists of Python objects: a "
    "worker copies even those objects that it only reads. If samples become larger in the course "
    "of a pass, the growth ends with the pass."
)


class MemoryLog:
    """Readings of the memory of this process and its children: at first every quarter of a second,
    later less often.

    Attributes:
        readings: All readings so far.

    Example:
        >>> log = MemoryLog()
        >>> log.look(batches=0)
        >>> os.getpid() in log.readings[0].own_bytes
        True
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self._began_s = perf_counter()
        self._due_s = self._began_s
        self._used_bytes = 0

    def look(self, batches: int) -> None:
        """Take a reading if one is due, after ``batches`` batches so far."""
        now_s = perf_counter()
        # Between two batches nothing grows, and the long pause of steady memory would follow.
        if now_s < self._due_s or (self.readings and self.readings[-1].batches == batches):
            return
        cpu_began_s = thread_time()
        own_bytes = {pid: measure_memory_part(pid) for pid in list_pids()[1:]}
        own_bytes[os.getpid()] = measure_memory()
        self.readings.append(Reading(batches, own_bytes))
        used_bytes = sum(own_bytes.values())
        times = _GROWING_TIMES if used_bytes - self._used_bytes > _GROWN_BYTES else _STEADY_TIMES
        self._used_bytes = used_bytes
        costs_s = times * (thread_time() - cpu_began_s)
        self._due_s = now_s + max(_PAUSE_S, (now_s - self._began_s) * _PAUSE_SHARE, costs_s)


def find_growth(readings: Sequence[Reading]) -> Cause | None:
    """Return how fast the memory of this process and of its workers grows, and what to do about
    it; None if it does not grow, or only a little.
    """
    # Readings after the last batch are left out, because workers end then.
    running = [reading for reading in readings if reading.batches < readings[-1].batches]
    if not running:
        return None
    newest = running[-1].own_bytes
    own = {batches: own_bytes[os.getpid()] for batches, own_bytes in running}
    # For the workers, a reading counts only if it has the same workers as the newest reading.
    # Memory that comes or goes with a worker is no growth.
    workers = {
        batches: sum(own_bytes.values()) - own[batches]
        for batches, own_bytes in running
        if own_bytes.keys() == newest.keys()
    }
    least_bytes = _LEAST_GROWTH * sum(newest.values())
    own_mb = _find_slope(own, least_bytes) / 1e6
    workers_mb = _find_slope(workers, least_bytes) / 1e6
    mb = own_mb + workers_mb
    if not mb:
        return None
    full_at = readings[-1].batches + int(find_free_memory() / 1e6 / mb)
    why = (
        f"Memory grows by {mb:.2f} MB a batch (this process: {own_mb:.2f}, workers: "
        f"{workers_mb:.2f}): if this goes on, memory is full at batch {full_at:,}."
    )
    return Cause("memory", 0.0, why, _COPIED if workers_mb else _KEPT)


def _find_slope(own_bytes: Mapping[int, int], least_bytes: float) -> float:
    """Return the bytes by which memory grows with each batch. The keys of ``own_bytes`` are the
    numbers of batches. Return 0 if it grows by less than
    ``least_bytes`` in all, if noise could be the reason, or if the growth slows down.

    Only the second half of the readings is used: by then, caches and pools are full.
    """
    points = np.array([*own_bytes.items()], np.float64)
    batches, used = points[len(points) // 2 :].T
    middle = len(batches) // 2
    if len(batches) < _LEAST_READINGS:
        return 0.0
    (slope, _), covariance = np.polyfit(batches, used, 1, cov=True)
    least = max(_SURE * covariance[0, 0] ** 0.5, least_bytes / np.ptp(batches))
    later_slope = np.polyfit(batches[middle:], used[middle:], 1)[0]
    return float(slope) if slope > least and later_slope > slope / 2 else 0.0
