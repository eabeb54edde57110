"""Google Drive as a mounted folder: what lies on it, and what to do when it fails."""

import os
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from errno import ECONNABORTED, EIO, ENODEV, ENOTCONN, ESTALE, ETIMEDOUT
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from colab_utils.errors import (
    SHORTAGES,
    ColabUtilsError,
    ColabUtilsWarning,
    UnavailableError,
    explain_os_error,
)
from colab_utils.machine import COLAB_ROOT, is_colab
from colab_utils.units import format_count

# Seconds before each repetition, 81 in all. A single error is over at once, and one read in five
# that fails must not hold up a loader; a burst of errors lasts seconds, and a remount a minute.
RETRY_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 15)
# Before the first wait of so many seconds, a warning says that the same is tried again.
_LONG_WAIT_S = 5.0
# Error numbers that only a dead mount gives.
_GONE = (ENOTCONN, ECONNABORTED)
# Error numbers that a broken disk gives as well.
_GONE_ON_DRIVE = (EIO, ETIMEDOUT, ESTALE, ENODEV)
# The type of a mounted Drive in the system's table of mounts.
_DRIVE_KIND = "fuse.drive"
_MOUNTS = Path("/proc/self/mounts")
# Names of the folders in each mounted Drive, and older names of both.
_DRIVE_FOLDERS = ("MyDrive", "My Drive", "Shareddrives", "Shared drives")
_Result = TypeVar("_Result")
_Call = TypeVar("_Call", bound=Callable[..., Any])


class DriveLostError(UnavailableError):
    """A read failed because Drive went away. Everything that was finished before is safe."""

    place = "Drive"
    """What failed, as named in messages."""
    may_pass = True
    """Whether the same call may succeed after a while."""


class ServerLostError(DriveLostError):
    """A server did not answer, or answered with a failure. What was finished before is safe."""

    place = "the server"


class RefusedError(UnavailableError):
    """A server refused a request, and would refuse it again. Look at address and credentials.

    It says nothing about the file, which may be sound. The next call opens the server anew, and
    thus finds new credentials.
    """


def is_on_drive(path: object) -> bool:
    """Return whether a path lies on a mounted Google Drive.

    On Colab, ``/content/drive`` counts as Drive even before it is mounted.

    Example:
        >>> is_on_drive("/tmp")
        False
    """
    return find_mount(path) is not None


def require_mounted(path: Path) -> None:
    """Raise an error on Colab if a path is named like one on Google Drive, and is not mounted.

    What is written there would be lost with the machine, and Drive could no longer be mounted. A
    folder may have the name of Drive's, so only the system's table of mounts decides.

    Raises:
        ColabUtilsError: Drive is not mounted.

    Example:
        >>> require_mounted(Path("/tmp/shards"))
    """
    mount = find_mount(path) if is_colab() else None
    if mount is None or any(folder.is_relative_to(mount) for _, folder, _ in find_mounts(path)):
        return
    if COLAB_ROOT not in mount.parents:
        mount = COLAB_ROOT / "drive"
    raise ColabUtilsError(
        f"Google Drive is not mounted, so {path} would lie on this machine alone. "
        f"{explain_leftovers(mount)}Run `from google.colab import drive; "
        f"drive.mount({str(mount)!r})` in a cell first, and name a folder in {mount}."
    )


def explain_leftovers(mount: Path) -> str:
    """Say what to do with files that keep Drive from being mounted in a folder; "" if none do."""
    # A look at a dead mount may hang.
    if is_mounted(mount) or not mount.is_dir() or not any(mount.iterdir()):
        return ""
    return (
        f"Files lie in {mount}, and Drive can only be mounted in an empty folder: move them away "
        f"with `!mv {mount} {mount}_before`. "
    )


def is_mounted(mount: Path) -> bool:
    """Return whether the system's table of mounts has a folder."""
    return next(find_mounts(mount))[1] == mount


def _guess_mount(place: Path) -> Path | None:
    """Return where Colab's Drive must be mounted for a path, by the names in it; None elsewhere."""
    if not is_colab():
        return None
    drive = COLAB_ROOT / "drive"
    if place.is_relative_to(drive):
        return drive
    names = [folder for folder in (place, *place.parents) if folder.name in _DRIVE_FOLDERS]
    return names[-1].parent if names else None


def find_mounts(path: Any) -> Iterator[tuple[Path, Path, str]]:
    """Yield a path, the folder where its disk is mounted, and the type of the disk; then the same
    of the path with its links resolved.

    Only the system's table of mounts is read, because a read from Drive itself may hang.
    """
    kinds = _read_mounts()
    # `abspath` comes first, because `realpath` reads the folders on the path, and may hang.
    for resolve in (os.path.abspath, os.path.realpath):
        place = Path(resolve(path))
        folder = next((up for up in (place, *place.parents) if str(up) in kinds), Path("/"))
        yield place, folder, kinds.get(str(folder), "")


def _read_mounts() -> dict[str, str]:
    """Return the type of each mounted disk by its folder, from the system's table of mounts.

    psutil before version 6, such as Colab's 5.9.5, asks each disk for more. A Drive that hangs does
    not answer, and such a question cannot be interrupted.
    """
    kinds = {}
    with suppress(OSError):
        for line in _MOUNTS.read_text("utf-8", "surrogateescape").strip().split("\n"):
            _, folder, kind, *_ = line.split(" ")
            # Linux writes a space in a name as \040.
            kinds[folder.replace("\\040", " ")] = kind
    return kinds


def find_mount(path: object) -> Path | None:
    """Return the folder in which the Google Drive of a path is mounted; None for other paths.

    A URL is never on Drive. In the system's table of mounts, Drive has the type ``fuse.drive``.
    Colab looks for the same type, in ``flush_and_unmount`` of google/colab/drive.py. On Colab, a
    path that is named like one on Drive counts as on Drive, also while it is not mounted.

    Example:
        >>> find_mount("/tmp") is None
        True
    """
    if not isinstance(path, str | os.PathLike):
        return None
    for place, folder, kind in find_mounts(path):
        mount = folder if kind == _DRIVE_KIND else _guess_mount(place)
        if mount is not None:
            return mount
    return None


@contextmanager
def guard_drive(path: object) -> Iterator[None]:
    """Turn the errors of a lost Drive into a `DriveLostError` that says what to do.

    Errno 107 comes only from a dead mount. Errors such as errno 5 also come from a broken disk, so
    they are turned only if the path is on Drive. If the machine has too little memory or too many
    open files, an `UnavailableError` is raised.

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
            raise UnavailableError(f"A limit of the system is reached: {reason}") from None
        is_suspect = error.errno in _GONE_ON_DRIVE and is_on_drive(path)
        if error.errno not in _GONE and not is_suspect:
            raise
        mount = find_mount(path) or COLAB_ROOT / "drive"
        raise DriveLostError(
            f"{path} cannot be read: Drive got disconnected, its quota is used up, or the folder "
            f"is too full (errno {error.errno}). Remount Drive with "
            f"drive.mount('{mount}', force_remount=True), or restart the session. Then run the "
            "same again: what is done is safe."
        ) from error


@contextmanager
def explain_write(folder: object) -> Iterator[None]:
    """Turn an error of writing into ``folder`` into a `ColabUtilsError` that says what to do.

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
        # A path that is not a valid file name raises a ValueError.
        reason = explain_os_error(error, "Name another folder.")
        raise ColabUtilsError(
            f"Writing into {folder} failed: {reason} Then run the same again: it continues there."
        ) from None


class Retries:
    """Repeat calls that fail on Drive for 81 seconds, after waits that double up to 5 seconds.

    Several threads may share one object. A call that was given up is not repeated by a caller that
    repeats its own calls.

    Args:
        stop: Event that ends all waits once it is set. A call that fails after that is not
            repeated. Default: a new event.
        is_patient: Whether a call is repeated at all. Default: True.

    Attributes:
        count: Number of repetitions so far, of all calls.
        on_failure: Function that you may set. It is called before each repetition.
        trusts_absence: Whether a file that seems to be missing is not looked for again.

    Example:
        >>> retries = Retries()
        >>> retries.run(lambda: "read"), retries.count
        ('read', 0)
    """

    def __init__(self, stop: Any = None, is_patient: bool = True) -> None:
        self.is_patient = is_patient
        self.count = 0
        self._place = ""
        self._is_announced = False
        self.on_failure: Callable[[], object] | None = None
        self.stop = stop or threading.Event()
        self.trusts_absence = False

    def run(self, call: Callable[[], _Result]) -> _Result:
        """Return the result of ``call``, which is repeated while it raises a `DriveLostError` that
        may pass. Before the first long wait, a warning says so.

        Raises:
            DriveLostError: Every attempt failed. Other errors are raised at once.
        """
        waits_s = iter(RETRY_WAITS_S if self.is_patient else ())
        while True:
            try:
                return call()
            except DriveLostError as error:
                wait_s = next(waits_s, None)
                if wait_s is None:
                    # A caller that repeats its own calls would wait for as long again, each time.
                    error.may_pass = False
                    raise
                if self.stop.is_set() or not error.may_pass:
                    raise
                self.count += 1
                self._place = error.place
                if wait_s >= _LONG_WAIT_S and not self._is_announced:
                    self._is_announced = True
                    warnings.warn(
                        f"{self._place} fails, and is tried again for more than a minute",
                        ColabUtilsWarning,
                        stacklevel=3,
                    )
                if self.on_failure is not None:
                    self.on_failure()
                self.stop.wait(wait_s)

    def run_listed(self, path: Any, call: Callable[[], _Result]) -> _Result:
        """Return the result of ``call``, which reads a file that should be there.

        If the file seems to be missing, `find_again` looks for it.
        """
        try:
            return call()
        except FileNotFoundError:
            if not self.find_again([path]):
                raise
        return call()

    def find_again(self, paths: Sequence[Any]) -> bool:
        """Look again for files that seem to be missing; return whether one is there after all.

        At times, Drive does not show a file for a while. So this method lists the files' folders,
        which makes Drive look again. It checks all missing files together, after the same growing
        waits as `run`. If a file is still missing after the last wait, later calls check
        their files only once. Files that are not on Drive are always checked only once.

        Example:
            >>> Retries().find_again([Path("/tmp/no/such/file")])
            False
        """
        missing = set(paths)
        for wait_s in (0, *RETRY_WAITS_S):
            self.stop.wait(wait_s)
            missing = {path for path in missing if _is_absent(path)}
            if self.trusts_absence or not missing or not is_on_drive(min(missing)):
                break
            if not wait_s:
                warnings.warn(
                    f"Drive does not show {len(missing):,} of the files that are listed, such as "
                    f"{min(missing)}. It is asked again for a minute or two.",
                    ColabUtilsWarning,
                    stacklevel=3,
                )
            for folder in {path.parent for path in missing}:
                with suppress(OSError):
                    os.listdir(folder)
        self.trusts_absence = bool(missing)
        return missing != set(paths)

    def __str__(self) -> str:
        if not self.count:
            return ""
        return f"{self._place} failed {format_count(self.count, 'time')} and was tried again"


def try_again(call: _Call) -> _Call:
    """Let a method of a store take a name in place of a path, and try it again while it fails."""

    @wraps(call)
    def run(store: Any, name: Any = "", *arguments: Any, **options: Any) -> Any:
        path = store.locate(name)
        return store.attempt(path, partial(call, store, path, *arguments, **options))

    return cast(_Call, run)


def _is_absent(path: Any) -> bool:
    """Return whether a file cannot be opened. Drive may list a file that cannot be opened."""
    # The system opens no URL. A server, unlike Drive, gives the same answer every time.
    with suppress(OSError, TypeError):
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK))
        return os.path.isdir(path)
    return True
