"""A lock that lets only one process write into a folder of shards or of checkpoints."""

import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.util import register_after_fork
from pathlib import Path
from tempfile import gettempdir
from time import time

import psutil

from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError
from colab_utils.files import IMPATIENT, FileStamp, Store, hash_bytes, open_store
from colab_utils.machine import find_host, require_linux
from colab_utils.places import Place, identify_place
from colab_utils.processes import start_thread

WRITER_NAME = "writer.txt"
_OURS = (
    r"shard-\d+\.(?:tar|arrays)|(?:train-)?index\.json|writer\.txt|"
    r"begun\.txt|(?:checkpoint|best)-\d{8,}\.pt"
)
_PART = re.compile(rf"\.(?:{_OURS})\.([0-9a-f]{{8,24}})-(\d{{1,9}})-\d+\.part")
# A writer touches its lock file every _TOUCH_S seconds. After _SILENT_S seconds without a touch,
# the writer counts as ended.
_TOUCH_S = 30.0
_SILENT_S = 100.0
# Writing a file never takes this long.
_ABANDONED_S = 3600.0


def remove_leftovers(store: Store) -> None:
    """Remove half-written files of processes that have ended.

    This machine cannot see whether a process of another machine runs. The files of such a process
    are removed one hour after the last write.
    """
    for name in store.list_names(".*.part"):
        match = _PART.fullmatch(name)
        if match and not _is_written(store.stamp(name), match[1], int(match[2])):
            # Another process may remove the file at the same time.
            store.remove(name)


@contextmanager
def hold_folder(folder: Place) -> Iterator[None]:
    """Lock ``folder``: no other process writes into it while the block runs. The folder is made if
    it does not exist.

    Before and after the block, the half-written files of killed processes are removed.

    Processes of this machine see a lock of the system (``flock``) on a file in the folder for
    temporary files. This lock ends with the process that holds it. Other machines see the file
    ``writer.txt``, which the writer touches every 30 seconds. A writer whose last touch is not
    within 100 seconds of this machine's time counts as ended. (Drive shows the files of another
    machine with a delay. Two machines that start within seconds of each other can both get the
    lock.)

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
    store = open_store(folder)
    # The block writes to the same folder, and meets the errors of what is done beside it.
    impatient = open_store(folder, IMPATIENT)
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(_TOUCH_S):
            with suppress(OSError, ColabUtilsError):
                impatient.touch(WRITER_NAME)

    with explain_write(folder):
        is_new = not store.find_kind()
        store.make()
    with lock_here(folder) as is_free:
        with explain_write(folder):
            writer = find_writer(store)
        # It names this machine and this user.
        host = f"{find_host()} {os.getuid()}"
        if not is_free or (writer and host not in writer):
            raise ColabUtilsError(
                f"Another writer is at work in {folder} ({writer!r}). Let it end, or stop it. "
                "Then run the same again: your run continues there. (A writer on a machine that is "
                f"gone counts as gone after {_SILENT_S:.0f} seconds.)"
            )
        touching = start_thread(touch, "writer")
        try:
            with explain_write(folder):
                text = f"process {os.getpid()} on {os.uname().nodename} ({host})"
                store.write(WRITER_NAME, text.encode())
                remove_leftovers(store)
            yield
        finally:
            ended.set()
            # A touch under way could write the mark anew, after it is removed. It may also hang.
            touching.join(1.0)
            # A bucket has no empty folders.
            with suppress(OSError, ColabUtilsError, AttributeError):
                remove_leftovers(impatient)
                impatient.remove(WRITER_NAME)
                if is_new:
                    impatient.place.rmdir()


@contextmanager
def lock_here(folder: Place) -> Iterator[bool]:
    """Lock a folder, or a file, among the processes of this machine; yield whether it was free.

    Example:
        >>> with lock_here(Path("data")) as is_free, lock_here(Path("data")) as is_free_again:
        ...     is_free, is_free_again
        (True, False)
    """
    require_linux("lock a folder")
    import fcntl

    place = hash_bytes(os.fsencode(identify_place(folder)))
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


def find_writer(store: Store) -> str:
    """Return the mark that a writer touched shortly before; "" if there is none."""
    if abs(time() - store.stamp(WRITER_NAME).modified_s) > _SILENT_S:
        return ""
    with suppress(FileNotFoundError):
        return store.read(WRITER_NAME)[:200].decode(errors="replace") or "unknown"
    return ""


def _is_written(stamp: FileStamp, host: str, pid: int) -> bool:
    """Return whether the process in a temporary file's name may still be writing the file."""
    if host != find_host():
        return time() - stamp.modified_s < _ABANDONED_S
    with suppress(psutil.NoSuchProcess):
        # A zombie has ended, but its parent has not yet asked for its exit status.
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    return False
