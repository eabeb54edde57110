"""Shards as a dataset that is trained on while they are still copied from Drive: the copy, and the
order meanwhile.
"""

import json
import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import accumulate, chain
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
import psutil

from colab_utils.drive import DriveLostError, Retries, explain_write, guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import has_size, hash_bytes, read_file, write_file
from colab_utils.loading.batch import Transforms
from colab_utils.loading.dataset import ShardDataset, ShardFiles, load_shard
from colab_utils.require import require_local_path
from colab_utils.shards.copy import COPY_STREAMS, Copying, check_space, read_target
from colab_utils.shards.index import ShardIndex, read_index, write_index
from colab_utils.shards.lock import remove_leftovers
from colab_utils.units import format_bytes

# in the target: marks the folder, and tells all processes what has arrived
STATUS_NAME = "arriving.json"
_READERS = 32  # of the tables, which lie at the start of a small file beside each shard
_POLL_S = 0.02


class Arrival:
    """A copy of shards under way in a thread: from ``source``, whose ``index`` this is, into
    ``target``.

    The first shard comes alone, at all the speed that Drive has; then several at a time, in a
    random order. What lies in ``target`` from an earlier copy is compared with its checksum in
    place of a copy, and copied again where it is damaged. Where Drive fails, ``retries`` try again;
    the index in ``target`` comes last.

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
        source: Path,
        target: Path,
        index: ShardIndex,
        *,
        workers: int,
        seed: int,
        retries: Retries,
        limit_bytes: float = math.inf,
    ) -> None:
        self.source = source
        self.target = target
        self.index = index
        self.retries = retries
        self.rolls = limit_bytes < index.bytes
        self._limit = limit_bytes
        self._workers = workers
        self._sizes = [shard.bytes + shard.arrays_bytes for shard in index.shards]
        # of nan neither is true
        if not limit_bytes >= (least := min(index.bytes, 2 * max(self._sizes, default=0))):
            found = (
                f"{format_bytes(limit_bytes)}: allow more, or preprocess into smaller shards "
                "(--shard-mb)"
            )
            raise ColabUtilsError(
                f"expected a limit that holds two shards, {least / 1e9:.3g} GB, found {found}"
            )
        self.key = hash_bytes(repr(sorted(index.files())).encode())
        # that of an earlier arrival, or an index, tells that the shards in the target are of this
        # copy
        previous = read_target(source, target, index)
        status = _read_status(target, self.key)
        is_marked = previous is None and status.get("rolls")
        if self.rolls and not is_marked and target.exists() and any(target.iterdir()):
            found = (
                f"files in {target}, which are never removed: name another folder, or leave "
                "limit_gb out"
            )
            raise ColabUtilsError(
                f"expected a new or empty folder for shards that take turns, found {found}"
            )
        fitting = zip(index.shards, accumulate(self._sizes), strict=True)
        files = [file for shard, end in fitting if end <= limit_bytes for file in shard.files()]
        check_space(target, files, cached=is_on_drive(source))
        self._job = Copying(source, target, retries, overwrite=previous is not None or bool(status))
        self._order: list[int] = np.random.default_rng(seed).permutation(len(index.shards)).tolist()
        self._wanted = self._order
        self._used = set[int]()
        self._moves = dict[int, Future[None]]()
        self._lock = threading.Lock()
        self._error: ColabUtilsError | None = None
        self.began_s = perf_counter()
        self.spans_s: dict[int, tuple[float, float]] = {}
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
            self._write_status()
        self._thread = threading.Thread(target=self._run, name="arrival", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End at the next piece; what has arrived stays, and a copy made anew continues there."""
        self._job.stop.set()
        self._thread.join()

    @property
    def is_complete(self) -> bool:
        """Whether all shards have arrived, to stay."""
        return not self.rolls and len(self.spans_s) == len(self.index.shards)

    def plan_windows(self, epoch: int) -> list[list[int]]:
        """The shards in the order of their arrival, in windows that are trained on one after
        another.

        A window holds as many shards as came before it, and at most as many as are copied at a
        time. Where shards take turns, every second epoch begins with those that the one before left
        on the disk.
        """
        order = self._order[::-1] if self.rolls and epoch % 2 else self._order
        most = (
            min(COPY_STREAMS, max(1, int(self._limit / max(self._sizes) / 2)))
            if self.rolls
            else COPY_STREAMS
        )
        windows: list[list[int]] = []
        while (first := sum(map(len, windows))) < len(order):
            windows.append(order[first : first + min(most, max(1, first))])
        return windows

    def wait_for(self, shards: set[int], windows: list[list[int]]) -> Iterator[None]:
        """Give None again and again until the shards of a batch are there, in an epoch of these
        windows.

        Raises:
            ColabUtilsError: see `has`.
        """
        place = max(
            (place for place, window in enumerate(windows) if shards & set(window)), default=0
        )
        wanted = [*chain(*windows[place:])]
        with self._lock:  # those in use are kept, and where all stay, the others are copied, too
            self._used = {*chain(*windows[max(0, place - 1) : place + 1])}
            self._wanted = wanted if self.rolls else [*wanted, *self._order]
        if self.rolls:  # what is left of earlier windows is read on Drive, if it was removed
            shards = shards & {*chain(*windows[place : place + 1])}
        while not self.has(shards):
            yield None

    def has(self, shards: Collection[int]) -> bool:
        """Whether these shards are there.

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
                    write_index(self.target, self.index)
                    (self.target / STATUS_NAME).unlink(missing_ok=True)
                    return
        except CancelledError:
            pass
        except Exception as found:
            error = found
        kind = DriveLostError if isinstance(error, DriveLostError) else ColabUtilsError
        with self._lock:
            safe = (
                f"{len(self.spans_s)} of {len(self.index.shards)} shards in {self.target} are safe"
            )
            self._error = kind(f"{error}; {safe}, and the same call continues there")
            try:
                self._write_status()
            except OSError:
                with suppress(OSError):
                    (self.target / STATUS_NAME).unlink()  # or readers would wait for ever

    def _copy_all(self) -> None:
        """Copy and remove shards until all are here; where they take turns, until the copy is
        stopped.
        """
        # what an earlier session left
        for number, shard in enumerate(self.index.shards if self.rolls else ()):
            if any((self.target / name).exists() for name, _, _ in shard.files()):
                self._fetch(number) if self._fits(number) else self._remove(number)
        with ThreadPoolExecutor(self._workers, thread_name_prefix="arrival") as pool:
            try:
                while not self._job.stop.is_set() and not self.is_complete:
                    while len(self._moves) < self._workers and (move := self._choose()):
                        work, number = move
                        self._moves[number] = pool.submit(work, number)
                    self._job.stop.wait(_POLL_S)
                    for number in [number for number, work in self._moves.items() if work.done()]:
                        self._moves.pop(number).result()
            finally:
                self._job.stop.set()  # one failed: the others end, too

    def _fits(self, number: int) -> bool:
        return (
            self._sizes[number] + sum(self._sizes[one] for one in self.spans_s.keys() | self._moves)
            <= self._limit
        )

    def _choose(self) -> tuple[Callable[[int], None], int] | None:
        """Copy the next shard, or remove one where there is no room for it; None where neither can
        be done now.
        """
        with self._lock:
            here = self.spans_s.keys() | self._moves
            number = next((number for number in self._wanted if number not in here), None)
            if number is None or (self._moves and not self.spans_s):  # the first shard comes alone
                return None
            if self._fits(number):
                return self._fetch, number
            rank = {one: place for place, one in enumerate(self._wanted)}
            later = {
                one for one in self.spans_s if rank.get(one, math.inf) > rank[number]
            } - self._used
            if not later:
                return None
            leaving = max(later, key=lambda one: rank.get(one, math.inf))
            del self.spans_s[leaving]
            return self._remove, leaving

    def _fetch(self, number: int) -> None:
        began_s = perf_counter()
        for file in self.index.shards[number].files():
            if self._job.stop.is_set():
                raise CancelledError  # or the index would be written without this shard
            self._job.copy_file(*file)
        with self._lock:
            self.spans_s[number] = began_s - self.began_s, perf_counter() - self.began_s
            self._write_status()

    def _remove(self, number: int) -> None:
        """Remove a shard from the disk; never the only one left."""
        files = self.index.shards[number].files()

        look = guard_drive(self.source)(
            lambda: all(has_size(self.source / name, size) for name, size, _ in files)
        )
        if not self.retries.run(look):
            cure = (
                f"that in {self.target} is the last one, and is kept: copy it back, then run "
                "the same again"
            )
            raise ColabUtilsError(
                f"expected {files[0][0]} in {self.source}, found none of its size: {cure}"
            )
        for name, _, _ in files:
            # a worker may hold it open, and its room with it
            with suppress(FileNotFoundError), open(self.target / name, "rb+") as file:
                (self.target / name).unlink()
                file.truncate(0)

    def _write_status(self) -> None:
        arrived = list(self.spans_s)
        error = str(self._error or "")
        status = {
            "key": self.key,
            "rolls": self.rolls,
            "pid": os.getpid(),
            "arrived": arrived,
            "error": error,
        }
        write_file(self.target / STATUS_NAME, json.dumps(status).encode())


def _read_status(target: Path, key: str) -> dict[str, Any]:
    """What an `Arrival` of the shards of this key says about itself, to any process; empty where it
    is complete.
    """
    try:
        status = json.loads(read_file(target / STATUS_NAME))
    except DriveLostError:
        raise
    except (ColabUtilsError, OSError, ValueError, RecursionError):
        # of a file that is no status, nothing is known
        return {}
    return status if isinstance(status, dict) and status.get("key") == key else {}


class _ArrivingFiles(ShardFiles):
    """Files of shards that arrive: those of one that is not there are waited for, or read in
    ``source`` where shards take turns; in any process.
    """

    def __init__(self, source: Path, target: Path, key: str, *, rolls: bool) -> None:
        super().__init__(target)
        self._drive = ShardFiles(source)
        self._key = key
        self._rolls = rolls
        self._arrived: Collection[int] = ()

    def __reduce__(self) -> Any:
        return partial(_ArrivingFiles, rolls=self._rolls), (
            self._drive.folder,
            self.folder,
            self._key,
        )

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        if not self._rolls:
            self._wait_for(shard)
        try:
            super().read_into(shard, name, start, buffer)
        except ColabUtilsError:
            if not self._rolls:
                raise
            self._open.cache_clear()  # it was removed, and may come back
            self._drive.read_into(shard, name, start, buffer)

    def _wait_for(self, shard: int) -> None:
        while shard not in self._arrived:
            status = _read_status(self.folder, self._key)
            self._arrived = status.get("arrived", range(sys.maxsize))
            if shard in self._arrived:
                return
            if status["error"] or not psutil.pid_exists(status["pid"]):
                ended = (
                    f"expected shards to arrive in {self.folder}, found that the process that "
                    "copied them has ended"
                )
                raise ColabUtilsError(
                    status["error"] or f"{ended}: make ArrivingShards again, it continues there"
                )
            sleep(_POLL_S)


class ArrivingShards(ShardDataset):
    """A `ShardDataset` whose shards are copied from Drive to the SSD while it is used.

    The copy begins at once, in a thread. A loader made over it by `make_loader` begins with the
    first shard that has arrived and goes on with the next ones, in a random order; every image
    comes once in each epoch, from the first one on. When all have arrived it reads the SSD alone.
    An image whose shard has not arrived is waited for, in the workers of any ``DataLoader``, too.

    Args:
        source: folder of shards, usually on Drive.
        target: folder to copy into, usually on the SSD.
        workers: shards copied at the same time (threads).
        limit_gb: most that shards may take in ``target``, in GB (1e9 bytes), where the disk is
            smaller than all of them: they take turns there, in every epoch. ``target`` must then be
            a new or empty folder, or one that such a run left.
        seed: of the order in which the shards are copied.
        transforms: as for `ShardDataset`.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        arrival: the copy: ``spans_s`` of each shard that has arrived, ``is_complete``; None in
            other processes.

    Raises:
        ColabUtilsError: as `ShardDataset` and `copy_shards` do.

    Example:
        >>> ArrivingShards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at ...
    """

    def __init__(
        self,
        source: str | Path,
        target: str | Path,
        *,
        workers: int = 4,
        limit_gb: float | None = None,
        seed: int = 0,
        transforms: Transforms | None = None,
        contiguous_labels: bool = False,
    ) -> None:
        source = require_local_path(source)
        target = require_local_path(target)
        retries = Retries()
        index = read_index(source, retries)
        arrival = Arrival(
            source,
            target,
            index,
            workers=workers,
            seed=seed,
            retries=retries,
            limit_bytes=math.inf if limit_gb is None else limit_gb * 1e9,
        )
        load = partial(load_shard, source, index=index, retries=retries)
        # one after the other, 150 shards take Drive 10 to 90 seconds
        with ThreadPoolExecutor(_READERS) as pool:
            try:
                shards = list(pool.map(load, index.shards))
            except BaseException:
                arrival.stop()
                raise
        files = _ArrivingFiles(source, target, arrival.key, rolls=arrival.rolls)
        self._open(files, index, shards, transforms, contiguous_labels=contiguous_labels)
        self.arrival: Arrival | None = arrival

    def stop(self) -> None:
        """End the copy at its next piece; what has arrived stays, and a new `ArrivingShards`
        continues there.
        """
        if self.arrival is not None:
            self.arrival.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "arrival": None}  # the copy stays in the process that began it
