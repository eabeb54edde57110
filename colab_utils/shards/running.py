"""Run jobs on processes of this machine, a few at a time."""

import multiprocessing
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Executor, Future
from functools import partial
from itertools import chain, islice
from time import monotonic

from colab_utils.processes import (
    ThreadPool,
    defer_interrupt,
    explain_shared_memory,
    fork_pool,
    pop_done,
)
from colab_utils.shards.index import ShardIndex
from colab_utils.shards.jobs import ShardJob, WorkerProgress, join_run, run_job, write_shard

# Jobs that are submitted for each process, so that no process waits for its next job.
_AHEAD = 4
# Seconds to wait until running jobs stop.
_STOP_S = 60.0

Runs = Generator[tuple[list[ShardIndex], int], None, None]
"""Yields the shards that were finished since the last time, and the number of images that are done
in all.
"""


def run_jobs(jobs: Iterable[ShardJob], processes: int) -> Runs:
    """Write the shard of every job on processes of this machine.

    With one process, the jobs run in a thread of this process. Workers of some engines, such as
    Dask, are not allowed to start processes of their own.

    Raises:
        ColabUtilsError: if a job failed, or the system ended a process.
    """
    context = multiprocessing.get_context("fork")
    with explain_shared_memory():
        images_done = context.Value("q", 0)
        progress = WorkerProgress(images_done, context.Event())
    waiting = iter(jobs)
    # There are no more processes than jobs.
    first = list(islice(waiting, processes))
    run: Callable[[ShardJob], ShardIndex] = run_job
    pool: Executor
    if processes == 1:
        run = partial(write_shard, progress=progress)
        pool = ThreadPool(1)
    else:
        pool = fork_pool(len(first) or 1, join_run, progress)
    with pool:
        for finished in _run(pool, run, chain(first, waiting), processes * _AHEAD, progress):
            # The counter is read without its lock, because a killed worker may hold the lock.
            yield finished, images_done.get_obj().value


def _run(
    pool: Executor,
    run: Callable[[ShardJob], ShardIndex],
    jobs: Iterable[ShardJob],
    ahead: int,
    progress: WorkerProgress,
) -> Generator[list[ShardIndex], None, None]:
    """Yield the shards that were finished, several times a second.

    ``ahead`` jobs are submitted at the same time. After an error, running jobs are stopped and
    waited for. No job is cancelled: a job that has not begun gives up at its start.
    """
    waiting = iter(jobs)
    running: set[Future[ShardIndex]] = set()
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
