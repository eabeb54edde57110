"""The strategies: how each opens one kind of prepared data, by a dataset and a prefetcher or by
`make_loader`, and the table of them all.
"""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from colab_utils.comparison.loaders import (
    EpochLoader,
    Items,
    PillowFolder,
    Sample,
    Setting,
    TensorFlowLoader,
    ThreadLoading,
    collate,
    load_sample,
)
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.machine import find_free_memory
from colab_utils.processes import ThreadPool
from colab_utils.require import require_choice
from colab_utils.units import format_bytes

# So many threads read into memory.
_THREADS = 8
# Of loose files on Drive so many are read at once, by all workers together.
_STREAMS = 32
# All samples may take this share of the free memory.
_MEMORY_SHARE = 0.5
# A producer loads so many batches ahead.
_QUEUED = 4


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


def _load_tensors(file: Path) -> Sample:
    return load_sample(read_file(file))


def _count_bytes(sample: Sample) -> int:
    return sample[0].nbytes + sum(
        part.nbytes for part in sample[1].values() if isinstance(part, Tensor)
    )


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
    setting: Setting, kind: str, *, workers: int | None = None, ahead: int = 2
) -> EpochLoader:
    """Open torch's ``DataLoader``, whose workers last from epoch to epoch. With 0 workers, the
    training loop loads.
    """
    if workers is None:
        workers = setting.workers
    options: dict[str, Any] = {"num_workers": workers, "collate_fn": collate}
    if workers:
        options |= {"persistent_workers": True, "prefetch_factor": ahead}
    return EpochLoader(setting, _open_dataset(setting, kind), DataLoader, **options)


def _by_thread(setting: Setting, kind: str) -> EpochLoader:
    dataset = _open_dataset(setting, kind)
    return EpochLoader(setting, dataset, ThreadLoading, ahead=_QUEUED)


def _by_tensorflow(setting: Setting, kind: str) -> TensorFlowLoader:
    return TensorFlowLoader(_open_dataset(setting, kind), setting.batch_size)


def _by_streams(setting: Setting, kind: str) -> Loader:
    """Open `make_loader` over the files where they lie. Its workers read the files of later batches
    ahead, many at once.
    """
    folder = setting.prepared.get(kind).folder
    return make_loader(
        CocoFolder(folder, setting.prepared.annotations),
        batch_size=setting.batch_size,
        workers=setting.workers,
        streams=max(1, _STREAMS // max(1, setting.workers)),
        deliver="packed",
    )


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
        raise ColabUtilsError(
            f"The samples of all {total:,} images take {format_bytes(needed)}, more than half of "
            f"the free memory ({format_bytes(free)}). Leave this strategy out."
        )
    with ThreadPool(_THREADS) as pool:
        samples = list(pool.map(dataset.__getitem__, range(len(dataset))))
    return EpochLoader(setting, samples, DataLoader, collate_fn=collate)


def _packed(setting: Setting, kind: str, dataset: ShardDataset | None = None) -> Loader:
    if dataset is None:
        dataset = _open_dataset(setting, kind)
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
        name,
        idea,
        kind,
        partial(load, kind=kind),
        keeps=load in (_by_tensorflow, _in_memory),
        title=title,
    )
    for name, title, idea, kind, load in _TABLE
}
"""What people are told to use, and ours, by name; `compare` times them all where nothing is
named.
"""


def choose_strategies(named: Sequence[str | Strategy] | None = None) -> list[Strategy]:
    """Return strategies that are given by name or as they are, each once. None takes all of
    `STRATEGIES`.

    Raises:
        ColabUtilsError: an unknown name, or none.

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
