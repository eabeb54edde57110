"""Memory of a loader's processes that grows, and when it will be full."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter, thread_time
from typing import NamedTuple

import numpy as np

from colab_utils.diagnosis.system_calls import measure_memory_part
from colab_utils.machine import find_free_memory
from colab_utils.processes import list_processes

# Seconds between two readings; or this part of the time so far, if that is longer.
_PAUSE_S = 0.25
_PAUSE_SHARE = 1 / 12
# Between two readings lies at least so many times what one takes.
_PAUSE_TIMES = 25
_LEAST_READINGS = 5
# A slope counts if it is so many standard errors over 0.
_SURE = 3
# Growth as a share of the memory of all processes. Less is the allocator's breathing.
_LEAST_GROWTH = 0.05


_OWN_NAME = "this process"


class Reading(NamedTuple):
    """What was used at one moment; ``batches`` had been delivered."""

    batches: int
    own_bytes: Mapping[int, int]
    """Bytes of each process, by its pid, that it does not share by way of a file or /dev/shm. Of
    pages that a worker has in common with others it has a part: one that it writes to, or looks at
    as a Python object, is copied, and counts more."""


@dataclass(frozen=True)
class Growth:
    """Memory that grows while a loader runs."""

    mb_per_batch: float
    """MB a batch of all processes together."""
    full_at_batch: int
    """The batch at which memory is full if it goes on to grow."""
    by_process: Mapping[str, float]
    """MB a batch of this process and of the workers together, where they grow."""

    @property
    def cure(self) -> str:
        """Return what to do about the growth."""
        if list(self.by_process) == [_OWN_NAME]:
            return "Keep no losses with their graphs (.item()), and no batches."
        return (
            "Keep no samples in the dataset, and numpy arrays in place of lists of Python objects: "
            "each worker copies the objects that it only reads."
        )

    def __str__(self) -> str:
        who = ", ".join(f"{name}: {mb:.2f}" for name, mb in self.by_process.items())
        rate = f"Memory grows by {self.mb_per_batch:.2f} MB a batch ({who})"
        return f"{rate}: if it goes on, it is full at step {self.full_at_batch:,}."


class MemoryLog:
    """Readings of the memory of this process and its children: each quarter of a second, later
    after each twelfth of the time so far.

    Attributes:
        readings: so far.
        known_bytes: of this process that are no growth, as whoever looks on holds them.

    Example:
        >>> log = MemoryLog()
        >>> log.look(batches=0)
        >>> os.getpid() in log.readings[0].own_bytes
        True
    """

    def __init__(self) -> None:
        self.readings: list[Reading] = []
        self.known_bytes = 0
        self._began_s = perf_counter()
        self._due_s = self._began_s

    def look(self, batches: int) -> None:
        """Take a reading if one is due; there were so many batches."""
        now_s = perf_counter()
        if now_s < self._due_s:
            return
        cpu_began_s = thread_time()
        own_bytes = _measure_own()
        own_bytes[os.getpid()] -= self.known_bytes
        self.readings.append(Reading(batches, own_bytes))
        least_s = _PAUSE_TIMES * (thread_time() - cpu_began_s)
        self._due_s = now_s + max(_PAUSE_S, least_s, (now_s - self._began_s) * _PAUSE_SHARE)


def find_growth(readings: Sequence[Reading]) -> Growth | None:
    """Return by how much memory grows, of this process and of its workers; None where it does not,
    or little.
    """
    last = max((reading.batches for reading in readings), default=0)
    # After the last batch, workers end.
    running = [reading for reading in readings if reading.batches < last]
    if not running:
        return None
    newest = running[-1].own_bytes
    own = []
    workers = []
    for batches, own_bytes in running:
        own_part = own_bytes[os.getpid()]
        own.append((batches, own_part))
        # Workers that start or end meanwhile are no growth.
        if own_bytes.keys() == newest.keys():
            workers.append((batches, sum(own_bytes.values()) - own_part))
    by_process = {}
    for name, points in ((_OWN_NAME, own), ("workers", workers)):
        slope = _find_slope(points, _LEAST_GROWTH * sum(newest.values()))
        if slope > 0:
            by_process[name] = slope / 1e6
    mb_per_batch = sum(by_process.values())
    if not by_process:
        return None
    left = int(find_free_memory() / 1e6 / mb_per_batch)
    return Growth(mb_per_batch, last + left, by_process)


def _find_slope(points: Sequence[tuple[int, int]], least_bytes: float) -> float:
    """Return bytes a batch by which memory surely grows, at least by so many bytes in all; else 0.

    The second half of the readings counts, when caches and pools are full. Growth is not sure where
    noise could be the reason, or where it slows down.
    """
    batches, own_bytes = np.array(points[len(points) // 2 :], np.float64).T
    middle = len(batches) // 2
    if len(batches) < _LEAST_READINGS or np.ptp(batches[middle:]) == 0:
        return 0.0
    (slope, _), covariance = np.polyfit(batches, own_bytes, 1, cov=True)
    least = max(_SURE * covariance[0, 0] ** 0.5, least_bytes / np.ptp(batches))
    later_slope = np.polyfit(batches[middle:], own_bytes[middle:], 1)[0]
    return float(slope) if slope > least and later_slope > slope / 2 else 0.0


def _measure_own() -> dict[int, int]:
    """Return the memory of this process, less what it shares, and the part of each one below it."""
    own, *others = list_processes()
    memory = own.memory_info()
    own_bytes = {process.pid: measure_memory_part(process.pid) for process in others}
    own_bytes[own.pid] = memory.rss - memory.shared
    return own_bytes
