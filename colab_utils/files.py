"""Read files, whole or in pieces, and write them so that a failure leaves no part of a file behind.

Reads in a slowed folder take as long as on a slow Google Drive: see `colab_utils.slow_drive`.
"""

import errno
import fnmatch
import hashlib
import io
import os
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache, partial
from pathlib import Path
from time import perf_counter, sleep
from typing import Any, BinaryIO, NamedTuple, TypeVar
from weakref import WeakSet

import xxhash

from colab_utils.drive import RETRY_WAITS_S, DriveLostError, Retries, guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.machine import find_host, require_linux, require_space
from colab_utils.os_errors import SHORTAGES
from colab_utils.places import Place, UrlPath
from colab_utils.slow_drive import find_profile, wait_as_drive
from colab_utils.units import format_bytes

_Result = TypeVar("_Result")

OPEN_FILES = 4096
"""The largest number of files that a dataset keeps open."""

MOST_BYTES = 4e8
"""Bytes of the largest file that is read as a whole, by default: no photo is larger."""
# Bytes that are read at once from a file that is hashed.
_PIECE_BYTES = 1 << 20
# Bytes of one request when a file at a URL is hashed. A request is large, because each costs time.
_BLOCK_BYTES = 8 << 20


def open_file(path: str | Path, *, most_bytes: float = MOST_BYTES) -> BinaryIO:
    """Open a file of this machine, without waiting for the writer of a named pipe.

    Raises:
        ColabUtilsError: the path is a named pipe or a device, or the file has more than
            ``most_bytes``.
        OSError: any other error, as Python raised it.

    Example:
        >>> open_file("/dev/zero")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: /dev/zero is a device or a pipe, not a file. ...
    """
    file = open(path, "rb", opener=_open_at_once)  # noqa: SIM115
    try:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ColabUtilsError(f"{path} is a device or a pipe, not a file. Put a file there.")
        if status.st_size > most_bytes:
            raise ColabUtilsError(
                f"The file {path} has {format_bytes(status.st_size)}, and at most "
                f"{format_bytes(most_bytes)} can be read. Split the file, or save it smaller."
            )
    except BaseException:
        file.close()
        raise
    return file


def _open_at_once(path: str, flags: int) -> int:
    # Without this flag, opening a named pipe waits until another program writes to it.
    flags |= getattr(os, "O_NONBLOCK", 0)
    try:
        return os.open(path, flags)
    except OSError as error:
        if error.errno not in SHORTAGES:
            raise
    # Too many files are open, or memory is short. Datasets can open their files again later.
    close_files()
    return os.open(path, flags)


def read_file(
    path: str | Place, retries: Retries | None = None, *, most_bytes: float = MOST_BYTES
) -> bytes:
    """Read a whole file. In a slowed folder it takes as long as the folder's profile says.

    If Drive or the server fails, the file is read again: by ``retries``, or else by retries of its
    own.

    Raises:
        ColabUtilsError: the path is not a file, or the file is too large: see `open_file`.
        DriveLostError: Drive got disconnected, its storage failed, or a server did not answer.
        UnavailableError: this machine has too little memory, or too many open files.
        OSError: any other error, such as a missing file, as Python raised it.

    Example:
        >>> len(read_file(__file__)) > 1000
        True
    """
    profile = find_profile(path)

    def read() -> bytes:
        started = perf_counter()
        content = read_whole(path, most_bytes=most_bytes)
        wait_as_drive(profile, path, 0, len(content), started)
        return content

    return (retries or Retries()).run(read)


def read_whole(path: str | Place, *, most_bytes: float = MOST_BYTES) -> bytes:
    """Read a whole file once, at full speed even in a slowed folder.

    Raises:
        ColabUtilsError: the path is not a file, or the file is too large: see `open_file`.
        DriveLostError: Drive got disconnected, its storage failed, or a server did not answer; or
            fewer bytes came than the file holds, which itself may be complete.
        UnavailableError: this machine has too little memory, or too many open files.
        OSError: any other error, as Python raised it.

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
        raise DriveLostError(
            f"Only {len(content):,} of the {size:,} bytes of {path} came. Run the same again: "
            "what is done is safe. If this happens each time, copy the file there again."
        )
    return content


def parse_file(
    path: str | Place,
    read: Callable[[], bytes],
    parse: Callable[[bytes], _Result],
) -> _Result:
    """Return ``parse(read())``. If ``parse`` raises an error, the file is read and parsed again.

    Drive gives wrong bytes at times. So an error of ``parse`` is raised only when two reads in a
    row gave the same bytes. It is read for 81 seconds at most, with growing waits.

    Args:
        path: the file that the error message names.
        read: returns the content of the file.
        parse: takes the content, and returns the result.

    Raises:
        DriveLostError: ``parse`` failed each time, and each read gave different bytes.
        Exception: the error of ``parse``.

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
        f"Each time that {path} was read, different bytes came: Drive fails. "
        "Run the same again later: what is done is safe."
    )


class PieceFile(io.IOBase):
    """A file that is read in pieces. Threads may share it.

    In a slowed folder, reads take as long as the folder's profile says: a read waits for
    `DriveProfile.draw_open_s`, unless it starts where the last read ended.

    Close the file when you are done, or use it as a context manager.

    Args:
        path: the file.
        retries: how a read is tried again if Drive or the server fails. By default the first error
            is raised.

    Raises:
        DriveLostError: Drive got disconnected, its storage failed, or the server failed.
        UnavailableError: this machine has too little memory, or too many open files; or the server
            refuses.
        OSError: any other error, such as a missing file, as Python raised it.
    """

    def __init__(self, path: Place, retries: Retries | None) -> None:
        self.path = path
        self.profile = find_profile(path)
        self.retries = retries
        # Where the last read ended: a read that starts there does not wait for an opening.
        self._next: int | None = None

    def pread(self, n: int, offset: int) -> bytes:
        """Read ``n`` bytes from ``offset``; fewer only at the end of the file."""
        content = bytearray(n)
        return bytes(memoryview(content)[: self.readinto(content, offset)])

    def readinto(self, buffer: Any, offset: int) -> int:
        """Fill a writable buffer with the bytes of the file from ``offset``.

        Return the number of bytes read. It is smaller than the buffer only at the end of the file.
        """
        started = perf_counter()
        view = memoryview(buffer).cast("B")
        count = self._run(partial(self._fill, view, offset))
        place = None if offset == self._next else offset
        self._run(partial(wait_as_drive, self.profile, self.path, place, count, started))
        self._next = offset + count
        return count

    def _run(self, call: Callable[[], _Result]) -> _Result:
        return call() if self.retries is None else self.retries.run_listed(self.path, call)

    def _fill(self, view: memoryview, offset: int) -> int:
        """Read until the buffer is full or the file ends, and return the number of bytes."""
        raise NotImplementedError


class DriveFile(PieceFile):
    """A file on a disk or on Drive that is read in pieces; Linux only.

    If Drive failed, the file is opened anew. The arguments are those of `PieceFile`.

    Example:
        >>> with DriveFile(__file__) as file:
        ...     file.pread(3, 0) == read_file(__file__)[:3]
        True
    """

    def __init__(self, path: str | Path, retries: Retries | None = None) -> None:
        # The last descriptor is read. The others belong to a mount that was lost.
        self._descriptors: list[int] = []
        # The descriptor with which a read failed last.
        self._lost = -1
        require_linux("read files in pieces")
        super().__init__(Path(path), retries)
        self._run(self._open)

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        while self._descriptors:
            # On a lost mount, `os.close` raises an error, but the descriptor is closed.
            with suppress(OSError):
                os.close(self._descriptors.pop())
        super().close()

    def _fill(self, view: memoryview, offset: int) -> int:
        descriptor = self._descriptors[-1]
        if descriptor == self._lost:
            # After a remount, the old descriptor still belongs to the lost mount.
            self._open()
            descriptor = self._descriptors[-1]
        count = 0
        try:
            with guard_drive(self.path):
                while count < len(view):
                    # A network folder may return fewer bytes than asked for.
                    got = os.preadv(descriptor, [view[count:]], offset + count)
                    if not got:
                        break
                    count += got
        except DriveLostError:
            self._lost = descriptor
            raise
        return count

    def _open(self) -> None:
        with guard_drive(self.path):
            self._descriptors.append(_open_at_once(str(self.path), os.O_RDONLY))


class UrlFile(PieceFile):
    """A file at a URL that is read in pieces. Its server must send parts of files.

    Args:
        path: the file.
        retries: as in `PieceFile`.
        block_bytes: the smallest request, in bytes. If you read less, the rest is kept for the next
            read.

    Example:
        >>> from fsspec import filesystem
        >>> filesystem("memory").pipe_file("/letters.txt", b"abcdef")
        >>> with UrlFile(UrlPath("memory://letters.txt")) as file:
        ...     file.pread(3, 2)
        b'cde'
    """

    path: UrlPath

    def __init__(
        self, path: UrlPath, retries: Retries | None = None, *, block_bytes: int = 0
    ) -> None:
        super().__init__(path, retries)
        self._block_bytes = block_bytes
        # Start and content of the last request. One tuple holds both, so that another thread never
        # sees the start of one request with the content of another.
        self._block = (0, b"")
        self._size: int | None = None

    def _fill(self, view: memoryview, offset: int) -> int:
        count = 0
        while count < len(view):
            piece = self._take(offset + count, len(view) - count)
            if not piece:
                break
            view[count : count + len(piece)] = piece
            count += len(piece)
        return count

    def _take(self, start: int, count: int) -> memoryview:
        """Return 1 to ``count`` bytes that begin at ``start``; none at the end of the file."""
        block_start, block = self._block
        inside = start - block_start
        if not 0 <= inside < len(block):
            if self._size is None:
                self._size = self.path.find_size()
            # Some servers refuse a request that goes beyond the end of the file.
            wanted = min(max(count, self._block_bytes), self._size - start)
            block = self.path.read_range(start, wanted) if wanted > 0 else b""
            inside = 0
            self._block = (start, block)
        return memoryview(block)[inside : inside + count]


def open_pieces(
    path: str | Place, retries: Retries | None = None, *, block_bytes: int = 0
) -> PieceFile:
    """Open a file to read it in pieces; see `PieceFile` and `UrlFile`."""
    if isinstance(path, UrlPath):
        return UrlFile(path, retries, block_bytes=block_bytes)
    return DriveFile(path, retries)


class OpenFiles:
    """Keep files of a dataset open between reads.

    A process may open a limited number of files. All datasets of the process share half of that
    number. When the share of a dataset is used up, the file that was used longest ago is dropped.
    A dropped file is closed when no thread reads it any more. Threads may share this object.

    Args:
        folder: the folder of the files.
        retries: for each file, as in `DriveFile`.

    Attributes:
        get: takes the name of a file, and returns the file, open.

    Example:
        >>> path = Path(__file__)
        >>> files = OpenFiles(path.parent, Retries())
        >>> files.get(path.name) is files.get(path.name)
        True
    """

    get: Callable[[str], PieceFile]

    def __init__(self, folder: Place, retries: Retries) -> None:
        self._folder = folder
        self._retries = retries
        _open_files.add(self)
        close_files()

    def close(self) -> None:
        """Drop all files: each is closed once nothing reads it.

        The share of the dataset is computed anew. From then on, `get` keeps no more files open
        than this share.
        """
        import resource

        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        capacity = min(OPEN_FILES, limit // 2 // len(_open_files) + 1)
        self.get = lru_cache(capacity)(self._open)

    def _open(self, name: str) -> PieceFile:
        return open_pieces(self._folder / name, self._retries)


# The open files of each dataset of this process.
_open_files: WeakSet[OpenFiles] = WeakSet()


def close_files() -> None:
    """Close the files that the datasets of this process keep open, except those being read.

    A dataset opens a file again when it needs it.
    """
    for files in list(_open_files):
        files.close()


def name_temporary(path: Path) -> Path:
    """Return the name under which this thread writes a file until the file is complete.

    The name contains the machine, the process and the thread, so two writers use different names.

    Example:
        >>> name_temporary(Path("index.json"))
        PosixPath('.index.json...part')
    """
    writer = f"{find_host()}-{os.getpid()}-{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{writer}.part")


def write_file(path: Place, *parts: bytes | memoryview) -> None:
    """Write the parts, one after the other, to a temporary file, read it back, then rename it.

    After a failure the temporary file is removed, and a file that was there before is unchanged.
    A URL is written by `UrlPath.write`.

    Raises:
        OSError: as Python raised it; with ``EIO``, if the file reads back differently.
    """
    if isinstance(path, UrlPath):
        path.write(*parts)
        return
    with create_file(path) as file:
        file.writelines(parts)
        file.flush()
        os.fsync(file.fileno())
        # Otherwise Linux would read its copy in memory, which says nothing about the disk.
        drop_cached(Path(file.name))
        file.seek(0)
        if hashlib.file_digest(file, xxhash.xxh3_64).hexdigest() != hash_bytes(*parts):
            raise OSError(errno.EIO, "what was written reads back differently")


@contextmanager
def create_file(path: Place, retries: Retries | None = None) -> Iterator[Any]:
    """Yield a file to write. It appears under its name after the block, unless an error ends it.

    A file at a URL is held in memory until then. It is sent again by ``retries`` if the server
    fails.
    """
    if isinstance(path, UrlPath):
        content = io.BytesIO()
        yield content
        (retries or Retries()).run(partial(path.write, content.getvalue()))
        return
    temporary = name_temporary(path)
    try:
        with open(temporary, "w+b") as file:
            yield file
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def require_new(path: Path, mark: bytes = b"") -> Path:
    """Return the path of a file to write, and refuse to overwrite a file of the user.

    Args:
        path: the file to write.
        mark: bytes that each file written by the caller contains. A file with these bytes, or an
            empty file, may be overwritten. By default no file may be overwritten.

    Raises:
        ColabUtilsError: a file or folder is there that may not be overwritten.
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
    """Return the XXH3-64 checksum of all parts (bytes or arrays) joined, in hexadecimal.

    Example:
        >>> hash_bytes(b"")
        '2d06800538d394c2'
    """
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


class FileStamp(NamedTuple):
    """Name, size and time of a file. While they stay the same, the file counts as unchanged."""

    name: str
    bytes: int
    """The size of the file; -1 if there is no file."""
    modified_ns: int
    """When the file was last written to, in nanoseconds since 1970; 0 if there is no file."""


def stamp_file(path: Place) -> FileStamp:
    """Return the stamp of a file. If it differs later, the file has changed.

    Raises:
        DriveLostError: Drive got disconnected.
        OSError: any other error but a missing file, as Python raised it.

    Example:
        >>> stamp_file(Path("no/such/file"))
        FileStamp(name='file', bytes=-1, modified_ns=0)
    """
    with suppress(FileNotFoundError, NotADirectoryError), guard_drive(path):
        status = path.stat()
        return FileStamp(path.name, status.st_size, round(status.st_mtime * 1e9))
    return FileStamp(path.name, -1, 0)


def drop_cached(path: Path) -> None:
    """Make Linux drop its copy of a written file from memory. On other systems, do nothing."""
    # If the file cannot be opened, the read that follows says why.
    with suppress(OSError, AttributeError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def has_size(path: Place, size: int) -> bool:
    """Return whether there is a file of this size in bytes."""
    return stamp_file(path).bytes == size


def has_files(folder: Place, files: Iterable[tuple[str, int, str]]) -> bool:
    """Return whether a folder has all these files: name, bytes and checksum of each."""
    if isinstance(folder, UrlPath):
        sizes = folder.list_sizes()
        return all(sizes.get(name) == size for name, size, _ in files)
    return all(has_size(folder / name, size) for name, size, _ in files)


def require_room(folder: Place, needed: float, cure: str) -> None:
    """Raise an error if a disk has less free space than this. The room of a server is not known.

    Args:
        folder: the folder to write into, which need not exist.
        needed: bytes that will be written.
        cure: what the user can do instead of freeing space.
    """
    if not isinstance(folder, UrlPath):
        require_space(folder, needed, cure)


def list_names(folder: Place, pattern: str = "*") -> list[str]:
    """Return the sorted names in a folder that match a pattern; none if there is no folder.

    Raises:
        DriveLostError: Drive got disconnected, or the server does not answer. A place that is lost
            never looks like an empty one.
    """
    with suppress(FileNotFoundError, NotADirectoryError), guard_drive(folder):
        names = folder.list_sizes() if isinstance(folder, UrlPath) else os.listdir(folder)
        return sorted(fnmatch.filter(names, pattern))
    return []


def hash_file(path: str | Place, retries: Retries | None = None) -> tuple[int, str]:
    """Return the size of a file in bytes, and its XXH3-64 checksum in hexadecimal.

    Args:
        path: the file.
        retries: see `DriveFile`, which also lists the errors.
    """
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
