"""The order of an epoch: which images make which batch, and which worker loads it."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from colab_utils.loading.arriving import Arrival

__all__ = ["AllArrived", "BatchParts", "BatchSampler"]

_LOOKED_AT = 16  # batches of images among which a batch of one kind is looked for


_IN_FLIGHT = 32  # batches after which those before them have been read: more than workers have ahead

BatchParts = list[tuple[int | None, list[int]]]


"""The parts of a batch: the stream that loads each (None: any), and its indices."""


class AllArrived:
    """Stands for the `Arrival` of an epoch that was begun while shards arrived, where all of them are there now."""

    window = None

    def __init__(self, shards: Collection[int]) -> None:
        self._shards = list(shards)

    def list_arrived(self, *, more_than: int = -1) -> list[int]:
        """All of them."""
        return self._shards

    def want(self, shards: Collection[int]) -> None:
        """They are there."""

    use = release = want


class BatchSampler(Sampler[list[int]]):
    """An epoch as lists of indices; the same for the same seed and epoch.

    A shuffled batch holds wide images, or tall ones, as far as they go: less padding, as in torchvision's
    references (``GroupedBatchSampler``); what the two leave over makes the last batches.

    Where whole shards are read, the shards are dealt to streams, one for each worker, so that no shard is read twice
    in a shuffled epoch: the shards and the images of each are shuffled, and a batch comes from one stream. What the
    streams leave over makes batches whose parts are of several streams.

    Args:
        size: images in all.
        batch_size: images in a batch.
        seed: of the order; None keeps the dataset's order.
        sizes: int32 [I, 2], height and width of each image; None does not group.
        shard_of: int64 [I], the shard of each image, where whole shards are read.
        streams: workers that read whole shards.
    """

    def __init__(
        self,
        size: int,
        batch_size: int,
        seed: int | None,
        *,
        sizes: NDArray[np.int32] | None = None,
        shard_of: NDArray[np.int64] | None = None,
        streams: int = 1,
    ) -> None:
        self._size, self._batch_size, self._seed = size, batch_size, seed
        self.is_shuffled = seed is not None
        self.is_grouped = self.is_shuffled and sizes is not None
        self._wide = np.zeros(size, bool) if sizes is None else sizes[:, 1] >= sizes[:, 0]
        self._shard_of = shard_of
        self.streams = 1 if shard_of is None else max(1, streams)
        self.epoch = 0
        self.before: tuple[tuple[int, ...], ...] = ()
        self._done = np.zeros(0, np.int64)

    def __len__(self) -> int:
        return -(-(self._size - len(self._done)) // self._batch_size)

    def go_on(self, before: Sequence[Sequence[int]]) -> None:
        """Leave out of this epoch what was delivered in batches of other sizes, of all images that were left each time.

        ``before``: for each of those sizes, the size, how many of its first batches, and the numbers of later ones.
        """
        self.before, self._done = tuple(map(tuple, before)), np.zeros(0, np.int64)
        for size, count, *ahead in self.before:
            batches = self._plan(size)
            numbers = [*range(count), *ahead]
            seen = [index for number in numbers for _, indices in batches[number] for index in indices]
            self._done = np.concatenate([self._done, np.array(seen, np.int64)])

    def __iter__(self) -> Iterator[list[int]]:
        for parts in self.plan():
            yield [index for _, indices in parts for index in indices]

    def plan(self) -> list[BatchParts]:
        """The batches of the epoch, each with its parts."""
        return self._plan(self._batch_size)

    def _plan(self, step: int) -> list[BatchParts]:
        """What is left of the epoch, in batches of ``step`` images."""
        shuffled = np.arange(self._size)
        if self._seed is not None:
            shuffled = np.random.default_rng((self._seed, self.epoch)).permutation(self._size)
        shuffled = shuffled[~np.isin(shuffled, self._done)] if len(self._done) else shuffled
        if self._seed is None:
            return self._cut([shuffled], step)
        if self._shard_of is None:
            whole, rest = self._group(shuffled, step)
            batches: list[BatchParts] = [[(None, batch)] for batch in whole]
            return batches + self._cut([rest], step)
        places = np.random.default_rng((self._seed, self.epoch, 1)).permutation(int(self._shard_of.max()) + 1)
        place = places[self._shard_of[shuffled]]
        by_shard = np.argsort(place, kind="stable")
        owner = place[by_shard] % self.streams
        streams = [self._group(shuffled[by_shard[owner == stream]], step) for stream in range(self.streams)]
        # each stream's batches in turn, as the workers give them
        order = sorted((i, stream) for stream, (whole, _) in enumerate(streams) for i in range(len(whole)))
        batches = [[(stream, streams[stream][0][i])] for i, stream in order]
        return batches + self._cut([rest for _, rest in streams], step)

    def plan_arriving(
        self, shard_of: NDArray[np.int64], arrival: Arrival | AllArrived, joined: list[tuple[int, int]], planned: int
    ) -> Iterator[BatchParts | None]:
        """The batches of an epoch whose shards are still on their way; None where the next one has to wait.

        A shard joins before some batch, and what is left then is shuffled anew. ``joined`` lists (shard, number of
        that batch), and grows; what it holds when this starts is repeated as it was, up to batch ``planned``. Where
        shards take turns on the disk (``arrival.window``), new ones join when those before them are used up.
        """
        shards: set[int] = set(np.unique(shard_of).tolist())
        missing, joining, number = set(shards), list(joined), 0
        pool, rolls, replayed, used_up = np.zeros(0, np.int64), arrival.window is not None, len(joining), 0
        arrival.release(shards)
        while missing:
            arrival.want(missing)
            here = arrival.list_arrived()
            batches = self._group(pool[: _LOOKED_AT * self._batch_size], self._batch_size)[0]
            if rolls and (number == used_up or not batches):
                arrival.release(shards - set(shard_of[pool].tolist()))
            if not joining and number >= planned and not (rolls and batches):
                joining = [(shard, number) for shard in here if shard in missing][: arrival.window]
                joined += joining
            if joining and joining[0][1] == number and (joining[0][0] in here or (rolls and replayed)):
                shard = joining.pop(0)[0]
                replayed, used_up = max(0, replayed - 1), number + _IN_FLIGHT
                arrival.use([shard])
                missing.discard(shard)
                pool = np.concatenate([pool, np.flatnonzero(shard_of == shard)])
                if self._seed is not None:
                    pool = np.random.default_rng((self._seed, self.epoch, len(missing))).permutation(pool)
                continue
            if not batches or (joining and joining[0][1] == number):
                arrival.list_arrived(more_than=len(shards) if rolls else len(here))
                yield None
                continue
            pool = pool[~np.isin(pool, batches[0])]
            yield [(None, batches[0])]
            number += 1
        arrival.want(())
        whole, rest = self._group(pool, self._batch_size)
        for batch in whole:
            yield [(None, batch)]
        yield from self._cut([rest], self._batch_size)

    def _group(self, sequence: NDArray[np.int64], step: int) -> tuple[list[list[int]], NDArray[np.int64]]:
        """Whole batches of one kind each, in the order in which they fill, and what is left over."""
        filled: list[tuple[int, list[int]]] = []
        rest = []
        for kind in (False, True):
            places = np.flatnonzero(self._wide[sequence] == kind)
            end = len(places) // step * step
            last, batches = places[step - 1 : end : step], sequence[places[:end]].reshape(-1, step)
            filled += zip(last.tolist(), batches.tolist(), strict=True)
            rest.append(places[end:])
        return [batch for _, batch in sorted(filled)], sequence[np.sort(np.concatenate(rest))]

    def _cut(self, streams: Sequence[NDArray[np.int64]], step: int) -> list[BatchParts]:
        """Batches of what the streams hold, one stream after the other."""
        owned = chain.from_iterable(((stream, i) for i in rest.tolist()) for stream, rest in enumerate(streams))
        pairs = list(owned)
        batches: list[BatchParts] = []
        for start in range(0, len(pairs), step):
            parts: dict[int | None, list[int]] = {}
            for stream, index in pairs[start : start + step]:
                parts.setdefault(None if self._shard_of is None else stream, []).append(index)
            batches.append(list(parts.items()))
        return batches
