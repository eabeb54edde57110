"""Google Drive as a mounted folder: what lies on it, and what to do when it fails."""

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

# A burst of errors lasts seconds, a remount about a minute.
RETRY_WAITS_S = (1.0, 4.0, 16.0, 60.0)
# They come from a dead mount only.
_GONE = (ENOTCONN, ECONNABORTED)
# A broken disk gives them as well.
_GONE_ON_DRIVE = (EIO, ETIMEDOUT, ESTALE, ENODEV)
_Result = TypeVar("_Result")


class DriveLostError(UnavailableError):
    """Drive went away in the middle of a read; what was finished before is safe."""

    place = "Drive"
    """What failed, in words."""


class ShortReadError(DriveLostError):
    """Fewer bytes of a file came than it holds."""


def is_on_drive(path: object) -> bool:
    """Return whether a path lies on a mounted Google Drive.

    On Colab ``/content/drive`` counts before it is mounted, too.

    Example:
        >>> is_on_drive("/tmp")
        False
    """
    return find_mount(path) is not None


def find_mount(path: object) -> Path | None:
    """Return where the Google Drive that a path lies on is mounted; None of any other path.

    A URL lies on none. The table of mounts is asked, and not the mount, which may hang. Source:
    ``flush_and_unmount`` in google/colab/drive.py knows Drive by its type there.

    Example:
        >>> find_mount("/tmp") is None
        True
    """
    if not isinstance(path, str | os.PathLike):
        return None
    kinds = {mount.mountpoint: mount.fstype for mount in psutil.disk_partitions(all=True)}
    if is_colab():
        kinds[str(COLAB_ROOT / "drive")] = "fuse.drive"
    # The second asks the mounts on its way.
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
    """Turn the errors of a Drive that went away into a `DriveLostError` with a cure; and those of a
    machine that lacks memory or open files into an `UnavailableError`.

    Errno 107 comes from a dead mount only. Others, such as 5, also come from a broken disk: they
    count only on Drive.

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
    """Turn an error of writing into ``folder`` into one line with its cure.

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
        # A ValueError: the path is not a valid file name.
        reason = explain_os_error(error, "Name another folder.")
        raise ColabUtilsError(
            f"Writing into {folder} failed: {reason} Then run the same again: it continues there."
        ) from None


class Retries:
    """Call again what failed on Drive: four times for each call, after 1, 4, 16 and 60 seconds.

    Threads may share it.

    Attributes:
        count: how many times a call was tried again.
        on_failure: called at each failure that is tried again; yours to set.
        stop: an event, yours if you give one; once it is set, nothing is waited for or tried again.

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
        # Drive said to the end of the waits that a file is missing.
        self._trusts_absence = False

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Return what ``call`` returns.

        Raises:
            DriveLostError: it failed every time; any other error comes through at once.
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
        """Return what ``call(*arguments)`` returns; errors of writing into ``folder`` get a cure.

        Raises:
            DriveLostError: it failed every time.
            ColabUtilsError: the folder cannot be written to.
        """
        return self.run(partial(explain_write(folder)(call), *arguments))

    def run_listed(self, path: Any, call: Callable[[], _Result]) -> _Result:
        """Return what ``call`` returns, which reads a file that a list names; see `find_again`."""
        try:
            return self.run(call)
        except FileNotFoundError:
            if not self.find_again([path]):
                raise
        return self.run(call)

    def find_again(self, paths: Sequence[Any]) -> set[Any]:
        """Return those of some missing files that are there after all.

        Drive says "no such file" of a file for a while, at times. So on Drive their folders are
        listed, which asks it anew, and they are looked for after the same growing waits: one wait
        for all files. Once Drive has kept to it, later files get a single look.

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
        # Another process counts its own.
        return Retries, ()

    def __str__(self) -> str:
        if not self.count:
            return ""
        times = "1 time" if self.count == 1 else f"{self.count} times"
        return f"{self._place} failed {times} and was tried again"


def _is_absent(path: Any) -> bool:
    """Return whether a file cannot be opened, whatever its folder says of it."""
    if not isinstance(path, os.PathLike):
        # A server says the same at all times.
        return not path.exists()
    with suppress(OSError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return os.path.isdir(path)
    return True
