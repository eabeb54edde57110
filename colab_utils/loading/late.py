"""A prefetcher that does not wait for late batches: it returns other batches first, and requests
the late ones again.
"""

from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arrival import POLL_S
from colab_utils.loading.fetcher import Fetcher, Result
from colab_utils.loading.prefetcher import (
    Load,
    Loaded,
    Prefetcher,
    ReadAhead,
    Request,
    Worker,
    end_workers,
)
from colab_utils.loading.shared_memory import SharedBufferPool

# If no other batch arrives within this many times max_wait_s, the loader returns a late batch that
# has arrived, even before the end of the epoch.
_MOST_WAITS = 1.25


class LateSample(NamedTuple):
    """A sample that was not loaded in time."""

    image: int
    """Index of the sample in the loader's dataset."""
    waited_s: float
    """Seconds that the loader waited until the sample was loaded or given up."""


class LateError(ColabUtilsError):
    """The error for a sample that was not loaded in time and may not be left out."""


@dataclass(eq=False)
class _LateBatch:
    load: Load
    asked_s: float
    """Time from which the loader waits for the batch, from `time.perf_counter`."""
    retry_s: float
    """Time at which the batch is requested again, from `time.perf_counter`."""
    retries: int = 0
    attempts: list[tuple[Worker, Request]] = field(default_factory=list)
    """The processes that load the batch, at most two, and their requests."""
    named: dict[int, int] = field(default_factory=dict)
    """Maps the index of each late sample of the batch to its place in the list of late samples."""
    bad: list[tuple[int, str]] = field(default_factory=list)
    result: Result | None = None
    request: Request | None = None
    """The request that ``result`` answers; None if no sample is left to load."""


class BoundedPrefetcher(Prefetcher):
    """A `Prefetcher` that waits at most ``max_wait_s`` for a batch.

    A late batch moves to the end of the epoch, and the next batch is returned. A new worker takes
    the place of the late batch's worker, and gets its other requests. The old worker continues with
    the late batch, and a second process loads the same batch. If neither delivers the batch in
    time, the older process is killed, and another one tries. Each try has twice the time of the one
    before. Each worker has its own buffers, because a killed process may hang in a read, and may
    write to its buffer afterwards.

    Args:
        fetcher, workers, prefetch: As for `Prefetcher`.
        max_wait_s: Seconds to wait for a batch.
        late: List to which late samples are appended.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        workers: int,
        prefetch: int,
        *,
        max_wait_s: float,
        late: list[LateSample],
    ) -> None:
        self._max_wait_s = max_wait_s
        self._named = late
        self._late: dict[int, _LateBatch] = {}
        self._killed: list[Worker] = []
        self._most_late = 2 * workers + 8
        # The time when a batch was last moved or given up.
        self._changed_s = 0.0
        # A worker that reads one sample after the other can note which sample hangs. A dataset that
        # reads whole batches and does not read ahead cannot do so, until a late batch is requested
        # again: then its samples are read one by one.
        self._is_noted = fetcher.reads_ahead or not fetcher.reads_batches
        super().__init__(fetcher, workers, prefetch)

    def close(self) -> None:
        """End the workers. Batches that they are loading are lost."""
        super().close()
        end_workers(self._killed)

    def list_moved(self) -> list[int]:
        """Return the numbers of the batches that moved to the end of the epoch, in order."""
        return list(self._late)

    def has_work(self) -> bool:
        return bool(self._sent or self._late)

    def _start_worker(self, place: int, pool: SharedBufferPool | None = None) -> Worker:
        return super()._start_worker(place, pool or self._make_pool())

    def _ask(self, worker: Worker, load: Load, place: int | None = None) -> Request:
        return super()._ask(worker, load._replace(is_noted=load.is_noted or self._is_noted), place)

    def _take(self, asked_s: float, *, is_over: bool) -> Loaded | None:
        now_s = perf_counter()
        stuck = [batch for batch in self._late.values() if batch.result is None]
        for batch in stuck:
            if now_s >= batch.retry_s:
                self._retry(batch, now_s)
        first = next(iter(self._sent), None)
        if first in self._done:
            return self._finish(first)
        if first is None or now_s - asked_s >= _MOST_WAITS * self._max_wait_s:
            for number, batch in self._late.items():
                if batch.result is not None:
                    return self._finish_late(number, batch.result)
        left_s = self._find_start(first, asked_s) + self._max_wait_s - now_s
        if first is None and not is_over:
            # The shards of the next batch have not arrived yet.
            self._receive(POLL_S)
        elif left_s > 0:
            self._receive(min(left_s, self._max_wait_s / 4))
        elif first is not None and len(stuck) < self._most_late:
            self._move(first, asked_s, now_s)
        else:
            self._give_up(stuck, now_s)
        return None

    def _find_start(self, first: int | None, asked_s: float) -> float:
        """Return the time from which the loader waits for a batch that a worker is loading.

        With None, return the time from which the loader waits for late batches.
        """
        if first is None:
            return max(asked_s, self._changed_s)
        worker = self._workers[self._sent[first].job.worker or 0]
        return max(asked_s, worker.began_s)

    def _move(self, number: int, asked_s: float, now_s: float) -> None:
        """Move a batch to the end of the epoch, and replace its worker by a new one."""
        request = self._sent.pop(number)
        place = request.job.worker or 0
        batch = _LateBatch(request.load, asked_s, now_s)
        batch.attempts = [(self._workers[place], request)]
        self._late[number] = batch
        self._changed_s = now_s
        worker = self._start_worker(place)
        self._workers[place] = worker
        for other, asked in self._sent.items():
            if asked.job.worker == place and other not in self._done:
                self._tell(place, ReadAhead(asked.load.indices))
                self._sent[other] = self._ask(worker, asked.load, place)
        for _, indices, reader in self._planned:
            if reader == place:
                self._tell(place, ReadAhead(indices))

    def _retry(self, batch: _LateBatch, now_s: float) -> None:
        """Request a late batch again from a new process, and wait longer for it."""
        self._name(batch, now_s)
        self._kill(batch.attempts[:-1])
        worker = self._start_worker(0, SharedBufferPool(1, 1))
        if self._told_images:
            worker.send(ReadAhead(batch.load.indices))
        request = self._ask(worker, batch.load._replace(is_noted=True))
        batch.attempts = [*batch.attempts[-1:], (worker, request)]
        batch.retries += 1
        batch.retry_s = now_s + self._max_wait_s * 2**batch.retries

    def _note(self, worker: Worker, number: int, result: Result) -> None:
        batch = self._late.get(number)
        if batch is None:
            super()._note(worker, number, result)
            return
        if not batch.named:
            # The batch arrived before the late sample was known, so all its samples are named.
            self._name(batch, perf_counter(), batch.load.indices)
        self._name(batch, perf_counter(), [])
        batch.result = result._replace(bad=[*batch.bad, *result.bad])
        batch.request = next(asked for attempt, asked in batch.attempts if attempt is worker)
        self._kill(batch.attempts)

    def _finish_late(self, number: int, result: Result) -> Loaded:
        request = self._late.pop(number).request
        if request is None:
            return Loaded(number, None, result.bad)
        self._sent[number] = request
        self._done[number] = result
        return self._finish(number)

    def _give_up(self, batches: list[_LateBatch], now_s: float) -> None:
        """Leave out the samples that late batches wait for, and load the other samples.

        Raises:
            LateError: No sample may be left out.
        """
        self._changed_s = now_s
        for worker in self._workers:
            # The next batch of each worker gets its full time from now on.
            worker.began_s = now_s
        all_stuck = [self._name(batch, now_s) for batch in batches]
        for batch, stuck in zip(batches, all_stuck, strict=True):
            indices = batch.load.indices
            stuck = stuck or [index for index in indices if index in batch.named] or indices
            reason = (
                f"{self._fetcher.name_sample(stuck[0])} did not come within "
                f"{now_s - batch.asked_s:.1f} seconds, though it was asked for again."
            )
            if not batch.load.skips_bad:
                raise LateError(
                    f"{reason} See whether its file can be read, allow more time (max_wait_s), or "
                    "leave it out (max_bad)."
                )
            self._kill(batch.attempts)
            batch.bad.extend((index, reason) for index in dict.fromkeys(stuck))
            rest = [index for index in indices if index not in stuck]
            batch.load = batch.load._replace(indices=rest)
            batch.attempts = []
            batch.retries = 0
            batch.retry_s = now_s
            if not rest:
                batch.result = Result(bad=batch.bad)

    def _name(self, batch: _LateBatch, now_s: float, samples: list[int] | None = None) -> list[int]:
        """Add the samples that a batch waits for to the list of late samples, and return them.

        If ``samples`` is None, the batch waits for the sample that the older attempt is reading. If
        the older attempt reads none, the batch waits for the sample that the newer one is reading.
        """
        if samples is None:
            at_work = [int(worker.at_work[0]) for worker, _ in batch.attempts]
            samples = [index for index in at_work if index in batch.load.indices][:1]
        for index in samples:
            if index not in batch.named:
                batch.named[index] = len(self._named)
                self._named.append(LateSample(index, 0.0))
        for index, place in batch.named.items():
            if index in batch.load.indices:
                self._named[place : place + 1] = [LateSample(index, now_s - batch.asked_s)]
        return samples

    def _kill(self, attempts: list[tuple[Worker, Request]]) -> None:
        """Kill processes whose results are no longer needed, without waiting for their end."""
        self._killed = [worker for worker in self._killed if worker.process.is_alive()]
        for worker, _ in attempts:
            del self._listening[worker.connection]
            worker.process.kill()
            self._killed.append(worker)
