"""The copy of shards from Drive during training, and the order in which training uses them."""

import json
import os
import sys
import threading
import warnings
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError, Future, wait
from contextlib import ExitStack, suppress
from itertools import chain
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil

from colab_utils.drive import DriveLostError, Retries, explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.files import hash_bytes, read_file, write_file
from colab_utils.loading.ranks import find_ranks
from colab_utils.places import Place
from colab_utils.processes import ThreadPool, start_thread
from colab_utils.shards.copy import COPY_STREAMS, Copying, check_space, merge_index, read_target
from colab_utils.shards.index import ShardIndex, write_index
from colab_utils.shards.lock import lock_here, remove_leftovers
from colab_utils.shards.plan import order_shards

# This file in the target folder tells all processes which shards have arrived.
STATUS_NAME = "arriving.json"
# Seconds between two checks for shards that have arrived.
POLL_S = 0.02
# Seconds to wait for the end of copies that were stopped. A read of Drive may hang for longer.
_STOP_S = 5.0


class Arrival:
    """A copy of the shards of ``index`` from ``source`` to ``target``, made by a thread.

    The first shard is copied alone, at the full speed of Drive. The others follow, several at a
    time: small ones first, the rest in a random order. A shard that an earlier copy left in
    ``target`` is not copied again if its checksum is right. If Drive fails, ``retries`` repeats
    the read. The index in ``target`` is written last.

    The copy may hold a lock (see `hold_arrival`). The other processes that train together on this
    machine then follow the copy with a `FollowedArrival`.

    Attributes:
        spans_s: begin and end of the copy of each shard, in seconds after ``began_s`` (a time of
            ``perf_counter``). The keys are the numbers of the shards, in the order of arrival.
        retries: the `Retries` of the copy. Its ``count`` is the number of times that Drive failed
            and was tried again.

    Raises:
        ColabUtilsError: too little free disk, or other files in ``target``.
    """

    # The first shard is copied alone, so that training begins early.
    _begins_alone = True

    def __init__(
        self,
        source: Place,
        target: Path,
        index: ShardIndex,
        *,
        lock: ExitStack,
        workers: int,
        seed: int,
        retries: Retries,
    ) -> None:
        self._prepare(
            target,
            images=[shard.images for shard in index.shards],
            order=order_shards(index.recipe, len(index.shards), seed),
            workers=workers,
            retries=retries,
        )
        self.index = index
        self.source = source
        self.key = make_key(index)
        with lock:
            self._start(lock)

    def _start(self, lock: ExitStack) -> None:
        """Check that the target can take this copy, and begin to copy."""
        source = self.source
        target = self.target
        index = self.index
        previous = read_target(source, target, index)
        self._previous = previous
        check_space(target, [*index.files()], cached=is_on_drive(source))
        # A status of an earlier arrival, or an index, shows that the shards in the target belong to
        # this copy.
        overwrite = previous is not None or bool(read_status(target, self.key))
        self._job = Copying(source, target, self.retries, overwrite=overwrite)
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
        self._begin(lock)

    def _prepare(
        self,
        target: Path,
        *,
        images: list[int],
        order: list[int],
        workers: int,
        retries: Retries,
    ) -> None:
        """Set the plan: the order of the shards, and the images of each."""
        self.target = target
        self.retries = retries
        self._workers = workers
        self._images = images
        self._order = order
        self._wanted = self._order
        # The copies that are running, by the number of the shard.
        self._moves: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._error: ColabUtilsError | None = None
        self._is_warned = False
        self.began_s = perf_counter()
        self.spans_s: dict[int, tuple[float, float]] = {}

    def _begin(self, lock: ExitStack) -> None:
        """Start the thread, which keeps the lock until it ends."""
        with explain_write(self.target):
            self._write_status()
        self._held = lock.pop_all()
        try:
            self._thread = start_thread(self._run, "arrival")
            # At its end, a program waits for the threads of all pools, before `atexit` does its
            # work. Without this, it would wait for a copy that hangs.
            vars(threading)["_register_atexit"](self.retries.stop.set)
        except ColabUtilsError as error:
            # The processes that follow read this error in the status. Without the error, they would
            # wait for shards for ever.
            self._error = error
            self._write_status()
            self._held.close()
            raise

    def stop(self) -> None:
        """Stop the copy after the piece that is being copied. A new copy continues there.

        If a read or a write hangs, this method does not wait for its end.
        """
        self._warn_of_failure()
        self.retries.stop.set()
        self._thread.join(2 * _STOP_S)

    def wait(self) -> None:
        """Wait until the copy has ended.

        Raises:
            ColabUtilsError: the copy failed.
        """
        self._thread.join()
        if self._error is not None:
            self._is_warned = True
            raise self._error

    @property
    def is_at_work(self) -> bool:
        """Return whether this process is copying the shards."""
        return self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """Return whether all shards have arrived."""
        return len(self.spans_s) == len(self._order)

    def plan_windows(self) -> list[list[int]]:
        """Return the shards in the order of their arrival, cut into windows. Training reads one
        window after the other.

        A window has one or more shards. A window of several shards has at most as many images as
        all earlier windows together. The number of its shards is at most the number that is copied
        at the same time.
        """
        windows: list[list[int]] = []
        window: list[int] = []
        before = 0
        images = 0
        for number in self._order:
            if window and (len(window) == COPY_STREAMS or images + self._images[number] > before):
                windows.append(window)
                window = []
                before += images
                images = 0
            window.append(number)
            images += self._images[number]
        return [*windows, window]

    def wait_for(self, shards: set[int], windows: list[list[int]]) -> Iterator[None]:
        """Yield None until the shards of a batch have arrived; ``windows`` are those of the epoch.

        Raises:
            ColabUtilsError: see `has`.
        """
        place = 0
        for number, window in enumerate(windows):
            if shards.intersection(window):
                place = number
        wanted = [*chain(*windows[place:])] or [*shards]
        # All other shards are copied after the wanted ones.
        with self._lock:
            self._wanted = [*wanted, *self._order]
        while not self.has(shards):
            yield None

    def has(self, shards: Collection[int]) -> bool:
        """Return whether these shards have arrived.

        Raises:
            DriveLostError: a shard is missing, and Drive is lost for good. The message says what is
                safe.
            ColabUtilsError: a shard is missing: it is damaged on Drive, the disk is full, or the
                copy was stopped.
        """
        with self._lock:
            missing = not self.spans_s.keys() >= set(shards)
            if missing and self._error is not None:
                raise self._error
        self._warn_of_failure()
        return not missing

    def _warn_of_failure(self) -> None:
        """Warn once if the work failed after the last shard, for example because Drive is full."""
        if self._error is None or self._is_warned or not self.is_complete:
            return
        self._is_warned = True
        warnings.warn(
            f"{self._error}. Training goes on with the shards in {self.target}.",
            ColabUtilsWarning,
            stacklevel=3,
        )

    def _run(self) -> None:
        with self._held:
            self._bring_all()

    def _bring_all(self) -> None:
        """Bring all shards. If this fails, write the reason to the status for all processes."""
        error: Exception = ColabUtilsError("The copy of the shards was stopped.")
        try:
            with explain_write(self.target):
                remove_leftovers(self.target)
                self._copy_all()
                if self.is_complete:
                    self._finish()
                    (self.target / STATUS_NAME).unlink(missing_ok=True)
                    return
        except CancelledError:
            pass
        except Exception as failure:
            error = failure
        kind = DriveLostError if isinstance(error, DriveLostError) else ColabUtilsError
        reason = str(error).removesuffix(".")
        with self._lock:
            self._error = kind(
                f"{reason}; {len(self.spans_s)} of {len(self._order)} shards in "
                f"{self.target} are safe, and the same call continues there"
            )
            try:
                self._write_status()
            except OSError:
                with suppress(OSError):
                    # If the old status stayed, readers would wait for ever.
                    (self.target / STATUS_NAME).unlink()

    def _finish(self) -> None:
        """Write the index after the last shard."""
        shards = tuple(self.index.shards[number] for number in self._order)
        index = merge_index(self.index, self._previous, shards, self.target)
        write_index(self.target, index)

    def _copy_all(self) -> None:
        """Copy shards until all have arrived, or until the copy is stopped."""
        pool = ThreadPool(self._workers, thread_name_prefix="arrival")
        try:
            while not self.retries.stop.is_set() and not self.is_complete:
                self._start_moves(pool)
                self.retries.stop.wait(POLL_S)
                ended = [number for number, move in self._moves.items() if move.done()]
                for number in ended:
                    self._moves.pop(number).result()
        finally:
            # If one copy fails, the others end, too. One that hangs is left alone.
            self.retries.stop.set()
            wait(self._moves.values(), _STOP_S)
            pool.shutdown(wait=False)

    def _start_moves(self, pool: ThreadPool) -> None:
        while len(self._moves) < self._workers:
            number = self._choose()
            if number is None:
                return
            self._moves[number] = pool.submit(self._fetch, number)

    def _choose(self) -> int | None:
        """Choose the shard to copy next. Return None if none can be begun now."""
        with self._lock:
            if self._moves and self._begins_alone and not self.spans_s:
                return None
            begun = self.spans_s.keys() | self._moves
            return next((number for number in self._wanted if number not in begun), None)

    def _fetch(self, number: int) -> None:
        began_s = perf_counter()
        for file in self.index.shards[number].files():
            if self.retries.stop.is_set():
                # Without this error, the shard would count as arrived.
                raise CancelledError
            self._job.copy_file(*file)
        self._note_shard(number, began_s)

    def _note_shard(self, number: int, began_s: float) -> None:
        """Write to the status that a shard has arrived."""
        with self._lock:
            self.spans_s[number] = began_s - self.began_s, perf_counter() - self.began_s
            self._write_status()

    def _write_status(self) -> None:
        status = json.dumps(self._describe()).encode()
        write_file(self.target / STATUS_NAME, status)

    def _describe(self) -> dict[str, Any]:
        """Return the status, which other processes read."""
        return {
            "key": self.key,
            "pid": os.getpid(),
            "arrived": sorted(self.spans_s),
            "error": str(self._error or ""),
        }


class FollowedArrival(Arrival):
    """The arrival of shards that another process of this machine copies, or has copied."""

    def _start(self, lock: ExitStack) -> None:
        self._arrived = ArrivedShards(self.target, self.key)

    def stop(self) -> None:
        """Do nothing: the other process goes on."""

    def wait(self) -> None:
        """Wait until the other process has ended its copy.

        Raises:
            ColabUtilsError: the copy failed.
        """
        while read_status(self.target, self.key):
            # This raises an error if the other process is gone.
            self.has(self._order)
            sleep(POLL_S)

    @property
    def is_at_work(self) -> bool:
        """Return False: another process copies the shards."""
        return False

    @property
    def is_complete(self) -> bool:
        """Return whether all shards have arrived."""
        return not read_status(self.target, self.key)

    def has(self, shards: Collection[int]) -> bool:
        """Return whether these shards have arrived.

        Raises:
            ColabUtilsError: a shard is missing, and no process copies it any more.
        """
        return all(self._arrived.has(shard) for shard in shards)


class ArrivedShards:
    """The shards that have arrived in a folder, as the status of their `Arrival` says."""

    def __init__(self, folder: Place, key: str) -> None:
        self.folder = folder
        self.key = key
        self._numbers: Collection[int] = ()

    def __reduce__(self) -> Any:
        return ArrivedShards, (self.folder, self.key)

    def has(self, shard: int) -> bool:
        """Return whether a shard has arrived.

        Raises:
            ColabUtilsError: the shard is missing, and no process copies it any more.
        """
        if shard in self._numbers:
            return True
        status = read_status(self.folder, self.key)
        self._numbers = status.get("arrived", range(sys.maxsize))
        if shard in self._numbers:
            return True
        if status["error"] or not psutil.pid_exists(status["pid"]):
            raise ColabUtilsError(
                status["error"]
                or f"The process that brings shards to {self.folder} has ended. Make the dataset "
                "again: the work continues there."
            )
        return False

    def wait_for(self, shard: int) -> None:
        """Wait until a shard has arrived.

        Raises:
            ColabUtilsError: see `has`.
        """
        while not self.has(shard):
            sleep(POLL_S)


def make_key(index: ShardIndex) -> str:
    """Return a key that identifies the arrival of these shards."""
    return hash_bytes(repr(sorted(index.files())).encode())


def hold_arrival(target: Path, key: str) -> ExitStack | None:
    """Lock a folder to bring shards there. Return None if another process brings them.

    If several processes train together, one of them on each machine brings the shards of a folder.
    The others follow that process, and wait while it prepares. A process that trains alone follows
    no other process, because the other one may end at any time.

    Args:
        target: The folder.
        key: The key of the shards, see `make_key`.

    Raises:
        ColabUtilsError: Another process brings other shards there.
    """
    lock = ExitStack()
    if find_ranks().count == 1:
        return lock
    while not lock.enter_context(lock_here(target / STATUS_NAME)):
        lock.close()
        status = _read_any_status(target)
        pid = status.get("pid")
        if type(pid) is int and psutil.pid_exists(pid) and not status.get("error"):
            if status.get("key") == key:
                return None
            raise ColabUtilsError(
                f"Process {pid} brings other shards to {target}. Name another folder, or wait "
                "until it has ended."
            )
        sleep(POLL_S)
    return lock


def read_status(target: Place, key: str) -> dict[str, Any]:
    """Return the status that the `Arrival` with this key has written.

    The status is empty if the arrival is complete, or if there is none.
    """
    status = _read_any_status(target)
    return status if status.get("key") == key else {}


def _read_any_status(target: Place) -> dict[str, Any]:
    """Return the status of an `Arrival` with any key, or an empty dict if there is none."""
    try:
        status = json.loads(read_file(target / STATUS_NAME))
    except UnavailableError:
        raise
    except (ColabUtilsError, OSError, ValueError, RecursionError):
        # A file that cannot be read as a status counts as no status.
        return {}
    return status if isinstance(status, dict) else {}
