"""The copy of shards from Drive during training, and the order in which they are used meanwhile."""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import suppress
from itertools import accumulate, chain
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import psutil

from colab_utils.drive import DriveLostError, Retries, explain_write, guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.files import has_size, hash_bytes, read_file, write_file
from colab_utils.places import Place
from colab_utils.processes import ThreadPool, start_thread
from colab_utils.shards.copy import COPY_STREAMS, Copying, check_space, read_target
from colab_utils.shards.index import ShardIndex, write_index
from colab_utils.shards.lock import remove_leftovers
from colab_utils.shards.plan import order_shards
from colab_utils.units import format_bytes

# The file lies in the target: it marks the folder, and tells all processes what has arrived.
STATUS_NAME = "arriving.json"
# Seconds between two looks for shards that arrive.
POLL_S = 0.02


class Arrival:
    """A copy of shards from ``source``, with this ``index``, to ``target``, in a thread.

    The first shard comes alone, at all the speed that Drive has; then several at a time, the small
    ones first, the others in a random order. What lies in ``target`` from an earlier copy is
    compared with its checksum in place of a copy, and copied again where it is damaged. Where Drive
    fails, ``retries`` try again; the index in ``target`` comes last.

    Where the shards take more than ``limit_bytes``, they take turns, and the copy never ends. A
    shard is removed when another one is needed earlier, and Drive still has it. Then ``target`` is
    a folder that was new or empty, marked by the file ``arriving.json``, and without an index.

    Attributes:
        rolls: whether shards take turns.
        spans_s: when the copy of each shard began and ended, seconds after ``began_s`` (of
            ``perf_counter``), by its number, in the order of arrival.
        retries: how many times Drive failed and was tried again.

    Raises:
        ColabUtilsError: too little free disk, other files in ``target``, or a limit below two
            shards.
    """

    def __init__(
        self,
        source: Place,
        target: Path,
        index: ShardIndex,
        *,
        workers: int,
        seed: int,
        retries: Retries,
        limit_bytes: float = math.inf,
    ) -> None:
        sizes = [shard.bytes + shard.arrays_bytes for shard in index.shards]
        self._prepare(
            target,
            sizes,
            images=[shard.images for shard in index.shards],
            order=order_shards(index.recipe, len(sizes), seed),
            workers=workers,
            retries=retries,
        )
        self.source = source
        self.index = index
        self.rolls = limit_bytes < index.bytes
        self._limit = limit_bytes
        least = min(index.bytes, 2 * max(self._sizes, default=0))
        if math.isnan(limit_bytes) or limit_bytes < least:
            raise ColabUtilsError(
                f"expected a limit that holds two shards, {least / 1e9:.3g} GB, found "
                f"{format_bytes(limit_bytes)}: allow more, or preprocess into smaller shards "
                "(--shard-mb)"
            )
        self.key = hash_bytes(repr(sorted(index.files())).encode())
        # that of an earlier arrival, or an index, tells that the shards in the target are of this
        # copy
        previous = read_target(source, target, index)
        status = read_status(target, self.key)
        is_marked = previous is None and status.get("rolls")
        if self.rolls and not is_marked and target.exists() and any(target.iterdir()):
            raise ColabUtilsError(
                "expected a new or empty folder for shards that take turns, found files in "
                f"{target}, which are never removed: name another folder, or leave limit_gb out"
            )
        files: list[tuple[str, int, str]] = []
        for shard, end in zip(index.shards, accumulate(self._sizes), strict=True):
            if end <= limit_bytes:
                files += shard.files()
        check_space(target, files, cached=is_on_drive(source))
        self._job = Copying(source, target, retries, overwrite=previous is not None or bool(status))
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
        self._begin()

    def _prepare(
        self,
        target: Path,
        sizes: list[int],
        *,
        images: list[int],
        order: list[int],
        workers: int,
        retries: Retries,
    ) -> None:
        """Note what there is to do: shards of these bytes and images, in this order."""
        self.target = target
        self.retries = retries
        self.rolls = False
        self._limit = math.inf
        self._workers = workers
        self._sizes = sizes
        self._images = images
        self._order = order
        self._wanted = self._order
        self._used: set[int] = set()
        self._moves: dict[int, Future[None]] = {}
        self._lock = threading.Lock()
        self._error: ColabUtilsError | None = None
        # Shards take turns, and no other one is wanted now.
        self._is_full = False
        self.began_s = perf_counter()
        self.spans_s: dict[int, tuple[float, float]] = {}

    def _begin(self) -> None:
        """Start the thread."""
        with explain_write(self.target):
            self._write_status()
        try:
            self._thread = start_thread(self._run, "arrival")
        except ColabUtilsError as error:
            # Else who reads along would wait for shards for ever.
            self._error = error
            self._write_status()
            raise

    def stop(self) -> None:
        """End at the next piece. What has arrived stays, and a new copy continues there."""
        self.retries.stop.set()
        self._thread.join()

    def wait(self) -> None:
        """Wait until the copy has ended; where shards take turns, until those that fit are there.

        Raises:
            ColabUtilsError: it cannot be done.
        """
        while self.is_at_work and not self._is_full:
            self._thread.join(POLL_S)
        if self._error is not None:
            raise self._error

    @property
    def is_at_work(self) -> bool:
        """Return whether this process is copying the shards."""
        return self._thread.is_alive()

    @property
    def is_complete(self) -> bool:
        """Return whether all shards have arrived and none will be removed."""
        return not self.rolls and len(self.spans_s) == len(self._sizes)

    def plan_windows(self, epoch: int) -> list[list[int]]:
        """Return the shards in the order of their arrival, in windows that are trained on one after
        another.

        A window holds at most as many images as came before it, or one shard, and at most as many
        shards as are copied at a time. Where shards take turns, every second epoch begins with
        those that the one before left on the disk.
        """
        order = self._order
        most = COPY_STREAMS
        if self.rolls:
            most = min(most, max(1, int(self._limit / max(self._sizes) / 2)))
            if epoch % 2:
                order = order[::-1]
        windows: list[list[int]] = []
        window: list[int] = []
        before = 0
        images = 0
        for number in order:
            if window and (len(window) == most or images + self._images[number] > before):
                windows.append(window)
                window = []
                before += images
                images = 0
            window.append(number)
            images += self._images[number]
        return [*windows, window]

    def wait_for(self, shards: set[int], windows: list[list[int]]) -> Iterator[None]:
        """Yield None until the shards of a batch have arrived, in an epoch of these windows.

        Raises:
            ColabUtilsError: see `has`.
        """
        place = 0
        for number, window in enumerate(windows):
            if shards.intersection(window):
                place = number
        wanted = [*chain(*windows[place:])]
        # Shards in use are kept. Where all stay, the others are copied, too.
        with self._lock:
            self._used = {*chain(*windows[max(0, place - 1) : place + 1])}
            self._wanted = wanted if self.rolls else [*wanted, *self._order]
        # Shards of earlier windows that were removed are read on Drive.
        if self.rolls:
            shards = shards.intersection(chain(*windows[place : place + 1]))
        while not self.has(shards):
            yield None

    def has(self, shards: Collection[int]) -> bool:
        """Return whether these shards have arrived.

        Raises:
            DriveLostError: they are not, and Drive is lost for good; the message says what is safe.
            ColabUtilsError: likewise, where a shard is damaged on Drive too, the disk is full, or
                the copy was stopped.
        """
        with self._lock:
            missing = not self.spans_s.keys() >= set(shards)
            if missing and self._error is not None:
                raise self._error
            return not missing

    def _run(self) -> None:
        error: Exception = ColabUtilsError("expected all shards, found that the copy was stopped")
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
                f"{reason}; {len(self.spans_s)} of {len(self._sizes)} shards in "
                f"{self.target} are safe, and the same call continues there"
            )
            try:
                self._write_status()
            except OSError:
                with suppress(OSError):
                    # With the old status, readers would wait for ever.
                    (self.target / STATUS_NAME).unlink()

    def _finish(self) -> None:
        """Do what comes after the last shard."""
        write_index(self.target, self.index)

    def _copy_all(self) -> None:
        """Copy and remove shards until all have arrived, or until the copy is stopped."""
        if self.rolls:
            self._keep_what_fits()
        with ThreadPool(self._workers, thread_name_prefix="arrival") as pool:
            try:
                while not self.retries.stop.is_set() and not self.is_complete:
                    self._start_moves(pool)
                    self._is_full = self.rolls and not self._moves
                    self.retries.stop.wait(POLL_S)
                    ended = [number for number, move in self._moves.items() if move.done()]
                    for number in ended:
                        self._moves.pop(number).result()
            finally:
                # Where one move failed, the others end, too.
                self.retries.stop.set()

    def _keep_what_fits(self) -> None:
        """Keep the shards that an earlier session left, as far as there is room for them."""
        for number, shard in enumerate(self.index.shards):
            if not any((self.target / name).exists() for name, _, _ in shard.files()):
                continue
            if self._fits(number):
                self._fetch(number)
            else:
                self._remove(number)

    def _start_moves(self, pool: ThreadPool) -> None:
        while len(self._moves) < self._workers:
            choice = self._choose()
            if choice is None:
                return
            work, number = choice
            self._moves[number] = pool.submit(work, number)

    def _fits(self, number: int) -> bool:
        kept = self.spans_s.keys() | self._moves
        return self._sizes[number] + sum(self._sizes[other] for other in kept) <= self._limit

    def _choose(self) -> tuple[Callable[[int], None], int] | None:
        """Choose the next shard to copy or one to remove, or None if neither can be done now."""
        with self._lock:
            here = self.spans_s.keys() | self._moves
            number = next((number for number in self._wanted if number not in here), None)
            # The first shard comes alone.
            if number is None or (self._moves and not self.spans_s):
                return None
            if self._fits(number):
                return self._fetch, number
            ranks = {shard: place for place, shard in enumerate(self._wanted)}
            unused = self.spans_s.keys() - self._used
            leaving = max(unused, key=lambda shard: ranks.get(shard, math.inf), default=number)
            if ranks.get(leaving, math.inf) <= ranks[number]:
                return None
            del self.spans_s[leaving]
            return self._remove, leaving

    def _fetch(self, number: int) -> None:
        began_s = perf_counter()
        for file in self.index.shards[number].files():
            if self.retries.stop.is_set():
                # Else the index would be written without this shard.
                raise CancelledError
            self._job.copy_file(*file)
        self._note_shard(number, began_s)

    def _note_shard(self, number: int, began_s: float) -> None:
        """Tell all processes that a shard is there."""
        with self._lock:
            self.spans_s[number] = began_s - self.began_s, perf_counter() - self.began_s
            self._write_status()

    def _remove(self, number: int) -> None:
        """Remove a shard from the disk, if its source still has it."""
        files = self.index.shards[number].files()

        def is_on_source() -> bool:
            with guard_drive(self.source):
                return all(has_size(self.source / name, size) for name, size, _ in files)

        if not self.retries.run(is_on_source):
            raise ColabUtilsError(
                f"expected {files[0][0]} in {self.source}, found none of its size: that in "
                f"{self.target} is the last one, and is kept: copy it back, then run the same again"
            )
        for name, _, _ in files:
            # a worker may hold it open, and its room with it
            with suppress(FileNotFoundError), open(self.target / name, "rb+") as file:
                (self.target / name).unlink()
                file.truncate(0)

    def _write_status(self) -> None:
        status = {
            "key": self.key,
            "rolls": self.rolls,
            "pid": os.getpid(),
            "arrived": list(self.spans_s),
            "error": str(self._error or ""),
        }
        write_file(self.target / STATUS_NAME, json.dumps(status).encode())


class ArrivedShards:
    """The shards that have arrived in a folder, from the status that their `Arrival` writes."""

    def __init__(self, folder: Place, key: str) -> None:
        self.folder = folder
        self.key = key
        self._numbers: Collection[int] = ()

    def __reduce__(self) -> Any:
        return ArrivedShards, (self.folder, self.key)

    def has(self, shard: int) -> bool:
        """Return whether a shard has arrived.

        Raises:
            ColabUtilsError: it is not, and nobody brings it any more.
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
                or f"expected shards to arrive in {self.folder}, found that the process that "
                "brings them has ended: make the dataset again, it continues there"
            )
        return False

    def wait_for(self, shard: int) -> None:
        """Wait until a shard is there.

        Raises:
            ColabUtilsError: see `has`.
        """
        while not self.has(shard):
            sleep(POLL_S)


def read_status(target: Place, key: str) -> dict[str, Any]:
    """Return the status that an `Arrival` of the shards of this key has written, for any process;
    empty if it is complete.
    """
    try:
        status = json.loads(read_file(target / STATUS_NAME))
    except UnavailableError:
        raise
    except (ColabUtilsError, OSError, ValueError, RecursionError):
        # of a file that is no status, nothing is known
        return {}
    return status if isinstance(status, dict) and status.get("key") == key else {}
