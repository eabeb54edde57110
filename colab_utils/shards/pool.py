"""Run the jobs of all shards: in this process, in several, or on any executor; stop when too many images are bad."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, ThreadPoolExecutor, wait
from functools import partial
from typing import Any, Literal

from colab_utils.drive import describe_retries
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, fork_pool, show_progress
from colab_utils.shards.format import SkippedImage, remove_leftovers
from colab_utils.shards.jobs import ShardJob, ShardResult, write_shard

__all__ = ["run_jobs"]


def run_jobs(
    jobs: list[ShardJob], *, workers: int | Literal["auto"], executor: Executor | None, max_bad: float
) -> list[ShardResult]:
    """Write every shard.

    Args:
        jobs: one or more, of one folder.
        workers: processes that work at a time; "auto" is one for each core.
        executor: used in place of processes, if there is one.
        max_bad: the share of bad images above which it stops.

    Raises:
        ColabUtilsError: if too many images are bad, a shard cannot be written, or a process was ended.
    """
    total = sum(len(job.dataset) for job in jobs)
    allowed = int(max_bad * total + 1e-6)  # 0.29 x 100 is a little less than 29
    count = min(count_cores() if workers == "auto" else int(workers), len(jobs))
    with show_progress("preprocess", total=total, unit="image") as bar:
        if executor is not None:
            return _collect([executor.submit(_work, job) for job in jobs], total, allowed, bar)
        context = multiprocessing.get_context("fork" if count > 1 else None)
        done, stop, turns = context.Value("q", 0), context.Event(), context.Semaphore(count)
        work = partial(write_shard, count=partial(_count_done, done, stop), turn=turns, stop=stop)
        # one more than work at a time: it waits for the disk meanwhile
        most = min(count + 1, len(jobs))
        pool, run = (fork_pool(most, _start_worker, work), _work) if count > 1 else (ThreadPoolExecutor(most), work)
        with pool:
            try:
                return _collect([pool.submit(run, job) for job in jobs], total, allowed, bar, done)
            except BaseException:
                stop.set()  # each worker gives up at its next image: no half shard is ever renamed
                pool.shutdown(wait=True, cancel_futures=True)
                remove_leftovers(jobs[0].folder)  # of a worker that the system ended
                raise


def _collect(
    futures: list[Future[ShardResult]], total: int, allowed: int, bar: Any, done: Any = None
) -> list[ShardResult]:
    bad: list[SkippedImage] = []
    pending, retries = set(futures), 0
    try:
        while pending:
            finished, pending = wait(pending, timeout=0.5, return_when=FIRST_COMPLETED)
            for future in finished:
                result = future.result()
                bad += result.skipped
                if done is None:
                    bar.update(result.info.images + len(result.skipped))
                retries += result.retries
            bar.set_postfix_str(describe_retries(retries), refresh=False)
            if done is not None:
                bar.update(done.value - bar.n)
            _check_bad(bad, total, allowed)
    except BrokenExecutor:
        raise ColabUtilsError(
            "expected every worker process to finish its shards, found one that the system ended, most often for want "
            "of memory. Run the same command with fewer workers (--workers 1): it continues after the finished shards."
        ) from None
    finally:
        for future in pending:
            future.cancel()
    return [future.result() for future in futures]


def _check_bad(bad: list[SkippedImage], total: int, allowed: int) -> None:
    if len(bad) > allowed:
        first = "; ".join(f"{image.file_name}: {image.reason}" for image in bad[:3])
        raise ColabUtilsError(
            f"expected at most {allowed} bad images of {total:,}, found {len(bad)} so far ({first}). Mend them, write "
            "a repaired annotations file with `check --repair OUT.json`, or allow more with --max-bad SHARE."
        )


_run: Callable[[ShardJob], ShardResult] = partial(write_shard, count=int)


def _start_worker(run: Callable[[ShardJob], ShardResult]) -> None:
    global _run
    _run = run


def _work(job: ShardJob) -> ShardResult:
    return _run(job)


def _count_done(done: Any, stop: Any, images: int) -> None:
    if stop.is_set():
        raise ColabUtilsError("stopped")
    with done.get_lock():
        done.value += images
