"""What a worker does: read the samples of a dataset and write them as a batch."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.arrival import Arrival
from colab_utils.loading.batch import BatchShape, write_batch
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.samples import CocoSamples
from colab_utils.loading.targets import BadSampleError, pack_samples
from colab_utils.streams import StreamTrial

Reserve = Callable[[int], NDArray[np.uint8]]
"""Gives memory of so many bytes."""

Note = Callable[[int], object]
"""Takes the index of a sample that is read now."""


class Result(NamedTuple):
    """What became of a batch that was asked for."""

    shape: BatchShape | None = None
    """None where no sample of it could be loaded."""
    bad: Sequence[tuple[int, str]] = ()
    """Indices that were left out, and why."""
    error: Exception | None = None
    streams: StreamTrial | None = None
    """How fast files come to the worker, and with how many streams, where it reads ahead."""


class Fetcher:
    """Reads the samples of a map-style dataset, or of a ``Subset`` of one, and writes them as
    batches.

    Attributes:
        dense: whether the masks are written expanded, too; then ``flip`` is the share of images
            that are mirrored.
        writes_itself: whether the dataset writes batches without samples in between.
        arrival: of shards that are still copied, where they are.
        shard_of, sizes: as the dataset's own, for the images of the subset; None where it has none.
        shards: how many there are.
        reads_batches: whether the dataset reads all samples of a batch at once.
        max_bad: images that may turn out bad, where the dataset says so.
        reads_ahead: whether files of batches to come can be read while others are loaded.
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
        if isinstance(dataset, str) or not has_indices:
            raise ColabUtilsError(
                "expected a dataset with a length and indices, "
                f"found {type(dataset).__name__}: use a ShardDataset"
            )
        load_jpeg_decoder()  # now, so that workers need not
        self.look_again()

    def look_again(self) -> None:
        """Take the dataset as it is now: it may have grown, or have other transforms."""
        if not len(self):
            raise ColabUtilsError(
                "expected a dataset with images, found an empty one: open another"
            )
        base: Any = self.dataset
        rows = np.arange(len(self))
        while type(base) is Subset:
            rows = np.asarray(base.indices, np.int64)[rows]
            base = base.dataset
        self._base = base
        self._rows = rows
        # A subset of somebody's own that has no more than torch's may have changed its samples.
        read_batch = getattr(type(base), "__getitems__", None)
        self.reads_batches = callable(read_batch) and read_batch is not Subset.__getitems__
        is_plain = (
            isinstance(base, ShardDataset) and type(base).__getitem__ is ShardDataset.__getitem__
        )
        self.writes_itself = is_plain and base.transforms is None
        own_streams = getattr(base, "streams", 1)
        width = own_streams if self.streams == "auto" else self.streams
        self.reads_ahead = isinstance(base, CocoFolder) and width != 1
        self.arrival: Arrival | None = getattr(base, "arrival", None)
        self.shard_of = _take_rows(base, "shard_of", rows)
        self.sizes = _take_rows(base, "sizes", rows)
        self.max_bad = base.max_bad if isinstance(base, CocoSamples) else 0
        self.shards = len(base.index.shards) if isinstance(base, ShardDataset) else 0

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def read_ahead(self, indices: list[int]) -> None:
        """Begin to read the files of these samples, many at the same time; `load` takes them."""
        self._base.read_ahead(self._rows[indices].tolist(), self.streams)

    def drop_ahead(self) -> None:
        """Give up what was read ahead, and is not needed."""
        self._base.drop_ahead()

    def name_sample(self, index: int) -> str:
        """Name a sample by what its dataset knows of it, without a look at a disk.

        Example:
            >>> Fetcher(range(3)).name_sample(1)
            'Sample 1'
        """
        row = int(self._rows[index])
        if isinstance(self._base, CocoFolder):
            return f"Sample {index} ({self._base.coco.file_name(row)})"
        if isinstance(self._base, ShardDataset):
            return f"Sample {index} (image {self._base.image_ids[row]})"
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
        """Write a batch into memory that ``reserve`` gives; ``skips_bad``: leave bad samples out,
        and name them; ``note``: read one sample after the other, and call it with each index
        before.
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
                    return Result(error=error)
                bad.append((indices.pop(place), describe_error(error)))
            except Exception as error:
                return Result(error=error)
        return Result(bad=bad)

    def _find_streams(self) -> StreamTrial | None:
        return self._base.best_streams if self.reads_ahead else None

    def _write(
        self, indices: list[int], reserve: Reserve, seed: Sequence[int], note: Note | None
    ) -> BatchShape:
        """Write a batch; all random numbers of its samples come from ``seed``."""

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
                by_batch = self.reads_batches
                source = pack_samples(self.dataset, indices, by_batch, alone=alone, begin=begin)
                rows = range(len(indices))
        shape, _ = write_batch(source, rows, reserve, dense=self.dense, flips=flips, begin=begin)
        return shape


def _take_rows(dataset: Any, name: str, rows: NDArray[Any]) -> Any:
    """Return the rows of a dataset's table, or None where it has no such array."""
    table = getattr(dataset, name, None)
    return table[rows] if isinstance(table, np.ndarray) else None


@contextmanager
def seed_random(seed: Sequence[int]) -> Iterator[None]:
    """Draw random numbers from ``seed``, whichever worker loads the samples, and leave this
    process's as they were.
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
