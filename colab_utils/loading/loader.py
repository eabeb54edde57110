"""The loader, which delivers batches on the device.

Samples come in a seeded order. Worker processes pack them into shared buffers, which are reused.
"""

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import suppress
from copy import copy
from dataclasses import KW_ONLY, dataclass
from functools import wraps
from itertools import chain, islice
from math import ceil
from operator import itemgetter
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from colab_utils.data.defects import count_allowed
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.devices import Ranks, find_device, find_ranks
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.prefetcher import PREFETCH, LateSample, Loaded, Prefetcher
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.samples import Target, Transforms
from colab_utils.loading.workers import WorkerJob
from colab_utils.machine import count_cores, require_linux
from colab_utils.reader import AHEAD_IMAGES
from colab_utils.require import require_choice, require_count, require_max_bad, require_number
from colab_utils.streams import require_streams

# The first batches of a loader show what is wrong with its transforms. To check all batches would
# make the GPU wait.
_CHECKED_BATCHES = 20
_TWO_PASSES = (
    "Another pass over this loader has begun, and has ended this one. To run two passes at the "
    "same time, make a loader for each."
)

_P = ParamSpec("_P")
# What takes the place of an argument of torch's ``DataLoader``.
_COUNTERPARTS = {
    "num_workers": "pass workers",
    "prefetch_factor": "pass prefetch",
    "timeout": "pass max_wait_s",
    "batch_sampler": "pass batch_size and sampler; by default a batch holds images of one shape",
    "collate_fn": "leave it out, because batches come as torchvision's models take them",
    "pin_memory": "leave it out, because batches come on the device",
    "pin_memory_device": "pass device",
    "persistent_workers": "leave it out, because workers of shards and of a CocoFolder stay",
    "worker_init_fn": "leave it out, because each sample's random numbers come from seed",
    "generator": "pass seed",
    "multiprocessing_context": "leave it out, because workers are always forked",
    "in_order": "leave it out; max_wait_s lets a late batch come later",
}

Delivery = Literal["dense", "packed"]
# Where in the order a state was taken: see `Loader.state_dict`.
_read_position = itemgetter("epoch", "batch", "joined", "earlier")


def _explain_arguments(function: Callable[_P, "Loader"]) -> Callable[_P, "Loader"]:
    """Say what takes the place of an argument of ``DataLoader``, where one is passed."""

    @wraps(function)
    def call(*arguments: _P.args, **options: _P.kwargs) -> "Loader":
        for name in _COUNTERPARTS.keys() & options.keys():
            raise ColabUtilsError(f"make_loader has no {name}: {_COUNTERPARTS[name]}.")
        return function(*arguments, **options)

    return call


@_explain_arguments
def make_loader(
    dataset: Dataset[Any],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    workers: int | Literal["auto"] = "auto",
    streams: int | Literal["auto"] = "auto",
    deliver: Delivery = "dense",
    image_dtype: torch.dtype = torch.float32,
    shuffle: bool = True,
    sampler: Sampler[int] | Sequence[int] | None = None,
    drop_last: bool = False,
    seed: int = 0,
    prefetch: int = PREFETCH,
    transforms: Transforms | None = None,
    max_bad: float = 0,
    max_wait_s: float | None = None,
) -> "Loader":
    """Make a loader whose batches arrive ready on the device.

    A shuffled batch of shards or of a ``CocoFolder`` holds only wide or only tall images as far as
    possible. This saves padding, as in torchvision's references. If ``torch.distributed`` is
    initialised and there is no ``sampler``, each process gets its share of each batch. A process
    whose share has no image gets None.

    Each pass (``for batch in loader``) uses the dataset, and the processes that train together, as
    they are when the pass begins, as with torch's ``DataLoader``. So new workers start for each
    pass, and nothing that a worker changed in the dataset stays. The start of two workers takes 70
    to 110 ms on two cores, and that of a ``DataLoader``'s takes 80 to 130 ms. Only the workers of a
    ``ShardDataset`` or ``CocoFolder`` without transforms, or of a ``Subset`` of one, stay for the
    next pass, unless the pass was interrupted. Call ``loader.close()`` after you change an
    attribute of such a dataset other than its transforms.

    Args:
        dataset: A ``ShardDataset``, a ``Subset`` of one, or any map-style dataset with
            torchvision's detection contract. Its ``__getitems__`` is used if it has one. A target
            needs ``boxes``, ``labels`` (from 1) and ``masks``. A target without objects may leave
            these out. A missing ``image_id`` is the sample's index. A missing ``area`` is computed
            from the mask. The loader warns once of a mask that lies beside its box or has no pixel.
            In a worker, torch's ``get_worker_info`` tells the dataset which worker it is in.
        batch_size: Images in a batch. The last batch of an epoch may hold fewer.
        device: Device on which the batches are delivered. Default: "cpu".
        workers: Processes that load. 0 loads in this process when a batch is requested. "auto"
            is one process for each core, at most 4. Default: "auto".
        streams: Files of a ``CocoFolder``, or pieces of shards on Drive or at a URL, that each
            worker reads at the same time for the next batches. A read that waits for Drive needs no
            core. "auto" measures the fastest number during loading. 1 reads one after the other.
            Shards on a local disk are always read one after the other. Default: "auto".
        deliver: "dense" returns ``(images, targets)`` as torchvision models take them. "packed"
            returns a ``PackedBatch`` on the device, whose images are not converted and whose masks
            are not expanded yet. Default: "dense".
        image_dtype: Type of dense images: float32 from 0 to 1, or uint8 as stored, in NHWC strides,
            for code that normalises images itself. Default: float32.
        shuffle: Draw a new order in each epoch. The order depends on seed and epoch, and not on the
            workers. The first epoch of arriving shards follows the order of their copy, however
            fast it is. Default: True.
        sampler: An object that chooses the indices of each epoch and their order, as in torch's
            ``DataLoader``; for example a ``WeightedRandomSampler``. It must have a length, and must
            begin anew in each epoch. It draws from ``seed`` unless it has its own generator. Its
            indices are not divided among processes: with ``range(len(dataset))``, each process gets
            all images. Default: None.
        drop_last: Leave out the last batch of an epoch if it is not full. Default: False.
        seed: Seed of the order, and of the random numbers that your dataset and its transforms draw
            from ``random``, ``numpy.random`` and torch. So the samples are the same with any number
            of workers. A generator that your dataset keeps (``np.random.default_rng``) is copied
            to each worker, so that all workers draw the same numbers. Default: 0.
        prefetch: Batches that each worker prepares ahead. Default: 2.
        transforms: Your own ``torchvision.transforms.v2``. They run on the device, and get each
            ``(image, target)`` of a dense batch as tv_tensors. The transforms of your dataset run
            on the worker, and must leave images uint8. Default: None.
        max_bad: Number of images that may fail to load, in all epochs together (``int``), or their
            share of the dataset, from 0 to 1 (``float``). Each is left out, with a warning when it
            first fails. If more images fail, an error is raised. Default: 0.
        max_wait_s: Seconds to wait for a sample. If a worker begins no other sample for so long,
            new workers load what has not been delivered, and ``late`` lists the sample. If it is
            late there, too, it is left out if ``max_bad`` allows it, else it raises an error. So a
            sample stops the loop for about two times as long at most. A shard that is still being
            copied or written is waited for without this limit. The limit needs workers. Default:
            None, which waits without a limit.

    Raises:
        ColabUtilsError: The dataset is empty or has no length, an argument is out of range, or the
            device does not exist; or, during iteration, a sample is damaged, a box has no area, a
            label is below 1, an area is negative, an iscrowd is neither 0 nor 1, a worker process
            dies, or memory is short.

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
    require_linux("share memory between processes")
    torch_device = find_device(device)
    require_choice("deliver", deliver, ("dense", "packed"))
    require_choice("image_dtype", image_dtype, (torch.float32, torch.uint8))
    batch_size = require_count("batch_size", batch_size)
    prefetch = require_count("prefetch", prefetch)
    seed = require_count("seed", seed, minimum=0)
    max_bad = require_max_bad(max_bad)
    if workers == "auto":
        count = min(4, count_cores())
    else:
        count = require_count("workers", workers, minimum=0)
    _check_wait(max_wait_s, count)
    if sampler is not None:
        _check_sampler(sampler)
    if transforms is not None and deliver == "packed":
        raise ColabUtilsError(
            "The transforms need dense masks, and deliver is 'packed'. Pass deliver='dense', or "
            "give the transforms to your dataset, as in ShardDataset(transforms=...)."
        )
    # Without a GPU to expand the masks, the workers expand them into their shared buffers.
    dense = deliver == "dense" and torch_device.type == "cpu"
    fetcher = Fetcher(dataset, dense=dense, streams=require_streams(streams))
    max_bad = max(count_allowed(len(fetcher), max_bad), fetcher.source.max_bad)
    fetcher.skips_bad = max_bad > 0
    order = BatchSampler(
        len(fetcher),
        batch_size,
        seed if shuffle else None,
        sizes=fetcher.sizes,
        shard_of=fetcher.shard_of,
        sampler=sampler,
        drop_last=drop_last,
    )
    return Loader(
        fetcher,
        order,
        device=torch_device,
        workers=count,
        prefetch=prefetch,
        deliver=deliver,
        image_dtype=image_dtype,
        seed=seed,
        transforms=transforms,
        max_bad=max_bad,
        max_wait_s=max_wait_s,
    )


def _check_wait(max_wait_s: float | None, workers: int) -> None:
    """Raise an error if the limit of the wait is not above 0, or there are no workers."""
    if max_wait_s is None:
        return
    require_number("max_wait_s", max_wait_s, above=0)
    if not workers:
        raise ColabUtilsError(
            "max_wait_s needs worker processes, and workers is 0: this process cannot give up "
            "a read. Pass workers of 1 or more, or leave max_wait_s out."
        )


def _check_sampler(sampler: Any) -> None:
    """Raise an error if a sampler has no length, such as a generator or a class."""
    if not isinstance(sampler, Sized):
        raise ColabUtilsError(
            f"A sampler needs a length, and this {type(sampler).__name__} has none. Pass a list of "
            "indices, or an object with __iter__ and __len__ such as a WeightedRandomSampler."
        )


@dataclass(eq=False, repr=False)
class Loader:
    """An iterable over the batches of an epoch, made by :func:`make_loader`.

    Each new pass is the next epoch, even if the last pass was interrupted. The loader keeps most
    arguments of `make_loader` as attributes. To change one, make another loader.

    Attributes:
        total: Number of images of the latest batch, in all processes together. Bad images that were
            left out count where several processes train.
        bad: Index and reason of every image that was left out (``max_bad``).
        late: Index and seconds of every image that was not loaded in time (``max_wait_s``), even if
            it was loaded later. If the late image is not known, all images of its batch are listed.
        expects_pass: Whether another pass follows the first one. Then the first files of each next
            pass are read while the one before ends, as they are from the second pass on anyway.
    """

    _fetcher: Fetcher
    _order: BatchSampler
    _: KW_ONLY
    device: torch.device
    workers: int
    prefetch: int
    deliver: str
    image_dtype: torch.dtype
    seed: int
    transforms: Transforms | None
    max_bad: int
    max_wait_s: float | None

    def __post_init__(self) -> None:
        self.dataset = self._fetcher.dataset
        if self.workers and not self._fetcher.is_own:
            from colab_utils.loading.targets import warn_of_open_file

            warn_of_open_file(self.dataset)
        self.batch_size = self._order.batch_size
        self.bad: list[tuple[int, str]] = []
        self.late: list[LateSample] = []
        self.total = 0
        self._totals: dict[int, int] = {}
        self._delivered = 0
        self._resumed = False
        # Whether an epoch has run to its end. All shards have arrived then.
        self._has_passed = False
        self._passes = 0
        self.expects_pass = False
        self._prefetcher: Prefetcher | None = None
        # The fetcher as it was when the workers started.
        self._forked: Fetcher | None = None
        # How many more batches are checked after their transforms.
        self._unchecked = _CHECKED_BATCHES
        self._look_again()

    @property
    def epoch(self) -> int:
        """Return the epoch of the current pass. Between two passes, return that of the next one."""
        return self._order.epoch

    def __len__(self) -> int:
        if not (self._delivered or self._resumed):
            self._look_again()
        return len(self._order)

    @property
    def left(self) -> int:
        """Return the number of batches of this epoch that are not delivered yet."""
        return len(self) - self._delivered

    def __str__(self) -> str:
        return (
            f"{len(self):,} batches of {self.batch_size}, {self.deliver} (workers={self.workers})"
        )

    __repr__ = __str__

    def __iter__(self) -> Iterator[Any]:
        self._passes += 1
        # The last pass was interrupted, so this pass is the next epoch.
        if self._delivered and not self._resumed:
            self._end_epoch()
        self._look_again()
        self._resumed = False
        self._totals.clear()
        for number, batch, bad in self._run(self._passes):
            self._count_bad(bad)
            self._delivered += 1
            total = self._totals.pop(number)
            self.total = total if self._ranks.count > 1 else len(batch or ())
            if not self.left:
                self._has_passed = True
                self._end_epoch()
            if batch is not None or find_ranks().count > 1:
                yield None if batch is None else self._deliver(batch)

    def _look_again(self) -> None:
        """Adapt the order to changes of the dataset and of the processes that train together."""
        fetcher = self._fetcher
        fetcher.look_again()
        order = self._order
        order.sizes = fetcher.sizes
        order.shard_of = fetcher.shard_of
        if order.size != len(fetcher):
            order.size = len(fetcher)
            order.start_epoch(self.epoch)
            self._delivered = 0
        # The indices of a sampler are not divided among the processes.
        self._ranks = find_ranks() if order.sampler is None else Ranks()

    def _end_epoch(self) -> None:
        self._order.start_epoch(self.epoch + 1)
        self._delivered = 0

    def _run(self, this_pass: int) -> Iterator[Loaded]:
        """Yield the results of the workers, and end the workers of a pass that is interrupted.

        Raises:
            ColabUtilsError: Another pass has begun, and has taken the workers.
        """
        prefetcher = self._open_prefetcher()
        batches = prefetcher.run(
            self._plan(),
            seed=(self.seed, self.epoch, self._ranks.rank),
            following=self._list_following(),
        )
        try:
            for loaded in batches:
                if this_pass == self._passes:
                    yield loaded
                if this_pass != self._passes:
                    raise ColabUtilsError(_TWO_PASSES)
        except BaseException as error:
            # Another pass has taken the workers, perhaps while this one waited for them.
            if this_pass != self._passes and isinstance(error, Exception):
                raise ColabUtilsError(_TWO_PASSES) from None
            # A pass that is left after its last batch is not interrupted.
            is_over = isinstance(error, GeneratorExit) and prefetcher.is_idle
            if not is_over and this_pass == self._passes:
                self.close()
            raise

    def _open_prefetcher(self) -> Prefetcher:
        """Return the workers of the last pass, or new ones."""
        prefetcher = self._prefetcher
        is_same = not self.workers or self._fetcher.reads_as(self._forked)
        if prefetcher is not None and is_same and prefetcher.is_idle:
            return prefetcher
        self.close()
        self._forked = copy(self._fetcher)
        prefetcher = Prefetcher(
            self._fetcher,
            self.workers,
            self.prefetch,
            max(1, self.workers) * ceil(AHEAD_IMAGES * self._ranks.count / self.batch_size),
            max_wait_s=self.max_wait_s,
            late=self.late,
        )
        self._prefetcher = prefetcher
        self._finalizer = weakref.finalize(self, prefetcher.close)
        return prefetcher

    def _plan(self) -> Iterator[tuple[int, list[int]] | None]:
        """Yield the number and indices of each batch of the epoch that is not delivered yet.

        None is yielded while the shards of the next batch have not arrived.
        """
        first = self._delivered
        order = self._order
        ranks = self._ranks
        arrival = self._fetcher.arrival
        shard_of: Any = self._fetcher.shard_of
        is_new = not (first or order.windows) and len(order.left) == order.size
        if is_new and self._fetcher.source.windows:
            order.windows = self._choose_windows()
        for number, indices in islice(enumerate(order), first, None):
            if arrival is not None:
                yield from arrival.wait_for(set(shard_of[indices].tolist()))
            self._totals[number] = len(indices)
            yield number, indices[ranks.rank :: ranks.count]

    def _choose_windows(self) -> list[list[int]]:
        """Return the windows of shards of a new epoch (see `BatchSampler.windows`).

        An epoch has windows until one has run to its end. The speed of the copy has no influence,
        so the same seed always gives the same order.

        Raises:
            ColabUtilsError: The processes do not load the same images in the same order.
        """
        windows: list[list[int]] = []
        order = self._order
        if order.seed is not None and order.sampler is None and not self._has_passed:
            windows = [*self._fetcher.source.windows]
        fetcher = self._fetcher
        shards = hash_bytes(fetcher.shard_of, fetcher.sizes, repr(windows).encode())
        own = {**self._describe_order(), "checksum of the shards": shards}
        orders = self._ranks.gather(own)
        if any(other != own for other in orders):
            raise ColabUtilsError(
                "The processes that train together do not load the same images in the same order: "
                f"{orders}. Open the same shards with the same settings in all of them."
            )
        return windows

    def _list_following(self) -> Iterator[list[int]]:
        """Return the batches of the next epoch, as far as they are expected and known."""
        order = copy(self._order)
        order.start_epoch(self.epoch + 1)
        if order.sampler is not None or not (self.expects_pass or self._passes > 1):
            return iter(())
        ranks = self._ranks
        return (indices[ranks.rank :: ranks.count] for indices in order)

    @property
    def reads_ahead(self) -> bool:
        """Return whether workers read files of later batches while they load a batch."""
        return self._fetcher.reads_ahead

    def list_jobs(self) -> list[WorkerJob]:
        """Return the requested batches that have not arrived yet, oldest first."""
        return self._prefetcher.list_jobs() if self._prefetcher else []

    def _count_bad(self, bad: Sequence[tuple[int, str]]) -> None:
        for index, reason in bad:
            # The image failed in an earlier epoch, too, and was counted there.
            if index in dict(self.bad):
                continue
            self.bad.append((index, reason))
            count = len(self.bad)
            if count > self.max_bad:
                self.close()
                raise ColabUtilsError(
                    f"Expected at most {self.max_bad} bad images (max_bad), found {count}. "
                    f"Allow more, or repair them. The last one: {reason}"
                )
            warnings.warn(
                f"An image is left out (number {count} so far): {reason}",
                ColabUtilsWarning,
                stacklevel=4,
            )

    def _deliver(self, batch: PackedBatch) -> PackedBatch | tuple[list[Tensor], list[Target]]:
        """Return a batch as the loop gets it: on the device, and packed or dense."""
        if self.deliver == "packed":
            return batch.to(self.device)
        targets = batch.to_targets(self.device)
        if self.transforms is None:
            return batch.to_images(self.device, self.image_dtype), targets
        images = batch.to_images(self.device, torch.uint8)
        self._transform(self.transforms, images, targets)
        return images, targets

    def _transform(
        self, transforms: Transforms, images: list[Tensor], targets: list[Target]
    ) -> None:
        """Transform the samples of a batch in place, and check the first batches."""
        from colab_utils.loading.transforms import apply_transforms, check_transformed

        for place, target in enumerate(targets):
            image, targets[place] = apply_transforms(transforms, images[place], target)
            if self.image_dtype == torch.float32 and image.dtype == torch.uint8:
                image = image.float().div_(255)
            images[place] = image
        if self._unchecked:
            self._unchecked -= 1
            warning = check_transformed(images, targets)
            if warning:
                self._unchecked = 0
                warnings.warn(warning, ColabUtilsWarning, stacklevel=5)

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the order after the batches delivered so far.

        Returns:
            A dict of integers and lists of integers. ``joined`` lists the windows of shards of
            the first epoch of arriving shards. ``earlier`` describes what the epoch delivered
            before the batch size changed.
        """
        order = self._order
        return {
            **self._describe_order(),
            "epoch": order.epoch,
            "batch": self._delivered,
            "joined": [list(window) for window in order.windows],
            "earlier": list(order.earlier),
        }

    def _describe_order(self) -> dict[str, int]:
        """Return the settings that decide the order."""
        return {
            "seed": self.seed,
            "shuffle": int(self._order.seed is not None),
            "images": self._order.size,
            "batch_size": self._order.batch_size,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch at which a state was taken.

        If the loader has another batch size than the state, the epoch continues with the images
        that were not delivered yet.

        Raises:
            ColabUtilsError: The state was changed, or has another order: another seed, shuffle
                or number of images. With a sampler, another batch size is an error, too.
        """
        order = self._order
        shard_of = self._fetcher.source.shard_of
        shards = [] if shard_of is None else [*range(shard_of[-1] + 1)]
        own_order = self._describe_order()
        is_sound = False
        with suppress(TypeError, KeyError, ValueError):
            saved_order = {key: state[key] for key in own_order}
            epoch, batch, joined, earlier = _read_position(state)
            sizes = [saved_order["batch_size"], *(size for size, _ in earlier)]
            counts = [epoch, batch, *(batches for _, batches in earlier)]
            is_sound = (
                all(type(number) is int for number in sizes + counts)
                and min(sizes) > 0
                and min(counts) >= 0
                and sorted(chain(*joined)) in ([], shards)
            )
        if not is_sound:
            raise ColabUtilsError(
                "The state is not one that Loader.state_dict returned, or it is of other shards. "
                "Leave it out, and start a new epoch."
            )
        batch_size = saved_order["batch_size"]
        is_resized = batch_size != self.batch_size and order.sampler is None
        if is_resized:
            own_order["batch_size"] = batch_size
        if saved_order != own_order:
            raise ColabUtilsError(
                f"Expected a state of the same order {own_order}, found {saved_order}. "
                "Make the loader with the settings of the state."
            )
        order.start_epoch(epoch)
        order.windows = [list(window) for window in joined]
        if is_resized:
            earlier = [*earlier, (batch_size, batch)]
            batch = 0
        for size, batches in earlier:
            order.leave_out(size, batches)
        self._delivered = batch
        self._resumed = True
        self._has_passed = order.epoch > 0 and not order.windows
        # If no batch is left, the next pass is the next epoch. Otherwise every pass would be empty.
        if self.left < 1:
            self._has_passed = True
            self._end_epoch()

    def close(self) -> None:
        """End the workers. The next pass starts new ones."""
        if self._prefetcher is not None:
            self._finalizer()
            self._prefetcher = None
