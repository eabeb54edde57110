"""Worker processes, which load batches ahead of the training loop."""

import gc
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
from multiprocessing.connection import Connection, wait
from time import sleep
from typing import Any, NamedTuple

import torch

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arrival import POLL_S
from colab_utils.loading.batch import PackedBatch, open_batch
from colab_utils.loading.fetcher import Fetcher, Result
from colab_utils.loading.shared_memory import SharedBuffer, SharedBufferPool
from colab_utils.machine import find_free_memory
from colab_utils.processes import end_with_parent, find_cut_file, quiet_fork
from colab_utils.streams import StreamTrial
from colab_utils.units import format_bytes

PREFETCH = 2
"""Batches ahead for each worker."""

# Files that each worker is told of ahead; how many of them it reads at once, its reader decides.
_TOLD_IMAGES = 256
# A training loop may hold these: its batch, the next one, and two more that somebody looks at.
_LENT_BUFFERS = 4


class WorkerJob(NamedTuple):
    """A worker, and the batch that it was asked for, as far as that is known."""

    worker: int | None
    """Which worker process, from 0; None for this process."""
    pid: int
    number: int | None = None
    """Of the batch in its epoch."""
    indices: tuple[Any, ...] = ()
    """In the loader's dataset."""


class _ReadAhead(NamedTuple):
    """Tell a worker which samples it is asked for later; None: of none of those told before."""

    indices: list[int] | None


class _Load(NamedTuple):
    """Ask a worker for a batch."""

    number: int
    indices: list[int]
    buffer: int
    seed: tuple[int, ...]
    skips_bad: bool


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


def _serve(connection: Connection, fetcher: Fetcher, buffers: list[SharedBuffer]) -> None:
    """The life of a worker process: it loads what it is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    gc.freeze()  # a collection would touch, and so copy, all that is shared with the parent
    torch.set_num_threads(1)
    with suppress(EOFError, OSError):
        while True:
            message = connection.recv()
            if isinstance(message, _ReadAhead):
                _read_ahead(fetcher, message)
                continue
            reserve = buffers[message.buffer].reserve
            result = fetcher.load(
                message.indices, reserve, message.seed, skips_bad=message.skips_bad
            )
            connection.send((message.number, result._replace(error=_make_portable(result.error))))


def _read_ahead(fetcher: Fetcher, message: _ReadAhead) -> None:
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
        # by the batch's number, with that of its buffer
        self._sent: dict[int, tuple[WorkerJob, int]] = {}
        self._done: dict[int, Result] = {}
        self._processes: list[Any] = []
        self._connections: list[Any] = []
        context = multiprocessing.get_context("fork")
        try:
            with quiet_fork():
                self._buffers = SharedBufferPool(self._ahead, _LENT_BUFFERS)
                for _ in range(workers):
                    here, there = context.Pipe()
                    self._connections.append(here)
                    process = context.Process(
                        target=_serve, args=(there, fetcher, self._buffers.buffers), daemon=True
                    )
                    with there:
                        process.start()
                    self._processes.append(process)
        except BaseException:
            self.close()
            raise

    def run(
        self,
        batches: Iterable[tuple[int, list[int]] | None],
        *,
        seed: tuple[int, ...],
        skips_bad: bool,
    ) -> Iterator[tuple[int, PackedBatch | None, Sequence[tuple[int, str]]]]:
        """Load numbered batches in the order given (None: the next one has to wait): the number of
        each, the batch, and what was left out of it. The batch is None where no image of it was
        asked for, or all are bad.

        Raises:
            WorkerDiedError: if a worker died; and what a sample raises (not with ``skips_bad``).
        """
        self._drop_pass()
        todo = iter(batches)
        is_over = False
        while True:
            if not is_over:
                is_over = self._plan(todo)
            while self._planned and len(self._sent) < self._ahead:
                number, indices, worker = self._planned.popleft()
                self._send(number, indices, (*seed, number), skips_bad, worker)
            if self._sent:
                first = next(iter(self._sent))
                while first not in self._done:
                    self._receive()
                yield self._finish(first)
            elif is_over:
                return
            else:
                sleep(POLL_S)

    def list_jobs(self) -> list[WorkerJob]:
        """The batches that were asked for and did not come yet, oldest first."""
        return [job for number, (job, _) in list(self._sent.items()) if number not in self._done]

    def close(self) -> None:
        """End the workers; what they were doing is lost."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes = []
        self._connections = []

    def _drop_pass(self) -> None:
        """Free the buffers of a pass that was broken off."""
        if self._planned:
            self._planned.clear()
            for worker in range(max(1, len(self._processes))):
                self._tell(worker, _ReadAhead(None))
        # where a worker dies now, no batch of the new pass is lost
        for number, (job, buffer) in self._sent.items():
            self._sent[number] = job._replace(number=None, indices=()), buffer
        while self._sent.keys() - self._done.keys():
            self._receive()
        for _, buffer in self._sent.values():
            self._buffers.give_back(buffer)
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
                worker = number % max(1, len(self._processes))
                self._tell(worker, _ReadAhead(indices))
            self._planned.append((number, indices, worker))
            images += len(indices)
        return False

    def _tell(self, worker: int, message: _ReadAhead) -> None:
        if not self._told_images:
            return
        if not self._processes:
            _read_ahead(self._fetcher, message)
            return
        # It died: what it has done is received first.
        with suppress(OSError):
            self._connections[worker].send(message)

    def _send(
        self,
        number: int,
        indices: list[int],
        seed: tuple[int, ...],
        skips_bad: bool,
        worker: int | None,
    ) -> None:
        """Ask a worker for a batch, or load it here; None: the worker that has the fewest."""
        buffer = self._buffers.take()
        asked = tuple(indices)
        if not self._processes:
            self._sent[number] = WorkerJob(None, os.getpid(), number, asked), buffer
            reserve = self._buffers.buffers[buffer].reserve
            self._done[number] = self._fetcher.load(indices, reserve, seed, skips_bad=skips_bad)
            return
        if worker is None:
            jobs = Counter(job.worker for job in self.list_jobs())
            worker = min(range(len(self._processes)), key=jobs.__getitem__)
        self._sent[number] = WorkerJob(worker, self._processes[worker].pid, number, asked), buffer
        # It died: what it has done is received first.
        with suppress(OSError):
            self._connections[worker].send(_Load(number, indices, buffer, seed, skips_bad))

    def _receive(self) -> None:
        """Wait for the next result."""
        connection: Any = wait(self._connections)[0]
        try:
            number, result = connection.recv()
        except (EOFError, OSError):
            worker = self._connections.index(connection)
            process = self._processes[worker]
            process.join(5)
            ending = describe_exit(process.exitcode or 0)
            died = WorkerDiedError(explain_death(ending))
            jobs = [job for job in self.list_jobs() if job.worker == worker]
            died.job = jobs[0] if jobs else WorkerJob(worker, process.pid)
            died.ending = ending
            raise died from None
        self._done[number] = result

    def _finish(self, number: int) -> tuple[int, PackedBatch | None, Sequence[tuple[int, str]]]:
        job, buffer = self._sent.pop(number)
        result = self._done.pop(number)
        if result.streams is not None:
            self.streams[job.worker] = result.streams
        if result.shape is None:
            self._buffers.give_back(buffer)
            if result.error is not None:
                raise result.error
            return number, None, result.bad
        content = self._buffers.hold(buffer, result.shape.lay_out()[1])
        return number, open_batch(content, result.shape), result.bad
