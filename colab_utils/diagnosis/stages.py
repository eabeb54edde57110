"""Each stage of loading, timed alone: what it takes per image, in wall time and in CPU time."""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice, repeat
from math import inf
from statistics import fmean
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colab_utils.diagnosis.timing import fetch_batches
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader
from colab_utils.loading.masks import unpack_masks

SAMPLED_IMAGES = 32
"""Of so many images, the stages after the read are timed, and what they cost in other forms."""
# Of so many images, the files are read.
_IMAGES = 256
# So many files are read at the same time: first few, then many.
_FEW = 8
_MANY = 64
# More reads at the same time may not make each of them so many times as long. If they do, they have
# met the limit of the folder.
_LONGER = 2.0
# The worker that times samples fails after this time plus three times the ``seconds`` of
# `time_stages`.
_TIMEOUT_S = 60.0


Calls = list[tuple[float, float]]
"""The seconds of each call: of the wall clock, and of the CPU."""


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
    def from_calls(cls, name: str, calls: Calls, images: float = 1) -> "Stage":
        """Make a stage from its calls, each of which handles so many images."""
        wall_ms, cpu_ms = np.transpose(calls) * 1000 / images
        median, p95 = np.percentile(wall_ms, (50, 95)).tolist()
        return cls(name, median, p95, float(cpu_ms.mean()), float(wall_ms.mean()))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.median_ms:.1f} ms an image (p95 {self.p95_ms:.1f} ms, CPU "
            f"{self.cpu_ms:.1f} ms)"
        )


def time_calls(call: Callable[[Any], Any], arguments: Iterable[Any], *, max_s: float) -> Calls:
    """Time ``call(argument)`` for each argument, in this thread, for about ``max_s`` seconds, and
    at least once, if there is an argument.
    """
    calls = []
    end_s = perf_counter() + max_s
    for argument in arguments:
        began_s = perf_counter()
        cpu_began_s = thread_time()
        call(argument)
        calls.append((perf_counter() - began_s, thread_time() - cpu_began_s))
        if perf_counter() > end_s:
            break
    return calls


class LoadingStages(NamedTuple):
    """Result of `time_stages`. It is empty if samples could not be timed."""

    stages: dict[str, Stage] = {}  # noqa: RUF012
    """Stages by name: those of a sample, then those of a whole batch."""
    indices: Sequence[int] = ()
    """Indices of the images that were timed."""
    unseen: str = ""
    """The error, if samples could not be timed; else ""."""
    read_s: tuple[float, ...] = (0.0,)
    """Seconds that an image is waited for: of single reads, if the dataset is of this package."""
    files_per_s: float = inf
    """Files that the folder gives in a second at most, as far as that was seen."""
    file_bytes: float = 0.0
    """Mean size of a file."""


def time_reads(
    read: Callable[[int], bytes], indices: Sequence[int], *, seconds: float
) -> tuple[LoadingStages, dict[int, bytes]]:
    """Read files for so many seconds, and wait for the last ones: first eight at once, then 64.
    Return the stage ``read``, and the bytes of the files by their index.

    The times of reads are those of as many at once as still leave single reads as they are.
    """
    # Threads share this iterator.
    left = iter(indices)
    contents: dict[int, bytes] = {}

    def keep(index: int) -> None:
        contents[index] = read(index)

    def join(threads: Iterable[Future[Calls]]) -> Calls:
        return [*chain.from_iterable(thread.result() for thread in threads)]

    with ThreadPoolExecutor(_FEW + _MANY) as pool:

        def start(count: int, max_s: float) -> list[Future[Calls]]:
            return [pool.submit(time_calls, keep, left, max_s=max_s) for _ in range(count)]

        few = start(_FEW, 0.4 * seconds)
        # The slowest of them change no median. They end beside the many.
        join(islice(as_completed(few), _FEW // 2))
        began_s = perf_counter()
        many = join(start(_MANY, 0.6 * seconds))
        many_s = perf_counter() - began_s
        calls = join(few)
    files_per_s = inf
    if many and np.median(many, 0)[0] > _LONGER * np.median(calls, 0)[0]:
        files_per_s = len(many) / many_s
    else:
        calls += many
    timed = LoadingStages(
        {"read": Stage.from_calls("read", calls)},
        [*contents],
        read_s=tuple(wall_s for wall_s, _ in calls),
        files_per_s=files_per_s,
        file_bytes=fmean(map(len, contents.values())),
    )
    return timed, contents


def time_stages(loader: Any, *, images: int, seconds: float) -> LoadingStages:
    """Time each stage of a loader whose batches have ``images`` images, in about ``seconds``.

    Samples are loaded in a new worker. Otherwise, the dataset could open a file or start a thread
    in this process, and all later workers would inherit it.
    """
    dataset: Any = getattr(loader, "dataset", None)
    is_own = isinstance(dataset, CocoFolder | ShardDataset)
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    is_sampled = getattr(loader, "batch_sampler", None) is not None
    if is_stream or not (is_own or is_sampled):
        return LoadingStages()
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
            return next(batches)
    except ColabUtilsError as error:
        # Any exception that a user's dataset raises arrives as this error.
        return LoadingStages(unseen=str(error).removeprefix("The loader gives no batch 1: "))


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
        timed = time_samples(dataset, indices[:SAMPLED_IMAGES], images=images, seconds=seconds / 4)
    if collate and len(timed.indices) >= images:
        samples = load_samples(dataset, timed.indices[:images])
        # The loader may put together only what fits together, such as samples of one size.
        with suppress(Exception):
            calls = time_calls(collate, repeat(samples, 50), max_s=seconds / 8)
            timed.stages["collate"] = Stage.from_calls("collate", calls, images)
    return timed


def time_dataset_stages(
    dataset: Any, indices: Sequence[int], *, dense: bool, seconds: float
) -> LoadingStages:
    """Time each stage of loading an image, in about ``seconds``: ``read``, ``decode`` and
    ``masks``. Files are read first. From then on, the dataset has their bytes; the packed masks of
    shards are still read.

    The dataset is a `ShardDataset` or a `CocoFolder`. ``dense`` says whether samples hold masks as
    arrays, not packed.
    """

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            unpack_masks(masks, *dataset.sizes[index].tolist())

    # There is no warm-up, because it would put the first file into the page cache.
    timed, contents = time_reads(dataset.read, indices, seconds=0.6 * seconds)
    dataset.read = contents.__getitem__
    dataset.streams = 1
    few = choose_images(dataset.sizes, timed.indices)
    for name, call in (("decode", dataset.load_image), ("masks", load_masks)):
        call(few[0])
        calls = time_calls(call, few, max_s=seconds / 8)
        timed.stages[name] = Stage.from_calls(name, calls)
    return timed._replace(indices=few)


def choose_images(sizes: NDArray[np.int64], indices: Sequence[int]) -> list[int]:
    """Choose at most 32 images of all sizes, in a random order.

    Images differ in their work, and a few large ones may have most of it. So the images are sorted
    by their pixels, and taken at equal distances.

    Example:
        >>> choose_images(np.array([[5, 5], [9, 9], [2, 2]]), [0, 1])
        [0, 1]
    """
    by_pixels = np.argsort(sizes[[*indices]].prod(1), kind="stable")
    count = min(SAMPLED_IMAGES, len(indices))
    places = np.linspace(0, len(indices), 2 * count + 1)[1::2].astype(int)
    return [indices[place] for place in np.random.default_rng(0).permutation(by_pixels[places])]


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
    """Time a ``sample`` of any map-style dataset. A dataset with ``__getitems__`` loads ``images``
    samples at once.
    """
    count = min(images, len(indices)) if hasattr(dataset, "__getitems__") else 1
    parts = [indices[first : first + count] for first in range(0, len(indices) - count + 1, count)]
    calls = time_calls(partial(load_samples, dataset), parts, max_s=seconds)
    return LoadingStages(
        {"sample": Stage.from_calls("sample", calls, count)},
        indices,
        read_s=tuple(max(0.0, wall_s - cpu_s) / count for wall_s, cpu_s in calls),
    )
