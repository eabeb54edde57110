"""A dataset of shards that are still being copied from Drive."""

import os
from functools import partial
from itertools import chain
from pathlib import Path
from time import sleep
from typing import Any

from colab_utils.loading.arrival import POLL_S, Arrival, plan_windows, wait_for_file
from colab_utils.loading.contract import Transforms
from colab_utils.loading.dataset import ShardDataset, ShardFiles, load_shard
from colab_utils.places import Place, open_place, require_local_path
from colab_utils.processes import ThreadPool
from colab_utils.shards.index import ShardIndex, read_index

# Threads that read the tables of the shards. The tables of a shard lie at the start of the small
# file beside it.
_READERS = 32


class _ArrivingFiles(ShardFiles):
    """A reader of arriving shards, which waits for each file. It works in all processes.

    Args:
        target: The folder that the shards are copied into.
        missing: The size of each file that has not been seen there yet, by its name.
    """

    _arrival: Arrival | None = None
    _process = 0

    def __init__(self, target: Path, missing: dict[str, int]) -> None:
        super().__init__(target)
        self._target = target
        self._missing = missing

    def __reduce__(self) -> Any:
        return _ArrivingFiles, (self._target, self._missing)

    def follow(self, arrival: Arrival) -> None:
        """Wait for the files of a copy that this process makes."""
        self._arrival = arrival
        self._process = os.getpid()

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        if name in self._missing:
            if self._arrival is not None and self._process == os.getpid():
                for _ in self._arrival.wait_for({shard}):
                    sleep(POLL_S)
            else:
                wait_for_file(self._target / name, self._missing[name])
            self._missing.pop(name, None)
        super().read_into(shard, name, start, buffer)


class ArrivingShards(ShardDataset):
    """A `ShardDataset` whose shards are copied from Drive to the SSD while it is used.

    The copy begins at once, in a thread. A loader of `make_loader` can start as soon as the first
    shard has arrived. In its first epoch, it uses the shards in the order of the copy, whether they
    have arrived or not: the small first shards, then the others in a random order. So the same seed
    gives the same order, however fast the copy is. Each epoch, and also the first one, has every
    image once. When all shards have arrived, training reads only the SSD.

    You can also use torch's ``DataLoader``. A worker that needs an image then waits until the shard
    of the image has arrived.

    One process of a machine copies the shards. The other processes of the machine, with the same
    ``target``, wait for these shards. If that process ends too early, another one copies the rest.
    The loaders of processes that train together use the same order of images in each epoch.

    Args:
        source: folder of shards, usually on Drive; or its URL, such as ``s3://bucket/shards``.
        target: folder to copy into, usually on the SSD.
        workers: number of threads that copy. Each thread copies one shard at a time.
        seed: seed of the order in which the shards are copied.
        transforms: as for `ShardDataset`.
        contiguous_labels: map category ids to 1 to K.
        index: the index of ``source``, if you have read it already. Default: it is read.

    Attributes:
        arrival: the running copy (see `Arrival`). Its ``is_complete`` tells whether all shards have
            arrived. None in workers.

    Raises:
        ColabUtilsError: as for `ShardDataset` and `copy_shards`.

    Example:
        >>> ArrivingShards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no folder of shards at ...
    """

    is_arriving = True

    def __init__(
        self,
        source: str | Place,
        target: str | Path,
        *,
        workers: int = 4,
        seed: int = 0,
        transforms: Transforms | None = None,
        contiguous_labels: bool = False,
        index: ShardIndex | None = None,
    ) -> None:
        source = open_place(source)
        target = require_local_path(target)
        index = index or read_index(source)
        windows = plan_windows(index.recipe, [shard.images for shard in index.shards], seed)
        order = [*chain(*windows)]
        arrival = Arrival(source, target, index, order=order, workers=workers)
        load = partial(load_shard, arrival.source)
        # On a bad day, it takes 606 ms to read the tables of a shard on Drive. For 150 shards, one
        # thread would need 90 seconds.
        with ThreadPool(_READERS) as pool:
            try:
                shards = list(pool.map(load, index.shards))
            except BaseException:
                arrival.stop()
                raise
        files = _ArrivingFiles(target, {name: size for name, size, _ in index.files()})
        files.follow(arrival)
        self._open(files, index, shards, transforms, contiguous_labels=contiguous_labels)
        self.arrival = arrival
        self.windows = windows
