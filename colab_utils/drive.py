"""Google Drive as a mounted folder: which paths lie on it, and what to do when it fails."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ECONNABORTED, EIO, ENODEV, ENOTCONN, ESTALE, ETIMEDOUT
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import psutil

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.machine import COLAB_ROOT, is_colab
from colab_utils.os_errors import SHORTAGES, explain_os_error

# Seconds before each new try. A burst of errors lasts seconds, and a remount about a minute.
RETRY_WAITS_S = (1.0, 4.0, 16.0, 60.0)
# Only a dead mount gives these errors.
_GONE = (ENOTCONN, ECONNABORTED)
# A dead mount gives these errors, but a broken disk does, too.
_GONE_ON_DRIVE = (EIO, ETIMEDOUT, ESTALE, ENODEV)
_Result = TypeVar("_Result")


class DriveLostError(UnavailableError):
    """The error for a Drive that failed during a read. Work that was finished before is safe."""

    place = "Drive"
    """Name of the storage that failed, for messages."""


class ShortReadError(DriveLostError):
    """The error for a read that returned fewer bytes than the file has."""


def is_on_drive(path: object) -> bool:
    """Return whether a path lies on a mounted Google Drive.

    On Colab, ``/content/drive`` counts as a mounted Drive even before it is mounted.

    Example:
        >>> is_on_drive("/tmp")
        False
    """
    return find_mount(path) is not None


def find_mount(path: object) -> Path | None:
    """Return the folder where a path's Google Drive is mounted, or None for a path elsewhere.

    A URL is not on Drive. The answer comes from the system's table of mounts, because Drive itself
    may hang. In this table, Drive has the type ``fuse.drive``. Source: ``flush_and_unmount`` in
    google/colab/drive.py.

    Example:
        >>> find_mount("/tmp") is None
        True
    """
    if not isinstance(path, str | os.PathLike):
        return None
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    if is_colab():
        kinds[str(COLAB_ROOT / "drive")] = "fuse.drive"
    # The text of the path comes first: realpath reads the folders of the path, and these may hang.
    for resolve in (os.path.abspath, os.path.realpath):
        place = Path(resolve(path))
        for folder in (place, *place.parents):
            if str(folder) in kinds:
                if kinds[str(folder)] == "fuse.drive":
                    return folder
                break
    return None


@contextmanager
def guard_drive(path: object) -> Iterator[None]:
    """Turn the system's errors for a failed Drive into a `DriveLostError`, which says what to do.

    Only a dead mount gives errno 107. A broken disk gives other errors, such as 5, too. These
    become a `DriveLostError` only if ``path`` lies on Drive. If the machine lacks memory or open
    files, its error becomes an `UnavailableError`.

    Example:
        >>> with guard_drive("/content/drive/MyDrive/a.jpg"):
        ...     raise OSError(ENOTCONN, "Transport endpoint is not connected")
        Traceback (most recent call last):
        colab_utils.drive.DriveLostError: /content/drive/MyDrive/a.jpg cannot be read: Drive got ...
    """
    try:
        yield
    except OSError as error:
        if error.errno in SHORTAGES:
            reason = explain_os_error(error, "")
            raise UnavailableError(f"{path} cannot be opened: {reason}") from None
        is_suspect = error.errno in _GONE_ON_DRIVE and is_on_drive(path)
        if error.errno not in _GONE and not is_suspect:
            raise
        mount = find_mount(path) or COLAB_ROOT / "drive"
        raise DriveLostError(
            f"{path} cannot be read: Drive got disconnected or refuses, for its quota or too full "
            f"a folder (errno {error.errno}). Remount it with drive.mount('{mount}', "
            "force_remount=True), or restart the session; then run again: what is done is safe."
        ) from error


@contextmanager
def explain_write(folder: object) -> Iterator[None]:
    """Turn an error while writing into ``folder`` into one line that says what to do.

    Example:
        >>> import errno
        >>> with explain_write(Path("shards")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: Writing into shards failed: No space left ...
    """
    try:
        with guard_drive(folder):
            yield
    except (OSError, ValueError) as error:
        # A ValueError means that the path is not a valid file name.
        reason = explain_os_error(error, "Name another folder.")
        raise ColabUtilsError(
            f"Writing into {folder} failed: {reason} Then run the same again: it continues there."
        ) from None


class Retries:
    """Repeats calls that failed on Drive, up to four times each: after 1, 4, 16 and 60 seconds.

    Threads may share one object.

    Attributes:
        count: number of times that a call was repeated.
        on_failure: a function that you may set; it is called before each wait.
        stop: the event that you passed, or a new one. Once it is set, no call waits or is repeated.

    Example:
        >>> retries = Retries()
        >>> retries.run(lambda: "read"), retries.count
        ('read', 0)
    """

    def __init__(self, stop: Any = None) -> None:
        self.count = 0
        self._place = ""
        self.on_failure: Callable[[], object] | None = None
        self.stop = stop or threading.Event()
        # True if Drive still reported a file as missing after all waits.
        self._trusts_absence = False

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of ``call``.

        Raises:
            DriveLostError: the call failed every time. Any other error is raised at once.
        """
        for wait_s in RETRY_WAITS_S:
            try:
                return call()
            except DriveLostError as error:
                if self.stop.is_set():
                    raise
                self.count += 1
                self._place = error.place
                if self.on_failure is not None:
                    self.on_failure()
                self.stop.wait(wait_s)
        return call()

    def write(self, folder: object, call: Callable[..., _Result], *arguments: Any) -> _Result:
        """Return the result of ``call(*arguments)``, which writes into ``folder``.

        Raises:
            DriveLostError: the call failed every time.
            ColabUtilsError: the folder cannot be written to.
        """
        return self.run(partial(explain_write(folder)(call), *arguments))

    def run_listed(self, path: Any, call: Callable[[], _Result]) -> _Result:
        """Return the result of ``call``, which reads a file that must exist; see `find_again`."""
        try:
            return self.run(call)
        except FileNotFoundError:
            if not self.find_again([path]):
                raise
        return self.run(call)

    def find_again(self, paths: Sequence[Any]) -> set[Any]:
        """Return the files among ``paths`` that exist after all.

        Drive sometimes reports an existing file as missing for a while. So this method lists the
        folders of missing files on Drive, which makes Drive update them, and checks all files again
        after the same growing waits as in `run`. If files are still missing after all waits, later
        calls check only once.

        Example:
            >>> Retries().find_again([Path("/tmp/no/such/file")])
            set()
        """
        missing = set(paths)
        for wait_s in (0, *RETRY_WAITS_S):
            self.stop.wait(wait_s)
            missing = {path for path in missing if _is_absent(path)}
            if self._trusts_absence or not missing or not is_on_drive(min(missing)):
                break
            if not wait_s:
                warnings.warn(
                    f"Drive does not show {len(missing):,} of the files that are listed, such as "
                    f"{min(missing)}. They are waited for.",
                    ColabUtilsWarning,
                    stacklevel=3,
                )
            for folder in {path.parent for path in missing}:
                with suppress(OSError):
                    os.listdir(folder)
        self._trusts_absence = bool(missing)
        return set(paths) - missing

    def __reduce__(self) -> "tuple[type[Retries], tuple[()]]":
        # Another process counts its own repeated calls.
        return Retries, ()

    def __str__(self) -> str:
        if not self.count:
            return ""
        times = "1 time" if self.count == 1 else f"{self.count} times"
        return f"{self._place} failed {times} and was tried again"


def _is_absent(path: Any) -> bool:
    """Return whether a file cannot be opened, even if its folder lists it."""
    if not isinstance(path, os.PathLike):
        # Unlike Drive, a server gives the right answer at once.
        return not path.exists()
    with suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return os.path.isdir(path)
    return True
