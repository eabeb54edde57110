"""What a loader uses up while it runs: memory of every worker and /dev/shm; and when memory will be full."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import NamedTuple

import numpy as np
import psutil

from colab_utils.runtime import find_free_memory, format_bytes

__all__ = ["Reading", "Resources", "summarise_readings", "watch_resources"]

_LONGEST_LOOK_S = 0.1  # that counts: finding the PSS of a process takes the kernel 20 ms
_LEAST_READINGS = 8
_NEARLY_FULL = 0.8
_LEAST_GROWTH = 0.05  # of the memory: less is the allocator's breathing


class Reading(NamedTuple):
    """What was used at one moment, in bytes; ``batches`` had been delivered."""

    batches: int
    free_bytes: int
    shm_bytes: int
    main_bytes: int
    worker_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Resources:
    """What a loader used. Memory is PSS (proportional set size), which counts pages that processes share once."""

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
            found.append(
                f"Memory grows by {self.growth_mb_per_batch:.2f} MB a batch: at step {self.full_at_batch:,} it is "
                "full. Keep no lists of Python objects in the dataset, and no losses with their graphs."
            )
        if self.shm_used_mb > _NEARLY_FULL * self.shm_total_mb > 0:
            found.append(
                f"/dev/shm is nearly full: {self.shm_used_mb:,.0f} of {self.shm_total_mb:,.0f} MB. Use fewer workers, "
                "a smaller prefetch_factor, or make_loader, which does not need it."
            )
        return tuple(found)


@contextmanager
def watch_resources(
    count_batches: Callable[[], int], *, delay_s: float = 0, interval_s: float = 0.25, share: float = 0.03
) -> Iterator[list[Reading]]:
    """Take a reading each ``interval_s`` seconds, in a thread; ``count_batches`` tells how many batches there were.

    The first one is taken after ``delay_s``. Processes are looked into as often as takes this ``share`` of the time,
    for more would slow down the loader.

    Example:
        >>> with watch_resources(lambda: 0) as readings:
        ...     pass
        >>> summarise_readings(readings).main_mb > 1
        True
    """
    readings: list[Reading] = []
    ended = threading.Event()

    def watch() -> None:
        due_s, pause_s = 0.0, delay_s
        while not (delay_s or readings) or not ended.wait(pause_s):
            if (began_s := perf_counter()) >= due_s:
                memory = _measure_processes()
                due_s = perf_counter() + min(perf_counter() - began_s, _LONGEST_LOOK_S) / share
            shm = shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0
            readings.append(Reading(count_batches(), find_free_memory(), shm, memory[0], memory[1:]))
            pause_s = interval_s

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield readings
    finally:
        ended.set()
        thread.join()


def summarise_readings(readings: Sequence[Reading]) -> Resources:
    """The last state, the most that was used, and the slope of memory over batches where it is sure."""
    # workers may have ended since
    last = max(readings, key=lambda reading: (len(reading.worker_bytes), reading.batches))
    running = [reading for reading in readings if reading.batches < readings[-1].batches]  # later, workers end
    growth, free = _find_growth(running), find_free_memory()
    return Resources(
        main_mb=last.main_bytes / 1e6,
        worker_mb=tuple(used / 1e6 for used in last.worker_bytes),
        growth_mb_per_batch=None if growth is None else growth / 1e6,
        full_at_batch=None if growth is None else readings[-1].batches + int(free / growth),
        free_mb=free / 1e6,
        shm_used_mb=max(reading.shm_bytes for reading in readings) / 1e6,
        shm_total_mb=shutil.disk_usage("/dev/shm").total / 1e6 if os.path.isdir("/dev/shm") else 0,
    )


def _find_growth(readings: Sequence[Reading]) -> float | None:
    """Bytes a batch, by what the machine has less free in the second half, when caches and pools are full; None where
    noise or another program could be the reason, where it slows down, or where workers came and went.
    """
    half = readings[len(readings) // 2 :]
    batches = np.array([reading.batches for reading in half], np.float64)
    late = batches[len(half) // 2 :]
    if len(half) < _LEAST_READINGS or not np.ptp(late) or len({len(reading.worker_bytes) for reading in half}) > 1:
        return None
    taken = -np.array([reading.free_bytes for reading in half], np.float64)
    (slope, _), covariance = np.polyfit(batches, taken, 1, cov=True)
    steady = slope > 3 * covariance[0, 0] ** 0.5 and np.polyfit(late, taken[-len(late) :], 1)[0] > slope / 2
    same = [reading for reading in readings if len(reading.worker_bytes) == len(half[0].worker_bytes)]
    first, last = (reading.main_bytes + sum(reading.worker_bytes) for reading in (same[0], same[-1]))
    own = (last - first) / (same[-1].batches - same[0].batches)
    return float(slope) if steady and slope * np.ptp(batches) > _LEAST_GROWTH * last and own > slope / 3 else None


def _measure_processes() -> tuple[int, ...]:
    """PSS of this process, and of each child that can be read."""
    main, used = psutil.Process(), list[int]()
    for process in (main, *main.children(recursive=True)):
        try:
            info = process.memory_full_info()
            used.append(int(getattr(info, "pss", 0) or info.uss))
        except psutil.Error:  # it has ended, or is another user's
            used += [0] * (process is main)
    return tuple(used)
