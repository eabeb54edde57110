"""Shards as a dataset that is trained on while they are still copied from Drive."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.drive import DriveProfile, get_profile, guard_drive
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.files import load_shard
from colab_utils.shards.arrays import ShardArrays
from colab_utils.shards.arrival import Arrival
from colab_utils.shards.format import ShardInfo, read_index

__all__ = ["ArrivingShards"]

_READERS = 8  # of the tables, which lie at the start of a small file beside each shard


class ArrivingShards(ShardDataset):
    """A `ShardDataset` whose shards are copied from Drive to the SSD while it is used.

    The copy begins at once, in a thread. A loader made over it by `make_loader` begins with the first shard that has
    arrived and goes on with those there are, in an order by chance; every image comes once in each epoch, from the
    first one on. When all have arrived it reads the SSD alone. An image whose shard has not arrived is waited for.

    Args:
        source: folder of shards, usually on Drive.
        target: folder to copy into, usually on the SSD.
        profile: the speed at which ``source`` is read (see `colab_utils.drive`); ``None`` is full speed.
        workers: shards copied at the same time (threads).
        seed: of the order in which the shards are copied.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        arrival: the copy: ``spans_s`` of each shard that has arrived, ``is_complete``, ``stop()``.

    Raises:
        ColabUtilsError: as `ShardDataset` and `copy_shards` do.

    Example:
        >>> ArrivingShards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/folder. ...
    """

    arrival: Arrival | None

    def __init__(
        self, source: str | Path, target: str | Path, *, profile: str | DriveProfile | None = None, workers: int = 4,
        seed: int = 0, contiguous_labels: bool = False,
    ) -> None:  # fmt: skip
        source, target, speed = Path(source), Path(target), get_profile(profile)
        with guard_drive(source):
            index = read_index(source)
        ids = [category["id"] for category in index.categories]

        def load(shard: ShardInfo) -> ShardArrays:
            with guard_drive(source):
                return load_shard(source, shard, category_ids=ids, profile=speed)

        with ThreadPoolExecutor(_READERS) as pool:  # one after the other, 150 shards take Drive 10 seconds
            shards = list(pool.map(load, index.shards))
        self._open(target, index, shards, None, whole_shards=False, contiguous_labels=contiguous_labels)
        self._process = os.getpid()
        self.arrival = Arrival(source, target, index, profile=speed, workers=workers, seed=seed)
        self.arrival.start()

    def _read_pixels(self, index: int, pixels: NDArray[np.uint8]) -> None:
        self._wait_for(index)
        super()._read_pixels(index, pixels)

    def _read_bits(self, index: int, bits: NDArray[np.uint8]) -> None:
        self._wait_for(index)
        super()._read_bits(index, bits)

    def _wait_for(self, index: int) -> None:
        if self.arrival is not None and self._process == os.getpid():  # workers are asked for what has arrived
            self.arrival.wait_for(int(self.shard_of[index]))

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "arrival": None}  # the copy stays in the process that began it
