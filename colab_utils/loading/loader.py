"""The loader: samples in a seeded order, packed by worker processes, delivered on the device."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, PackedSample, Target, collate_packed, pack_target
from colab_utils.runtime import count_cores

__all__ = ["Loader", "make_loader"]

Delivery = Literal["dense", "packed"]


def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    workers: int | Literal["auto"] = "auto",
    deliver: Delivery = "dense",
    shuffle: bool = True,
    seed: int = 0,
    prefetch: int = 2,
) -> Loader:
    """Make a loader whose batches arrive ready on the device.

    Args:
        dataset: a ``ShardDataset``, or any map-style dataset with torchvision's detection contract.
        batch_size: images in a batch; the last batch of an epoch may hold fewer.
        device: where the batches are delivered.
        workers: worker processes; "auto" is one for each core, at most 4. 0 loads in this process.
        deliver: "dense" gives ``(images, targets)`` as torchvision models take them; "packed" gives
            ``PackedBatch``, with the device work not yet done.
        shuffle: a new order each epoch, the same for the same seed and epoch.
        seed: of the order.
        prefetch: batches that each worker prepares ahead.

    Raises:
        ColabUtilsError: if the dataset is empty, or an argument is out of range.

    Example:
        >>> import torch
        >>> class Grey(torch.utils.data.Dataset):
        ...     def __len__(self):
        ...         return 3
        ...     def __getitem__(self, index):
        ...         return torch.full((3, 8, 8), 128, dtype=torch.uint8), {
        ...             "boxes": torch.tensor([[0., 0., 4., 4.]]), "labels": torch.tensor([1]),
        ...             "masks": torch.ones((1, 8, 8), dtype=torch.uint8), "image_id": index,
        ...             "area": torch.tensor([16.]), "iscrowd": torch.tensor([0])}
        >>> for images, targets in make_loader(Grey(), batch_size=2, workers=0):
        ...     print(len(images), images[0].dtype, targets[0]["masks"].shape)
        2 torch.float32 torch.Size([1, 8, 8])
        1 torch.float32 torch.Size([1, 8, 8])
    """
    if not len(dataset):  # type: ignore[arg-type]
        raise ColabUtilsError("expected a dataset with images, found an empty one")
    if deliver not in ("dense", "packed"):
        raise ColabUtilsError(f"expected deliver='dense' or 'packed', found {deliver!r}")
    if batch_size < 1 or prefetch < 1 or (workers != "auto" and workers < 0):
        raise ColabUtilsError(f"expected positive numbers, found {batch_size=}, {prefetch=}, {workers=}")
    count = min(4, count_cores()) if workers == "auto" else workers
    return Loader(
        dataset, batch_size, torch.device(device), count, deliver, shuffle=shuffle, seed=seed, prefetch=prefetch
    )


class Loader:
    """Iterates over the batches of one epoch; each new pass is the next epoch, also after one that was
    broken off. Made by :func:`make_loader`.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        device: torch.device,
        workers: int,
        deliver: Delivery,
        *,
        shuffle: bool,
        seed: int,
        prefetch: int,
    ) -> None:
        self.dataset, self.batch_size, self.device = dataset, batch_size, device
        self.workers, self.deliver, self.seed, self.shuffle = workers, deliver, seed, shuffle
        self.epoch = 0
        """The epoch that the next pass runs, or that the pass under way is in."""
        self._delivered = 0
        self._resumed = False
        self._order = _Order(dataset, batch_size, max(1, workers), seed if shuffle else None)
        options: dict[str, Any] = (
            {"prefetch_factor": prefetch, "persistent_workers": True, "worker_init_fn": _start_worker}
            if workers
            else {}
        )
        self._loader = DataLoader(
            _PackedView(dataset), batch_sampler=self._order, num_workers=workers, collate_fn=collate_packed, **options
        )

    def __len__(self) -> int:
        size = len(self.dataset)  # type: ignore[arg-type]
        return -(-size // self.batch_size)

    def __iter__(self) -> Iterator[Any]:
        if self._delivered and not self._resumed:  # the last pass was broken off
            self.epoch, self._delivered = self.epoch + 1, 0
        self._resumed = False
        self._order.epoch, self._order.start = self.epoch, self._delivered
        with warnings.catch_warnings():
            # Python 3.12 warns that a process with threads forks; torch's own loader does, by design
            warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
            # one worker for each core is meant, where torch counts fewer of them
            warnings.filterwarnings("ignore", message="This DataLoader will create", category=UserWarning)
            batches = iter(self._loader)
        for batch in batches:
            self._delivered += 1
            if self._delivered == len(self):
                self.epoch, self._delivered = self.epoch + 1, 0
            yield self._place(batch)

    def _place(self, batch: PackedBatch) -> PackedBatch | tuple[list[Tensor], list[Target]]:
        if self.deliver == "packed":
            return batch.to(self.device)
        return batch.to_images(self.device), batch.to_targets(self.device)

    def state_dict(self) -> dict[str, int]:
        """Where the order stands after the batches delivered so far: plain whole numbers."""
        return {"seed": self.seed, "epoch": self.epoch, "batch": self._delivered, "batch_size": self.batch_size}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batch that a state was taken at.

        Raises:
            ColabUtilsError: if the state is of another order (seed or batch size).
        """
        here = {"seed": self.seed, "batch_size": self.batch_size}
        there = {key: state[key] for key in here}
        if there != here:
            raise ColabUtilsError(f"expected a state of the same order {here}, found {there}: use those settings again")
        self.epoch, self._delivered, self._resumed = state["epoch"], state["batch"], True

    def close(self) -> None:
        """End the worker processes."""
        iterator = getattr(self._loader, "_iterator", None)
        if iterator is not None:
            iterator._shutdown_workers()
            self._loader._iterator = None


class _PackedView(Dataset[PackedSample]):
    """Any dataset as one of packed samples."""

    def __init__(self, dataset: Dataset[Any]) -> None:
        self._dataset = dataset
        self._read = getattr(dataset, "read_packed", None)

    def __getitem__(self, index: int) -> PackedSample:
        if self._read is not None:
            sample: PackedSample = self._read(index)
            return sample
        return pack_target(*self._dataset[index])


class _Order:
    """The batches of an epoch as lists of indices; the same for the same seed and epoch.

    Where whole shards are read, each worker walks through shards of its own (torch hands batches to its workers
    in turn), so that no shard is read twice in an epoch; the shards and the images in each are shuffled.
    """

    def __init__(self, dataset: Dataset[Any], batch_size: int, streams: int, seed: int | None) -> None:
        self._size = len(dataset)  # type: ignore[arg-type]
        self._shard_of = dataset.shard_of if getattr(dataset, "whole_shards", False) else None  # type: ignore[attr-defined]
        self._batch_size, self._streams, self._seed = batch_size, streams, seed
        self.epoch = self.start = 0

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._make_batches()[self.start :])

    def __len__(self) -> int:
        return -(-self._size // self._batch_size)

    def _make_batches(self) -> list[list[int]]:
        if self._seed is None:
            return self._cut(np.arange(self._size))
        shuffled = np.random.default_rng((self._seed, self.epoch)).permutation(self._size)
        if self._shard_of is None:
            return self._cut(shuffled)
        place = np.random.default_rng((self._seed, self.epoch, 1)).permutation(self._shard_of.max() + 1)
        ranks = place[self._shard_of[shuffled]]
        streams = [shuffled[ranks % self._streams == stream] for stream in range(self._streams)]
        by_shard = [s[np.argsort(place[self._shard_of[s]], kind="stable")] for s in streams]
        full = [self._cut(s[: len(s) // self._batch_size * self._batch_size]) for s in by_shard]
        rest = np.concatenate([s[len(s) // self._batch_size * self._batch_size :] for s in by_shard])
        turns = chain.from_iterable(zip_longest(*full))
        return [batch for batch in turns if batch is not None] + self._cut(rest)

    def _cut(self, indices: Any) -> list[list[int]]:
        return [indices[i : i + self._batch_size].tolist() for i in range(0, len(indices), self._batch_size)]


def _start_worker(_: int) -> None:
    torch.set_num_threads(1)
