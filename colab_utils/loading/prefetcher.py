"""Worker processes that load batches ahead of the training loop."""

import os
import pickle
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from copy import copy
from itertools import islice
from multiprocessing.connection import Connection, wait
from time import perf_counter, sleep
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data._utils import worker as torch_worker

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, open_batch
from colab_utils.loading.fetcher import Fetcher, Result
from colab_utils.loading.shared_memory import SharedBufferPool
from colab_utils.loading.workers import (
    WorkerDiedError,
    WorkerJob,
    describe_exit,
    explain_death,
    start_worker,
)
from colab_utils.machine import count_oom_kills
from colab_utils.processes import end_process, quiet_fork, share_array

PREFETCH = 2
"""Default number of batches that each worker prepares ahead."""

_LENT_BUFFERS = 4
"""Buffers that a training loop may hold: the current batch, the next one, and two that a user
keeps."""

# A killed process ends at once, unless it hangs in a read that the system cannot interrupt. The
# loader waits at most this many seconds for the end of killed processes.
_DEATH_S = 5.0
# The workers are looked at this many times in max_wait_s.
_LOOKS = 8
# Seconds between two looks for shards of the next batch that have not arrived.
_ARRIVAL_S = 0.02


class LateSample(NamedTuple):
    """A sample that was not loaded in time."""

    image: int
    """Index of the sample in the loader's dataset."""
    waited_s: float
    """Seconds that the loader waited for it before the second try."""


class Loaded(NamedTuple):
    """A batch that was loaded."""

    number: int
    """Number of the batch in its epoch."""
    batch: PackedBatch | None
    """The batch; None if it has no image."""
    bad: Sequence[tuple[int, str]]
    """Index and reason of each sample that was left out."""


class Worker:
    """A worker process and its pipe.

    Args:
        fetcher: The reader of the samples.
        pool: The shared buffers that batches are written to.
        place: Number of the worker, from 0, as torch's ``get_worker_info`` tells it to a dataset.
        workers: Number of workers.

    Attributes:
        at_work: int64 [1]: index of the sample that the worker reads; -1 if it is not known.

    Raises:
        ColabUtilsError: The system starts no more processes.
    """

    def __init__(self, fetcher: Fetcher, pool: SharedBufferPool, place: int, workers: int) -> None:
        self.at_work = share_array(np.int64)
        self.at_work[0] = -1
        forked = copy(fetcher)
        forked.at_work = self.at_work
        self.process, self.connection = start_worker(_serve, forked, pool, place, workers)
        self.place = place

    def send(self, message: WorkerJob | list[int] | None) -> None:
        """Ask for a batch; or name samples whose files to read ahead, or None to drop them all.

        If the worker is dead, no error is raised here. The loader notices the death after the last
        results of the worker.
        """
        with suppress(OSError):
            self.connection.send(message)


def _serve(
    connection: Connection, fetcher: Fetcher, pool: SharedBufferPool, place: int, workers: int
) -> None:
    """Load the requested batches, in a worker process, until the loader closes the pipe."""
    torch.set_num_threads(1)
    # A dataset may ask torch in which worker it is, by ``torch.utils.data.get_worker_info()``.
    torch_worker._worker_info = torch_worker.WorkerInfo(
        id=place,
        num_workers=workers,
        seed=torch.initial_seed() + place,
        dataset=fetcher.dataset,
    )
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if not isinstance(message, WorkerJob):
                # If no thread can be started, each file is read when its sample is loaded.
                with suppress(ColabUtilsError):
                    fetcher.read_ahead(message)
                continue
            fetcher.at_work[0] = -1
            result = _load(fetcher, pool, message)
            result = result._replace(error=_make_portable(result.error))
            connection.send((message.number, result))


def _load(fetcher: Fetcher, pool: SharedBufferPool, job: WorkerJob) -> Result:
    """Load a requested batch into its buffer."""
    return fetcher.load(job.indices, pool.buffers[job.buffer].reserve, job.seed)


def _make_portable(error: Exception | None) -> Exception | None:
    """Return an error that can be sent to another process, with its traceback as a note."""
    if error is None or isinstance(error, ColabUtilsError):
        return error
    trace = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    # A user's own exception class may raise anything when it is pickled.
    except Exception:
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a worker process:\n{trace}")
    return error


class Prefetcher:
    """Worker processes, their shared buffers, and the requested batches.

    Up to ``prefetch`` batches are requested for each worker. Each worker has its own pipe, so a
    worker that dies is noticed at once and blocks no other worker. Without workers, this process
    loads each batch when it is requested.

    If the worker that loads the next batch begins no other sample for ``max_wait_s``, all workers
    are killed. New ones, with new buffers, load what has not been delivered. A sample that is late
    there, too, is left out, or is an error where none may be left out.

    Args:
        fetcher: The reader of the samples.
        workers: Number of workers.
        prefetch: Batches that each worker prepares ahead.
        announced: Batches whose files the workers read ahead, if the dataset reads ahead.
        max_wait_s: Seconds to wait for a sample before the second try; None for no limit.
        late: List to which late samples are appended.

    Raises:
        ColabUtilsError: The system starts no more processes.
    """

    def __init__(
        self,
        fetcher: Fetcher,
        workers: int,
        prefetch: int,
        announced: int,
        *,
        max_wait_s: float | None,
        late: list[LateSample],
    ) -> None:
        self._fetcher = fetcher
        self._max_wait_s = max_wait_s
        self._late = late
        # The batch that is waited for, the sample that its worker reads, and since when.
        self._watched = (-1, -1)
        self._watched_since_s = 0.0
        # Samples of this pass that have had their first try.
        self._tried: set[int] = set()
        # Samples that were given up, and the reason. They are told with the next batch.
        self._given_up: list[tuple[int, str]] = []
        self._oom_kills = count_oom_kills()
        self._worker_count = workers
        self._ahead = max(1, workers * prefetch)
        self._announced = announced if fetcher.reads_ahead else 0
        # Batches that are not requested yet: number and indices.
        self._planned: deque[tuple[int, list[int]]] = deque()
        # Batches of the next pass whose files the workers read already.
        self._early: dict[int, list[int]] = {}
        self._seed: tuple[int, ...] = ()
        # Requested batches, and the results that have arrived. The keys are the numbers of the
        # batches.
        self._sent: dict[int, WorkerJob] = {}
        self._done: dict[int, Result] = {}
        self._workers: list[Worker] = []
        self._owner = os.getpid()
        self._start()

    def run(
        self,
        batches: Iterator[tuple[int, list[int]] | None],
        *,
        seed: tuple[int, ...],
        following: Iterator[list[int]],
    ) -> Iterator[Loaded]:
        """Load numbered batches, and yield them in the order given.

        ``batches`` yields the number and indices of each batch, or None if the next batch cannot be
        requested yet. `Loaded.batch` is None if a batch has no indices, or if all its samples are
        bad. ``following`` yields the batches of the next pass: while this pass ends, the files of
        the first ones are read. If the pass is interrupted while batches are on their way, close
        the prefetcher.

        Raises:
            WorkerDiedError: A worker died.
            ColabUtilsError: A sample was late twice, and none may be left out.
            Exception: A sample raised this error, and none may be left out.
        """
        self._watched = (-1, -1)
        self._tried.clear()
        self._seed = seed
        is_over = False
        while True:
            is_over = is_over or self._plan(batches)
            if is_over:
                self._read_early(following)
            while self._planned and len(self._sent) < self._ahead:
                self._send(*self._planned.popleft())
            if self._sent:
                first = next(iter(self._sent))
                if first in self._done:
                    yield self._finish(first)
                else:
                    self._receive(first)
            elif is_over:
                return
            else:
                sleep(_ARRIVAL_S)

    @property
    def is_idle(self) -> bool:
        """Return whether no batch is requested or planned. A fork cannot use these workers."""
        return not (self._sent or self._planned or os.getpid() != self._owner)

    def list_jobs(self) -> list[WorkerJob]:
        """Return the requested batches that have not arrived yet, oldest first."""
        requests = list(self._sent.items())
        return [job for number, job in requests if number not in self._done]

    def close(self) -> None:
        """Kill the workers, and wait at most 5 seconds for their end. Batches that they are loading
        are lost. A fork of this process leaves the workers alone.
        """
        if os.getpid() != self._owner:
            return
        for worker in self._workers:
            worker.process.kill()
            worker.connection.close()
        until_s = perf_counter() + _DEATH_S
        for worker in self._workers:
            end_process(worker.process, max(0.0, until_s - perf_counter()))
        self._workers = []
        if self._announced and not self._worker_count:
            # What this process has read ahead would leave the next loader of the dataset no room.
            self._fetcher.read_ahead(None)

    def _start(self) -> None:
        """Make the buffers, and start the workers."""
        try:
            with quiet_fork():
                self._pool = SharedBufferPool(self._ahead, _LENT_BUFFERS)
            for place in range(self._worker_count):
                self._workers.append(Worker(self._fetcher, self._pool, place, self._worker_count))
        except BaseException:
            self.close()
            raise

    def _plan(self, todo: Iterator[tuple[int, list[int]] | None]) -> bool:
        """Plan the next batches, and tell the workers which files to read ahead.

        Returns:
            True if no batches are left.
        """
        while len(self._planned) < max(self._announced, self._ahead - len(self._sent)):
            try:
                item = next(todo)
            except StopIteration:
                return True
            if item is None:
                return False
            self._add(*item)
        return False

    def _add(self, number: int, indices: list[int]) -> None:
        """Plan a batch, and tell a worker to read its files ahead."""
        if self._announced and self._early.pop(number, None) != indices:
            self._forget_early()
            self._tell(number, indices)
        self._planned.append((number, indices))

    def _read_early(self, batches: Iterator[list[int]]) -> None:
        """Tell the workers which files the next pass begins with."""
        # Without workers, files that nobody takes would leave other loaders no room.
        room = self._announced - len(self._planned) - len(self._early) if self._workers else 0
        for number, indices in enumerate(islice(batches, max(0, room)), len(self._early)):
            self._tell(number, indices)
            self._early[number] = indices

    def _forget_early(self) -> None:
        """Give up the files of another pass than the one that has begun."""
        if self._early:
            self._early.clear()
            for worker in range(self._worker_count):
                self._tell(worker, None)

    def _tell(self, number: int, indices: list[int] | None) -> None:
        """Tell the worker of a batch which files to read ahead, or None to drop them all."""
        if self._workers:
            self._workers[number % self._worker_count].send(indices)
        else:
            self._fetcher.read_ahead(indices)

    def _send(self, number: int, indices: list[int]) -> None:
        """Request a batch from a worker, or load it in this process if there are no workers."""
        place = number % self._worker_count if self._workers else None
        pid = os.getpid() if place is None else self._workers[place].process.pid or 0
        seed = (*self._seed, number)
        job = WorkerJob(place, pid, number, tuple(indices), self._pool.take(), seed)
        self._sent[number] = job
        if place is None:
            self._done[number] = _load(self._fetcher, self._pool, job)
        else:
            self._workers[place].send(job)

    def _receive(self, number: int) -> None:
        """Receive the next result of a worker, while the batch with this number is waited for."""
        workers = {worker.connection: worker for worker in self._workers}
        limit_s = self._max_wait_s
        for connection in wait(workers, limit_s and limit_s / _LOOKS)[:1]:
            worker = workers[connection]  # type: ignore[index]
            try:
                key, result = worker.connection.recv()
            except (EOFError, OSError):
                raise self._explain_end(worker) from None
            self._done[key] = result
        if limit_s is not None and number not in self._done:
            self._watch(number, limit_s)

    def _watch(self, number: int, limit_s: float) -> None:
        """Load a batch anew if its worker has begun no other sample for ``limit_s``."""
        reading = int(self._workers[number % self._worker_count].at_work[0])
        now_s = perf_counter()
        if self._watched != (number, reading):
            self._watched = number, reading
            self._watched_since_s = now_s
        elif now_s - self._watched_since_s > limit_s:
            self._try_again(number, reading, now_s - self._watched_since_s)

    def _try_again(self, number: int, reading: int, waited_s: float) -> None:
        """Load everything in new processes, but for a sample that was late before.

        Args:
            number: Number of the batch that is late.
            reading: Index of the sample that its worker reads, if it is known.
            waited_s: Seconds in which the worker began no other sample.

        Raises:
            ColabUtilsError: A sample was late twice, and no sample may be left out.
        """
        todo = {key: list(job.indices) for key, job in self._sent.items()}
        todo |= dict(self._planned)
        stuck = [reading] if reading in todo[number] else todo[number]
        if self._tried.issuperset(stuck):
            self._give_up(stuck)
            todo[number] = [index for index in todo[number] if index not in stuck]
        else:
            self._tried.update(stuck)
            self._late += [LateSample(index, waited_s) for index in stuck]
        self.close()
        self._start()
        self._watched = (-1, -1)
        self._sent.clear()
        self._done.clear()
        self._early.clear()
        self._planned.clear()
        for key, indices in todo.items():
            self._add(key, indices)

    def _give_up(self, stuck: list[int]) -> None:
        reason = (
            f"{self._fetcher.name_sample(stuck[0])} did not come within {self._max_wait_s:g} "
            "seconds, nor when a new process was asked for it."
        )
        if not self._fetcher.skips_bad:
            raise ColabUtilsError(
                f"{reason} See whether its file can be read, allow more time (max_wait_s), or "
                "leave it out (max_bad)."
            )
        self._given_up += [(index, reason) for index in stuck]

    def _explain_end(self, worker: Worker) -> WorkerDiedError:
        process = worker.process
        process.join(5)
        ending = describe_exit(process.exitcode or 0)
        died = WorkerDiedError(explain_death(ending, self._oom_kills))
        jobs = [job for job in self.list_jobs() if job.worker == worker.place]
        died.job = next(iter(jobs), WorkerJob(worker.place, process.pid or 0))
        died.ending = ending
        return died

    def _finish(self, number: int) -> Loaded:
        buffer = self._sent.pop(number).buffer
        layout, bad, error = self._done.pop(number)
        self._watched = (-1, -1)
        self._tried.clear()
        bad = [*self._given_up, *bad]
        self._given_up.clear()
        if layout is None:
            self._pool.give_back(buffer)
            if error is not None:
                raise error
            return Loaded(number, None, bad)
        content = self._pool.hold(buffer, layout.size)
        return Loaded(number, open_batch(content, layout), bad)
