"""The batch that never comes: which worker, sample and file it is waited for, and why."""

import os
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from time import perf_counter, sleep
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from colab_utils.diagnosis.processes import Activity, read_ending, waiting
from colab_utils.diagnosis.summary import LoopRecord, Summary
from colab_utils.diagnosis.timing import count_images
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.loader import Loader
from colab_utils.loading.workers import WorkerDiedError, WorkerJob, explain_death
from colab_utils.runtime import quiet_fork, require_linux

OnStall = Literal["report", "raise"]

_PAUSE_S = 0.5  # between two looks at the clock, or a tenth of timeout_s
_TICK_S, _LOOK_S = 0.1, 0.5  # how long a worker is observed, in ticks
_BUSY_S = 0.025  # of CPU time meanwhile: then it is at work
_LATE_S = 0.1  # of a wait: then its samples are noted
# Interrupts a system call that the main thread waits in. By default it is ignored, so that a late one does no harm.
_INTERRUPT = signal.SIGURG
_END = object()
_OWN = ("timeout_s", "on_stall", "stalls")

_FINDINGS = {  # what is found, what to do
    "dead": ("ended ({call})", ""),
    "read": ("is stuck in a read ({call} of {file})", "Leave this file out, copy it to the disk, or remount Drive."),
    "lock": ("waits for a lock", "It was held when the worker was forked: start threads after the workers."),
    "lost": ("is idle, but its batch never arrived", "Where /dev/shm is full, use smaller batches or make_loader."),
    "waiting": ("waits in {call}", "What it waits for must come, or the call needs a timeout."),
    "slow": ("is at work, only slow", "Wait, or make this sample smaller."),
}


class _StallInterrupt(BaseException):
    """Ends the waiting of the main thread."""


@dataclass(frozen=True)
class Stall:
    """A batch that did not come in time, and why, as far as that can be told."""

    verdict: str
    """"dead" (ended), stuck in a "read", waiting for a "lock", "lost" (loaded, but it never came), "waiting" in another
    system call, or only "slow"."""
    waited_s: float
    job: WorkerJob
    """Whose batch it is; our own loader knows which one."""
    seen: Activity
    """What the worker, or this process, is at; the call of the dead is how they ended."""
    file: str
    """What the sample is read from."""
    cure: str

    def __str__(self) -> str:
        who = "this process" if self.job.worker is None else f"worker {self.job.worker} (pid {self.job.pid})"
        what = _FINDINGS[self.verdict][0].format(call=self.seen.call or "a call", file=self.file)
        where = f", at one of samples {', '.join(map(str, self.job.indices[:16]))}" if self.job.indices else ""
        if self.seen.sample is not None:
            file = f" ({self.file})" if self.file and self.verdict != "read" else ""
            where = f", at sample {self.seen.sample}{file}"
        if self.seen.stack:
            where += f", in {' < '.join(line.rpartition('/')[2] for line in self.seen.stack[:4])}"
        return f"expected a batch, found none for {self.waited_s:.3g} s: {who} {what}{where}. {self.cure}"


def watch(loader: Iterable[Any], *, timeout_s: float = 60, on_stall: OnStall = "report") -> "WatchedLoader":
    """Watch a loader: its batches come unchanged, you see where the time goes, and why a batch does not come.

    When your loop ends, or is left, a summary is printed: waits, steps and what lies between them, the causes, and what
    to do. A later pass prints one where its causes are others, and the end of the program, or of the watched loader, a
    last one; ``summary()`` gives it at any time. A step ends where an optimizer of torch steps. A batch that takes too
    long is explained within a second.

    The explanation is a `ColabUtilsWarning` and a `Stall` in ``stalls``: which worker, at which sample and file, in
    which call, and whether it ended, is stuck in a read, waits for a lock, or is only slow. It comes again when the
    verdict changes. Samples are seen of workers that are forked while this watches. The file of a
    sample is named where the dataset has ``find_path(index)``, as ours have.

    Args:
        loader: a ``DataLoader``, a loader of `make_loader`, or anything that can be iterated over.
        timeout_s: seconds to wait for a batch before it is explained.
        on_stall: "report" waits on, however long; a worker that ended is an error. "raise" ends the waiting with the
            explanation as an error: in the main thread at once, in another thread when the loader returns.

    Raises:
        ColabUtilsError: an argument that cannot be; and, while you iterate, what ``on_stall`` tells.

    Example:
        >>> watched = watch([1, 2, 3], timeout_s=5)
        >>> list(watched), len(watched), watched.stalls
        ([1, 2, 3], 3, [])
    """
    require_linux("watch a loader")
    if on_stall not in get_args(OnStall):
        raise ColabUtilsError(f"expected on_stall in {', '.join(get_args(OnStall))}, found {on_stall!r}: choose one")
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < inf:
        raise ColabUtilsError(f"expected timeout_s as seconds over 0, found {timeout_s!r}: give a number, like 60")
    if not hasattr(loader, "__iter__") or isinstance(loader, str | bytes):
        raise ColabUtilsError(f"expected a loader to iterate over, found {type(loader).__name__}: pass your DataLoader")
    kind = WatchedDataLoader if isinstance(loader, DataLoader) else WatchedLoader
    watched = kind(loader, timeout_s, on_stall, prints=True)
    weakref.finalize(watched, watched._record.print_summary, only_news=False)
    return watched


class WatchedLoader:
    """A loader under watch, made by `watch`; what it has no attribute for, the loader answers.

    Attributes:
        stalls: every `Stall` that was reported.
    """

    def __init__(self, loader: Any, timeout_s: float, on_stall: OnStall, *, prints: bool = False) -> None:
        self._loader, self.timeout_s, self.on_stall, self._prints = loader, timeout_s, on_stall, prints
        self._record = LoopRecord(loader)
        self.stalls: list[Stall] = self._record.stalls

    def summary(self) -> Summary:
        """Where the time of all passes so far went, and why.

        Raises:
            ColabUtilsError: no batch has come yet.
        """
        if (found := self._record.summarise()) is None:
            raise ColabUtilsError("expected a batch to look at, found none: loop over the watched loader first")
        return found

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """What a framework sets, such as ``worker_init_fn``, is meant for the loader."""
        if name.startswith("_") or name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        return _Pass(self, self._loader, self._record).run()


class WatchedDataLoader(WatchedLoader, DataLoader[Any]):  # type: ignore[misc]
    """A ``DataLoader`` under watch: a framework that gives each process its share asks for that class.

    The constructor of ``DataLoader`` never runs: all attributes are those of the loader under watch.
    """


class _Pass:
    """One pass over a loader: the caller waits for the batches, a thread watches it waiting."""

    def __init__(self, watched: WatchedLoader, loader: Any, record: LoopRecord) -> None:
        self._watched, self._loader, self.monitor, self._record = watched, loader, record.monitor, record
        self._ours = isinstance(loader, Loader)
        self._batches: Any = None
        self.thread = 0  # which waits for the batches
        self.asked_s: float | None = None  # since when it waits
        self._over = threading.Event()
        self._given_up: tuple[float, Stall] | None = None  # the beginning of a wait, and why it is to end
        self._can_interrupt = False
        self._outer_handler: Any = None

    def run(self) -> Iterator[Any]:
        self.monitor.forget_ended()
        thread = threading.Thread(target=self._watch, name="watch", daemon=True)
        thread.start()
        try:
            with self._record.measure_pass() as clock:
                while True:
                    batch = self._fetch(clock.ask())
                    if batch is _END:
                        break
                    clock.receive(count_images(batch))
                    yield batch
        finally:
            self._over.set()
            thread.join()
            if self._watched._prints and not sys.is_finalizing():
                self._record.print_summary(only_news=True)

    def _fetch(self, asked_s: float) -> Any:
        """Return the next batch.

        Raises:
            ColabUtilsError: why it does not come, where a worker ended or the wait was given up.
        """
        batch = None
        try:
            batch = self._wait(asked_s)
        except _StallInterrupt:
            if self._find_reason(asked_s) is None:
                raise  # it is for a watch around this one
        except Exception as error:
            stall = self._find_reason(asked_s) or self._explain_end(error, asked_s)
            if stall is None:
                raise
            raise ColabUtilsError(str(stall)) from error
        # An interrupt is no part of the error: this is outside of its handler.
        stall = self._find_reason(asked_s)
        if stall is not None:
            raise ColabUtilsError(str(stall))
        return batch

    def _wait(self, asked_s: float) -> Any:
        outer = getattr(waiting, "monitor", None)  # one watch inside of another
        waiting.monitor = self.monitor
        self.thread = threading.get_ident()
        is_main = threading.current_thread() is threading.main_thread()
        self._can_interrupt = is_main and self._watched.on_stall == "raise"
        if self._can_interrupt:
            self._outer_handler = signal.signal(_INTERRUPT, self._interrupt)
        self.asked_s = asked_s
        try:
            if self._batches is not None:
                return next(self._batches, _END)
            with quiet_fork():
                self._batches = iter(self._loader)
                return next(self._batches, _END)  # generators fork here
        finally:
            self.asked_s = None
            waiting.monitor = outer
            if self._can_interrupt:
                signal.signal(_INTERRUPT, self._outer_handler)

    def _interrupt(self, number: int, frame: Any) -> None:
        """End the wait in the main thread; a signal that comes after the batch, or for somebody else, does not."""
        if self.asked_s is not None and self._find_reason(self.asked_s) is not None:
            raise _StallInterrupt
        if callable(self._outer_handler):
            self._outer_handler(number, frame)

    def _find_reason(self, asked_s: float) -> Stall | None:
        """Why the wait that began then is to end; None where it is not."""
        if self._given_up is None or self._given_up[0] != asked_s:
            return None
        return self._given_up[1]

    def _explain_end(self, error: Exception, asked_s: float) -> Stall | None:
        """Why a worker ended, where that is why the loader failed."""
        dead = self._find_dead(error)
        if dead is None:
            return None
        stall = self._explain(asked_s, *dead)
        self._watched.stalls.append(stall)
        return stall

    def _watch(self) -> None:
        asked_s, due_s, told = None, 0.0, set[str]()
        while not self._over.wait(min(_PAUSE_S, self._watched.timeout_s / 10)):
            if self.asked_s != asked_s:
                asked_s, due_s, told = self.asked_s, self._watched.timeout_s, set()
            with suppress(Exception):  # what is looked at may go away meanwhile: look again
                self._record.memory.look(self._record.clock.count)
            if asked_s is None:
                continue
            waited_s = perf_counter() - asked_s
            with suppress(Exception):
                if waited_s > _LATE_S:
                    self._record.note_samples((blamed := self._find_blamed()).indices)
                    if waited_s > due_s - min(_LOOK_S, due_s / 2):
                        self._act(asked_s, blamed, told)
                        waited_s = perf_counter() - asked_s  # half a second later
                        due_s = waited_s + min(30, max(1, waited_s - self._watched.timeout_s))

    def _act(self, asked_s: float, blamed: WorkerJob, told: set[str]) -> None:
        """Say who the batch is waited for, and give it up if that is asked for."""
        stall = self._explain(asked_s, blamed, read_ending(blamed.pid))
        if self.asked_s != asked_s:
            return
        is_known = stall.verdict in told or self._find_reason(asked_s) is not None
        if not is_known:
            told.add(stall.verdict)
            self._watched.stalls.append(stall)
        if self._watched.on_stall == "raise" and self._find_reason(asked_s) is None:
            self._given_up = (asked_s, stall)
        if self._can_interrupt:
            signal.pthread_kill(self.thread, _INTERRUPT)
        elif not is_known:
            with suppress(ColabUtilsWarning):  # a filter made it an error, and here nobody could catch it
                warnings.warn_explicit(str(stall), ColabUtilsWarning, __file__, 0)

    def _explain(self, asked_s: float, blamed: WorkerJob, ending: str) -> Stall:
        """Why no batch comes from there: the process ended, or is observed for half a second."""
        if ending:
            death, _, cure = explain_death(ending).partition("). ")
            verdict, seen = "dead", self.monitor.inspect_worker(blamed.pid)._replace(call=death.rpartition("(")[2])
        else:
            verdict, seen = self._observe(asked_s, blamed.pid)
            cure = _FINDINGS[verdict][1]
        file = seen.path if verdict == "read" else find_file(self.monitor.dataset, seen.sample)
        return Stall(verdict, perf_counter() - asked_s, blamed, seen, file, cure)

    def _observe(self, asked_s: float, pid: int) -> tuple[str, Activity]:
        here = pid == os.getpid()

        def inspect() -> Activity:
            return self.monitor.inspect_thread(self.thread) if here else self.monitor.inspect_worker(pid)

        before, until_s = inspect(), perf_counter() + _LOOK_S
        while self.asked_s == asked_s and perf_counter() < until_s:
            sleep(_TICK_S)
        seen = inspect()
        moves = (seen.bytes_read, seen.sample) != (before.bytes_read, before.sample)
        if moves or seen.cpu_s - before.cpu_s > _BUSY_S:
            return "slow", seen
        if seen.idle:
            return "lost", seen
        if "futex" in seen.call and not here:  # here nothing was forked
            return "lock", seen
        return "read" if seen.path.startswith("/") else "waiting", seen

    def _find_blamed(self) -> WorkerJob:
        """Who has had the oldest batch; else who has been longest at a sample, else who is not idle, of the workers."""
        if self._ours and (jobs := self._loader.list_jobs()):
            return jobs[0]
        samples = self.monitor.list_samples()
        pids = [*samples]
        if at_work := sorted((one.since_ns, pid, one.sample) for pid, at in samples.items() for one in at):
            _, pid, sample = at_work[0]
            return WorkerJob(pids.index(pid), pid, indices=(sample,))
        alive = [pid for pid in pids if not read_ending(pid)]
        if found := [pid for pid in alive if not self.monitor.inspect_worker(pid).idle] or alive:
            return WorkerJob(pids.index(found[0]), found[0])
        here = self.monitor.inspect_thread(self.thread).sample
        return WorkerJob(None, os.getpid(), indices=() if here is None else (here,))

    def _find_dead(self, error: BaseException) -> tuple[WorkerJob, str] | None:
        """The worker whose end made the loader fail, if that is why it did; and how it ended."""
        if self._ours:
            return (error.job, error.ending) if isinstance(error, WorkerDiedError) else None
        text = f"{error} {error.__cause__}"
        for place, (pid, at_work) in enumerate(self.monitor.list_samples().items()):
            ending = read_ending(pid)
            if ending and (at_work or str(pid) in text or "signal" in ending):
                return WorkerJob(place, pid), ending if "signal" in ending else text
        return None


def find_file(dataset: Any, sample: Any) -> str:
    """The file of a sample, as our datasets know it; "" of others."""
    with suppress(Exception):  # whatever somebody's own dataset does
        return str(dataset.find_path(sample))
    return ""
