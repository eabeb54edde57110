"""How many workers: by at most three short trials of the real loader, while a step takes its core."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice, repeat
from threading import Event, Thread
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.workers import Fetcher, Prefetcher
from colab_utils.runtime import count_cores, find_free_memory, show_progress

__all__ = ["EmulatedStep", "Tuning", "tune_workers"]

_BUSY = 0.9  # of a core: what a training process takes to launch kernels
_BLOCK = bytes(32_768)  # a few microseconds of work that releases Python's lock, as launching kernels does
_TRIAL_S = 0.8
PREFETCH = 2
"""Batches ahead for each worker."""
_HELD = 2  # batches that a training loop holds: the one at hand and, while it is replaced, the next
_RAM_SHARE = 0.5  # of the free memory: what a loader may take for its batches
_SPARE = 1.25  # other batches may be larger than the one looked at; and buffers grow by steps
_SLOW_S = 0.25  # a batch that waits longer for its files is not held up by the cores
_CLOSE = 0.95  # rates that differ by less are the same, and the fewest workers win


class EmulatedStep:
    """A placeholder step for a machine without a GPU; label its figures *emulated*.

    It uses ``busy`` of a core for ``step_ms`` milliseconds (both more than 0), and longer where others take the core
    away: a step that only sleeps flatters every loader. Raises ColabUtilsError for a step that takes no time.

    Example:
        >>> step = EmulatedStep(5)
        >>> step([], [])
        >>> print(step)
        emulated 5 ms
    """

    emulated = True

    def __init__(self, step_ms: float, busy: float = _BUSY) -> None:
        if not 0 < step_ms < float("inf"):
            raise ColabUtilsError(f"expected step_ms over 0, found {step_ms!r}: give milliseconds, like 100")
        self.step_ms, self.busy = float(step_ms), busy

    def __call__(self, images: Any, targets: Any = None) -> None:
        """Spend the time of one step; takes ``(images, targets)`` or one packed batch, and looks at neither."""
        length_s = self.step_ms / 1000
        began_s, cpu_began_s = perf_counter(), thread_time()
        while (cpu_s := thread_time() - cpu_began_s) < self.busy * length_s:  # work and rest alternate in 2 ms slices
            slice_end_s = cpu_began_s + min(cpu_s + 0.002, self.busy * length_s)
            while thread_time() < slice_end_s:
                zlib.crc32(_BLOCK)
            rest_s = min((thread_time() - cpu_began_s) / self.busy, length_s) - (perf_counter() - began_s)
            sleep(max(0.0, rest_s))

    def __str__(self) -> str:
        return f"emulated {self.step_ms:g} ms"


@dataclass(frozen=True)
class Tuning:
    """How many workers were picked, and why."""

    workers: int
    rates: dict[int, float]
    """Images/s with each number of workers that was tried; empty where slow files, or memory, decide."""
    seconds: float

    def __str__(self) -> str:
        how = "while a step keeps 0.9 of a core busy" if self.rates else "slow files or memory decide, not the cores"
        lines = [f"{rate:8.0f} images/s with {workers} workers" for workers, rate in self.rates.items()]
        return "\n".join([*lines, f"picked: {self.workers} workers (in {self.seconds:.0f} s: {how})"])


def tune_workers(fetcher: Fetcher, *, batch_size: int) -> Tuning:
    """Find how many workers load batches fastest on this machine, now: nothing is remembered."""
    began_s, order = perf_counter(), list(BatchSampler(len(fetcher), batch_size, 0, sizes=fetcher.sizes))
    batch_bytes, is_slow = _measure_batch(fetcher, order[0])
    most = (find_free_memory() * _RAM_SHARE / batch_bytes - _HELD) // PREFETCH
    cores = count_cores()
    counts = [count for count in sorted({max(1, cores // 4), max(1, cores // 2), cores}) if count <= most]
    if is_slow or not counts:
        return Tuning(max(counts, default=0), {}, perf_counter() - began_s)
    rates = {}
    with show_progress("tuning workers", total=len(counts), unit="trial") as bar, _busy_core():
        for count in counts:
            rates[count] = _measure_rate(fetcher, order, count)
            bar.update()
    return Tuning(_pick(rates), rates, perf_counter() - began_s)


def _pick(rates: dict[int, float]) -> int:
    """The fastest number of workers; of those that are about as fast, the smallest."""
    return min(workers for workers, rate in rates.items() if rate >= _CLOSE * max(rates.values()))


def _measure_batch(fetcher: Fetcher, indices: list[int]) -> tuple[float, bool]:
    """Bytes of a large batch, of the largest images where sizes are known; and whether it waits for its files."""
    if fetcher.sizes is not None:
        indices = np.argsort(fetcher.sizes.prod(1, dtype=np.int64))[-len(indices) :].tolist()
    began_s = perf_counter() - thread_time()
    shape = fetcher.load(0, indices, lambda size: np.empty(size, np.uint8), (0,), skips_bad=True).shape
    waited_s = perf_counter() - thread_time() - began_s
    return (shape.lay_out()[1] * _SPARE, waited_s > _SLOW_S) if shape else (1.0, True)


def _measure_rate(fetcher: Fetcher, order: list[list[int]], workers: int) -> float:
    """Images/s that so many workers deliver, as fast as their batches are taken."""
    prefetcher = Prefetcher(fetcher, workers, PREFETCH)
    try:
        loaded = prefetcher.run(enumerate(chain.from_iterable(repeat(order))), seed=(0,), skips_bad=True)
        for _ in islice(loaded, workers * PREFETCH + 1):  # the workers start, and touch their memory for the first time
            pass
        images, began_s = 0, perf_counter()
        for _, batch, _ in loaded:
            images += len(batch or ())
            if perf_counter() - began_s > _TRIAL_S:
                break
        return images / (perf_counter() - began_s)
    finally:
        prefetcher.close()


@contextmanager
def _busy_core() -> Iterator[None]:
    """Keep 0.9 of a core busy from a thread of this process, as the launching of kernels does."""
    step, end = EmulatedStep(20), Event()

    def burn() -> None:
        while not end.is_set():
            step(None)

    thread = Thread(target=burn, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
