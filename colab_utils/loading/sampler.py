"""The order of an epoch: the images of each batch, and the position of a loader in the order."""

import math
import random
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import KW_ONLY, dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

from colab_utils.errors import ColabUtilsError


@dataclass(eq=False, repr=False)
class BatchSampler(Sampler[list[int]]):
    """The batches of an epoch as lists of indices. Of a shuffle, seed and epoch decide the order.

    Each shuffled batch holds images of one orientation, wide or tall. This saves padding, as in
    torchvision's references (``GroupedBatchSampler``). The images that are left over form the last
    batches.

    Args:
        size: Images of the dataset.
        batch_size: Images in a batch.
        seed: Seed of the order; None keeps the order of the dataset.
        sizes: int32 [I, 2]: height and width of each image in pixels. None mixes wide
            and tall images.
        shard_of: int64 [I]: number of each image's shard, for ``windows``.
        sampler: Sampler that decides the images of an epoch and their order, in place of a shuffle
            of all images. Its random numbers depend on ``seed`` and the epoch. Default: None.
        drop_last: Leave out the last batch if it is not full. Default: False.

    Attributes:
        epoch: Number of the epoch that the next pass runs.
        left: int64: indices of this epoch's images. After a change of the batch size, they are
            the images that were not delivered yet.
        earlier: A pair for each time that the batch size changed in this epoch: the batch size
            until then, and the number of batches that were delivered with it.
        windows: Lists of shard numbers (see `plan_windows`). The epoch trains on one list
            after another. Images that one list leaves over are shuffled together with those of the
            next list. Without windows, all images are shuffled together.

    Example:
        >>> list(BatchSampler(5, 2, seed=None))
        [[0, 1], [2, 3], [4]]
    """

    size: int
    batch_size: int
    seed: int | None
    _: KW_ONLY
    sizes: NDArray[np.int32] | None = None
    shard_of: Any = None
    sampler: Any = None
    drop_last: bool = False

    def __post_init__(self) -> None:
        self.start_epoch(0)

    def start_epoch(self, epoch: int) -> None:
        """Make the next pass run this epoch, with all images."""
        self.left = np.arange(self.size)
        self.earlier: list[list[int]] = []
        self._wide = np.zeros(self.size, bool)
        # A sampler decides the order of its images itself.
        if self.sizes is not None and self.seed is not None and self.sampler is None:
            self._wide = find_wide(self.sizes)
        self.epoch = epoch
        self.windows: list[list[int]] = []

    def leave_out(self, batch_size: int, batches: int) -> None:
        """Leave out the images that were delivered in batches of another size."""
        before = copy(self)
        before.batch_size = batch_size
        images = np.fromiter(chain.from_iterable(islice(before, min(batches, self.size))), np.int64)
        self.left = np.setdiff1d(self.left, images, assume_unique=True)
        self.earlier = [*self.earlier, [batch_size, batches]]

    def __len__(self) -> int:
        images = len(self.left if self.sampler is None else self.sampler)
        if self.drop_last:
            return images // self.batch_size
        return math.ceil(images / self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        if self.sampler is not None:
            rest = yield from self._group(self._draw())
        elif not self.windows:
            rest = yield from self._group(self._shuffle(self.left))
        else:
            rest = []
            for place, window in enumerate(self.windows):
                images = self.left[np.isin(self.shard_of[self.left], window)]
                images = np.concatenate([np.array(rest, np.int64), images])
                rest = yield from self._group(self._shuffle(images, place))
        for start in range(0, len(rest), self.batch_size):
            batch = rest[start : start + self.batch_size]
            if self.drop_last and len(batch) < self.batch_size:
                return
            yield batch

    def _draw(self) -> NDArray[np.int64]:
        with seed_random((self.seed or 0, self.epoch)):
            indices = list(self.sampler)
        return read_indices(indices, self.size, "The sampler")

    def _shuffle(self, indices: Any, *key: int) -> NDArray[np.int64]:
        indices = np.array(indices, np.int64)
        if self.seed is None:
            return indices
        return np.random.default_rng((self.seed, self.epoch, *key)).permutation(indices)

    def _group(self, indices: NDArray[np.int64]) -> Generator[list[int], None, list[int]]:
        """Yield full batches of only wide or only tall images, and return the images left over."""
        filling: list[list[int]] = [[], []]
        for index, is_wide in zip(indices.tolist(), self._wide[indices].tolist(), strict=True):
            batch = filling[is_wide]
            batch.append(index)
            if len(batch) == self.batch_size:
                filling[is_wide] = []
                yield batch
        return filling[0] + filling[1]


def find_wide(sizes: NDArray[np.integer]) -> NDArray[np.bool_]:
    """Return which images are wide or square, bool [I], of their heights and widths. Wide and
    upright images share no shuffled batch.
    """
    return sizes[:, 1] >= sizes[:, 0]


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
    indices = np.array(None)
    # Lists of different lengths make no array, and tensors on a GPU make none either.
    with suppress(TypeError, ValueError):
        indices = np.asarray(values)
    is_sound = indices.dtype.kind in "iu" and indices.ndim == 1
    if not is_sound or indices.min() < -images or indices.max() >= images:
        raise ColabUtilsError(
            f"{owner} does not give indices of the {images:,} images, but {values!s:.80}. Give one "
            "whole number for each image, from 0 on, anew in each epoch. Of a mask of True and "
            "False, give np.flatnonzero(mask)."
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
    random.seed(entropy[0])
    np.random.seed(entropy[1] % 2**32)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(entropy[2])
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
