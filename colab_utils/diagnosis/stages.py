"""Each stage of loading, timed alone: what it takes per image, in wall time and in CPU time."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from time import perf_counter, thread_time
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

# At most this many images are timed.
_IMAGES = 64
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


def time_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> LoadingStages:
    """Time each stage of a loader, in about ``seconds``. ``batch`` is one of its batches, of
    ``images`` images.

    Samples are loaded in a new worker. Otherwise, the dataset could open a file or start a thread
    in this process, and all later workers would inherit it.
    """
    dataset: Any = getattr(loader, "dataset", None)
    stages: dict[str, Stage] = {}
    indices: list[int] = []
    unseen = ""
    is_stream = isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__")
    is_sampled = getattr(loader, "batch_sampler", None) is not None
    if isinstance(dataset, CocoFolder | ShardDataset) or (is_sampled and not is_stream):
        order = np.random.default_rng(0).permutation(len(dataset))
        indices = order[:_IMAGES].tolist()
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
            batch_sampler=[indices[-1:]],
            timeout=_TIMEOUT_S + 3 * seconds,
            worker_init_fn=getattr(loader, "worker_init_fn", None),
            multiprocessing_context=getattr(loader, "multiprocessing_context", None),
        )
        try:
            with closing(fetch_batches(worker)) as batches:
                stages = next(batches)
        except ColabUtilsError as error:
            # Any exception that a user's dataset raises arrives as this error.
            indices = []
            unseen = str(error).removeprefix("The loader gives no batch 1: ")
    devices = {tensor.device.type for tensor in find_tensors(batch)}
    if isinstance(loader, DataLoader) and loader.num_workers and devices == {"cpu"}:
        stages["hand-off"] = time_handoff(batch, images=images, seconds=0.2 * seconds)
    return LoadingStages(stages, indices, unseen)


def _time_in_worker(
    indices: list[int],
    _: Any,
    *,
    images: int,
    dense: bool,
    collate: Callable[[Any], Any] | None,
    seconds: float,
) -> dict[str, Stage]:
    """Time the stages of the dataset in a worker. The worker calls this as its ``collate_fn``."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    if isinstance(dataset, CocoFolder | ShardDataset):
        stages = time_dataset_stages(dataset, indices, dense=dense, seconds=seconds / 2)
    else:
        stages = time_samples(dataset, indices, images=images, seconds=seconds / 2)
    if collate and len(indices) >= images:
        samples = load_samples(dataset, indices[:images])
        # The loader may put together only what fits together, such as samples of one size.
        with suppress(Exception):
            stages["collate"] = time_calls(
                "collate", collate, repeat(samples, 50), max_s=seconds / 8, images=images
            )
    return stages


def time_dataset_stages(
    dataset: Any, indices: Sequence[int], *, dense: bool, seconds: float
) -> dict[str, Stage]:
    """Time each stage of loading an image alone, in about ``seconds``: ``read``, ``decode`` and
    ``masks``.

    The dataset is a `ShardDataset` or a `CocoFolder`. ``dense`` says whether samples hold masks as
    arrays, not packed.
    """
    blobs: list[bytes] = []

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            unpack_masks(masks, *dataset.sizes[index].tolist())

    # There is no warm-up, because it would put the first file into the page cache.
    read = time_calls(
        "read", lambda index: blobs.append(dataset.read(index)), indices, max_s=seconds / 2
    )
    dataset.decode(blobs[0])
    load_masks(indices[0])
    decode = time_calls("decode", dataset.decode, blobs, max_s=seconds / 4)
    masks = time_calls("masks", load_masks, indices[: len(blobs)], max_s=seconds / 4)
    return {stage.name: stage for stage in (read, decode, masks)}


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
) -> dict[str, Stage]:
    """Time any map-style dataset: ``sample``, and also ``transform`` if the dataset has one of
    torchvision's attributes for transforms.

    ``transform`` is the time of a sample minus its time in a shallow copy of the dataset without
    transforms. A dataset with ``__getitems__`` loads ``images`` samples at once.
    """
    count = min(images, len(indices)) if hasattr(dataset, "__getitems__") else 1
    firsts = range(0, len(indices) - count + 1, count)
    batches = [indices[first : first + count] for first in firsts]

    def time_loading(source: Any) -> Stage:
        load = partial(load_samples, source)
        return time_calls("sample", load, batches, max_s=seconds / 2, images=count)

    whole = time_loading(dataset)
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
            return {"sample": without, "transform": transform}
    return {"sample": whole}


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
