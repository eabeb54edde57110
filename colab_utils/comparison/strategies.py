"""The table of all strategies, and the functions that open their loaders.

A loader reads one kind of prepared data. It is a ``DataLoader`` of a dataset, or made by
`make_loader`.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from colab_utils.comparison.loaders import (
    SEED,
    EpochLoader,
    Items,
    PillowFolder,
    Sample,
    Setting,
    TensorFlowLoader,
    load_sample,
)
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.machine import find_free_memory
from colab_utils.processes import ThreadPool
from colab_utils.require import require_choice
from colab_utils.units import format_bytes

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
    image, target = dataset[0]
    needed = (image.nbytes + target["masks"].nbytes) * total
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


class ArrivingLoader:
    """A loader over shards that are copied while it loads. The copies go to a new empty folder."""

    def __init__(self, setting: Setting, kind: str) -> None:
        shards = setting.prepared.get(kind).folder
        with ExitStack() as opened:
            folder = opened.enter_context(tempfile.TemporaryDirectory(dir=setting.prepared.ssd))
            dataset = ArrivingShards(shards, Path(folder, "shards"))
            opened.callback(dataset.stop)
            self._loader = opened.enter_context(closing(_load_packed(setting, dataset)))
            self.close = opened.pop_all().close

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)


_FILES = "files_on_drive"
_ALONE = partial(_by_workers, workers=0)
_THREAD = partial(_by_workers, workers=0, ahead=_QUEUED)
_AHEAD = partial(_by_workers, workers=1, prefetch=_QUEUED)

_TABLE: tuple[tuple[str, str, str, str, Callable[..., Any]], ...] = (
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
        ArrivingLoader,
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
