"""One pass over a watched loader. The caller waits for batches, and a thread watches its waits."""

import os
import re
import resource
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Generator, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from time import perf_counter, sleep
from typing import Any

from colab_utils.diagnosis.cures import FILES, FINDINGS, Stall
from colab_utils.diagnosis.looks import HANDOFF, WORKERS, name_place
from colab_utils.diagnosis.processes import BLAMES, NO_SAMPLE, Activity, waiting
from colab_utils.diagnosis.record import LoopRecord
from colab_utils.diagnosis.summary import print_summary
from colab_utils.diagnosis.system_calls import measure_cpu, read_ending
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.workers import (
    WorkerDiedError,
    WorkerJob,
    describe_exit,
    explain_death,
)
from colab_utils.machine import count_oom_kills
from colab_utils.processes import quiet_fork, start_thread

# Seconds between two looks at a loop. This time is shorter if timeout_s is short.
_PAUSE_S = 0.25
# Seconds for which a worker is observed.
_LOOK_S = 0.5
# A worker that closed its pipes ends within so many seconds.
_END_S = 0.1
# A worker that takes more CPU seconds than this while it is observed is at work.
_BUSY_S = 0.025
# After this many seconds of a wait, the sample that the worker is loading is noted.
_LATE_S = 0.1
# A loop that asks for its first batch so many seconds after it has opened the loader did other work
# in between.
_GAP_S = 0.01
# A process that has opened this share of the files that it may open has none left for a batch.
_MANY_FILES = 0.9
# This signal interrupts a system call that the main thread is in. By default, the signal is
# ignored, so one that comes late does no harm.
INTERRUPT = signal.SIGURG
_END = object()


class _StallInterrupt(BaseException):
    """Ends the waiting of the main thread."""


@dataclass(eq=False)
class _Wait:
    """A wait for a batch."""

    asked_s: float
    """When the batch was asked for, by `time.perf_counter`."""
    due_s: float
    """The wait is explained when it has lasted this many seconds."""
    verdict: str = ""
    """The last verdict on this wait that was reported."""
    reason: str = ""
    """Why the wait is given up; "" if it is not."""


class Pass:
    """One pass over a `WatchedLoader`, which lives at least as long as the pass.

    Args:
        watched: The loader under watch.
        plain: If nobody asked for the watch, this opens the loader. The pass then prints nothing,
            and its errors are those of the loader, with a note.
    """

    def __init__(self, watched: Any, plain: Callable[[Any], Iterator[Any]] | None = None) -> None:
        self._watched = watched
        self._open = plain or iter
        self._keeps_errors = plain is not None
        self._loader = watched._loader
        self.record: LoopRecord = watched._record
        self._monitor = self.record.monitor
        self._batches: Any = None
        self._count = 0
        self._over = threading.Event()
        self._oom_kills = count_oom_kills()
        # The thread that waits for batches, and its wait; None while it does not wait.
        self._thread = threading.current_thread()
        self._wait: _Wait | None = None
        # Our own loader knows the batches that it has asked its workers for.
        self._knows_jobs = hasattr(self._loader, "list_jobs")

    @property
    def is_complete(self) -> bool:
        """Return whether all batches have come. It is not known of a stream."""
        return not self.record.is_stream and 0 < self._length <= self._count

    @property
    def _length(self) -> int:
        """Return the number of batches of the loader, or 0 if it has no length."""
        with suppress(Exception):
            return len(self._loader)
        return 0

    def run(self) -> Generator[Any, None, None]:
        """Yield the iterator of the loader, which is opened at once, and then the batches."""
        self._monitor.forget_ended()
        thread = start_thread(self._watch, "watch")
        try:
            with self.record.measure_pass(self._loader):
                wait = self._ask()
                batches = self._fetch(wait)
                opened_s = perf_counter()
                yield batches
                if perf_counter() - opened_s > _GAP_S:
                    self.record.phase = ""
                    wait = self._ask()
                while (batch := self._fetch(wait)) is not _END:
                    self._count += 1
                    self.record.receive(batch)
                    yield batch
                    wait = self._ask()
        except GeneratorExit:
            self.record.left_at_once += self._count == 1
            raise
        finally:
            self._over.set()
            # At the end of Python, the thread may never end.
            if not sys.is_finalizing():
                # A thread that looks at the loop may be the last to let go of this.
                if thread is not threading.current_thread():
                    thread.join()
                if self._watched._prints and not self._keeps_errors:
                    print_summary(self.record, only_news=True)

    # --- the thread that waits

    def _ask(self) -> _Wait:
        return _Wait(self.record.ask(), self._watched.timeout_s)

    def _fetch(self, wait: _Wait) -> Any:
        """Return the iterator of the loader if it is not open yet, else the next batch, or `_END`.

        Raises:
            ColabUtilsError: a worker ended, or the wait was given up. The message says why.
        """
        try:
            batch = self._take(wait)
        except _StallInterrupt:
            # The error is raised below, outside of this handler, so that it does not show the
            # interrupt.
            batch = None
        except StopIteration as end:
            batch = _END
            self._explain_short_pass(end)
        except Exception as error:
            reason = wait.reason or self._explain_error(error, wait)
            if reason and not self._keeps_errors:
                raise ColabUtilsError(reason) from error
            if reason:
                error.add_note(reason)
            else:
                self._name_sample(error)
            raise
        if wait.reason:
            raise ColabUtilsError(wait.reason)
        return batch

    def _explain_short_pass(self, end: StopIteration) -> None:
        """Warn of a pass that ends before the last batch of its loader.

        The length of a stream is a guess. A loader that goes on where it stood has fewer batches.
        """
        sample = self._monitor.find_failed(end)
        is_sure = not (self.record.is_stream or hasattr(self._loader, "state_dict"))
        if sample is not None:
            why = f"sample {sample} raised StopIteration. Mend the __getitem__ of your dataset"
        elif is_sure and self._count < self._length:
            why = (
                "no error came. A StopIteration in the dataset or in collate_fn ends a pass like "
                "this, and so does a sampler that gives too few indices"
            )
        else:
            return
        text = f"The pass ended after {self._count} of {self._length} batches: {why}."
        warnings.warn(text, ColabUtilsWarning, stacklevel=4)

    def _name_sample(self, error: Exception) -> None:
        """Say at which sample the loader raised an error. Our own loaders say it themselves."""
        sample = None if self._knows_jobs else self._monitor.find_failed(error)
        if sample is None:
            return
        text = str(error.args[0]) if error.args else ""
        if text.startswith("Caught "):
            # These are torch's own words, and a long traceback follows them.
            error.args = (type(error.args[0])(f"Sample {sample} failed. {text}"),)
        else:
            error.add_note(BLAMES.format(sample))

    def _take(self, wait: _Wait) -> Any:
        """Open the loader, or return the next batch. The monitor sees workers that are forked
        meanwhile.
        """
        self._thread = threading.current_thread()
        ident = threading.get_ident()
        waiting[ident] = self._monitor
        if self._is_interruptible:
            outer_handler = signal.signal(INTERRUPT, self._interrupt)
        self._wait = wait
        try:
            # A generator forks its workers at its first batch.
            with nullcontext() if self._count else quiet_fork():
                if self._batches is not None:
                    return next(self._batches)
                self._batches = self._open(self._loader)
                return self._batches
        finally:
            self._wait = None
            waiting.pop(ident, None)
            if self._is_interruptible:
                signal.signal(INTERRUPT, outer_handler)

    @property
    def _is_interruptible(self) -> bool:
        """Return whether a wait is ended by a signal, which only the main thread can take."""
        raises = self._watched.on_stall == "raise"
        return raises and self._thread is threading.main_thread()

    def _interrupt(self, number: int, frame: Any) -> None:
        """End a wait that was given up, unless its batch has come before the signal."""
        if self._wait is not None and self._wait.reason:
            # A second interrupt could come while the loader ends its workers.
            self._wait = None
            raise _StallInterrupt

    def _explain_error(self, error: Exception, wait: _Wait) -> str:
        """Say which worker ended, and how, or that all files are open; "" if the loader failed for
        another reason.
        """
        if not isinstance(error, EOFError | OSError | RuntimeError | WorkerDiedError):
            return ""
        # A worker closes its pipes shortly before it ends. When it ends, torch may raise an error
        # in this thread.
        if isinstance(error, EOFError | ConnectionError):
            with suppress(RuntimeError):
                sleep(_END_S)
        for job, ending in self._list_ended(error):
            stall = self._explain(wait, job, ending)
            self.record.stalls.append(stall)
            return str(stall)
        return self._describe_files(str(error))

    def _list_ended(self, error: Exception) -> Iterator[tuple[WorkerJob, str]]:
        """Yield the workers that ended, and how."""
        if isinstance(error, WorkerDiedError):
            yield error.job, error.ending
        # A DataLoader keeps the exit codes of its workers. With persistent workers, it may fail as
        # it starts a pass, and then it keeps its iterator.
        batches = self._batches or getattr(self._loader, "_iterator", None)
        for place, worker in enumerate(getattr(batches, "_workers", ())):
            if worker.exitcode:
                yield WorkerJob(place, worker.pid), describe_exit(worker.exitcode)

    def _describe_files(self, error: str = "") -> str:
        """Say that a process has used up the files that it may open, as the text of an error may
        say; "" if it has not.
        """
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        count = 0
        for pid in (os.getpid(), *self._monitor.list_samples()):
            # A worker may have ended.
            with suppress(OSError):
                count = max(count, len(os.listdir(f"/proc/{pid}/fd")))
        if count < _MANY_FILES * limit and not re.search("ancdata|Too many open files", error):
            return ""
        return f"A process has {count} of at most {limit} files open: {FILES}"

    # --- the thread that watches

    def _watch(self) -> None:
        """Look at the loop again and again until the pass is over."""
        while not self._over.wait(min(_PAUSE_S, self._watched.timeout_s / 10)):
            # A process may end while it is looked at. The next look starts anew.
            with suppress(Exception):
                wait = self._wait
                if wait is not None:
                    self._look(wait)
                record = self.record
                record.looks.take(record.phase, self._thread)
                record.memory.look(record.clock.count)

    def _look(self, wait: _Wait) -> None:
        """Look at a wait, and explain it each time that another ``timeout_s`` has passed."""
        waited_s = perf_counter() - wait.asked_s
        if waited_s <= _LATE_S:
            return
        blamed = self._find_blamed()
        sample = self._monitor.inspect(blamed.pid, self._thread).sample
        self.record.note_samples(blamed.indices if sample is None else (sample,))
        if waited_s > wait.due_s:
            wait.due_s += self._watched.timeout_s
            stall = self._explain(wait, blamed, read_ending(blamed.pid))
            if self._wait is wait:
                self._act(wait, stall)

    def _act(self, wait: _Wait, stall: Stall) -> None:
        """Report a stall if its verdict is new. Give up the wait if stalls are to be raised."""
        is_new = not wait.reason and stall.verdict != wait.verdict
        if is_new:
            wait.verdict = stall.verdict
            self.record.stalls.append(stall)
        if self._watched.on_stall == "raise":
            wait.reason = wait.reason or str(stall)
        if self._is_interruptible:
            signal.pthread_kill(self._thread.ident or 0, INTERRUPT)
        elif is_new:
            # A filter may turn the warning into an error, which nobody could catch in this thread.
            with suppress(ColabUtilsWarning):
                warnings.warn_explicit(str(stall), ColabUtilsWarning, __file__, 0)

    def _explain(self, wait: _Wait, job: WorkerJob, ending: str) -> Stall:
        """Explain why no batch comes from a process. A process that has not ended is observed for
        half a second.
        """
        if ending:
            verdict = "dead"
            _, _, cure = explain_death(ending, self._oom_kills).partition("). ")
            seen = self._monitor.inspect(job.pid, self._thread)._replace(call=ending)
        else:
            verdict, seen = self._observe(job.pid)
            # Where files are used up, a worker may be idle, wait, or ask again and again.
            _, usual_cure = FINDINGS[verdict]
            cure = self._describe_files() or usual_cure
        file = "" if verdict == "read" else find_file(self._monitor.dataset, seen.sample)
        return Stall(verdict, perf_counter() - wait.asked_s, job, seen, file, cure)

    def _observe(self, pid: int) -> tuple[str, Activity]:
        """Observe a process for half a second. Return the verdict, and what the process does."""
        is_own = pid == os.getpid()
        folder = f"/proc/{pid}/task/{self._thread.native_id}" if is_own else f"/proc/{pid}"
        sample = self._monitor.inspect(pid, self._thread).sample
        cpu_began_s = measure_cpu(folder)
        self._over.wait(_LOOK_S)
        seen = self._monitor.inspect(pid, self._thread)
        if seen.sample != sample or measure_cpu(folder) - cpu_began_s > _BUSY_S:
            verdict = "slow"
        elif self._monitor.is_idle(pid):
            verdict = "lost"
        elif "futex" in seen.call and not is_own:
            verdict = "lock"
        elif seen.path.startswith("/"):
            verdict = "read"
        else:
            verdict = "waiting"
        return verdict, seen

    def _find_blamed(self) -> WorkerJob:
        """Return the process that the loop waits for.

        Our own loader knows the worker that has the oldest batch. For other loaders, it is the
        worker that has been loading its sample for longest. If no worker is loading a sample, and
        this process waits for workers, it is a living worker, preferably one that is not idle. Else
        it is this process.
        """
        jobs = self._loader.list_jobs() if self._knows_jobs else ()
        if jobs:
            return jobs[0]
        samples = self._monitor.list_samples()
        pids = sorted(samples)
        blamed = [pid for pid, sample in samples.items() if sample != NO_SAMPLE]
        own = self._monitor.read_stack(self._thread)
        if not blamed and name_place("wait", own) in (WORKERS, HANDOFF):
            blamed = [pid for pid in pids if not read_ending(pid)]
            blamed.sort(key=self._monitor.is_idle)
        if not blamed:
            return WorkerJob(None, os.getpid())
        return WorkerJob(pids.index(blamed[0]), blamed[0])


def find_file(dataset: Any, sample: Any) -> str:
    """Return the file of a sample; "" if the dataset has no ``find_path``, or if that fails."""
    # The method of a user's dataset may raise anything.
    with suppress(Exception):
        return str(dataset.find_path(sample))
    return ""
