"""Google Drive as a mounted folder: what lies on it, what to do when it fails, and how slow
it is.
"""

import errno
import io
import json
import math
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import NormalDist
from time import perf_counter, sleep
from typing import Any, BinaryIO, TypeVar

import psutil
import xxhash

from colab_utils.errors import ColabUtilsError
from colab_utils.require import require_choice, require_local_path
from colab_utils.runtime import COLAB_ROOT, format_bytes, is_colab, require_linux

MOST_BYTES = 4e8  # of a file that is read as a whole: no photo is larger
RETRY_WAITS_S = (1.0, 4.0, 16.0, 60.0)  # a burst of errors lasts seconds, a remount about a minute
_Result = TypeVar("_Result")

_SLOWED = "COLAB_UTILS_SLOWED"  # the slowed folders as JSON, where child processes find them
# when the link to Drive is free again, in a file: all that this user runs on this machine shares
# one link
_LINK = f"{'/dev/shm' if os.path.isdir('/dev/shm') else '/tmp'}/colab_utils-drive-{getattr(os, 'getuid', int)()}"


class DriveLostError(ColabUtilsError):
    """Drive went away in the middle of a read; what was finished before is safe."""


class ShortReadError(DriveLostError):
    """Fewer bytes of a file came than it holds."""


@dataclass(frozen=True)
class DriveProfile:
    """How slow a cold read is: one that Drive's cache does not answer. A second read of a file
    waits as long.
    """

    name: str
    """One word, shown in reports."""
    open_s: float
    """Mean seconds to reach a place in a file."""
    bytes_per_s: float
    """Bytes a second from there on, of all streams together."""
    source: str
    """Where the two figures come from."""
    tail: float = 0.0
    """How much openings differ: the sigma of their log-normal distribution; 0.8 makes one of 20
    take 2.7 means.
    """

    def draw_open_s(self, path: str | Path, offset: int = 0) -> float:
        """Seconds to reach this place in a file: always the same for a folder's name, a file's name
        and an offset.

        Example:
            >>> slow = DRIVE_PROFILES["bad"]
            >>> slow.draw_open_s("images/1.jpg") == slow.draw_open_s("elsewhere/images/1.jpg")
            True
        """
        place = "/".join(Path(path).parts[-2:])
        share = (xxhash.xxh32_intdigest(os.fsencode(f"{place} {offset}")) + 0.5) / 2**32
        return self.open_s * math.exp(self.tail * NormalDist().inv_cdf(share) - self.tail**2 / 2)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.open_s * 1000:.0f} ms per file, {self.bytes_per_s / 1e6:.0f} MB/s"
        )


DRIVE_PROFILES = {
    "fast": DriveProfile(
        "fast", 0.015, 130e6, "130 MB/s: the best reported (newbe.dev). 15 ms per file: assumed"
    ),
    "typical": DriveProfile(
        "typical", 0.059, 65e6, "59 ms: GrinkoL/skillbox_thesis_project. 65 MB/s: newbe.dev"
    ),
    "bad": DriveProfile(
        "bad", 0.606, 65e6, "1.65 images/s: googlecolab/colabtools#3651. Tail: assumed", tail=0.8
    ),
}


def slow_down(folder: str | Path, profile: str | DriveProfile | None) -> None:
    """Read all that lies below ``folder`` at the speed of a profile from now on; ``None`` reads it
    at full speed.

    This holds for this process and for those that it starts from now on. Of a folder in another the
    inner one counts.

    Example:
        >>> slow_down("no/such/folder", "typical")
        >>> print(find_profile("no/such/folder/images/1.jpg"))
        typical: 59 ms per file, 65 MB/s
        >>> slow_down("no/such/folder", None)
    """
    speed = get_profile(profile)
    table = json.loads(os.environ.get(_SLOWED) or "{}")
    if speed is None and not table:
        return
    table[os.path.realpath(require_local_path(folder))] = None if speed is None else asdict(speed)
    os.environ[_SLOWED] = json.dumps(table)


@contextmanager
def read_at_full_speed() -> Iterator[None]:
    """Slow no folder while the block runs: for what the real Drive's cache would answer.

    A folder that is slowed within the block is slow until its end. Then those from before are slow
    again.

    Example:
        >>> with read_at_full_speed():
        ...     find_profile("anywhere") is None
        True
    """
    table = os.environ.get(_SLOWED, "")
    os.environ[_SLOWED] = ""
    try:
        yield
    finally:
        os.environ[_SLOWED] = table


def find_profile(path: str | Path) -> DriveProfile | None:
    """Return the profile of the slowed folder that a path lies in, and None where it is read at
    full speed.

    Example:
        >>> find_profile("no/such/folder") is None
        True
    """
    text = os.environ.get(_SLOWED)
    if not text:
        return None
    table = json.loads(text)
    place = Path(os.path.realpath(path))
    for folder in (place, *place.parents):
        if str(folder) in table:
            fields = table[str(folder)]
            return None if fields is None else DriveProfile(**fields)
    return None


def get_profile(name: str | DriveProfile | None) -> DriveProfile | None:
    """Return the profile of that name: ``None`` or ``"none"`` mean full speed, your own profile is
    passed through.

    Raises:
        ColabUtilsError: no profile has that name; the message lists the names.

    Example:
        >>> print(get_profile("typical"))
        typical: 59 ms per file, 65 MB/s
    """
    if name is None or isinstance(name, DriveProfile):
        return name
    require_choice("Drive profile", name, (*DRIVE_PROFILES, "none"))
    return DRIVE_PROFILES.get(name)


def is_on_drive(path: str | Path) -> bool:
    """Whether a path lies on a mounted Google Drive; on Colab also in ``/content/drive`` before
    that is mounted.

    Example:
        >>> is_on_drive("/tmp")
        False
    """
    return find_mount(path) is not None


def find_mount(path: str | Path) -> Path | None:
    """Where the Google Drive that a path lies on is mounted; None of any other path.

    The table of mounts is asked, and not the mount, which may hang. Source: ``flush_and_unmount``
    in google/colab/drive.py knows Drive by its type there.

    Example:
        >>> find_mount("/tmp") is None
        True
    """
    kinds = {one.mountpoint: one.fstype for one in psutil.disk_partitions(all=True)}
    if is_colab():
        kinds[str(COLAB_ROOT / "drive")] = "fuse.drive"  # before it is mounted, too
    for find in (os.path.abspath, os.path.realpath):  # the second asks the mounts on its way
        place = Path(find(path))
        mount = next((folder for folder in (place, *place.parents) if str(folder) in kinds), place)
        if kinds.get(str(mount)) == "fuse.drive":
            return mount
    return None


@contextmanager
def guard_drive(path: str | Path) -> Iterator[None]:
    """Turn the errors of a Drive that went away into a `DriveLostError` with a cure.

    Errno 107 comes from a dead mount only. Errno 5 also comes from a broken disk: it counts only on
    Drive.

    Example:
        >>> with guard_drive("/content/drive/MyDrive/a.jpg"):
        ...     raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        Traceback (most recent call last):
        colab_utils.drive.DriveLostError: expected to read /content/drive/MyDrive/a.jpg, found ...
    """
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENOTCONN and not (error.errno == errno.EIO and is_on_drive(path)):
            raise
        found = (
            "Drive got disconnected or refuses, for its quota or too full a folder (errno "
            f"{error.errno})"
        )
        mount = find_mount(path) or COLAB_ROOT / "drive"
        cure = (
            f"remount it with drive.mount('{mount}', force_remount=True), or restart the "
            "session; then run again"
        )
        raise DriveLostError(
            f"expected to read {path}, found that {found}: {cure}: what is done is safe"
        ) from error


@contextmanager
def explain_write(folder: Path) -> Iterator[None]:
    """Turn an error of writing into ``folder`` into one line with its cure.

    Example:
        >>> import errno
        >>> with explain_write(Path("shards")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected to write into shards, found: No space left ...
    """
    try:
        with guard_drive(folder):
            yield
    except (OSError, ValueError) as error:  # the latter of a name that is none
        found = getattr(error, "strerror", None) or error
        cure = (
            "free some space, or make it a folder that you may write to, and run the same "
            "again: it continues there"
        )
        raise ColabUtilsError(f"expected to write into {folder}, found: {found}: {cure}") from None


class Retries:
    """Calls again what failed on Drive: four times for each call, after 1, 4, 16 and 60 seconds.
    Threads may share it.

    Attributes:
        count: how many times a call was tried again.
        stop: an event, yours if you give one; once it is set, nothing is waited for or tried again.

    Example:
        >>> retries = Retries()
        >>> retries.run(lambda: "read"), retries.count
        ('read', 0)
    """

    def __init__(self, stop: Any = None) -> None:
        self.count, self.stop = 0, stop or threading.Event()

    def run(self, call: Callable[[], _Result]) -> _Result:
        """What ``call`` returns.

        Raises:
            DriveLostError: it failed every time; any other error comes through at once.
        """
        for wait_s in RETRY_WAITS_S:
            try:
                return call()
            except DriveLostError:
                if self.stop.is_set():
                    raise
                self.count += 1
                self.stop.wait(wait_s)
        return call()

    def __reduce__(self) -> "tuple[type[Retries], tuple[()]]":
        return Retries, ()  # another process counts its own

    def __str__(self) -> str:
        return (
            f"Drive failed {self.count} time{'s' * (self.count != 1)} and was tried again"
            if self.count
            else ""
        )


def open_file(path: str | Path, *, most_bytes: float = MOST_BYTES) -> BinaryIO:
    """Open a file to read it, at once and whatever lies there.

    Raises:
        ColabUtilsError: it is a named pipe, a socket or a device, or larger than ``most_bytes``.
        OSError: as Python raised it.

    Example:
        >>> open_file("/dev/zero")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a file at /dev/zero that memory holds, ...
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    if not os.path.isfile(file.fileno()):
        found = "a device or a pipe: put the file there"
    elif (size := os.path.getsize(file.fileno())) > most_bytes:
        found = (
            f"{format_bytes(size)}, more than {format_bytes(most_bytes)}: split it, or save "
            "it smaller"
        )
    else:
        return file
    file.close()
    raise ColabUtilsError(f"expected a file at {path} that memory holds, found {found}")


def _open_at_once(path: str, flags: int) -> int:
    # else a named pipe waits for its writer
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(
    path: str | Path, retries: Retries | None = None, *, most_bytes: float = MOST_BYTES
) -> bytes:
    """Read a file, no faster than the slowed folder that it lies in allows.

    Where Drive fails it is tried again by ``retries``; without them the first error is raised, but
    a file of which fewer bytes came than it holds is always read again.

    Raises:
        ColabUtilsError: it is none to read: see `open_file`.
        DriveLostError: Drive got disconnected, or its storage failed.
        OSError: anything else, a missing file included, as Python raised it.

    Example:
        >>> len(read_file(__file__)) > 1000
        True
    """
    started = perf_counter()
    read = partial(read_whole, path, most_bytes=most_bytes)
    if retries:
        content = retries.run(read)
    else:
        try:
            content = read()
        except ShortReadError:
            content = Retries().run(read)
    _wait(find_profile(path), path, 0, len(content), started)
    return content


def read_whole(path: str | Path, *, most_bytes: float = MOST_BYTES) -> bytes:
    """Read a file once, at full speed.

    Raises:
        ColabUtilsError: it is none to read: see `open_file`.
        ShortReadError: fewer bytes came than the file holds: this says nothing about the file.
        DriveLostError: Drive got disconnected, or its storage failed.
        OSError: anything else, as Python raised it.

    Example:
        >>> read_whole(__file__) == read_file(__file__)
        True
    """
    with guard_drive(path), open_file(path, most_bytes=most_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read()
    if len(content) < size:
        raise ShortReadError(
            f"Only {len(content):,} of the {size:,} bytes of {path} came. Run the same again: "
            "what is "
            "done is safe. If it stays so, put the file there again."
        )
    return content


def parse_file(
    path: str | Path,
    read: Callable[[], bytes],
    parse: Callable[[bytes], _Result],
) -> _Result:
    """Return what ``parse`` makes of a file that ``read`` reads; what it refuses is read again.

    Drive gives wrong bytes at times. So an error of ``parse`` is raised only when the same bytes
    came twice.

    Raises:
        DriveLostError: other bytes came each time.

    Example:
        >>> contents = iter([b"", b"5"])
        >>> parse_file("a.json", lambda: next(contents), json.loads)
        5
    """
    refused = ""
    for wait_s in (*RETRY_WAITS_S, 0):
        content = read()
        try:
            return parse(content)
        except Exception:
            checksum = xxhash.xxh3_128_hexdigest(content)
            if checksum == refused:
                raise
            refused = checksum
        sleep(wait_s)
    raise DriveLostError(
        f"Each time that {path} was read, other bytes came: Drive fails. Run the same again "
        "later: what "
        "is done is safe."
    )


class DriveFile(io.IOBase):
    """A file read in pieces, no faster than the slowed folder that it lies in allows; Linux only.

    The first read waits ``open_s``, and so does each later one that does not start where the last
    one ended. Close it when you are done, or use it as a context manager. Raises what `read_file`
    raises; where Drive fails, ``retries`` open the file anew and go on where they were.

    Example:
        >>> with DriveFile(__file__) as file:
        ...     file.pread(3, 0) == read_file(__file__)[:3]
        True
    """

    def __init__(self, path: str | Path, retries: Retries | None = None) -> None:
        # the last one is read, the others belong to a mount that was lost
        self._descriptors: list[int] = []
        require_linux("read files in pieces")
        self.path = Path(path)
        self.profile = find_profile(path)
        self.retries = retries
        retries.run(self._open) if retries else self._open()
        self._next: int | None = None  # where a contiguous read would start

    def pread(self, n: int, offset: int) -> bytes:
        """Read ``n`` bytes from ``offset``; fewer only at the end of the file."""
        content = bytearray(n)
        return bytes(memoryview(content)[: self.readinto(content, offset)])

    def readinto(self, buffer: Any, offset: int) -> int:
        """Fill a writable buffer of bytes from ``offset``; returns how many came, fewer only at the
        end of the file.
        """
        started = perf_counter()
        view, got, failed = memoryview(buffer).cast("B"), 0, False

        def fill() -> None:
            nonlocal got, failed
            if failed:
                self._open()  # a descriptor of a mount that was lost stays lost
            failed = True
            with guard_drive(self.path):
                # a network file may give less than was asked for
                while got < len(view) and (
                    count := os.preadv(self._descriptors[-1], [view[got:]], offset + got)
                ):
                    got += count

        self.retries.run(fill) if self.retries else fill()
        _wait(self.profile, self.path, None if offset == self._next else offset, got, started)
        self._next = offset + got
        return got

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        while self._descriptors:
            with suppress(OSError):  # of a mount that was lost; the descriptor is gone all the same
                os.close(self._descriptors.pop())
        super().close()

    def _open(self) -> None:
        with guard_drive(self.path):
            self._descriptors.append(_open_at_once(str(self.path), os.O_RDONLY))


def _wait(
    profile: DriveProfile | None, path: str | Path, place: int | None, count: int, started: float
) -> None:
    """Sleep until a Drive of this speed would have given ``count`` bytes, asked for at ``started``.

    ``place``: where in the file it had to begin; None goes on where it was. All share one link:
    each sends in turn.
    """
    if profile is None or not count:
        return
    import fcntl

    opens_s, sends_s = (
        0.0 if place is None else profile.draw_open_s(path, place),
        count / profile.bytes_per_s,
    )
    with open(_LINK, "a+") as link:
        fcntl.flock(link, fcntl.LOCK_EX)
        link.seek(0)
        free = max(float(link.read() or 0), started) + sends_s  # every process has the same clock
        link.truncate(0)
        link.write(str(free))
        link.flush()
        # closing is not enough: a process that was forked meanwhile has it open, too
        fcntl.flock(link, fcntl.LOCK_UN)
    rest_s = max(started + opens_s + sends_s, free) - perf_counter()
    if rest_s > 0:
        sleep(rest_s)
