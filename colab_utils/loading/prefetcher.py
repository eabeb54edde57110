"""Worker processes, which load batches ahead of the training loop."""

import gc
import mmap
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import traceback
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection, wait
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arrival import POLL_S
from colab_utils.loading.batch import PackedBatch, open_batch
from colab_utils.loading.fetcher import Fetcher, Result
from colab_utils.loading.shared_memory import SharedBufferPool
from colab_utils.machine import find_free_memory
from colab_utils.processes import end_with_parent, find_cut_file, quiet_fork
from colab_utils.streams import StreamTrial
from colab_utils.units import format_bytes

PREFETCH = 2
"""Batches ahead for each worker."""

# Files that each worker is told of ahead; how many of them it reads at once, its reader decides.
_TOLD_IMAGES = 256
LENT_BUFFERS = 4
"""Buffers that a training loop may hold: its batch, the next one, and two more that somebody looks
at."""

# A killed process ends at once, unless it hangs in a read that the system does not break off.
_DEATH_S = 5.0


class WorkerJob(NamedTuple):
    """A worker, and the batch that it was asked for, as far as that is known."""

    worker: int | None
    """Which worker process, from 0; None for this process."""
    pid: int
    number: int | None = None
    """Of the batch in its epoch."""
    indices: tuple[Any, ...] = ()
    """In the loader's dataset."""


class ReadAhead(NamedTuple):
    """Tell a worker which samples it is asked for later; None: of none of those told before."""

    indices: list[int] | None


class Load(NamedTuple):
    """Ask a worker for a batch."""

    number: int
    indices: list[int]
    buffer: int
    seed: tuple[int, ...]
    skips_bad: bool
    is_noted: bool = False
    """Whether the worker notes which sample it reads; then it reads one after the other."""


class Loaded(NamedTuple):
    """A batch that came."""

    number: int
    batch: PackedBatch | None
    bad: Sequence[tuple[int, str]]
    """What was left out of it: indices, and why."""


class Request(NamedTuple):
    """A batch that was asked for, and the buffers that it comes in."""

    job: WorkerJob
    load: Load
    pool: SharedBufferPool


class WorkerDiedError(ColabUtilsError):
    """A worker process ended."""

    job: WorkerJob
    """Which one, with the oldest batch that it had."""
    ending: str
    """How it ended, such as "killed by signal: Killed"."""


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code; negative is a signal.

    Example:
        >>> describe_exit(-9), describe_exit(1)
        ('killed by signal: Killed', 'exit code 1')
    """
    if code < 0:
        return f"killed by signal: {signal.strsignal(-code)}"
    return f"exit code {code}"


def explain_death(ending: str) -> str:
    """Explain a worker's death, from what is known about its ending.

    Example:
        >>> explain_death(describe_exit(3)).partition(".")[0]
        'expected every worker process to live, found one that ended (exit code 3)'
    """
    how = re.search(r"killed by signal: ([\w ]+)|exit code \d+", ending)
    cure = "Your own code or a library ended it: load with workers=0 to see where."
    if "Bus error" in ending:
        cure = _explain_bus_error()
    if "Killed" in ending:
        free = format_bytes(find_free_memory())
        shm = format_bytes(shutil.disk_usage("/dev/shm").free)
        cure = (
            f"Now {free} of memory and {shm} of /dev/shm are free. Mostly memory ran out: use "
            "fewer workers, a smaller prefetch or a smaller batch, and run it again."
        )
    reason = how[0] if how else "no reason given"
    return f"expected every worker process to live, found one that ended ({reason}). {cure}"


def _explain_bus_error() -> str:
    """Say which mapped file became shorter; where none is seen, what a bus error can be."""
    cut = find_cut_file()
    if cut:
        return (
            f"{cut} is shorter than what is mapped of it: it was cut, or is written anew. Write it "
            "under a new name, and put it in its place when it is complete."
        )
    shm = format_bytes(shutil.disk_usage("/dev/shm").free)
    return (
        f"Now {shm} of /dev/shm are free. Either a mapped file became shorter or could not be read "
        "(a numpy memmap, an LMDB): copy it to the local disk; or /dev/shm was full: use a smaller "
        "batch. Which of them was not seen."
    )


class Worker:
    """A worker process and its pipe.

    Attributes:
        began_s: when it began what it is at, as far as that is known, by `time.perf_counter`.
        at_work: int64 [1]: index of the sample that it reads, where it notes that.

    Raises:
        ColabUtilsError: if the system starts no more processes.
    """

    def __init__(self, fetcher: Fetcher, pool: SharedBufferPool) -> None:
        self.pool = pool
        self.began_s = perf_counter()
        self.at_work = np.frombuffer(mmap.mmap(-1, 8), np.int64)
        context = multiprocessing.get_context("fork")
        with quiet_fork():
            self.connection, there = context.Pipe()
            self.process = context.Process(
                target=_serve, args=(there, fetcher, pool, self.at_work), daemon=True
            )
            with there:
                self.process.start()

    def send(self, message: ReadAhead | Load) -> None:
        """Tell it something; where it has died, what it has done is received first."""
        with suppress(OSError):
            self.connection.send(message)


def end_workers(workers: Sequence[Worker]) -> None:
    """End workers; one that hangs in the system is left alone."""
    for worker in workers:
        worker.process.kill()
        worker.connection.close()
    until_s = perf_counter() + _DEATH_S
    for worker in workers:
        worker.process.join(max(0.0, until_s - perf_counter()))
        if worker.process.exitcode is None:
            # At the end of this program it would be waited for, for ever.
            vars(multiprocessing.process)["_children"].discard(worker.process)


def _serve(
    connection: Connection, fetcher: Fetcher, pool: SharedBufferPool, at_work: NDArray[np.int64]
) -> None:
    """The life of a worker process: it loads what it is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    gc.freeze()  # a collection would touch, and so copy, all that is shared with the parent
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, ReadAhead):
                _read_ahead(fetcher, message)
                continue
            at_work[0] = -1
            result = fetcher.load(
                message.indices,
                pool.buffers[message.buffer].reserve,
                message.seed,
                skips_bad=message.skips_bad,
                note=partial(at_work.__setitem__, 0) if message.is_noted else None,
            )
            connection.send((message.number, result._replace(error=_make_portable(result.error))))


def _read_ahead(fetcher: Fetcher, message: ReadAhead) -> None:
    if message.indices is None:
        fetcher.drop_ahead()
    else:
        fetcher.read_ahead(message.indices)


def _make_portable(error: Exception | None) -> Exception | None:
    """The error as another process can take it, with its traceback as a note."""
    if error is None or isinstance(error, ColabUtilsError):
        return error
    trace = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever somebody's own exception does when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a worker process:\n{trace}")
    return error


class Prefetcher:
    """Worker processes, their shared buffers, and the batches that were asked for: ``prefetch``
    ahead of each worker.

    Each worker has a pipe of its own: one that dies is noticed at once, and blocks no other.
    Without workers a batch is loaded here, when it is asked for.

    Raises:
        ColabUtilsError: if the system starts no more processes.
    """

    def __init__(self, fetcher: Fetcher, workers: int, prefetch: int) -> None:
        self._fetcher = fetcher
        self._ahead = max(1, workers * prefetch)
        self._told_images = max(1, workers) * _TOLD_IMAGES if fetcher.reads_ahead else 0
        # Batches that are not asked for yet: number, indices, and the worker that was told of them.
        self._planned: deque[tuple[int, list[int], int | None]] = deque()
        self.streams: dict[int | None, StreamTrial] = {}
        # by the batch's number
        self._sent: dict[int, Request] = {}
        self._done: dict[int, Result] = {}
        self._workers: list[Worker] = []
        # All whose results are waited for.
        self._listening: dict[Any, Worker] = {}
        try:
            self._pool = self._make_pool()
            for _ in range(workers):
                self._workers.append(self._start_worker())
        except BaseException:
            self.close()
            raise

    def run(
        self,
        batches: Iterable[tuple[int, list[int]] | None],
        *,
        seed: tuple[int, ...],
        skips_bad: bool,
    ) -> Iterator[Loaded]:
        """Load numbered batches in the order given (None: the next one has to wait): the number of
        each, the batch, and what was left out of it. The batch is None where no image of it was
        asked for, or all are bad.

        Raises:
            WorkerDiedError: if a worker died; and what a sample raises (not with ``skips_bad``).
        """
        self._drop_pass()
        todo = iter(batches)
        is_over = False
        asked_s = perf_counter()
        while True:
            if not is_over:
                is_over = self._plan(todo)
            while self._planned and len(self._sent) < self._ahead:
                number, indices, worker = self._planned.popleft()
                self._send(number, indices, (*seed, number), skips_bad, worker)
            if self.has_work():
                loaded = self._take(asked_s, is_over=is_over)
                if loaded is not None:
                    yield loaded
                    asked_s = perf_counter()
            elif is_over:
                return
            else:
                sleep(POLL_S)

    def list_jobs(self) -> list[WorkerJob]:
        """The batches that were asked for and did not come yet, oldest first."""
        requests = list(self._sent.items())
        return [request.job for number, request in requests if number not in self._done]

    def list_moved(self) -> list[int]:
        """The batches that others were given before, by number, in the order in which they come."""
        return []

    def close(self) -> None:
        """End the workers; what they were doing is lost."""
        end_workers(list(self._listening.values()))
        self._listening = {}
        self._workers = []

    def _make_pool(self) -> SharedBufferPool:
        with quiet_fork():
            return SharedBufferPool(self._ahead, LENT_BUFFERS)

    def _start_worker(self, pool: SharedBufferPool | None = None) -> Worker:
        worker = Worker(self._fetcher, pool or self._pool)
        self._listening[worker.connection] = worker
        return worker

    def has_work(self) -> bool:
        """Whether there is a batch that was asked for, and not given yet."""
        return bool(self._sent)

    def _take(self, asked_s: float, *, is_over: bool) -> Loaded | None:
        """Wait for the oldest batch; None where it did not come yet.

        ``asked_s``: since when the loop waits; ``is_over``: no more are asked for.
        """
        first = next(iter(self._sent))
        while first not in self._done:
            self._receive()
        return self._finish(first)

    def _drop_pass(self) -> None:
        """Free the buffers of a pass that was broken off."""
        if self._planned:
            self._planned.clear()
            for worker in range(max(1, len(self._workers))):
                self._tell(worker, ReadAhead(None))
        # where a worker dies now, no batch of the new pass is lost
        for number, request in self._sent.items():
            job = request.job._replace(number=None, indices=())
            self._sent[number] = request._replace(job=job)
        while self._sent.keys() - self._done.keys():
            self._receive()
        for request in self._sent.values():
            request.pool.give_back(request.load.buffer)
        self._sent = {}
        self._done = {}

    def _plan(self, todo: Iterator[tuple[int, list[int]] | None]) -> bool:
        """Draw batches to ask for, and tell the workers of those whose files they read ahead.

        Returns:
            whether there are no more.
        """
        images = sum(len(indices) for _, indices, _ in self._planned)
        while len(self._planned) + len(self._sent) < self._ahead or images < self._told_images:
            try:
                item = next(todo)
            except StopIteration:
                return True
            if item is None:
                return False
            number, indices = item
            worker = None
            if self._told_images:
                worker = number % max(1, len(self._workers))
                self._tell(worker, ReadAhead(indices))
            self._planned.append((number, indices, worker))
            images += len(indices)
        return False

    def _tell(self, worker: int, message: ReadAhead) -> None:
        if not self._told_images:
            return
        if self._workers:
            self._workers[worker].send(message)
        else:
            _read_ahead(self._fetcher, message)

    def _send(
        self,
        number: int,
        indices: list[int],
        seed: tuple[int, ...],
        skips_bad: bool,
        worker: int | None,
    ) -> None:
        """Ask a worker for a batch, or load it here; None: the worker that has the fewest."""
        load = Load(number, indices, 0, seed, skips_bad)
        if not self._workers:
            load = load._replace(buffer=self._pool.take())
            job = WorkerJob(None, os.getpid(), number, tuple(indices))
            self._sent[number] = Request(job, load, self._pool)
            reserve = self._pool.buffers[load.buffer].reserve
            self._done[number] = self._fetcher.load(indices, reserve, seed, skips_bad=skips_bad)
            return
        jobs = Counter(job.worker for job in self.list_jobs())
        if worker is None:
            worker = min(range(len(self._workers)), key=jobs.__getitem__)
        if not jobs[worker]:
            self._workers[worker].began_s = perf_counter()
        self._sent[number] = self._ask(self._workers[worker], load, worker)

    def _ask(self, worker: Worker, load: Load, place: int | None = None) -> Request:
        load = load._replace(buffer=worker.pool.take())
        worker.send(load)
        job = WorkerJob(place, worker.process.pid or 0, load.number, tuple(load.indices))
        return Request(job, load, worker.pool)

    def _receive(self, timeout_s: float | None = None) -> None:
        """Wait for the next result."""
        for connection in wait(self._listening, timeout_s)[:1]:
            worker = self._listening[connection]
            try:
                number, result = worker.connection.recv()
            except (EOFError, OSError):
                raise self._explain_end(worker) from None
            worker.began_s = perf_counter()
            self._note(worker, number, result)

    def _note(self, worker: Worker, number: int, result: Result) -> None:
        """Keep a result that came."""
        self._done[number] = result

    def _explain_end(self, worker: Worker) -> WorkerDiedError:
        process = worker.process
        process.join(5)
        ending = describe_exit(process.exitcode or 0)
        died = WorkerDiedError(explain_death(ending))
        place = self._workers.index(worker) if worker in self._workers else None
        jobs = [job for job in self.list_jobs() if job.pid == process.pid]
        died.job = jobs[0] if jobs else WorkerJob(place, process.pid or 0)
        died.ending = ending
        return died

    def _finish(self, number: int) -> Loaded:
        request = self._sent.pop(number)
        result = self._done.pop(number)
        buffer = request.load.buffer
        if result.streams is not None:
            self.streams[request.job.worker] = result.streams
        if result.shape is None:
            request.pool.give_back(buffer)
            if result.error is not None:
                raise result.error
            return Loaded(number, None, result.bad)
        content = request.pool.hold(buffer, result.shape.lay_out()[1])
        return Loaded(number, open_batch(content, result.shape), result.bad)
