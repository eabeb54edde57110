"""Who loads the batches: worker processes, one loader process with threads, threads in this process, or nobody else."""

from __future__ import annotations

import gc
import multiprocessing
import pickle
import queue
import re
import selectors
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import BatchShape
from colab_utils.loading.sample import BadSampleError, PackedSample
from colab_utils.loading.slots import Slot
from colab_utils.loading.source import Source
from colab_utils.runtime import end_with_parent, find_free_memory, format_bytes, quiet_fork

__all__ = ["Crew", "HandOff", "Job", "Result", "describe_exit", "describe_way", "explain_death", "start_crew"]

HandOff = Literal["processes", "threads", "inline"]
"""Worker processes; one loader process with threads; threads in the training process."""


class Job(NamedTuple):
    """A batch, or a part of one, to load."""

    ticket: int
    indices: list[int]
    slot: int | None
    """Where to write it; None for samples."""
    seed: tuple[int, ...]
    tolerant: bool
    """Leave bad samples out, and say so."""


class Result(NamedTuple):
    """What became of a job."""

    ticket: int
    shape: BatchShape | None = None
    samples: list[PackedSample] | None = None
    bad: Sequence[tuple[int, ColabUtilsError]] = ()
    """Indices that were left out, and why."""
    error: Exception | None = None


class Crew(Protocol):
    """Takes jobs and gives results, in the order in which they get done."""

    members: int
    """How many queues of jobs there are."""
    capacity: int
    """How many jobs run at a time."""

    def send(self, member: int, job: Job) -> None:
        """Queue a job for one member."""

    def receive(self) -> Result:
        """Wait for the next result.

        Raises:
            ColabUtilsError: if a worker process died.
        """

    def close(self) -> None:
        """End the workers; what they were doing is lost."""


def describe_way(hand_off: HandOff, workers: int, prefetch: int) -> str:
    """A way of loading in words.

    Example:
        >>> describe_way("processes", 2, 4)
        '2 worker processes, 4 batches ahead each'
    """
    if not workers:
        return "this process, when a batch is asked for"
    one, many = {
        "processes": ("worker process", "worker processes"),
        "threads": ("thread of one loader process", "threads of one loader process"),
        "inline": ("thread here", "threads here"),
    }[hand_off]
    return f"{workers} {one if workers == 1 else many}, {prefetch} batches ahead each"


def start_crew(hand_off: HandOff, workers: int, source: Source, slots: list[Slot]) -> Crew:
    """Start ``workers`` processes, or threads.

    Raises:
        OSError: if the system starts no more processes.
    """
    if hand_off == "inline" or workers == 0:
        return _Inline(workers, source, slots)
    processes, threads = (workers, 1) if hand_off == "processes" else (1, workers)
    return _Processes(processes, threads, source, slots)


def _do_job(source: Source, slots: list[Slot], job: Job) -> Result:
    indices = list(job.indices)
    bad: list[tuple[int, ColabUtilsError]] = []
    try:
        while indices:
            try:
                if job.slot is None:
                    samples = source.read_samples(indices, job.seed)
                    return Result(job.ticket, samples=samples, bad=bad)
                shape = source.write(indices, slots[job.slot].reserve, job.seed)
                return Result(job.ticket, shape=shape, bad=bad)
            except BadSampleError as failure:
                if not job.tolerant:
                    raise failure.error from None
                bad.append((indices.pop(failure.place), failure.error))
    except Exception as error:
        return Result(job.ticket, bad=bad, error=error)
    return Result(job.ticket, bad=bad)


class _Inline:
    """Jobs run in this process: by threads, or, without any, when their results are asked for."""

    def __init__(self, threads: int, source: Source, slots: list[Slot]) -> None:
        self.members, self.capacity = 1, max(1, threads)
        self._source, self._slots = source, slots
        self._pool = ThreadPoolExecutor(threads, "loader") if threads else None
        self._jobs: deque[Job] = deque()
        self._results: queue.SimpleQueue[Result] = queue.SimpleQueue()

    def send(self, member: int, job: Job) -> None:
        if self._pool:
            self._pool.submit(lambda: self._results.put(_do_job(self._source, self._slots, job)))
        else:
            self._jobs.append(job)

    def receive(self) -> Result:
        return self._results.get() if self._pool else _do_job(self._source, self._slots, self._jobs.popleft())

    def close(self) -> None:
        if self._pool:
            self._pool.shutdown(cancel_futures=True)


class _Processes:
    """Jobs run in other processes; a pipe to each, so that one that dies is noticed at once and locks nobody out."""

    def __init__(self, processes: int, threads: int, source: Source, slots: list[Slot]) -> None:
        self.members, self.capacity = processes, processes * threads
        self._selector = selectors.DefaultSelector()
        self._processes: list[Any] = []
        self._connections: list[Connection] = []
        self.dead: tuple[int, str] | None = None  # the member that died, and how
        context = multiprocessing.get_context("fork")
        try:
            for member in range(processes):
                here, there = context.Pipe()
                self._connections.append(here)
                process = context.Process(target=_serve, args=(there, threads, source, slots), daemon=True)
                with there, quiet_fork():
                    process.start()
                self._processes.append(process)
                self._selector.register(here, selectors.EVENT_READ, member)
        except OSError:
            self.close()
            raise

    def send(self, member: int, job: Job) -> None:
        try:
            self._connections[member].send(job)
        except OSError:
            raise self._explain_death(member) from None

    def receive(self) -> Result:
        key, _ = self._selector.select()[0]
        try:
            result: Result = self._connections[key.data].recv()
        except (EOFError, OSError):
            raise self._explain_death(key.data) from None
        return result

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join(5)
            if process.exitcode is None:
                process.kill()
                process.join()
            process.close()
        for connection in self._connections:
            connection.close()
        self._processes, self._connections = [], []
        self._selector.close()

    def _explain_death(self, member: int) -> ColabUtilsError:
        process = self._processes[member]
        process.join(5)
        self.dead = member, describe_exit(process.exitcode or 0)
        return explain_death(self.dead[1])


def describe_exit(code: int) -> str:
    """How a process ended, by its exit code; negative is a signal.

    Example:
        >>> describe_exit(-9), describe_exit(1)
        ('killed by signal: Killed', 'exit code 1')
    """
    return f"killed by signal: {signal.strsignal(-code)}" if code < 0 else f"exit code {code}"


def explain_death(found: str) -> ColabUtilsError:
    """A worker's death in words, from what is known about it."""
    how = re.search(r"killed by signal: ([\w ]+)|exit code \d+", found)
    free = f"{format_bytes(find_free_memory())} of memory"
    if Path("/dev/shm").is_dir():
        free += f" and {format_bytes(shutil.disk_usage('/dev/shm').free)} of /dev/shm"
    return ColabUtilsError(
        f"expected every worker process to live, found one ended ({how[0] if how else 'no reason given'}); now {free} "
        "are free. Mostly memory ran out: use fewer workers, a smaller prefetch or a smaller batch, and run it again."
    )


def _serve(connection: Connection, threads: int, source: Source, slots: list[Slot]) -> None:
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    gc.freeze()  # a collection would touch, and so copy, all that is shared with the parent
    torch.set_num_threads(1)
    lock = threading.Lock()

    def work(job: Job) -> None:
        result = _do_job(source, slots, job)
        if result.error is not None and not isinstance(result.error, ColabUtilsError):
            result = result._replace(error=_make_portable(result.error))
        with lock:
            connection.send(result)

    with ThreadPoolExecutor(threads) as pool:
        while True:
            try:
                job = connection.recv()
            except (EOFError, OSError):
                return
            if threads == 1:
                work(job)
            else:
                pool.submit(work, job)


def _make_portable(error: Exception) -> Exception:
    """The error as another process can take it, with its traceback as a note."""
    trace = "".join(traceback.format_exception(error))
    try:
        error = pickle.loads(pickle.dumps(error))
    except Exception:  # whatever somebody's own exception does when it is copied
        error = RuntimeError(f"{type(error).__name__}: {error}")
    error.add_note(f"in a worker process:\n{trace}")
    return error
