"""Short trials of the real loader that choose the number of workers."""

from collections.abc import Iterator
from functools import partial
from itertools import chain, islice, repeat
from time import perf_counter, thread_time

import numpy as np

from colab_utils.loading.batch import measure_layout
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.prefetcher import PREFETCH, Loaded, Prefetcher
from colab_utils.machine import count_cores, find_free_memory
from colab_utils.processes import start_thread
from colab_utils.progress import show_progress

# A trial measures the rate for at least this long.
_TRIAL_S = 0.8

# A training loop holds its current batch, and for a moment also the next one.
_HELD = 2

# The batches of a loader may take this share of the free memory.
_RAM_SHARE = 0.5

# A buffer may become larger than the measured batch by this factor, because other batches may be
# larger and buffers grow in steps.
_SPARE = 1.25

# If a batch waits longer than this for its files, the files limit the loader, and the cores do not.
_SLOW_S = 0.25

# Rates above this share of the best one count as equal. The fewest workers are then chosen.
_CLOSE = 0.95


def tune_workers(fetcher: Fetcher, batches: list[list[int]]) -> tuple[int, dict[int, float]]:
    """Find the number of workers that loads these batches fastest on this machine.

    Returns:
        The number of workers, and a dict from each number that was tried to its images/s. During
        the trials, an emulated step kept 0.9 of a core busy. The dict is empty if slow files or too
        little memory decide the number.
    """
    batch_bytes, is_slow = _measure_batch(fetcher, batches[0])
    limit = (find_free_memory() * _RAM_SHARE / batch_bytes - _HELD) // PREFETCH
    cores = count_cores()
    choices = sorted({max(1, cores // 4), max(1, cores // 2), cores})
    counts = [count for count in choices if count <= limit]
    if is_slow or not counts:
        return max(counts, default=0), {}
    rates = {}
    for count in show_progress("tuning workers", counts, unit="trial"):
        rates[count] = _measure_rate(fetcher, batches, count)
    return _pick(rates), rates


def _pick(rates: dict[int, float]) -> int:
    """Return the smallest number of workers that is about as fast as the fastest one."""
    best = max(rates.values())
    return min(workers for workers, rate in rates.items() if rate >= _CLOSE * best)


def _measure_batch(fetcher: Fetcher, indices: list[int]) -> tuple[float, bool]:
    """Load a large batch. Return its size in bytes, and whether it waits for its files.

    If the sizes of images are known, the batch has the largest images.
    """
    if fetcher.sizes is not None:
        indices = np.argsort(fetcher.sizes.prod(1, dtype=np.int64))[-len(indices) :].tolist()
    began_s = perf_counter() - thread_time()
    result = fetcher.load(indices, lambda size: np.empty(size, np.uint8), (0,), skips_bad=True)
    waited_s = perf_counter() - thread_time() - began_s
    if result.layout is None:
        return 1.0, True
    if fetcher.reads_ahead:
        # The files of this batch were read at the same time. One after the other, N files would
        # take about N times as long.
        waited_s *= len(indices)
    return measure_layout(result.layout) * _SPARE, waited_s > _SLOW_S


def _measure_rate(fetcher: Fetcher, batches: list[list[int]], workers: int) -> float:
    """Measure the images/s of this many workers while an emulated step uses a core."""
    prefetcher = Prefetcher(fetcher, workers, PREFETCH)
    try:
        loaded = prefetcher.run(
            enumerate(chain.from_iterable(repeat(batches))), seed=(0,), skips_bad=True
        )
        # The first batches are not measured, because the workers start and touch new memory.
        for _ in islice(loaded, workers * PREFETCH + 1):
            pass
        step = start_thread(partial(EmulatedStep(1000 * _TRIAL_S), None), "step")
        try:
            return _time_batches(loaded)
        finally:
            step.join()
    finally:
        prefetcher.close()


def _time_batches(loaded: Iterator[Loaded]) -> float:
    """Return the images/s of a loop that takes batches as fast as they come."""
    images = 0
    began_s = perf_counter()
    for _, batch, _ in loaded:
        images += len(batch or ())
        if perf_counter() - began_s > _TRIAL_S:
            break
    return images / (perf_counter() - began_s)
