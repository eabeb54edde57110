"""The machine that this runs on, and what every module needs: progress bars, process pools, safe
writing of files.
"""

import errno
import gc
import hashlib
import multiprocessing
import os
import platform
import shutil
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import xxhash
from tqdm import tqdm

from colab_utils.errors import ColabUtilsError

COLAB_ROOT = Path("/content")
"""Colab's own folder; Google Drive is mounted at ``drive`` in it."""


def count_cores() -> int:
    """Cores this process may use: its affinity mask, cut to the container's CPU quota where there
    is one.

    Example:
        >>> count_cores() >= 1
        True
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read_limit("cpu.max").partition(" ")
    return min(cores, max(1, round(int(quota) / int(period)))) if quota.isdigit() else cores


def find_free_memory() -> int:
    """Bytes of memory that can be had now without swapping, in this container if it has a limit of
    its own.

    Example:
        >>> find_free_memory() > 0
        True
    """
    free: int = psutil.virtual_memory().available
    limit = _read_limit("memory.max")
    if limit.isdigit():
        stat = dict(line.split() for line in _read_limit("memory.stat").splitlines())
        # the cache can be dropped
        free = min(
            free, int(limit) - int(_read_limit("memory.current")) + int(stat["inactive_file"])
        )
    return max(0, free)


def list_processes() -> list[psutil.Process]:
    """This process, and all that it or its children started.

    Example:
        >>> list_processes()[0].pid == os.getpid()
        True
    """
    main = psutil.Process()
    with suppress(OSError, psutil.Error):  # one ended meanwhile, or the system has no such lists
        pids = [main.pid]
        for pid in pids:  # which grow; by the kernel's own lists, as psutil takes 20 times as long
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
        return [*map(psutil.Process, pids)]
    return [main, *main.children(recursive=True)]


def _read_limit(name: str) -> str:
    """A file of the container's limits; "" without cgroup v2."""
    path = Path("/sys/fs/cgroup", name)
    return path.read_text().strip() if path.is_file() else ""


def is_colab() -> bool:
    """Whether this runs on a hosted Colab virtual machine."""
    return "google.colab" in sys.modules or Path("/var/colab/hostname").exists()


def require_linux(work: str) -> None:
    """Refuse what only Linux can do.

    Raises:
        ColabUtilsError: this is another system.

    Example:
        >>> require_linux("start workers")
    """
    if sys.platform != "linux":
        raise ColabUtilsError(
            f"expected Linux to {work}, found {sys.platform}: use Colab, a Linux machine or WSL 2"
        )


@dataclass(frozen=True)
class Machine:
    """The machine that a measurement was made on; sizes in bytes, None for what it lacks."""

    cpu: str
    """The processor's name."""
    cores: int
    """Those that this process may use."""
    ram_bytes: int
    gpu: str | None
    """Its name."""
    software: str
    """Versions of Python, torch and torchvision."""

    def __str__(self) -> str:
        memory = format_bytes(self.ram_bytes)
        return (
            f"{self.cores} cores ({self.cpu}), {memory} RAM, {self.gpu or 'no GPU'}, "
            f"{self.software}"
        )


def describe_machine() -> Machine:
    """Describe this machine.

    Example:
        >>> describe_machine().cores == count_cores()
        True
    """
    import torch

    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    torchvision = metadata.version("torchvision")
    software = (
        f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision}"
    )
    return Machine(cpu, count_cores(), psutil.virtual_memory().total, gpu, software)


def show_progress(
    label: str, items: Any = None, *, total: Any = None, unit: str = "it", scale: bool = False
) -> Any:
    """A tqdm bar on a terminal or in a notebook, silent elsewhere, or where one runs already;
    ``scale`` counts bytes.

    It gives ``items`` one after the other, if there are any, and counts them.

    Example:
        >>> with show_progress("copying", total=2) as bar:
        ...     _ = bar.update(2)
        >>> list(show_progress("reading", "ab"))
        ['a', 'b']
    """
    # a bar in a bar leaves stale lines in notebooks
    silent = not is_watched() or len(tqdm._instances) > 0
    return _Bar(
        items,
        total=total,
        desc=label,
        unit=unit,
        unit_scale=scale,
        unit_divisor=1024,
        disable=silent,
    )


class _Bar(tqdm):
    # tqdm's own lock is shared with forked processes: one that is killed while it draws would stop
    # every later bar
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # a thread that held the lock is not in the forked process
    os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


def is_watched() -> bool:
    """Whether somebody sees a progress bar: on a terminal, or in a notebook's kernel."""
    return sys.stderr.isatty() or is_notebook()


def is_notebook() -> bool:
    """Whether this runs in a notebook's kernel.

    Example:
        >>> is_notebook()
        False
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None


def end_with_parent() -> None:
    """In a worker process: end when the process that started it is killed; nobody would end it
    then.
    """

    def wait(parent: Any) -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, args=(multiprocessing.parent_process(),), daemon=True).start()


class _ForkPool(ProcessPoolExecutor):
    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, BrokenExecutor):
            found = (
                "found one that the system ended, most often for want of memory: use fewer "
                "workers (--workers 1)"
            )
            raise ColabUtilsError(f"expected every process to finish, {found}") from None


def fork_pool(
    workers: int, initializer: Callable[..., object] = int, *arguments: Any
) -> ProcessPoolExecutor:
    """A pool of forked processes that end with this one and that Ctrl-C does not reach: it is the
    parent's to answer.

    Each calls ``initializer(*arguments)`` first. Where the system ends one, the ``with`` block ends
    with an error that says so.

    Example:
        >>> with fork_pool(2) as pool:
        ...     list(pool.map(abs, (-1, 2)))
        [1, 2]
    """
    require_linux("start worker processes")

    def begin() -> None:
        # what the parent has left to collect, such as tensors on a GPU, is not collected here
        gc.freeze()
        end_with_parent()
        initializer(*arguments)

    pool = _ForkPool(workers, multiprocessing.get_context("fork"), begin)
    # blocked from the first moment on: a handler is set too late for a process that has only begun
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with quiet_fork():
            pool.submit(int)  # forked processes all start with the first job
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool


def pop_done(pending: set[Future[Any]]) -> set[Future[Any]]:
    """Sleep a moment; then take the futures that are done out of ``pending``.

    Ctrl-C within ``concurrent.futures.wait`` or ``Future.done`` would leave a future's lock held,
    and its pool could never end: its state is read without the lock.

    Example:
        >>> pop_done(set())
        set()
    """
    sleep(0.02)
    done = {future for future in pending if future._state not in ("PENDING", "RUNNING")}
    pending -= done
    return done


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Start worker processes without two warnings that tell you nothing here."""
    with warnings.catch_warnings():
        # Python 3.12 warns that a process with threads forks; what runs in our workers touches none
        # of them
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )
        # the number of workers is chosen already; torch warns of more than it counts cores
        warnings.filterwarnings(
            "ignore", message="This DataLoader will create", category=UserWarning
        )
        yield


def name_temporary(path: Path) -> Path:
    """The name under which this thread writes a file until the file is complete; it tells the
    process and the thread.

    Example:
        >>> name_temporary(Path("index.json"))
        PosixPath('.index.json...part')
    """
    return path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}.part")


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file under a temporary name, read it back, then rename it; a failure leaves nothing
    behind.

    The file is the parts, one after the other.

    Raises:
        OSError: what Python raised, or EIO where the file reads back differently.
    """
    temporary = name_temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        drop_cached(temporary)  # or it would be read from memory, which proves nothing
        with open(temporary, "rb", buffering=0) as file:
            if hashlib.file_digest(file, xxhash.xxh3_64).hexdigest() != hash_bytes(*parts):
                raise OSError(errno.EIO, "what was written reads back differently")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_new(path: Path, mark: bytes = b"") -> Path:
    """The path of a file to write: nothing is there yet, or an earlier result, which holds
    ``mark``, or an empty file.

    Raises:
        ColabUtilsError: something else is there.
    """
    is_ours = mark and path.is_file() and mark in (path.read_bytes() or mark)
    if path.exists() and not is_ours:
        raise ColabUtilsError(
            f"expected a new file, found {path}: name another: nothing of yours is overwritten"
        )
    return path


def hash_bytes(*parts: Any) -> str:
    """XXH3-64 of all parts (bytes or arrays), one after the other, in hexadecimal.

    Example:
        >>> hash_bytes(b"")
        '2d06800538d394c2'
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def drop_cached(path: Path) -> None:
    """Drop what Linux keeps of a written file in memory; elsewhere, and where there is no file, do
    nothing.
    """
    # reading it will say what is wrong
    with suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def find_free_space(folder: Path) -> int:
    """Free bytes of the disk that a folder lies on, or will lie on once it is made."""
    path = folder.absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def require_space(folder: Path, needed: float, cure: str) -> None:
    """Refuse what the disk of a folder cannot hold, before its first byte; ``cure``: what helps
    beside freeing some.
    """
    free = find_free_space(folder)
    if needed > free:
        found = f"found {format_bytes(free)}: free some, {cure}"
        raise ColabUtilsError(f"expected {format_bytes(needed)} of free disk for {folder}, {found}")


def format_bytes(count: float) -> str:
    """Bytes as people read them.

    Example:
        >>> format_bytes(13_300_000_000)
        '13.3 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_seconds(seconds: float) -> str:
    """A time as people read it.

    Example:
        >>> format_seconds(5.25), format_seconds(600)
        ('5.2 s', '10 minutes')
    """
    size, unit = (
        (1, "s") if seconds < 90 else (60, "minutes") if seconds < 5400 else (3600, "hours")
    )
    return (
        f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:,.0f} {unit}"
    )
