"""Shards on their way from Drive to the SSD: copied in a thread while those that have arrived are used."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError, ThreadPoolExecutor
from pathlib import Path
from time import perf_counter

import numpy as np

from colab_utils.drive import DriveLostError, DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.copy import Copying, check_space, has_size, read_target
from colab_utils.shards.format import ShardIndex, explain_write, remove_leftovers, write_index

__all__ = ["Arrival"]

_PATIENCE_S = (1.0, 4.0, 16.0, 60.0)  # before each new try, where Drive fails


class Arrival:
    """A copy of shards under way in a thread: from ``source``, whose ``index`` this is, into ``target``.

    The first shard comes alone, at all the speed that Drive has; then several at a time, in an order by chance. What
    lies in ``target`` and is whole has arrived already. Where Drive fails, it is tried again four times, with growing
    waits; the index in ``target`` comes last.

    Attributes:
        spans_s: when the copy of each shard began and ended, seconds after ``began_s`` (of ``perf_counter``), by its
            number, in the order of arrival; an earlier copy that is whole took no time.
        retries: how many times Drive failed and was tried again.

    Raises:
        ColabUtilsError: too little free disk, or other shards in ``target``.
    """

    def __init__(
        self, source: Path, target: Path, index: ShardIndex, *, profile: DriveProfile | None, workers: int, seed: int
    ) -> None:
        self.target, self.index = target, index
        before = read_target(target, index)
        check_space(target, list(index.files()))
        self._job = Copying(source, target, profile, overwrite=before is not None)
        self._order = np.random.default_rng(seed).permutation(len(index.shards)).tolist()
        self._workers = workers
        self._news = threading.Condition()
        self._error: ColabUtilsError | None = None
        self._thread: threading.Thread | None = None
        self.began_s = perf_counter()
        self.spans_s: dict[int, tuple[float, float]] = {}
        self.retries = 0
        if (
            before is not None
            and before.shards == index.shards
            and all(has_size(target / name, size) for name, size, _ in index.files())
        ):
            self.spans_s = dict.fromkeys(range(len(index.shards)), (0.0, 0.0))

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
            first, *rest = self._order
            self._fetch(first)
            with ThreadPoolExecutor(self._workers, thread_name_prefix="arrival") as pool:
                for _ in pool.map(self._fetch, rest):
                    pass
            with explain_write(self.target):
                write_index(self.target, self.index)
        except CancelledError:
            return  # stopped
        except (ColabUtilsError, OSError) as error:
            self._job.stop.set()
            found = f"expected to copy shards to {self.target}, found: {error}. Check the disk, or mount Drive again."
            with self._news:
                self._error = error if isinstance(error, ColabUtilsError) else ColabUtilsError(found)
                self._news.notify_all()

    def _fetch(self, number: int) -> None:
        """Copy one shard, and try again where Drive fails."""
        began_s = perf_counter()
        for wait_s in (*_PATIENCE_S, None):
            if self._job.stop.is_set():
                raise CancelledError  # or the index would be written without this shard
            try:
                for file in self.index.shards[number].files():
                    self._job.copy_file(*file)
                break
            except DriveLostError as error:
                if wait_s is None:
                    raise DriveLostError(
                        f"{error}; {len(self.spans_s)} of {len(self.index.shards)} shards are safe in {self.target}, "
                        "and the same call continues there"
                    ) from error
                self.retries += 1
                self._job.stop.wait(wait_s)
        with self._news:
            self.spans_s[number] = began_s - self.began_s, perf_counter() - self.began_s
            self._news.notify_all()
