"""Ways of loading, in a few lines each: in the loop, ahead by a thread, a process, workers, or a tuned pool."""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from colab_utils.diagnosis.forms import Forms
from colab_utils.diagnosis.stores import count_bytes
from colab_utils.drive import DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.order import BatchOrder
from colab_utils.runtime import end_with_parent, find_free_memory, quiet_fork

__all__ = [
    "EpochLoader", "Setting", "TunedLoading", "WorkerLoading", "end_workers", "load_by_process", "load_by_thread",
    "load_in_loop",
]  # fmt: skip

Samples = list[tuple[Tensor, dict[str, Any]]]
"""The samples of a batch: images uint8 [3, H, W] and torchvision's targets."""

_QUEUED = 4  # batches that a producer is ahead
_MOST_AHEAD = 16  # batches that the tuned pipeline is ahead, at most
_THREADS = 8
_CACHE_SHARE = 0.25  # of the free memory


@dataclass(frozen=True)
class Setting:
    """What a strategy is run with; without a ``profile`` Drive is read as fast as it goes."""

    forms: Forms
    profile: DriveProfile | None
    batch_size: int
    workers: int
    device: str


class EpochLoader:
    """Epochs of a dataset by one way of loading; images become float32 in the training process, on the device."""

    def __init__(self, setting: Setting, dataset: Any, load: Callable[[Any, Any], Iterator[Samples]]) -> None:
        self._device, self._dataset, self._load = setting.device, dataset, load
        shards = dataset.shard_of if getattr(dataset, "whole_shards", False) else None
        self._order = BatchOrder(
            len(dataset), setting.batch_size, 0, sizes=dataset.sizes, shard_of=shards, streams=max(1, setting.workers)
        )

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[dict[str, Any]]]]:
        batches = self._load(self._dataset, self._order)
        try:
            for samples in batches:
                yield (
                    [image.to(self._device).float().div_(255) for image, _ in samples],
                    [{k: v.to(self._device) if hasattr(v, "to") else v for k, v in t.items()} for _, t in samples],
                )
        finally:
            getattr(batches, "close", int)()
        self._order.epoch += 1

    def close(self) -> None:
        """End what the way of loading keeps between epochs."""
        getattr(self._load, "close", int)()


def load_in_loop(dataset: Any, order: Iterable[list[int]]) -> Iterator[Samples]:
    """Load inside the training loop."""
    for indices in order:
        yield [dataset[index] for index in indices]


def load_by_thread(dataset: Any, order: Iterable[list[int]]) -> Iterator[Samples]:
    """A producer thread and a bounded queue."""
    ready: queue.Queue[Any] = queue.Queue(_QUEUED)
    stop = threading.Event()
    thread = threading.Thread(target=_produce, args=(dataset, order, ready, stop), daemon=True)
    thread.start()
    try:
        yield from _consume(ready, thread.is_alive)
    finally:
        stop.set()
        thread.join()


def load_by_process(dataset: Any, order: Iterable[list[int]]) -> Iterator[Samples]:
    """A producer process and a bounded queue."""
    context = torch.multiprocessing.get_context("fork")
    ready, stop = context.Queue(_QUEUED), context.Event()
    process = context.Process(target=_produce_alone, args=(dataset, order, ready, stop), daemon=True)
    with quiet_fork():
        process.start()
    try:
        yield from _consume(ready, process.is_alive)
    finally:
        stop.set()
        process.terminate()
        process.join()


def _produce_alone(*arguments: Any) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    _produce(*arguments)


def _produce(dataset: Any, order: Iterable[list[int]], ready: Any, stop: Any) -> None:
    try:
        for samples in load_in_loop(dataset, order):
            if not _put(samples, ready, stop):
                return
        last: Any = None
    except Exception as error:
        last = error
    if _put(last, ready, stop):
        stop.wait()  # tensors in shared memory go with the process that made them


def _put(item: Any, ready: Any, stop: Any) -> bool:
    """Wait for room in the queue; False where nobody takes anything any more."""
    while not stop.is_set():
        try:
            ready.put(item, timeout=0.1)
        except queue.Full:
            continue
        return True
    return False


def _consume(ready: Any, is_alive: Callable[[], bool]) -> Iterator[Samples]:
    while True:
        try:
            found = ready.get(timeout=1)
        except queue.Empty:
            if is_alive():
                continue
            raise ColabUtilsError("expected the producer to go on, found that it ended: memory may be full") from None
        if found is None:
            return
        if isinstance(found, Exception):
            raise found
        yield found


class WorkerLoading:
    """torch's ``DataLoader`` with worker processes, which last from epoch to epoch."""

    def __init__(self, workers: int) -> None:
        self._workers = workers
        self._loader: DataLoader[Any] | None = None

    def __call__(self, dataset: Any, order: Any) -> Iterator[Samples]:
        with quiet_fork():
            if self._loader is None:
                self._loader = DataLoader(
                    dataset, batch_sampler=order, num_workers=self._workers, collate_fn=list,
                    persistent_workers=self._workers > 0,
                )  # fmt: skip
            return iter(self._loader)

    def close(self) -> None:
        """End the workers."""
        end_workers(self._loader)
        self._loader = None


def end_workers(loader: Any) -> None:
    """End the workers that a ``DataLoader`` keeps from epoch to epoch, if it has such."""
    getattr(getattr(loader, "_iterator", None), "_shutdown_workers", int)()


class TunedLoading:
    """Cache, shuffle, batch, prefetch, with sizes chosen while it runs: samples stay in memory as long as a quarter of
    it lasts, and whenever the step has to wait, one batch more is loaded ahead, by threads.

    ``share`` of the dataset is loaded: so much of the memory is used, and the same part of it is in the cache.
    """

    def __init__(self, share: float) -> None:
        self._pool = ThreadPoolExecutor(_THREADS, "tuned")
        self._cache: dict[int, Any] = {}
        self._room, self._ahead = _CACHE_SHARE * share * find_free_memory(), 1

    def __call__(self, dataset: Any, order: Iterable[list[int]]) -> Iterator[Samples]:
        todo, pending = iter(order), deque[Future[Samples]]()
        while True:
            while len(pending) < self._ahead and (indices := next(todo, None)) is not None:
                pending.append(self._pool.submit(self._read, dataset, indices))
            if not pending:
                return
            if not pending[0].done() and self._ahead < _MOST_AHEAD:
                self._ahead += 1
            yield pending.popleft().result()

    def _read(self, dataset: Any, indices: list[int]) -> Samples:
        samples = []
        for index in indices:
            sample = self._cache.get(index)
            if sample is None:
                sample = dataset[index]
                self._room -= count_bytes(sample)
                if self._room > 0:
                    self._cache[index] = sample
            samples.append(sample)
        return samples

    def close(self) -> None:
        """Forget the samples."""
        self._pool.shutdown(cancel_futures=True)
        self._cache.clear()
