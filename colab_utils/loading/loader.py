"""The loader: samples in a seeded order, packed by workers into reused memory, delivered on the
device.
"""

import math
import warnings
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.digest import digest_dataset
from colab_utils.loading.fetcher import Fetcher
from colab_utils.loading.late import BoundedPrefetcher, LateSample
from colab_utils.loading.prefetcher import PREFETCH, Loaded, Prefetcher, WorkerJob
from colab_utils.loading.sampler import BatchSampler, LoaderState
from colab_utils.loading.targets import Target, Transforms, apply_transforms
from colab_utils.loading.tune import tune_workers
from colab_utils.machine import count_cores, require_linux
from colab_utils.require import require_choice, require_count, require_number
from colab_utils.streams import StreamTrial, require_streams

_TUNED_BATCHES = 64  # fewer are loaded before the trials would be over

Delivery = Literal["dense", "packed"]


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
    max_bad: int = 0,
    max_wait_s: float | None = None,
) -> "Loader":
    """Make a loader whose batches arrive ready on the device.

    A shuffled batch holds wide images, or tall ones, where the dataset has ``sizes``: less padding,
    as in torchvision's references. Where ``torch.distributed`` is initialised and there is no
    ``sampler``, each process gets its share of the images of each batch, or None in place of a
    batch that has none for it.

    As with torch's ``DataLoader``, processes and dataset are those of the moment when a pass begins
    (``for batch in loader``). Workers stay where the dataset is as it was: its attributes, and
    those of what it holds, such as the dataset of a ``Subset``, transforms, lists and arrays. They
    start anew where something changed, or cannot be compared: what cannot be pickled (an open file,
    a lambda), or is large (over 256 MB of arrays, 8 MB of other objects). What nobody looks at is a
    change of a global, or of an attribute of a class: call ``loader.close()`` after it.

    Args:
        dataset: a ``ShardDataset``, a ``Subset`` of one, or any map-style dataset with
            torchvision's detection contract, read by its ``__getitems__`` where it has that.
            ``boxes``, ``labels`` (from 1) and ``masks`` are needed, for an image without objects
            not even those; ``image_id`` is the index where there is none, ``area`` the mask's.
        batch_size: images in a batch; the last batch of an epoch may hold fewer.
        device: where the batches are delivered.
        workers: processes that load. 0 loads in this process, when a batch is asked for. "auto"
            tries what this machine can do (``tune_workers``: at most three short trials), never
            more than its cores; for under 64 batches an epoch, or shards that still arrive, it is
            one process a core, at most 4.
        streams: files of a ``CocoFolder`` that each worker reads at the same time, for the batches
            that come next: a read that waits for Drive needs no core. "auto" finds how many win
            something, and goes on trying; 1 reads one after the other. Shards need one.
        deliver: "dense" gives ``(images, targets)`` as torchvision models take them; "packed" gives
            ``PackedBatch``, with the device work not yet done.
        image_dtype: of dense images: float32 in 0 to 1, or uint8 as they are stored, in NHWC
            strides, for code that normalises itself.
        shuffle: a new order each epoch, the same for the same seed and epoch, whatever the workers.
        sampler: gives the indices of each epoch instead, as in torch's ``DataLoader``, such as a
            ``WeightedRandomSampler``; it has a length, and draws from ``seed`` unless it has a
            generator of its own. With ``range(len(dataset))`` one of several processes gets all
            images.
        drop_last: leave out the last batch of an epoch where it is not full.
        seed: of the order, and of all random numbers in your dataset and in its transforms: the
            same samples with any number of workers.
        prefetch: batches that each worker prepares ahead.
        transforms: your own ``torchvision.transforms.v2``, of ``(image, target)``, given
            tv_tensors, applied on the device to dense batches (on the worker: those of your
            dataset, which leave images uint8). On the CPU, a ``v2.RandomHorizontalFlip`` alone is
            done where the masks are expanded.
        max_bad: images in all that may fail to load, with whatever exception, and are left out,
            each with a warning; one more is an error.
        max_wait_s: seconds that a batch is waited for. A later one moves to the end of the epoch,
            is asked for again in a process of its own, and ``late`` names its samples; the next
            batch is delivered. What still has not come at the end is waited for as long once more;
            then it is an error, or left out where ``max_bad`` allows; at once where more batches
            are late at a time than twice the workers and eight. Needs workers. It must be longer
            than a batch takes. Each of several processes moves batches of its own: all of them
            deliver as many as ever, but their shares of a step may then be of different batches,
            and a state is that of its own process. Default: waits as long as it takes.

    Raises:
        ColabUtilsError: if the dataset is empty or has no length, an argument is out of range, or
            the device is not there; and, while you iterate, if a sample is damaged, a box
            has no area or a label is below 1, a worker process dies, or memory is short.

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
    seed = require_count("seed", seed, least=0)
    max_bad = require_count("max_bad", max_bad, least=0)
    if workers == "auto":
        count = min(4, count_cores())
    else:
        count = require_count("workers", workers, least=0)
    _check_wait(max_wait_s, count)
    # with no GPU to expand masks on, the workers do it: into memory that is used again
    dense = deliver == "dense" and torch_device.type == "cpu"
    flip = _find_flip(transforms) if dense else 0.0
    if flip:
        transforms = None
    if transforms is not None and deliver == "packed":
        raise ColabUtilsError(
            "expected deliver='dense' for transforms on the device, found 'packed': they need "
            "dense masks, or give them to your dataset, as ShardDataset(transforms=...)"
        )
    fetcher = Fetcher(dataset, dense=dense, flip=flip, streams=require_streams(streams))
    order = BatchSampler(
        len(fetcher),
        batch_size,
        seed if shuffle else None,
        sizes=fetcher.sizes,
        shard_of=fetcher.shard_of,
        sampler=sampler,
        drop_last=drop_last,
    )
    is_complete = fetcher.arrival is None or fetcher.arrival.is_complete
    rates: dict[int, float] = {}
    if sampler is not None and not is_complete:
        raise ColabUtilsError(
            "expected no sampler while shards arrive, found one. Wait until all are here."
        )
    if workers == "auto" and is_complete and len(fetcher) >= _TUNED_BATCHES * batch_size:
        batches = list(BatchSampler(len(fetcher), batch_size, seed, sizes=fetcher.sizes))
        count, rates = tune_workers(fetcher, batches)
        if max_wait_s is not None:
            count = max(1, count)
    loader = Loader(
        fetcher,
        order,
        device=torch_device,
        workers=count,
        prefetch=prefetch,
        deliver=deliver,
        image_dtype=image_dtype,
        seed=seed,
        transforms=transforms,
        max_bad=max(max_bad, fetcher.max_bad),
        max_wait_s=max_wait_s,
    )
    loader.rates = rates
    return loader


def _check_wait(max_wait_s: float | None, workers: int) -> None:
    """Refuse a longest wait that is none, or that nothing could keep to."""
    if max_wait_s is None:
        return
    require_number("max_wait_s", max_wait_s, above=0, below=math.inf)
    if not workers:
        raise ColabUtilsError(
            "max_wait_s needs worker processes, and workers is 0: this process cannot give up "
            "a read. Pass workers of 1 or more, or leave max_wait_s out."
        )


def _find_flip(transforms: Any) -> float:
    """The share of images that transforms mirror left to right, where they do nothing else;
    else 0.
    """
    from torchvision.transforms import v2

    if type(transforms) is not v2.RandomHorizontalFlip:  # a subclass may do anything
        return 0.0
    return float(transforms.p)


@dataclass(eq=False, repr=False)
class Loader:
    """Iterates over the batches of one epoch; each new pass is the next epoch, also after one that
    was broken off. Made by :func:`make_loader`, whose arguments it keeps.

    Attributes:
        rates: images/s with each number of workers that was tried (``workers="auto"``), while a
            step keeps 0.9 of a core busy; empty where none was, or slow files or memory decide.
        total: images of the last batch, the shares of all processes together.
        bad: image index and reason of every image that was left out (``max_bad``).
        late: index and seconds of every image that was not there in time (``max_wait_s``), also of
            those that came after all; of a whole batch where it is not known which one it was.
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
        self.batch_size = self._order.batch_size
        self.rates: dict[int, float] = {}
        self.bad: list[tuple[int, str]] = []
        self.late: list[LateSample] = []
        self.total = 0
        self._totals: dict[int, int] = {}
        self._delivered = 0
        self._moved: list[int] = []
        self._resumed = False
        self._passes = 0
        self._prefetcher: Prefetcher | None = None
        self._digest = ""
        self._look_again()

    @property
    def epoch(self) -> int:
        """The one that the next pass runs, or that the pass under way is in."""
        return self._order.epoch

    def __len__(self) -> int:
        if not (self._delivered or self._resumed):
            self._look_again()
        return len(self._order)

    @property
    def left(self) -> int:
        """Batches of this epoch that were not delivered yet."""
        return len(self) - self._delivered

    def __str__(self) -> str:
        how = f"workers={self.workers}"
        if self.workers:
            how += f", prefetch={self.prefetch}"
        return f"{len(self):,} batches of {self.batch_size}, {self.deliver} ({how})"

    __repr__ = __str__

    def __iter__(self) -> Iterator[Any]:
        if self._delivered and not self._resumed:  # the last pass was broken off
            self._end_epoch()
        self._look_again()
        self._resumed = False
        self._totals.clear()
        self._passes += 1
        this_pass = self._passes
        for number, batch, bad in self._run():
            self._count_bad(bad)
            self._delivered += 1
            late = self._prefetcher.list_moved() if self._prefetcher else []
            came = {number, *late}
            self._moved = [other for other in self._moved if other not in came] + late
            self.total = self._totals.pop(number)
            if not self.left:
                self._end_epoch()
            if batch is not None or self._ranks > 1:
                yield None if batch is None else self._deliver(batch)
                # before waiting: the results of this pass went to the other one
                if this_pass != self._passes:
                    raise ColabUtilsError(
                        "expected one pass over a loader at a time, found two: make two loaders"
                    )

    def _look_again(self) -> None:
        """Take the dataset, and the processes that train together, as they are now."""
        fetcher = self._fetcher
        fetcher.look_again()
        order = self._order
        order.sizes = fetcher.sizes
        order.shard_of = fetcher.shard_of
        if order.size != len(fetcher):
            order.size = len(fetcher)
            order.start_epoch(self.epoch)
            self._delivered = 0
            self._moved = []
        self._rank = 0
        self._ranks = 1
        group = torch.distributed
        if order.sampler is None and group.is_available() and group.is_initialized():
            self._rank = group.get_rank()
            self._ranks = group.get_world_size()

    def _end_epoch(self) -> None:
        self._order.start_epoch(self.epoch + 1)
        self._delivered = 0
        self._moved = []

    def _run(self) -> Iterator[Loaded]:
        """What the workers give; ends them where something goes wrong."""
        is_bounded = self.max_wait_s is not None
        if is_bounded and self._prefetcher and self._prefetcher.has_work():
            # The last pass was broken off, and may hang.
            self.close()
        digest = digest_dataset(self.dataset) if self.workers else "none"
        if self._prefetcher is None or not digest or digest != self._digest:
            self.close()
            self._digest = digest
            self._prefetcher = self._start_prefetcher()
            self._finalizer = weakref.finalize(self, self._prefetcher.close)
        try:
            seed = (self.seed, self.epoch, self._rank)
            yield from self._prefetcher.run(self._plan(), seed=seed, skips_bad=self.max_bad > 0)
        except GeneratorExit:
            raise  # the pass is broken off: the workers wait for the next one
        except BaseException:
            self.close()
            raise

    def _start_prefetcher(self) -> Prefetcher:
        if self.max_wait_s is None:
            return Prefetcher(self._fetcher, self.workers, self.prefetch)
        return BoundedPrefetcher(
            self._fetcher,
            self.workers,
            self.prefetch,
            max_wait_s=self.max_wait_s,
            late=self.late,
        )

    def _plan(self) -> Iterator[tuple[int, list[int]] | None]:
        """The batches of the epoch that were not delivered yet, with their numbers; None while the
        next has to wait.
        """
        first = self._take_state().reached
        moved: dict[int, list[int]] = {number: [] for number in self._moved}
        order = self._order
        arrival = self._fetcher.arrival
        shard_of = self._fetcher.shard_of
        windows = order.windows
        is_new = not (first or windows) and len(order.left) == order.size
        if is_new and arrival is not None and not arrival.is_complete:
            windows = arrival.plan_windows(self.epoch)
            order.windows = windows
        numbered = enumerate(order)
        for number, indices in islice(numbered, first):
            if number in moved:
                moved[number] = indices
        for number, indices in chain(numbered, moved.items()):
            if arrival is not None and shard_of is not None:
                yield from arrival.wait_for(set(shard_of[indices].tolist()), windows)
            self._totals[number] = len(indices)
            yield number, indices[self._rank :: self._ranks]

    @property
    def reads_ahead(self) -> bool:
        """Whether files of the next batches are read while others are loaded."""
        return self._fetcher.reads_ahead

    @property
    def streams(self) -> tuple[StreamTrial, ...]:
        """How many files each worker reads at once, and how fast they come; empty where no reading
        ahead was measured yet.
        """
        return tuple(self._prefetcher.streams.values()) if self._prefetcher else ()

    def describe_streams(self) -> str:
        """Say how fast loose files come with how many reads at once; empty before it is known.

        Example:
            >>> make_loader(range(3), batch_size=1, workers=0).describe_streams()
            ''
        """
        if not self.streams:
            return ""
        count = sum(trial.streams for trial in self.streams)
        rate = sum(trial.files_per_s for trial in self.streams)
        return f"files come at {rate:.0f} a second with {count} streams; more win nothing"

    def describe_workers(self) -> str:
        """Say why so many workers load; empty where none was tried.

        Example:
            >>> make_loader(range(3), batch_size=1, workers=0).describe_workers()
            ''
        """
        if not self.rates:
            return ""
        trials = [f"{rate:.0f} images/s with {workers}" for workers, rate in self.rates.items()]
        return f"workers: {self.workers}, the fewest of about the best rate ({', '.join(trials)})"

    def list_jobs(self) -> list[WorkerJob]:
        """The batches that were asked for and did not come yet, oldest first; of each, its
        worker.
        """
        return self._prefetcher.list_jobs() if self._prefetcher else []

    def _count_bad(self, bad: Sequence[tuple[int, str]]) -> None:
        for index, reason in bad:
            self.bad.append((index, reason))
            count = len(self.bad)
            if count > self.max_bad:
                self.close()
                raise ColabUtilsError(
                    f"expected at most {self.max_bad} bad images (max_bad), found {count}. "
                    f"Allow more, or mend them; the last: {reason}"
                )
            warnings.warn(
                f"an image is left out (number {count} so far): {reason}",
                ColabUtilsWarning,
                stacklevel=3,
            )

    def _deliver(self, batch: PackedBatch) -> PackedBatch | tuple[list[Tensor], list[Target]]:
        """A batch as it is delivered."""
        if self.deliver == "packed":
            return batch.to(self.device)
        targets = batch.to_targets(self.device)
        if self.transforms is None:
            return batch.to_images(self.device, self.image_dtype), targets
        images = batch.to_images(self.device, torch.uint8)
        for place, target in enumerate(targets):
            image, targets[place] = apply_transforms(self.transforms, images[place], target)
            if self.image_dtype == torch.float32 and image.dtype == torch.uint8:
                image = image.float().div_(255)
            images[place] = image
        return images, targets

    def state_dict(self) -> dict[str, Any]:
        """Where the order stands after the batches delivered so far: plain whole numbers;
        ``joined`` lists the windows of shards of an epoch that began while they arrived; ``left``
        the images that batches of another size left of this epoch; ``moved`` the batches that come
        at its end, since they were not there in time (``max_wait_s``).
        """
        return vars(self._take_state())

    def _take_state(self) -> LoaderState:
        order = self._order
        return LoaderState(
            seed=self.seed,
            batch_size=self.batch_size,
            shuffle=int(order.seed is not None),
            images=order.size,
            epoch=order.epoch,
            batch=self._delivered,
            joined=[list(window) for window in order.windows],
            left=order.left.tolist() if len(order.left) < order.size else [],
            moved=list(self._moved),
        )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after the batch that a state was taken at; with batches of another size, with
        the images that the epoch had left then.

        Raises:
            ColabUtilsError: if the state is of another order (seed, shuffle, number of images, or
                batch size where shards were still arriving), or was changed.
        """
        order = self._order
        found = LoaderState.parse(state, images=order.size, shards=self._fetcher.shards)
        is_resized = (
            found.batch_size != self.batch_size and not found.joined and order.sampler is None
        )
        self._require_same_order(found, any_batch_size=is_resized)
        order.resume(found)
        self._delivered = found.batch
        self._moved = list(found.moved)
        self._resumed = True
        if is_resized:
            order.leave_out_seen(found)
            self._delivered = 0
            self._moved = []
        if self.left < 1:  # or a pass without batches would follow another one for ever
            self._end_epoch()

    def _require_same_order(self, found: LoaderState, *, any_batch_size: bool) -> None:
        here = self._take_state().describe_order()
        there = found.describe_order()
        wanted = here | {"batch_size": found.batch_size} if any_batch_size else here
        if there != wanted:
            raise ColabUtilsError(
                f"expected a state of the same order {here}, found {there}: use those settings "
                "again"
            )

    def close(self) -> None:
        """End the workers; the next pass starts new ones."""
        if self._prefetcher is not None:
            self._finalizer()
            self._prefetcher = None


def find_device(device: torch.device | str) -> torch.device:
    """Return the device of that name.

    Raises:
        ColabUtilsError: There is none, or no such GPU.

    Example:
        >>> find_device("cpu")
        device(type='cpu')
    """
    try:
        torch_device = torch.device(device)
    except (RuntimeError, TypeError):
        raise ColabUtilsError(
            f"expected a device such as 'cpu' or 'cuda', found {device!r}: name one"
        ) from None
    if torch_device.type == "cuda":
        if not torch.cuda.is_available():
            cure = "On Colab, choose Runtime > Change runtime type; or use device='cpu'."
            raise ColabUtilsError(f"expected a GPU for device {device!r}, found none. {cure}")
        gpus = torch.cuda.device_count()
        if (torch_device.index or 0) >= gpus:
            raise ColabUtilsError(
                f"expected one of this machine's GPUs, of which there are {gpus}, found device "
                f"{str(torch_device)!r}. They are counted from cuda:0; start no more processes "
                "by torchrun than there are GPUs."
            )
    return torch_device
