"""Google Drive as a mounted folder: what lies on it, and what to do when it fails."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from errno import ECONNABORTED, EIO, ENODEV, ENOTCONN, ESTALE, ETIMEDOUT
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar, cast

from colab_utils.errors import (
    ColabUtilsError,
    UnavailableError,
    explain_limits,
    explain_os_error,
)
from colab_utils.machine import COLAB_ROOT, is_colab

# Seconds before each repetition, 81 in all. A single error is over at once, and one read in five
# that fails must not hold up a loader; a burst of errors lasts seconds, and a remount a minute.
RETRY_WAITS_S = (0.1, 0.2, 0.4, 0.8, 1.6, 3.2, *[5.0] * 15)
# Error numbers that only a dead mount gives.
_GONE = (ENOTCONN, ECONNABORTED)
# Error numbers that a broken disk gives as well.
_GONE_ON_DRIVE = (EIO, ETIMEDOUT, ESTALE, ENODEV)
# The type of a mounted Drive in the system's table of mounts.
_DRIVE_KIND = "fuse.drive"
_MOUNTS = Path("/proc/self/mounts")
_Call = TypeVar("_Call", bound=Callable[..., Any])
# Names of the folders in each mounted Drive, and older names of both.
_DRIVE_FOLDERS = ("MyDrive", "My Drive", "Shareddrives", "Shared drives")


class DriveLostError(UnavailableError):
    """A read failed because Drive went away. Everything that was finished before is safe."""

    may_pass = True
    """Whether the same call may succeed after a while."""


class ServerLostError(DriveLostError):
    """A server did not answer, or answered with a failure. What was finished before is safe."""


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
        with explain_limits():
            yield
    except OSError as error:
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


def try_again(call: _Call) -> _Call:
    """Let a method of a store take a name in place of a path, and try it again while it fails."""

    @wraps(call)
    def run(store: Any, name: Any = "", *arguments: Any, **options: Any) -> Any:
        path = store.locate(name)
        return store.attempt(path, partial(call, store, path, *arguments, **options))

    return cast(_Call, run)
