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
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple, TypeVar

import xxhash

from colab_utils import drive
from colab_utils.drive import DriveLostError, guard_drive, try_again
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.machine import find_host, require_linux, require_space
from colab_utils.places import Place, PlaceLike, find_server, open_place
from colab_utils.slow_drive import find_profile, wait_as_drive
from colab_utils.units import format_bytes, format_count

_Result = TypeVar("_Result")

MOST_BYTES = 4e8
"""Bytes of the largest file that is read as a whole, by default: no photo is larger."""
# Bytes that are read at once from a file that is hashed.
_PIECE_BYTES = 1 << 20
_BLOCK_BYTES = 8 << 20
# Times that a file is read which cannot be parsed.
_MOST_READS = 10
# Before the first wait of so many seconds, a warning says that the same is tried again.
_LONG_WAIT_S = 5.0

IMPATIENT = threading.Event()
"""The ``stop`` of a store that tries no call again."""
IMPATIENT.set()


def _open_at_once(path: str, flags: int) -> int:
    # Without this flag, opening a named pipe waits until another program writes to it.
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def read_file(path: PlaceLike) -> bytes:
    """Read a whole file by a store of its own; see `Store.read`.

    Example:
        >>> len(read_file(__file__)) > 1000
        True
    """
    return open_store(path).read("")


def read_whole(path: str | Path, *, most_bytes: float = MOST_BYTES) -> bytes:
    """Read a whole file once, at full speed even in a slowed folder.

    The writer of a named pipe is not waited for.

    Raises:
        ColabUtilsError: the path is a named pipe or a device, or the file has more than
            ``most_bytes``.
        DriveLostError: fewer bytes came than the file holds, which itself may be complete.
        OSError: any other error, as Python raised it.

    Example:
        >>> read_whole("/dev/zero")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: /dev/zero is a device or a pipe, not a file. ...
    """
    # Opening a socket fails, and opening a pipe or a device may change it.
    status = os.stat(path)
    size = status.st_size
    if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR):
        raise ColabUtilsError(f"{path} is a device or a pipe, not a file. Put a file there.")
    if size > most_bytes:
        raise ColabUtilsError(
            f"The file {path} has {format_bytes(size)}, and at most "
            f"{format_bytes(most_bytes)} can be read. Split the file, or save it smaller."
        )
    with open(path, "rb", opener=_open_at_once) as file:
        content = file.read()
    if len(content) < size:
        raise DriveLostError(
            f"Only {len(content):,} of the {size:,} bytes of {path} came. Run the same again: "
            "what is done is safe. If this happens each time, copy the file there again."
        )
    return content


def parse_file(
    path: str | Place, read: Callable[[], bytes], parse: Callable[[bytes], _Result]
) -> _Result:
    """Return ``parse(read())``. If ``parse`` raises an error, the file is read and parsed again.

    Drive gives wrong bytes at times. So an error of ``parse`` is raised only when two reads in a
    row gave the same bytes.

    Raises:
        DriveLostError: 10 reads gave different bytes.

    Example:
        >>> contents = iter([b"", b"5"])
        >>> parse_file("a.txt", lambda: next(contents), int)
        5
    """
    before = None
    for _ in range(_MOST_READS):
        content = read()
        try:
            return parse(content)
        except Exception:
            if content == before:
                raise
        before = content
    raise DriveLostError(
        f"{path} was read {_MOST_READS} times, and each time different bytes came: Drive fails. "
        "Run the same again later: what is done is safe."
    )


class _Descriptor:
    """A file that the system has opened. It is closed when no thread uses it any more."""

    number = -1

    def __init__(self, path: Any) -> None:
        self.number = _open_at_once(path, os.O_RDONLY)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read bytes into the buffer; return their number, which is 0 at the end of the file."""
        return os.preadv(self.number, [view], offset)

    def __del__(self) -> None:
        # On a lost mount, `os.close` raises an error, but the descriptor is closed.
        with suppress(OSError):
            os.close(self.number)


class PieceFile(io.IOBase):
    """A file that is read in pieces. Threads may share it; Linux only.

    It is opened with the first read, and opened anew if Drive failed. In a slowed folder, reads
    take as long as the folder's profile says: a read waits for `DriveProfile.draw_open_s`, unless
    it starts where the last read ended.

    Close the file when you are done, or use it as a context manager. `Store.open` makes it.

    Args:
        path: the file.
        store: opens the file, and tries each read again if Drive or the server fails.

    Each method raises:
        DriveLostError: Drive got disconnected, its storage failed, or the server failed.
        UnavailableError: this machine has too little memory, or too many open files; or the server
            refuses.
        OSError: any other error, such as a missing file, as Python raised it.
    """

    def __init__(self, path: Any, store: Any) -> None:
        self.path = path
        self.profile = find_profile(path)
        self._store = store
        self._opened: Any = None
        # Where the last read ended: a read that starts there does not wait for an opening.
        self._next: int | None = None

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._opened = None
        super().close()

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
        count = 0
        while count < len(view):
            # A network folder may return fewer bytes than asked for. Each piece is tried again by
            # itself, so no error discards the bytes that came before it.
            read = partial(self._read_some, view[count:], offset + count)
            came: int = self._store.attempt_listed(self.path, read)
            if not came:
                break
            count += came
        place = None if offset == self._next else offset
        wait = partial(wait_as_drive, self.profile, self.path, place, count, started)
        self._store.attempt_listed(self.path, wait)
        self._next = offset + count
        return count

    def _read_some(self, view: memoryview, offset: int) -> int:
        """Read bytes into the buffer; return their number, which is 0 at the end of the file."""
        opened = self._opened or self._store.connect(self.path)
        self._opened = opened
        try:
            count: int = opened.read_into(view, offset)
            return count
        except OSError:
            # After a remount, this descriptor still belongs to the lost mount.
            self._opened = None
            raise


def name_temporary(path: Path) -> Path:
    """Return the name under which this thread writes a file until the file is complete.

    The name contains the machine, the process and the thread, so two writers use different names.

    Example:
        >>> name_temporary(Path("index.json"))
        PosixPath('.index.json...part')
    """
    writer = f"{find_host()}-{os.getpid()}-{threading.get_native_id()}"
    return path.with_name(f".{path.name}.{writer}.part")


def write_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write the parts, one after the other, to a temporary file, read it back, then rename it.

    After a failure the temporary file is removed, and a file that was there before is unchanged.

    Raises:
        OSError: as Python raised it; with ``EIO``, if the file reads back differently.
    """
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
def create_file(path: Path) -> Iterator[Any]:
    """Yield a file to write. It appears under its name after the block, unless an error ends it."""
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
    """What lies under a name."""

    kind: str = ""
    """Either "file" or "folder"; "" if there is neither."""
    bytes: int = -1
    """The size of the file; -1 if there is no file."""
    modified_s: float = 0.0
    """When the file was last written to, in seconds since 1970; 0 if there is no file."""


def drop_cached(path: Path) -> None:
    """Make Linux drop its copy of a written file from memory."""
    # If the file cannot be opened, the read that follows says why.
    with suppress(OSError), path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


class Store:
    """The files of a folder of this machine or of a mounted Drive, by name. `open_store` opens it.

    While Drive fails, each call is tried again for 81 seconds, after waits that double up to 5
    seconds. Threads may share a store. A copy in another process opens the folder anew.

    A name is that of a file in the folder. The place of a file, as `find_file` returns it, counts
    as a name, too.

    Args:
        place: The folder, which need not exist.
        stop: Event that ends all waits. A call that fails after that is not repeated. With
            `IMPATIENT`, no call is. Default: a new event.

    Attributes:
        failures: Number of calls that failed and were tried again.
        on_failure: Function that you may set. It is called before each repetition.
        trusts_absence: Whether a file that seems to be missing is not looked for again.
        guard: Turns errors into those of this package.
        connect: Opens a file whose bytes are then read in pieces.

    Each method raises:
        DriveLostError: Drive or the server failed until the last try. A caller that repeats its own
            calls does not repeat this one.
        UnavailableError: The server refuses; or this machine has too little memory, or too many
            open files.
        OSError: Any other error, as Python raised it.
    """

    guard: Any = staticmethod(guard_drive)
    connect: Any = _Descriptor

    def __init__(self, place: Any, stop: Any = None) -> None:
        self.place = place
        self.stop = stop or threading.Event()
        self.failures = 0
        self.on_failure: Callable[[], object] | None = None
        self.trusts_absence = False
        self._is_announced = False

    def __reduce__(self) -> Any:
        return open_store, (self.place,)

    def attempt(self, path: Place, call: Callable[[], _Result]) -> _Result:
        """Return the result of ``call``, which is tried again while Drive or the server fails.

        It is repeated while it raises a `DriveLostError` that may pass. Before the first long wait,
        a warning says so.
        """
        guarded: Callable[[], _Result] = self.guard(path)(call)
        waits_s = iter(drive.RETRY_WAITS_S)
        while True:
            try:
                return guarded()
            except DriveLostError as error:
                wait_s = next(waits_s, None)
                if wait_s is None:
                    # A caller that repeats its own calls would wait for as long again, each time.
                    error.may_pass = False
                    raise
                if self.stop.is_set() or not error.may_pass:
                    raise
                self.failures += 1
                if wait_s >= _LONG_WAIT_S and not self._is_announced:
                    self._is_announced = True
                    warnings.warn(
                        f"{self.place} fails, and is tried again for more than a minute",
                        ColabUtilsWarning,
                        stacklevel=3,
                    )
                if self.on_failure is not None:
                    self.on_failure()
                self.stop.wait(wait_s)

    def attempt_listed(self, path: Place, call: Callable[[], _Result]) -> _Result:
        """Return the result of ``call``, which reads a file that should be there.

        If the file seems to be missing, `find_again` looks for it.
        """
        try:
            return self.attempt(path, call)
        except FileNotFoundError:
            if not self.find_again([path]):
                raise
        return self.attempt(path, call)

    def find_again(self, names: Iterable[str | Place]) -> bool:
        """Look again for files that seem to be missing; return whether one is there after all.

        At times, Drive does not show a file for a while. So this method lists the files' folders,
        which makes Drive look again. It checks all missing files together, after the same growing
        waits as `attempt`. If a file is still missing after the last wait, later calls check
        their files only once. Files that are not on Drive are always checked only once.

        Example:
            >>> open_store("/tmp").find_again(["no/such/file"])
            False
        """
        paths = {self.locate(name) for name in names}
        missing = paths
        for wait_s in (0, *drive.RETRY_WAITS_S):
            self.stop.wait(wait_s)
            missing = {path for path in missing if _is_absent(path)}
            if self.trusts_absence or not missing or not drive.is_on_drive(min(missing)):
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
        return missing != paths

    def tell_failures(self) -> str:
        """Say how often calls failed; "" if none did."""
        if not self.failures:
            return ""
        return f"{self.place} failed {format_count(self.failures, 'time')} and was tried again"

    def locate(self, name: str | Place) -> Any:
        """Return the place of a file."""
        if not name:
            return self.place
        return self.place / name if isinstance(name, str) else name

    @try_again
    def read(
        self, name: Any, *, most_bytes: float = MOST_BYTES, at_full_speed: bool = False
    ) -> bytes:
        """Read a whole file. In a slowed folder it takes as long as the folder's profile says,
        unless it is read ``at_full_speed``.

        Raises:
            ColabUtilsError: It is not a file, or the file is too large: see `read_whole`.
        """
        started = perf_counter()
        content = read_whole(name, most_bytes=most_bytes)
        if not at_full_speed:
            wait_as_drive(find_profile(name), name, 0, len(content), started)
        return content

    def read_listed(self, name: str | Place) -> bytes:
        """Read a file that should be there: if Drive does not show it, it is looked for again."""
        return self.attempt_listed(self.locate(name), partial(self.read, name))

    def open(self, name: str | Place) -> PieceFile:
        """Open a file to read it in pieces. A request to a server has the size of the buffer."""
        require_linux("read files in pieces")
        return PieceFile(self.locate(name), self)

    def hash(self, name: str | Place) -> tuple[int, str]:
        """Return the size of a file in bytes, and its XXH3-64 checksum in hexadecimal."""
        state = xxhash.xxh3_64()
        size = 0
        # Each request to a server takes time, so these are few.
        piece = memoryview(bytearray(_BLOCK_BYTES))
        with self.open(name) as file:
            while True:
                count = file.readinto(piece, size)
                if not count:
                    return size, state.hexdigest()
                state.update(piece[:count])
                size += count

    def stamp(self, name: str | Place = "") -> FileStamp:
        """Return what lies under a name. Without a name, look at this folder."""
        # A name with a null character raises a ValueError.
        with suppress(FileNotFoundError, NotADirectoryError, ValueError):
            return FileStamp(*self._look(name))
        return FileStamp()

    @try_again
    def _look(self, name: Any) -> tuple[str, int, float]:
        status = name.stat()
        kind = "folder" if stat.S_ISDIR(status.st_mode) else "file"
        return kind, status.st_size, status.st_mtime

    def find_kind(self, name: str | Place = "") -> str:
        """Return "file" or "folder"; "" if there is neither. Without a name, look at this folder.

        A web server lists no folder. It is trusted.
        """
        return self.stamp(name).kind

    def has_files(self, files: Iterable[tuple[str, int, str]]) -> bool:
        """Return whether files of these names and sizes are there. Checksums are not compared."""
        return all(self.stamp(name).bytes == size for name, size, _ in files)

    def list_names(self, pattern: str = "*") -> list[str]:
        """Return the sorted names in the folder that match a pattern; none if there is no folder.

        A place that is lost never looks like an empty one.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            return sorted(fnmatch.filter(self._list(""), pattern))
        return []

    @try_again
    def _list(self, name: Any) -> Iterable[str]:
        return os.listdir(name)

    @try_again
    def write(self, name: Any, *parts: bytes | memoryview) -> None:
        """Write a file. It appears under its name when it is complete, and was read back.

        Raises:
            OSError: With ``EIO``, if it reads back differently; `ServerLostError` at a URL.
        """
        write_file(name, *parts)

    def create(self, name: str | Place) -> AbstractContextManager[Any]:
        """Yield a file to write. It appears under its name after the block, unless an error ends
        it. A file at a URL is held in memory until then.
        """
        return create_file(self.locate(name))

    def remove(self, name: str | Place, *, is_large: bool = False) -> None:
        """Remove a file, if it is there.

        On Drive, a large file is emptied first: Drive moves it to its bin, where it would still
        count for the user's quota.
        """
        with suppress(FileNotFoundError):
            self._remove(name, is_large)

    @try_again
    def _remove(self, name: Any, is_large: bool) -> None:
        # Elsewhere, another name of the same file, such as a copy by links, must keep its bytes.
        if is_large and drive.is_on_drive(name):
            os.truncate(name, 0)
        name.unlink()

    @try_again
    def move(self, name: Any, target: Any) -> None:
        """Move a file to another place of the same disk or server, and replace the file there."""
        name.replace(target)

    @try_again
    def touch(self, name: Any) -> None:
        """Set the time of a file to now."""
        name.touch()

    @try_again
    def make(self, name: Any = "") -> None:
        """Make the folder. A bucket is never made."""
        name.mkdir(parents=True, exist_ok=True)

    def require_room(self, needed: float, cure: str) -> None:
        """Raise an error if the disk has less free space than ``needed`` bytes.

        The room of a server is not known. ``cure`` says what the user can do instead.
        """
        if not find_server(self.place):
            require_space(self.place, needed, cure)


def open_store(place: PlaceLike, stop: Any = None) -> Store:
    """Open the files of a folder, or of a URL that fsspec knows; see `Store`.

    Example:
        >>> open_store("no/such/folder").list_names()
        []
    """
    opened = open_place(place) if isinstance(place, str) else place
    if not find_server(opened):
        return Store(opened, stop)
    # This module loads fsspec, which few people use.
    from colab_utils.urls import UrlMethods

    class UrlStore(UrlMethods, Store):
        """The files of a folder at a URL."""

    return UrlStore(opened, stop)


def _is_absent(path: Any) -> bool:
    """Return whether a file cannot be opened. Drive may list a file that cannot be opened."""
    # The system opens no URL. A server, unlike Drive, gives the same answer every time.
    with suppress(OSError, TypeError):
        os.close(_open_at_once(path, os.O_RDONLY))
        return os.path.isdir(path)
    return True
