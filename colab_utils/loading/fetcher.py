"""The fetcher of a worker, which reads the samples of a dataset and writes them as a batch."""

import sys
from collections.abc import Callable, Sequence
from operator import length_hint
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch.utils.data import Dataset, IterableDataset, Subset

from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.batch import Layout, write_batch, write_samples
from colab_utils.loading.sampler import read_indices
from colab_utils.loading.samples import BadSampleError, Bytes, CocoSamples, is_own

if TYPE_CHECKING:
    from colab_utils.loading.targets import SamplePacker

Reserve = Callable[[int], Bytes]
"""A function that takes a number of bytes and returns memory of that size, uint8."""


class Result(NamedTuple):
    """The result of a request for a batch."""

    layout: Layout | None = None
    """Layout of the batch that was written; None if no sample could be loaded."""
    bad: Sequence[tuple[int, str]] = ()
    """Index and reason of each sample that was left out."""
    error: Exception | None = None
    """Error that ended the request; None if the batch was loaded."""


class Fetcher:
    """A reader that writes samples of a map-style dataset, or of a ``Subset`` of one, as batches.

    Attributes:
        dense: Whether expanded masks are written too.
        skips_bad: Whether bad samples are left out of a batch, and are listed beside it.
        at_work: int64 [1]: index of the sample that is read; -1 if it is not known.
        streams: Files that each worker reads at the same time, or "auto".
        is_own: Whether the samples are those of a dataset of this package, which nobody changes.
        source: The dataset, if it is one of this package; else one without images.
        arrival: The running copy, or None if the dataset does not read arriving shards.
        writes_itself: As in `CocoSamples`.
        shard_of, sizes: The dataset's tables with these names, with one row for each sample that
            the fetcher can load; None if the dataset has no such table.
        reads_batches: Whether the dataset reads all samples of a batch in one call.
        reads_ahead: Whether files of later batches can be read while a batch is loaded.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        *,
        dense: bool = False,
        streams: int | str = "auto",
    ) -> None:
        self.dataset = dataset
        self.dense = dense
        self.streams = streams
        self.skips_bad = False
        self.at_work = np.full(1, -1)
        has_indices = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, str | IterableDataset) or not has_indices:
            raise ColabUtilsError(
                f"A loader cannot read a dataset of type {type(dataset).__name__}. "
                "Use a dataset with __len__ and __getitem__, such as a ShardDataset."
            )
        self._packer: SamplePacker | None = None
        # The decoder is loaded before the fork, so that the workers need not load it.
        load_jpeg_decoder()
        self.look_again()
        if not self.is_own:
            from colab_utils.loading.targets import require_same_classes

            require_same_classes(dataset)

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
        source = CocoSamples()
        if isinstance(base, CocoSamples):
            source = base.find_nearest()
            base = source
        self.source = source
        self.arrival = source.arrival if source.is_arriving else None
        self._base = base
        self._rows = rows
        self.sizes = source.sizes[rows] if base is source else None
        self.shard_of = None if source.shard_of is None else source.shard_of[rows]
        # A user's subclass or transforms may do anything.
        self.is_own = base is source and is_own(base) and getattr(base, "transforms", None) is None
        self.writes_itself = source.writes_itself
        width = source.streams if self.streams == "auto" else self.streams
        self.reads_ahead = source.is_slow and width != 1
        # The parts of the samples of this package are read ahead, so each sample is loaded alone. A
        # user's subclass of Subset may override only __getitem__, to change the samples. The
        # inherited __getitems__ would return them unchanged, so it is not used.
        read_batch = getattr(type(base), "__getitems__", None)
        inherited = (None, Subset.__getitems__, CocoSamples.__getitems__)
        self.reads_batches = read_batch not in inherited
        if not self.writes_itself:
            # The room is loaded before the fork, so that the workers need not load it.
            from colab_utils.loading.targets import SamplePacker

            self._packer = self._packer or SamplePacker()
            # The nearest form of the dataset may be another one than in the last pass.
            nearest = Subset(source, rows)  # type: ignore[arg-type]
            self._packer.dataset = nearest if base is source else self.dataset

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
            and self.is_own
            and earlier.is_own
            and self._base is earlier._base
            and np.array_equal(self._rows, earlier._rows)
        )

    def read_ahead(self, indices: list[int] | None) -> None:
        """Begin to read the files that `load` will need for these samples, several at a time.

        None drops the files that were read ahead and not used.
        """
        if indices is None:
            self.source.drop_ahead()
        else:
            self.source.read_ahead(self._rows[indices].tolist(), self.streams)

    def name_sample(self, index: int) -> str:
        """Return a name of a sample for messages, without reading a file.

        Example:
            >>> Fetcher(range(3)).name_sample(1)
            'Sample 1'
        """
        if self._base is self.source:
            return f"Sample {index} ({self.source.name_image(int(self._rows[index]))})"
        return f"Sample {index}"

    def load(self, indices: Sequence[int], reserve: Reserve, seed: Sequence[int]) -> Result:
        """Write a batch into memory that ``reserve`` returns."""
        left = list(indices)
        bad: list[tuple[int, str]] = []
        while left:
            try:
                return Result(self._write(left, reserve, seed), bad)
            except BadSampleError as failure:
                error, place = failure.args
                if not self.skips_bad:
                    return Result(error=self._name_cause(error, left[place]))
                bad.append((left.pop(place), describe_error(error)))
            except Exception as error:
                return Result(error=error)
        return Result(bad=bad)

    def _name_cause(self, error: Exception, index: int) -> Exception:
        """Return a sample's error, which says what sample it is."""
        name = self.name_sample(index)
        if not isinstance(error, ColabUtilsError):
            error.add_note(f"{name} raised this error.")
        # The errors of our own datasets name the file.
        elif not self.is_own and f"sample {index}" not in str(error):
            return ColabUtilsError(f"{name}: {error}")
        return error

    def _write(self, indices: list[int], reserve: Reserve, seed: Sequence[int]) -> Layout:
        """Write a batch. All random numbers of its samples come from ``seed``."""
        if not self.writes_itself and self._packer is not None:
            samples = self._packer.pack(
                indices,
                seed,
                self.at_work,
                by_batch=self.reads_batches,
                is_own=self.is_own,
            )
            return write_samples(samples, reserve, dense=self.dense)[0]
        source: Any = self.source
        rows = self._rows[indices].tolist()

        def read_into(place: int, pixels: Bytes, bits: Bytes) -> None:
            self.at_work[0] = indices[place]
            source.read_into(rows[place], pixels, bits)

        return write_batch(source.describe(rows), read_into, reserve, dense=self.dense)[0]
