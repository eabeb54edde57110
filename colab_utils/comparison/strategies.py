"""The strategies: ways of loading that people are told to use, and ours, each with a name and what it reads."""

from __future__ import annotations

import io
import queue
import shutil
import tempfile
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colab_utils.comparison.prepared import PreparedData
from colab_utils.drive import DriveProfile, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.runtime import end_with_parent, find_free_memory, format_bytes, quiet_fork

__all__ = [
    "DEFAULT_STRATEGIES",
    "STRATEGIES",
    "EpochLoader",
    "InMemory",
    "MappedArrays",
    "PillowFolder",
    "SavedTensors",
    "Setting",
    "Strategy",
    "TunedLoading",
    "WorkerLoading",
    "count_bytes",
    "end_workers",
    "find_strategy",
    "load_by_process",
    "load_by_thread",
    "load_in_loop",
]

_READ_THREADS = 8


_MEMORY_SHARE = 0.5  # of the free memory


class PillowFolder(CocoFolder):
    """Image files and polygons as in torchvision's references: decoded by Pillow, masks drawn for each sample."""

    @staticmethod
    def decode(data: bytes) -> Tensor:
        """Image bytes as uint8 [3, H, W]."""
        return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


class SavedTensors(Dataset[Any]):
    """One ``.pt`` file an image."""

    def __init__(self, folder: Path, profile: DriveProfile | None, sizes: Any) -> None:
        self._paths, self._profile, self.sizes = sorted(folder.glob("*.pt")), profile, sizes

    def __len__(self) -> int:
        return len(self._paths)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        target = torch.load(io.BytesIO(read_file(self._paths[index], self._profile)), weights_only=True)
        return target.pop("image"), target


class MappedArrays(Dataset[Any]):
    """Two big ``.npy`` files, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._images = np.load(folder / "images.npy", mmap_mode="r")
        self._masks = np.load(folder / "masks.npy", mmap_mode="r")
        with np.load(folder / "tables.npz") as tables:
            self._tables = dict(tables)
        self.sizes = self._tables["sizes"]
        self._first = np.concatenate([[0], np.cumsum(self._tables["counts"])])

    def __len__(self) -> int:
        return len(self._images)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        (height, width), own = self.sizes[index], slice(*self._first[index : index + 2])
        masks = np.unpackbits(self._masks[own, :height], axis=2, count=width)
        target = {name: torch.from_numpy(self._tables[name][own]) for name in ("boxes", "labels", "area", "iscrowd")}
        image = torch.from_numpy(self._images[index, :, :height, :width].copy())
        return image, {**target, "masks": torch.from_numpy(masks), "image_id": int(self._tables["image_ids"][index])}


class InMemory(Dataset[Any]):
    """Every sample of another dataset, read at the start.

    Raises:
        ColabUtilsError: the ``total`` images of the whole dataset would take more than half of the free memory.
    """

    def __init__(self, dataset: Any, *, total: int) -> None:
        few = [dataset[index] for index in range(min(4, len(dataset)))]
        needed = sum(map(count_bytes, few)) / len(few) * total
        free = find_free_memory()
        if needed > _MEMORY_SHARE * free:
            raise ColabUtilsError(
                f"expected the samples of all {total:,} images to fit into half of the free memory, found that they "
                f"take about {format_bytes(needed)} and {format_bytes(free)} are free. Leave this strategy out."
            )
        with ThreadPoolExecutor(_READ_THREADS) as pool:
            self._samples = list(pool.map(dataset.__getitem__, range(len(dataset))))
        self.sizes = dataset.sizes

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, index: int) -> tuple[Tensor, dict[str, Any]]:
        return self._samples[index]


def count_bytes(sample: tuple[Tensor, dict[str, Any]]) -> int:
    """Bytes of an image and its target.

    Example:
        >>> count_bytes((torch.zeros(3, 4, 4, dtype=torch.uint8), {"boxes": torch.zeros(2, 4), "image_id": 7}))
        80
    """
    return sample[0].nbytes + sum(part.nbytes for part in sample[1].values() if isinstance(part, Tensor))


Samples = list[tuple[Tensor, dict[str, Any]]]


"""The samples of a batch: images uint8 [3, H, W] and torchvision's targets."""

_QUEUED = 4  # batches that a producer is ahead


_MOST_AHEAD = 16  # batches that the tuned pipeline is ahead, at most


_THREADS = 8


_CACHE_SHARE = 0.25  # of the free memory


@dataclass(frozen=True)
class Setting:
    """What a strategy is run with; without a ``profile`` Drive is read as fast as it goes."""

    prepared: PreparedData
    profile: DriveProfile | None
    batch_size: int
    workers: int
    device: str


class EpochLoader:
    """Epochs of a dataset by one way of loading; images become float32 in the training process, on the device."""

    def __init__(self, setting: Setting, dataset: Any, load: Callable[[Any, Any], Iterator[Samples]]) -> None:
        self._device, self._dataset, self._load = setting.device, dataset, load
        shards = dataset.shard_of if getattr(dataset, "whole_shards", False) else None
        self._order = BatchSampler(
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


@dataclass(frozen=True)
class Strategy:
    """One way of loading.

    ``form`` names what it reads (see `PreparedData`); ``keeps`` says that it keeps what
    it read, so that only later epochs show its speed; ``open`` gives an iterable of batches ``(images, targets)`` as
    torchvision models take them on the device, an epoch at each pass, with a ``close()`` that ends whatever it started.
    """

    name: str
    idea: str
    form: str
    open: Callable[[Setting], Any]
    keeps: bool = False

    @property
    def on_drive(self) -> bool:
        """Whether it reads from Drive while it trains."""
        return self.form.endswith("_on_drive")


class _Arriving:
    """`make_loader` over shards that are copied meanwhile, to a folder that is empty at the start."""

    def __init__(self, setting: Setting) -> None:
        prepared = setting.prepared
        self._folder = Path(tempfile.mkdtemp(dir=_make(prepared.ssd)))
        shards = prepared.get("shards_on_drive").path
        self._dataset = ArrivingShards(shards, self._folder / "shards", profile=setting.profile)
        self._loader = make_loader(
            self._dataset, batch_size=setting.batch_size, workers=setting.workers, device=setting.device
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()
        self._dataset.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _open_files(setting: Setting, form: str) -> PillowFolder:
    profile = setting.profile if form.endswith("_on_drive") else None
    return PillowFolder(setting.prepared.get(form).path, setting.prepared.annotations, profile=profile)


def _open_tensors(setting: Setting, form: str) -> SavedTensors:
    profile = setting.profile if form.endswith("_on_drive") else None
    return SavedTensors(setting.prepared.get(form).path, profile, setting.prepared.coco.sizes)


def _open_shards(setting: Setting, form: str) -> ShardDataset:
    on_drive = form.endswith("_on_drive")
    profile = setting.profile if on_drive else None
    return ShardDataset(setting.prepared.get(form).path, profile=profile, whole_shards=on_drive)


def _use_workers(open_dataset: Callable[[Setting, str], Any], form: str, workers: int | None = None) -> Any:
    def open_loader(setting: Setting) -> EpochLoader:
        count = setting.workers if workers is None else workers
        setting = replace(setting, workers=count)
        return EpochLoader(setting, open_dataset(setting, form), WorkerLoading(count))

    return open_loader


def _use(load: Callable[[Any, Any], Iterator[Any]], form: str) -> Any:
    return lambda setting: EpochLoader(replace(setting, workers=0), _open_files(setting, form), load)


def _open_packed(setting: Setting) -> Any:
    dataset = ShardDataset(setting.prepared.get("shards_on_ssd").path)
    return make_loader(dataset, batch_size=setting.batch_size, workers=setting.workers, device=setting.device)


def _list_both(
    name: str, idea: str, kind: str, make: Callable[[str], Any], *, keeps: bool = False
) -> Iterator[Strategy]:
    """A strategy over loose files on Drive, and the same over files on the SSD."""
    for ending, place, disk in (("", "Drive", "drive"), ("_on_ssd", "the local disk", "ssd")):
        form = f"{kind}_on_{disk}"
        yield Strategy(f"{name}{ending}", f"{idea} from {place}.", form, make(form), keeps)


def _list_strategies() -> Iterator[Strategy]:
    yield from _list_both("sequential", "Each image is loaded inside the training loop,", "files",
                          lambda form: _use(load_in_loop, form))  # fmt: skip
    yield from _list_both("thread_queue", "A thread loads ahead into a queue of 4 batches,", "files",
                          lambda form: _use(load_by_thread, form))  # fmt: skip
    yield from _list_both("process_queue", "A process loads ahead into a queue of 4 batches,", "files",
                          lambda form: _use(load_by_process, form))  # fmt: skip
    yield from _list_both("dataloader", "A DataLoader's workers load ahead, as in torchvision's references,", "files",
                          lambda form: _use_workers(_open_files, form))  # fmt: skip
    for count in range(5):
        yield Strategy(f"dataloader_{count}", f"The same with {count} workers.", "files_on_drive",
                       _use_workers(_open_files, "files_on_drive", count))  # fmt: skip
    yield from _list_both("saved_tensors", "Resized and converted once, a .pt an image, by a DataLoader", "tensors",
                          lambda form: _use_workers(_open_tensors, form))  # fmt: skip
    yield Strategy(
        "memory_mapped", "One .npy of all images and one of all masks, mapped into memory.", "arrays_on_ssd",
        lambda setting: EpochLoader(
            replace(setting, workers=0), MappedArrays(setting.prepared.get("arrays_on_ssd").path), load_in_loop
        ),
    )  # fmt: skip
    yield Strategy(
        "in_memory", "Every sample is read from Drive into memory at the start.", "files_on_drive",
        lambda setting: EpochLoader(
            replace(setting, workers=0),
            InMemory(_open_files(setting, "files_on_drive"), total=setting.prepared.total),
            load_in_loop,
        ),
        keeps=True,
    )  # fmt: skip
    yield from _list_both("autotuned", "Cache, shuffle, batch and prefetch, sizes chosen while it runs,", "files",
                          lambda form: lambda setting: EpochLoader(
                              replace(setting, workers=0), _open_files(setting, form),
                              TunedLoading(len(setting.prepared) / setting.prepared.total)),
                          keeps=True)  # fmt: skip
    yield Strategy("shards_on_drive", "Files packed into shards, each read whole from Drive by a DataLoader.",
                   "shards_on_drive", _use_workers(_open_shards, "shards_on_drive"))  # fmt: skip
    yield Strategy("shards_on_ssd", "The shards are copied to the local disk first.",
                   "shards_on_ssd", _use_workers(_open_shards, "shards_on_ssd"))  # fmt: skip
    yield Strategy("packed", "From those, workers send packed masks through reused memory (make_loader).",
                   "shards_on_ssd", _open_packed)  # fmt: skip
    yield Strategy("train_while_copying", "make_loader starts with the first shard that is copied (ArrivingShards).",
                   "arriving_shards_on_drive", _Arriving)  # fmt: skip


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _list_strategies()}


DEFAULT_STRATEGIES = (
    "sequential", "thread_queue", "process_queue", "dataloader", "saved_tensors", "memory_mapped", "in_memory",
    "autotuned", "dataloader_on_ssd", "shards_on_drive", "shards_on_ssd", "packed", "train_while_copying",
)  # fmt: skip


_PEERS = {
    "webdataset": "webdataset", "litdata": "litdata", "mosaicml-streaming": "mosaicml-streaming",
    "tf_data": "tensorflow",
}  # fmt: skip


def find_strategy(name: str) -> Strategy:
    """A strategy by its name; those of other libraries lie in the repository's ``benchmarks``.

    Raises:
        ColabUtilsError: an unknown name. A library that is not installed is an error only when it is run.

    Example:
        >>> find_strategy("teleport")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected strategies among ...; found 'teleport': choose some of them
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if name not in _PEERS:
        names = ", ".join((*STRATEGIES, *_PEERS))
        raise ColabUtilsError(f"expected strategies among {names}; found {name!r}: choose some of them")
    try:
        found: Strategy = import_module("benchmarks.peers").PEERS[name]
        return found
    except ImportError as error:
        lacking = f"expected benchmarks/ of the repository and the package {_PEERS[name]}, found no {error.name}"

    def refuse(setting: Setting) -> Any:
        raise ColabUtilsError(f"{lacking}. Clone the repository, run pip install {_PEERS[name]}, and compare there.")

    return Strategy(name, f"The library {name}.", "shards_on_ssd", refuse)
