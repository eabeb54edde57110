"""Each stage of loading, timed alone: what it takes per image, in wall time and in CPU time."""

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import inf
from statistics import fmean, median
from time import perf_counter, sleep, thread_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colab_utils.data.masks import unpack_masks
from colab_utils.diagnosis.timing import fetch_batches, find_tensors, time_batches
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader

# Of so many images, the files are read, and of so many of them, the other stages are timed.
_IMAGES = 256
_WORKED = 32
# So many files are read at the same time, the more the later: from these shares of the time on.
_WIDTHS = {1: 0.0, 8: 0.2, 64: 0.4}
# More reads at the same time may not make each of them so many times as long. If they do, they have
# met the limit of the folder.
_LONGER = 2.0
# What a read takes is known from so many reads.
_ENOUGH_READS = 4
_HANDED_BATCHES = 40
# The worker that times samples fails after this time plus three times the ``seconds`` of
# `time_stages`.
_TIMEOUT_S = 60.0
# Attributes of torchvision's datasets.
_TRANSFORMS = ("transforms", "transform", "target_transform")


@dataclass(frozen=True)
class Stage:
    """Time that one stage of loading, or of training, takes **per image**, in milliseconds."""

    name: str
    median_ms: float
    """Wall time: half of the calls take no longer."""
    p95_ms: float
    """Wall time: 95 % of the calls take no longer."""
    cpu_ms: float
    """Mean CPU time."""
    mean_ms: float = 0.0
    """Mean wall time. It decides how many images the stage can handle in a second."""

    @classmethod
    def from_calls(
        cls, name: str, wall_ms: Sequence[float] | NDArray[np.float64], cpu_ms: float
    ) -> "Stage":
        """Make a stage from the wall times of its calls and their mean CPU time, in ms."""
        median, p95 = np.percentile(wall_ms, (50, 95)).tolist()
        return cls(name, median, p95, cpu_ms, float(np.mean(wall_ms)))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.median_ms:.1f} ms an image (p95 {self.p95_ms:.1f} ms, CPU "
            f"{self.cpu_ms:.1f} ms)"
        )


def time_calls(
    name: str,
    call: Callable[[Any], Any],
    arguments: Iterable[Any],
    *,
    max_s: float,
    images: float = 1,
) -> Stage:
    """Time ``call(argument)`` for each argument, in this thread, for about ``max_s`` seconds.

    There must be one argument at least. A call handles ``images`` images, and the times of the
    stage are per image.
    """
    wall_ms = []
    began_s = perf_counter()
    cpu_began_s = thread_time()
    for argument in arguments:
        call_began_s = perf_counter()
        call(argument)
        ended_s = perf_counter()
        wall_ms.append((ended_s - call_began_s) * 1000 / images)
        if ended_s - began_s > max_s:
            break
    return Stage.from_calls(
        name, wall_ms, (thread_time() - cpu_began_s) / len(wall_ms) / images * 1000
    )


class LoadingStages(NamedTuple):
    """Result of `time_stages`. If samples could not be timed, it has at most the hand-off."""

    stages: dict[str, Stage]
    """Stages by name: those of a sample, then those of a whole batch."""
    indices: list[int]
    """Indices of the images that were timed."""
    unseen: str
    """The error, if samples could not be timed; else ""."""
    read_s: tuple[float, ...] = (0.0,)
    """Seconds that an image is waited for: of single reads, if the dataset is of this package."""
    files_per_s: float = inf
    """Files that the folder gives in a second at most, as far as that was seen."""
    file_bytes: float = 0.0
    """Mean size of a file."""


class Reads(NamedTuple):
    """Result of `time_reads`."""

    seconds: tuple[float, ...]
    """Seconds of single reads, which did not meet the limit of the folder."""
    files_per_s: float
    """Files that the folder gives in a second at most; infinite if the limit was not met."""
    cpu_s: float
    """Mean CPU seconds of a read."""
    contents: dict[int, bytes]
    """The bytes of the files, by their index."""


def time_reads(read: Callable[[int], bytes], indices: Sequence[int], *, seconds: float) -> Reads:
    """Read files for so many seconds, and wait for the last ones: first one at a time, then eight
    at once, then 64.

    The times of reads are those of as many at once as still leave single reads as they are.
    """
    began_s = perf_counter()
    left = deque(indices)
    contents: dict[int, bytes] = {}
    # For each number of reads at once, when each read ended, and how long it took.
    reads: dict[int, list[tuple[float, float]]] = {width: [] for width in _WIDTHS}
    cpu_s: list[float] = []

    def read_on(thread: int) -> None:
        own_width = min(width for width in _WIDTHS if width > thread)
        sleep(max(0.0, began_s + _WIDTHS[own_width] * seconds - perf_counter()))
        while left and (perf_counter() < began_s + seconds or not contents):
            index = left.popleft()
            read_began_s = perf_counter()
            cpu_began_s = thread_time()
            contents[index] = read(index)
            cpu_s.append(thread_time() - cpu_began_s)
            ended_s = perf_counter()
            share = (read_began_s - began_s) / seconds
            width = max(width for width, start in _WIDTHS.items() if start <= share)
            reads[width].append((ended_s, ended_s - read_began_s))

    with ThreadPoolExecutor(max(_WIDTHS)) as pool:
        list(pool.map(read_on, range(max(_WIDTHS))))
    single_s: list[float] = []
    files_per_s = inf
    for width, ends in reads.items():
        read_s = [taken_s for _, taken_s in ends]
        if len(single_s) < _ENOUGH_READS or median(read_s or [0.0]) <= _LONGER * median(single_s):
            single_s += read_s
        else:
            files_per_s = len(ends) / (max(ends)[0] - began_s - _WIDTHS[width] * seconds)
    return Reads(tuple(single_s), files_per_s, fmean(cpu_s), contents)


def time_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> LoadingStages:
    """Time each stage of a loader, in about ``seconds``. ``batch`` is one of its batches, of
    ``images`` images.

    Samples are loaded in a new worker. Otherwise, the dataset could open a file or start a thread
    in this process, and all later workers would inherit it.
    """
    dataset: Any = getattr(loader, "dataset", None)
    timed = LoadingStages({}, [], "")
    is_own = isinstance(dataset, CocoFolder | ShardDataset)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    is_sampled = getattr(loader, "batch_sampler", None) is not None
    if is_own or (is_sampled and not is_stream):
        indices = np.random.default_rng(0).permutation(len(dataset))[:_IMAGES].tolist()
        in_worker = partial(
            _time_in_worker,
            indices,
            images=images,
            dense=not isinstance(loader, Loader),
            collate=getattr(loader, "collate_fn", None),
            seconds=seconds,
        )
        worker = DataLoader(
            dataset,
            collate_fn=in_worker,
            num_workers=1,
            # The first sample of somebody's dataset may load libraries.
            batch_sampler=[[] if is_own else indices[-1:]],
            timeout=_TIMEOUT_S + 3 * seconds,
            worker_init_fn=getattr(loader, "worker_init_fn", None),
            multiprocessing_context=getattr(loader, "multiprocessing_context", None),
        )
        try:
            with closing(fetch_batches(worker)) as batches:
                timed = next(batches)
        except ColabUtilsError as error:
            # Any exception that a user's dataset raises arrives as this error.
            unseen = str(error).removeprefix("The loader gives no batch 1: ")
            timed = LoadingStages({}, [], unseen)
    devices = {tensor.device.type for tensor in find_tensors(batch)}
    if isinstance(loader, DataLoader) and loader.num_workers and devices == {"cpu"}:
        timed.stages["hand-off"] = time_handoff(batch, images=images, seconds=0.2 * seconds)
    return timed


def _time_in_worker(
    indices: list[int],
    _: Any,
    *,
    images: int,
    dense: bool,
    collate: Callable[[Any], Any] | None,
    seconds: float,
) -> LoadingStages:
    """Time the stages of the dataset in a worker. The worker calls this as its ``collate_fn``."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    if isinstance(dataset, CocoFolder | ShardDataset):
        timed = time_dataset_stages(dataset, indices, dense=dense, seconds=seconds)
    else:
        timed = time_samples(dataset, indices[:_WORKED], images=images, seconds=seconds / 2)
    if collate and len(timed.indices) >= images:
        samples = load_samples(dataset, timed.indices[:images])
        # The loader may put together only what fits together, such as samples of one size.
        with suppress(Exception):
            timed.stages["collate"] = time_calls(
                "collate", collate, repeat(samples, 50), max_s=seconds / 8, images=images
            )
    return timed


def time_dataset_stages(
    dataset: Any, indices: Sequence[int], *, dense: bool, seconds: float
) -> LoadingStages:
    """Time each stage of loading an image, in about ``seconds``: ``read``, ``decode`` and
    ``masks``. Files are read first. From then on, the dataset has their bytes.

    The dataset is a `ShardDataset` or a `CocoFolder`. ``dense`` says whether samples hold masks as
    arrays, not packed.
    """

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            unpack_masks(masks, *dataset.sizes[index].tolist())

    # There is no warm-up, because it would put the first file into the page cache.
    reads = time_reads(dataset.read, indices, seconds=0.6 * seconds)
    contents = reads.contents
    dataset.read = contents.__getitem__
    dataset.streams = 1
    few = [*contents][:_WORKED]
    dataset.decode(contents[few[0]])
    load_masks(few[0])
    stages = [
        Stage.from_calls("read", np.multiply(reads.seconds, 1000), 1000 * reads.cpu_s),
        time_calls("decode", dataset.decode, map(contents.get, few), max_s=seconds / 8),
        time_calls("masks", load_masks, few, max_s=seconds / 8),
    ]
    return LoadingStages(
        {stage.name: stage for stage in stages},
        few,
        "",
        reads.seconds,
        reads.files_per_s,
        fmean(map(len, contents.values())),
    )


def load_samples(dataset: Any, indices: Sequence[int]) -> list[Any]:
    """Load the samples of a batch as torch does: all at once if the dataset has ``__getitems__``.

    Example:
        >>> load_samples("abc", [0, 2])
        ['a', 'c']
    """
    load_all = getattr(dataset, "__getitems__", None)
    if load_all is not None:
        return [*load_all([*indices])]
    return [dataset[index] for index in indices]


def time_samples(
    dataset: Any, indices: Sequence[int], *, images: int, seconds: float
) -> LoadingStages:
    """Time any map-style dataset: ``sample``, and also ``transform`` if the dataset has one of
    torchvision's attributes for transforms.

    ``transform`` is the time of a sample minus its time in a shallow copy of the dataset without
    transforms. A dataset with ``__getitems__`` loads ``images`` samples at once.
    """
    count = min(images, len(indices)) if hasattr(dataset, "__getitems__") else 1
    firsts = range(0, len(indices) - count + 1, count)
    batches = [indices[first : first + count] for first in firsts]

    waits_s: list[float] = []

    def load(source: Any, batch: Sequence[int]) -> None:
        began_s = perf_counter()
        cpu_began_s = thread_time()
        load_samples(source, batch)
        wait_s = perf_counter() - began_s - (thread_time() - cpu_began_s)
        waits_s.append(max(0.0, wait_s) / count)

    def time_loading(source: Any) -> Stage:
        load_batch = partial(load, source)
        return time_calls("sample", load_batch, batches, max_s=seconds / 2, images=count)

    whole = time_loading(dataset)
    timed = LoadingStages({"sample": whole}, [*indices], "", tuple(waits_s))
    transforms = [name for name in _TRANSFORMS if callable(getattr(dataset, name, None))]
    if transforms:
        # The dataset may not work without its transforms.
        with suppress(Exception):
            bare = copy.copy(dataset)
            vars(bare).update(dict.fromkeys(transforms))
            without = time_loading(bare)
            wall_ms = max(whole.mean_ms - without.mean_ms, 0.0)
            cpu_ms = max(whole.cpu_ms - without.cpu_ms, 0.0)
            transform = Stage.from_calls("transform", [wall_ms], cpu_ms)
            timed.stages.update(sample=without, transform=transform)
    return timed


def time_handoff(batch: Any, *, images: int, seconds: float) -> Stage:
    """Time how long one worker takes to hand over a batch through torch's own queue.

    The worker hands over a new copy each time, because tensors that were handed over once lie in
    shared memory already. The time of the copies is subtracted.
    """
    copying = time_calls("copy", copy.deepcopy, repeat(batch, 8), max_s=seconds / 4, images=images)
    batches: Any = [batch] * 1000
    through = DataLoader(batches, batch_size=None, num_workers=1, collate_fn=copy.deepcopy)
    times = time_batches(through, batches=_HANDED_BATCHES, max_s=seconds)
    wall_ms = np.array(times.wait_s) * 1000 / images - copying.mean_ms
    cpu_ms = times.cpu_s * 1000 / len(wall_ms) / images - copying.cpu_ms
    return Stage.from_calls("hand-off", np.maximum(wall_ms, 0.0), max(cpu_ms, 0.0))
