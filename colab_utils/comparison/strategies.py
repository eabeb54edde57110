"""The strategies: each reads one kind of prepared data, by a dataset and a prefetcher or by
`make_loader`.

First the data, the same images as loose files, saved tensors or shards; then what loads them; then
the table.
"""

import io
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colab_utils.data.coco import read_coco, write_subset
from colab_utils.data.decoding import guard_pillow
from colab_utils.drive import is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.machine import find_free_memory, require_space
from colab_utils.processes import quiet_fork
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, read_at_full_speed, slow_down
from colab_utils.units import format_bytes

_CURE = "or compare fewer images"  # where the disk is full
_STREAMS = 4  # files read at the same time: as many as `copy_shards` reads
_SHARD_BYTES = 128e6  # of the shards of a large dataset, as `write_shards` makes them
_THREADS = 8  # that read into memory
_MEMORY_SHARE = 0.5  # of the free memory, for all samples
_CACHE_SHARE = 0.25  # of the free memory, for the tuned pipeline
_QUEUED = 4  # batches that a producer loads ahead
_MOST_AHEAD = 16  # batches that the tuned pipeline loads ahead, at most

_Sample = tuple[Tensor, dict[str, Any]]  # image uint8 [3, H, W] and torchvision's target


@dataclass(frozen=True)
class PreparedFiles:
    """One kind of prepared data: its files and what they cost."""

    folder: Path
    """Where it lies."""
    files: tuple[Path, ...]
    """The files that a strategy reads, and no other file of the folder."""
    once_s: float = 0.0
    """Seconds to make it, once."""
    session_s: float = 0.0
    """Seconds to copy it to the empty disk of a new machine, in each session."""

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(path.stat().st_size for path in self.files)


class PreparedData:
    """The first ``count`` usable images of a dataset as files of several kinds, each made when it
    is first needed.

    Attributes:
        images: the image folder; it stands for Drive.
        annotations: COCO JSON of the compared images.
        reference: their samples, as torchvision's references give them.
        total: images of the dataset.
        fingerprint: of the dataset's annotations.
        bad: why images were left out.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        folder: where data is prepared.
        profile: the speed of Drive within `slow_drive`, and for the seconds of a copy.
        count: images at most.

    Raises:
        ColabUtilsError: no image folder, no annotations, or no usable image.
    """

    def __init__(
        self,
        images: str | Path,
        annotations: str | Path,
        folder: str | Path,
        *,
        count: int,
        profile: DriveProfile | None,
    ) -> None:
        self.images = require_local_path(images)
        self.folder = require_local_path(folder)
        self.profile = profile
        coco = read_coco(annotations)
        self.total = len(coco)
        self.fingerprint = coco.fingerprint
        self.drive = self.folder / "drive"
        self.ssd = (
            Path(tempfile.gettempdir(), "colab_utils-ssd")
            if is_on_drive(folder)
            else self.folder / "ssd"
        )
        rows = range(min(len(coco), count))
        dataset = CocoFolder(images, write_subset(coco, rows, self.folder / "all.json"))
        errors = _run_in_threads("decoding the images", partial(_explain_bad, dataset), rows)
        self.bad = [error for error in errors if error]
        usable = [row for row, error in enumerate(errors) if not error]
        if not usable:
            why = (
                f"The first: {self.bad[0]}"
                if self.bad
                else f"{annotations} names none: name an instances file."
            )
            raise ColabUtilsError(f"expected usable images in {images}, found none. {why}")
        self.annotations = write_subset(coco, usable, self.folder / "annotations.json")
        self.reference = CocoFolder(images, self.annotations)
        self.name = f"{coco.fingerprint[:8]}-{len(usable)}"
        self._made: dict[str, PreparedFiles] = {}
        self.ssd.mkdir(parents=True, exist_ok=True)

    def __len__(self) -> int:
        return len(self.reference)

    def get(self, kind: str) -> PreparedFiles:
        """One kind by its name: ``files``, ``tensors`` or ``shards``, then ``_on_drive`` or
        ``_on_ssd``.

        Raises:
            ColabUtilsError: it cannot be made, or needs more disk than is free.
        """
        if kind not in self._made:
            with read_at_full_speed():
                self._made[kind] = self._prepare(kind)
        return self._made[kind]

    def _prepare(self, kind: str) -> PreparedFiles:
        name, _, disk = kind.partition("_on_")
        if disk == "ssd":
            return self._copy(name, self.get(f"{name}_on_drive"))
        if name == "files":
            return PreparedFiles(
                self.images, tuple(map(self.reference.find_path, range(len(self))))
            )
        return self._make(name)

    @contextmanager
    def slow_drive(self) -> Iterator[None]:
        """Read what stands for Drive at the speed of the profile while the block runs, and all else
        at full speed.

        Processes that start within the block do so, too.
        """
        with read_at_full_speed():
            slow_down(self.drive, self.profile)
            # The folders may lie in one another, and of a folder in another the inner one counts.
            slow_down(self.folder, None)
            slow_down(self.ssd, None)
            slow_down(self.images, self.profile)
            yield

    def _make(self, name: str) -> PreparedFiles:
        """Write one kind to Drive in each comparison, and time that."""
        target = self.drive / f"{name}-{self.name}"
        source = self.get("files_on_ssd" if name == "shards" else "shards_on_ssd")
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        began_s = perf_counter()
        if name == "shards":
            shard_mb = max(0.01, min(4.0, source.bytes / 8e6))  # 8 shards or more
            write_shards(source.folder, self.annotations, shards=target, shard_mb=shard_mb)
        else:
            dataset = ShardDataset(source.folder)
            image, found = dataset[0]
            require_space(target, len(dataset) * (image.nbytes + found["masks"].nbytes), _CURE)
            _write_tensors(dataset, target)
        once_s = source.once_s + source.session_s + perf_counter() - began_s
        files = tuple(sorted(path for path in target.iterdir() if path.is_file()))
        return PreparedFiles(target, files, once_s)

    def _copy(self, name: str, made: PreparedFiles) -> PreparedFiles:
        """Copy one kind from Drive to the local disk in each comparison: at full speed, and time it
        at Drive's.
        """
        target = self.ssd / f"{name}-{self.name}"
        copies = tuple(target / path.relative_to(made.folder) for path in made.files)
        began_s = perf_counter()
        opened = float(len(made.files))
        if name == "shards":
            shutil.rmtree(target, ignore_errors=True)
            copy_shards(made.folder, target)
            opened = 2 * made.bytes / _SHARD_BYTES
        else:
            require_space(target, made.bytes, _CURE)
            _run_in_threads("copying", _copy_file, list(zip(made.files, copies, strict=True)))
        seconds = perf_counter() - began_s
        if self.profile is not None:
            seconds += (
                opened * self.profile.open_s / _STREAMS + made.bytes / self.profile.bytes_per_s
            )
        return replace(made, folder=target, files=copies, session_s=seconds)


def _run_in_threads(label: str, call: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    """What a call gives for each item, in order, by as many threads as `copy_shards` reads with."""
    with ThreadPoolExecutor(_STREAMS) as pool:
        return list(show_progress(label, pool.map(call, items), total=len(items), unit="file"))


def _explain_bad(dataset: CocoFolder, row: int) -> str:
    """Why an image cannot be used; empty where it can."""
    try:
        dataset[row]
    except ColabUtilsError as error:
        return str(error)
    return ""


def _copy_file(paths: tuple[Path, Path]) -> None:
    source, copy = paths
    copy.parent.mkdir(parents=True, exist_ok=True)
    copy.write_bytes(read_file(source))


def _write_tensors(dataset: ShardDataset, target: Path) -> None:
    """One ``.pt`` an image: the sample that goes to the model, as uint8."""
    for row in range(len(dataset)):
        image, found = dataset[row]
        torch.save((image.contiguous(), found), target / f"{row:07d}.pt")


@dataclass(frozen=True)
class Setting:
    """What a strategy runs with."""

    prepared: PreparedData
    """The data."""
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
        >>> STRATEGIES["packed"].reads, STRATEGIES["sequential"].reads
        ('shards_on_ssd', 'files_on_drive')
    """

    name: str
    """How people ask for it."""
    idea: str
    """What it does, in one sentence."""
    reads: str
    """The kind of prepared data that it reads (see `PreparedData.get`)."""
    open: Callable[[Setting], Any]
    """Gives an iterable of ``(images, targets)``, images uint8 or float32 in 0 to 1, or of packed
    batches; each pass is an epoch, and its ``close()`` ends what it started."""
    keeps: bool = False
    """Whether it keeps the samples that it read: then only later epochs show its speed."""
    title: str = ""
    """How charts call it ({} becomes "2 workers"); empty for ``name``."""


class PillowFolder(CocoFolder):
    """Image files and polygons as in torchvision's references: decoded by Pillow, masks drawn for
    each sample.
    """

    @staticmethod
    @guard_pillow()
    def decode(data: bytes | bytearray) -> Tensor:
        """Image bytes as uint8 [3, H, W]."""
        return torch.from_numpy(np.array(Image.open(io.BytesIO(data)).convert("RGB"))).permute(
            2, 0, 1
        )


class Items(Dataset[_Sample]):
    """A dataset of what ``load`` makes of each item."""

    def __init__(self, items: Sequence[Any], load: Callable[[Any], _Sample]) -> None:
        self._items = items
        self._load = load

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> _Sample:
        return self._load(self._items[index])


def _load_tensors(file: Path) -> _Sample:
    return torch.load(io.BytesIO(read_file(file)), weights_only=True)


def _count_bytes(sample: _Sample) -> int:
    return sample[0].nbytes + sum(
        part.nbytes for part in sample[1].values() if isinstance(part, Tensor)
    )


def _collate(samples: Iterable[_Sample]) -> tuple[Any, ...]:
    """``(images, targets)``, as torchvision's references give them."""
    return tuple(zip(*samples, strict=True))


class EpochLoader:
    """Epochs of a dataset through a prefetcher, shuffled; a batch holds images of like shape, as in
    `make_loader`.

    A prefetcher, such as torch's ``DataLoader``, gives an epoch of ``(images, targets)`` at each
    pass.
    """

    def __init__(
        self, setting: Setting, dataset: Any, prefetcher: Callable[..., Any], **options: Any
    ) -> None:
        sizes = setting.prepared.reference.sizes
        self._order = BatchSampler(len(dataset), setting.batch_size, 0, sizes=sizes)
        with quiet_fork():
            self._batches = prefetcher(dataset, batch_sampler=self._order, **options)
        self.workers = getattr(self._batches, "num_workers", 0)

    def __iter__(self) -> Iterator[Any]:
        with quiet_fork():
            batches = iter(self._batches)
        yield from batches
        self._order.epoch += 1

    def close(self) -> None:
        """End the workers that a ``DataLoader`` keeps from epoch to epoch, or the threads."""
        getattr(getattr(self._batches, "_iterator", None), "_shutdown_workers", int)()
        getattr(self._batches, "close", int)()


def deliver(batch: Any, device: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """A batch, packed or not, as torchvision models take it: images float32 in 0 to 1, on the
    device, and targets.
    """
    if isinstance(batch, PackedBatch):
        return batch.to_images(device), batch.to_targets(device)
    images, targets = batch
    return (
        [
            image.to(device) if image.is_floating_point() else image.to(device).div(255)
            for image in images
        ],
        [
            {key: part.to(device) if isinstance(part, Tensor) else part for key, part in t.items()}
            for t in targets
        ],
    )


class ThreadLoading:
    """Threads load ``ahead`` batches ahead, and one more, up to ``most``, whenever the step has to
    wait.

    So many samples as ``cached`` stay in memory: those that were read last.
    """

    def __init__(
        self,
        dataset: Any,
        batch_sampler: Iterable[list[int]],
        *,
        threads: int,
        ahead: int,
        most: int,
        cached: int = 0,
    ) -> None:
        self._load = lru_cache(cached)(dataset.__getitem__)
        self._order = batch_sampler
        self._pool = ThreadPoolExecutor(threads)
        self._ahead = ahead
        self._most = most

    def __iter__(self) -> Iterator[Any]:
        todo = iter(self._order)
        pending = deque[Future[Any]]()
        while True:
            while len(pending) < self._ahead and (indices := next(todo, None)) is not None:
                pending.append(
                    self._pool.submit(lambda batch: _collate(map(self._load, batch)), indices)
                )
            if not pending:
                return
            if not pending[0].done():
                self._ahead = min(self._ahead + 1, self._most)
            yield pending.popleft().result()

    def close(self) -> None:
        """Forget the samples; a thread that hangs in a read is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        self._load.cache_clear()


def _open_dataset(setting: Setting, kind: str) -> Any:
    made = setting.prepared.get(kind)
    name, _, disk = kind.partition("_on_")
    if name == "files":
        return PillowFolder(made.folder, setting.prepared.annotations)
    if name == "tensors":
        map_file = partial(torch.load, mmap=True, weights_only=True)
        return Items(made.files, map_file if disk == "ssd" else _load_tensors)
    return ShardDataset(made.folder)


def _by_workers(
    setting: Setting, kind: str, *, workers: int | None = None, ahead: int = 2
) -> EpochLoader:
    """Torch's ``DataLoader``, whose workers last from epoch to epoch; with 0 workers the training
    loop loads.
    """
    workers = setting.workers if workers is None else workers
    lasting = {"persistent_workers": True, "prefetch_factor": ahead} if workers else {}
    options = {"num_workers": workers, "collate_fn": _collate, **lasting}
    return EpochLoader(setting, _open_dataset(setting, kind), DataLoader, **options)


def _by_thread(setting: Setting, kind: str) -> EpochLoader:
    return EpochLoader(
        setting, _open_dataset(setting, kind), ThreadLoading, threads=1, ahead=_QUEUED, most=_QUEUED
    )


def _tuned(setting: Setting, kind: str) -> EpochLoader:
    """Threads load ahead, and what they loaded last stays in a part of the memory."""
    prepared = setting.prepared
    share = len(prepared) / prepared.total  # of the dataset, and so of the memory
    with read_at_full_speed():
        sample_bytes = _count_bytes(prepared.reference[0])
    cached = int(_CACHE_SHARE * share * find_free_memory() / sample_bytes)
    tuned = {"threads": _THREADS, "ahead": 1, "most": _MOST_AHEAD, "cached": cached}
    return EpochLoader(setting, _open_dataset(setting, kind), ThreadLoading, **tuned)


def _in_memory(setting: Setting, kind: str) -> EpochLoader:
    """Read every sample; refused where those of the complete dataset would take more than half of
    the free memory.
    """
    dataset = _open_dataset(setting, kind)
    total = setting.prepared.total
    few = [dataset[index] for index in range(min(4, len(dataset)))]
    needed = sum(map(_count_bytes, few)) / len(few) * total
    free = find_free_memory()
    if needed > _MEMORY_SHARE * free:
        found = (
            f"{format_bytes(needed)} of samples and {format_bytes(free)} free: leave this "
            "strategy out"
        )
        raise ColabUtilsError(
            f"expected all {total:,} images to fit into half of the free memory, found {found}"
        )
    with ThreadPoolExecutor(_THREADS) as pool:
        samples = list(pool.map(dataset.__getitem__, range(len(dataset))))
    return EpochLoader(setting, samples, DataLoader, collate_fn=_collate)


def _packed(setting: Setting, kind: str, dataset: ShardDataset | None = None) -> Loader:
    dataset = _open_dataset(setting, kind) if dataset is None else dataset
    return make_loader(
        dataset, batch_size=setting.batch_size, workers=setting.workers, deliver="packed"
    )


class ArrivingLoader:
    """`make_loader` over shards that are copied while it loads, to a folder that is empty at the
    start.
    """

    def __init__(self, setting: Setting, kind: str) -> None:
        shards = setting.prepared.get(kind).folder
        with ExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory(dir=setting.prepared.ssd))
            dataset = ArrivingShards(shards, Path(folder, "shards"))
            opened.callback(dataset.stop)
            self._loader = opened.enter_context(closing(_packed(setting, kind, dataset)))
            self.close = opened.pop_all().close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


_FILES = "files_on_drive"
_ALONE = partial(_by_workers, workers=0)
_AHEAD = partial(_by_workers, workers=1, ahead=_QUEUED)
_TABLE: tuple[tuple[str, str, str, str, Callable[..., Any]], ...] = (
    ("sequential", "plain loop", "The training loop loads each image itself.", _FILES, _ALONE),
    ("thread_queue", "thread ahead", "A thread loads 4 batches ahead.", _FILES, _by_thread),
    ("process_queue", "process ahead", "A process loads 4 batches ahead.", _FILES, _AHEAD),
    (
        "dataloader",
        "{}",
        "A DataLoader's workers load ahead, as in torchvision's own.",
        _FILES,
        _by_workers,
    ),
    (
        "saved_tensors",
        ".pt files on Drive",
        "Converted once: one .pt an image.",
        "tensors_on_drive",
        _by_workers,
    ),
    (
        "memory_mapped",
        "memory map on SSD",
        "The .pt files are copied and mapped.",
        "tensors_on_ssd",
        _ALONE,
    ),
    (
        "autotuned",
        "tuned pipeline",
        "Cache, shuffle, batch, prefetch: sizes chosen on the way.",
        _FILES,
        _tuned,
    ),
    (
        "dataloader_on_ssd",
        "loose files on SSD",
        "The image files are copied first.",
        "files_on_ssd",
        _by_workers,
    ),
    (
        "shards_on_drive",
        "shards on Drive",
        "Workers read single images out of shards.",
        "shards_on_drive",
        _by_workers,
    ),
    (
        "shards_on_ssd",
        "shards on SSD",
        "The shards are copied to the local disk first.",
        "shards_on_ssd",
        _by_workers,
    ),
    (
        "in_memory",
        "all in memory",
        "Every sample is read from Drive into memory at the start.",
        _FILES,
        _in_memory,
    ),
    (
        "packed",
        "make_loader",
        "From the same shards, make_loader's workers send packed masks through reused buffers.",
        "shards_on_ssd",
        _packed,
    ),
    (
        "train_while_copying",
        "make_loader while copying",
        "make_loader starts with the first shard that is copied.",
        "shards_on_drive",
        ArrivingLoader,
    ),
)

STRATEGIES = {
    name: Strategy(
        name, idea, kind, partial(load, kind=kind), keeps=load in (_tuned, _in_memory), title=title
    )
    for name, title, idea, kind, load in _TABLE
}
"""What people are told to use, and ours, by name; `compare` times them all where nothing is
named.
"""


def choose_strategies(named: Sequence[str | Strategy] | None = None) -> list[Strategy]:
    """Strategies by name, or as they are, each once; None takes all of `STRATEGIES`.

    Raises:
        ColabUtilsError: an unknown name, or none.

    Example:
        >>> [strategy.title for strategy in choose_strategies(["sequential"])]
        ['plain loop']
        >>> choose_strategies(["teleport"])
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected strategies among ...; found 'teleport': ...
    """
    named = [*STRATEGIES] if named is None else named
    wanted = dict.fromkeys(one.strip() if isinstance(one, str) else one for one in named)
    unknown = [one for one in wanted if isinstance(one, str) and one not in STRATEGIES]
    if unknown or not wanted:
        found = repr(unknown[0]) if unknown else "none"
        raise ColabUtilsError(
            f"expected strategies among {', '.join(STRATEGIES)}; found {found}: choose some of them"
        )
    return [STRATEGIES[one] if isinstance(one, str) else one for one in wanted]
