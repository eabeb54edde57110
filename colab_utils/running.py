"""Run jobs on processes of this machine, and count the images that are done."""

import multiprocessing
import queue
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Executor
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
