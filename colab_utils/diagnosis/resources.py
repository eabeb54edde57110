"""What a loader uses up while it runs: memory of every worker, /dev/shm, open files; and when memory will be full."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.runtime import find_free_memory, format_bytes

__all__ = ["Resources", "Sample", "Used", "measure_memory", "summarise_samples", "watch_resources"]

_INTERVAL_S = 0.25
_LOOKING_SHARE = 0.03
_sampling = threading.Lock()
if hasattr(os, "register_at_fork"):  # a worker that is forked in the middle of a sample would inherit its locks
    os.register_at_fork(before=_sampling.acquire, after_in_parent=_sampling.release, after_in_child=_sampling.release)
_LEAST_SAMPLES = 8
_NEARLY_FULL = 0.8
_LEAST_GROWTH = 0.05  # of the memory: less is the allocator's breathing


class Used(NamedTuple):
    """What the processes of a loader used, PSS in bytes: it takes the kernel 20 ms a process to find out."""

    main_bytes: int
    worker_bytes: tuple[int, ...]
    open_files: int


class Sample(NamedTuple):
    """What was used and free at one moment, in bytes; ``batches`` had been delivered."""

    batches: int
    free_bytes: int
    shm_bytes: int
    used: Used


@dataclass(frozen=True)
class Resources:
    """What a loader used: PSS (proportional set size, so that shared pages count once) of this process and of each
    worker; ``shm_used_mb`` at most, of ``shm_total_mb``; ``open_files`` of the process that had most, of the limit.

    ``growth_mb_per_batch`` is the slope of what this machine has less free; None where it is not sure.
    ``full_at_batch`` says when memory is full if that goes on.
    """

    main_mb: float
    worker_mb: tuple[float, ...]
    growth_mb_per_batch: float | None
    full_at_batch: int | None
    free_mb: float
    shm_used_mb: float
    shm_total_mb: float
    open_files: int
    open_files_limit: int
    samples: int

    def __str__(self) -> str:
        workers = f", workers {' + '.join(f'{mb:,.0f}' for mb in self.worker_mb)} MB" if self.worker_mb else ""
        lines = [
            f"memory (PSS): this process {self.main_mb:,.0f} MB{workers}; {format_bytes(self.free_mb * 1e6)} free",
            f"/dev/shm: {self.shm_used_mb:,.0f} of {self.shm_total_mb:,.0f} MB; open files: {self.open_files:,} of "
            f"{self.open_files_limit:,}",
        ]
        return "\n".join([*lines, *self.dangers])

    @property
    def dangers(self) -> tuple[str, ...]:
        """What will end the training if it goes on: one sentence each."""
        found = []
        if self.growth_mb_per_batch is not None:
            found.append(
                f"Memory grows by {self.growth_mb_per_batch:.2f} MB a batch: at step {self.full_at_batch:,} the "
                f"machine's {(self.free_mb + self.main_mb + sum(self.worker_mb)) / 1000:.1f} GB are full. Keep no "
                "lists of Python objects in the dataset, and no losses with their graphs."
            )
        if self.shm_used_mb > _NEARLY_FULL * self.shm_total_mb > 0:
            found.append(
                f"/dev/shm is nearly full: {self.shm_used_mb:,.0f} of {self.shm_total_mb:,.0f} MB. Use fewer workers, "
                "a smaller prefetch_factor, or make_loader, which does not need it."
            )
        if self.open_files > _NEARLY_FULL * self.open_files_limit:
            found.append(
                f"A process has {self.open_files:,} files open, of {self.open_files_limit:,} at most. Use "
                'torch.multiprocessing.set_sharing_strategy("file_system"), or make_loader.'
            )
        return tuple(found)


@contextmanager
def watch_resources(count_batches: Callable[[], int]) -> Iterator[list[Sample]]:
    """Take a sample four times a second, in a thread; ``count_batches`` tells how many batches there were.

    Processes are looked into as often as takes 3 % of the time: more would slow down the loader under watch.

    Example:
        >>> with watch_resources(lambda: 0) as samples:
        ...     pass
        >>> summarise_samples(samples).main_mb > 1
        True
    """
    samples: list[Sample] = []
    due_s, ended = 0.0, threading.Event()

    def take() -> None:
        nonlocal due_s
        used, began_s = samples[-1].used if samples else None, perf_counter()
        if used is None or began_s >= due_s:
            used = _look_into_processes()
            due_s = perf_counter() + (perf_counter() - began_s) / _LOOKING_SHARE
        samples.append(_take_sample(count_batches(), used))

    def watch() -> None:
        while not ended.wait(_INTERVAL_S):
            with _sampling:
                take()

    take()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield samples
    finally:
        ended.set()
        thread.join()


def summarise_samples(samples: Sequence[Sample]) -> Resources:
    """The last state, the most that was used, and the slope of memory over batches where it is sure.

    The first half of the samples is left out of the slope: caches and pools fill then.
    """
    import resource

    # workers may have ended since
    last = max(samples, key=lambda sample: (len(sample.used.worker_bytes), sample.batches)).used
    running = [sample for sample in samples if sample.batches < samples[-1].batches]  # after the last, workers end
    growth = _find_growth(running[len(running) // 2 :])
    free = find_free_memory()
    shm = shutil.disk_usage("/dev/shm").total if os.path.isdir("/dev/shm") else 0
    return Resources(
        main_mb=last.main_bytes / 1e6,
        worker_mb=tuple(used / 1e6 for used in last.worker_bytes),
        growth_mb_per_batch=None if growth is None else growth / 1e6,
        full_at_batch=None if growth is None else samples[-1].batches + int(free / growth),
        free_mb=free / 1e6,
        shm_used_mb=max(sample.shm_bytes for sample in samples) / 1e6,
        shm_total_mb=shm / 1e6,
        open_files=max(sample.used.open_files for sample in samples),
        open_files_limit=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        samples=len(samples),
    )


def _find_growth(samples: Sequence[Sample]) -> float | None:
    """Bytes a batch; None where noise could be the reason, where it slows down, or where workers came and went."""
    if len(samples) < _LEAST_SAMPLES or len({len(sample.used.worker_bytes) for sample in samples}) > 1:
        return None
    batches = np.array([sample.batches for sample in samples], np.float64)
    used = -np.array([sample.free_bytes for sample in samples], np.float64)
    least = _LEAST_GROWTH * (samples[-1].used.main_bytes + sum(samples[-1].used.worker_bytes))
    slope, error = _fit_line(batches, used)
    late, _ = _fit_line(batches[len(used) // 2 :], used[len(used) // 2 :])
    enough = slope * float(np.ptp(batches)) > least
    return slope if enough and slope > 3 * error and late > slope / 2 else None


def _fit_line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and its standard error by least squares; 0 where nothing moved."""
    centred = x - x.mean()
    if not centred.any():
        return 0.0, 0.0
    slope = float(centred @ y / (centred @ centred))
    residuals = y - y.mean() - slope * centred
    return slope, float(np.sqrt(residuals @ residuals / max(len(y) - 2, 1) / (centred @ centred)))


def _take_sample(batches: int, used: Used) -> Sample:
    shm = shutil.disk_usage("/dev/shm").used if os.path.isdir("/dev/shm") else 0
    return Sample(batches, find_free_memory(), shm, used)


def measure_memory() -> int:
    """PSS of this process and all its children, bytes.

    Example:
        >>> measure_memory() > 1_000_000
        True
    """
    used = _look_into_processes()
    return used.main_bytes + sum(used.worker_bytes)


def _look_into_processes() -> Used:
    import psutil

    main = psutil.Process()
    members = [main, *main.children(recursive=True)]
    used, files = [], 0
    for member in members:
        try:
            used.append(_measure_memory(member))
            files = max(files, member.num_fds() if hasattr(member, "num_fds") else 0)
        except psutil.Error:
            continue  # it has ended, or is another user's
    return Used(used[0], tuple(used[1:]), files)


def _measure_memory(process: Any) -> int:
    """PSS in bytes; where a system has none, what the process has for itself."""
    info = process.memory_full_info()
    return int(getattr(info, "pss", 0) or info.uss)
