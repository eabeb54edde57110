"""A dataset as the loader reads it: what can write itself into memory does; of any other, the samples are packed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from colab_utils.data.decoding import find_operator
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import BatchShape, PackedSamples, write_batch
from colab_utils.loading.sample import BadSampleError, PackedSample, pack_target
from colab_utils.loading.transforms import Transforms, apply_transforms
from colab_utils.shards.arrival import Arrival

__all__ = ["Source"]


class Source:
    """A map-style dataset, or a ``Subset`` of one; with ``transforms``, those are applied to each sample; ``dense``
    writes the masks expanded too, and then ``flip`` is the share of images that are mirrored, by chance.

    Attributes:
        writes_itself: whether batches are written without samples in between.
        arrival: of shards that are still copied, where they are.
        fingerprint: the dataset's, where it has one.
        is_decoded: whether the images lie there as pixels.
        whole_shards, shard_of, sizes: as the dataset's own, for the images of the subset; None where it has none.
    """

    def __init__(
        self, dataset: Dataset[Any], transforms: Transforms | None = None, *, dense: bool = False, flip: float = 0
    ) -> None:
        self.dataset, self.transforms, self.dense, self.flip = dataset, transforms, dense, flip
        base: Any = dataset
        rows: NDArray[np.int64] | None = None
        while type(base) is Subset:
            picked = np.asarray(base.indices, np.int64)
            base, rows = base.dataset, picked if rows is None else picked[rows]
        self._base, self._rows = base, rows
        self.writes_itself = transforms is None and _writes_itself(type(base))
        find_operator()  # now, so that workers need not
        self.whole_shards: bool = getattr(base, "whole_shards", False)
        self.arrival: Arrival | None = getattr(base, "arrival", None)
        self.fingerprint: str | None = getattr(base, "fingerprint", None)
        self.is_decoded: bool = getattr(base, "is_decoded", False)
        self.shard_of, self.sizes = (self._pick(getattr(base, name, None)) for name in ("shard_of", "sizes"))

    def __len__(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def write(
        self, indices: Sequence[int], reserve: Callable[[int], NDArray[np.uint8]], seed: Sequence[int]
    ) -> BatchShape:
        """Write a batch into memory that ``reserve`` gives; ``seed``: of all chance in somebody's own dataset.

        Raises:
            BadSampleError: if a sample cannot be loaded.
        """
        flips = np.random.default_rng(seed).random(len(indices)) < self.flip if self.flip else None
        if self.writes_itself:
            return write_batch(self._base, self._find_rows(indices), reserve, dense=self.dense, flips=flips)
        samples = self.read_samples(indices, seed)
        return write_batch(PackedSamples(samples), range(len(samples)), reserve, dense=self.dense, flips=flips)

    def read_samples(self, indices: Sequence[int], seed: Sequence[int]) -> list[PackedSample]:
        """The samples of a batch, or of a part of one; raises as ``write``."""
        samples = []
        with _fix_chance(seed):
            for place, index in enumerate(indices):
                try:
                    samples.append(self._read_sample(index))
                except DriveLostError:
                    raise
                except ColabUtilsError as error:
                    raise BadSampleError(error, place) from None
        return samples

    def _read_sample(self, index: int) -> PackedSample:
        if self.writes_itself:
            sample: PackedSample = self._base.read_packed(self._find_rows([index])[0])
            return sample
        found: Any = self.dataset[index]
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ColabUtilsError(
                f"expected (image, target) from your dataset, found {type(found).__name__}. See torchvision's "
                "detection datasets for the contract."
            )
        return pack_target(*(apply_transforms(self.transforms, *found) if self.transforms else found))

    def _find_rows(self, indices: Sequence[int]) -> Sequence[int]:
        rows: list[int] | None = None if self._rows is None else self._rows[list(indices)].tolist()
        return indices if rows is None else rows

    def _pick(self, values: Any) -> NDArray[Any] | None:
        if not isinstance(values, np.ndarray):
            return None
        return values if self._rows is None else values[self._rows]


def _writes_itself(kind: type) -> bool:
    """Whether a dataset can write itself, and no subclass gives other samples."""
    owners = [next((c for c in kind.__mro__ if name in vars(c)), None) for name in ("read_into", "__getitem__")]
    return owners[0] is not None and owners[0] is owners[1]


@contextmanager
def _fix_chance(seed: Sequence[int]) -> Iterator[None]:
    """Make chance in the samples come from ``seed``, whichever process loads them, and leave this process's alone."""
    entropy = np.random.SeedSequence(seed).generate_state(3, np.uint64).tolist()
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(entropy[0])
    np.random.seed(entropy[1] % 2**32)
    torch.default_generator.manual_seed(entropy[2])
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
