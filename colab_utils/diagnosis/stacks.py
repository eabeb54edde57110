"""What a process is doing right now: its Python stack, its system call and the file behind it, how far it has come.

Read from outside, from Linux's /proc, so that a process that hangs need not help. Forked workers also note the sample
they are at and write their Python stacks when they are asked; elsewhere than on Linux most of it stays unknown.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import platform
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import count
from operator import index as as_int
from pathlib import Path
from time import monotonic, sleep
from traceback import walk_stack
from types import FrameType
from typing import Any, NamedTuple

from colab_utils.loading.workers import describe_exit

__all__ = ["Activity", "Board", "read_ending", "read_progress"]

_ROWS, _CELLS = 128, 8  # workers remembered; numbers that each notes: its pid, and the sample of each of its threads
_SIGNAL = int(getattr(signal, "SIGRTMAX", 64)) - 4  # nothing that is known uses it
_METHODS = ("__getitem__", "read_packed", "read_into")
_JOBS = {"fetch.py fetch", "workers.py _do_job"}  # of a worker; what is inside of them is the batch at work
_STARTS = {*_JOBS, "process.py _bootstrap", "threading.py _bootstrap", "watchdog.py _fetch"}
_NUMBERS = (
    "read 0 fstat 5 poll 7 pread64 17 readv 19 select 23 recvfrom 45 recvmsg 47 wait4 61 futex 202 getdents64 217 "
    "clock_nanosleep 230 epoll_wait 232 openat 257 newfstatat 262 preadv 295 preadv2 327 statx 332"
)  # of system calls: asm/unistd_64.h of x86_64
_CALLS = {number: name for name, number in re.findall(r"(\w+) (\d+)", _NUMBERS)}
_forking = threading.local()  # .board: whose workers this thread forks now


class Activity(NamedTuple):
    """What a process does: ``stack`` innermost line first; ``call`` and ``path`` are "" where they cannot be told."""

    stack: tuple[str, ...] = ()
    call: str = ""
    path: str = ""
    sample: int | None = None
    idle: bool = False
    """Its stack is known, and it is at no batch."""


class Board:
    """What forked workers note where this process can see it, and the way to ask for their stacks.

    In a worker, and only there, the methods of the dataset's class that give a sample are wrapped.
    """

    def __init__(self, dataset: Any) -> None:
        self._picks: list[Any] = []
        while hasattr(dataset, "dataset"):  # a Subset's own
            self._picks.append(getattr(dataset, "indices", None))
            dataset = dataset.dataset
        self.dataset = dataset
        self._cells = memoryview(mmap.mmap(-1, 8 * _ROWS * _CELLS)).cast("q")
        self._file = os.memfd_create("colab_utils") if hasattr(os, "memfd_create") else -1
        self._row = -1
        self._place, self._places = threading.local(), count()

    def __del__(self) -> None:
        if self._file >= 0:
            os.close(self._file)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Whatever this thread forks in this block are workers."""
        before, _forking.board = getattr(_forking, "board", None), self
        try:
            yield
        finally:
            _forking.board = before

    def enter(self) -> None:
        """In a worker: be seen from now on."""
        row, kind = self._row * _CELLS, type(self.dataset)
        for cell in range(row, row + _CELLS):
            self._cells[cell] = -1
        self._cells[row] = os.getpid()
        faulthandler.register(_SIGNAL, file=self._file)
        for name in _METHODS:
            if hasattr(kind, name):
                setattr(kind, name, self._wrap(getattr(kind, name), row))

    def _wrap(self, method: Callable[..., Any], row: int) -> Callable[..., Any]:
        @wraps(method)
        def noted(me: Any, index: Any, *rest: Any) -> Any:
            if me is not self.dataset:
                return method(me, index, *rest)
            if not hasattr(self._place, "cell"):
                self._place.cell = row + 1 + next(self._places) % (_CELLS - 1)
            cell, before = self._place.cell, self._cells[self._place.cell]
            self._cells[cell] = _find_number(index)
            try:
                return method(me, index, *rest)
            finally:
                self._cells[cell] = before

        return noted

    def resolve(self, index: Any) -> Any:
        """The sample that an index of a ``Subset`` stands for."""
        for indices in self._picks:
            index = index if indices is None else indices[index]
        return index

    def list_samples(self) -> dict[int, list[int]]:
        """The samples that each worker is at, by its pid."""
        rows = [self._cells[start : start + _CELLS].tolist() for start in range(0, _ROWS * _CELLS, _CELLS)]
        return {row[0]: [sample for sample in row[1:] if sample >= 0] for row in rows if row[0] > 0}

    def forget_ended(self) -> None:
        """Leave out the workers that are no more."""
        for row in range(0, _ROWS * _CELLS, _CELLS):
            if self._cells[row] > 0 and read_ending(self._cells[row]):
                self._cells[row] = 0

    def find_sample(self, pid: int, batch: tuple[Any, ...]) -> int | None:
        """The sample that a worker is at; where its threads are at several, one of this batch."""
        at, asked = self.list_samples().get(pid, []), {self.resolve(index) for index in batch}
        return next((sample for sample in at if sample in asked), at[0] if at else None)

    def inspect_worker(self, pid: int, batch: tuple[Any, ...] = ()) -> Activity:
        """What a worker process does, in the thread that is at a batch."""
        stacks = self._read_stacks(pid)
        busy = [stack for stack in stacks if any(_name(line) in _JOBS for line in stack)]
        calls = [_read_call(pid, task) for task in sorted(map(int, os.listdir(f"/proc/{pid}/task")))]
        if busy and busy[-1] is not stacks[-1]:  # not the main thread, which comes last: look for a file
            calls = sorted(
                calls[1:], key=lambda call: (not call[1].startswith("/"), call[0] in ("futex", "poll", "read"))
            )
        sample = self.find_sample(pid, batch)
        return Activity(_cut((busy or stacks or [[]])[-1]), *calls[0], sample, idle=bool(stacks) and not busy)

    def find_thread(self, ident: int) -> tuple[int, int]:
        """The thread of this process that is at a sample, if that is not the one given; and Linux's number for it."""
        frames = sys._current_frames()
        at_work = [other for other, frame in frames.items() if self._find_sample(frame) is not None]
        ident = at_work[0] if at_work and ident not in at_work else ident
        return ident, next((thread.native_id or 0 for thread in threading.enumerate() if thread.ident == ident), 0)

    def inspect_thread(self, ident: int, task: int) -> Activity:
        """What a thread of this process does."""
        frame = sys._current_frames()[ident]
        stack = [f"{f.f_code.co_filename}:{line} {f.f_code.co_name}" for f, line in walk_stack(frame)]
        return Activity(_cut(stack), *_read_call(os.getpid(), task), self._find_sample(frame))

    def _find_sample(self, frame: FrameType) -> int | None:
        """The index in the outermost call of the dataset's methods."""
        found = None
        for outer, _ in walk_stack(frame):
            code = outer.f_code
            if code.co_name in _METHODS and code.co_argcount > 1:
                me, index = (outer.f_locals.get(name) for name in code.co_varnames[:2])
                found = _find_number(index) if me is self.dataset else found
        return found

    def _read_stacks(self, pid: int) -> list[list[str]]:
        """The lines of each thread, innermost first, main thread last; none of a process not forked under watch."""
        caught = re.search(r"SigCgt:\s*(\w+)", _read(f"/proc/{pid}/status"))
        if pid not in self.list_samples() or not caught or not int(caught[1], 16) >> (_SIGNAL - 1) & 1:
            return []  # the signal would end it
        os.ftruncate(self._file, 0)
        os.lseek(self._file, 0, os.SEEK_SET)  # the workers share the position
        os.kill(pid, _SIGNAL)
        text, before, until_s = b"", b"", monotonic() + 0.5
        while monotonic() < until_s and not (text and text == before):
            sleep(0.03)
            before, text = text, os.pread(self._file, 1 << 20, 0)
        threads = re.split(r"^(?:Current thread|Thread) ", text.decode(errors="replace"), flags=re.M)[1:]
        lines = (re.findall(r'File "(.*)", line (\d+) in (.*)', thread) for thread in threads)
        return [[f"{file}:{line} {name}" for file, line, name in found] for found in lines]


def read_progress(pid: int, task: int) -> tuple[int, int]:
    """How far a worker, or a thread of this process, has come: CPU in ticks of 10 ms, bytes read."""
    base = f"/proc/{pid}/task/{task}" if pid == os.getpid() else f"/proc/{pid}"
    cpu, read = _read(f"{base}/stat").rpartition(")")[2].split(), _read(f"{base}/io").split()
    return sum(map(int, cpu[11:13])), int(read[1]) if read else 0


def read_ending(pid: int) -> str:
    """How a process ended, in words; "" while it lives.

    Example:
        >>> read_ending(os.getpid())
        ''
    """
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if not fields:
        return "no reason given" if os.path.isdir("/proc/self") else ""
    code = int(fields[49])
    return describe_exit(os.waitstatus_to_exitcode(code & 0xFF7F)) if fields[0] in "ZX" else ""  # 0x80: a core dump


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
        if "read" in name or "recv" in name or name in ("fstat", "getdents64"):
            return name, os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
    return name, ""


def _cut(stack: list[str]) -> tuple[str, ...]:
    """The lines inside of what started the job, the worker, or the watch."""
    end = next((i for i, line in enumerate(stack) if _name(line) in _STARTS), len(stack))
    return tuple(line for line in stack[:end] if _name(line) != "stacks.py noted")


def _name(line: str) -> str:
    """File and function without the folder and the number: "fetch.py fetch"."""
    return re.sub(r":\d+ ", " ", line.rpartition("/")[2])


def _find_number(index: Any) -> int:
    try:
        return as_int(index)
    except TypeError:  # a key, or a list of indices
        return -1


def _read(path: str) -> str:
    try:
        return Path(path).read_text(errors="replace")
    except OSError:
        return ""


def _prepare_fork() -> None:
    if board := getattr(_forking, "board", None):
        board._row = (board._row + 1) % _ROWS


def _enter_child() -> None:
    if board := getattr(_forking, "board", None):
        _forking.board = None
        with suppress(Exception):  # a worker that cannot be seen still works
            board.enter()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_prepare_fork, after_in_child=_enter_child)
