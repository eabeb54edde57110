"""A prefetcher that does not wait for ever: a late batch is loaded once more by a new process, and
a sample that neither process loads is given up.
"""

from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.fetcher import Fetcher, Result
from colab_utils.loading.prefetcher import Prefetcher, ReadAhead, Request, Worker, end_workers

# A sample of the second try may take this many times max_wait_s. The first process goes on
# meanwhile, because its sample may be slow.
_SECOND_TRY = 3
# The workers are looked at this many times in max_wait_s.
_LOOKS = 8


class LateSample(NamedTuple):
    """A sample that was not loaded in time."""

    image: int
    """Index of the sample in the loader's dataset."""
    waited_s: float
    """Seconds that the loader waited for its batch."""


class LateError(ColabUtilsError):
    """The error for a sample that was not loaded in time and may not be left out."""


@dataclass(eq=False)
class _Wait:
    """The wait for a batch."""

    request: Request
    asked_s: float
    """Time at which the wait began, from `time.perf_counter`."""
    changed_s: float
    """Time at which a process was last seen to begin another sample."""
    reading: list[int] = field(default_factory=list)
    """Index of the sample that each process reads; -1 if it is not known."""
    second: tuple[Worker, Request] | None = None
    """The process of the second try, and its request."""
    late: list[int] = field(default_factory=list)
    bad: list[tuple[int, str]] = field(default_factory=list)

    @property
    def place(self) -> int:
        """Return the number of the worker that was asked for the batch."""
        return self.request.job.worker or 0

    def look_at(self, workers: list[Worker]) -> float:
        """Return for how many seconds none of these workers has begun another sample."""
        now_s = perf_counter()
        reading = [int(worker.at_work[0]) for worker in workers]
        if reading != self.reading:
            self.reading = reading
            self.changed_s = now_s
        return now_s - self.changed_s

    def find_stuck(self) -> list[int]:
        """Return the sample that is waited for, or an empty list if it is not known.

        If the processes read different samples, it is the last of them, because one process has
        loaded those before it.
        """
        indices = self.request.load.indices
        places = [indices.index(sample) for sample in self.reading if sample in indices]
        return [indices[max(places)]] if places else []


class BoundedPrefetcher(Prefetcher):
    """A `Prefetcher` that waits for a sample at most four times ``max_wait_s``.

    If the worker that loads the next batch begins no other sample for ``max_wait_s``, a new process
    loads the batch, too. The process that has loaded it first stays, and the other one is killed.
    If neither begins another sample for three times ``max_wait_s``, both are killed. The sample is
    left out, and a new worker loads the rest of the batch.

    Each worker has its own buffers, because a killed process may hang in a read, and may write to
    its buffer afterwards.

    Args:
        fetcher, workers, prefetch: As for `Prefetcher`.
        max_wait_s: Seconds to wait for a sample before the second try.
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
        self._late = late
        self._killed: list[Worker] = []
        super().__init__(fetcher, workers, prefetch)
        # A worker that reads one sample after the other can note which sample hangs. A dataset that
        # reads whole batches and does not read ahead cannot do so, until the second try: then its
        # samples are read one by one.
        self._is_noted = fetcher.reads_ahead or not fetcher.reads_batches

    def close(self) -> None:
        """End the workers. Batches that they are loading are lost."""
        super().close()
        end_workers(self._killed)

    def _start_worker(self, place: int) -> Worker:
        self._pool = self._make_pool()
        return super()._start_worker(place)

    def _wait_for(self, number: int) -> None:
        """Wait until a batch is loaded.

        Raises:
            LateError: A sample was not loaded in time, and no sample may be left out.
        """
        now_s = perf_counter()
        wait = _Wait(self._sent[number], now_s, now_s)
        try:
            while number not in self._done:
                sender = self._receive(self._max_wait_s / _LOOKS)
                if number not in self._done:
                    self._check(wait)
                elif wait.second is not None:
                    self._keep(sender, wait, *wait.second)
        finally:
            waited_s = perf_counter() - wait.asked_s
            self._late += [LateSample(index, waited_s) for index in dict.fromkeys(wait.late)]
        if wait.bad:
            result = self._done[number]
            self._done[number] = result._replace(bad=[*wait.bad, *result.bad])

    def _check(self, wait: _Wait) -> None:
        """Try a batch again, or give up a sample, if no sample was begun for too long."""
        workers = [self._workers[wait.place]]
        if wait.second is not None:
            workers.append(wait.second[0])
        silent_s = wait.look_at(workers)
        if silent_s <= self._max_wait_s:
            return
        wait.late += wait.find_stuck()
        if wait.second is None:
            worker = self._start_worker(wait.place)
            load = wait.request.load._replace(is_noted=True)
            if self._told_images:
                worker.send(ReadAhead(load.indices))
            wait.second = worker, self._ask(worker, load, wait.place)
        elif silent_s > _SECOND_TRY * self._max_wait_s:
            self._give_up(wait, wait.second[0])

    def _keep(self, sender: Worker | None, wait: _Wait, second: Worker, request: Request) -> None:
        """Keep the process that has loaded a batch, and kill the other one."""
        indices = wait.request.load.indices
        # The batch came before the late sample was known, so all its samples are named.
        wait.late = wait.late or indices
        if sender is second:
            self._sent[request.load.number] = request
            self._replace(wait.place, second)
        else:
            self._kill(second)

    def _give_up(self, wait: _Wait, second: Worker) -> None:
        """Leave out the sample that a batch waits for, and load the other samples.

        Raises:
            LateError: No sample may be left out.
        """
        load = wait.request.load
        stuck = wait.find_stuck() or load.indices
        wait.late += stuck
        reason = (
            f"{self._fetcher.name_sample(stuck[0])} did not come within "
            f"{perf_counter() - wait.asked_s:.1f} seconds, though it was asked for again."
        )
        if not load.skips_bad:
            raise LateError(
                f"{reason} See whether its file can be read, allow more time (max_wait_s), or "
                "leave it out (max_bad)."
            )
        wait.bad += [(index, reason) for index in dict.fromkeys(stuck)]
        rest = [index for index in load.indices if index not in stuck]
        self._sent[load.number] = wait.request._replace(load=load._replace(indices=rest))
        if not rest:
            self._done[load.number] = Result()
        self._kill(second)
        wait.second = None
        self._replace(wait.place, self._start_worker(wait.place))
        wait.request = self._sent[load.number]

    def _replace(self, place: int, worker: Worker) -> None:
        """Put a worker in the place of another one, and request the batches of that one from it."""
        self._kill(self._workers[place])
        self._workers[place] = worker
        for number, request in self._sent.items():
            if request.job.worker == place and number not in self._done:
                self._tell(place, ReadAhead(request.load.indices))
                self._sent[number] = self._ask(worker, request.load, place)
        for _, indices, reader in self._planned:
            if reader == place:
                self._tell(place, ReadAhead(indices))

    def _kill(self, worker: Worker) -> None:
        """Kill a process whose results are no longer needed, without waiting for its end."""
        self._killed = [killed for killed in self._killed if killed.process.is_alive()]
        del self._listening[worker.connection]
        worker.process.kill()
        self._killed.append(worker)
