"""Jobs on processes of this machine, or on anybody's executor: a few at a time, lost ones again."""

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

# Jobs that a worker has before it, so that it never waits for the next one.
_AHEAD = 4
# The same for all workers together, where nobody says how many there are.
_MOST_AHEAD = 256
# So long jobs at work may take to give up: network folders show a new file late.
_STOP_S = 60.0

Runs = Generator[tuple[list[ShardIndex], int], None, None]
"""Gives shards that were finished since the last time, and how many images are done in all, as far
as that is known.
"""


def run_here(run: Callable[[Any], ShardIndex], jobs: Iterable[Any], processes: int) -> Runs:
    """Run every job on processes of this machine.

    Raises:
        ColabUtilsError: a job failed, or the system ended a process.
    """
    context = multiprocessing.get_context("fork")
    with explain_shared_memory():
        images_done = context.Value("q", 0)
        progress = WorkerProgress(images_done, context.Event())
    source = iter(jobs)
    # There are no more processes than jobs.
    first = list(islice(source, processes))
    with fork_pool(len(first) or 1, join_run, progress) as pool:
        all_jobs = chain(first, source)
        for finished in _run(pool, run, all_jobs, processes * _AHEAD, progress.stop.set):
            # It is read without its lock, which a worker that was killed may hold.
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
        ColabUtilsError: a job failed, or its worker was lost more than ``retries`` times.
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
    """Yield what was finished, several times a second, with so many jobs under way.

    After an error ``stop`` is called, and what is at work is waited for: a job that waits on an
    engine cannot be told from one at work, so that none is cancelled. ``retries`` of None are those
    of a pool of our own, which explains a lost worker itself.
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
                # No engine has an answer to it yet.
                job = job._replace(run=f"{job.run}-{losses[job.number]}")
                running[_submit(executor, run, job, retries)] = job
            yield finished
    except BaseException:
        # What went wrong before is what the user has to know.
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
        return executor.submit(run, job)
    except Exception as error:
        if retries is None:
            raise
        raise _explain_loss(job, error) from error


def _take(
    future: Future[ShardIndex], job: Any, losses: Counter[int], retries: int | None
) -> ShardIndex | None:
    """Return the index of a shard; None where its worker was lost and it is to be tried again."""
    try:
        return future.result()
    except ColabUtilsError:
        raise
    except Exception as error:
        if retries is None:
            raise
        losses[job.number] += 1
        # An engine that cancels a job has lost its coordinator, and would keep silent.
        if losses[job.number] > retries or isinstance(error, CancelledError):
            raise _explain_loss(job, error) from error
        return None


def _explain_loss(job: ShardJob, error: Exception) -> ColabUtilsError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ColabUtilsError(
        f"shard-{job.number:06d} was not written: the executor lost it, or takes nothing more "
        f"({reason:.200}). See to its workers and run the same again: it continues after what is "
        "finished."
    )
