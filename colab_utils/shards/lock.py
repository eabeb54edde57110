"""The lock of a folder's one writer: of a folder of shards, or of a run's checkpoints."""

import math
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import register_after_fork
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir
from time import time

import psutil

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import hash_bytes, open_file, write_file
from colab_utils.machine import require_linux
from colab_utils.processes import start_thread

WRITER_NAME = "writer.txt"
_OURS = (
    r"shard-\d+\.(?:tar|arrays)|(?:index|arriving)\.json|writer\.txt|(?:checkpoint|best)-\d{8,}\.pt"
)
_PART = re.compile(rf"\.(?:{_OURS})\.(\d{{1,9}})(?:-\d+)?\.part")
# Marks of the folders that this process holds.
_marks: set[str] = set()
# So often a writer touches its lock, and after so long without it is gone.
_TOUCH_S = 30.0
_SILENT_S = 100.0


def remove_leftovers(folder: Path) -> None:
    """Remove what killed processes wrote in part, here or on a machine that is gone."""
    for path in folder.glob(".*.part"):
        match = _PART.fullmatch(path.name)
        if match and not _is_running(int(match[1])):
            path.unlink(missing_ok=True)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder``: no other process writes into it while the block runs. The folder is made if
    need be.

    What killed writers left half-written goes before the block, and what the block leaves so, after
    it.

    On this machine the lock is the system's, on a file in the folder for temporary files: it ends
    with its process. Other machines see the file ``writer.txt``, which its writer touches every 30
    seconds; when it has not for 100 seconds, its session has ended. (Drive shows another machine's
    files with a delay, so two machines that start within seconds of each other can both get in.)

    Raises:
        ColabUtilsError: if another process writes there, or the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with hold_folder(folder), hold_folder(folder):
        ...     pass
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected no other writer in ..., found one ...
    """
    require_linux("lock a folder")
    path = folder / WRITER_NAME
    retries = Retries()
    mark = token_hex(8)
    ended = threading.Event()

    def begin() -> None:
        pid = os.getpid()
        text = f"process {pid} on {os.uname().nodename}\n{_find_host()}\n{pid}\n{mark}\n"
        write_file(path, text.encode())
        remove_leftovers(folder)

    def touch() -> None:
        while not ended.wait(_TOUCH_S):
            # The work itself meets the error too.
            with suppress(OSError):
                os.utime(path)

    is_new = not retries.write(folder, folder.exists)
    retries.write(folder, partial(folder.mkdir, parents=True, exist_ok=True))
    with _lock_here(folder) as is_free:
        retries.write(folder, partial(_refuse_writer, path, is_locked=not is_free))
        _marks.add(mark)
        try:
            retries.write(folder, begin)
            start_thread(touch, "writer")
            yield
        finally:
            ended.set()
            _marks.discard(mark)
            with suppress(OSError):
                remove_leftovers(folder)
                path.unlink(missing_ok=True)
                if is_new:
                    # This fails where the folder is not empty.
                    folder.rmdir()


@contextmanager
def _lock_here(folder: Path) -> Iterator[bool]:
    """Lock a folder among the processes of this machine; yield whether it was to be had."""
    import fcntl

    place = hash_bytes(os.fsencode(os.path.realpath(folder)))
    with open(Path(gettempdir(), f"colab_utils-{os.getuid()}-{place}.lock"), "ab") as file:
        # The workers of a killed process would go on holding it.
        register_after_fork(file, type(file).close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _refuse_writer(path: Path, *, is_locked: bool) -> None:
    """Refuse a folder that somebody writes into: a process on this machine where ``is_locked``,
    else one elsewhere.

    Raises:
        ColabUtilsError: if there is a writer, which it names.
    """
    lines = ""
    silent_s = math.inf
    with suppress(FileNotFoundError), open_file(path) as file:
        lines = file.read(200).decode(errors="replace")
        silent_s = time() - os.fstat(file.fileno()).st_mtime
    writer, host, pid, mark, *_ = (lines + "\n\n\n").split("\n")
    if host != _find_host():
        is_alive = True
    elif pid == str(os.getpid()):
        # A Drive that was gone when this process ended its writing has kept the mark.
        is_alive = mark in _marks
    else:
        # The lock is found by the folder's path; the same folder may be mounted at two of them.
        is_alive = pid.isdecimal() and _is_running(int(pid[:9]))
    if is_locked or (silent_s < _SILENT_S and is_alive):
        raise ColabUtilsError(
            f"expected no other writer in {path.parent}, found one at work there ({writer!r}). "
            "Let it end, or stop it and run the same: it continues. "
            f"(On another machine it counts as gone after {_SILENT_S:.0f} seconds.)"
        )


def _is_running(pid: int) -> bool:
    """Return whether there is a process of this number that has not ended.

    A zombie has ended: nobody has asked yet how.
    """
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return psutil.pid_exists(pid)


def _find_host() -> str:
    """Return this machine since it was started, and this user: Colab gives many one name."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.getuid()}"
