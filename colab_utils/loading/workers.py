"""How a worker process starts, the batch that it was asked for, and how it ended."""

import gc
import multiprocessing
import signal
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

from colab_utils.errors import ColabUtilsError
from colab_utils.machine import count_oom_kills, find_free_memory
from colab_utils.processes import end_with_parent, quiet_fork
from colab_utils.units import format_bytes

_BUS_ERROR = (
    "There are two possible causes. A mapped file (a numpy memmap, an LMDB) became shorter or "
    "could not be read: copy it to the local disk, and write a new version under another name. Or "
    "/dev/shm was full: use a smaller batch."
)


def start_worker(serve: Callable[..., object], *arguments: Any) -> tuple[Any, Connection]:
    """Start a process that calls ``serve(connection, *arguments)``; return it, and the other end of
    the connection. The process ends with this one, and does not react to Ctrl-C.

    Raises:
        ColabUtilsError: The system starts no more processes.
    """
    context: Any = multiprocessing.get_context("fork")
    with quiet_fork():
        connection, worker_end = context.Pipe()
        process = context.Process(target=_begin, args=(serve, worker_end, *arguments), daemon=True)
        with worker_end:
            process.start()
    return process, connection


def _begin(serve: Callable[..., object], *arguments: Any) -> None:
    # The parent handles Ctrl-C.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    end_with_parent()
    # A garbage collection would touch, and so copy, all memory that is shared with the parent.
    gc.freeze()
    serve(*arguments)


class WorkerJob(NamedTuple):
    """A worker and the batch that it was asked to load."""

    worker: int | None
    """Number of the worker, from 0; None for this process."""
    pid: int
    """Process id of the worker."""
    number: int | None = None
    """Number of the batch in its epoch; None if it is not known."""
    indices: tuple[Any, ...] = ()
    """Indices of the batch's samples in the loader's dataset."""
    buffer: int = 0
    """Number of the shared buffer that the batch is written to."""
    seed: tuple[int, ...] = ()
    """Seed of all random numbers of the batch."""


class WorkerDiedError(ColabUtilsError):
    """The error for a worker process that ended by itself or was killed."""

    job: WorkerJob
    """The worker and the oldest batch that it was loading."""
    ending: str
    """Description of the process's end, such as "killed by signal: Killed"."""


def describe_exit(code: int) -> str:
    """Describe by its exit code how a process ended. A negative code is a signal.

    Example:
        >>> describe_exit(-9), describe_exit(1)
        ('killed by signal: Killed', 'exit code 1')
    """
    if code < 0:
        return f"killed by signal: {signal.strsignal(-code)}"
    return f"exit code {code}"


def explain_death(ending: str, oom_kills: int) -> str:
    """Explain why a worker process may have ended, and what to do.

    Args:
        ending: Description of its end.
        oom_kills: The result of `count_oom_kills` before the worker ended.

    Example:
        >>> explain_death(describe_exit(3), 0).partition(".")[0]
        'A worker process ended (exit code 3)'
    """
    cure = "Your own code or a library ended it: load with workers=0 to see where."
    if "Bus error" in ending:
        cure = _BUS_ERROR
    if "Killed" in ending:
        free = format_bytes(find_free_memory())
        reason = (
            f"What killed it is not known. Now {free} of memory are free. The usual reason is too "
            "little memory"
        )
        # The system has killed a process since the number was read.
        if count_oom_kills() > oom_kills:
            reason = "The system ended a process because memory ran out"
        cure = (
            f"{reason}: use fewer workers, a smaller prefetch or a smaller batch, and run the same "
            "again."
        )
    return f"A worker process ended ({ending}). {cure}"
