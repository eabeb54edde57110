"""Start processes and threads, explain the error when the system starts no more of them, and run
jobs on processes.
"""

import gc
import mmap
import multiprocessing
import os
import queue
import signal
import warnings
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from threading import Thread, current_thread, main_thread
from time import monotonic
from typing import Any, TypeVar

import psutil

from colab_utils.errors import ColabUtilsError, explain_limits, explain_os_error
from colab_utils.machine import require_linux

# Seconds that `pop_done` waits at most. Ctrl-C may be delayed for this time.
_WAIT_S = 0.2


def list_pids() -> list[int]:
    """Return the pids of this process and of all its descendants.

    Example:
        >>> list_pids()[0] == os.getpid()
        True
    """
    pids = [os.getpid()]
    # An error means that a process ended meanwhile, or that this system has no lists of children.
    with suppress(OSError):
        # Linux lists the children of each process. psutil would look at every process of the
        # machine, which takes longer. `pids` grows while the loop goes over it.
        for pid in pids:
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
        return pids
    return [pids[0], *(child.pid for child in psutil.Process().children(recursive=True))]


def end_with_parent() -> None:
    """Make this worker process end when its parent process is killed.

    Otherwise it would run on, and nobody would end it.
    """
    import fcntl

    parent: Any = multiprocessing.parent_process()
    # When the parent's end of this pipe closes, the kernel sends SIGIO, which ends this process.
    # This needs no thread. A thread would count towards the limit of processes (`ulimit -u`).
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


def end_process(process: Any, wait_s: float = 5.0) -> None:
    """Kill a worker process and wait for its end. If it hangs, Python will not wait for it either,
    when this program ends.
    """
    process.kill()
    process.join(wait_s)
    if process.exitcode is None:
        vars(multiprocessing.process)["_children"].discard(process)


class ThreadPool(ThreadPoolExecutor):
    """A pool of threads. If the system starts no more threads, it works with those that it has.

    If it has none, `submit` and `map` raise a `ColabUtilsError`.
    """

    def _adjust_thread_count(self) -> None:
        try:
            with explain_limits():
                super()._adjust_thread_count()
        except ColabUtilsError:
            if not self._threads:
                raise


def map_ahead(
    pool: ThreadPool, call: Callable[[Any], Any], items: Iterable[Any], *, ahead: int
) -> Iterator[Any]:
    """Yield ``call(item)`` for each item, in order, while ``pool`` works on the next ones.

    Example:
        >>> with ThreadPool(2) as pool:
        ...     list(map_ahead(pool, abs, [-1, -2], ahead=4))
        [1, 2]
    """
    jobs = deque[Future[Any]]()
    for item in items:
        jobs.append(pool.submit(call, item))
        if len(jobs) > ahead:
            yield jobs.popleft().result()
    for job in jobs:
        yield job.result()


def share_array(kind: Any, count: int = 1) -> Any:
    """Return a numpy array of zeros that this process shares with those forked from it.

    Example:
        >>> share_array("int64")
        array([0])
    """
    # The command line loads this module, and numpy only where it needs it.
    import numpy as np

    return np.frombuffer(mmap.mmap(-1, count * np.dtype(kind).itemsize), kind)


def start_thread(call: Callable[[], object], name: str) -> Thread:
    """Start a thread that does not keep the program from ending.

    Raises:
        ColabUtilsError: the system starts no more threads.
    """
    thread = Thread(target=call, name=name, daemon=True)
    with explain_limits():
        thread.start()
    return thread


@contextmanager
def explain_shared_memory() -> Iterator[None]:
    """Explain an error of a block that makes locks or queues for several processes.

    Raises:
        ColabUtilsError: the block failed; the message says what to do.
    """
    try:
        with explain_limits():
            yield
    except OSError as error:
        reason = explain_os_error(error, "Make it writable.")
        raise ColabUtilsError(
            f"Locks for processes cannot be made in /dev/shm: {reason} In Docker, --shm-size makes "
            "/dev/shm larger."
        ) from None


class _ForkPool(ProcessPoolExecutor):
    def begin(self) -> None:
        """Start all processes and threads of the pool. If one does not start, end the others."""
        queue: Any = vars(self)["_call_queue"]
        try:
            with quiet_fork():
                # The thread of the queue is started here, so that an error is seen. Otherwise the
                # pool's manager thread would start it later, and an error would end the manager
                # thread silently.
                queue._start_thread()
                # With fork, all processes start at the first job. This one, `int()`, does nothing.
                self.submit(int)
        except BaseException:
            queue.close()
            for process in self._processes.values():
                process.kill()
                process.join()
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, BrokenExecutor):
            raise explain_lost_process() from None


def explain_lost_process() -> ColabUtilsError:
    """Return the error to raise for a `BrokenExecutor`."""
    return ColabUtilsError(
        "The system ended a process, most often because memory ran out. Use fewer workers "
        "(--workers 1)."
    )


def fork_pool(
    workers: int, initializer: Callable[..., object] = int, *arguments: Any
) -> ProcessPoolExecutor:
    """Start a pool of forked worker processes; Linux only.

    Workers do not react to Ctrl-C: only this process does. If this process is killed, they end,
    too. If the system ends a worker, the ``with`` block of the pool raises a `ColabUtilsError`.

    Args:
        workers: how many processes to start.
        initializer: each worker first calls ``initializer(*arguments)``. By default nothing is
            done.
        arguments: the arguments of ``initializer``.

    Raises:
        ColabUtilsError: this is not Linux, or the system starts no more processes or threads. In
            that case, the processes that had already started are ended.

    Example:
        >>> with fork_pool(2) as pool:
        ...     list(pool.map(abs, (-1, 2)))
        [1, 2]
    """
    require_linux("start worker processes")

    def begin() -> None:
        # Otherwise a worker's garbage collector would free objects that belong to the parent, such
        # as tensors on a GPU.
        gc.freeze()
        end_with_parent()
        initializer(*arguments)

    with explain_shared_memory():
        pool = _ForkPool(workers, multiprocessing.get_context("fork"), begin)
    try:
        # Workers are forked within the block and never leave it, so they go on to ignore Ctrl-C.
        with defer_interrupt():
            pool.begin()
    except KeyboardInterrupt:
        # The caller does not have the pool yet, so it is shut down here. Python complains if the
        # pool's thread is still ending when the process ends.
        pool.shutdown(cancel_futures=True)
        raise
    return pool


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Delay Ctrl-C until the block has ended. Keep the block short.

    The methods of a future or a pool hold locks. A `KeyboardInterrupt` within them would leave a
    lock held, and the pool could never end.

    Example:
        >>> with defer_interrupt():
        ...     pass
    """
    if current_thread() is not main_thread():
        # Python handles signals in the main thread only.
        yield
        return
    signals: list[int] = []

    def keep(number: int, _frame: Any) -> None:
        signals.append(number)

    handler = signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        # A Ctrl-C counts even if the block raises an error.
        if signals:
            signal.raise_signal(signal.SIGINT)


def pop_done(pending: set[Future[Any]]) -> set[Future[Any]]:
    """Wait until at least one future is done, for 0.2 seconds at most.

    The futures that are done are removed from ``pending`` and returned. Ctrl-C is delayed until the
    wait has ended.

    Example:
        >>> pop_done(set())
        set()
    """
    with defer_interrupt():
        done, _ = wait(pending, _WAIT_S, FIRST_COMPLETED)
    pending -= done
    return done


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Hide two warnings, which do not matter here, while a block starts worker processes.

    Raises:
        ColabUtilsError: see `explain_limits`.
    """
    with warnings.catch_warnings(), explain_limits():
        # Python 3.12 warns when a process with threads forks, because threads are not forked. Our
        # workers need none of these threads.
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )
        # torch warns of more workers than cores, but the caller chose their number on purpose.
        warnings.filterwarnings(
            "ignore", message="This DataLoader will create", category=UserWarning
        )
        yield


_Job = TypeVar("_Job")
_Result = TypeVar("_Result")
# Seconds to wait until running jobs stop.
_STOP_S = 60.0


@dataclass(frozen=True)
class JobProgress:
    """The counter and the stop event that all processes of one run share."""

    images_done: Any = None
    """Number of images that are done, in shared memory."""
    stop: Any = None
    """Event that makes every process give up at its next image."""

    def add(self, images: int) -> None:
        """Count images that are done.

        Raises:
            ColabUtilsError: if the run was stopped.
        """
        if self.stop is not None and self.stop.is_set():
            raise ColabUtilsError("The work was stopped. Run the same again.")
        if self.images_done is not None:
            with self.images_done.get_lock():
                self.images_done.value += images


Work = Callable[[Iterator[_Job], JobProgress], Iterator[_Result]]
"""Takes jobs, and yields a result for each, in any order. It may take a job before the jobs before
it are done, to begin to read its files.
"""


# What this process does in the run that it has joined. It is a global, as shared memory cannot be
# sent to a process.
_call: Any = None


def _join(call: Callable[[], object]) -> None:
    """Make this process, which was just forked, a worker of a run."""
    global _call
    _call = call


def _serve() -> None:
    """Do jobs in a process that has joined a run."""
    _call()


def run_jobs(
    work: Work[_Job, _Result], jobs: Sequence[_Job], processes: int
) -> Generator[tuple[list[_Result], int], None, None]:
    """Do all jobs on processes of this machine.

    Several times a second, the results that came since the last time are yielded, and the number of
    images that are done in all. With one process, the jobs run in a thread of this process. Workers
    of some engines, such as Dask, are not allowed to start processes of their own.

    After an error, the other processes are stopped and waited for.

    Raises:
        ColabUtilsError: if a job failed, or the system ended a process.
    """
    # There are no more processes than jobs.
    processes = max(1, min(processes, len(jobs)))
    context = multiprocessing.get_context("fork")
    results: Any = queue.SimpleQueue()
    with explain_shared_memory():
        progress = JobProgress(context.Value("q", 0), context.Event())
        taken = context.Value("q", 0)
        if processes > 1:
            results = context.SimpleQueue()

    def serve() -> None:
        for result in work(_take(jobs, taken, progress), progress):
            results.put(result)

    def pop_results() -> list[_Result]:
        return [results.get() for _ in iter(results.empty, True)]

    pool: Executor = ThreadPool(1) if processes == 1 else fork_pool(processes, _join, serve)
    with pool:
        with defer_interrupt():
            calls = [serve] if processes == 1 else [_serve] * processes
            running = {pool.submit(call) for call in calls}
        try:
            while running:
                done = pop_done(running)
                # The counter is read without its lock, because a killed worker may hold the lock.
                yield pop_results(), progress.images_done.get_obj().value
                for future in done:
                    future.result()
        except BaseException:
            progress.stop.set()
            until_s = monotonic() + _STOP_S
            while running and monotonic() < until_s:
                # A process ends only once its results are taken.
                pop_done(running)
                pop_results()
            raise


def _take(jobs: Sequence[_Job], taken: Any, progress: JobProgress) -> Iterator[_Job]:
    """Yield the jobs that no other process takes, until none is left or the run is stopped.

    ``taken`` is the number of jobs that were taken, in shared memory.
    """
    while True:
        # A run that was stopped asks nothing of a server that may be gone.
        progress.add(0)
        with taken.get_lock():
            number = taken.value
            taken.value += 1
        if number >= len(jobs):
            return
        yield jobs[number]
