"""Shards as a dataset that is trained on while they are still copied from Drive."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.drive import DriveLostError, DriveProfile, Retries, get_profile, guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.dataset import ShardDataset, load_shard
from colab_utils.runtime import format_bytes
from colab_utils.shards.copy import Copying, check_space, has_size, read_target
from colab_utils.shards.format import INDEX_NAME, ShardIndex, explain_write, read_index, remove_leftovers, write_index

__all__ = ["Arrival", "ArrivingShards", "RollingArrival"]


class Arrival:
    """A copy of shards under way in a thread: from ``source``, whose ``index`` this is, into ``target``.

    The first shard comes alone, at all the speed that Drive has; then several at a time, in an order by chance. What
    lies in ``target`` from an earlier copy is compared with its checksum in place of a copy, and copied again where it
    is damaged. Where Drive fails, ``retries`` try again; the index in ``target`` comes last.

    Attributes:
        spans_s: when the copy of each shard began and ended, seconds after ``began_s`` (of ``perf_counter``), by its
            number, in the order of arrival.
        retries: how many times Drive failed and was tried again, and whether it fails now.

    Raises:
        ColabUtilsError: too little free disk, or other shards in ``target``.
    """

    window: int | None = None  # as many as there are

    def __init__(
        self, source: Path, target: Path, index: ShardIndex, *, profile: DriveProfile | None, workers: int, seed: int,
        retries: Retries,
    ) -> None:  # fmt: skip
        self.target, self.index = target, index
        before = read_target(source, target, index)
        check_space(target, self._choose_files(), cached=is_on_drive(source))
        self.retries = retries
        self._job = Copying(source, target, profile, retries, overwrite=before is not None)
        self._order = np.random.default_rng(seed).permutation(len(index.shards)).tolist()
        self._workers = workers
        self._news = threading.Condition()
        self._error: ColabUtilsError | None = None
        self._told = False
        self._thread: threading.Thread | None = None
        self.began_s = perf_counter()
        self.spans_s: dict[int, tuple[float, float]] = {}

    def want(self, shards: Collection[int]) -> None:
        """Say which shards are needed; here all come anyway, and stay."""

    def use(self, shards: Collection[int]) -> None:
        """Say that shards are in use."""

    def release(self, shards: Collection[int]) -> None:
        """Say that shards were used."""

    def has(self, shards: Collection[int]) -> bool:
        """Whether these may be asked for now: they are there, or will be waited for."""
        return True

    def start(self) -> None:
        """Begin to copy; a second call does nothing."""
        if self._thread is None and not self.is_complete:
            self.began_s = perf_counter()
            self._thread = threading.Thread(target=self._run, name="arrival", daemon=True)
            self._thread.start()

    def stop(self) -> None:
        """End at the next piece; what has arrived stays, and a copy made anew continues there."""
        self._job.stop.set()
        if self._thread is not None:
            self._thread.join()

    def _choose_files(self) -> list[tuple[str, int, str]]:
        return list(self.index.files())

    @property
    def is_complete(self) -> bool:
        """Whether all shards have arrived."""
        return len(self.spans_s) == len(self.index.shards)

    def list_arrived(self, *, more_than: int = -1) -> list[int]:
        """Numbers of the shards there are, in the order of arrival.

        Raises:
            DriveLostError: there are not ``more_than`` so many, and Drive is lost for good; the message says what is
                safe.
            ColabUtilsError: likewise, where a shard is damaged on Drive too, or the disk is full.
        """
        with self._news:
            if self._error is not None and len(self.spans_s) <= more_than:
                raise self._error
            if self.retries.failing and self.spans_s and not self._told:
                self._told = True
                here = f"{len(self.spans_s)} of {len(self.index.shards)} shards"
                warnings.warn(
                    f"Drive does not answer: it is tried again, and training goes on with the {here} in {self.target}",
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

    def _run(self) -> None:
        try:
            with explain_write(self.target):
                self.target.mkdir(parents=True, exist_ok=True)
                remove_leftovers(self.target)
                self._copy_all()
        except CancelledError:
            return  # stopped
        except (ColabUtilsError, OSError) as error:
            self._job.stop.set()
            found = f"expected to copy shards to {self.target}, found: {error}. Check the disk, or mount Drive again."
            with self._news:
                self._error = error if isinstance(error, ColabUtilsError) else ColabUtilsError(found)
                self._news.notify_all()

    def _copy_all(self) -> None:
        first, *rest = self._order
        with ThreadPoolExecutor(self._workers, thread_name_prefix="arrival") as pool:
            self._fetch(first, pool.map)
            for _ in pool.map(self._fetch, rest):
                pass
        write_index(self.target, self.index)

    def _fetch(self, number: int, do_each: Callable[..., Iterable[Any]] = map) -> None:
        began_s = perf_counter()
        if self._job.stop.is_set():
            raise CancelledError  # or the index would be written without this shard
        try:
            for _ in do_each(lambda file: self._job.copy_file(*file), self.index.shards[number].files()):
                pass
        except DriveLostError as error:
            raise DriveLostError(
                f"{error}; {len(self.spans_s)} of {len(self.index.shards)} shards are safe in {self.target}, "
                "and the same call continues there"
            ) from error
        with self._news:
            self.spans_s[number] = began_s - self.began_s, perf_counter() - self.began_s
            self._news.notify_all()


class RollingArrival(Arrival):
    """An `Arrival` that never ends: at most ``limit_bytes`` of shards lie in ``target``.

    Half of them are trained on while the other half arrives. A shard is removed when it was used, another one needs
    its room, and Drive still has it. There is no index in ``target``, which is a cache and no copy.

    Attributes:
        window: how many shards are to be used together.
    """

    window: int

    def __init__(self, source: Path, target: Path, index: ShardIndex, *, limit_bytes: float, **options: Any) -> None:
        self._source, self._limit = source, limit_bytes
        self._sizes = [shard.bytes + shard.arrays_bytes for shard in index.shards]
        if limit_bytes < sum(sorted(self._sizes)[-2:]):
            raise ColabUtilsError(
                f"expected a limit that holds two shards, {sum(sorted(self._sizes)[-2:]) / 1e9:.3g} GB, found "
                f"{format_bytes(limit_bytes)}: allow more, or preprocess into smaller shards (--shard-mb)"
            )
        self.window = max(1, int(limit_bytes / float(np.mean(self._sizes))) // 2)
        self._wanted: list[int] = []
        self._used: set[int] = set()
        self._moving: set[int] = set()
        super().__init__(source, target, index, **options)

    def _choose_files(self) -> list[tuple[str, int, str]]:
        """Files that fill the limit."""
        left, files = self._limit, list[tuple[str, int, str]]()
        for shard, size in zip(self.index.shards, self._sizes, strict=True):
            left -= size
            files += shard.files() if left >= 0 else ()
        return files

    @property
    def is_complete(self) -> bool:
        """Never: what is there now may go."""
        return False

    def wait_for(self, number: int) -> None:
        """Nothing: an image whose shard is not there is read on Drive."""

    def want(self, shards: Collection[int]) -> None:
        """These are needed, and no others."""
        with self._news:
            self._wanted = [number for number in self._order if number in shards]
            self._news.notify_all()

    def use(self, shards: Collection[int]) -> None:
        """These must not go before they are released."""
        with self._news:
            self._used.update(shards)

    def release(self, shards: Collection[int]) -> None:
        """These were used."""
        with self._news:
            self._used.difference_update(shards)
            self._news.notify_all()

    def has(self, shards: Collection[int]) -> bool:
        """Whether all of these are there; those that are not come next."""
        with self._news:
            missing = [number for number in shards if number not in self.spans_s]
            if missing and self._error is not None:
                raise self._error
            if missing:
                self._wanted = [*missing, *(number for number in self._wanted if number not in missing)]
                self._news.notify_all()
            return not missing

    def _copy_all(self) -> None:
        with suppress(FileNotFoundError):
            (self.target / INDEX_NAME).unlink()
        for number, shard in enumerate(self.index.shards):  # what an earlier session left
            if any((self.target / name).exists() for name, _, _ in shard.files()):
                fits = self._sizes[number] <= self._limit - sum(self._sizes[there] for there in self.spans_s)
                self._fetch(number) if fits else self._remove(number)
        with ThreadPoolExecutor(self._workers, thread_name_prefix="arrival") as pool:
            for work in [pool.submit(self._work) for _ in range(self._workers)]:
                work.result()

    def _work(self) -> None:
        try:
            while (number := self._choose()) is not None:
                self._fetch(number)
                with self._news:
                    self._moving.discard(number)
        except BaseException:
            self._job.stop.set()  # or the other threads would go on for ever
            raise

    def _choose(self) -> int | None:
        """The next shard to copy, once there is room for it; None when it is over."""
        while not self._job.stop.is_set():
            with self._news:
                there = self.spans_s.keys() | self._moving
                number = next((number for number in self._wanted if number not in there), None)
                left = self._limit - sum(self._sizes[number] for number in there)
                if number is not None and self._sizes[number] <= left:
                    self._moving.add(number)
                    return number
                kept = self._used.union(self._wanted)
                leaving = next((number for number in self.spans_s if number not in kept), None)
                if number is None or leaving is None:
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
