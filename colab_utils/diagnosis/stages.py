"""The parts of loading, each timed alone: read, decode, masks, transform, collate, hand-off, pin, transfer."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from colab_utils.data.masks import unpack_masks
from colab_utils.diagnosis.timing import Stage, make_stage, measure_tree_cpu, time_calls
from colab_utils.loading.batch import pack_target
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader
from colab_utils.runtime import quiet_fork

__all__ = [
    "StageTimes",
    "drop_cached",
    "time_batch_parts",
    "time_dataset_stages",
    "time_reads",
    "time_samples",
    "time_stages",
]

_HANDED_BATCHES = 40


_TRANSFORMS = ("transforms", "transform", "target_transform")  # attributes of torchvision's datasets


@dataclass(frozen=True)
class StageTimes:
    """Layers of an image's way to a sample, by name; of a whole batch; *cold* and *warm* reads; and the ``indices`` of
    the images that were timed. Empty where a loader does not let itself be taken apart.
    """

    sample: dict[str, Stage]
    batch: tuple[Stage, ...]
    reads: tuple[Stage, ...]
    indices: tuple[int, ...]


def time_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> StageTimes:
    """Take a loader apart, in about ``seconds``; ``batch`` is one of its own, of so many ``images``."""
    dataset: Any = getattr(loader, "dataset", None)
    packs, indices, parts, reads = isinstance(loader, Loader), list[int](), list[Stage](), tuple[Stage, ...]()
    if isinstance(dataset, CocoFolder | ShardDataset):
        indices, dense = _choose_indices(dataset), not (packs and isinstance(dataset, ShardDataset))
        parts = [*time_dataset_stages(dataset, indices, dense=dense, packs=packs, seconds=0.4 * seconds).values()]
        reads = time_reads(dataset, indices, seconds=0.2 * seconds)
    elif isinstance(loader, DataLoader) and loader.batch_sampler and not isinstance(dataset, IterableDataset):
        indices = np.random.default_rng(0).permutation(len(dataset))[:64].tolist()
        parts = time_samples(dataset, indices, seconds=0.4 * seconds)
    samples = [dataset[index] for index in indices[:images]] if isinstance(loader, DataLoader) else []
    of_batch = time_batch_parts(loader, batch, samples, images=images, seconds=0.4 * seconds)
    return StageTimes({stage.name: stage for stage in parts}, tuple(of_batch), reads, tuple(indices))


def _choose_indices(dataset: CocoFolder | ShardDataset) -> list[int]:
    return np.random.default_rng(0).permutation(len(dataset))[:64].tolist()


def time_dataset_stages(
    dataset: Any, indices: Sequence[int], *, dense: bool, packs: bool, seconds: float
) -> dict[str, Stage]:
    """Time each stage of loading an image alone: ``read``, ``decode``, and ``masks`` as a worker sends them.

    Takes a `ShardDataset` or a `CocoFolder`, and about ``seconds`` in all, which may not suffice for all ``indices``.
    ``dense`` says whether samples hold dense masks, ``packs`` whether the worker packs those.
    """
    blobs: list[bytes] = []

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            masks = unpack_masks(masks, *dataset.sizes[index].tolist())
        if dense and packs:
            count, height, width = masks.shape
            empty = torch.zeros(count)
            target = {"boxes": torch.zeros(count, 4), "labels": empty, "area": empty, "iscrowd": empty, "image_id": 0}
            pack_target(torch.zeros(3, height, width, dtype=torch.uint8), {**target, "masks": torch.from_numpy(masks)})

    # no warm-up: it would put the first file, or a whole shard, into memory
    read = time_calls("read", lambda index: blobs.append(dataset.read(index)), indices, max_s=seconds / 2)
    dataset.decode(blobs[0])
    load_masks(indices[0])
    decode = time_calls("decode", dataset.decode, blobs, max_s=seconds / 4)
    masks = time_calls("masks", load_masks, indices[: len(blobs)], max_s=seconds / 4)
    return {stage.name: stage for stage in (read, decode, masks)}


def time_reads(dataset: Any, indices: Sequence[int], *, seconds: float) -> tuple[Stage, Stage]:
    """Time reading the same images ``cold`` and ``warm``: with what Linux keeps of the files dropped, then once more.

    Drive's own cache on its disk cannot be dropped: on Drive, cold is cold for files that were never read here.
    """
    for path in {dataset.find_path(index) for index in indices}:
        drop_cached(path)
    cold = time_calls("cold", dataset.read, indices, max_s=seconds / 2)
    return cold, time_calls("warm", dataset.read, indices[: cold.calls], max_s=seconds / 2)


def drop_cached(path: Path) -> None:
    """Drop what Linux keeps of a file in memory; elsewhere, and for what is no file, do nothing."""
    if hasattr(os, "posix_fadvise"):
        try:
            file = os.open(path, os.O_RDONLY)
        except OSError:
            return  # reading it will say what is wrong
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def time_samples(dataset: Any, indices: Sequence[int], *, seconds: float) -> list[Stage]:
    """Time anybody's map-style dataset: ``sample``, and ``transform`` where it has torchvision's attributes for it.

    The second is the difference to a shallow copy of the dataset without transforms.
    """
    whole = time_calls("sample", dataset.__getitem__, indices, max_s=seconds / 2)
    set_ones = [name for name in _TRANSFORMS if callable(getattr(dataset, name, None))]
    if not set_ones:
        return [whole]
    bare = copy.copy(dataset)
    try:
        for name in set_ones:
            setattr(bare, name, None)
        without = time_calls("sample", bare.__getitem__, indices[: whole.calls], max_s=seconds / 2)
    except Exception:  # it cannot do without its transforms
        return [whole]
    wall_ms = max(whole.mean_ms - without.mean_ms, 0.0)
    return [without, make_stage("transform", [wall_ms] * without.calls, max(whole.cpu_ms - without.cpu_ms, 0.0))]


def time_batch_parts(loader: Any, batch: Any, samples: Sequence[Any], *, images: int, seconds: float) -> list[Stage]:
    """Time what happens to a whole batch: ``collate`` (of ``samples``), ``hand-off`` where a ``DataLoader`` has
    workers, and, with a GPU, ``pin`` and ``transfer`` of a ``batch`` that lies on the CPU.
    """
    stages, each_s = [], seconds / 4
    if isinstance(loader, DataLoader) and loader.collate_fn is not None and len(samples) == images:
        collate = time_calls("collate", loader.collate_fn, repeat(samples, 50), max_s=each_s, images=images)
        stages.append(collate)
    if not _is_on_cpu(batch):
        return stages
    if isinstance(loader, DataLoader) and loader.num_workers:
        stages.append(_time_hand_off(batch, images=images, seconds=each_s))
    if torch.cuda.is_available():
        pinned = isinstance(loader, DataLoader) and loader.pin_memory
        if pinned:
            stages.append(time_calls("pin", _pin, repeat(batch, 50), max_s=each_s, images=images))
            batch = _pin(batch)
        stages.append(time_calls("transfer", _transfer, repeat(batch, 50), max_s=each_s, images=images))
    return stages


def _pin(batch: Any) -> Any:
    return _map_tensors(batch, lambda tensor: tensor.pin_memory())


def _transfer(batch: Any) -> None:
    torch.cuda.synchronize()
    _map_tensors(batch, lambda tensor: tensor.to("cuda", non_blocking=True))
    torch.cuda.synchronize()  # a copy is only queued when the call returns


class _Same(IterableDataset[Any]):
    """One batch again and again, copied each time: shared memory that was handed over once is not handed over anew."""

    def __init__(self, batch: Any, count: int) -> None:
        self.batch, self.count = batch, count

    def __iter__(self) -> Iterator[Any]:
        return (copy.deepcopy(self.batch) for _ in range(self.count))


def _time_hand_off(batch: Any, *, images: int, seconds: float) -> Stage:
    """A batch that lies ready, through one worker and torch's own queue; the copy that it needs is taken off."""
    copying = time_calls("copy", copy.deepcopy, repeat(batch, 8), max_s=seconds / 4, images=images)
    source = DataLoader(_Same(batch, _HANDED_BATCHES + 2), batch_size=None, num_workers=1)
    wall_ms, cpu_began_s = [], 0.0
    with quiet_fork():
        batches = iter(source)
    try:
        began_s = asked_s = perf_counter()
        for number, _ in enumerate(islice(batches, _HANDED_BATCHES + 2)):
            got_s = perf_counter()
            if number < 2:  # the worker starts
                began_s, cpu_began_s = got_s, measure_tree_cpu()
            else:
                wall_ms.append((got_s - asked_s) * 1000 / images - copying.mean_ms)
            if wall_ms and got_s - began_s > seconds:
                break
            asked_s = got_s
        cpu_ms = (measure_tree_cpu() - cpu_began_s) * 1000 / len(wall_ms) / images - copying.cpu_ms
    finally:
        getattr(batches, "_shutdown_workers", int)()
    return make_stage("hand-off", [max(ms, 0.0) for ms in wall_ms], max(cpu_ms, 0.0))


def _is_on_cpu(batch: Any) -> bool:
    found: list[bool] = []
    _map_tensors(batch, lambda tensor: found.append(tensor.device.type == "cpu"))
    return bool(found) and all(found)


def _map_tensors(batch: Any, call: Callable[[Tensor], Any]) -> Any:
    """Call for every tensor in lists, tuples and dicts; what it gives, in the same shape."""
    if isinstance(batch, Tensor):
        return call(batch)
    if isinstance(batch, dict):
        return {key: _map_tensors(value, call) for key, value in batch.items()}
    if isinstance(batch, list | tuple):
        return [_map_tensors(value, call) for value in batch]
    return batch
