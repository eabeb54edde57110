"""What Linux says of a process: its system call and file, what it has used, and how it ended."""

import os
import platform
import re
from contextlib import suppress
from threading import get_native_id

import psutil

from colab_utils.loading.workers import describe_exit

# Numbers of system calls on x86_64, from asm/unistd_64.h.
_NUMBERS = (
    "read 0 fstat 5 poll 7 pread64 17 readv 19 select 23 nanosleep 35 connect 42 recvfrom 45 "
    "recvmsg 47 wait4 61 semop 65 fcntl 72 flock 73 futex 202 getdents64 217 semtimedop 220 "
    "clock_nanosleep 230 epoll_wait 232 waitid 247 openat 257 newfstatat 262 pselect6 270 "
    "ppoll 271 epoll_pwait 281 preadv 295 preadv2 327 statx 332"
)
_CALLS = {number: name for name, number in re.findall(r"(\w+) (\d+)", _NUMBERS)}

_CALLS_WITH_PATH = ("openat", "newfstatat", "statx")
_CALLS_OF_FILE = ("read", "pread64", "readv", "preadv", "preadv2", "fstat", "getdents64")
_PATH_BYTES = 4096
# A futex is a lock. The bit `_PRIVATE` of its operation says that only threads of one process share
# it.
_FUTEX = "futex"
_SHARED_FUTEX = "shared futex"
_PRIVATE = 128
_LOCKS = (_SHARED_FUTEX, "flock", "fcntl", "semop", "semtimedop")
_SLEEPS = ("nanosleep", "clock_nanosleep")
# In kernel functions with these names, a thread waits until a page of a mapped file has been read.
_PAGE_WAIT = re.compile("folio|wait_on_page")


def read_ending(pid: int) -> str:
    """Return how a child process ended, in words; "" while it lives.

    Example:
        >>> read_ending(os.getpid())
        ''
    """
    # The exit status may have been collected already, or the process may have another parent.
    with suppress(ChildProcessError):
        # WNOWAIT leaves the exit status for the loader. psutil would take it away.
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if ended is None:
            return ""
        has_exited = ended.si_code == os.CLD_EXITED
        return describe_exit(ended.si_status if has_exited else -ended.si_status)
    return "" if psutil.pid_exists(pid) else "no reason given"


def measure_cpu(folder: str) -> float:
    """Return the CPU seconds that a process or a thread has used. ``folder`` is its folder in
    /proc.
    """
    # The name of the program comes before these words, in brackets, and may hold spaces.
    times = _read(f"{folder}/stat").rpartition(")")[2].split()
    return sum(map(int, times[11:13])) / os.sysconf("SC_CLK_TCK")


def measure_memory() -> int:
    """Return the bytes of this process that belong to no file, with those that it shares with its
    workers; 0 if Linux does not say.

    Example:
        >>> measure_memory() > 1_000_000
        True
    """
    return _sum_sizes("/proc/self/status", "RssAnon|RssShmem")


def measure_memory_part(pid: int) -> int:
    """Return the bytes of a process that belong to no file; 0 if Linux does not say.

    If several processes share a page, each of them counts only its part of the page. A process that
    writes to the page gets a copy, and counts the whole copy. Even to look at a Python object is to
    write, because its reference count changes.
    """
    return _sum_sizes(f"/proc/{pid}/smaps_rollup", "Pss_Anon")


def _sum_sizes(path: str, names: str) -> int:
    """Return the bytes that a file of Linux says in lines of these names, in total."""
    sizes = re.findall(rf"^(?:{names}):\s+(\d+) kB", _read(path), re.M)
    return 1024 * sum(map(int, sizes))


def read_call(pid: int, task: int) -> tuple[str, str]:
    """Return the system call that a thread is in, and its file; "" for what is not known."""
    words = _read(f"/proc/{pid}/task/{task}/syscall").split()
    if len(words) < 8:
        # The thread runs, is in a page fault, or belongs to a process that may not be read. The
        # function of the kernel in which the thread sleeps says more.
        return _read(f"/proc/{pid}/task/{task}/wchan").strip("0"), ""
    name = f"system call {words[0]}"
    if platform.machine() == "x86_64":
        name = _CALLS.get(words[0], name)
    if name == _FUTEX and not int(words[2], 16) & _PRIVATE:
        name = _SHARED_FUTEX
    with suppress(OSError):
        if name in _CALLS_WITH_PATH:
            path = _read_path(pid, int(words[2], 16))
            return name, os.path.join(os.readlink(f"/proc/{pid}/cwd"), path)
        if name in _CALLS_OF_FILE:
            # psutil's open_files() looks at each file, and would hang where the worker hangs.
            path = os.readlink(f"/proc/{pid}/fd/{int(words[1], 16)}")
            # A named pipe has a path, but it is no file: another process writes to it.
            is_pipe = "pipe" in _read(f"/proc/{pid}/task/{task}/wchan")
            return name, "a pipe" if is_pipe else path
    return name, ""


def find_wait(pid: int, task: int) -> str:
    """Return what a thread waits for, in one word; "" while it runs.

    - "read": a file
    - "lock": a lock that processes share
    - "sleep": the end of a sleep
    - "other_process": another process, or the network
    - "wait": another thread of its process, or a lock that only these threads share

    In place of "wait", return "" if another thread of the process runs. If none runs, return the
    first of "read", "lock", "sleep" and "other_process" for which another thread waits, if there is
    one.
    """
    kind = classify_call(*read_call(pid, task))
    if kind != "wait":
        return kind
    others = {*map(int, os.listdir(f"/proc/{pid}/task"))} - {task, get_native_id()}
    kinds = {classify_call(*read_call(pid, other)) for other in others}
    ranked = ("", "read", "lock", "sleep", "other_process")
    return next((helping for helping in ranked if helping in kinds), kind)


def classify_call(call: str, path: str) -> str:
    """Return what a system call waits for, in the words of `find_wait`.

    Example:
        >>> classify_call("read", "/data/1.jpg"), classify_call("read", "pipe:[7]")
        ('read', 'other_process')
        >>> classify_call("folio_wait_bit_common", "")
        'read'
    """
    if call == _FUTEX:
        return "wait"
    if call in _LOCKS:
        return "lock"
    if call in _SLEEPS:
        return "sleep"
    if path.startswith("/") or _PAGE_WAIT.search(call):
        return "read"
    return "other_process" if call else ""


def _read_path(pid: int, address: int) -> str:
    """Return the path that lies at an address of a process's memory."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        memory.seek(address)
        content = memory.read(_PATH_BYTES) or b""
    path, _, _ = content.partition(b"\0")
    return os.fsdecode(path)


def _read(path: str) -> str:
    """Return the text of a file; "" if it cannot be read."""
    try:
        # Without a buffer, a file is read in half the time.
        with open(path, "rb", buffering=0) as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""
