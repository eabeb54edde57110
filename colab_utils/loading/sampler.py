"""The order of an epoch: which images make which batch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Sampler

__all__ = ["BatchSampler", "seed_random"]


class BatchSampler(Sampler[list[int]]):
    """An epoch as lists of indices; the same for the same seed and epoch.

    A shuffled batch holds wide images, or tall ones, as far as they go: less padding, as in torchvision's
    references (``GroupedBatchSampler``); what the two leave over makes the last batches.

    Args:
        size: images in all.
        batch_size: images in a batch.
        seed: of the order; None keeps the dataset's order.
        sizes: int32 [I, 2], height and width of each image in pixels; None does not group.
        sampler: gives the images of an epoch in its own order instead; ``set_epoch`` is called where it has one, and
            it draws from ``seed`` and epoch.
        drop_last: leave out the last batch where it is not full.

    Attributes:
        epoch: the epoch that the next pass runs.
        before: what this epoch delivered in batches of other sizes (see `go_on`).

    Example:
        >>> list(BatchSampler(5, 2, seed=None))
        [[0, 1], [2, 3], [4]]
    """

    def __init__(
        self, size: int, batch_size: int, seed: int | None, *, sizes: NDArray[np.int32] | None = None,
        sampler: Any = None, drop_last: bool = False,
    ) -> None:  # fmt: skip
        self.batch_size, self._size, self._seed = batch_size, size, seed
        self.is_shuffled = seed is not None
        self._wide = np.zeros(size, bool) if sizes is None or seed is None else sizes[:, 1] >= sizes[:, 0]
        self.epoch, self.sampler, self.drop_last = 0, sampler, drop_last
        self.before: tuple[tuple[int, ...], ...] = ()
        self._left = np.arange(size)

    def __len__(self) -> int:
        images = len(self._left if self.sampler is None else self.sampler)
        return images // self.batch_size if self.drop_last else -(-images // self.batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self._plan(self.batch_size))

    def go_on(self, before: Sequence[Sequence[int]]) -> None:
        """Leave out of this epoch what was delivered in batches of other sizes, of all images that were left each time.

        ``before``: for each of those sizes, the size, how many of its first batches, and the numbers of later ones.
        """
        self.before, self._left = tuple(map(tuple, before)), np.arange(self._size)
        for size, count, *ahead in self.before:
            batches = enumerate(self._plan(size))
            seen = [index for number, batch in batches if number < count or number in ahead for index in batch]
            self._left = np.setdiff1d(self._left, seen)

    def shuffle(self, indices: NDArray[np.int64], *key: int) -> NDArray[np.int64]:
        """Indices in the order of this epoch, the same for the same ``key``."""
        if self._seed is None:
            return indices
        return np.random.default_rng((self._seed, self.epoch, *key)).permutation(indices)

    def group(self, indices: NDArray[np.int64], batch_size: int) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Full batches of wide or of tall images, in the order in which they fill, and what is left over."""
        filled: list[tuple[int, list[int]]] = []
        rest = []
        for kind in (False, True):
            places = np.flatnonzero(self._wide[indices] == kind)
            end = len(places) // batch_size * batch_size
            last, batches = places[batch_size - 1 : end : batch_size], indices[places[:end]].reshape(-1, batch_size)
            filled += zip(last.tolist(), batches.tolist(), strict=True)
            rest.append(places[end:])
        return [batch for _, batch in sorted(filled)], indices[np.sort(np.concatenate(rest))]

    def cut(self, indices: NDArray[np.int64], batch_size: int) -> list[list[int]]:
        """Batches of indices as they come: full ones of one kind, then what is left over."""
        batches, rest = self.group(indices, batch_size)
        end = len(rest) // batch_size * batch_size if self.drop_last else len(rest)
        return batches + [rest[start : start + batch_size].tolist() for start in range(0, end, batch_size)]

    def _plan(self, batch_size: int) -> list[list[int]]:
        """What is left of the epoch in batches of this size."""
        if self.sampler is not None:
            getattr(self.sampler, "set_epoch", int)(self.epoch)
            with seed_random((self._seed or 0, self.epoch)):
                return self.cut(np.fromiter(self.sampler, np.int64), batch_size)
        shuffled = self.shuffle(np.arange(self._size))
        return self.cut(shuffled[np.isin(shuffled, self._left)], batch_size)


@contextmanager
def seed_random(seed: Sequence[int]) -> Iterator[None]:
    """Draw random numbers from ``seed``, whichever worker loads the samples, and leave this process's as they were."""
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
