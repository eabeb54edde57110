"""The stages of loading, each timed alone: read, decode, masks, transform, collate, hand-off, transfer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import is_dataclass
from functools import partial
from itertools import repeat
from time import perf_counter, thread_time
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colab_utils.data.masks import unpack_masks
from colab_utils.diagnosis.timing import Stage, fetch_batches, make_stage, time_batches, time_calls
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader

__all__ = ["LoadingStages", "find_tensors", "time_dataset_stages", "time_stages"]

_IMAGES = 64  # that are timed at most
_HANDED_BATCHES = 40
_TIMEOUT_S = 60.0  # for all stages of a sample, and three times what they should take
_END = object()
_TRANSFORMS = ("transforms", "transform", "target_transform")  # attributes of torchvision's datasets


class LoadingStages(NamedTuple):
    """What `time_stages` found; all of it is empty where a loader does not let itself be taken apart."""

    stages: dict[str, Stage]
    """By name: of an image's way to a sample, then of a whole batch."""
    indices: list[int]
    """Of the images that were timed."""
    unseen: str
    """Why samples could not be timed."""


def time_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> LoadingStages:
    """Take a loader apart, in about ``seconds``; ``batch`` is one of its own, of so many ``images``.

    Samples are loaded in a worker of its own: a file that a dataset opens, or a thread that it starts, would else be
    inherited by all later workers.
    """
    dataset: Any = getattr(loader, "dataset", None)
    stages, unseen, indices = dict[str, Stage](), "", list[int]()
    has_samples = isinstance(dataset, CocoFolder | ShardDataset) or getattr(loader, "batch_sampler", None) is not None
    streams = isinstance(dataset, IterableDataset) and isinstance(loader, DataLoader)
    if streams or (has_samples and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)):
        indices = [] if streams else np.random.default_rng(0).permutation(len(dataset))[:_IMAGES].tolist()
        dense, collate = not isinstance(loader, Loader), getattr(loader, "collate_fn", None)
        in_worker = partial(_time_in_worker, indices, images=images, dense=dense, collate=collate, seconds=seconds)
        if streams:  # where the loader makes no batches, each item is one
            in_worker = partial(_time_stream, images=images if loader.batch_size is None else 1, seconds=seconds / 2)
        names = ("worker_init_fn", "multiprocessing_context")
        settings: dict[str, Any] = {name: getattr(loader, name, None) for name in names}
        settings |= {"batch_sampler": None if streams else [indices[-1:]], "timeout": _TIMEOUT_S + 3 * seconds}
        worker = DataLoader(dataset, collate_fn=in_worker, num_workers=1, **settings)
        try:
            with closing(fetch_batches(worker)) as batches:
                stages = next(batches)
        except ColabUtilsError as error:  # whatever somebody's own dataset does
            indices, unseen = [], str(error).partition("found ")[2]
    of_batch = time_batch_stages(loader, batch, images=images, seconds=0.4 * seconds)
    return LoadingStages(stages | {stage.name: stage for stage in of_batch}, indices, unseen)


def _time_in_worker(
    indices: list[int], _: Any, *, images: int, dense: bool, collate: Callable[[Any], Any] | None, seconds: float
) -> dict[str, Stage]:
    """A ``collate_fn`` that times the stages of the dataset as the worker has it that calls this."""
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    if isinstance(dataset, CocoFolder | ShardDataset):
        stages = time_dataset_stages(dataset, indices, dense=dense, seconds=seconds / 2)
    else:
        stages = time_samples(dataset, indices, seconds=seconds / 2)
    if collate and len(indices) >= images:
        samples = [dataset[index] for index in indices[:images]]
        stages["collate"] = time_calls("collate", collate, repeat(samples, 50), max_s=seconds / 8, images=images)
    return stages


def _time_stream(_: Any, *, images: int, seconds: float) -> dict[str, Stage]:
    """A ``collate_fn`` that times what anybody's iterable dataset gives next, of so many ``images``, in its worker."""
    stream, wall_ms, cpu_began_s = iter(get_worker_info().dataset), list[float](), thread_time()  # type: ignore[union-attr]
    until_s = perf_counter() + seconds
    while (began_s := perf_counter()) < until_s and next(stream, _END) is not _END:
        wall_ms.append(1000 * (perf_counter() - began_s) / images)
    cpu_ms = 1000 * (thread_time() - cpu_began_s) / images / max(len(wall_ms), 1)
    return {"sample": make_stage("sample", wall_ms, cpu_ms)} if wall_ms else {}


def time_dataset_stages(dataset: Any, indices: Sequence[int], *, dense: bool, seconds: float) -> dict[str, Stage]:
    """Time each stage of loading an image alone, in about ``seconds``: ``read``, ``decode`` and ``masks``.

    Takes a `ShardDataset` or a `CocoFolder`. ``dense`` says whether samples hold dense masks.
    """
    blobs: list[bytes] = []

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            unpack_masks(masks, *dataset.sizes[index].tolist())

    # no warm-up: it would put the first file into memory
    read = time_calls("read", lambda index: blobs.append(dataset.read(index)), indices, max_s=seconds / 2)
    dataset.decode(blobs[0])
    load_masks(indices[0])
    decode = time_calls("decode", dataset.decode, blobs, max_s=seconds / 4)
    masks = time_calls("masks", load_masks, indices[: len(blobs)], max_s=seconds / 4)
    return {stage.name: stage for stage in (read, decode, masks)}


def time_samples(dataset: Any, indices: Sequence[int], *, seconds: float) -> dict[str, Stage]:
    """Time anybody's map-style dataset: ``sample``, and ``transform`` where it has torchvision's attributes for it.

    The second is the difference to a shallow copy of the dataset without transforms.
    """
    whole = time_calls("sample", dataset.__getitem__, indices, max_s=seconds / 2)
    bare, has = copy.copy(dataset), [name for name in _TRANSFORMS if callable(getattr(dataset, name, None))]
    if not has:
        return {"sample": whole}
    try:
        vars(bare).update(dict.fromkeys(has))
        without = time_calls("sample", bare.__getitem__, indices, max_s=seconds / 2)
    except Exception:  # it cannot do without its transforms
        return {"sample": whole}
    wall_ms, cpu_ms = max(whole.mean_ms - without.mean_ms, 0.0), max(whole.cpu_ms - without.cpu_ms, 0.0)
    return {"sample": without, "transform": make_stage("transform", [wall_ms], cpu_ms)}


def time_batch_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> list[Stage]:
    """Time what happens to a whole batch: ``hand-off`` where a ``DataLoader`` has workers, and, with a GPU,
    ``transfer`` of a ``batch`` that lies on the CPU.
    """
    plain, stages, max_s = isinstance(loader, DataLoader), list[Stage](), seconds / 2
    tensors = find_tensors(batch)
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return stages
    if plain and loader.num_workers:
        stages.append(_time_handoff(batch, images=images, seconds=max_s))
    if torch.cuda.is_available():
        if plain and loader.pin_memory:
            tensors = [tensor.pin_memory() for tensor in tensors]
        stages.append(time_calls("transfer", _transfer, repeat(tensors, 50), max_s=max_s, images=images))
    return stages


def _transfer(tensors: list[Tensor]) -> None:
    torch.cuda.synchronize()
    _ = [tensor.to("cuda", non_blocking=True) for tensor in tensors]
    torch.cuda.synchronize()  # a copy is only queued when the call returns


class _Same(IterableDataset[Any]):
    """One batch for ever, copied each time: shared memory that was handed over once is not handed over anew."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __iter__(self) -> Iterator[Any]:
        while True:
            yield copy.deepcopy(self.batch)


def _time_handoff(batch: Any, *, images: int, seconds: float) -> Stage:
    """A batch that lies ready, through one worker and torch's own queue; the copy that it needs is taken off."""
    copying = time_calls("copy", copy.deepcopy, repeat(batch, 8), max_s=seconds / 4, images=images)
    through = DataLoader(_Same(batch), batch_size=None, num_workers=1)
    times = time_batches(through, batches=_HANDED_BATCHES, max_s=seconds)
    wall_ms = np.array(times.wait_s) * 1000 / images - copying.mean_ms
    cpu_ms = times.cpu_s * 1000 / len(wall_ms) / images - copying.cpu_ms
    return make_stage("hand-off", np.maximum(wall_ms, 0.0), max(cpu_ms, 0.0))


def find_tensors(batch: Any) -> list[Tensor]:
    """Every tensor in lists, tuples, dicts and dataclasses.

    Example:
        >>> [tensor.nbytes for tensor in find_tensors(({"image": torch.zeros(2)}, [torch.zeros(3)], 4))]
        [8, 12]
    """
    if isinstance(batch, Tensor):
        return [batch]
    columns = vars(batch) if is_dataclass(batch) else batch
    values = columns.values() if isinstance(columns, Mapping) else columns if isinstance(columns, list | tuple) else ()
    return [tensor for value in values for tensor in find_tensors(value)]
