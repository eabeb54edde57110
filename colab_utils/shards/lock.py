"""A lock that lets only one process write into a folder of shards or of checkpoints."""

import math
import os
import re
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.util import register_after_fork
from pathlib import Path
from secrets import token_hex
from tempfile import gettempdir
from time import sleep, time

import psutil

from colab_utils.drive import Retries, explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes, list_names, read_file, write_file
from colab_utils.machine import find_host, require_linux
from colab_utils.places import Place, identify_place
from colab_utils.processes import start_thread

WRITER_NAME = "writer.txt"
_OURS = (
    r"shard-\d+\.(?:tar|arrays)|index\.json|writer\.txt|"
    r"\.source\.json|begun\.txt|(?:checkpoint|best)-\d{8,}\.pt"
)
_PART = re.compile(rf"\.(?:{_OURS})\.([0-9a-f]{{8,24}})-(\d{{1,9}})-\d+\.part")
# Random marks, one for each folder that this process has locked. The folder's lock file has the
# same mark.
_marks: set[str] = set()
# A writer touches its lock file every _TOUCH_S seconds. After _SILENT_S seconds without a touch,
# the writer counts as ended.
_TOUCH_S = 30.0
_SILENT_S = 100.0
# Writing a file never takes this long.
_ABANDONED_S = 3600.0


def remove_leftovers(folder: Place) -> None:
    """Remove half-written files of processes that have ended.

    This machine cannot see whether a process of another machine runs. The files of such a process
    are removed one hour after the last write.
    """
    for name in list_names(folder, ".*.part"):
        path = folder / name
        match = _PART.fullmatch(name)
        # Another process may remove the file at the same time.
        with suppress(FileNotFoundError):
            if match and not _is_written(path, match[1], int(match[2])):
                path.unlink()


@contextmanager
def hold_folder(folder: Place) -> Iterator[None]:
    """Lock ``folder``: no other process writes into it while the block runs. The folder is made if
    it does not exist.

    Before and after the block, the half-written files of killed processes are removed.

    Processes of this machine see a lock of the system (``flock``) on a file in the folder for
    temporary files. This lock ends with the process that holds it. Other machines see the file
    ``writer.txt``, which the writer touches every 30 seconds. A writer that has not touched it for
    100 seconds counts as ended. (Drive shows the files of another machine with a delay. Two
    machines that start within seconds of each other can both get the lock.)

    Raises:
        ColabUtilsError: if another process writes there, or the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with hold_folder(folder), hold_folder(folder):
        ...     pass
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: Another writer is at work in ...
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
            # Nothing is reported: the block writes to the same folder and meets the same error.
            with suppress(OSError, ColabUtilsError):
                path.touch()

    is_new = not retries.write(folder, folder.exists)
    retries.write(folder, partial(folder.mkdir, parents=True, exist_ok=True))
    with lock_here(folder) as is_free:
        writer = retries.write(folder, partial(find_writer, folder, is_locked=not is_free))
        if writer:
            raise ColabUtilsError(
                f"Another writer is at work in {folder} ({writer!r}). Let it end, or stop it. "
                "Then run the same again: your run continues there. (A writer on a machine that is "
                f"gone counts as gone after {_SILENT_S:.0f} seconds.)"
            )
        _marks.add(mark)
        try:
            retries.write(folder, begin)
            start_thread(touch, "writer")
            yield
        finally:
            ended.set()
            _marks.discard(mark)
            with suppress(OSError, ColabUtilsError):
                remove_leftovers(folder)
                path.unlink(missing_ok=True)
                if is_new:
                    # This fails if the folder is not empty.
                    folder.rmdir()


@contextmanager
def lock_here(folder: Place) -> Iterator[bool]:
    """Lock a folder, or a file, among the processes of this machine; yield whether it was free.

    Example:
        >>> with lock_here(Path("data")) as is_free, lock_here(Path("data")) as is_free_again:
        ...     is_free, is_free_again
        (True, False)
    """
    import fcntl

    place = hash_bytes(os.fsencode(identify_place(folder)))
    with explain_write(Path(os.environ.get("TMPDIR", "/tmp"))):
        temporary = Path(gettempdir())
    with explain_write(temporary):
        file = open(temporary / f"colab_utils-{os.getuid()}-{place}.lock", "ab")  # noqa: SIM115
    with file:
        # Forked workers must not hold the lock after their parent was killed.
        register_after_fork(file, type(file).close)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def find_writer(folder: Place, *, is_locked: bool = False) -> str:
    """Return who writes into a folder, such as "process 12 on HOST"; "" if nobody does.

    Args:
        folder: the folder, which need not exist.
        is_locked: whether a process on this machine is known to write there.
    """
    path = folder / WRITER_NAME
    lines = ""
    silent_s = math.inf
    with suppress(FileNotFoundError):
        lines = read_file(path)[:200].decode(errors="replace")
        silent_s = time() - path.stat().st_mtime
    writer, host, pid, mark, *_ = (lines + "\n\n\n").split("\n")
    if host != _find_host():
        is_alive = True
    elif pid == str(os.getpid()):
        # If Drive was gone when this process stopped writing, its old lock file is still there.
        is_alive = mark in _marks
    else:
        # The lock of the system is for one path. The same folder may be mounted at another path,
        # so the process is looked up, too.
        is_alive = pid.isdecimal() and _is_running(int(pid[:9]))
    if is_alive and silent_s < -_SILENT_S:
        is_alive = _is_touched(path)
    is_writing = is_locked or (silent_s < _SILENT_S and is_alive)
    return (writer or "unknown") if is_writing else ""


def _is_touched(path: Place) -> bool:
    """Watch a lock file whose time is in the future; return whether its writer touches it."""
    warnings.warn(
        f"{path} has a time in the future: the clocks of two machines differ. Wait "
        f"{_SILENT_S:.0f} seconds while the file is watched. If it changes, another process writes "
        "there.",
        ColabUtilsWarning,
        stacklevel=2,
    )
    before = path.stat()
    sleep(_SILENT_S)
    return path.exists() and path.stat().st_mtime != before.st_mtime


def _is_running(pid: int) -> bool:
    """Return whether a process of this number runs.

    A zombie has ended, but its parent has not yet asked for its exit status.
    """
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return psutil.pid_exists(pid)


def _is_written(path: Place, host: str, pid: int) -> bool:
    """Return whether the process in a temporary file's name may still be writing the file."""
    if host == find_host():
        return _is_running(pid)
    return time() - path.stat().st_mtime < _ABANDONED_S


def _find_host() -> str:
    """Return a text that names this machine and this user."""
    return f"{find_host()} {os.getuid()}"
