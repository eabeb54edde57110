"""The loader: samples in a seeded order, packed by worker processes, delivered on the device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, Parcel, collate_packed
from colab_utils.loading.order import BatchOrder
from colab_utils.loading.sample import PackedSample, Target
from colab_utils.loading.workers import PackedView, explain_death, pass_on, start_worker
from colab_utils.runtime import count_cores, quiet_fork

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
        ColabUtilsError: if the dataset is empty or has no length, an argument is out of range, or the device is not
            there; and, while you iterate, if a sample is damaged or a worker process dies.

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
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ColabUtilsError(f"expected a dataset with a length and indices, found {type(dataset).__name__}")
    if not len(dataset):
        raise ColabUtilsError("expected a dataset with images, found an empty one")
    if deliver not in ("dense", "packed"):
        raise ColabUtilsError(f"expected deliver='dense' or 'packed', found {deliver!r}")
    count = min(4, count_cores()) if workers == "auto" else workers
    numbers = (("batch_size", batch_size, 1), ("workers", count, 0), ("prefetch", prefetch, 1), ("seed", seed, 0))
    for name, number, least in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise ColabUtilsError(f"expected {name} as a whole number of {least} or more, found {number!r}")
    return Loader(
        dataset, batch_size, _find_device(device), count, deliver, shuffle=shuffle, seed=seed, prefetch=prefetch
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
        self._passes = 0
        self._order = BatchOrder(dataset, batch_size, max(1, workers), seed if shuffle else None, split=True)
        options: dict[str, Any] = (
            {"prefetch_factor": prefetch, "persistent_workers": True, "worker_init_fn": start_worker} if workers else {}
        )
        with quiet_fork():
            self._loader: DataLoader[Any] = DataLoader(
                PackedView(dataset, batch_size),
                batch_sampler=self._order,
                num_workers=workers,
                collate_fn=pass_on,
                **options,
            )

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Any]:
        if self._delivered and not self._resumed:  # the last pass was broken off
            self.epoch, self._delivered = self.epoch + 1, 0
        self._resumed = False
        self._passes += 1
        this_pass = self._passes
        self._order.epoch, self._order.start = self.epoch, self._delivered
        for batch in self._join(self._receive()):
            if this_pass != self._passes:
                raise ColabUtilsError(
                    "expected one pass over a loader at a time, found a second one. Make two loaders."
                )
            self._delivered += 1
            if self._delivered == len(self):
                self.epoch, self._delivered = self.epoch + 1, 0
            yield self._place(batch)

    def _join(self, results: Iterator[Any]) -> Iterator[PackedBatch]:
        """Batches from what the workers give: whole ones, or samples of one that is to be put together here."""
        samples: list[PackedSample] = []
        size = len(self.dataset) - self._delivered * self.batch_size  # type: ignore[arg-type]
        for result in results:
            if isinstance(result, Parcel):
                size -= self.batch_size
                yield result.open()
                continue
            samples += result
            if len(samples) == min(size, self.batch_size) and samples:
                size -= len(samples)
                batch, samples = collate_packed(samples), []
                yield batch

    def _receive(self) -> Iterator[Any]:
        """What the workers give, in order; ends them where something goes wrong."""
        try:
            with quiet_fork():
                results = iter(self._loader)
            for result in results:
                if isinstance(result, ColabUtilsError):
                    raise result
                yield result
        except GeneratorExit:
            raise  # the pass is broken off: the workers wait for the next one
        except RuntimeError as error:
            self.close()
            if not str(error).startswith("DataLoader worker"):
                raise
            raise explain_death(f"{error} {error.__cause__}") from None  # the cause names the signal
        except BaseException:
            self.close()
            raise

    def _place(self, batch: PackedBatch) -> PackedBatch | tuple[list[Tensor], list[Target]]:
        if self.deliver == "packed":
            return batch.to(self.device)
        return batch.to_images(self.device), batch.to_targets(self.device)

    def state_dict(self) -> dict[str, int]:
        """Where the order stands after the batches delivered so far: plain whole numbers."""
        return {**self._describe_order(), "epoch": self.epoch, "batch": self._delivered, "streams": self._order.streams}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue after the batch that a state was taken at.

        Raises:
            ColabUtilsError: if the state is of another order (seed, batch size, shuffle or number of images).
        """
        here = self._describe_order()
        there = {key: state.get(key, value) for key, value in here.items()}
        if there != here:
            raise ColabUtilsError(f"expected a state of the same order {here}, found {there}: use those settings again")
        self.epoch, self._delivered, self._resumed = state["epoch"], state["batch"], True
        self._order.streams = state.get("streams", self._order.streams)

    def _describe_order(self) -> dict[str, int]:
        return {
            "seed": int(self.seed),
            "batch_size": int(self.batch_size),
            "shuffle": int(self.shuffle),
            "images": len(self.dataset),  # type: ignore[arg-type]
        }

    def close(self) -> None:
        """End the worker processes; the next pass starts new ones."""
        iterator: Any = self._loader._iterator
        self._loader._iterator = None
        if iterator is not None:
            iterator._shutdown_workers()


def _find_device(device: torch.device | str) -> torch.device:
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ColabUtilsError(f"expected a device such as 'cpu' or 'cuda', found {device!r}") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ColabUtilsError(
            f"expected a GPU for device {device!r}, found none. On Colab, choose Runtime > Change runtime type; or use "
            "device='cpu'."
        )
    return found
