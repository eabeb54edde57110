"""What the processes of a loader do: samples, system call and its file.

Read from outside, from Linux's /proc, so that a process that hangs need not help. Forked workers also note the sample
they are at; elsewhere than on Linux most of it stays unknown.
"""

import mmap
import operator
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import wraps
from itertools import takewhile
from pathlib import Path
from time import monotonic_ns, process_time, thread_time
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.loading.workers import describe_exit

_ROWS, _THREADS = 128, 16  # workers remembered; threads of each that can be at a sample
_BITS = 48  # of the longest time, 39 hours
_HERE = os.path.dirname(__file__)
_METHODS = ("__getitem__", "read_packed", "read_into")
_NUMBERS = (
    "read 0 fstat 5 poll 7 pread64 17 readv 19 select 23 recvfrom 45 recvmsg 47 wait4 61 futex 202 getdents64 217 "
    "clock_nanosleep 230 epoll_wait 232 openat 257 newfstatat 262 preadv 295 preadv2 327 statx 332"
)  # of system calls: asm/unistd_64.h of x86_64
_CALLS = {number: name for name, number in re.findall(r"(\w+) (\d+)", _NUMBERS)}
_ROW = np.dtype([  # what a worker notes
    ("pid", np.int64),
    ("at", np.int64, (_THREADS, 3)),  # of each thread: the sample, or -1, since when it is at it, and its id
    ("sums", np.float64, 5),  # samples so far, their wall, CPU and queueing seconds, and the bytes that they read
    ("spread", np.float64, (_BITS, 2)),  # of samples whose time in ns has so many bits: how many, and their seconds
    ("slowest", np.float64, 2),  # sample: its seconds, and its index
    ("cpu", np.float64, 2),  # seconds of whole processes: of those before with this row, and of this one so far
])  # fmt: skip


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
    cpu_ticks: int = 0
    """Of 10 ms each, that it has taken so far."""
    bytes_read: int = 0


class SampleTimes(NamedTuple):
    """How long samples took in workers that were forked under watch."""

    samples: float = 0
    wall_s: float = 0.0
    """Of all of them, in sum."""
    cpu_s: float = 0.0
    """Of it, CPU time."""
    queued_s: float = 0.0
    """Of it, waiting for a free core."""
    bytes_read: float = 0
    """By all of them, in sum; 0 where Linux does not say."""
    slowest: tuple[float, int] = (0.0, -1)
    """Seconds and index of the slowest one."""
    worker_cpu_s: float = 0.0
    """CPU time of the workers, in samples and outside of them."""
    spread: Sequence[tuple[float, float]] = ()
    """How many samples took 2**(n - 1) to 2**n ns, and their seconds in sum, by n."""


class _ThreadCounts(threading.local):
    """What Linux counts of the calling thread in ``/proc``; 0 where it does not."""

    def __init__(self) -> None:
        self._files = dict.fromkeys(("schedstat", "io"), -1)
        for name in self._files:
            with suppress(OSError):
                self._files[name] = os.open(f"/proc/thread-self/{name}", os.O_RDONLY)

    def read(self) -> NDArray[np.float64]:
        """Seconds of CPU time and of waiting for a free core, and bytes that it read, so far."""
        files = self._files.values()
        queued_ns, read = (int(os.pread(file, 64, 0).split()[1]) if file >= 0 else 0 for file in files)
        return np.array([thread_time(), queued_ns / 1e9, read])


waiting = threading.local()  # its `monitor` sees the workers that this thread forks, as it waits for a watched loader


class WorkerMonitor:
    """What forked workers note where this process can see it.

    In a worker, and only there, the methods of the dataset's class that give a sample are wrapped.
    """

    def __init__(self, dataset: Any) -> None:
        while hasattr(dataset, "dataset"):  # below a Subset
            dataset = dataset.dataset
        self.dataset = dataset
        self._notes = np.frombuffer(mmap.mmap(-1, _ROWS * _ROW.itemsize), _ROW)

    def enter(self) -> None:
        """In a worker: be seen from now on."""
        row, kind = self._notes[os.getpid() % _ROWS], type(self.dataset)
        row["at"], row["cpu"] = -1, (row["cpu"].sum(), 0)
        row["pid"] = os.getpid()
        for name in _METHODS:
            if hasattr(kind, name):
                setattr(kind, name, self._wrap(getattr(kind, name), row))

    def _wrap(self, method: Callable[..., Any], row: Any) -> Callable[..., Any]:
        threads, sums, slowest, spread, cpu = (row[name] for name in ("at", "sums", "slowest", "spread", "cpu"))
        counts = _ThreadCounts()

        @wraps(method)
        def noted(me: Any, index: Any, *rest: Any) -> Any:
            if me is not self.dataset:
                return method(me, index, *rest)
            note = threads[(task := threading.get_native_id()) % _THREADS]
            began_ns, began = monotonic_ns(), counts.read()
            before, note[:] = note.tolist(), (_read_index(index), began_ns, task)
            try:
                return method(me, index, *rest)
            finally:
                wall_ns, sample, note[:] = monotonic_ns() - began_ns, note[0], before
                if before[0] < 0:  # one method may call another
                    sums[:] += 1, wall_ns / 1e9, *(counts.read() - began)
                    cpu[1] = process_time()
                    if wall_ns > 1e9 * slowest[0]:
                        slowest[:] = wall_ns / 1e9, sample
                    spread[min(wall_ns.bit_length(), _BITS - 1)] += 1, wall_ns / 1e9

        return noted

    def list_samples(self) -> dict[int, list[tuple[int, int, int]]]:
        """By the pid of each worker: since when (ns) it is at which samples, in which thread, the first in front."""
        rows = sorted((row["pid"].item(), row["at"].tolist()) for row in self._notes if row["pid"])
        return {pid: sorted((since, sample, task) for sample, since, task in at if sample >= 0) for pid, at in rows}

    def read_times(self) -> SampleTimes:
        """How long samples took so far."""
        sums, spread = (self._notes[name].sum(axis=0).tolist() for name in ("sums", "spread"))
        slowest_s, slowest = max(self._notes["slowest"].tolist())
        return SampleTimes(*sums)._replace(
            slowest=(slowest_s, int(slowest)), worker_cpu_s=float(self._notes["cpu"].sum()), spread=spread
        )

    def forget_ended(self) -> None:
        """Leave out the workers that are no more."""
        for row in self._notes:
            if row["pid"] and read_ending(int(row["pid"])):
                row["pid"] = 0

    def inspect_worker(self, pid: int) -> Activity:
        """What a worker process does, in the thread that has been longest at a sample; else in its main thread."""
        at_work = self.list_samples().get(pid)
        _, sample, task = at_work[0] if at_work else (0, None, pid)
        call, path = _read_call(pid, task)
        has_worked = self._notes["sums"][pid % _ROWS, 0] > 0  # on samples: those of a stream are not seen
        idle = not at_work and has_worked and call in ("poll", "read") and not path.startswith("/")
        return Activity((), call, path, sample, idle, *_read_progress(f"/proc/{pid}"))

    def inspect_thread(self, ident: int) -> Activity:
        """What another thread of this process does."""
        frame = sys._current_frames()[ident]
        task = next((thread.native_id or 0 for thread in threading.enumerate() if thread.ident == ident), 0)
        lines = (f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in walk_stack(frame))
        stack = tuple(takewhile(lambda line: not line.startswith(_HERE), lines))
        call, progress = _read_call(os.getpid(), task), _read_progress(f"/proc/self/task/{task}")
        return Activity(stack, *call, self._find_sample(frame), False, *progress)

    def _find_sample(self, frame: FrameType) -> int | None:
        """The index in the outermost call of the dataset's methods."""
        found = None
        for outer, _ in walk_stack(frame):
            code = outer.f_code
            if code.co_name in _METHODS and code.co_argcount > 1:
                me, index = (outer.f_locals.get(name, ()) for name in code.co_varnames[:2])
                found = number if me is self.dataset and (number := _read_index(index)) >= 0 else found
        return found


def _read_progress(base: str) -> tuple[int, int]:
    """How far a process or thread has come: CPU in ticks of 10 ms, bytes read."""
    cpu, read = _read(f"{base}/stat").rpartition(")")[2].split(), _read(f"{base}/io").split()
    return sum(map(int, cpu[11:13])), int(read[1]) if read else 0


def read_ending(pid: int) -> str:
    """How a child process ended, in words; "" while a process lives.

    Example:
        >>> read_ending(os.getpid())
        ''
    """
    with suppress(ChildProcessError):  # asked for by somebody else already, or of another parent
        if not (ended := os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            return ""
        return describe_exit(ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status)
    return "" if os.path.exists(f"/proc/{pid}") else "no reason given"


def _read_call(pid: int, task: int) -> tuple[str, str]:
    """The system call that a thread is in, and its file."""
    words = _read(f"/proc/{pid}/task/{task}/syscall").split()
    if len(words) < 8:  # on a processor, in a page fault, or not to be seen here: where it sleeps in the kernel
        return _read(f"/proc/{pid}/task/{task}/wchan").strip("0"), ""
    name = (_CALLS if platform.machine() == "x86_64" else {}).get(words[0], f"system call {words[0]}")
    with suppress(OSError):
        if name in ("openat", "newfstatat", "statx"):
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                memory.seek(int(words[2], 16))
                path = os.fsdecode((memory.read(4096) or b"").partition(b"\0")[0])
            return name, os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
        if "read" in name or name in ("fstat", "getdents64"):
            return name, os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    return name, ""


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _read_index(index: Any) -> int:
    """The index of a sample; -1 of what is no single one, such as an array of several."""
    try:
        return operator.index(index)
    except TypeError:
        return -1


def _enter_child() -> None:
    if monitor := getattr(waiting, "monitor", None):
        waiting.monitor = None  # what a worker forks is no worker
        with suppress(Exception):  # a worker that cannot be seen still works
            monitor.enter()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_enter_child)
