"""How many workers: as many as short trials of the real loader find best."""

from functools import partial
from itertools import chain, islice, repeat
from time import perf_counter, thread_time

import numpy as np

from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.prefetcher import PREFETCH, Prefetcher
from colab_utils.machine import count_cores, find_free_memory
from colab_utils.processes import start_thread
from colab_utils.progress import show_progress

_TRIAL_S = 0.8

_HELD = 2  # batches that a training loop holds: the one at hand and, while it is replaced, the next

_RAM_SHARE = 0.5  # of the free memory: what a loader may take for its batches

_SPARE = 1.25  # other batches may be larger than the one looked at; and buffers grow by steps

_SLOW_S = 0.25  # a batch that waits longer for its files is not held up by the cores

_CLOSE = 0.95  # rates that differ by less are the same, and the fewest workers win


def tune_workers(fetcher: Fetcher, batches: list[list[int]]) -> tuple[int, dict[int, float]]:
    """How many workers load these batches fastest on this machine, now; and the images/s of each
    number that was tried, while a step keeps 0.9 of a core busy: none where slow files, or memory,
    decide. Nothing is remembered.
    """
    batch_bytes, is_slow = _measure_batch(fetcher, batches[0])
    most = (find_free_memory() * _RAM_SHARE / batch_bytes - _HELD) // PREFETCH
    cores = count_cores()
    choices = sorted({max(1, cores // 4), max(1, cores // 2), cores})
    counts = [count for count in choices if count <= most]
    if is_slow or not counts:
        return max(counts, default=0), {}
    rates = {}
    for count in show_progress("tuning workers", counts, unit="trial"):
        rates[count] = _measure_rate(fetcher, batches, count)
    return _pick(rates), rates


def _pick(rates: dict[int, float]) -> int:
    """The fastest number of workers; of those that are about as fast, the smallest."""
    best = max(rates.values())
    return min(workers for workers, rate in rates.items() if rate >= _CLOSE * best)


def _measure_batch(fetcher: Fetcher, indices: list[int]) -> tuple[float, bool]:
    """Bytes of a large batch, of the largest images where sizes are known; and whether it waits for
    its files.
    """
    if fetcher.sizes is not None:
        indices = np.argsort(fetcher.sizes.prod(1, dtype=np.int64))[-len(indices) :].tolist()
    began_s = perf_counter() - thread_time()
    shape = fetcher.load(indices, lambda size: np.empty(size, np.uint8), (0,), skips_bad=True).shape
    waited_s = perf_counter() - thread_time() - began_s
    if shape is None:
        return 1.0, True
    _, batch_bytes = shape.lay_out()
    if fetcher.reads_ahead:
        # The files came at the same time.
        waited_s *= len(indices)
    return batch_bytes * _SPARE, waited_s > _SLOW_S


def _measure_rate(fetcher: Fetcher, batches: list[list[int]], workers: int) -> float:
    """Images/s that so many workers deliver, as fast as their batches are taken, while a step takes
    its core.
    """
    prefetcher = Prefetcher(fetcher, workers, PREFETCH)
    try:
        loaded = prefetcher.run(
            enumerate(chain.from_iterable(repeat(batches))), seed=(0,), skips_bad=True
        )
        # the workers start, and touch their memory for the first time
        for _ in islice(loaded, workers * PREFETCH + 1):
            pass
        step = start_thread(partial(EmulatedStep(1000 * _TRIAL_S), None), "step")
        images = 0
        began_s = perf_counter()
        for _, batch, _ in loaded:
            images += len(batch or ())
            if perf_counter() - began_s > _TRIAL_S:
                break
        rate = images / (perf_counter() - began_s)
        step.join()
        return rate
    finally:
        prefetcher.close()
