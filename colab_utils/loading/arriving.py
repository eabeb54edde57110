"""A dataset of shards that are still being copied from Drive."""

import math
from collections.abc import Collection
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arrival import (
    Arrival,
    ArrivedShards,
    FollowedArrival,
    hold_arrival,
    make_key,
)
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.groups import choose_groups
from colab_utils.loading.readers import ShardFiles, load_shard
from colab_utils.loading.targets import Transforms
from colab_utils.places import Place, open_place
from colab_utils.processes import ThreadPool
from colab_utils.require import require_local_path
from colab_utils.shards.index import read_index

# So many threads read the tables, which lie at the start of a small file beside each shard.
_READERS = 32


class _ArrivingFiles(ShardFiles):
    """A reader of arriving shards, in any process.

    It waits for a shard that has not arrived. It reads the shard in ``source`` instead if shards
    take turns, or if the shard is in the group of another host.
    """

    def __init__(
        self,
        source: Place,
        target: Path,
        key: str,
        *,
        takes_turns: bool,
        chosen: Collection[int] | None,
    ) -> None:
        super().__init__(target)
        self._drive = ShardFiles(source)
        self._takes_turns = takes_turns
        self._chosen = chosen
        self._arrived = ArrivedShards(target, key)

    def __reduce__(self) -> Any:
        return partial(_ArrivingFiles, takes_turns=self._takes_turns, chosen=self._chosen), (
            self._drive.folder,
            self.folder,
            self._arrived.key,
        )

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        if self._chosen is not None and shard not in self._chosen:
            self._drive.read_into(shard, name, start, buffer)
            return
        if not self._takes_turns:
            self._arrived.wait_for(shard)
        try:
            super().read_into(shard, name, start, buffer)
        except ColabUtilsError:
            if not self._takes_turns:
                raise
            # The shard was removed, and may come back.
            self._open.close()
            self._drive.read_into(shard, name, start, buffer)


class ArrivingShards(ShardDataset):
    """A `ShardDataset` whose shards are copied from Drive to the SSD while it is used.

    The copy begins at once, in a thread. A loader of `make_loader` begins with the first shard that
    has arrived, and goes on with the next ones, in a random order. Each epoch has every image once,
    the first epoch too. When all shards have arrived, only the SSD is read. Any ``DataLoader`` can
    be used, too: its workers wait for an image until its shard has arrived.

    If ``torch.distributed`` is initialised, one process on each machine copies. The others with the
    same ``target`` follow it, and wait for the shards that it brings. All processes begin each
    epoch together, so that they take the images in the same order.

    Args:
        source: folder of shards, usually on Drive; or its URL, such as ``s3://bucket/shards``.
        target: folder to copy into, usually on the SSD.
        workers: shards copied at the same time (threads).
        limit_gb: disk space that shards may take in ``target``, in GB (1e9 bytes). If all shards
            need more, they take turns there, in every epoch. ``target`` must then be a new or empty
            folder, or one that such a run left.
        groups: the groups of shards that this host copies, ``range(host, 8, hosts)``, for a loader
            that is made with ``groups=8`` on every host. An image of another group is read in
            ``source``. ``target`` then lists the copied shards, and is marked ``partial``.
        seed: seed of the order in which the shards are copied, and of the groups.
        transforms: as for `ShardDataset`.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        arrival: the running copy (see `Arrival`), with the ``spans_s`` of each shard that has
            arrived, and ``is_complete``. A `FollowedArrival` if another process copies; None in
            workers.

    Raises:
        ColabUtilsError: as `ShardDataset` and `copy_shards` do.

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
        limit_gb: float | None = None,
        groups: range | None = None,
        seed: int = 0,
        transforms: Transforms | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        source = open_place(source)
        target = require_local_path(target)
        retries = Retries()
        index = read_index(source, retries)
        limit_bytes = math.inf if limit_gb is None else limit_gb * 1e9
        if groups is not None:
            sizes = [shard.images for shard in index.shards]
            self.groups = choose_groups(groups, sizes, seed=seed)
            if limit_gb is not None:
                raise ColabUtilsError(
                    "Shards of groups do not take turns, so groups cannot have a limit_gb. Leave "
                    "one of them out, or use more hosts."
                )
        chosen = None if self.groups is None else self.groups.list_shards()
        lock = hold_arrival(target, make_key(index, chosen))
        bring = FollowedArrival if lock is None else Arrival
        arrival = bring(
            source,
            target,
            index,
            lock=lock or ExitStack(),
            workers=workers,
            seed=seed,
            retries=retries,
            limit_bytes=limit_bytes,
            chosen=chosen,
        )
        load = partial(load_shard, source, retries=retries)
        # One after the other, 150 shards on Drive take up to 90 seconds: 606 ms each, on a bad day.
        with ThreadPool(_READERS) as pool:
            try:
                shards = list(pool.map(load, index.shards))
            except BaseException:
                arrival.stop()
                raise
        files = _ArrivingFiles(
            source,
            target,
            arrival.key,
            takes_turns=arrival.takes_turns,
            chosen=None if chosen is None else frozenset(chosen),
        )
        self._open(files, index, shards, transforms, contiguous_labels=contiguous_labels)
        self.arrival = arrival

    def stop(self) -> None:
        """End the copy at its next piece; what has arrived stays, and a new `ArrivingShards`
        continues there.
        """
        if self.arrival is not None:
            self.arrival.stop()

    def wait(self) -> None:
        """Wait until all shards have arrived, and shards that are written are on Drive too.

        With ``limit_gb``, wait until those have arrived that fit beside each other.

        Raises:
            ColabUtilsError: a shard cannot be copied or written.
        """
        if self.arrival is not None:
            self.arrival.wait()
