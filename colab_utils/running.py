"""Run jobs on processes of this machine, and count the images that are done."""

import multiprocessing
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from time import monotonic
from typing import Any, TypeVar

from colab_utils.errors import ColabUtilsError
from colab_utils.processes import (
    ThreadPool,
    defer_interrupt,
    explain_shared_memory,
    fork_pool,
    pop_done,
)

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


@dataclass(frozen=True)
class _Run:
    """What the processes of one run share."""

    work: Work[Any, Any]
    jobs: Sequence[Any]
    progress: JobProgress
    taken: Any
    """Number of jobs that were taken, in shared memory."""
    results: Any
    """Queue of the results."""

    def take(self) -> Iterator[Any]:
        """Yield the jobs that no other process takes, until none is left or the run is stopped."""
        while True:
            # A run that was stopped asks nothing of a server that may be gone.
            self.progress.add(0)
            with self.taken.get_lock():
                number = self.taken.value
                self.taken.value += 1
            if number >= len(self.jobs):
                return
            yield self.jobs[number]

    def serve(self) -> None:
        """Do jobs until none is left."""
        for result in self.work(self.take(), self.progress):
            self.results.put(result)

    def pop_results(self) -> list[Any]:
        """Return the results that came since the last call."""
        results = []
        while not self.results.empty():
            results.append(self.results.get())
        return results


# The run of this process. It is a global, as shared memory cannot be sent to a process.
_run: _Run | None = None


def _join(run: _Run) -> None:
    """Make this process, which was just forked, a worker of a run."""
    global _run
    _run = run


def _serve() -> None:
    """Do jobs in a process that has joined a run."""
    if _run is not None:
        _run.serve()


def run_jobs(
    work: Work[_Job, _Result], jobs: Sequence[_Job], processes: int
) -> Generator[tuple[list[_Result], int], None, None]:
    """Do all jobs on processes of this machine.

    Several times a second, the results that came since the last time are yielded, and the number of
    images that are done in all. With one process, the jobs run in a thread of this process. Workers
    of some engines, such as Dask, are not allowed to start processes of their own.

    Raises:
        ColabUtilsError: if a job failed, or the system ended a process.
    """
    # There are no more processes than jobs.
    processes = max(1, min(processes, len(jobs)))
    context = multiprocessing.get_context("fork")
    with explain_shared_memory():
        progress = JobProgress(context.Value("q", 0), context.Event())
        results = queue.SimpleQueue[Any]() if processes == 1 else context.SimpleQueue()
        run = _Run(work, jobs, progress, context.Value("q", 0), results)
    pool: Executor
    if processes == 1:
        pool = ThreadPool(1)
        serve = run.serve
    else:
        pool = fork_pool(processes, _join, run)
        serve = _serve
    with pool:
        with defer_interrupt():
            running = {pool.submit(serve) for _ in range(processes)}
        for finished in _watch(running, run):
            # The counter is read without its lock, because a killed worker may hold the lock.
            yield finished, progress.images_done.get_obj().value


def _watch(running: set[Future[None]], run: _Run) -> Generator[list[Any], None, None]:
    """Yield the results that came, several times a second.

    After an error, the other processes are stopped and waited for.
    """
    try:
        while running:
            done = pop_done(running)
            yield run.pop_results()
            for future in done:
                future.result()
    except BaseException:
        run.progress.stop.set()
        until_s = monotonic() + _STOP_S
        while running and monotonic() < until_s:
            # A process ends only once its results are taken.
            pop_done(running)
            run.pop_results()
        raise
