"""The fetch that never returns: which worker, sample and file a batch is waited for, and why; and, if asked, go on."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext, suppress
from copy import copy
from dataclasses import dataclass
from itertools import chain
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any, Literal, NamedTuple, get_args

from torch.utils.data import DataLoader, IterableDataset
from torch.utils.data._utils import signal_handling

from colab_utils.diagnosis.stacks import Activity, Board, read_ending, read_progress
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader
from colab_utils.loading.workers import describe_exit, explain_death
from colab_utils.runtime import format_bytes, quiet_fork

__all__ = [
    "END",
    "BlamedWorker",
    "OnStall",
    "Source",
    "Stall",
    "Verdict",
    "WatchedLoader",
    "find_file",
    "make_source",
    "watch",
]

END = object()


"""What comes after the last batch."""


class BlamedWorker(NamedTuple):
    """Who a batch is waited for, and which batch."""

    worker: int | None
    pid: int
    number: int | None = None
    batch: tuple[Any, ...] = ()


class Source:
    """Any loader: what it forks while it is asked for batches may be at fault, else this process."""

    restarts = False
    keeps_workers = True
    """From one pass to the next."""

    def __init__(self, loader: Any) -> None:
        self.loader, self.board = loader, Board(getattr(loader, "dataset", None))

    def start(self) -> Any:
        self.board.forget_ended()
        return iter(self.loader)

    def get(self, batches: Any) -> Any:
        return next(batches, END)

    def list_jobs(self) -> list[BlamedWorker]:
        """The batches that were asked for and did not come yet, oldest first, as far as that is known."""
        return []

    def find_blamed(self) -> BlamedWorker:
        """Who has had the oldest batch for so long; else a worker that is at a sample; else this process."""
        at_work = (BlamedWorker(place, pid) for place, (pid, at) in enumerate(self.board.list_samples().items()) if at)
        return next(iter(self.list_jobs()), None) or next(at_work, BlamedWorker(None, os.getpid()))

    def find_dead(self) -> tuple[BlamedWorker, str] | None:
        """A worker that ended, at which batch, and how."""
        return None

    def find_job(self, worker: int, pid: int) -> BlamedWorker:
        """The batch that a dead worker was at; results of older ones may have been under way."""
        jobs, at = [job for job in self.list_jobs() if job.pid == pid], self.board.list_samples().get(pid, [])
        jobs.sort(key=lambda job: not any(self.board.resolve(index) in at for index in job.batch))
        return jobs[0] if jobs else BlamedWorker(worker, pid)

    def kill(self, pid: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def restart(self, skipped: int | None) -> None:
        """Get ready to start again, without one batch."""

    def end(self) -> None:
        """A pass is over, or broken off."""


class _LoaderWorkers(Source):
    """Our own loader: it knows who does what."""

    def __init__(self, loader: Loader) -> None:
        super().__init__(loader)
        self.restarts = loader.workers > 0 and loader.backend != "threads"

    def list_jobs(self) -> list[BlamedWorker]:
        dead = self.loader.find_dead()
        jobs = dead.jobs if dead else self.loader.list_jobs()
        return [BlamedWorker(job.worker, job.pid, job.number, job.indices) for job in jobs]

    def find_dead(self) -> tuple[BlamedWorker, str] | None:
        dead = self.loader.find_dead()
        return dead and (self.find_job(dead.worker, dead.pid), dead.ending)

    def restart(self, skipped: int | None) -> None:
        self.loader.restart(skip=skipped)


class _Indices:
    """What torch asks for batches by: what is to do, and what was handed out and whose batch did not come yet."""

    def __init__(self) -> None:
        self.todo: Iterator[Any] | None = None
        self.left: dict[int, Any] = {}

    def __iter__(self) -> Iterator[Any]:
        for number, indices in enumerate(self.todo or ()):
            self.left[number] = indices
            yield indices


class _TorchWorkers(Source):
    """torch's DataLoader with workers: a copy whose indices are noted, so that a batch can be asked for again."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        super().__init__(loader)
        self.restarts = not isinstance(loader.dataset, IterableDataset)
        self.keeps_workers = loader.persistent_workers
        self._indices, self._copy = _Indices(), copy(loader)
        sampler = "batch_sampler" if loader._auto_collation else "sampler"
        vars(self._copy).update({sampler: self._indices, "_iterator": None})
        self._batches: Any = None

    def start(self) -> Any:
        self._indices.todo, self._indices.left = self._indices.todo or iter(self.loader._index_sampler), {}
        if self._copy._iterator is not None:
            self._batches._timeout = 0
        self._batches = iter(self._copy)
        if self._batches._worker_pids_set:  # or torch raises in the main thread, in the midst of your step
            self._batches._worker_pids_set = False
            signal_handling._remove_worker_pids(id(self._batches))
        self._batches._timeout = self.loader.timeout or 1  # it looks at its workers each second instead
        return self._batches

    def get(self, batches: Any) -> Any:
        while True:
            try:
                batch = next(batches, END)
            except RuntimeError as error:
                pinning = getattr(batches, "_pin_memory_thread", threading.main_thread())
                if self.loader.timeout or not pinning.is_alive() or not str(error).startswith("DataLoader timed out"):
                    raise
                continue
            for number in self._indices.left.keys() - batches._task_info.keys():
                del self._indices.left[number]
            return batch

    def list_jobs(self) -> list[BlamedWorker]:
        jobs = []
        for number, (worker, *done) in sorted(dict(getattr(self._batches, "_task_info", {})).items()):
            batch = self._indices.left.get(number)
            batch = tuple(batch) if isinstance(batch, list | tuple) else (batch,)
            if not done:
                asked = tuple(index for index in batch if index is not None)  # a stream has none
                jobs.append(BlamedWorker(worker, self._batches._workers[worker].pid, number, asked))
        return jobs

    def find_dead(self) -> tuple[BlamedWorker, str] | None:
        for worker, process in enumerate(getattr(self._batches, "_workers", ())):
            if (code := process.exitcode) is not None:
                return self.find_job(worker, process.pid), describe_exit(code)
        return None

    def restart(self, skipped: int | None) -> None:
        left = [indices for number, indices in self._indices.left.items() if number != skipped]
        self._indices.todo = chain(left, self._indices.todo or ())
        self._shut_down()

    def end(self) -> None:
        self._indices.todo = None
        if not self.keeps_workers or self.find_dead():
            self._shut_down()

    def _shut_down(self) -> None:
        getattr(self._batches, "_shutdown_workers", int)()
        self._batches = self._copy._iterator = None


def make_source(loader: Any) -> Source:
    """What fits a loader."""
    if isinstance(loader, Loader):
        return _LoaderWorkers(loader)
    if isinstance(loader, DataLoader) and loader.num_workers and type(loader).__iter__ is DataLoader.__iter__:
        return _TorchWorkers(loader)
    return Source(loader)


def find_file(dataset: Any, sample: Any) -> str:
    """The file of a sample: as our datasets know it, else from a list of paths as long as the dataset."""
    with suppress(Exception):  # whatever somebody's own dataset does
        if isinstance(dataset, CocoFolder | ShardDataset):
            return str(dataset.find_path(sample))
        for values in vars(dataset).values():
            if isinstance(values, list) and len(values) == len(dataset):
                item = values[sample][0] if isinstance(values[sample], tuple) else values[sample]
                if isinstance(item, str | Path) and Path(item).suffix:
                    return str(item)
    return ""


OnStall = Literal["report", "skip", "restart", "raise"]


Verdict = Literal["dead", "read", "lock", "lost", "waiting", "slow"]


_TICK_S = 0.25


_PATIENCE = 10  # times timeout_s that a worker which is only slow has before it is given up


_MAX_TRIES = {"report": 0, "skip": 10, "restart": 3, "raise": 0}  # without a batch in between


_FINDINGS: dict[str, tuple[str, str]] = {  # what is found, what to do
    "dead": ("ended ({call})", ""),
    "read": ("is stuck in a read ({call} of {file})",
             "Copy the data to the local disk, or leave this file out; on Drive, mount it again."),
    "lock": ("waits for a lock",
             "Held by a thread while the worker was forked, it never opens: start threads after the workers, or use "
             "multiprocessing_context='spawn'."),
    "lost": ("has nothing to do, and its batch got lost on the way here", ""),
    "waiting": ("waits in {call}", "What it waits for must come, or the call needs a timeout."),
    "slow": ("is at work, only slow", "Wait, or make this sample smaller."),
}  # fmt: skip


@dataclass(frozen=True)
class Stall:
    """A batch that did not come in time, and why, as far as that can be told.

    ``verdict``: "dead" (ended), stuck in a "read", waiting for a "lock", "lost" (loaded, but it never came), "waiting"
    in another system call, or only "slow". ``worker`` counts from 0, None for this process; ``sample`` is the index
    in the dataset (in the one below a ``Subset``), ``file`` what it is read from, ``batch`` the indices that were
    asked for together, ``call`` the system call (of the dead, how they ended), ``stack`` the Python lines, innermost
    first, ``cure`` what to do.
    """

    verdict: Verdict
    waited_s: float
    worker: int | None
    pid: int
    sample: int | None
    batch: tuple[Any, ...]
    file: str
    call: str
    stack: tuple[str, ...]
    cure: str

    def __str__(self) -> str:
        who = "this process" if self.worker is None else f"worker {self.worker} (pid {self.pid})"
        what = _FINDINGS[self.verdict][0].format(call=self.call or "a call", file=self.file or "no known file")
        where = f", at one of samples {', '.join(map(str, self.batch[:16]))}" if self.batch else ""
        if self.sample is not None:
            where = f", at sample {self.sample}" + (f" ({self.file})" if self.file and self.verdict != "read" else "")
        if self.stack:
            where += f", in {' < '.join(line.rpartition('/')[2] for line in self.stack[:4])}"
        return f"expected a batch, found none for {self.waited_s:.3g} s: {who} {what}{where}. {self.cure}"


def watch(loader: Iterable[Any], *, timeout_s: float = 60, on_stall: OnStall = "report") -> WatchedLoader:
    """Watch a loader: its batches come unchanged, and one that takes too long is explained within a second.

    The explanation is a `ColabUtilsWarning` and a `Stall` in ``stalls``: which worker, at which sample and file, in
    which call, and whether it ended, is stuck in a read, waits for a lock, or is only slow. It comes again when the
    verdict changes. A worker that ends is explained as soon as its batch is asked for.

    Args:
        loader: a ``DataLoader``, a ``Loader``, or anything that can be iterated over. Workers are seen best when they
            are forked while this watches; of others the sample and the Python stack stay unknown.
        timeout_s: seconds to wait for a batch before it is explained.
        on_stall: "report" waits on, however long. "skip" starts the workers again without the batch (``skipped``
            lists it), "restart" with it: both need worker processes and a dataset with indices, give up after 10 and
            3 times without a batch in between, and leave workers that are only slow ten times as long. "raise" ends
            the waiting with the explanation as an error, if need be by interrupting the main thread.

    Raises:
        ColabUtilsError: an argument that cannot be; and, while you iterate, if a worker ended and nothing else is
            asked for, or trying again did not help.

    Example:
        >>> watched = watch([1, 2, 3], timeout_s=5)
        >>> list(watched), len(watched), watched.stalls
        ([1, 2, 3], 3, [])
    """
    if on_stall not in get_args(OnStall):
        raise ColabUtilsError(f"expected on_stall as one of {', '.join(get_args(OnStall))}, found {on_stall!r}")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < inf:
        raise ColabUtilsError(f"expected timeout_s as seconds over 0, found {timeout_s!r}")
    if not hasattr(loader, "__iter__"):
        raise ColabUtilsError(f"expected a loader to iterate over, found {type(loader).__name__}")
    watched = WatchedLoader(loader, timeout_s, on_stall)
    if on_stall in ("skip", "restart") and not watched._make_source().restarts:
        raise ColabUtilsError(
            f"expected worker processes and a dataset with indices for on_stall={on_stall!r}, found "
            f"{type(loader).__name__} without. Use on_stall='report'."
        )
    return watched


class WatchedLoader:
    """A loader under watch, made by `watch`; what it has no attribute for, the loader answers.

    Attributes:
        stalls: every `Stall` that was reported.
        skipped: the indices of every batch that was left out.
    """

    def __init__(self, loader: Any, timeout_s: float, on_stall: OnStall) -> None:
        self._loader, self.timeout_s, self.on_stall = loader, timeout_s, on_stall
        self.stalls: list[Stall] = []
        self.skipped: list[tuple[Any, ...]] = []
        self._source: Source | None = None  # kept where its workers outlive a pass

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self, self._make_source()).run()

    def _make_source(self) -> Source:
        source = self._source or make_source(self._loader)
        self._source = source if source.keeps_workers else None
        return source


class _Pass:
    """One pass over a loader: the caller waits for the batches, a thread watches it waiting."""

    def __init__(self, watched: WatchedLoader, source: Source) -> None:
        self._watched, self._source = watched, source
        self._over, self._lock = threading.Event(), threading.Lock()
        self._wait: tuple[float, int] | None = None  # since when, and by which thread, a batch is waited for
        self._given_up: tuple[BlamedWorker, Stall] | None = None

    def run(self) -> Iterator[Any]:
        thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        thread.start()
        # a shell's background job ignores the signal that is to wake this thread
        ignored = self._gives_up_here(threading.get_ident()) and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if ignored:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            yield from self._fetch()
        finally:
            if ignored:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            self._over.set()
            thread.join()
            self._source.end()

    def _fetch(self) -> Iterator[Any]:
        batches, tries = None, 0
        while True:
            wait = self._wait = (monotonic(), threading.get_ident())
            try:
                with nullcontext() if batches is not None else quiet_fork(), self._source.board.follow():
                    batches = self._source.start() if batches is None else batches
                    batch = self._source.get(batches)
            except KeyboardInterrupt:
                if self._given_up is None:
                    raise
                raise ColabUtilsError(str(self._given_up[1])) from None
            except Exception as error:
                self._stop_waiting()
                self._go_on(error, wait, tries)
                batches, tries = None, tries + 1
                continue
            self._stop_waiting()
            if batch is END:
                return
            if self._given_up is not None:  # it came after all, at the last moment: only its worker is lost
                self._given_up = self._given_up[0]._replace(number=None, batch=()), self._given_up[1]
            tries = 0
            yield batch

    def _stop_waiting(self) -> None:
        with self._lock:  # not while a worker is being given up for this very batch
            self._wait = None

    def _go_on(self, error: Exception, wait: tuple[float, int], tries: int) -> None:
        """After an error: get ready to start again if a worker ended and that is asked for, else raise."""
        mode, given_up, self._given_up = self._watched.on_stall, self._given_up, None
        if given_up is None:
            if (dead := self._source.find_dead()) is None:
                raise error
            given_up = dead[0], self._explain(dead[0], wait, moved=False, ending=dead[1])
            self._watched.stalls.append(given_up[1])
            if tries < _MAX_TRIES[mode]:
                self._say(given_up[1], goes_on=True)
        suspect, stall = given_up
        if tries >= _MAX_TRIES[mode]:
            raise ColabUtilsError(str(stall)) from error
        if mode == "skip" and suspect.batch:
            self._watched.skipped.append(suspect.batch)
        self._source.restart(suspect.number if mode == "skip" else None)

    def _watch(self) -> None:
        timeout_s = self._watched.timeout_s
        last, due_s = self._wait, timeout_s
        seen: deque[Any] = deque(maxlen=5)
        said: set[tuple[Verdict, bool]] = set()
        while not self._over.wait(_TICK_S):
            wait = self._wait
            if wait is not last:
                last, due_s = wait, timeout_s
                seen.clear()
                said.clear()
            if wait is None or (waited_s := monotonic() - wait[0]) < timeout_s - 5 * _TICK_S:
                continue
            with suppress(AttributeError, LookupError, ValueError, OSError):  # the batch came, and what it was is gone
                suspect = self._source.find_blamed()
                here = suspect.pid == os.getpid()
                ticks, read = read_progress(suspect.pid, self._source.board.find_thread(wait[1])[1] if here else 0)
                at = self._source.board.list_samples().get(suspect.pid)
                seen.append((waited_s, ticks, (suspect.pid, read, at)))
                if waited_s < due_s or waited_s - seen[0][0] < 2 * _TICK_S:
                    continue
                due_s = waited_s + min(30, max(1, waited_s - timeout_s))
                moved = ticks - seen[0][1] > 2 or seen[0][2] != seen[-1][2]
                stall = self._explain(suspect, wait, moved=moved, ending=read_ending(suspect.pid))
                goes_on = self._gives_up(stall, wait[1], here=here)
                if (stall.verdict, goes_on) not in said:
                    said.add((stall.verdict, goes_on))
                    self._watched.stalls.append(stall)
                    self._say(stall, goes_on)
                with self._lock:
                    if goes_on and self._wait is wait:
                        self._given_up = suspect, stall
                        if here:
                            signal.pthread_kill(wait[1], signal.SIGINT)
                        else:
                            self._source.kill(suspect.pid)

    def _gives_up(self, stall: Stall, thread: int, *, here: bool) -> bool:
        if self._watched.on_stall == "raise":
            return not here or self._gives_up_here(thread)
        if self._watched.on_stall == "report" or here:
            return False
        return stall.verdict != "slow" or stall.waited_s > _PATIENCE * self._watched.timeout_s

    def _gives_up_here(self, thread: int) -> bool:
        return self._watched.on_stall == "raise" and thread == threading.main_thread().ident

    def _explain(self, suspect: BlamedWorker, wait: tuple[float, int], *, moved: bool, ending: str) -> Stall:
        board, pid = self._source.board, suspect.pid
        verdict: Verdict
        if ending:
            verdict, seen = "dead", Activity(call=ending, sample=board.find_sample(pid, suspect.batch))
            cure = str(explain_death(ending)).partition("). ")[2]
        else:
            here = pid == os.getpid()
            seen = (
                board.inspect_thread(*board.find_thread(wait[1])) if here else board.inspect_worker(pid, suspect.batch)
            )
            verdict = _judge(seen, moved)
            cure = _FINDINGS["waiting" if verdict == "lock" and here else verdict][1]  # here nothing was forked
        if verdict == "lost":
            cure = f"{format_bytes(shutil.disk_usage('/dev/shm').free)} of /dev/shm are free: where it is full, use "
            cure += "fewer workers or smaller batches, or make_loader, which needs none of it."
        file = seen.path if seen.path.startswith("/") else find_file(board.dataset, seen.sample)
        return Stall(
            verdict, monotonic() - wait[0], suspect.worker, pid, seen.sample, suspect.batch, file, seen.call,
            seen.stack, cure,
        )  # fmt: skip

    def _say(self, stall: Stall, goes_on: bool) -> None:
        does = {"skip": " The batch is left out.", "restart": " The workers are started again."}
        if goes_on and self._watched.on_stall not in does:
            return  # the error says it
        with suppress(ColabUtilsWarning):  # a filter made it an error, and here nobody could catch it
            said = f"{stall}{does[self._watched.on_stall] if goes_on else ''}"
            warnings.warn_explicit(said, ColabUtilsWarning, __file__, 0)


def _judge(seen: Activity, moved: bool) -> Verdict:
    if moved:
        return "slow"
    if seen.idle:
        return "lost"
    if "futex" in seen.call:
        return "lock"
    return "read" if seen.path or "read" in seen.call else "waiting"
