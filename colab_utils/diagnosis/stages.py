"""The stages of loading, each timed alone: read, decode, masks, transform, collate, hand-off, pin, transfer."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from colab_utils.data.masks import unpack_masks
from colab_utils.diagnosis.timing import Stage, make_stage, time_batches, time_calls
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader

__all__ = ["StageTimes", "drop_cached", "find_tensors", "time_dataset_stages", "time_stages"]

_IMAGES = 64  # that are timed at most
_HANDED_BATCHES = 40
_TRANSFORMS = ("transforms", "transform", "target_transform")  # attributes of torchvision's datasets


@dataclass(frozen=True)
class StageTimes:
    """The stages of a loader; empty where it does not let itself be taken apart."""

    sample: dict[str, Stage]
    """Of an image's way to a sample, by name."""
    batch: tuple[Stage, ...]
    """Of a whole batch."""
    reads: tuple[Stage, ...]
    """*cold* and *warm* reads."""
    indices: tuple[int, ...]
    """Of the images that were timed."""


def time_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> StageTimes:
    """Take a loader apart, in about ``seconds``; ``batch`` is one of its own, of so many ``images``."""
    dataset: Any = getattr(loader, "dataset", None)
    plain = isinstance(loader, DataLoader)
    stages, reads, indices, samples = dict[str, Stage](), tuple[Stage, ...](), list[int](), list[Any]()
    if hasattr(dataset, "__len__"):
        indices = np.random.default_rng(0).permutation(len(dataset))[:_IMAGES].tolist()
    if isinstance(dataset, CocoFolder | ShardDataset):
        stages = time_dataset_stages(dataset, indices, dense=not isinstance(loader, Loader), seconds=0.4 * seconds)
        reads = time_reads(dataset, indices[: stages["read"].calls], seconds=0.2 * seconds)
    elif plain and loader.batch_sampler is not None and not isinstance(dataset, IterableDataset):
        with suppress(Exception):  # somebody's dataset may load in workers only
            dataset = copy.copy(dataset)  # a file that it opens now is not open in the workers of the training
            stages = time_samples(dataset, indices, seconds=0.4 * seconds)
    if plain and stages:
        samples = [dataset[index] for index in indices[:images]]
    of_batch = time_batch_stages(loader, batch, samples, images=images, seconds=0.4 * seconds)
    return StageTimes(stages, tuple(of_batch), reads, tuple(indices) if stages else ())


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


def time_reads(dataset: Any, indices: Sequence[int], *, seconds: float) -> tuple[Stage, Stage]:
    """Time reading the same images ``cold`` and ``warm``: with what Linux keeps of their files dropped, then once more.

    Drive's own cache on its disk cannot be dropped: on Drive, cold is cold for files that were never read here.
    """
    for path in {dataset.find_path(index) for index in indices}:
        drop_cached(path)
    cold = time_calls("cold", dataset.read, indices, max_s=seconds / 2)
    return cold, time_calls("warm", dataset.read, indices[: cold.calls], max_s=seconds / 2)


def drop_cached(path: Path) -> None:
    """Drop what Linux keeps of a file in memory; elsewhere, and for what is no file, do nothing."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:  # reading it will say what is wrong
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def time_samples(dataset: Any, indices: Sequence[int], *, seconds: float) -> dict[str, Stage]:
    """Time anybody's map-style dataset: ``sample``, and ``transform`` where it has torchvision's attributes for it.

    The second is the difference to a shallow copy of the dataset without transforms.
    """
    whole = time_calls("sample", dataset.__getitem__, indices, max_s=seconds / 2)
    set_ones = [name for name in _TRANSFORMS if callable(getattr(dataset, name, None))]
    if not set_ones:
        return {"sample": whole}
    bare = copy.copy(dataset)
    try:
        for name in set_ones:
            setattr(bare, name, None)
        without = time_calls("sample", bare.__getitem__, indices[: whole.calls], max_s=seconds / 2)
    except Exception:  # it cannot do without its transforms
        return {"sample": whole}
    wall_ms, cpu_ms = max(whole.mean_ms - without.mean_ms, 0.0), max(whole.cpu_ms - without.cpu_ms, 0.0)
    return {"sample": without, "transform": make_stage("transform", [wall_ms] * without.calls, cpu_ms)}


def time_batch_stages(loader: Any, batch: Any, samples: Sequence[Any], *, images: int, seconds: float) -> list[Stage]:
    """Time what happens to a whole batch: ``collate`` (of ``samples``), ``hand-off`` where a ``DataLoader`` has
    workers, and, with a GPU, ``pin`` and ``transfer`` of a ``batch`` that lies on the CPU.
    """
    plain, stages, max_s = isinstance(loader, DataLoader), list[Stage](), seconds / 4
    if plain and loader.collate_fn is not None and len(samples) == images:
        stages.append(time_calls("collate", loader.collate_fn, repeat(samples, 50), max_s=max_s, images=images))
    tensors = list(find_tensors(batch))
    if not tensors or any(tensor.device.type != "cpu" for tensor in tensors):
        return stages
    if plain and loader.num_workers:
        stages.append(_time_handoff(batch, images=images, seconds=max_s))
    if torch.cuda.is_available():
        if plain and loader.pin_memory:
            stages.append(time_calls("pin", _pin, repeat(tensors, 50), max_s=max_s, images=images))
            tensors = _pin(tensors)
        stages.append(time_calls("transfer", _transfer, repeat(tensors, 50), max_s=max_s, images=images))
    return stages


def _pin(tensors: list[Tensor]) -> list[Tensor]:
    return [tensor.pin_memory() for tensor in tensors]


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


def find_tensors(batch: Any) -> Iterator[Tensor]:
    """Every tensor in lists, tuples, dicts and dataclasses.

    Example:
        >>> [tensor.nbytes for tensor in find_tensors(({"image": torch.zeros(2)}, [torch.zeros(3)], 4))]
        [8, 12]
    """
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        yield from find_tensors([*batch.values()])
    elif isinstance(batch, list | tuple) or is_dataclass(batch):
        for value in vars(batch).values() if is_dataclass(batch) else batch:
            yield from find_tensors(value)
