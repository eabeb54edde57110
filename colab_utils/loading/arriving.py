"""Shards as a dataset that is trained on while they are still copied from Drive."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.drive import DriveProfile, Retries, get_profile
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.files import load_shard
from colab_utils.shards.arrival import Arrival
from colab_utils.shards.format import read_index
from colab_utils.shards.rolling import RollingArrival

__all__ = ["ArrivingShards"]

_READERS = 32  # of the tables, which lie at the start of a small file beside each shard


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
        limit_gb: most that shards may take in ``target``, in GB (1e9 bytes), where the disk is smaller than all of
            them: they take turns there, in every epoch. Half of them are trained on while the other half arrives.
        seed: of the order in which the shards are copied.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        arrival: the copy: ``spans_s`` of each shard that has arrived, ``is_complete``.

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
        limit_gb: float | None = None, seed: int = 0, contiguous_labels: bool = False,
    ) -> None:  # fmt: skip
        source, target, speed, retries = Path(source), Path(target), get_profile(profile), Retries()
        index = read_index(source, retries)
        options: dict[str, Any] = {"profile": speed, "workers": workers, "seed": seed, "retries": retries}
        if limit_gb is None or limit_gb * 1e9 >= index.bytes:
            arrival = Arrival(source, target, index, **options)
        else:
            arrival = RollingArrival(source, target, index, limit_bytes=limit_gb * 1e9, **options)
        arrival.start()
        ids = [category["id"] for category in index.categories]
        load = partial(load_shard, source, category_ids=ids, profile=speed, retries=retries)
        with ThreadPoolExecutor(_READERS) as pool:  # one after the other, 150 shards take Drive 10 to 90 seconds
            try:
                shards = list(pool.map(load, index.shards))
            except BaseException:
                arrival.stop()
                raise
        self._open(target, index, shards, None, whole_shards=False, contiguous_labels=contiguous_labels)
        self._process, self.arrival = os.getpid(), arrival
        if arrival.window is not None:
            self._files.source = source

    def stop(self) -> None:
        """End the copy at its next piece; what has arrived stays, and a new `ArrivingShards` continues there."""
        if self.arrival is not None:
            self.arrival.stop()

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
