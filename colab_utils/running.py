"""Run jobs on processes of this machine, a few at a time, and count the images that are done."""

import multiprocessing
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, islice
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
# Jobs that are submitted for each process, so that no process waits for its next job.
_AHEAD = 4
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


# The progress of this process's run. It is a global, as shared memory cannot be sent with a job.
_progress = JobProgress()


def _join(progress: JobProgress) -> None:
    """Make this process, which was just forked, a worker of a run."""
    global _progress
    _progress = progress


def _work(
    work: Callable[[_Job, JobProgress], _Result], progress: JobProgress | None, job: _Job
) -> _Result:
    """Do a job. Without ``progress``, it is done in a process that has joined a run."""
    return work(job, progress or _progress)


def run_jobs(
    work: Callable[[_Job, JobProgress], _Result], jobs: Iterable[_Job], processes: int
) -> Generator[tuple[list[_Result], int], None, None]:
    """Call ``work`` for every job on processes of this machine.

    Several times a second, the results that came since the last time are yielded, and the number of
    images that are done in all. With one process, the jobs run in a thread of this process. Workers
    of some engines, such as Dask, are not allowed to start processes of their own.

    Raises:
        ColabUtilsError: if a job failed, or the system ended a process.
    """
    context = multiprocessing.get_context("fork")
    with explain_shared_memory():
        images_done = context.Value("q", 0)
        progress = JobProgress(images_done, context.Event())
    waiting = iter(jobs)
    # There are no more processes than jobs.
    first = list(islice(waiting, processes))
    run: Callable[[_Job], _Result] = partial(_work, work, None)
    pool: Executor
    if processes == 1:
        run = partial(_work, work, progress)
        pool = ThreadPool(1)
    else:
        pool = fork_pool(len(first) or 1, _join, progress)
    with pool:
        for finished in _run(pool, run, chain(first, waiting), processes * _AHEAD, progress):
            # The counter is read without its lock, because a killed worker may hold the lock.
            yield finished, images_done.get_obj().value


def _run(
    pool: Executor,
    run: Callable[[_Job], _Result],
    jobs: Iterable[_Job],
    ahead: int,
    progress: JobProgress,
) -> Generator[list[_Result], None, None]:
    """Yield the results that came, several times a second.

    ``ahead`` jobs are submitted at the same time. After an error, running jobs are stopped and
    waited for. No job is cancelled: a job that has not begun gives up at its start.
    """
    waiting = iter(jobs)
    running: set[Future[_Result]] = set()
    try:
        while True:
            with defer_interrupt():
                for job in islice(waiting, ahead - len(running)):
                    running.add(pool.submit(run, job))
            if not running:
                return
            yield [future.result() for future in pop_done(running)]
    except BaseException:
        progress.stop.set()
        until_s = monotonic() + _STOP_S
        while running and monotonic() < until_s:
            pop_done(running)
        raise
