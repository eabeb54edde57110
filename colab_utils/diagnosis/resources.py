"""What a loader uses up while it runs: memory of every worker and /dev/shm; and when memory will be full."""

from __future__ import annotations

import mmap
import os
import shutil
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import psutil

from colab_utils.runtime import find_free_memory, format_bytes, list_processes

__all__ = ["Reading", "ResourceLog", "Resources", "summarise_readings"]

_PAUSE_S = 0.25  # between two looks
_LEAST_READINGS, _MOST_READINGS = 5, 1000
_PAUSES = 12  # in the time so far, at most
_NEARLY_FULL = 0.8
_LEAST_GROWTH = 0.05  # of the memory: less is the allocator's breathing


class Reading(NamedTuple):
    """What was used at one moment, in bytes; ``batches`` had been delivered. Processes are told by their pid."""

    batches: int
    shm_bytes: int
    own_bytes: Mapping[int, int]
    """Of each process: what it does not share by way of a file or /dev/shm."""
    pss_bytes: Mapping[int, int]
    """At the last closer look; none before the first."""


@dataclass(frozen=True)
class Resources:
    """What a loader used. Memory is PSS (proportional set size), which counts pages that processes share once; in the
    first 100 seconds of `watch`, each process counts whole what it shares with the one that forked it.
    """

    main_mb: float
    """Of this process."""
    worker_mb: tuple[float, ...]
    """Of each worker."""
    growth_mb_per_batch: float | None
    """By how much the memory of these processes grows; None where it is not sure."""
    full_at_batch: int | None
    """When memory is full if it goes on to grow."""
    free_mb: float
    shm_used_mb: float
    """At most."""
    shm_total_mb: float
    growing: tuple[str, ...] = ()
    """Each process that grows, and by how much."""

    def __str__(self) -> str:
        workers = f", workers {' + '.join(f'{mb:,.0f}' for mb in self.worker_mb)} MB" if self.worker_mb else ""
        used = f"memory (PSS): this process {self.main_mb:,.0f} MB{workers}; {format_bytes(self.free_mb * 1e6)} free"
        shm = f"/dev/shm: {self.shm_used_mb:,.0f} of {self.shm_total_mb:,.0f} MB"
        return "\n".join([used, shm, *self.dangers])

    @property
    def dangers(self) -> tuple[str, ...]:
        """What will end the training if it goes on: one sentence each."""
        found = []
        if self.growth_mb_per_batch is not None:
            grows = f"Memory grows by {self.growth_mb_per_batch:.2f} MB a batch ({', '.join(self.growing)})"
            cure = "Keep no lists of Python objects in the dataset, and no losses with their graphs."
            found.append(f"{grows}: at step {self.full_at_batch:,} it is full. {cure}")
        if self.shm_used_mb > _NEARLY_FULL * self.shm_total_mb > 0:
            used = f"{self.shm_used_mb:,.0f} of {self.shm_total_mb:,.0f} MB"
            cure = "Use fewer workers, a smaller prefetch_factor, or make_loader, which does not need it."
            found.append(f"/dev/shm is nearly full: {used}. {cure}")
        return tuple(found)


class ResourceLog:
    """Readings of the resources that this process and its children use.

    One is taken each quarter of a second, later after each twelfth of the time so far. PSS is measured every ``pss_s``
    seconds: it takes the kernel 20 ms a process, which more often would slow down the loader.

    Example:
        >>> log = ResourceLog(pss_s=2)
        >>> log.look(batches=0)
        >>> summarise_readings(log.readings).main_mb > 1
        True
    """

    def __init__(self, *, pss_s: float) -> None:
        self.readings = deque[Reading](maxlen=_MOST_READINGS)
        self._began_s = self._due_s = perf_counter()
        self._pss_s, self._pss_due_s, self._pss = pss_s, self._began_s + pss_s, dict[int, int]()

    def look(self, batches: int) -> None:
        """Take a reading if one is due; there were so many batches."""
        if (now_s := perf_counter()) < self._due_s:
            return
        self._due_s = now_s + max(_PAUSE_S, (now_s - self._began_s) / _PAUSES)
        if now_s >= self._pss_due_s:
            self._pss, self._pss_due_s = _measure_pss(), now_s + self._pss_s
        self.readings.append(Reading(batches, shutil.disk_usage("/dev/shm").used, _measure_own(), self._pss))


def summarise_readings(readings: Sequence[Reading]) -> Resources:
    """The last state, the most that was used, and the slope of memory over batches where it is sure."""
    # workers may have ended since
    last = max(readings, key=lambda reading: (len(reading.pss_bytes), len(reading.own_bytes), reading.batches))
    used = {pid: used / 1e6 for pid, used in sorted((last.pss_bytes or last.own_bytes).items())}
    growth, free = _find_growth(readings), find_free_memory()
    total = sum(growth.values())
    names = {pid: "this process" if pid == os.getpid() else f"pid {pid}" for pid in growth}
    return Resources(
        main_mb=used.pop(os.getpid(), 0.0),
        worker_mb=tuple(used.values()),
        growth_mb_per_batch=total / 1e6 if growth else None,
        full_at_batch=readings[-1].batches + int(free / total) if growth else None,
        free_mb=free / 1e6,
        shm_used_mb=max(reading.shm_bytes for reading in readings) / 1e6,
        shm_total_mb=shutil.disk_usage("/dev/shm").total / 1e6,
        growing=tuple(f"{names[pid]}: {growth[pid] / 1e6:.2f}" for pid in sorted(growth)),
    )


def _find_growth(readings: Sequence[Reading]) -> dict[int, float]:
    """Bytes a batch, by the pid of each process that grows; none where all of it is little.

    The second half of a process's readings counts, when caches and pools are full. Growth is not sure where noise could
    be the reason, or where it slows down.
    """
    growth, grown, used = dict[int, float](), 0.0, 0
    running = [reading for reading in readings if reading.batches < readings[-1].batches]  # later, workers end
    for pid in {pid for reading in running for pid in reading.own_bytes}:
        seen = [(reading.batches, reading.own_bytes[pid]) for reading in running if pid in reading.own_bytes]
        batches, own = np.array(seen[len(seen) // 2 :], np.float64).T
        used, late = used + seen[-1][1], len(batches) // 2
        if len(batches) < _LEAST_READINGS or not np.ptp(batches[late:]):
            continue
        (slope, _), covariance = np.polyfit(batches, own, 1, cov=True)
        if slope > 3 * covariance[0, 0] ** 0.5 and np.polyfit(batches[late:], own[late:], 1)[0] > slope / 2:
            growth[pid], grown = float(slope), grown + float(slope * np.ptp(batches))
    return growth if grown > _LEAST_GROWTH * used else {}


def _measure_own() -> dict[int, int]:
    """Of this process and each one below it: what is in memory, less what it shares; in few lines, as it is often."""
    used = dict[int, int]()
    with suppress(OSError):  # a process may have ended
        for process in list_processes():
            with open(f"/proc/{process.pid}/statm", "rb") as file:
                _, resident, shared, *_ = file.read().split()
            used[process.pid] = (int(resident) - int(shared)) * mmap.PAGESIZE
    return used


def _measure_pss() -> dict[int, int]:
    """Of this process, and of each one below it that can be read."""
    used = dict[int, int]()
    for process in list_processes():
        with suppress(psutil.Error):  # it has ended, or is another user's
            used[process.pid] = process.memory_full_info().pss
    return used
