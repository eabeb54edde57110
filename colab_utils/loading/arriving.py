"""A dataset of shards that are still being copied from Drive, the copy, and the order in which
training uses the shards.
"""

import os
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError
from contextlib import closing, suppress
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from typing import Any
from weakref import WeakValueDictionary

from colab_utils.drive import DriveLostError, explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.dataset import ShardDataset, load_shards
from colab_utils.loading.samples import Transforms
from colab_utils.places import Place, PlaceLike, open_place, require_local_path
from colab_utils.processes import start_thread
from colab_utils.shards.copy import COPY_STREAMS, prepare_copy
from colab_utils.shards.index import INDEX_NAME, ShardIndex, read_index, write_index
from colab_utils.shards.lock import WRITER_NAME, hold_folder, lock_here
from colab_utils.shards.plan import plan_windows
from colab_utils.shards.verify import find_begun

# Seconds between two checks for shards that have arrived.
_POLL_S = 0.02
# Seconds between two looks at files that another process brings.
_LOOK_S = 0.1
# Seconds to wait for the end of a copy that was stopped. A read of Drive may hang for longer.
_STOP_S = 10.0
# If no process has held the lock for so many seconds, no process brings the missing files.
# A process may need ten seconds to get the lock: in any of its threads, Python may end a loader
# that was given up, and torch then waits five seconds for each worker.
_GRACE_S = 30.0
# The tables of so many shards are read at the same time. Those of a shard lie at the start of the
# small file beside it. On a bad day, it takes 606 ms to read them on Drive.
_READERS = 32


# The copies to Drive that this process makes, by their folder.
_sending = WeakValueDictionary[str, "Arrival"]()


class Arrival:
    """A copy of the shards of ``index`` from ``source`` to ``target``, made by threads.

    The first shard is copied alone, at the full speed of Drive. The others follow, several at a
    time. A shard that an earlier copy left in ``target`` is not copied again if its checksum is
    right. The index in ``target`` is written last.

    One process of this machine copies, and holds a lock. The others wait for its files: a shard is
    there when its files have their sizes under their own names. If the process that copies ends too
    early, another one goes on.

    Args:
        source: the folder of shards on Drive, or its URL.
        target: the folder to copy into.
        index: the index of the shards.
        seed: seed of the order in which the shards are copied.
        sends: whether ``target`` is on Drive. Then no other machine may write there, and an error
            is a warning, too.

    Attributes:
        arrived: the numbers of the shards that have arrived.
        windows: the shards in the order of the copy (see `plan_windows`).
        copying: copies the files. Its ``source`` is the store of the shards on Drive.

    Raises:
        ColabUtilsError: too little free disk, or other files in ``target``.
    """

    def __init__(
        self,
        source: Place,
        target: Place,
        index: ShardIndex,
        *,
        seed: int,
        sends: bool = False,
    ) -> None:
        self.target = target
        self.index = index
        self.windows = plan_windows(index.recipe, len(index.shards), seed)
        self._order = [*chain(*self.windows)]
        self.arrived: set[int] = set()
        self._error: ColabUtilsError | None = None
        self._sends = sends
        if sends:
            # A notebook's cell that runs again opens its dataset anew.
            earlier = _sending.get(str(target))
            if earlier is not None:
                earlier.stop()
            # A folder that takes no files is told at once.
            with hold_folder(target):
                pass
        self.copying = prepare_copy(source, target, index)
        with suppress(ColabUtilsError):
            # What an earlier copy or writer of the same data left may be replaced.
            self.copying.overwrite |= find_begun(target, index.fingerprint, {}) is not None
        self._thread = start_thread(self._run, "arrival")
        if sends:
            _sending[str(target)] = self

    def stop(self) -> None:
        """Stop the copy after the piece that is being copied. A new copy continues there.

        If a read or a write hangs, this method does not wait for its end.
        """
        self.copying.stop.set()
        self._thread.join(_STOP_S)

    def wait(self) -> None:
        """Wait until the copy has ended.

        Raises:
            ColabUtilsError: the copy failed.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error

    @property
    def is_complete(self) -> bool:
        """Return whether all shards have arrived."""
        return len(self.arrived) == len(self._order)

    def wait_for(self, shards: Collection[int]) -> Iterator[None]:
        """Yield None until these shards have arrived.

        Raises:
            DriveLostError: a shard is missing, and Drive is lost for good. The message says what is
                safe.
            ColabUtilsError: a shard is missing: it is damaged on Drive, the disk is full, or the
                copy was stopped.
        """
        while not self.arrived.issuperset(shards):
            if self._error is not None:
                raise self._error
            yield None

    def _run(self) -> None:
        """Bring all shards, and note the error that ends this."""
        try:
            with explain_write(self.target):
                self._bring_all()
        except Exception as error:
            reason = str(error).removesuffix(".") or "The copy of the shards was stopped"
            kind = DriveLostError if isinstance(error, DriveLostError) else ColabUtilsError
            self._error = kind(
                f"{reason}; {len(self.arrived)} of {len(self._order)} shards in "
                f"{self.target} are safe, and the same call continues there"
            )
            if self._sends and not self.copying.stop.is_set():
                warnings.warn(str(self._error), ColabUtilsWarning, stacklevel=1)

    def _bring_all(self) -> None:
        """Copy all shards, or wait while another process of this machine copies them.

        Raises:
            CancelledError: the copy was stopped.
        """
        if self._sends:
            with hold_folder(self.target):
                self._copy_all()
            return
        has_waited = False
        while True:
            with lock_here(self.target) as is_free:
                has_waited |= not is_free
                if has_waited:
                    # Another process brings the shards, or has just brought the last one.
                    for number, shard in enumerate(self.index.shards):
                        if self.copying.target.has_files(shard.files()):
                            self.arrived.add(number)
                    if self.is_complete and self.copying.target.find_kind(INDEX_NAME):
                        return
                if is_free:
                    self._copy_all()
                    return
            if self.copying.stop.wait(_LOOK_S):
                raise CancelledError

    def _copy_all(self) -> None:
        """Copy all shards, the first one alone, and write the index."""
        shards = self.index.shards
        numbers = {shard.name: number for number, shard in enumerate(shards)}
        for window in self._order[:1], self._order[1:]:
            copies = self.copying.run([shards[number] for number in window], COPY_STREAMS)
            with closing(copies):
                for copied in copies:
                    self.arrived.update(numbers[name] for name, _ in copied)
        if not self._sends:
            # A writer of these shards that was killed has left it.
            self.copying.target.remove(WRITER_NAME)
        write_index(self.target, self.index)


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
        colab_utils.errors.ColabUtilsError: There are no shards in ...
    """

    def __init__(
        self,
        source: PlaceLike,
        target: str | Path,
        *,
        seed: int = 0,
        transforms: Transforms | None = None,
        contiguous_labels: bool = False,
        index: ShardIndex | None = None,
    ) -> None:
        source = open_place(source)
        target = require_local_path(target)
        index = index or read_index(source)
        arrival = Arrival(source, target, index, seed=seed)
        try:
            shards = [*load_shards(arrival.copying.source, index, streams=_READERS)]
        except BaseException:
            arrival.stop()
            raise
        self._open(target, index, shards, transforms, contiguous_labels=contiguous_labels)
        self.arrival = arrival
        self.windows = arrival.windows
        # The shards that this process has not seen yet.
        self._missing = {*range(len(index.shards))}
        self._process = os.getpid()

    @property
    def is_arriving(self) -> bool:  # type: ignore[override]
        """Return whether this process copies the shards. Others look for their files."""
        return self._process == os.getpid()

    def _read_part(self, key: tuple[int, int]) -> Any:
        shard = int(self.shard_of[key[0]])
        if shard in self._missing:
            self._wait_for(shard)
            self._missing.discard(shard)
        return super()._read_part(key)

    def _wait_for(self, number: int) -> None:
        """Wait until a shard has arrived.

        Raises:
            ColabUtilsError: the copy has ended without it, or no process brings files to the folder
                any more.
        """
        if self.arrival is not None and self.is_arriving:
            for _ in self.arrival.wait_for({number}):
                sleep(_POLL_S)
            return
        # This is another process: a worker, for example.
        shard = self.index.shards[number]
        seen_s = monotonic()
        while not self.store.has_files(shard.files()):
            with lock_here(self.folder) as is_free:
                if not is_free:
                    seen_s = monotonic()
            # On a disk that stalls, the last file may have come since the look above.
            if monotonic() - seen_s > _GRACE_S and not self.store.has_files(shard.files()):
                raise ColabUtilsError(
                    f"{self.folder / shard.name} has not arrived, and the process that brings "
                    "shards to its folder has ended. Make the dataset again: the work continues "
                    "there."
                )
            sleep(_LOOK_S)
