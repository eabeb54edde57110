"""The strategies: each reads one kind of prepared data, by a dataset and a prefetcher or by `make_loader`."""

from __future__ import annotations

import io
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
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
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.runtime import find_free_memory, format_bytes, quiet_fork

__all__ = [
    "DEFAULT_STRATEGIES", "STRATEGIES", "PillowFolder", "Setting", "Strategy", "choose_strategies", "deliver",
]  # fmt: skip

_THREADS = 8  # that read into memory
_MEMORY_SHARE = 0.5  # of the free memory, for all samples
_CACHE_SHARE = 0.25  # of the free memory, for the tuned pipeline
_QUEUED = 4  # batches that a producer loads ahead
_MOST_AHEAD = 16  # batches that the tuned pipeline loads ahead, at most

_Sample = tuple[Tensor, dict[str, Any]]  # image uint8 [3, H, W] and torchvision's target
_Prefetcher = Callable[..., Any]  # of a dataset and its ``batch_sampler``: an epoch of lists of samples at each pass


@dataclass(frozen=True)
class Setting:
    """What a strategy runs with."""

    prepared: PreparedData
    """The data."""
    profile: DriveProfile | None
    """The speed of Drive; None reads it as fast as it goes."""
    batch_size: int
    """Images in a batch."""
    workers: int
    """Worker processes, for the strategies that have workers."""
    device: str
    """Where batches are delivered."""


@dataclass(frozen=True)
class Strategy:
    """One way of loading.

    Example:
        >>> STRATEGIES["packed"].on_drive, STRATEGIES["sequential"].on_drive
        (False, True)
    """

    name: str
    """How people ask for it."""
    idea: str
    """What it does, in one sentence."""
    reads: str
    """The kind of prepared data that it reads (see `PreparedData.get`)."""
    open: Callable[[Setting], Any]
    """Gives an iterable of ``(images, targets)`` as torchvision models take them, on the device; each pass is an epoch,
    and its ``close()`` ends what it started."""
    keeps: bool = False
    """Whether it keeps the samples that it read: then only later epochs show its speed."""

    @property
    def on_drive(self) -> bool:
        """Whether it reads from Drive while it trains."""
        return self.reads.endswith("_on_drive")


class PillowFolder(CocoFolder):
    """Image files and polygons as in torchvision's references: decoded by Pillow, masks drawn for each sample."""

    @staticmethod
    def decode(data: bytes | bytearray) -> Tensor:
        """Image bytes as uint8 [3, H, W]."""
        return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(2, 0, 1)


class SavedTensors(Dataset[_Sample]):
    """One ``.pt`` file an image."""

    def __init__(self, files: tuple[Path, ...], profile: DriveProfile | None) -> None:
        self._files, self._profile = files, profile

    def __len__(self) -> int:
        return len(self._files)

    def __getitem__(self, index: int) -> _Sample:
        target = torch.load(io.BytesIO(read_file(self._files[index], self._profile)), weights_only=True)
        return target.pop("image"), target


class MappedArrays(Dataset[_Sample]):
    """One file of all pixels and all bits of the masks, mapped into memory."""

    def __init__(self, folder: Path) -> None:
        self._data = np.memmap(folder / "samples.bin", np.uint8, "r")
        self._targets = torch.load(folder / "targets.pt", weights_only=True)

    def __len__(self) -> int:
        return len(self._targets)

    def __getitem__(self, index: int) -> _Sample:
        target = dict(self._targets[index])
        start, end, *shape = target.pop("place")
        size = shape[1] * shape[2]
        pixels, bits = np.split(self._data[start:end], [3 * size])
        masks = np.unpackbits(bits, count=shape[0] * size).reshape(shape)
        image = torch.from_numpy(pixels.reshape(3, *shape[1:]).copy())
        return image, {**target, "masks": torch.from_numpy(masks)}


def _count_bytes(sample: _Sample) -> int:
    return sample[0].nbytes + sum(part.nbytes for part in sample[1].values() if isinstance(part, Tensor))


class EpochLoader:
    """Epochs of a dataset through a prefetcher, shuffled; a batch holds images of like shape, as in `make_loader`."""

    def __init__(self, setting: Setting, dataset: Any, prefetch: _Prefetcher) -> None:
        sizes = setting.prepared.reference.sizes
        self._order = BatchSampler(len(dataset), setting.batch_size, 0, sizes=sizes)
        self._device = setting.device
        with quiet_fork():
            self._batches = prefetch(dataset, batch_sampler=self._order)

    def __iter__(self) -> Iterator[tuple[list[Tensor], list[dict[str, Any]]]]:
        with quiet_fork():
            batches = iter(self._batches)
        for samples in batches:
            yield deliver(samples, self._device)
        self._order.epoch += 1

    def close(self) -> None:
        """End the workers that a ``DataLoader`` keeps from epoch to epoch, or the threads."""
        getattr(getattr(self._batches, "_iterator", None), "_shutdown_workers", int)()
        getattr(self._batches, "close", int)()


def deliver(samples: Iterable[_Sample], device: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Samples as torchvision models take them: images float32 in 0 to 1, and everything on the device."""
    images, targets = zip(*samples, strict=True)
    return (
        [image.to(device).float().div_(255) for image in images],
        [{key: part.to(device) if isinstance(part, Tensor) else part for key, part in t.items()} for t in targets],
    )


class ThreadLoading:
    """Threads load ``ahead`` batches ahead, and one more, up to ``most``, whenever the step has to wait.

    Samples stay in memory as long as they fit into ``cache_bytes``.
    """

    def __init__(
        self, dataset: Any, batch_sampler: Iterable[list[int]], *, threads: int, ahead: int, most: int,
        cache_bytes: float = 0.0,
    ) -> None:  # fmt: skip
        self._dataset, self._order, self._pool = dataset, batch_sampler, ThreadPoolExecutor(threads)
        self._ahead, self._most, self._room = ahead, most, cache_bytes
        self._cache: dict[int, _Sample] = {}

    def __iter__(self) -> Iterator[list[_Sample]]:
        todo, pending = iter(self._order), deque[Future[list[_Sample]]]()
        while True:
            while len(pending) < self._ahead and (indices := next(todo, None)) is not None:
                pending.append(self._pool.submit(self._read, indices))
            if not pending:
                return
            if not pending[0].done():
                self._ahead = min(self._ahead + 1, self._most)
            yield pending.popleft().result()

    def _read(self, indices: list[int]) -> list[_Sample]:
        samples = [self._cache.get(index) or self._dataset[index] for index in indices]
        for index, sample in zip(indices, samples, strict=True):
            if index not in self._cache and (size := _count_bytes(sample)) < self._room:
                self._room -= size
                self._cache[index] = sample
        return samples

    def close(self) -> None:
        """Forget the samples; a thread that hangs in a read is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._cache.clear()


def _open_dataset(setting: Setting, kind: str) -> Any:
    made = setting.prepared.get(kind)
    name, _, disk = kind.partition("_on_")
    profile = setting.profile if disk == "drive" else None
    if name == "files":
        return PillowFolder(made.folder, setting.prepared.annotations, profile=profile)
    if name == "tensors":
        return SavedTensors(made.files, profile)
    return MappedArrays(made.folder) if name == "arrays" else ShardDataset(made.folder, profile=profile)


def _open_in_memory(setting: Setting) -> EpochLoader:
    """Read every sample; refused where those of the complete dataset would take more than half of the free memory."""
    dataset, total = _open_dataset(setting, "files_on_drive"), setting.prepared.total
    few = [dataset[index] for index in range(min(4, len(dataset)))]
    needed, free = sum(map(_count_bytes, few)) / len(few) * total, find_free_memory()
    if needed > _MEMORY_SHARE * free:
        raise ColabUtilsError(
            f"expected the samples of all {total:,} images to fit into half of the free memory, found that they "
            f"take about {format_bytes(needed)} and {format_bytes(free)} are free. Leave this strategy out."
        )
    with ThreadPoolExecutor(_THREADS) as pool:
        samples = list(pool.map(dataset.__getitem__, range(len(dataset))))
    return EpochLoader(setting, samples, _by_workers(0)(setting))


def _open_packed(setting: Setting, dataset: ShardDataset | None = None) -> Loader:
    dataset = _open_dataset(setting, "shards_on_ssd") if dataset is None else dataset
    return make_loader(dataset, batch_size=setting.batch_size, workers=setting.workers, device=setting.device)


class _ArrivingLoader:
    """`make_loader` over shards that are copied while it loads, to a folder that is empty at the start."""

    def __init__(self, setting: Setting) -> None:
        shards, ssd = setting.prepared.get("shards_on_drive").folder, setting.prepared.ssd
        ssd.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            folder = tempfile.mkdtemp(dir=ssd)
            opened.callback(shutil.rmtree, folder, ignore_errors=True)
            dataset = ArrivingShards(shards, Path(folder, "shards"), profile=setting.profile)
            opened.callback(dataset.stop)
            self._loader = opened.enter_context(closing(_open_packed(setting, dataset)))
            self.close = opened.pop_all().close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


def _by_workers(count: int | None = None, *, ahead: int = 2) -> Callable[[Setting], _Prefetcher]:
    """Torch's ``DataLoader``, whose workers last from epoch to epoch; with ``count`` 0 the training loop loads."""

    def prefetch(setting: Setting) -> _Prefetcher:
        workers = setting.workers if count is None else count
        options: dict[str, Any] = {"persistent_workers": True, "prefetch_factor": ahead} if workers else {}
        return partial(DataLoader, num_workers=workers, collate_fn=list, **options)

    return prefetch


def _by_thread(setting: Setting) -> _Prefetcher:
    return partial(ThreadLoading, threads=1, ahead=_QUEUED, most=_QUEUED)


def _tune(setting: Setting) -> _Prefetcher:
    share = len(setting.prepared) / setting.prepared.total  # of the dataset, and so of the memory
    room = _CACHE_SHARE * share * find_free_memory()
    return partial(ThreadLoading, threads=_THREADS, ahead=1, most=_MOST_AHEAD, cache_bytes=room)


def _use(name: str, idea: str, reads: str, prefetch: Callable[[Setting], _Prefetcher]) -> Strategy:
    """A strategy of a dataset and a prefetcher."""

    def open_epochs(setting: Setting) -> EpochLoader:
        return EpochLoader(setting, _open_dataset(setting, reads), prefetch(setting))

    return Strategy(name, idea, reads, open_epochs, keeps=prefetch is _tune)


_FROM_FILES: dict[str, tuple[str, Callable[[Setting], _Prefetcher]]] = {
    "sequential": ("The training loop loads each image itself", _by_workers(0)),
    "thread_queue": ("A thread loads 4 batches ahead", _by_thread),
    "process_queue": ("A process (a DataLoader's one worker) loads 4 batches ahead", _by_workers(1, ahead=_QUEUED)),
    "dataloader": ("A DataLoader's workers load ahead, as in torchvision's references", _by_workers()),
    "autotuned": ("Cache, shuffle, batch and prefetch, with sizes chosen while it runs", _tune),
}


def _list_strategies() -> Iterator[Strategy]:
    for end, disk, place in (("", "drive", "Drive"), ("_on_ssd", "ssd", "the local disk")):
        for name, (idea, prefetch) in _FROM_FILES.items():
            yield _use(f"{name}{end}", f"{idea}, from {place}.", f"files_on_{disk}", prefetch)
        yield _use(f"saved_tensors{end}", f"Resized and converted once, a .pt an image, by a DataLoader from {place}.",
                   f"tensors_on_{disk}", _by_workers())  # fmt: skip
    for count in range(5):
        idea = f"A DataLoader with {count} workers, from Drive."
        yield _use(f"dataloader_{count}", idea, "files_on_drive", _by_workers(count))
    for disk, idea in (("drive", "Files packed into shards, read from Drive by a DataLoader."),
                       ("ssd", "The shards are copied to the local disk first.")):  # fmt: skip
        yield _use(f"shards_on_{disk}", idea, f"shards_on_{disk}", _by_workers())
    yield _use("memory_mapped", "One file of all images and masks, mapped into memory.", "arrays_on_ssd",
               _by_workers(0))  # fmt: skip
    yield Strategy("in_memory", "Every sample is read from Drive into memory at the start.", "files_on_drive",
                   _open_in_memory, keeps=True)  # fmt: skip
    yield Strategy("packed", "From the same shards, workers send packed masks through reused buffers (make_loader).",
                   "shards_on_ssd", _open_packed)  # fmt: skip
    yield Strategy("train_while_copying", "make_loader starts with the first shard that is copied (ArrivingShards).",
                   "arriving_shards_on_drive", _ArrivingLoader)  # fmt: skip


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _list_strategies()}
"""All of them by name."""

DEFAULT_STRATEGIES = (
    "sequential", "thread_queue", "process_queue", "dataloader", "saved_tensors", "memory_mapped", "in_memory",
    "autotuned", "dataloader_on_ssd", "shards_on_drive", "shards_on_ssd", "packed", "train_while_copying",
)  # fmt: skip
"""What `compare` times where nothing is named."""


def choose_strategies(named: Sequence[str | Strategy] | None = None) -> list[Strategy]:
    """Strategies by name, or as they are, each once; None takes `DEFAULT_STRATEGIES`.

    Raises:
        ColabUtilsError: an unknown name, or none.

    Example:
        >>> [strategy.idea for strategy in choose_strategies(["dataloader_3"])]
        ['A DataLoader with 3 workers, from Drive.']
        >>> choose_strategies(["teleport"])
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected strategies among ...; found 'teleport': choose some of them
    """
    named = DEFAULT_STRATEGIES if named is None else named
    wanted = dict.fromkeys(one.strip() if isinstance(one, str) else one for one in named)
    unknown = [one for one in wanted if isinstance(one, str) and one not in STRATEGIES]
    if unknown or not wanted:
        found = repr(unknown[0]) if unknown else "none"
        raise ColabUtilsError(f"expected strategies among {', '.join(STRATEGIES)}; found {found}: choose some of them")
    return [STRATEGIES[one] if isinstance(one, str) else one for one in wanted]
