"""A mounted Google Drive: files read at the speed that people measured, and read again where it fails."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, sleep
from types import TracebackType
from typing import Any, TypeVar

from colab_utils.errors import ColabUtilsError

__all__ = [
    "DRIVE_PROFILES",
    "DriveFile",
    "DriveLostError",
    "DriveProfile",
    "Retries",
    "describe_retries",
    "get_profile",
    "guard_drive",
    "is_on_drive",
    "read_file",
]

RETRY_WAITS_S = (1.0, 4.0, 16.0, 60.0)  # a burst of errors lasts seconds, a remount about a minute
_Result = TypeVar("_Result")


class DriveLostError(ColabUtilsError):
    """Drive went away in the middle of a read; what was finished before is safe."""


@dataclass(frozen=True)
class DriveProfile:
    """How slow a cold read is: ``open_s`` to reach a place in a file, then ``bytes_per_s`` for each stream.

    ``source`` says where the figures come from. A mounted Drive also takes ``stat_s`` to look at a file for the first
    time, and gives all streams together at most ``total_bytes_per_s`` (None: no limit).
    """

    name: str
    open_s: float
    bytes_per_s: float
    source: str
    stat_s: float = 0.0
    total_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        if not (self.open_s >= 0 and self.bytes_per_s > 0):
            raise ColabUtilsError(
                f"expected open_s >= 0 and bytes_per_s > 0 in Drive profile {self.name!r}, found "
                f"open_s={self.open_s} and bytes_per_s={self.bytes_per_s}: correct the profile"
            )

    def __str__(self) -> str:
        return f"{self.name}: {self.open_s * 1000:.0f} ms per file, {self.bytes_per_s / 1e6:.0f} MB/s"


_COLD = "Models cold reads, without Drive's cache: a second read of the same file waits as long as the first."
DRIVE_PROFILES: dict[str, DriveProfile] = {
    "fast": DriveProfile(
        "fast",
        open_s=0.015,
        bytes_per_s=130e6,
        source="130 MB/s: the best figure reported for one large file (newbe.dev, 'Google Colab is very slow "
        "compared to my PC'). 15 ms per file: assumed, a quarter of 'typical'; nobody published so good a "
        f"figure. {_COLD}",
    ),
    "typical": DriveProfile(
        "typical",
        open_s=0.059,
        bytes_per_s=65e6,
        source="59 ms per file: cold image files opened one by one (GrinkoL/skillbox_thesis_project, "
        "data_strategy.ipynb). 65 MB/s: upper bound, a 39 GB copy took over 10 minutes (newbe.dev). "
        f"Both change a lot between sessions (googlecolab/colabtools#4869). {_COLD}",
    ),
    "bad": DriveProfile(
        "bad",
        open_s=0.606,
        bytes_per_s=65e6,
        source="606 ms per file: 1.65 images/s (googlecolab/colabtools#3651). 65 MB/s as in 'typical': "
        f"nobody published a bad session's speed for one large file. {_COLD}",
    ),
}


def get_profile(name: str | DriveProfile | None) -> DriveProfile | None:
    """The profile of that name; ``None`` or ``"none"`` mean full speed, your own profile is passed through.

    Raises:
        ColabUtilsError: no profile has that name; the message lists those there are.

    Example:
        >>> print(get_profile("typical"))
        typical: 59 ms per file, 65 MB/s
    """
    if name is None or isinstance(name, DriveProfile):
        return name
    if name == "none":
        return None
    if name not in DRIVE_PROFILES:
        names = ", ".join([*DRIVE_PROFILES, "none"])
        raise ColabUtilsError(f"expected a Drive profile, one of {names}; found {name!r}: choose one of them")
    return DRIVE_PROFILES[name]


class Retries:
    """Tries again what Drive failed at: four times for each call, after 1, 4, 16 and 60 seconds. Threads may share it.

    Attributes:
        count: how many times a call was tried again.
        failing: whether the last try of the latest call failed.
        stop: an event, yours if you give one; once it is set, nothing is waited for or tried again.

    Example:
        >>> retries = Retries()
        >>> retries.run(lambda: "read"), retries.count
        ('read', 0)
    """

    def __init__(self, stop: Any = None) -> None:
        self.count, self.failing, self.stop = 0, False, stop or threading.Event()

    def run(self, call: Callable[[], _Result]) -> _Result:
        """What ``call`` returns.

        Raises:
            DriveLostError: it failed every time; any other error comes through at once.
        """
        for wait_s in RETRY_WAITS_S:
            try:
                result = call()
            except DriveLostError:
                self.failing = True
                if self.stop.is_set():
                    raise
                self.count += 1
                self.stop.wait(wait_s)
            else:
                self.failing = False
                return result
        return call()

    def __reduce__(self) -> tuple[type[Retries], tuple[()]]:
        return Retries, ()  # another process counts its own

    def __str__(self) -> str:
        return describe_retries(self.count)


def describe_retries(count: int, before: str = "") -> str:
    """How often Drive failed, with ``before`` in front; nothing where it did not.

    Example:
        >>> describe_retries(1, "; ")
        '; Drive failed 1 time and was tried again'
    """
    return f"{before}Drive failed {count} time{'s' * (count != 1)} and was tried again" if count else ""


def is_on_drive(folder: str | Path) -> bool:
    """Whether a folder lies on Colab's mounted Google Drive.

    Example:
        >>> is_on_drive("/content/drive/MyDrive/photos"), is_on_drive("/content/photos")
        (True, False)
    """
    return "/content/drive/" in f"{Path(folder).absolute()}/"


def read_file(path: str | Path, profile: DriveProfile | None = None, retries: Retries | None = None) -> bytes:
    """Read a whole file, no faster than ``profile`` allows; ``None`` reads at full speed.

    Where Drive fails it is tried again by ``retries``; without them the first error is raised.

    Raises:
        DriveLostError: Drive got disconnected (errno 107) or its storage failed (errno 5).
        OSError: anything else, a missing file included, as Python raised it.

    Example:
        >>> len(read_file(__file__)) > 1000
        True
    """
    started = perf_counter()

    def read() -> bytes:
        with guard_drive(path), open(path, "rb") as file:
            return file.read()

    content = retries.run(read) if retries else read()
    if profile is not None:
        _wait(profile.open_s + len(content) / profile.bytes_per_s, started)
    return content


class DriveFile:
    """A file read in pieces, no faster than ``profile`` allows.

    Opening waits ``open_s`` (it covers the first read, wherever that is); each later read that does not
    start where the last one ended waits it again; every byte costs ``1 / bytes_per_s``. Close it when you
    are done, or use it as a context manager. Raises what `read_file` raises; where Drive fails, ``retries``
    open the file anew and go on where they were.

    Example:
        >>> with DriveFile(__file__, get_profile("none")) as file:
        ...     file.pread(3, 0) == read_file(__file__)[:3]
        True
    """

    def __init__(self, path: str | Path, profile: DriveProfile | None = None, retries: Retries | None = None) -> None:
        self._descriptors: list[int] = []  # the last one is read, those before it belong to a mount that was lost
        self.path = Path(path)
        self.profile, self.retries = profile, retries
        started = perf_counter()
        retries.run(self._open) if retries else self._open()
        self.size = os.fstat(self._descriptors[-1]).st_size
        self._next: int | None = None  # where a contiguous read would start
        self._late_s = 0.0 if profile is None else _wait(profile.open_s, started)

    def pread(self, n: int, offset: int) -> bytes:
        """Read ``n`` bytes from ``offset``; fewer only at the end of the file."""
        content = bytearray(n)
        return bytes(memoryview(content)[: self.readinto(content, offset)])

    def readinto(self, buffer: Any, offset: int) -> int:
        """Fill a writable buffer of bytes from ``offset``; returns how many came, fewer only at the end of the file."""
        started = perf_counter()
        view, got, failed = memoryview(buffer).cast("B"), 0, False

        def fill() -> None:
            nonlocal got, failed
            if failed:
                self._open()  # a descriptor of a mount that was lost stays lost
            failed = True
            with guard_drive(self.path):
                while got < len(view):  # a network file may hand over less than was asked for
                    count = os.preadv(self._descriptors[-1], [view[got:]], offset + got)
                    if not count:
                        break
                    got += count

        self.retries.run(fill) if self.retries else fill()
        if self.profile is not None:
            jump_s = 0.0 if self._next in (None, offset) else self.profile.open_s
            self._late_s = _wait(jump_s + got / self.profile.bytes_per_s - self._late_s, started)
        self._next = offset + got
        return got

    def forget(self, n: int, offset: int) -> None:
        """Give back the memory in which the system keeps ``n`` bytes from ``offset``, of files that are read once."""
        with suppress(AttributeError, OSError):  # not on every system, and not from a mount that was lost meanwhile
            os.posix_fadvise(self._descriptors[-1], offset, n, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        while self._descriptors:
            with suppress(OSError):  # a mount that was lost says so here too; the descriptor is gone all the same
                os.close(self._descriptors.pop())

    def _open(self) -> None:
        with guard_drive(self.path):
            self._descriptors.append(os.open(self.path, os.O_RDONLY))

    def __enter__(self) -> DriveFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        self.close()  # os.open has no owner that would do it


@contextmanager
def guard_drive(path: str | Path) -> Iterator[None]:
    """Turn the two errors of a Drive that went away (errno 107 and 5) into a `DriveLostError` with a cure.

    Example:
        >>> with guard_drive("/content/drive/MyDrive/a.jpg"):
        ...     raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        Traceback (most recent call last):
        colab_utils.drive.DriveLostError: expected to read /content/drive/MyDrive/a.jpg, found ...
    """
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.EIO):
            raise
        why = "" if error.errno == errno.ENOTCONN else " or refuses (its quota, or too many files in one folder)"
        raise DriveLostError(
            f"expected to read {path}, found that Drive got disconnected{why} (errno {error.errno}): "
            "remount it with drive.mount('/content/drive', force_remount=True) from google.colab, "
            "or restart the session, then run this again"
        ) from error


def _wait(asked_s: float, started: float) -> float:
    """Sleep for what the real work, begun at ``started``, did not take of the time the profile asks; returns by how
    much a busy machine woke up too late, in seconds, so that the next wait can be as much shorter.
    """
    rest_s = asked_s - (perf_counter() - started)
    if rest_s <= 0:
        return 0.0
    sleep(rest_s)
    return max(0.0, perf_counter() - started - asked_s)
