"""Shards as a dataset that is trained on while they are still copied from Drive: the copy, and the order meanwhile."""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import warnings
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.drive import DriveLostError, DriveProfile, Retries, get_profile, guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.dataset import ShardDataset, ShardFiles, load_shard
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.transforms import Transforms
from colab_utils.runtime import format_bytes
from colab_utils.shards.copy import Copying, check_space, has_size, read_target
from colab_utils.shards.format import ShardIndex, explain_write, hash_bytes, read_index, remove_leftovers, write_index

__all__ = ["Arrival", "ArrivingShards", "JoinLog", "plan_batches"]

STATUS_NAME = "arriving.json"  # in the target: marks the folder, and tells other processes what has arrived

_READERS = 32  # of the tables, which lie at the start of a small file beside each shard
_LOOKED_AT = 16  # batches of images among which a batch of one kind is looked for
_IN_FLIGHT = 32  # batches after which those before them have been read: more than workers have ahead
_POLL_S = 0.02


class Arrival:
    """A copy of shards under way in a thread: from ``source``, whose ``index`` this is, into ``target``.

    The first shard comes alone, at all the speed that Drive has; then several at a time, in a random order. What
    lies in ``target`` from an earlier copy is compared with its checksum in place of a copy, and copied again where it
    is damaged. Where Drive fails, ``retries`` try again; the index in ``target`` comes last.

    Where ``limit_bytes`` are less than the shards take, they take turns, and the copy never ends. Half of them are
    trained on while the other half arrives. A shard is removed when it was used, another one needs its room, and Drive
    still has it. Then ``target`` is a folder that this class made and marked itself, and has no index.

    Attributes:
        window: how many shards are used together where they take turns; None where all of them stay.
        spans_s: when the copy of each shard began and ended, seconds after ``began_s`` (of ``perf_counter``), by its
            number, in the order of arrival.
        retries: how many times Drive failed and was tried again, and whether it fails now.

    Raises:
        ColabUtilsError: too little free disk, other files in ``target``, or a limit below two shards.
    """

    def __init__(
        self, source: Path, target: Path, index: ShardIndex, *, profile: DriveProfile | None, workers: int, seed: int,
        retries: Retries, limit_bytes: float = math.inf,
    ) -> None:  # fmt: skip
        self.target, self.index, self.retries = target, index, retries
        self._source, self._workers, self._limit = source, workers, limit_bytes
        self._sizes = [shard.bytes + shard.arrays_bytes for shard in index.shards]
        self.window = None if limit_bytes >= index.bytes else self._choose_window()
        self._key = hash_bytes(repr(sorted(index.files())).encode())
        overwrite = self._check_target()
        fitting = [end <= limit_bytes for end in accumulate(self._sizes)]
        files = [file for shard, fits in zip(index.shards, fitting, strict=True) if fits for file in shard.files()]
        check_space(target, files, cached=is_on_drive(source))
        self._job = Copying(source, target, profile, retries, overwrite=overwrite)
        self.order: list[int] = np.random.default_rng(seed).permutation(len(index.shards)).tolist()
        self._wanted, self._used, self._moving = self.order, set[int](), set[int]()
        self._news = threading.Condition()
        self._error: ColabUtilsError | None = None
        self._told = False
        self.began_s = perf_counter()
        self.spans_s: dict[int, tuple[float, float]] = {}
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
            self._write_status()
        self._thread = threading.Thread(target=self._run, name="arrival", daemon=True)
        self._thread.start()

    def _choose_window(self) -> int:
        least = sum(sorted(self._sizes)[-2:])
        if self._limit < least:
            raise ColabUtilsError(
                f"expected a limit that holds two shards, {least / 1e9:.3g} GB, found {format_bytes(self._limit)}: "
                "allow more, or preprocess into smaller shards (--shard-mb)"
            )
        return max(1, int(self._limit / float(np.mean(self._sizes))) // 2)

    def _check_target(self) -> bool:
        """Whether damaged shards in the target may be replaced: an index lists them, or an earlier arrival left them."""
        previous = read_target(self._source, self.target, self.index)
        status = _read_status(self.target)
        is_ours = previous is None and status.get("key") == self._key
        if self.window and not (is_ours and status["rolls"]) and self.target.exists() and any(self.target.iterdir()):
            raise ColabUtilsError(
                f"expected a new or empty folder for shards that take turns (limit_gb), found files in {self.target}, "
                "which are never removed: name another folder, or leave limit_gb out"
            )
        return is_ours or previous is not None

    def stop(self) -> None:
        """End at the next piece; what has arrived stays, and a copy made anew continues there."""
        self._job.stop.set()
        self._thread.join()

    @property
    def is_complete(self) -> bool:
        """Whether all shards have arrived, to stay."""
        return self.window is None and len(self.spans_s) == len(self.index.shards)

    def want(self, used: Collection[int], wanted: Iterable[int]) -> None:
        """Keep the shards that are in use, and copy those that are wanted in this order (then all, if all stay)."""
        with self._news:
            self._used, self._wanted = set(used), [*wanted, *(() if self.window else self.order)]
            self._news.notify_all()

    def list_arrived(self, *, more_than: int = -1) -> list[int]:
        """Numbers of the shards there are, in the order of arrival.

        Raises:
            DriveLostError: there are not ``more_than`` so many, and Drive is lost for good; the message says what is
                safe.
            ColabUtilsError: likewise, where a shard is damaged on Drive too, the disk is full, or the copy was stopped.
        """
        with self._news:
            if self._error is not None and len(self.spans_s) <= more_than:
                raise self._error
            if self.retries.failing and self.spans_s and not self._told:
                self._told = True
                warnings.warn(
                    f"Drive does not answer: it is tried again, and training goes on with the {self._count_arrived()}",
                    ColabUtilsWarning,
                    stacklevel=2,
                )
            return list(self.spans_s)

    def wait_for(self, number: int) -> None:
        """Return when this shard has arrived; raises as `list_arrived`."""
        with self._news:
            self._news.wait_for(lambda: number in self.spans_s or self._error is not None)
            if number not in self.spans_s and self._error is not None:
                raise self._error

    def _count_arrived(self) -> str:
        return f"{len(self.spans_s)} of {len(self.index.shards)} shards in {self.target}"

    def _run(self) -> None:
        error: Exception | None = None
        try:
            with explain_write(self.target):
                remove_leftovers(self.target)
                self._copy_all()
                if self.is_complete:
                    write_index(self.target, self.index)
                    (self.target / STATUS_NAME).unlink()
                    return
        except CancelledError:
            pass
        except Exception as found:
            error = found
        kept = f"{self._count_arrived()} are safe, and the same call continues there"
        if error is None or isinstance(error, DriveLostError):
            error = type(error or ColabUtilsError())(
                f"{error or 'expected all shards, found the copy stopped'}; {kept}"
            )
        elif not isinstance(error, ColabUtilsError):
            error = ColabUtilsError(f"expected to copy shards to {self.target}, found: {error!r}; {kept}")
        with self._news:
            self._error = error
            self._news.notify_all()
        with suppress(OSError):
            self._write_status()

    def _copy_all(self) -> None:
        for number, shard in enumerate(self.index.shards if self.window else ()):  # what an earlier session left
            if any((self.target / name).exists() for name, _, _ in shard.files()):
                self._fetch(number) if self._fits(number) else self._remove(number)
        with ThreadPoolExecutor(self._workers, thread_name_prefix="arrival") as pool:
            for work in [pool.submit(self._work) for _ in range(self._workers)]:
                work.result()

    def _work(self) -> None:
        try:
            while (number := self._choose()) is not None:
                self._fetch(number)
        except CancelledError:
            pass  # stopped, or another thread says why
        except BaseException:
            self._job.stop.set()
            raise

    def _fits(self, number: int) -> bool:
        return self._sizes[number] + sum(self._sizes[one] for one in self.spans_s.keys() | self._moving) <= self._limit

    def _choose(self) -> int | None:
        """The next shard to copy, once there is room for it; None when it is over."""
        while not self._job.stop.is_set():
            with self._news:
                here = self.spans_s.keys() | self._moving
                number = next((number for number in self._wanted if number not in here), None)
                if number is None and self.window is None:
                    return None
                is_first = not self.spans_s and bool(self._moving)
                if number is not None and not is_first and self._fits(number):
                    self._moving.add(number)
                    return number
                kept = self._used.union(self._wanted)
                leaving = next((one for one in self.spans_s if one not in kept), None)
                if number is None or is_first or leaving is None:
                    self._news.wait(0.2)
                    continue
                self._moving.add(leaving)
                span = self.spans_s.pop(leaving)
            try:
                self._remove(leaving)
            except BaseException:
                self.spans_s[leaving] = span
                raise
            finally:
                self._moving.discard(leaving)
        return None

    def _fetch(self, number: int) -> None:
        began_s = perf_counter()
        for file in self.index.shards[number].files():
            if self._job.stop.is_set():
                raise CancelledError  # or the index would be written without this shard
            self._job.copy_file(*file)
        with self._news:
            self._moving.discard(number)
            self.spans_s[number] = began_s - self.began_s, perf_counter() - self.began_s
            if self.window is None:
                self._write_status()
            self._news.notify_all()

    def _remove(self, number: int) -> None:
        """Remove a shard from the disk; never the only one left."""
        files = self.index.shards[number].files()

        def look() -> bool:
            with guard_drive(self._source):
                return all(has_size(self._source / name, size) for name, size, _ in files)

        if not self.retries.run(look):
            raise ColabUtilsError(
                f"expected {files[0][0]} in {self._source}, found none of its size: that in {self.target} is the last "
                "one, and is kept. Copy it back, then run the same again"
            )
        for name, _, _ in files:
            # a worker may hold it open, and its room with it
            with suppress(FileNotFoundError), open(self.target / name, "rb+") as file:
                (self.target / name).unlink()
                file.truncate(0)

    def _write_status(self) -> None:
        status = {
            "key": self._key, "rolls": bool(self.window), "pid": os.getpid(), "arrived": list(self.spans_s),
            "error": str(self._error or ""),
        }  # fmt: skip
        temporary = self.target / f".{STATUS_NAME}.part"
        temporary.write_text(json.dumps(status))
        temporary.replace(self.target / STATUS_NAME)


def _read_status(target: Path) -> dict[str, Any]:
    """What an `Arrival` wrote about itself; empty where there is none, or it is complete."""
    try:
        status = json.loads((target / STATUS_NAME).read_text())
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


class _ArrivingFiles(ShardFiles):
    """Files of shards that arrive: those of one that is not there yet are waited for, in any process.

    Where shards take turns, they are read in ``source`` instead.
    """

    def __init__(self, source: Path, target: Path, *, rolls: bool, arrival: Arrival | None = None) -> None:
        super().__init__(target, None)
        self._drive, self._rolls = ShardFiles(source, None), rolls
        self._arrival, self._process = arrival, os.getpid()
        self._arrived: Collection[int] = ()

    def __reduce__(self) -> Any:  # the copy stays in the process that began it
        return partial(_ArrivingFiles, rolls=self._rolls), (self._drive.folder, self.folder)

    def read_into(self, shard: int, name: str, start: int, buffer: Any) -> None:
        if not self._rolls:
            self._wait_for(shard)
            super().read_into(shard, name, start, buffer)
            return
        for _ in range(2):
            try:
                super().read_into(shard, name, start, buffer)
                return
            except ColabUtilsError:
                self._open.cache_clear()  # it was removed, and may have come back since
        self._drive.read_into(shard, name, start, buffer)

    def _wait_for(self, shard: int) -> None:
        import psutil

        if self._arrival is not None and self._process == os.getpid():
            self._arrival.wait_for(shard)
            return
        while shard not in self._arrived:
            status = _read_status(self.folder)
            self._arrived = status.get("arrived", range(sys.maxsize))
            if shard in self._arrived:
                return
            if status["error"] or not psutil.pid_exists(status["pid"]):
                ended = f"expected shards to arrive in {self.folder}, found that the process that copied them has ended"
                raise ColabUtilsError(status["error"] or f"{ended}: make ArrivingShards again, it continues there")
            sleep(_POLL_S)


class ArrivingShards(ShardDataset):
    """A `ShardDataset` whose shards are copied from Drive to the SSD while it is used.

    The copy begins at once, in a thread. A loader made over it by `make_loader` begins with the first shard that has
    arrived and goes on with those there are, in a random order; every image comes once in each epoch, from the
    first one on. When all have arrived it reads the SSD alone. An image whose shard has not arrived is waited for,
    in the workers of any ``DataLoader``, too.

    Args:
        source: folder of shards, usually on Drive.
        target: folder to copy into, usually on the SSD.
        profile: the speed at which ``source`` is read (see `colab_utils.drive`); ``None`` is full speed.
        workers: shards copied at the same time (threads).
        limit_gb: most that shards may take in ``target``, in GB (1e9 bytes), where the disk is smaller than all of
            them: they take turns there, in every epoch. Half of them are trained on while the other half arrives.
            ``target`` must then be a new or empty folder, or one that such a run left.
        seed: of the order in which the shards are copied.
        transforms: as for `ShardDataset`.
        contiguous_labels: map category ids to 1 to K.

    Attributes:
        arrival: the copy: ``spans_s`` of each shard that has arrived, ``is_complete``; None in other processes.

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
        limit_gb: float | None = None, seed: int = 0, transforms: Transforms | None = None,
        contiguous_labels: bool = False,
    ) -> None:  # fmt: skip
        source, target, speed, retries = Path(source), Path(target), get_profile(profile), Retries()
        index = read_index(source, retries)
        arrival = Arrival(
            source, target, index, profile=speed, workers=workers, seed=seed, retries=retries,
            limit_bytes=math.inf if limit_gb is None else limit_gb * 1e9,
        )  # fmt: skip
        load = partial(load_shard, source, index=index, profile=speed, retries=retries)
        with ThreadPoolExecutor(_READERS) as pool:  # one after the other, 150 shards take Drive 10 to 90 seconds
            try:
                shards = list(pool.map(load, index.shards))
            except BaseException:
                arrival.stop()
                raise
        files = _ArrivingFiles(source, target, rolls=arrival.window is not None, arrival=arrival)
        self._open(files, index, shards, transforms, contiguous_labels=contiguous_labels)
        self.arrival = arrival

    def stop(self) -> None:
        """End the copy at its next piece; what has arrived stays, and a new `ArrivingShards` continues there."""
        if self.arrival is not None:
            self.arrival.stop()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "arrival": None}  # the copy stays in the process that began it


@dataclass
class JoinLog:
    """When shards that arrived joined an epoch: from it the epoch's order can be repeated."""

    joined: list[tuple[int, int]] = field(default_factory=list)
    """Each shard's number, and the number of the batch before which it joined."""
    planned: int = 0
    """Batches of the epoch that were planned so far."""


def plan_batches(
    order: BatchSampler, arrival: Arrival | None, shard_of: NDArray[np.int64] | None, log: JoinLog,
    delivered: Collection[int],
) -> Iterator[tuple[int, list[int]] | None]:  # fmt: skip
    """The numbered batches of an epoch but those that were delivered; None where the next one has to wait.

    ``log`` grows; what it holds when this starts is repeated as it was.
    """
    plan: Iterator[list[int] | None] = iter(order)
    if shard_of is not None and (log.joined or (arrival is not None and not arrival.is_complete)):
        plan = _plan_arriving(order, arrival, shard_of, log, delivered)
    number = 0
    for indices in plan:
        if indices is None:
            yield None
            continue
        log.planned = max(log.planned, number + 1)
        if number not in delivered:
            yield number, indices
        number += 1


def _plan_arriving(
    order: BatchSampler, arrival: Arrival | None, shard_of: NDArray[np.int64], log: JoinLog, delivered: Collection[int]
) -> Iterator[list[int] | None]:
    """The batches of an epoch whose shards are still on their way.

    A shard joins before some batch, and what is left then is shuffled anew. Where shards take turns on the disk, new
    ones join when those before them are used up.
    """
    window = arrival.window if arrival is not None else None
    here: list[int] = np.unique(shard_of).tolist()
    missing, joining, number, joined_at, pool = set(here), list(log.joined), 0, -1, np.zeros(0, np.int64)
    used, before = set[int](), set[int]()  # the shards that joined last, and those before them
    while missing:
        batches = order.group(pool[: _LOOKED_AT * order.batch_size], order.batch_size)[0]
        if number >= joined_at + _IN_FLIGHT:
            before = set()
        if arrival is not None:
            arrival.want(used | before, [*used, *dict(joining), *(one for one in arrival.order if one in missing)])
            here = arrival.list_arrived()
        if not joining and number >= log.planned and not (window and batches):
            joining = [(shard, number) for shard in here if shard in missing][:window]
            log.joined += joining
        if joining and joining[0][1] == number and (window or joining[0][0] in here):
            shard = joining.pop(0)[0]
            if number != joined_at:
                used, before, joined_at = set(), used, number
            used.add(shard)
            missing.discard(shard)
            pool = order.shuffle(np.concatenate([pool, np.flatnonzero(shard_of == shard)]), len(missing))
            continue
        absent = window and number not in delivered and not used.issubset(here)
        if not batches or absent or (joining and joining[0][1] == number):
            if not batches:
                used, before = set(), set()  # to make room: what is left of them is read on Drive, if need be
            if arrival is not None:
                arrival.list_arrived(more_than=len(here))
            yield None
            continue
        pool = pool[~np.isin(pool, batches[0])]
        yield batches[0]
        number += 1
    if arrival is not None and window:
        arrival.want(used | before, used)
        while not used.issubset(here := arrival.list_arrived()):
            arrival.list_arrived(more_than=len(here))
            yield None
    yield from order.cut(pool, order.batch_size)
