"""What the worker processes of a loader do: at which sample they are, in which system call, and at
which file.

Read from outside, so that a process that hangs need not help. Forked workers also note the sample
that they are at. Elsewhere than on Linux most of it stays unknown.
"""

import mmap
import multiprocessing
import operator
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from time import monotonic_ns, process_time
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.diagnosis.system_calls import find_wait, measure_use, read_call, read_ending

# Workers that are remembered.
_ROWS = 128
_HERE = os.path.dirname(__file__)
# Methods of a dataset that give a sample.
_METHODS = ("__getitem__", "__getitems__", "read_packed", "read_into")
# What a worker notes.
_ROW = np.dtype(
    [
        ("pid", np.int64),
        # This is the sample that it is at, or -1, and since when.
        ("sample", np.int64),
        ("since_ns", np.int64),
        # These are the first four fields of SampleTimes.
        ("sums", np.float64, 4),
        # These are the CPU seconds of earlier processes with this row, and of this process.
        ("cpu", np.float64, 2),
    ]
)


class Activity(NamedTuple):
    """What a process does."""

    stack: tuple[str, ...] = ()
    """Python lines, innermost first; none of other processes."""
    call: str = ""
    """The system call that it is in."""
    path: str = ""
    """The file of that call."""
    sample: int | None = None
    idle: bool = False
    """Whether it waits for work."""
    cpu_s: float = 0.0
    """CPU seconds that it has taken so far."""
    bytes_read: int = 0


class SampleTimes(NamedTuple):
    """How long samples took in workers that were forked under watch."""

    samples: float = 0
    wall_s: float = 0.0
    """Seconds that all samples took, in sum."""
    cpu_s: float = 0.0
    """CPU seconds in that time."""
    bytes_read: float = 0
    """Bytes that all samples read, in sum; 0 where Linux does not say."""
    worker_cpu_s: float = 0.0
    """CPU time of the workers, in samples and outside of them."""


class _SampleNotes:
    """Where a worker notes its samples: a row of memory that it shares with the process that
    watches. It takes the row over from a worker that ended.
    """

    def __init__(self, row: Any) -> None:
        self._row = row
        row["sample"] = -1
        row["cpu"] = (row["cpu"].sum(), 0)
        row["pid"] = os.getpid()
        self._io: int | None = None
        # What Linux counts of the bytes that it reads. The file stays open: opening it for each
        # sample would take longer than to read it.
        with suppress(OSError):
            self._io = os.open("/proc/self/io", os.O_RDONLY)

    @contextmanager
    def mark_sample(self, sample: int, count: int) -> Iterator[None]:
        """Note a sample, or the first of so many, while it is loaded, and how long it took."""
        # A method may call another one of them, in threads of its own, too. The outer one counts.
        if self._row["sample"] >= 0:
            yield
            return
        began_ns = monotonic_ns()
        counts = self._count()
        self._row["since_ns"] = began_ns
        self._row["sample"] = sample
        try:
            yield
        finally:
            self._row["sample"] = -1
            wall_s = (monotonic_ns() - began_ns) / 1e9
            self._row["sums"] += (count, wall_s, *(self._count() - counts))
            self._row["cpu"][1] = process_time()

    def _count(self) -> NDArray[np.float64]:
        """Return CPU seconds of this process, and bytes that it read, so far."""
        bytes_read = 0
        if self._io is not None:
            bytes_read = int(os.pread(self._io, 64, 0).split()[1])
        return np.array([process_time(), bytes_read])


# Its `monitor` sees the workers that this thread forks, while it waits for a watched loader.
waiting = threading.local()


class WorkerMonitor:
    """What forked workers note where this process can see it.

    In a worker, and only there, the methods of the dataset's class that give a sample are wrapped.
    """

    def __init__(self, dataset: Any) -> None:
        # A Subset has the dataset that gives the samples.
        while hasattr(dataset, "dataset"):
            dataset = dataset.dataset
        self.dataset = dataset
        self._rows = np.frombuffer(mmap.mmap(-1, _ROWS * _ROW.itemsize), _ROW)
        self._rows["sample"] = -1

    def enter(self) -> None:
        """Let this process, a worker, be seen from now on."""
        notes = _SampleNotes(self._rows[os.getpid() % _ROWS])
        kind = type(self.dataset)
        for name in _METHODS:
            if hasattr(kind, name):
                setattr(kind, name, self._wrap(getattr(kind, name), notes))

    def _wrap(self, method: Callable[..., Any], notes: _SampleNotes) -> Callable[..., Any]:
        """Return a method that notes the sample which it is asked for."""

        @wraps(method)
        def load_sample(dataset: Any, index: Any, *rest: Any) -> Any:
            if dataset is not self.dataset:
                return method(dataset, index, *rest)
            count = len(index) if method.__name__ == "__getitems__" else 1
            with notes.mark_sample(_read_index(index), max(1, count)):
                return method(dataset, index, *rest)

        return load_sample

    def list_samples(self) -> dict[int, int]:
        """Return the sample that each worker is at, or -1, by its pid; the one that was begun first
        in front.
        """
        rows = np.sort(self._rows[self._rows["pid"] > 0], order="since_ns")
        return dict(zip(rows["pid"].tolist(), rows["sample"].tolist(), strict=True))

    def read_times(self) -> SampleTimes:
        """Return how long samples took so far."""
        times = SampleTimes(*self._rows["sums"].sum(axis=0).tolist())
        return times._replace(worker_cpu_s=float(self._rows["cpu"].sum()))

    @property
    def sees_samples(self) -> bool:
        """Return whether a sample was seen."""
        return bool(self._rows["sums"][:, 0].any() or (self._rows["sample"] >= 0).any())

    def list_waits(self) -> list[str]:
        """Return what each worker waits for that is at a sample, as `find_wait` calls it; where
        samples are not seen, of each one that does not wait for work.
        """
        samples = self.list_samples()
        pids = [pid for pid, sample in samples.items() if sample >= 0]
        if not pids and not self.sees_samples:
            workers = [*samples] or list_other_workers()
            # One that waits for work polls a pipe.
            pids = [pid for pid in workers if read_call(pid, pid)[0] != "poll"]
        return [find_wait(pid, pid) for pid in pids]

    def forget_ended(self) -> None:
        """Leave out the workers that are no more."""
        for row in self._rows:
            if row["pid"] and read_ending(int(row["pid"])):
                row["pid"] = 0

    def inspect_worker(self, pid: int) -> Activity:
        """Return what a worker does in its main thread."""
        sample = self.list_samples().get(pid, -1)
        call, path = read_call(pid, pid)
        # The samples of a stream are not seen. A worker without any may be at one.
        has_worked = bool(self._rows["sums"][pid % _ROWS, 0] > 0)
        waits_for_pipe = call in ("poll", "read") and not path.startswith("/")
        idle = sample < 0 and has_worked and waits_for_pipe
        known = sample if sample >= 0 else None
        return Activity((), call, path, known, idle, *measure_use(f"/proc/{pid}"))

    def inspect_thread(self, thread: threading.Thread) -> Activity:
        """Return what another thread of this process does."""
        frame = sys._current_frames()[thread.ident or 0]
        lines = []
        for inner, line in walk_stack(frame):
            # These are the lines of the user's program, or its libraries, within our own.
            if inner.f_code.co_filename.startswith(_HERE):
                break
            lines.append(f"{inner.f_code.co_filename}:{line} {inner.f_code.co_name}")
        task = thread.native_id or 0
        call, path = read_call(os.getpid(), task)
        use = measure_use(f"/proc/self/task/{task}")
        return Activity(tuple(lines), call, path, self._find_sample(frame), False, *use)

    def _find_sample(self, frame: FrameType) -> int | None:
        """Return the index in the outermost call of the dataset's methods."""
        sample = None
        for outer, _ in walk_stack(frame):
            code = outer.f_code
            if code.co_name not in _METHODS or code.co_argcount < 2:
                continue
            # A parameter may have been deleted.
            dataset = outer.f_locals.get(code.co_varnames[0])
            index = _read_index(outer.f_locals.get(code.co_varnames[1]))
            if dataset is self.dataset and index >= 0:
                sample = index
        return sample


def _read_index(index: Any) -> int:
    """Return the index of a sample, or of the first in a list of them; -1 of what is neither, such
    as an array of several.
    """
    if isinstance(index, list) and index:
        index = index[0]
    try:
        return operator.index(index)
    except TypeError:
        return -1


def list_other_workers() -> list[int]:
    """Return the processes that multiprocessing started in another way than by a fork."""
    children = [*vars(multiprocessing.process)["_children"]]
    return [child.pid for child in children if child._popen.method != "fork"]


def _enter_child() -> None:
    """Let a forked worker be seen."""
    monitor = getattr(waiting, "monitor", None)
    if monitor is not None:
        # What a worker forks is no worker.
        waiting.monitor = None
        # A worker that cannot be seen still works.
        with suppress(Exception):
            monitor.enter()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_enter_child)
