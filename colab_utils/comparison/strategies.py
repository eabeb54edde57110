"""The table of all strategies, and the datasets and loaders that they open.

A loader reads one kind of prepared data. It is a ``DataLoader`` of a dataset, or made by
`make_loader`. `deliver` moves its batches to the device.
"""

import io
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils._pytree import tree_map_only
from torch.utils.data import DataLoader, Dataset

from colab_utils.comparison.prepared import PreparedData
from colab_utils.data.decoding import guard_pillow
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.machine import find_free_memory
from colab_utils.processes import ThreadPool, map_ahead, quiet_fork
from colab_utils.require import require_choice
from colab_utils.units import format_bytes

# Number of samples in the shuffle buffer of ``tf.data``.
_SHUFFLED = 1000
# The seed of the order of images. With it, the first batches of the built-in dataset wait about as
# long as all of its batches do in the mean, so that a few batches of a slow strategy are typical.
SEED = 5
# A sample: an image, uint8 [3, H, W], and torchvision's target.
Sample = tuple[Tensor, dict[str, Any]]


@dataclass(frozen=True)
class Setting:
    """The data and the settings that all strategies of a comparison run with."""

    prepared: PreparedData
    """The images, in the forms that strategies read."""
    batch_size: int
    """Images in a batch."""
    workers: int
    """Worker processes, for the strategies that have workers."""
    device: str
    """The device to which batches are moved."""


class PillowFolder(CocoFolder):
    """A dataset of loose files that loads as torchvision's reference scripts do.

    Pillow decodes the images. The masks are drawn from polygons for each sample.
    """

    @staticmethod
    @guard_pillow()
    def decode(data: bytes | bytearray) -> Tensor:
        """Decode the bytes of an image to uint8 [3, H, W]."""
        picture = Image.open(io.BytesIO(data)).convert("RGB")
        return torch.from_numpy(np.array(picture)).permute(2, 0, 1)


class Items(Dataset[Sample]):
    """A dataset whose sample at ``index`` is ``load(items[index])``."""

    def __init__(self, items: Sequence[Any], load: Callable[[Any], Sample]) -> None:
        self._items = items
        self._load = load

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Sample:
        return self._load(self._items[index])


def collate(samples: Iterable[Sample]) -> tuple[Any, ...]:
    """Return ``(images, targets)``, as torchvision's reference scripts do."""
    return tuple(zip(*samples, strict=True))


class EpochLoader:
    """A loader of shuffled epochs. As in `make_loader`, a batch holds images of similar shape.

    Args:
        setting: the data and the batch size.
        dataset: a dataset of samples.
        ahead: number of batches that a thread loads before you ask for them. 0 starts no thread.
        **options: other arguments of torch's ``DataLoader``, which loads the batches.
    """

    def __init__(self, setting: Setting, dataset: Any, *, ahead: int = 0, **options: Any) -> None:
        sizes = setting.prepared.reference.sizes
        self._order = BatchSampler(len(dataset), setting.batch_size, SEED, sizes=sizes)
        self._ahead = ahead
        self._pool = ThreadPool(1)
        with quiet_fork():
            self._batches = DataLoader[Any](
                dataset, batch_sampler=self._order, collate_fn=collate, **options
            )
        self.workers = self._batches.num_workers

    def __iter__(self) -> Iterator[Any]:
        with quiet_fork():
            batches = iter(self._batches)
        if self._ahead:
            count = range(len(self._batches))
            yield from map_ahead(self._pool, lambda _: next(batches), count, ahead=self._ahead)
        else:
            yield from batches
        self._order.epoch += 1

    def close(self) -> None:
        """End the workers that the ``DataLoader`` keeps. The thread is told to end, but it is not
        waited for: it may hang in a read.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)
        iterator: Any = self._batches._iterator
        if iterator is not None:
            iterator._shutdown_workers()


def deliver(batch: Any, device: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
    """Return the images and targets of a batch, on the device, as torchvision models take them.

    The batch may be packed. Images become float32 in 0 to 1.
    """
    if isinstance(batch, PackedBatch):
        return batch.to_images(device), batch.to_targets(device)
    images, targets = batch
    images, targets = tree_map_only(Tensor, partial(Tensor.to, device=device), (images, targets))
    floats = [image if image.is_floating_point() else image / 255 for image in images]
    return floats, list(targets)


class TensorFlowLoader:
    """A loader by ``tf.data``: map, cache, shuffle, batch and prefetch, with AUTOTUNE.

    A sample goes through ``tf.data`` as bytes, because the images of a batch differ in shape.

    Raises:
        ColabUtilsError: if TensorFlow is not installed.
    """

    def __init__(self, dataset: Any, batch_size: int) -> None:
        try:
            import tensorflow as tf  # type: ignore[import-not-found,import-untyped,unused-ignore]
        except ImportError:
            raise ColabUtilsError(
                "TensorFlow is not installed on this machine, so tf.data is left out. Colab has it."
            ) from None
        with suppress(RuntimeError):
            # TensorFlow does not need the GPU here, and would take all of its memory.
            tf.config.set_visible_devices([], "GPU")

        def load(index: Any) -> bytes:
            content = io.BytesIO()
            torch.save(dataset[int(index)], content)
            return content.getvalue()

        samples = tf.data.Dataset.range(len(dataset)).map(
            lambda index: tf.numpy_function(load, [index], tf.string),
            num_parallel_calls=tf.data.AUTOTUNE,
        )
        batches = samples.cache().shuffle(_SHUFFLED).batch(batch_size)
        self._batches = batches.prefetch(tf.data.AUTOTUNE)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._batches.as_numpy_iterator():
            yield collate(map(load_sample, batch))

    def close(self) -> None:
        """Release the pipeline. TensorFlow then ends its threads."""
        del self._batches


def load_sample(content: bytes) -> Sample:
    """Load a sample from the bytes that ``torch.save`` wrote."""
    sample: Sample = torch.load(io.BytesIO(content), weights_only=True)
    return sample


# Number of loose files on Drive that are read at the same time, by all workers together, or by the
# threads that read samples into memory.
_STREAMS = 32
# All samples may take this share of the free memory.
_MEMORY_SHARE = 0.5
# Number of batches that a thread or a process loads ahead.
_QUEUED = 4


@dataclass(frozen=True)
class Strategy:
    """A way of loading: from files to batches.

    Example:
        >>> STRATEGIES["packed"].reads, STRATEGIES["sequential"].reads
        ('shards_on_ssd', 'files_on_drive')
    """

    name: str
    """Name of the strategy, as you pass it to `compare`."""
    idea: str
    """What the strategy does, in one sentence."""
    reads: str
    """The kind of prepared data that the strategy reads (see `PreparedData.get`)."""
    open: Callable[[Setting], Any]
    """Opens a loader: an iterable of ``(images, targets)``, or of packed batches. Images are uint8,
    or float32 in 0 to 1. Each pass is an epoch. The loader's ``close()`` ends what it started."""
    keeps: bool = False
    """Whether the loader keeps the samples that it read. Then only later epochs show its speed."""
    title: str = ""
    """Name of the strategy in charts. A {} in it stands for the number of workers, such as
    "2 workers". If the title is empty, charts show ``name``.
    """


def _load_tensors(file: Path) -> Sample:
    return load_sample(read_file(file))


def _open_dataset(setting: Setting, kind: str) -> Any:
    made = setting.prepared.get(kind)
    name, _, disk = kind.partition("_on_")
    if name == "files":
        return PillowFolder(made.folder, setting.prepared.annotations, streams=1)
    if name == "tensors":
        map_file = partial(torch.load, mmap=True, weights_only=True)
        return Items(made.files, map_file if disk == "ssd" else _load_tensors)
    return ShardDataset(made.folder)


def _by_workers(
    setting: Setting, kind: str, *, workers: int | None = None, prefetch: int = 2, ahead: int = 0
) -> EpochLoader:
    """Open torch's ``DataLoader``. Its workers last from epoch to epoch. With 0 workers, the
    process that trains loads the samples itself, or a thread of it loads ``ahead`` batches before.
    """
    if workers is None:
        workers = setting.workers
    options = {"persistent_workers": True, "prefetch_factor": prefetch} if workers else {}
    dataset = _open_dataset(setting, kind)
    return EpochLoader(setting, dataset, ahead=ahead, num_workers=workers, **options)


def _by_tensorflow(setting: Setting, kind: str) -> TensorFlowLoader:
    return TensorFlowLoader(_open_dataset(setting, kind), setting.batch_size)


def _by_streams(setting: Setting, kind: str) -> Loader:
    """Open `make_loader` over loose files. Its workers read the files of later batches ahead, many
    at the same time.
    """
    dataset = CocoFolder(setting.prepared.get(kind).folder, setting.prepared.annotations)
    return _load_packed(setting, dataset, streams=max(1, _STREAMS // max(1, setting.workers)))


def _in_memory(setting: Setting, kind: str) -> EpochLoader:
    """Read every sample into memory; return a loader over them.

    Raises:
        ColabUtilsError: if the samples of the complete dataset would take more than half of the
            free memory.
    """
    dataset = _open_dataset(setting, kind)
    total = setting.prepared.total
    few = [dataset[index] for index in range(min(4, len(dataset)))]
    needed = sum(image.nbytes + target["masks"].nbytes for image, target in few) / len(few) * total
    free = find_free_memory()
    if needed > _MEMORY_SHARE * free:
        raise ColabUtilsError(
            f"The samples of all {total:,} images take {format_bytes(needed)}, more than half of "
            f"the free memory ({format_bytes(free)}). Leave this strategy out."
        )
    with ThreadPool(_STREAMS) as pool:
        samples = list(pool.map(dataset.__getitem__, range(len(dataset))))
    return EpochLoader(setting, samples)


def _packed(setting: Setting, kind: str) -> Loader:
    return _load_packed(setting, _open_dataset(setting, kind))


def _load_packed(setting: Setting, dataset: Any, **options: Any) -> Loader:
    return make_loader(
        dataset,
        batch_size=setting.batch_size,
        workers=setting.workers,
        deliver="packed",
        seed=SEED,
        **options,
    )


def _while_copying(setting: Setting, kind: str) -> Iterator[Any]:
    """Yield the batches of one epoch after another from shards that are copied meanwhile. The
    copies go to a new empty folder.
    """
    shards = setting.prepared.get(kind).folder
    with ExitStack() as opened:
        folder = opened.enter_context(tempfile.TemporaryDirectory(dir=setting.prepared.ssd))
        dataset = ArrivingShards(shards, Path(folder, "shards"))
        opened.callback(dataset.stop)
        loader = opened.enter_context(closing(_load_packed(setting, dataset)))
        while True:
            yield from loader


_FILES = "files_on_drive"
_ALONE = partial(_by_workers, workers=0)
_THREAD = partial(_by_workers, workers=0, ahead=_QUEUED)
_AHEAD = partial(_by_workers, workers=1, prefetch=_QUEUED)

_TABLE: tuple[tuple[Any, ...], ...] = (
    ("sequential", "plain loop", "The training loop loads each image itself.", _FILES, _ALONE),
    ("thread_queue", "thread ahead", "A thread loads 4 batches ahead.", _FILES, _THREAD),
    ("process_queue", "process ahead", "A process loads 4 batches ahead.", _FILES, _AHEAD),
    (
        "dataloader",
        "{}",
        "A DataLoader's workers load ahead, as in torchvision's references.",
        _FILES,
        _by_workers,
    ),
    (
        "saved_tensors",
        ".pt files on Drive",
        "Each image is converted once, to a .pt file.",
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
        "streams",
        f"{_STREAMS} streams",
        f"The files stay on Drive; make_loader's workers read {_STREAMS} of them at once.",
        _FILES,
        _by_streams,
    ),
    (
        "tensorflow",
        "tf.data",
        "TensorFlow's cache (all samples stay in memory), shuffle, batch, prefetch.",
        _FILES,
        _by_tensorflow,
    ),
    (
        "dataloader_on_ssd",
        "loose files on SSD",
        "The image files are copied first, by many streams (copy_images).",
        "files_on_ssd",
        _by_workers,
    ),
    (
        "shards_on_drive",
        "shards on Drive",
        "Workers read all images of a batch from the shards at once.",
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
        "make_loader on shards",
        "From the same shards, make_loader's workers send packed masks through reused buffers.",
        "shards_on_ssd",
        _packed,
    ),
    (
        "train_while_copying",
        "make_loader while copying",
        "make_loader starts with the first shard that is copied.",
        "shards_on_drive",
        _while_copying,
    ),
)

STRATEGIES = {
    name: Strategy(
        name,
        idea,
        kind,
        partial(load, kind=kind),
        keeps=load in (_by_tensorflow, _in_memory),
        title=title,
    )
    for name, title, idea, kind, load in _TABLE
}
"""All strategies by name: those that are usually advised, and those of this package. `compare`
times all of them if you name none.
"""


def choose_strategies(named: Sequence[str | Strategy] | None = None) -> list[Strategy]:
    """Return the strategies that are named, each once.

    Args:
        named: names of `STRATEGIES`, or strategies of your own. None takes all `STRATEGIES`.

    Raises:
        ColabUtilsError: if a name is unknown, or ``named`` is empty.

    Example:
        >>> [strategy.title for strategy in choose_strategies(["sequential"])]
        ['plain loop']
        >>> choose_strategies(["teleport"])
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: strategies must be one of ...; it is 'teleport'. ...
    """
    chosen = dict[Strategy, None]()
    for strategy in STRATEGIES if named is None else named:
        if isinstance(strategy, str):
            name = strategy.strip()
            require_choice("strategies", name, STRATEGIES)
            strategy = STRATEGIES[name]
        chosen[strategy] = None
    if not chosen:
        raise ColabUtilsError(f"No strategy is named. Choose some of {', '.join(STRATEGIES)}.")
    return list(chosen)
