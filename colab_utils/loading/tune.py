"""How many workers, of which kind: by at most four short trials of the real loader, while a step takes its core."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, islice, repeat
from threading import Event, Thread
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import BadSampleError
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.workers import Backend, Fetcher, Prefetcher, describe_workers
from colab_utils.runtime import count_cores, find_free_memory, show_progress

__all__ = ["EmulatedStep", "Trial", "Tuning", "tune_workers"]

_BUSY = 0.9  # of a core: what a training process takes to launch kernels
_BLOCK = bytes(32_768)  # a few microseconds of work that releases Python's lock, as launching kernels does
_TRIAL_S = 0.8
PREFETCH = 2
"""Batches ahead for each worker."""
_HELD = 2  # batches that a training loop holds: the one at hand and, while it is replaced, the next
_RAM_SHARE = 0.5  # of the free memory: what a loader may take for its batches
_SPARE = 1.25  # other batches may be larger than those looked at; and buffers grow by steps
_SLOW_S = 0.25  # a batch that waits longer for its files is not held up by the cores
_CLOSE = 0.95  # rates that differ by less are the same, and the one with fewer workers wins


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
class Trial:
    """One way of loading and what it reached beside a step that keeps 0.9 of a core busy."""

    backend: Backend
    workers: int
    images_per_second: float

    def __str__(self) -> str:
        return describe_workers(self.backend, self.workers, PREFETCH)


@dataclass(frozen=True)
class Tuning:
    """The way of loading that was picked, and all that were tried: none where workers would wait for slow files."""

    best: Trial
    trials: tuple[Trial, ...]
    seconds: float

    def __str__(self) -> str:
        how = "beside a step that keeps 0.9 of a core busy" if self.trials else "the files are slow, not the cores"
        lines = [f"{trial.images_per_second:8.0f} images/s  {trial}" for trial in self.trials]
        return "\n".join([*lines, f"picked: {self.best} (in {self.seconds:.0f} s: {how})"])


def tune_workers(fetcher: Fetcher, *, batch_size: int, backend: Backend | None = None) -> Tuning:
    """Find the fastest way of loading batches on this machine, now: nothing is remembered.

    Args:
        fetcher: of the dataset.
        batch_size: images in a batch.
        backend: try only this kind.
    """
    began_s, order = perf_counter(), list(BatchSampler(len(fetcher), batch_size, 0, sizes=fetcher.sizes))
    batch_bytes, waits = _measure_batch(fetcher, order)
    most = (find_free_memory() * _RAM_SHARE / batch_bytes - _HELD) // PREFETCH
    settings = [setting for setting in _list_settings(fetcher, backend) if setting[1] <= most] or [("processes", 0)]
    if waits:
        return Tuning(Trial(*max(settings, key=lambda setting: setting[1]), 0.0), (), perf_counter() - began_s)
    trials = []
    with show_progress("tuning workers", total=len(settings), unit="trial") as bar, _busy_core():
        for kind, workers in settings:
            trials.append(_try_setting(fetcher, order, kind, workers))
            bar.update()
    return Tuning(_pick(trials), tuple(trials), perf_counter() - began_s)


def _list_settings(fetcher: Fetcher, backend: Backend | None) -> list[tuple[Backend, int]]:
    """What is worth a trial: never more workers than cores; threads only where Python's lock does not stop them."""
    cores = count_cores()
    settings: list[tuple[Backend, int]] = [
        (backend or "processes", count) for count in sorted({max(1, cores // 4), max(1, cores // 2), cores})
    ]
    if backend is None and fetcher.writes_itself and cores > 1:
        settings.append(("loader_process", cores))
    return settings


def _pick(trials: Sequence[Trial]) -> Trial:
    """The fastest; of those that are about as fast, the one with the fewest workers."""
    fastest = max(trial.images_per_second for trial in trials)
    close = [trial for trial in trials if trial.images_per_second >= _CLOSE * fastest]
    return min(close, key=lambda trial: (trial.workers, -trial.images_per_second))


def _try_setting(fetcher: Fetcher, order: list[list[int]], backend: Backend, workers: int) -> Trial:
    """What a setting delivers, as fast as its batches are taken."""
    prefetcher = Prefetcher(fetcher, backend, workers, PREFETCH)
    try:
        loaded = prefetcher.run(enumerate(chain.from_iterable(repeat(order))), seed=(0,), skips_bad=True)
        for _ in islice(loaded, workers * PREFETCH + 1):  # the workers start, and touch their memory for the first time
            pass
        images, began_s = 0, perf_counter()
        for _, batch, _ in loaded:
            images += len(batch or ())
            if perf_counter() - began_s > _TRIAL_S:
                break
        return Trial(backend, workers, images / (perf_counter() - began_s))
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


def _measure_batch(fetcher: Fetcher, order: list[list[int]]) -> tuple[float, bool]:
    """Bytes of a large batch, of the largest images where sizes are known; and whether it waited for its files."""
    looked_at = order[:4]
    if fetcher.sizes is not None:
        looked_at = [np.argsort(fetcher.sizes.prod(1, dtype=np.int64))[-len(order[0]) :].tolist(), *looked_at]
    for indices in looked_at:
        began_s = perf_counter() - thread_time()
        with suppress(BadSampleError):  # it is told when it is read, and not tried
            shape = fetcher.write(indices, lambda size: np.empty(size, np.uint8), (0,))
            return shape.lay_out()[1] * _SPARE, perf_counter() - thread_time() - began_s > _SLOW_S
    return 1.0, True
