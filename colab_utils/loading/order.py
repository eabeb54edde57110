"""The order of an epoch: which images make which batch, and which worker loads it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Sampler

__all__ = ["BatchOrder"]

_Batch = list[tuple[int | None, list[int]]]
"""The parts of a batch: the stream that loads each (None: any), and its indices."""


class BatchOrder(Sampler[list[int]]):
    """An epoch as lists of indices, for torch's loader; the same for the same seed and epoch.

    Where whole shards are read, the shards are dealt to streams, one for each worker, so that no shard is read twice
    in a shuffled epoch: the shards and the images of each are shuffled, and a batch comes from one stream. What the
    streams leave over makes batches whose parts are of several streams.

    Args:
        dataset: has a length, and ``whole_shards`` and ``shard_of`` if it knows shards.
        batch_size: images in a batch.
        workers: worker processes, 1 or more.
        seed: of the order; None keeps the dataset's order.
        split: give the parts of such batches apart, each to the worker of its stream. torch hands lists to its
            workers in turn: an empty one, for which there is nothing to do, keeps it in step.
    """

    def __init__(
        self, dataset: Dataset[Any], batch_size: int, workers: int, seed: int | None, *, split: bool = False
    ) -> None:
        self._size = len(dataset)  # type: ignore[arg-type]
        self._shard_of = dataset.shard_of if getattr(dataset, "whole_shards", False) else None  # type: ignore[attr-defined]
        self._batch_size, self._seed, self._workers = batch_size, seed, workers
        self._split = split
        self.streams = 1 if self._shard_of is None else workers
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return -(-self._size // self._batch_size)

    def __iter__(self) -> Iterator[list[int]]:
        turn = 0
        for batch in self._make_batches()[self.start :]:
            if not self._split:
                yield [index for _, indices in batch for index in indices]
                continue
            for stream, indices in batch:
                while stream is not None and turn % self._workers != stream % self._workers:
                    turn += 1
                    yield []
                turn += 1
                yield indices

    def _make_batches(self) -> list[_Batch]:
        if self._seed is None:
            return self._cut(np.arange(self._size))
        shuffled = np.random.default_rng((self._seed, self.epoch)).permutation(self._size)
        if self._shard_of is None:
            return self._cut(shuffled)
        places = np.random.default_rng((self._seed, self.epoch, 1)).permutation(self._shard_of.max() + 1)
        return self._deal(shuffled, places[self._shard_of[shuffled]])

    def _cut(self, indices: NDArray[Any]) -> list[_Batch]:
        step = self._batch_size
        return [[(None, indices[i : i + step].tolist())] for i in range(0, len(indices), step)]

    def _deal(self, shuffled: NDArray[Any], place: NDArray[Any]) -> list[_Batch]:
        by_shard = np.argsort(place, kind="stable")
        owner = place[by_shard] % self.streams
        streams = [shuffled[by_shard[owner == stream]] for stream in range(self.streams)]
        whole = [len(stream) // self._batch_size * self._batch_size for stream in streams]
        # each stream's batches in turn, as the workers give them
        order = sorted((i, stream) for stream, end in enumerate(whole) for i in range(0, end, self._batch_size))
        batches: list[_Batch] = [[(stream, streams[stream][i : i + self._batch_size].tolist())] for i, stream in order]
        rest = np.concatenate([stream[end:] for stream, end in zip(streams, whole, strict=True)])
        owner = np.repeat(np.arange(self.streams), [len(s) - end for s, end in zip(streams, whole, strict=True)])
        for i in range(0, len(rest), self._batch_size):
            part, owners = rest[i : i + self._batch_size], owner[i : i + self._batch_size]
            batches.append([(stream, part[owners == stream].tolist()) for stream in np.unique(owners).tolist()])
        return batches
