"""The fetcher of a worker, which reads the samples of a dataset and writes them as a batch."""

import mmap
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, IterableDataset, Subset

from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, describe_error
from colab_utils.loading.batch import BatchShape, write_batch
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.dataset_checks import is_own, require_same_classes
from colab_utils.loading.samples import CocoSamples
from colab_utils.loading.targets import (
    BadSampleError,
    PackedSample,
    describe_misfit,
    pack_samples,
)
from colab_utils.streams import StreamTrial

if TYPE_CHECKING:
    from colab_utils.loading.arrival import Arrival

Reserve = Callable[[int], NDArray[np.uint8]]
"""A function that takes a number of bytes and returns memory of that size, uint8."""

Note = Callable[[int], object]
"""A function that takes the index of the sample that is read next."""


class Result(NamedTuple):
    """The result of a request for a batch."""

    shape: BatchShape | None = None
    """Shape of the batch that was written; None if no sample could be loaded."""
    bad: Sequence[tuple[int, str]] = ()
    """Index and reason of each sample that was left out."""
    error: Exception | None = None
    """Error that ended the request; None if the batch was loaded."""
    streams: StreamTrial | None = None
    """Number of streams and files/s of a worker that reads ahead; None before they are known."""


class Fetcher:
    """A reader that writes samples of a map-style dataset, or of a ``Subset`` of one, as batches.

    Attributes:
        dense: Whether expanded masks are written too.
        flip: Share of images that are mirrored left to right, 0 to 1.
        streams: Files that each worker reads at the same time, or "auto".
        writes_itself: Whether the dataset writes its images into a batch without making samples.
        arrival: The running copy, or None if the dataset does not read arriving shards.
        windows, is_passing: As in `CocoSamples`.
        shard_of, sizes: The dataset's tables with these names, with one row for each sample that
            the fetcher can load; None if the dataset has no such table. Only the ``sizes`` of a
            user's dataset are read: integers [I, 2].
        shards: Number of shards of the dataset.
        reads_batches: Whether the dataset reads all samples of a batch in one call.
        max_bad: Number of bad images that the dataset allows.
        reads_ahead: Whether files of later batches can be read while a batch is loaded.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        dense: bool = False,
        flip: float = 0,
        streams: int | str = "auto",
    ) -> None:
        self.dataset = dataset
        self.dense = dense
        self.flip = flip
        self.streams = streams
        has_indices = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, str | IterableDataset) or not has_indices:
            raise ColabUtilsError(
                f"A loader cannot read a dataset of type {type(dataset).__name__}. "
                "Use a dataset with __len__ and __getitem__, such as a ShardDataset."
            )
        require_same_classes(dataset)
        # All workers share this memory, so that the loader warns once.
        self._has_warned = np.frombuffer(mmap.mmap(-1, 1), np.bool_)
        # The decoder is loaded before the fork, so that the workers need not load it.
        load_jpeg_decoder()
        self.look_again()

    def look_again(self) -> None:
        """Look at the dataset again, because it may have grown or may have new transforms."""
        if not len(self):
            raise ColabUtilsError(
                "The dataset is empty. Open a dataset that has at least one image."
            )
        base: Any = self.dataset
        rows = np.arange(len(self))
        while type(base) is Subset:
            indices = base.indices
            base = base.dataset
            # A dataset without a length can be read by a Subset, too.
            rows = read_indices(indices, length_hint(base, sys.maxsize), "The Subset")[rows]
        if isinstance(base, CocoSamples):
            base = base.find_nearest()
        self._base = base
        self._rows = rows
        # A user's subclass of Subset may override only __getitem__, to change the samples. The
        # inherited __getitems__ would return them unchanged, so it is not used.
        read_batch = getattr(type(base), "__getitems__", None)
        is_plain = (
            isinstance(base, ShardDataset) and type(base).__getitem__ is ShardDataset.__getitem__
        )
        self.writes_itself = is_plain and base.transforms is None
        own_streams = getattr(base, "streams", 1)
        self.reads_batches = callable(read_batch) and read_batch is not Subset.__getitems__
        if self.writes_itself or (read_batch is CocoSamples.__getitems__ and own_streams == 1):
            # The samples are read one after the other.
            self.reads_batches = False
        width = own_streams if self.streams == "auto" else self.streams
        is_fast = isinstance(base, ShardDataset) and own_streams == 1
        self.reads_ahead = isinstance(base, CocoSamples) and not is_fast and width != 1
        self.sizes = _take_sizes(base, rows)
        # A user's subclass or transforms may do anything.
        has_transforms = getattr(base, "transforms", None) is not None
        self._is_own = isinstance(base, CocoSamples) and is_own(base) and not has_transforms
        self.max_bad = base.max_bad if isinstance(base, CocoSamples) else 0
        self.arrival: Arrival | None = None
        self.windows: Sequence[list[int]] = ()
        self.shard_of: Any = None
        self.shards = 0
        self.is_passing = False
        if isinstance(base, CocoSamples):
            # Any other dataset may have a `Writing` in its place.
            self.arrival = base.arrival if base.is_arriving else None
            self.windows = base.windows
            self.is_passing = base.is_passing
            if base.shard_of is not None:
                self.shard_of = base.shard_of[rows]
                self.shards = int(base.shard_of[-1]) + 1

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def reads_as(self, earlier: "Fetcher | None") -> bool:
        """Return whether workers that forked with an earlier copy of this fetcher give the same
        samples.

        They do if both read the same rows of the same dataset of this package. What a user's
        dataset has become, in this process or in a worker, is not known.
        """
        return (
            earlier is not None
            and self._is_own
            and earlier._is_own
            and self._base is earlier._base
            and np.array_equal(self._rows, earlier._rows)
        )

    def read_ahead(self, indices: list[int]) -> None:
        """Begin to read the files that `load` will need for these samples, several at a time."""
        self._base.read_ahead(self._rows[indices].tolist(), self.streams)

    def drop_ahead(self) -> None:
        """Drop the files that were read ahead and not used."""
        self._base.drop_ahead()

    def name_sample(self, index: int) -> str:
        """Return a name of a sample for messages, without reading a file.

        Example:
            >>> Fetcher(range(3)).name_sample(1)
            'Sample 1'
        """
        if isinstance(self._base, CocoSamples):
            return f"Sample {index} ({self._base.name_image(int(self._rows[index]))})"
        return f"Sample {index}"

    def load(
        self,
        indices: list[int],
        reserve: Reserve,
        seed: Sequence[int],
        *,
        skips_bad: bool,
        note: Note | None = None,
    ) -> Result:
        """Write a batch into memory that ``reserve`` returns.

        With ``skips_bad``, bad samples are left out and listed in the result. With ``note``, the
        samples are read one after the other, and ``note`` gets the index of each before it is read.
        """
        indices = list(indices)
        bad: list[tuple[int, str]] = []
        while indices:
            try:
                shape = self._write(indices, reserve, seed, note)
                return Result(shape, bad, streams=self._find_streams())
            except BadSampleError as failure:
                error, place = failure.args
                if not skips_bad:
                    return Result(error=self._name_cause(error, indices[place]))
                bad.append((indices.pop(place), describe_error(error)))
            except Exception as error:
                return Result(error=error)
        return Result(bad=bad)

    def _name_cause(self, error: Exception, index: int) -> Exception:
        """Return a sample's error, which says what sample it is."""
        name = self.name_sample(index)
        if not isinstance(error, ColabUtilsError):
            error.add_note(f"{name} raised this error.")
        # The errors of our own datasets name the file.
        elif not self._is_own and f"sample {index}" not in str(error):
            return ColabUtilsError(f"{name}: {error}")
        return error

    def _find_streams(self) -> StreamTrial | None:
        return self._base.best_streams if self.reads_ahead else None

    def _warn_of_misfits(self, samples: Sequence[PackedSample]) -> None:
        """Warn once of a mask that does not belong to its box."""
        # A dataset of this package has already compared its boxes with its masks.
        if self._is_own or self._has_warned[0]:
            return
        misfit = next(filter(None, map(describe_misfit, samples)), "")
        if misfit:
            self._has_warned[0] = True
            warnings.warn(misfit, ColabUtilsWarning, stacklevel=2)

    def _write(
        self, indices: list[int], reserve: Reserve, seed: Sequence[int], note: Note | None
    ) -> BatchShape:
        """Write a batch. All random numbers of its samples come from ``seed``."""

        def begin(place: int) -> None:
            if note is not None:
                note(indices[place])

        flips = None
        if self.flip:
            flips = np.random.default_rng(seed).random(len(indices)) < self.flip
        source = self._base
        rows = self._rows[indices].tolist()
        if not self.writes_itself:
            with seed_random(seed):
                alone = note is not None
                source = pack_samples(
                    self.dataset,
                    indices,
                    self.reads_batches,
                    alone=alone,
                    compares_pixels=not self._is_own,
                    begin=begin,
                )
            self._warn_of_misfits(source.samples)
            rows = range(len(indices))
        shape, _ = write_batch(source, rows, reserve, dense=self.dense, flips=flips, begin=begin)
        return shape


def _take_sizes(dataset: Any, rows: NDArray[np.int64]) -> Any:
    """Return rows of the dataset's ``sizes``, or None if these are no heights and widths."""
    sizes: Any = getattr(dataset, "sizes", None)
    if isinstance(sizes, np.ndarray) and sizes.dtype.kind in "iu":
        return sizes[rows] if sizes.shape == (length_hint(dataset), 2) else None
    return None


def read_indices(values: Any, images: int, owner: str) -> NDArray[np.int64]:
    """Return the indices that a sampler or a ``Subset`` gives, each from 0 on.

    Args:
        values: The indices as the owner gives them, at least one.
        images: Number of images of the dataset.
        owner: Who gives the indices, for messages.

    Raises:
        ColabUtilsError: The values are no indices of the dataset, such as a mask of bools.

    Example:
        >>> read_indices([2, -1], 5, "The sampler").tolist()
        [2, 4]
    """
    try:
        indices = np.asarray(values)
    # Lists of different lengths make no array, and tensors on a GPU make none either.
    except (TypeError, ValueError):
        indices = np.array(None)
    problem = ""
    if indices.dtype.kind not in "iu" or indices.ndim != 1:
        problem = f"an array of {indices.dtype} in the shape {list(indices.shape)}"
    elif indices.min() < -images or indices.max() >= images:
        problem = f"numbers from {indices.min()} to {indices.max()}"
    if problem:
        raise ColabUtilsError(
            f"{owner} does not give indices of the {images:,} images, but {problem}. Give one "
            "whole number for each image, from 0 on. Of a mask of True and False, give "
            "np.flatnonzero(mask)."
        )
    return indices.astype(np.int64) % images


@contextmanager
def seed_random(seed: Sequence[int]) -> Iterator[None]:
    """Seed the random numbers of Python, numpy and torch, and restore their states at the end.

    The numbers do not depend on which worker loads the samples.
    """
    entropy = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    random.seed(entropy[0])
    np.random.seed(entropy[1] % 2**32)
    torch.default_generator.manual_seed(entropy[2])
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
