"""Shards that take turns on a disk too small for all: copied before they are needed, removed when they were used."""

from __future__ import annotations

from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import format_bytes
from colab_utils.shards.arrival import Arrival
from colab_utils.shards.copy import has_size
from colab_utils.shards.format import INDEX_NAME, ShardIndex

__all__ = ["RollingArrival"]


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
