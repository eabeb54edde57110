"""A dataset of shards that are still being copied from Drive."""

from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from colab_utils.drive import Retries
from colab_utils.loading.arrival import (
    Arrival,
    ArrivedShards,
    FollowedArrival,
    hold_arrival,
    make_key,
)
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.readers import ShardFiles, load_shard
from colab_utils.loading.targets import Transforms
from colab_utils.places import Place, open_place, require_local_path
from colab_utils.processes import ThreadPool
from colab_utils.shards.index import read_index

# Threads that read the tables of the shards. The tables of a shard lie at the start of the small
# file beside it.
_READERS = 32


class _ArrivingFiles(ShardFiles):
    """A reader of arriving shards. It works in the process that copies and in all others.

    If a shard has not arrived in ``target``, the reader waits for it.

    Args:
        target: The folder that the shards are copied into.
        key: The key of the copy, see `make_key`.
    """

    def __init__(self, target: Path, key: str) -> None:
        super().__init__(target)
        self._arrived = ArrivedShards(target, key)

    def __reduce__(self) -> Any:
        return _ArrivingFiles, (self.folder, self._arrived.key)

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        self._arrived.wait_for(shard)
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

    If ``torch.distributed`` is initialised, one process on each machine copies the shards. The
    other processes of the machine, with the same ``target``, wait for these shards. The loaders of
    all processes use the same order of images in each epoch.

    Args:
        source: folder of shards, usually on Drive; or its URL, such as ``s3://bucket/shards``.
        target: folder to copy into, usually on the SSD.
        workers: number of threads that copy. Each thread copies one shard at a time.
        seed: seed of the order in which the shards are copied.
        transforms: as for `ShardDataset`.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        arrival: the running copy (see `Arrival`). Its ``spans_s`` has the times of each shard that
            has arrived, and ``is_complete`` tells whether all have. A `FollowedArrival` if another
            process copies; None in workers.

    Raises:
        ColabUtilsError: as for `ShardDataset` and `copy_shards`.

    Example:
        >>> ArrivingShards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no folder of shards at ...
    """

    def __init__(
        self,
        source: str | Place,
        target: str | Path,
        *,
        workers: int = 4,
        seed: int = 0,
        transforms: Transforms | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        source = open_place(source)
        target = require_local_path(target)
        retries = Retries()
        index = read_index(source, retries)
        lock = hold_arrival(target, make_key(index))
        bring = FollowedArrival if lock is None else Arrival
        arrival = bring(
            source,
            target,
            index,
            lock=lock or ExitStack(),
            workers=workers,
            seed=seed,
            retries=retries,
        )
        load = partial(load_shard, source, retries=retries)
        # On a bad day, it takes 606 ms to read the tables of a shard on Drive. For 150 shards, one
        # thread would need 90 seconds.
        with ThreadPool(_READERS) as pool:
            try:
                shards = list(pool.map(load, index.shards))
            except BaseException:
                arrival.stop()
                raise
        files = _ArrivingFiles(target, arrival.key)
        self._open(files, index, shards, transforms, contiguous_labels=contiguous_labels)
        self.arrival = arrival

    def stop(self) -> None:
        """Stop the copy after the piece of a file that is being copied.

        The shards that have arrived stay in ``target``, and a new `ArrivingShards` copies the
        others. If another process copies the shards, this method does nothing.
        """
        if self.arrival is not None:
            self.arrival.stop()

    def wait(self) -> None:
        """Wait until all shards have arrived.

        A `WritingShards`, which writes the shards itself and sends them to Drive, also waits until
        they are on Drive.

        Raises:
            ColabUtilsError: a shard cannot be copied or written, or the copy was stopped.
        """
        if self.arrival is not None:
            self.arrival.wait()
