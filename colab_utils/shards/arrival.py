"""Shards on their way from Drive to the SSD: copied in a thread while those that have arrived are used."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from colab_utils.drive import DriveLostError, DriveProfile, Retries, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.shards.copy import Copying, check_space, read_target
from colab_utils.shards.format import ShardIndex, explain_write, remove_leftovers, write_index

__all__ = ["Arrival"]


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
