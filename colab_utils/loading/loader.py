"""The loader: samples in a seeded order, packed by workers into reused memory, delivered on the device."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import PackedBatch, Target
from colab_utils.loading.sampler import AllArrived, BatchParts, BatchSampler
from colab_utils.loading.transforms import Transforms, apply_transforms, find_flip
from colab_utils.loading.tune import Tuning, tune_workers
from colab_utils.loading.workers import (
    Backend,
    Fetcher,
    Loaded,
    Prefetcher,
    describe_workers,
)
from colab_utils.runtime import count_cores

__all__ = ["Loader", "make_loader"]


_TUNED_BATCHES = 64  # fewer are loaded before the trials would be over


Delivery = Literal["dense", "packed"]


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
    seed: int = 0,
    prefetch: int | Literal["auto"] = "auto",
    in_order: bool = True,
    group_by_aspect_ratio: bool = True,
    transforms: Transforms | None = None,
    transform_on: Literal["device", "worker"] = "device",
    max_bad: int = 0,
    rank: int = 0,
    ranks: int = 1,
) -> Loader:
    """Make a loader whose batches arrive ready on the device.

    Args:
        dataset: a ``ShardDataset``, a ``Subset`` of one, or any map-style dataset with torchvision's detection
            contract.
        batch_size: images in a batch; the last batch of an epoch may hold fewer.
        device: where the batches are delivered.
        workers: worker processes or threads. 0 loads in this process, when a batch is asked for. "auto" tries what
            this machine can do (``tune_workers``: under 20 s, once for a machine and dataset), never more than its
            cores; for under 64 batches an epoch, or whole shards, it is one process a core, at most 4.
        backend: "processes"; "loader_process" for one loader process with threads; "threads" for threads here,
            for images that need no decoding. "auto" is what was tuned, or processes.
        deliver: "dense" gives ``(images, targets)`` as torchvision models take them; "packed" gives
            ``PackedBatch``, with the device work not yet done.
        image_dtype: of dense images: float32 in 0 to 1, or uint8 as they are stored, in NHWC strides, for code that
            normalises itself.
        shuffle: a new order each epoch, the same for the same seed and epoch, whatever the workers.
        seed: of the order, and of all chance in your dataset and in ``transforms`` on the worker.
        prefetch: batches that each worker prepares ahead; "auto" is what was tuned, or 2.
        in_order: False delivers each batch when it is ready, so that a slow one holds up no other; the batches are
            the same, their order is not.
        group_by_aspect_ratio: fill shuffled batches with wide images or with tall ones, where the dataset has
            ``sizes``: less padding, as in torchvision's references.
        transforms: your own ``torchvision.transforms.v2``, of ``(image, target)``, given tv_tensors. A
            ``v2.RandomHorizontalFlip`` alone, for dense batches on the CPU, is done where the masks are expanded.
        transform_on: "device" applies them to what is delivered dense; "worker" to each sample where it is loaded
            (they must leave images uint8).
        max_bad: images in all that may fail to load and be left out, each with a warning; one more is an error.
        rank: of this process, where several train together: it gets its share of the images of each batch, or None in
            place of a batch that has none for it.
        ranks: how many processes those are.

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
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        raise ColabUtilsError(f"expected a dataset with a length and indices, found {type(dataset).__name__}")
    if not len(dataset):
        raise ColabUtilsError("expected a dataset with images, found an empty one")
    choices: tuple[tuple[str, Any, tuple[str, ...]], ...] = (
        ("deliver", deliver, get_args(Delivery)),
        ("backend", backend, ("auto", *get_args(Backend))),
        ("transform_on", transform_on, ("device", "worker")),
    )
    for name, value, known in choices:
        if value not in known:
            raise ColabUtilsError(f"expected {name} as one of {', '.join(known)}, found {value!r}")
    if image_dtype not in (torch.float32, torch.uint8):
        raise ColabUtilsError(f"expected image_dtype as torch.float32 or torch.uint8, found {image_dtype!r}")
    if transforms is not None and transform_on == "device" and deliver == "packed":
        raise ColabUtilsError(
            "expected deliver='dense' for transforms on the device, found 'packed': they need dense masks. Or apply "
            "them with transform_on='worker'."
        )
    ahead = 2 if prefetch == "auto" else prefetch
    count = min(4, count_cores()) if workers == "auto" else workers
    numbers = (
        ("batch_size", batch_size, 1), ("workers", count, 0), ("prefetch", ahead, 1), ("seed", seed, 0),
        ("max_bad", max_bad, 0), ("rank", rank, 0), ("ranks", ranks, rank + 1),
    )  # fmt: skip
    for name, number, least in numbers:
        if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < least:
            raise ColabUtilsError(f"expected {name} as a whole number of {least} or more, found {number!r}")
    on_worker = transform_on == "worker"
    place = find_device(device)
    # with no GPU to expand masks on, the workers do it: into memory that is used again
    dense = deliver == "dense" and place.type == "cpu"
    source = Fetcher(dataset, transforms if on_worker else None, dense=dense)
    flip = find_flip(transforms) if dense and not source.whole_shards else None
    if flip is not None:
        source, transforms = Fetcher(dataset, dense=True, flip=flip), None
    kind: Backend = "processes" if backend == "auto" else backend
    tuning = None
    here = not source.whole_shards and (source.arrival is None or source.arrival.is_complete)
    if workers == "auto" and len(source) >= _TUNED_BATCHES * batch_size and here:
        tuning = tune_workers(source, batch_size=int(batch_size), backend=None if backend == "auto" else backend)
        kind, count = tuning.best.backend, tuning.best.workers
        ahead = tuning.best.prefetch if prefetch == "auto" else prefetch
    order = BatchSampler(
        len(source),
        int(batch_size),
        int(seed) if shuffle else None,
        sizes=source.sizes if group_by_aspect_ratio else None,
        shard_of=source.shard_of if source.whole_shards else None,
        streams=int(count) if kind == "processes" else 1,
    )
    return Loader(
        source,
        order,
        batch_size=int(batch_size),
        device=place,
        workers=int(count),
        backend=kind,
        deliver=deliver,
        image_dtype=image_dtype,
        seed=int(seed),
        prefetch=int(ahead),
        in_order=in_order,
        transforms=None if on_worker else transforms,
        max_bad=int(max_bad),
        tuning=tuning,
        share=(int(rank), int(ranks)),
    )


class Loader:
    """Iterates over the batches of one epoch; each new pass is the next epoch, also after one that was
    broken off. Made by :func:`make_loader`.

    Attributes:
        epoch: the epoch that the next pass runs, or that the pass under way is in.
        tuning: how the workers were found, where they were.
        total: images of the last batch, the shares of all processes together.
        bad: image index and reason of every image that was left out (``max_bad``).
    """

    def __init__(
        self,
        source: Fetcher,
        order: BatchSampler,
        *,
        batch_size: int,
        device: torch.device,
        workers: int,
        backend: Backend,
        deliver: Delivery,
        image_dtype: torch.dtype,
        seed: int,
        prefetch: int,
        in_order: bool,
        transforms: Transforms | None,
        max_bad: int,
        tuning: Tuning | None,
        share: tuple[int, int],
    ) -> None:
        self.dataset, self.batch_size, self.device = source.dataset, batch_size, device
        self.workers, self.backend, self.deliver, self.prefetch = workers, backend, deliver, prefetch
        self.image_dtype = image_dtype
        self.seed, self.in_order, self.transforms, self.max_bad = seed, in_order, transforms, max_bad
        self.epoch, self.tuning, self.total = 0, tuning, 0
        self.bad: list[tuple[int, str]] = []
        self._source, self._order, self._share = source, order, share
        self._totals: dict[int, int] = {}
        self._delivered: set[int] = set()
        self._joined: list[tuple[int, int]] = []  # shards that arrived in this epoch, and before which batch
        self._planned = 0
        self._resumed = False
        self._passes = 0
        self._prefetcher: Prefetcher | None = None

    def __len__(self) -> int:
        return len(self._order)

    @property
    def left(self) -> int:
        """Batches of this epoch that were not delivered yet."""
        return len(self) - len(self._delivered)

    def __str__(self) -> str:
        way = describe_workers(self.backend, self.workers, self.prefetch)
        return f"{len(self):,} batches of {self.batch_size}, {self.deliver}, by {way}"

    def __iter__(self) -> Iterator[Any]:
        if self._delivered and not self._resumed:  # the last pass was broken off
            self._end_epoch()
        self._resumed = False
        self._totals.clear()
        self._passes += 1
        this_pass = self._passes
        self._order.epoch = self.epoch
        for loaded in self._run():
            self._count_bad(loaded)
            self._delivered.add(loaded.number)
            self.total = self._totals.pop(loaded.number)
            if len(self._delivered) == len(self):
                self._end_epoch()
            if loaded.batch is not None or self._share[1] > 1:
                yield self._place(loaded.batch) if loaded.batch is not None else None
                if this_pass != self._passes:  # before waiting: the results of this pass went to the other one
                    raise ColabUtilsError(
                        "expected one pass over a loader at a time, found a second one. Make two loaders."
                    )

    def _end_epoch(self) -> None:
        self.epoch += 1
        self._delivered.clear()
        self._joined, self._planned = [], 0
        self._order.go_on(())

    def _run(self) -> Iterator[Loaded]:
        """What the workers give; ends them where something goes wrong."""
        try:
            yield from self._start().run(
                self._plan(), seed=(self.seed, self.epoch), in_order=self.in_order, tolerant=self.max_bad > 0
            )
        except GeneratorExit:
            raise  # the pass is broken off: the workers wait for the next one
        except BaseException:
            self.close()
            raise

    def _plan(self) -> Iterator[tuple[int, BatchParts] | None]:
        """The batches of the epoch that were not delivered yet."""
        arrival, delivered = self._source.arrival, set(self._delivered)
        plan: Iterator[BatchParts | None] = iter(())
        shard_of: Any = self._source.shard_of
        if self._joined or not (arrival is None or arrival.is_complete):
            from_where = arrival or AllArrived(np.unique(shard_of).tolist())
            plan = self._order.plan_arriving(shard_of, from_where, self._joined, self._planned)
        else:
            plan = iter(self._order.plan())
        number = 0
        for parts in plan:
            if parts is None:
                yield None
                continue
            self._planned = max(self._planned, number + 1)
            if number not in delivered:
                if arrival is not None and arrival.window is not None:
                    needed = {int(shard_of[index]) for _, indices in parts for index in indices}
                    while not arrival.has(needed):
                        yield None
                self._totals[number] = sum(len(indices) for _, indices in parts)
                yield number, self._take_share(parts)
            number += 1

    def _take_share(self, parts: BatchParts) -> BatchParts:
        """Every ``ranks``-th image of a batch."""
        rank, ranks = self._share
        if ranks == 1:
            return parts
        shares, first = [], 0
        for stream, indices in parts:
            shares.append((stream, indices[(rank - first) % ranks :: ranks]))
            first += len(indices)
        return [(stream, indices) for stream, indices in shares if indices]

    def _start(self) -> Prefetcher:
        if self._prefetcher is None:
            try:
                self._prefetcher = Prefetcher(self._source, self.backend, self.workers, self.prefetch)
            except (OSError, ValueError) as error:  # no more processes, or a system that cannot fork
                warnings.warn(
                    f"expected {self.workers} worker processes, found that they cannot be started ({error}): batches "
                    "are loaded in this process. Close what you do not need, or use workers=0.",
                    ColabUtilsWarning,
                    stacklevel=4,
                )
                self.workers, self.backend = 0, "threads"
                self._prefetcher = Prefetcher(self._source, "threads", 0, self.prefetch)
            self._finalizer = weakref.finalize(self, self._prefetcher.close)
        return self._prefetcher

    def _count_bad(self, loaded: Loaded) -> None:
        for index, error in loaded.bad:
            self.bad.append((index, str(error)))
            if len(self.bad) > self.max_bad:
                self.close()
                raise ColabUtilsError(
                    f"expected at most {self.max_bad} bad images (max_bad), found {len(self.bad)}, the last: {error}"
                )
            said = f"an image is left out (number {len(self.bad)} so far): {error}"
            warnings.warn(said, ColabUtilsWarning, stacklevel=3)

    def _place(self, batch: PackedBatch) -> PackedBatch | tuple[list[Tensor], list[Target]]:
        if self.deliver == "packed":
            return batch.to(self.device)
        if self.transforms is None and self.image_dtype == torch.float32:
            return batch.to_images(self.device), batch.to_targets(self.device)
        images = batch.to(self.device).split_images()
        if self.transforms is None:
            return images, batch.to_targets(self.device)
        pairs = zip(images, batch.to_targets(self.device), strict=True)
        done = [apply_transforms(self.transforms, image, target) for image, target in pairs]
        return [self._convert(image) for image, _ in done], [target for _, target in done]

    def _convert(self, image: Tensor) -> Tensor:
        """An image after transforms: what they left uint8 becomes float, if that is asked for."""
        return image.float().div_(255) if image.dtype == torch.uint8 != self.image_dtype else image

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands after the batches delivered so far: plain whole numbers; ``ahead`` lists batches
        that were delivered before their turn (``in_order=False``); ``joined`` when shards arrived that were copied;
        ``before`` what this epoch delivered in batches of another size.
        """
        done = next(n for n in range(len(self) + 1) if n not in self._delivered)
        ahead = sorted(n for n in self._delivered if n > done)
        state: dict[str, Any] = {**self._describe_order(), "epoch": self.epoch, "batch": done}
        if self._joined:
            state |= {"joined": [list(one) for one in self._joined], "planned": self._planned}
        if self._order.before:
            state["before"] = [list(one) for one in self._order.before]
        return {**state, "streams": self._order.streams, **({"ahead": ahead} if ahead else {})}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that a state was taken at; with batches of another size, with the images that the
        epoch had left then.

        Raises:
            ColabUtilsError: if the state is of another order (seed, shuffle, number of images, or batch size where
                shards were still arriving).
        """
        here = self._describe_order()
        there = {key: state.get(key, value) for key, value in here.items()}
        size, before = there["batch_size"], state.get("before", ())
        resized = size != self.batch_size and not state.get("joined")
        if there != (here | {"batch_size": size} if resized else here):
            raise ColabUtilsError(f"expected a state of the same order {here}, found {there}: use those settings again")
        ahead = state.get("ahead", ())
        self.epoch = self._order.epoch = state["epoch"]
        self._resumed = True
        self._order.streams = state.get("streams", self._order.streams)
        done = [[size, state["batch"], *ahead]] if resized and (state["batch"] or ahead) else []
        self._order.go_on([*before, *done])
        self._delivered = set() if resized else {*range(state["batch"]), *ahead}
        self._joined = [(shard, number) for shard, number in state.get("joined", ())]
        self._planned = state.get("planned", 0)

    def _describe_order(self) -> dict[str, int]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "shuffle": int(self._order.is_shuffled),
            "grouped": int(self._order.is_grouped),
            "images": len(self.dataset),  # type: ignore[arg-type]
        }

    def close(self) -> None:
        """End the workers; the next pass starts new ones."""
        if self._prefetcher is not None:
            self._finalizer()
            self._prefetcher = None


def find_device(device: torch.device | str) -> torch.device:
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
