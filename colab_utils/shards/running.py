"""Jobs on processes of this machine, or on anybody's executor: a few at a time, lost ones again."""

import multiprocessing
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import CancelledError, Executor, Future
from itertools import chain, islice
from time import monotonic
from typing import Any

from colab_utils.errors import ColabUtilsError
from colab_utils.processes import explain_shared_memory, fork_pool, pop_done
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
        runs = _Runs(pool, run, processes * _AHEAD)
        for finished in runs.take_all(chain(first, source), progress.stop.set):
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
    runs = _Runs(executor, run, ahead, retries)
    for finished in runs.take_all(jobs, jobs[0].stop_file.touch):
        yield finished, 0


class _Runs:
    """Jobs under way on an executor, each tried again where its worker is lost.

    ``retries`` of None are those of a pool of our own, which explains a lost worker itself.
    """

    def __init__(
        self,
        executor: Executor,
        run: Callable[[Any], ShardIndex],
        ahead: int,
        retries: int | None = None,
    ) -> None:
        self._executor = executor
        self._run = run
        self._ahead = ahead
        self._retries = retries
        self._running: dict[Future[ShardIndex], Any] = {}
        self._losses = Counter[int]()

    def take_all(
        self, jobs: Iterable[Any], stop: Callable[[], object]
    ) -> Generator[list[ShardIndex], None, None]:
        """Yield what was finished, several times a second.

        After an error ``stop`` is called, and what is at work is waited for: a job that waits on an
        engine cannot be told from one at work, so that none is cancelled.
        """
        waiting = iter(jobs)
        try:
            while True:
                for job in islice(waiting, max(0, self._ahead - len(self._running))):
                    self._submit(job)
                if not self._running:
                    return
                yield self._take_done()
        except BaseException:
            stop()
            until_s = monotonic() + _STOP_S
            pending = set(self._running)
            while pending and monotonic() < until_s:
                pop_done(pending)
            raise

    def _take_done(self) -> list[ShardIndex]:
        finished = []
        for future in pop_done(set(self._running)):
            job = self._running.pop(future)
            try:
                finished.append(future.result())
            except ColabUtilsError:
                raise
            except Exception as error:
                if self._retries is None:
                    raise
                self._losses[job.number] += 1
                losses = self._losses[job.number]
                # An engine that cancels a job has lost its coordinator, and would keep silent.
                if losses > self._retries or isinstance(error, CancelledError):
                    raise _explain_loss(job, error) from error
                self._submit(job._replace(run=f"{job.run}-{losses}"))
        return finished

    def _submit(self, job: Any) -> None:
        try:
            self._running[self._executor.submit(self._run, job)] = job
        except Exception as error:
            if self._retries is None:
                raise
            raise _explain_loss(job, error) from error


def _explain_loss(job: ShardJob, error: Exception) -> ColabUtilsError:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    return ColabUtilsError(
        f"shard-{job.number:06d} was not written: the executor lost it, or takes nothing more "
        f"({reason:.200}). See to its workers and run the same again: it continues after what is "
        "finished."
    )
