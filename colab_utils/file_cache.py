"""Keep the bytes of files of a slow folder on this machine's disk, and read them there afterwards.

Threads and processes may share the folder of a cache. A file that several of them want at the same
time is read from the slow folder once: the others wait until it is kept.
"""

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from threading import Lock
from time import monotonic, sleep
from typing import Any

import numpy as np
import xxhash

from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsWarning
from colab_utils.files import hash_bytes
from colab_utils.machine import find_free_space
from colab_utils.places import require_local_path
from colab_utils.processes import share_array
from colab_utils.units import format_bytes

# Free space that a cache leaves for checkpoints and for other programs.
_RESERVE_BYTES = 1_000_000_000
# A file that another process reads is waited for so long. Then it is read here, too.
_OTHER_S = 10.0
_POLL_S = 0.02
# A reader that gives way waits this long at most, until nobody else has read for the second time.
_GIVE_WAY_S = 1.0
_QUIET_S = 0.5
# Each file in the cache ends with the checksum of its content.
_CHECK_BYTES = 8


class FileCache:
    """Files that are kept in a folder of this machine's disk.

    If the disk gets full, no more files are kept, and a warning says so once. Files that are kept
    stay until you delete the folder: delete it if the original files have changed.

    Args:
        folder: The folder of the cache. It is made if it does not exist.

    Attributes:
        reserve_bytes: Free bytes that the cache leaves on its disk. Default: 1 GB.
        gives_way: Whether this process reads a file that is not kept only while no other process
            does, or once a second. Default: False.

    Raises:
        ColabUtilsError: The folder cannot be made, or is no folder of this machine.

    Example:
        >>> import tempfile
        >>> cache = FileCache(tempfile.mkdtemp())
        >>> [cache.read("a.jpg", lambda: b"first"), cache.read("a.jpg", lambda: b"second")]
        [b'first', b'first']
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = require_local_path(folder)
        self.reserve_bytes: float = _RESERVE_BYTES
        self.gives_way = False
        with explain_write(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
        # Forked processes share this memory: whether the disk is full, and the time of the last
        # read of the slow folder.
        self._is_full = share_array(np.bool_)
        self._read_s = share_array(np.float64)
        self._turn = Lock()

    def __reduce__(self) -> Any:
        return FileCache, (self.folder,), {"reserve_bytes": self.reserve_bytes}

    def read(self, name: str, read: Callable[[], bytes]) -> bytes:
        """Return the content of a file, which ``read`` reads if it is not kept yet.

        Args:
            name: The path or URL of the file.
            read: Reads the file in the slow folder. Its errors are raised, and nothing is kept.
        """
        path = self._find_path(name)
        content = _load(path)
        if content is not None:
            return content
        if self.gives_way:
            self._give_way()
        with _hold(path.with_suffix(".part")) as file:
            # Another process may have read the file meanwhile.
            content = _load(path)
            if content is None:
                self._note_read()
                content = read()
                self._note_read()
                if file is not None:
                    self._keep(path, file, content)
        return content

    def forget(self, name: str) -> None:
        """Delete a file, so that it is read anew."""
        self._find_path(name).unlink(missing_ok=True)

    def _find_path(self, name: str) -> Path:
        return self.folder / hash_bytes(name.encode(errors="surrogateescape"))

    def _note_read(self) -> None:
        """Let those who give way wait."""
        if not self.gives_way:
            self._read_s[0] = monotonic()

    def _give_way(self) -> None:
        """Wait while other processes read the slow folder, but let a file pass each second."""
        with self._turn:
            until_s = monotonic() + _GIVE_WAY_S
            while monotonic() < min(until_s, self._read_s[0] + _QUIET_S):
                sleep(_POLL_S)

    def _keep(self, path: Path, file: FileIO, content: bytes) -> None:
        """Write a file under its name, unless the disk is too full."""
        if self._is_full[0]:
            return
        free = 0.0
        try:
            free = find_free_space(self.folder) - len(content)
            if free >= self.reserve_bytes:
                file.truncate(0)
                data = content + xxhash.xxh3_64_digest(content)
                if file.write(data) == len(data):
                    Path(file.name).rename(path)
                    return
        except FileNotFoundError:
            # The cache was deleted, or another process has kept this file and forgotten it.
            return
        except OSError:
            pass
        # Only the name of a complete file counts, so what did not fit is never read.
        file.truncate(0)
        self._is_full[0] = True
        warnings.warn(
            f"The disk of {self.folder} is too full to keep more files ({format_bytes(free)} are "
            "free), so they are read from their folder in each epoch. Free some space there.",
            ColabUtilsWarning,
            stacklevel=2,
        )


def _load(path: Path) -> bytes | None:
    """Return the content of a file of the cache; None if it is missing or damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    content = data[:-_CHECK_BYTES]
    return content if xxhash.xxh3_64_digest(content) == data[-_CHECK_BYTES:] else None


@contextmanager
def _hold(path: Path) -> Iterator[FileIO | None]:
    """Lock a file of the cache before it is written, and yield it.

    None is yielded if the disk takes no file or has no locks, or if another process does not end
    its read.
    """
    import fcntl

    try:
        # Without a buffer, nothing is left to write when the disk is full and the file is closed.
        file = open(path, "ab", buffering=0)  # noqa: SIM115
    except OSError:
        yield None
        return
    until_s = monotonic() + _OTHER_S
    is_held = False
    with file:
        while not is_held and monotonic() < until_s:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                is_held = True
            except BlockingIOError:
                sleep(_POLL_S)
            except OSError:
                break
        try:
            yield file if is_held else None
        finally:
            # A process that was forked meanwhile has the same lock, and would hold it.
            if is_held:
                fcntl.flock(file, fcntl.LOCK_UN)
