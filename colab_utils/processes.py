"""Processes and threads that this one starts: forked pools, and who of them is there."""

import errno
import gc
import multiprocessing
import os
import resource
import signal
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Future,
    ProcessPoolExecutor,
    ThreadPoolExecutor,
    wait,
)
from contextlib import contextmanager, suppress
from pathlib import Path
from stat import S_ISREG
from threading import Thread, current_thread, main_thread
from typing import Any

import psutil

from colab_utils.errors import ColabUtilsError
from colab_utils.machine import require_linux
from colab_utils.os_errors import SHORTAGES, explain_os_error

# So long Ctrl-C may have to wait.
_WAIT_S = 0.2


def list_processes() -> list[psutil.Process]:
    """Return this process, and all that it or its children started.

    Example:
        >>> list_processes()[0].pid == os.getpid()
        True
    """
    main = psutil.Process()
    # An error: one ended meanwhile, or the system has no such lists.
    with suppress(OSError, psutil.Error):
        # The kernel's own lists, which grow here: psutil looks at every process of the machine.
        pids = [main.pid]
        for pid in pids:
            for task in os.listdir(f"/proc/{pid}/task"):
                pids += map(int, Path(f"/proc/{pid}/task/{task}/children").read_bytes().split())
        return [psutil.Process(pid) for pid in pids]
    return [main, *main.children(recursive=True)]


def find_cut_file() -> str:
    """Return a file that this process or one below it has mapped beyond its end; "" without one.

    To touch what lies there is a bus error.

    Example:
        >>> find_cut_file()
        ''
    """
    for process in list_processes():
        # A process may have ended.
        with suppress(OSError):
            for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines():
                words = line.split(maxsplit=5)
                if len(words) == 6 and _is_cut(*words):
                    return words[5]
    return ""


def _is_cut(addresses: str, rights: str, offset: str, device: str, inode: str, path: str) -> bool:
    """Return whether a mapping, as Linux lists it, goes on for a page or more after its file."""
    # A library may have no file behind its last pages.
    if not path.startswith("/") or ".so" in path:
        return False
    first, _, last = addresses.partition("-")
    end = int(offset, 16) + int(last, 16) - int(first, 16)
    # A file may be gone.
    with suppress(OSError):
        status = os.stat(path)
        is_same = status.st_ino == int(inode) and S_ISREG(status.st_mode)
        return is_same and end - resource.getpagesize() >= status.st_size
    return False


def end_with_parent() -> None:
    """End this worker process when the process that started it is killed.

    Nobody would end it then.
    """
    import fcntl

    parent: Any = multiprocessing.parent_process()
    # A signal that ends a process comes when the parent's end of this pipe closes. A thread that
    # waits for that would need one more of what a limit counts.
    fcntl.fcntl(parent.sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(parent.sentinel, fcntl.F_SETFL, os.O_ASYNC)
    if not parent.is_alive():
        os._exit(1)


# What the system says where it starts no more processes or threads, or opens no more files.
_LIMITS = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE)


@contextmanager
def explain_limits() -> Iterator[None]:
    """Explain why the system starts no further process or thread, or opens no further file.

    Raises:
        ColabUtilsError: A limit of this machine is reached; the message names it.

    Example:
        >>> with explain_limits():
        ...     raise RuntimeError("can't start new thread")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: The system gives no more to this work: can't ...
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: Exception = error
        if str(error) == "can't start new thread":
            cause = BlockingIOError(errno.EAGAIN, str(error))
        if getattr(cause, "errno", None) not in _LIMITS:
            raise
        reason = explain_os_error(cause, "")
        raise ColabUtilsError(f"The system gives no more to this work: {reason}") from None


class ThreadPool(ThreadPoolExecutor):
    """Threads; where the system starts no more of them, those that there are do all the work.

    Without a single one `submit` and `map` raise a `ColabUtilsError`.
    """

    def _adjust_thread_count(self) -> None:
        try:
            with explain_limits():
                super()._adjust_thread_count()
        except ColabUtilsError:
            if not self._threads:
                raise


def start_thread(call: Callable[[], object], name: str) -> Thread:
    """Start a thread that does not keep the program from ending.

    Raises:
        ColabUtilsError: The system starts no more threads.
    """
    thread = Thread(target=call, name=name, daemon=True)
    with explain_limits():
        thread.start()
    return thread


@contextmanager
def explain_shared_memory() -> Iterator[None]:
    """Say what to do where the block cannot make what processes share, such as their locks."""
    try:
        yield
    except OSError as error:
        if error.errno in SHORTAGES:
            with explain_limits():
                raise
        reason = explain_os_error(error, "Make it writable.")
        raise ColabUtilsError(
            f"Locks for processes cannot be made in /dev/shm: {reason} In Docker, --shm-size makes "
            "it larger."
        ) from None


class _ForkPool(ProcessPoolExecutor):
    def begin(self) -> None:
        """Start every process and thread that the pool will need; where one fails, none is left."""
        queue: Any = vars(self)["_call_queue"]
        try:
            with quiet_fork():
                # The pool's own thread would start this one, and end without a word if it cannot.
                queue._start_thread()
                # Forked processes all start with the first job.
                self.submit(int)
        except BaseException:
            queue.close()
            for process in self._processes.values():
                process.kill()
                process.join()
            raise

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)
        if isinstance(error, BrokenExecutor):
            raise ColabUtilsError(
                "The system ended a process, most often for want of memory. Use fewer workers "
                "(--workers 1)."
            ) from None


def fork_pool(
    workers: int, initializer: Callable[..., object] = int, *arguments: Any
) -> ProcessPoolExecutor:
    """Start a pool of forked processes that end with this one.

    Ctrl-C does not reach them: it is the parent's to answer. Each calls
    ``initializer(*arguments)`` first. Where the system ends one, the ``with`` block ends with an
    error that says so.

    Raises:
        ColabUtilsError: The system starts no more processes or threads; none of the pool is left.

    Example:
        >>> with fork_pool(2) as pool:
        ...     list(pool.map(abs, (-1, 2)))
        [1, 2]
    """
    require_linux("start worker processes")

    def begin() -> None:
        # What the parent has left to collect, such as tensors on a GPU, is not collected here.
        gc.freeze()
        end_with_parent()
        initializer(*arguments)

    with explain_shared_memory():
        pool = _ForkPool(workers, multiprocessing.get_context("fork"), begin)
    # Blocked from the first moment on: a handler is set too late for a process that has only begun.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pool.begin()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pool


@contextmanager
def defer_interrupt() -> Iterator[None]:
    """Let Ctrl-C come after the block, which must be short.

    Within the methods of a future or a pool it would leave a lock held, and its pool could never
    end.

    Example:
        >>> with defer_interrupt():
        ...     pass
    """
    if current_thread() is not main_thread():
        # No signal comes here.
        yield
        return
    signals: list[tuple[Any, ...]] = []

    def keep(*received: Any) -> None:
        signals.append(received)

    handler: Any = signal.signal(signal.SIGINT, keep)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
    if signals and callable(handler):
        handler(*signals[0])


def pop_done(pending: set[Future[Any]]) -> set[Future[Any]]:
    """Wait a moment for futures to be done; take those that are out of ``pending``.

    Ctrl-C comes after the wait.

    Example:
        >>> pop_done(set())
        set()
    """
    with defer_interrupt():
        done, _ = wait(pending, _WAIT_S, FIRST_COMPLETED)
    pending -= done
    return done


@contextmanager
def quiet_fork() -> Iterator[None]:
    """Start worker processes without two warnings that tell you nothing here.

    Raises:
        ColabUtilsError: See `explain_limits`.
    """
    with warnings.catch_warnings(), explain_limits():
        # Python 3.12 warns that a process with threads forks; what runs in our workers touches none
        # of them.
        warnings.filterwarnings(
            "ignore", message=".*multi-threaded.*fork", category=DeprecationWarning
        )
        # The number of workers is chosen already; torch warns of more than it counts cores.
        warnings.filterwarnings(
            "ignore", message="This DataLoader will create", category=UserWarning
        )
        yield
