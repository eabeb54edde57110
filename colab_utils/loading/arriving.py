"""A dataset of shards that are still being copied from Drive, the copy, and the order in which
training uses the shards.
"""

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import suppress
from functools import partial
from itertools import chain
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from colab_utils.drive import DriveLostError, explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.loading.contract import Transforms
from colab_utils.loading.dataset import ShardDataset, ShardFiles, load_shard
from colab_utils.places import Place, open_place, require_local_path
from colab_utils.processes import ThreadPool, start_thread
from colab_utils.shards.copy import COPY_STREAMS, Copying, check_space, read_target
from colab_utils.shards.folder_state import inspect_folder
from colab_utils.shards.index import INDEX_NAME, ShardIndex, read_index, write_index
from colab_utils.shards.lock import lock_here, remove_leftovers
from colab_utils.shards.plan import order_shards

# Seconds between two checks for shards that have arrived.
POLL_S = 0.02
# Seconds between two looks at files that another process brings.
_LOOK_S = 0.1
# Seconds to wait for the end of copies that were stopped. A read of Drive may hang for longer.
_STOP_S = 5.0
# If no process has held the lock for so many seconds, no process brings the missing files.
# A process may need ten seconds to get the lock: in any of its threads, Python may end a loader
# that was given up, and torch then waits five seconds for each worker.
_GRACE_S = 30.0
# Threads that read the tables of the shards. The tables of a shard lie at the start of the small
# file beside it.
_READERS = 32


def plan_windows(recipe: dict[str, Any], images: Sequence[int], seed: int) -> list[list[int]]:
    """Return the shards in the order of their copy, cut into windows. In its first epoch, training
    reads one window after the other.

    A window has one or more shards. A window of several shards has at most as many images as all
    earlier windows together. The number of its shards is at most the number that is copied at the
    same time.

    Args:
        recipe: the recipe of the shards.
        images: number of images of each shard.
        seed: seed of the order.
    """
    windows: list[list[int]] = []
    window: list[int] = []
    before = 0
    count = 0
    for number in order_shards(recipe, len(images), seed):
        if window and (len(window) == COPY_STREAMS or count + images[number] > before):
            windows.append(window)
            window = []
            before += count
            count = 0
        window.append(number)
        count += images[number]
    return [*windows, window]


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
        order: the numbers of the shards, in the order in which they are copied.
        workers: number of threads that copy.

    Attributes:
        arrived: the numbers of the shards that have arrived.
        source: the store of the shards on Drive.
        retries: counts how often Drive failed and was tried again.

    Raises:
        ColabUtilsError: too little free disk, or other files in ``target``.
    """

    def __init__(
        self,
        source: Place,
        target: Path,
        index: ShardIndex,
        *,
        order: list[int],
        workers: int,
    ) -> None:
        self.target = target
        self.index = index
        self.arrived: set[int] = set()
        self._workers = workers
        self._order = order
        self._waiting = iter(order)
        self._lock = threading.Lock()
        self._error: ColabUtilsError | None = None
        read_target(source, target, index)
        check_space(target, [*index.files()], cached=is_on_drive(source))
        # A damaged file of an earlier copy is replaced, but not a file of the user.
        overwrite = _has_copies(target, index)
        self._job = Copying(source, target, overwrite=overwrite)
        self.source = self._job.source
        self.retries = self.source.retries
        with explain_write(target):
            self._job.target.make()
        self._thread = start_thread(self._run, "arrival")

    def stop(self) -> None:
        """Stop the copy after the piece that is being copied. A new copy continues there.

        If a read or a write hangs, this method does not wait for its end.
        """
        self.retries.stop.set()
        self._thread.join(2 * _STOP_S)

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
        try:
            with explain_write(self.target):
                self._bring_all()
        except CancelledError:
            self._fail(ColabUtilsError("The copy of the shards was stopped."))
        except Exception as error:
            self._fail(error)

    def _fail(self, error: Exception) -> None:
        """Note the error that ends the copy, and end the other threads."""
        kind = DriveLostError if isinstance(error, DriveLostError) else ColabUtilsError
        reason = str(error).removesuffix(".")
        with self._lock:
            self._error = self._error or kind(
                f"{reason}; {len(self.arrived)} of {len(self._order)} shards in "
                f"{self.target} are safe, and the same call continues there"
            )
        self.retries.stop.set()

    def _bring_all(self) -> None:
        """Copy all shards, or wait while another process of this machine copies them.

        Raises:
            CancelledError: the copy was stopped.
        """
        is_following = False
        while not (is_following and self._is_brought()):
            with lock_here(self.target / INDEX_NAME) as is_free:
                if is_free:
                    self._copy_all()
                    return
            is_following = True
            if self.retries.stop.wait(_LOOK_S):
                raise CancelledError

    def _is_brought(self) -> bool:
        """Note which shards another process has brought, and return whether it has finished."""
        for number in self._order:
            files = self.index.shards[number].files()
            if self._job.target.has_files(files):
                self.arrived.add(number)
        return self.is_complete and (self.target / INDEX_NAME).exists()

    def _copy_all(self) -> None:
        """Copy all shards, the first one alone, and write the index."""
        remove_leftovers(self._job.target)
        self._copy_next()
        others = []
        # If the system starts no more threads, this one does all the work.
        with suppress(ColabUtilsError):
            for _ in range(self._workers - 1):
                others.append(start_thread(self._copy_rest, "arrival"))
        self._copy_rest()
        for other in others:
            while other.is_alive() and not self.retries.stop.is_set():
                other.join(_LOOK_S)
            # A copy that hangs is left alone.
            other.join(_STOP_S)
        if not self.is_complete:
            raise CancelledError
        write_index(self.target, self.index)

    def _copy_rest(self) -> None:
        try:
            while self._copy_next():
                pass
        except CancelledError:
            pass
        except Exception as error:
            self._fail(error)

    def _copy_next(self) -> bool:
        """Copy the next shard, and return whether there was one.

        Raises:
            CancelledError: the copy was stopped.
        """
        with self._lock:
            number = next(self._waiting, None)
        if number is None:
            return False
        # Arrays come first, as they show the dataset of a tar.
        for file in reversed(self.index.shards[number].files()):
            if self.retries.stop.is_set():
                # Without this error, the shard would count as arrived.
                raise CancelledError
            self._job.copy_file(*file)
        self.arrived.add(number)
        return True


def _has_copies(target: Path, index: ShardIndex) -> bool:
    """Return whether an earlier copy has left shards of the same dataset in the target."""
    # An error means that the shards there belong to nobody.
    with suppress(ColabUtilsError):
        state = inspect_folder(target)
        return state.index is not None and state.index.fingerprint == index.fingerprint
    return False


def wait_for_file(path: Path, size: int) -> None:
    """Wait until an `Arrival` of another process has brought a file.

    Raises:
        ColabUtilsError: no process brings files to the folder any more.
    """
    seen_s = monotonic()
    store = open_store(path.parent)
    wanted = [(path.name, size, "")]
    while not store.has_files(wanted):
        with lock_here(path.with_name(INDEX_NAME)) as is_free:
            if not is_free:
                seen_s = monotonic()
        # On a disk that stalls, the last file may have come since the look above.
        if monotonic() - seen_s > _GRACE_S and not store.has_files(wanted):
            raise ColabUtilsError(
                f"{path} has not arrived, and the process that brings shards to its folder has "
                "ended. Make the dataset again: the work continues there."
            )
        sleep(_LOOK_S)


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
