"""Run jobs on processes of this machine or on an executor, a few at a time; run lost jobs again."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future
from contextlib import suppress
from itertools import chain, islice
from time import monotonic
from typing import Any

from colab_utils.errors import ColabUtilsError
from colab_utils.processes import defer_interrupt, explain_shared_memory, fork_pool, pop_done
from colab_utils.shards.index import ShardIndex
from colab_utils.shards.job_plan import JobPlan, ShardJob
from colab_utils.shards.jobs import WorkerProgress, join_run

# Jobs that are submitted for each worker, so that no worker waits for its next job.
_AHEAD = 4
# Jobs that are submitted for all workers, if the number of workers is not known.
_MOST_AHEAD = 256
# Seconds to wait until running jobs stop. A network folder shows the stop file late.
_STOP_S = 60.0

Runs = Generator[tuple[list[ShardIndex], int], None, None]
"""Yields the shards that were finished since the last time, and the number of images that are done
in all (0 if that is not known).
"""


def run_here(
    run: Callable[[Any], ShardIndex], list_jobs: Callable[[], Iterable[Any]], processes: int
) -> Runs:
    """Run every job that ``list_jobs`` gives on processes of this machine.

    Raises:
        ColabUtilsError: if a job failed, or the system ended a process.
    """
    context = multiprocessing.get_context("fork")
    with explain_shared_memory():
        images_done = context.Value("q", 0)
        progress = WorkerProgress(images_done, context.Event())
    source = iter(list_jobs())
    # There are no more processes than jobs.
    first = list(islice(source, processes))
    with fork_pool(len(first) or 1, join_run, progress) as pool:
        all_jobs = chain(first, source)
        for finished in _run(pool, run, all_jobs, processes * _AHEAD, progress.stop.set):
            # The counter is read without its lock, because a killed worker may hold the lock.
            yield finished, images_done.get_obj().value


def run_elsewhere(
    run: Callable[[Any], ShardIndex],
    plan: JobPlan,
    executor: Executor,
    *,
    workers: int | None,
    retries: int,
) -> Runs:
    """Run every job of a plan on an executor.

    Raises:
        ColabUtilsError: if a job failed, or its worker was lost more than ``retries`` times.
    """
    jobs = plan.jobs
    ahead = _MOST_AHEAD if workers is None else workers * _AHEAD
    for finished in _run(executor, run, jobs, ahead, jobs[0].stop_file.touch, retries):
        yield finished, 0


def _run(
    executor: Executor,
    run: Callable[[Any], ShardIndex],
    jobs: Iterable[Any],
    ahead: int,
    stop: Callable[[], object],
    retries: int | None = None,
) -> Generator[list[ShardIndex], None, None]:
    """Yield the shards that were finished, several times a second.

    Args:
        executor: the pool or the engine that runs the jobs.
        run: writes the shard of a job.
        jobs: the jobs.
        ahead: number of jobs that are submitted at the same time.
        stop: called after an error. Running jobs are then waited for. No job is cancelled, because
            a job that still waits in the engine looks like one that runs.
        retries: how often a job is submitted again after its worker was lost. None is for
            `fork_pool`, which explains a lost worker itself.
    """
    waiting = iter(jobs)
    running: dict[Future[ShardIndex], Any] = {}
    losses = Counter[int]()
    try:
        while True:
            with defer_interrupt():
                for job in islice(waiting, max(0, ahead - len(running))):
                    running[_submit(executor, run, job, retries)] = job
            if not running:
                return
            finished = []
            for future in pop_done(set(running)):
                job = running.pop(future)
                index = _take(future, job, losses, retries)
                if index is not None:
                    finished.append(index)
                    continue
                # The run gets a new name, so that an engine that caches results runs the job again.
                job = job._replace(run=f"{job.run}-{losses[job.number]}")
                running[_submit(executor, run, job, retries)] = job
            yield finished
    except BaseException:
        # The user has to see the first error, not one that follows from it.
        with suppress(OSError, ColabUtilsError):
            stop()
        until_s = monotonic() + _STOP_S
        pending = set(running)
        while pending and monotonic() < until_s:
            pop_done(pending)
        raise


def _submit(
    executor: Executor, run: Callable[[Any], ShardIndex], job: Any, retries: int | None
) -> Future[ShardIndex]:
    try:
        future = executor.submit(run, job)
        if isinstance(future, Future):
            return future
        raise TypeError(f"in place of a Future came {future!r:.50}")
    except Exception as error:
        if retries is None:
            raise
        raise _explain_loss(job, error) from error


def _take(
    future: Future[ShardIndex], job: Any, losses: Counter[int], retries: int | None
) -> ShardIndex | None:
    """Return the index of a shard; None if its worker was lost and the job is to be run again."""
    try:
        index = future.result()
        if isinstance(index, ShardIndex):
            return index
        raise TypeError(f"in place of an index of the shard came {index!r:.50}")
    except ColabUtilsError:
        raise
    except Exception as error:
        if retries is None:
            raise
        losses[job.number] += 1
        # An engine that cancels a job has lost its coordinator, so it would not answer again.
        if losses[job.number] > retries or isinstance(error, CancelledError):
            raise _explain_loss(job, error) from error
        return None


def _explain_loss(job: ShardJob, error: Exception) -> ColabUtilsError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ColabUtilsError(
        f"shard-{job.number:06d} was not written: the executor lost it, or takes no more jobs "
        f"({reason:.200}). Check the workers and run the same again: it continues after the "
        "finished shards."
    )
