"""Files: read whole or in pieces at the speed of their folder, and written so that a failure leaves
nothing behind.
"""

import errno
import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, BinaryIO, NamedTuple, TypeVar, cast
from weakref import WeakSet

import xxhash

from colab_utils.drive import RETRY_WAITS_S, DriveLostError, Retries, ShortReadError, guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.machine import find_host, require_linux
from colab_utils.os_errors import SHORTAGES
from colab_utils.places import Place, UrlFile, UrlPath
from colab_utils.slow_drive import DriveProfile, find_profile, wait_as_drive
from colab_utils.units import format_bytes

_Result = TypeVar("_Result")

OPEN_FILES = 4096
"""Files of a dataset that stay open at most."""

MOST_BYTES = 4e8
"""Bytes of the largest file that is read as a whole: no photo is larger."""
# Of a file that is hashed, so many bytes are read at once.
_PIECE_BYTES = 1 << 20
# The same at a URL, where each request takes its time.
_BLOCK_BYTES = 8 << 20


def open_file(path: str | Place, *, most_bytes: float = MOST_BYTES) -> BinaryIO:
    """Open a file to read it, at once and whatever lies there; at a URL in pieces.

    Raises:
        ColabUtilsError: it is a named pipe, a socket or a device, or larger than ``most_bytes``.
        OSError: as Python raised it.

    Example:
        >>> open_file("/dev/zero")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: /dev/zero is a device or a pipe, and no file. ...
    """
    if isinstance(path, UrlPath):
        return cast(BinaryIO, io.BufferedReader(UrlFile(path), _PIECE_BYTES))
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ColabUtilsError(f"{path} is a device or a pipe, and no file. Put the file there.")
        if status.st_size > most_bytes:
            raise ColabUtilsError(
                f"The file {path} has {format_bytes(status.st_size)}, and memory holds "
                f"{format_bytes(most_bytes)} of it. Split it, or save it smaller."
            )
    except BaseException:
        file.close()
        raise
    return file


def _open_at_once(path: str, flags: int) -> int:
    # Otherwise a named pipe waits for its writer.
    flags |= getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
    close_files()
    return os.open(path, flags)


def read_file(
    path: str | Place, retries: Retries | None = None, *, most_bytes: float = MOST_BYTES
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
    read = partial(_read_once, path, find_profile(path), most_bytes)
    if retries:
        return retries.run(read)
    try:
        return read()
    except ShortReadError:
        return Retries().run(read)


def _read_once(path: str | Place, profile: DriveProfile | None, most_bytes: float) -> bytes:
    if isinstance(path, UrlPath):
        return path.read_bytes()
    started = perf_counter()
    content = read_whole(path, most_bytes=most_bytes)
    wait_as_drive(profile, path, 0, len(content), started)
    return content


def read_whole(path: str | Place, *, most_bytes: float = MOST_BYTES) -> bytes:
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
    if isinstance(path, UrlPath):
        return path.read_bytes()
    with guard_drive(path), open_file(path, most_bytes=most_bytes) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read()
    if len(content) < size:
        raise _explain_short(path, len(content), size)
    return content


class FileStream:
    """Read an open file to its end, no faster than the slowed folder that it lies in allows."""

    def __init__(self, path: str | Place, file: BinaryIO) -> None:
        self._path = path
        self._file = file
        self._profile = find_profile(path)
        self._size = _find_size(path, file)
        self._count = 0

    def read(self, size: int) -> bytes:
        """Return so many bytes; fewer only at the end of the file."""
        started = perf_counter()
        with guard_drive(self._path):
            content = self._file.read(size)
        # Drive opens it at the first read alone.
        place = None if self._count else 0
        if not isinstance(self._path, UrlPath):
            wait_as_drive(self._profile, self._path, place, len(content), started)
        self._count += len(content)
        if not content and self._count < self._size:
            raise _explain_short(self._path, self._count, self._size)
        return content


@contextmanager
def open_stream(path: str | Place, *, most_bytes: float = MOST_BYTES) -> Iterator[FileStream]:
    """Open a file to read it from its begin to its end, in pieces of any size.

    Raises:
        ColabUtilsError: it is none to read: see `open_file`.
        ShortReadError: while it is read, as `read_whole`; DriveLostError and OSError in the same
            way.

    Example:
        >>> with open_stream(__file__) as file:
        ...     file.read(3) == read_whole(__file__)[:3]
        True
    """
    with guard_drive(path):
        file = open_file(path, most_bytes=most_bytes)
    with file:
        yield FileStream(path, file)


def _find_size(path: str | Place, file: BinaryIO) -> int:
    if isinstance(path, UrlPath):
        return path.stat().st_size
    return os.fstat(file.fileno()).st_size


def _explain_short(path: str | Place, count: int, size: int) -> ShortReadError:
    return ShortReadError(
        f"Only {count:,} of the {size:,} bytes of {path} came. Run the same again: "
        "what is done is safe. If it stays so, put the file there again."
    )


def parse_file(
    path: str | Place,
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
        >>> parse_file("a.txt", lambda: next(contents), int)
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
        f"Each time that {path} was read, other bytes came: Drive fails. "
        "Run the same again later: what is done is safe."
    )


@dataclass
class _Piece:
    """What one call reads. Threads share a `DriveFile`, so that its state is not theirs."""

    view: memoryview
    offset: int
    got: int = 0
    """Bytes that came so far."""
    is_lost: bool = False
    """Whether the last try failed."""


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
        # The last one is read, the others belong to a mount that was lost.
        self._descriptors: list[int] = []
        require_linux("read files in pieces")
        self.path = Path(path)
        self.profile = find_profile(path)
        self.retries = retries
        # Where a contiguous read would start.
        self._next: int | None = None
        self._run(self._open)

    def pread(self, n: int, offset: int) -> bytes:
        """Read ``n`` bytes from ``offset``; fewer only at the end of the file."""
        content = bytearray(n)
        return bytes(memoryview(content)[: self.readinto(content, offset)])

    def readinto(self, buffer: Any, offset: int) -> int:
        """Fill a writable buffer of bytes from ``offset``; return how many came.

        Fewer come only at the end of the file.
        """
        started = perf_counter()
        piece = _Piece(memoryview(buffer).cast("B"), offset)
        self._run(partial(self._fill, piece))
        place = None if offset == self._next else offset
        self._run(partial(wait_as_drive, self.profile, self.path, place, piece.got, started))
        self._next = offset + piece.got
        return piece.got

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        while self._descriptors:
            # On a mount that was lost it fails, and the descriptor is gone all the same.
            with suppress(OSError):
                os.close(self._descriptors.pop())
        super().close()

    def _run(self, call: Callable[[], None]) -> None:
        if self.retries is None:
            call()
        else:
            self.retries.run_listed(self.path, call)

    def _fill(self, piece: "_Piece") -> None:
        """Read until the view is full or the file ends, from where the last try failed."""
        if piece.is_lost:
            # A descriptor of a mount that was lost stays lost.
            self._open()
        piece.is_lost = True
        with guard_drive(self.path):
            while piece.got < len(piece.view):
                # A network file may give less than was asked for.
                rest = piece.view[piece.got :]
                count = os.preadv(self._descriptors[-1], [rest], piece.offset + piece.got)
                if not count:
                    break
                piece.got += count

    def _open(self) -> None:
        with guard_drive(self.path):
            self._descriptors.append(_open_at_once(str(self.path), os.O_RDONLY))


def open_pieces(
    path: str | Place, retries: Retries | None = None, *, block_bytes: int = 0
) -> DriveFile | UrlFile:
    """Open a file to read it in pieces: see `DriveFile`, and `UrlFile` for one at a URL."""
    if isinstance(path, UrlPath):
        return UrlFile(path, retries, block_bytes=block_bytes)
    return DriveFile(path, retries)


class OpenFiles:
    """Files of a dataset that stay open to be read again: those that were read last.

    All datasets of a process share half of the files that it may have open. What falls out is
    closed when nothing reads it any more. Threads may share it.

    Args:
        retries: Of each file; see `open_pieces`.

    Attributes:
        get: Returns the file of a path, open.

    Example:
        >>> files = OpenFiles(Retries())
        >>> files.get(__file__) is files.get(__file__)
        True
    """

    get: Callable[[Any], DriveFile | UrlFile]

    def __init__(self, retries: Retries) -> None:
        self._retries = retries
        _open_files.add(self)
        close_files()

    def close(self) -> None:
        """Close all files that nothing reads, and keep as many open as this process may now."""
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        capacity = min(OPEN_FILES, limit // 2 // len(_open_files) + 1)
        self.get = lru_cache(capacity)(partial(open_pieces, retries=self._retries))


# Of all datasets of this process.
_open_files: WeakSet[OpenFiles] = WeakSet()


def close_files() -> None:
    """Close what the datasets of this process keep open; they open it again when they read."""
    for files in list(_open_files):
        files.close()


def name_temporary(path: Path) -> Path:
    """Return the name under which this thread writes a file until the file is complete.

    It tells the machine, the process and the thread.

    Example:
        >>> name_temporary(Path("index.json"))
        PosixPath('.index.json...part')
    """
    writer = f"{find_host()}-{os.getpid()}-{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{writer}.part")


def write_file(path: Place, *parts: bytes | memoryview) -> None:
    """Write a file of these parts under a temporary name, read it back, then rename it.

    A failure leaves nothing behind. For one at a URL see `UrlPath.write`.

    Raises:
        OSError: what Python raised, or EIO where the file reads back differently.
    """
    if isinstance(path, UrlPath):
        path.write(*parts)
        return
    temporary = name_temporary(path)
    try:
        with open(temporary, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        # Otherwise it would be read from memory, which proves nothing.
        drop_cached(temporary)
        with open(temporary, "rb", buffering=0) as file:
            if hashlib.file_digest(file, xxhash.xxh3_64).hexdigest() != hash_bytes(*parts):
                raise OSError(errno.EIO, "what was written reads back differently")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_new(path: Path, mark: bytes = b"") -> Path:
    """Return the path of a file to write, and refuse to overwrite what is there.

    An empty file may be overwritten, and an earlier result, which holds ``mark``.

    Raises:
        ColabUtilsError: something else is there.
    """
    is_ours = False
    if mark and path.is_file():
        content = path.read_bytes()
        is_ours = not content or mark in content
    if path.exists() and not is_ours:
        raise ColabUtilsError(
            f"{path} exists already, and nothing of yours is overwritten. Name a new file."
        )
    return path


def hash_bytes(*parts: Any) -> str:
    """Return the XXH3-64 of all parts (bytes or arrays), one after the other, in hexadecimal.

    Example:
        >>> hash_bytes(b"")
        '2d06800538d394c2'
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


class FileStamp(NamedTuple):
    """What tells, without reading it, that a file is the one that it was."""

    name: str
    bytes: int
    """Its size; -1 where there is no file."""
    modified_ns: int
    """When it was written to, in nanoseconds since 1970."""


def stamp_file(path: Place) -> FileStamp:
    """Return what tells that a file is the one that it was.

    Raises:
        DriveLostError: Drive went away.

    Example:
        >>> stamp_file(Path("no/such/file"))
        FileStamp(name='file', bytes=-1, modified_ns=0)
    """
    with suppress(FileNotFoundError, NotADirectoryError), guard_drive(path):
        status = path.stat()
        return FileStamp(path.name, status.st_size, round(status.st_mtime * 1e9))
    return FileStamp(path.name, -1, 0)


def drop_cached(path: Path) -> None:
    """Drop what Linux keeps of a written file in memory; do nothing elsewhere."""
    # Where there is no file, reading it will say what is wrong.
    with suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def has_size(path: Place, size: int) -> bool:
    """Return whether there is a file of this size in bytes."""
    if isinstance(path, UrlPath):
        # One question in place of two.
        with suppress(FileNotFoundError):
            return path.stat().st_size == size
        return False
    return path.is_file() and path.stat().st_size == size


def hash_file(path: str | Place, retries: Retries | None = None) -> tuple[int, str]:
    """Return the size of a file in bytes, and its XXH3-64 in hexadecimal."""
    state = xxhash.xxh3_64()
    size = 0
    piece = memoryview(bytearray(_PIECE_BYTES))
    with open_pieces(path, retries, block_bytes=_BLOCK_BYTES) as file:
        while True:
            count = file.readinto(piece, size)
            if not count:
                return size, state.hexdigest()
            state.update(piece[:count])
            size += count
