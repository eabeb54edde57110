"""The loader: samples in a seeded order, packed by workers into reused memory, delivered on the device."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.arriving import order_windows
from colab_utils.loading.batch import PackedBatch, Target, Transforms, apply_transforms
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.tune import PREFETCH, Tuning, tune_workers
from colab_utils.loading.workers import Backend, Fetcher, Prefetcher, WorkerJob, describe_workers
from colab_utils.runtime import count_cores

__all__ = ["Loader", "LoaderSettings", "find_device", "make_loader"]

_TUNED_BATCHES = 64  # fewer are loaded before the trials would be over
Delivery = Literal["dense", "packed"]


@dataclass(frozen=True)
class LoaderSettings:
    """What a :class:`Loader` does with its batches; the fields are as in :func:`make_loader`.

    Raises:
        ColabUtilsError: if one is out of range, or the device is not there.
    """

    batch_size: int
    device: torch.device
    workers: int
    backend: Backend
    prefetch: int
    deliver: Delivery
    image_dtype: torch.dtype
    seed: int
    transforms: Transforms | None
    """On the device."""
    max_bad: int
    rank: int
    ranks: int

    def __post_init__(self) -> None:
        choices: dict[str, tuple[Any, ...]] = {"deliver": get_args(Delivery), "backend": get_args(Backend)}
        for name, known in (choices | {"image_dtype": (torch.float32, torch.uint8)}).items():
            if (value := getattr(self, name)) not in known:
                raise ColabUtilsError(f"expected {name} in {', '.join(map(str, known))}, found {value!r}: choose one")
        least = {"batch_size": 1, "workers": 0, "prefetch": 1, "seed": 0, "max_bad": 0}
        for name, lowest in least.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < lowest:
                raise ColabUtilsError(f"expected {name} as integer of {lowest} or more, found {value!r}: choose one")
            object.__setattr__(self, name, int(value))
        if self.transforms is not None and self.deliver == "packed":
            raise ColabUtilsError(
                "expected deliver='dense' for transforms on the device, found 'packed': they need dense masks. Or "
                "give them to your dataset, as ShardDataset(transforms=...)."
            )


def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    workers: int | Literal["auto"] = "auto",
    backend: Backend | Literal["auto"] = "auto",
    deliver: Delivery = "dense",
    image_dtype: torch.dtype = torch.float32,
    shuffle: bool = True,
    sampler: Sampler[int] | Sequence[int] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    prefetch: int = PREFETCH,
    transforms: Transforms | None = None,
    max_bad: int = 0,
) -> Loader:
    """Make a loader whose batches arrive ready on the device.

    A shuffled batch holds wide images, or tall ones, where the dataset has ``sizes``: less padding, as in torchvision's
    references. Where ``torch.distributed`` is initialised and there is no ``sampler``, each process gets its share of
    the images of each batch, or None in place of a batch that has none for it.

    Args:
        dataset: a ``ShardDataset``, a ``Subset`` of one, or any map-style dataset with torchvision's detection
            contract.
        batch_size: images in a batch; the last batch of an epoch may hold fewer.
        device: where the batches are delivered.
        workers: how many. 0 loads in this process, when a batch is asked for. "auto" tries what this machine can do
            (``tune_workers``: at most four short trials), never more than its cores; for under 64 batches an epoch,
            or shards that still arrive, it is one process a core, at most 4.
        backend: "processes"; or "loader_process" for one loader process with threads, where your own dataset or
            transforms, which may draw random numbers, run one sample at a time. "auto" is what was tuned, or processes.
        deliver: "dense" gives ``(images, targets)`` as torchvision models take them; "packed" gives
            ``PackedBatch``, with the device work not yet done.
        image_dtype: of dense images: float32 in 0 to 1, or uint8 as they are stored, in NHWC strides, for code that
            normalises itself.
        shuffle: a new order each epoch, the same for the same seed and epoch, whatever the workers.
        sampler: gives the indices of each epoch instead, as in torch's ``DataLoader``, such as a
            ``WeightedRandomSampler``; it has a length, and draws from ``seed`` unless it has a generator of its own.
            With ``range(len(dataset))`` one of several processes gets all images.
        drop_last: leave out the last batch of an epoch where it is not full.
        seed: of the order, and of all random numbers in your dataset and in its transforms: the same samples with any
            backend and any number of workers.
        prefetch: batches that each worker prepares ahead.
        transforms: your own ``torchvision.transforms.v2``, of ``(image, target)``, given tv_tensors, applied on the
            device to dense batches (on the worker: those of your dataset, which leave images uint8). On the CPU, a
            ``v2.RandomHorizontalFlip`` alone is done where the masks are expanded.
        max_bad: images in all that may fail to load, with whatever exception, and are left out, each with a warning;
            one more is an error.

    Raises:
        ColabUtilsError: if the dataset is empty or has no length, an argument is out of range, or the device is not
            there; and, while you iterate, if a sample is damaged, a worker process dies, or memory is short.

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
    torch_device, group = find_device(device), torch.distributed
    # with no GPU to expand masks on, the workers do it: into memory that is used again
    dense = deliver == "dense" and torch_device.type == "cpu"
    flip = _find_flip(transforms) if dense else 0.0
    fetcher = Fetcher(dataset, dense=dense, flip=flip)
    is_shared = sampler is None and group.is_available() and group.is_initialized()
    settings = LoaderSettings(
        batch_size=batch_size, device=torch_device, deliver=deliver, image_dtype=image_dtype, seed=seed,
        prefetch=prefetch, workers=min(4, count_cores()) if workers == "auto" else workers, max_bad=max_bad,
        rank=group.get_rank() if is_shared else 0, ranks=group.get_world_size() if is_shared else 1,
        backend="processes" if backend == "auto" else backend,
        transforms=None if flip else transforms,
    )  # fmt: skip
    order = BatchSampler(
        len(fetcher), settings.batch_size, settings.seed if shuffle else None, sampler=sampler, drop_last=drop_last,
        sizes=fetcher.sizes,
    )  # fmt: skip
    is_here, tuning = fetcher.arrival is None or fetcher.arrival.is_complete, None
    if sampler is not None and not is_here:
        raise ColabUtilsError("expected no sampler while shards arrive, found one. Wait until all are here.")
    if workers == "auto" and is_here and len(fetcher) >= _TUNED_BATCHES * settings.batch_size:
        only = None if backend == "auto" else settings.backend
        tuning = tune_workers(fetcher, batch_size=settings.batch_size, backend=only)
        settings = replace(settings, backend=tuning.best.backend, workers=tuning.best.workers)
    return Loader(fetcher, order, settings, tuning)


def _find_flip(transforms: Any) -> float:
    """The share of images that transforms mirror left to right, where they do nothing else; else 0."""
    from torchvision.transforms import v2

    return float(transforms.p) if type(transforms) is v2.RandomHorizontalFlip else 0.0  # a subclass may do anything


class Loader:
    """Iterates over the batches of one epoch; each new pass is the next epoch, also after one that was
    broken off. Made by :func:`make_loader`.

    Attributes:
        epoch: the epoch that the next pass runs, or that the pass under way is in.
        settings: what it does.
        tuning: how the workers were found, where they were.
        total: images of the last batch, the shares of all processes together.
        bad: image index and reason of every image that was left out (``max_bad``).
    """

    def __init__(
        self, fetcher: Fetcher, order: BatchSampler, settings: LoaderSettings, tuning: Tuning | None = None
    ) -> None:
        self.dataset, self.settings, self.tuning = fetcher.dataset, settings, tuning
        self.batch_size, self.device, self.deliver = settings.batch_size, settings.device, settings.deliver
        self.workers, self.backend, self.prefetch = settings.workers, settings.backend, settings.prefetch
        self.epoch = self.total = 0
        self.bad: list[tuple[int, str]] = []
        self._fetcher, self._order = fetcher, order
        self._totals: dict[int, int] = {}
        self._delivered, self._skipped = 0, set[int]()
        self._windows: list[list[int]] = []  # of shards, in an epoch that began while they arrived
        self._resumed = False
        self._passes = 0
        self._prefetcher: Prefetcher | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def left(self) -> int:
        """Batches of this epoch that were not delivered yet."""
        return len(self) - self._delivered - sum(number >= self._delivered for number in self._skipped)

    def __str__(self) -> str:
        way = describe_workers(self.backend, self.workers, self.prefetch)
        return f"{len(self):,} batches of {self.batch_size}, {self.deliver} ({way})"

    __repr__ = __str__

    def __iter__(self) -> Iterator[Any]:
        if (self._delivered or self._skipped) and not self._resumed:  # the last pass was broken off
            self._end_epoch()
        self._resumed = False
        self._totals.clear()
        self._passes += 1
        this_pass = self._passes
        self._order.epoch = self.epoch
        for number, batch, bad in self._run():
            self._count_bad(bad)
            self._delivered = number + 1
            self.total = self._totals.pop(number)
            if not self.left:
                self._end_epoch()
            if batch is not None or self.settings.ranks > 1:
                yield batch and self._place(batch)
                if this_pass != self._passes:  # before waiting: the results of this pass went to the other one
                    raise ColabUtilsError(
                        "expected one pass over a loader at a time, found a second one. Make two loaders."
                    )

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._delivered, self._skipped = 0, set()
        self._windows = []
        self._order.go_on(())

    def _run(self) -> Iterator[tuple[int, PackedBatch | None, Sequence[tuple[int, str]]]]:
        """What the workers give; ends them where something goes wrong."""
        if self._prefetcher is None:
            self._prefetcher = Prefetcher(self._fetcher, self.backend, self.workers, self.prefetch)
            self._finalizer = weakref.finalize(self, self._prefetcher.close)
        try:
            seed = (self.settings.seed, self.epoch, self.settings.rank)
            yield from self._prefetcher.run(self._plan(), seed=seed, skips_bad=self.settings.max_bad > 0)
        except GeneratorExit:
            raise  # the pass is broken off: the workers wait for the next one
        except BaseException:
            self.close()
            raise

    def _plan(self) -> Iterator[tuple[int, list[int]] | None]:
        """The batches of the epoch that were not delivered yet, with their numbers; None while the next has to wait."""
        first, skipped = self._delivered, set(self._skipped)
        arrival, shard_of = self._fetcher.arrival, self._fetcher.shard_of
        is_new = not (first or skipped or self._windows or self._order.before)
        if is_new and arrival is not None and not arrival.is_complete:
            self._windows = arrival.plan_windows(self.epoch)
        for number, (place, indices) in enumerate(order_windows(self._order, self._windows, shard_of)):
            if number < first or number in skipped:
                continue
            if arrival is not None and shard_of is not None:
                yield from arrival.wait_for(set(shard_of[indices].tolist()), self._windows, place)
            self._totals[number] = len(indices)
            yield number, indices[self.settings.rank :: self.settings.ranks]

    def list_jobs(self) -> list[WorkerJob]:
        """The batches that were asked for and did not come yet, oldest first; of each, its worker."""
        return self._prefetcher.list_jobs() if self._prefetcher else []

    def restart(self, *, skip: int | None = None) -> None:
        """End the workers; the next pass goes on in this epoch where it stood, without the batch of number ``skip``."""
        self.close()
        self._resumed = True
        if skip is not None:
            self._skipped.add(skip)

    def _count_bad(self, bad: Sequence[tuple[int, str]]) -> None:
        for index, found in bad:
            self.bad.append((index, found))
            if len(self.bad) > self.settings.max_bad:
                self.close()
                raise ColabUtilsError(
                    f"expected at most {self.settings.max_bad} bad images (max_bad), found {len(self.bad)}. Allow "
                    f"more, or mend them; the last: {found}"
                )
            text = f"an image is left out (number {len(self.bad)} so far): {found}"
            warnings.warn(text, ColabUtilsWarning, stacklevel=3)

    def _place(self, batch: PackedBatch) -> PackedBatch | tuple[list[Tensor], list[Target]]:
        """A batch as it is delivered."""
        transforms, dtype = self.settings.transforms, self.settings.image_dtype
        if self.deliver == "packed":
            return batch.to(self.device)
        images = batch.to_images(self.device, torch.uint8 if transforms else dtype)
        targets = batch.to_targets(self.device)
        if transforms:
            pairs = [apply_transforms(transforms, *pair) for pair in zip(images, targets, strict=True)]
            images, targets = [image for image, _ in pairs], [target for _, target in pairs]
            if dtype == torch.float32:
                images = [image.float().div_(255) if image.dtype == torch.uint8 else image for image in images]
        return images, targets

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands after the batches delivered so far: plain whole numbers; ``skipped`` lists batches
        to leave out; ``joined`` the windows of shards of an epoch that began while they arrived; ``before`` what this
        epoch delivered in batches of another size.
        """
        return {
            "seed": self.settings.seed, "batch_size": self.batch_size, "shuffle": int(self._order.is_shuffled),
            "images": len(self._fetcher), "epoch": self.epoch, "batch": self._delivered,
            "skipped": sorted(self._skipped), "joined": [list(one) for one in self._windows],
            "before": [list(one) for one in self._order.before],
        }  # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that a state was taken at; with batches of another size, with the images that the
        epoch had left then.

        Raises:
            ColabUtilsError: if the state is of another order (seed, shuffle, number of images, or batch size where
                shards were still arriving), or was changed.
        """
        now = self.state_dict()
        here = {key: now[key] for key in ("seed", "batch_size", "shuffle", "images")}
        there = {key: state.get(key, value) for key, value in here.items()}
        size, count = there["batch_size"], state.get("batch", -1)
        try:
            skipped, before = set(state.get("skipped", ())), [*state.get("before", ())]
            sizes, joined = [size, *(one for one, _, *_ in before)], sorted(chain(*state.get("joined", ())))
            numbers = state.get("epoch"), count, *sizes, *skipped, *chain(*before)
            sound = all(type(number) is int and number >= 0 for number in numbers)
            if not (sound and min(sizes) > 0 and max(sizes) < 1 << 31 and self._knows(joined)):
                raise ValueError("other numbers")
        except (TypeError, ValueError):
            raise ColabUtilsError(
                "expected a state as Loader.state_dict gives it, found one that was changed: start a new epoch"
            ) from None
        resized = size != self.batch_size and not state.get("joined") and self._order.sampler is None
        if there != (here | {"batch_size": size} if resized else here):
            raise ColabUtilsError(f"expected a state of the same order {here}, found {there}: use those settings again")
        self.epoch = self._order.epoch = state["epoch"]
        self._resumed = True
        later = sorted(number for number in skipped if number >= count)
        done = [[size, count, *later]] if resized and (count or later) else []
        self._order.go_on([*before, *done])
        self._delivered, self._skipped = (0, set()) if resized else (count, skipped)
        self._windows = [list(one) for one in state.get("joined", ())]
        if self.left < 1:  # or a pass without batches would follow another one for ever
            self._end_epoch()

    def _knows(self, shards: list[int]) -> bool:
        """Whether windows hold these shards, all there are, or none."""
        arrival, shard_of, count = self._fetcher.arrival, self._fetcher.shard_of, len(shards)
        if arrival is not None:
            is_whole = count == len(arrival.index.shards)
        else:  # a subset may have no image of the last shards
            is_whole = shard_of is not None and count > shard_of.max()
        return not shards or (is_whole and shards == [*range(count)])

    def close(self) -> None:
        """End the workers; the next pass starts new ones."""
        if self._prefetcher is not None:
            self._finalizer()
            self._prefetcher = None


def find_device(device: torch.device | str) -> torch.device:
    """The device of that name.

    Raises:
        ColabUtilsError: if there is none, or no GPU.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError):
        raise ColabUtilsError(f"expected a device such as 'cpu' or 'cuda', found {device!r}: name one") from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise ColabUtilsError(
            f"expected a GPU for device {device!r}, found none. On Colab, choose Runtime > Change runtime type; or use "
            "device='cpu'."
        )
    return found
