"""The folder of shards: its index, the members of its tars, checksums, and the lock of its one writer."""

from __future__ import annotations

import json
import os
import platform
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from time import time
from typing import Any

from colab_utils.drive import DriveFile, Retries, explain_write, guard_drive, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import write_file

__all__ = ["ShardIndex", "ShardInfo", "SkippedImage", "hold_folder", "read_index", "write_index"]

FORMAT_NAME = "colab_utils shards"
FORMAT_VERSION = 1
INDEX_NAME, WRITER_NAME = "index.json", "writer.json"
BLOCK_BYTES = 512  # of a tar
_PIECE_BYTES = 1 << 20  # of a file that is hashed

_TAR_NAME, _ARRAYS_NAME = re.compile(r"shard-\d+\.tar"), re.compile(r"shard-\d+\.arrays")
_TEMPORARY_NAME = re.compile(r"\.(?:shard-\d+\.(?:tar|arrays)|index\.json)\.(\d+)\.part")
_TOUCH_S, _SILENT_S = 30.0, 100.0  # how often a writer touches its lock, and after how long it is gone


@dataclass(frozen=True)
class SkippedImage:
    """An image that was left out, and why."""

    file_name: str
    reason: str


@dataclass(frozen=True)
class ShardInfo:
    """One shard as the index lists it; sizes in bytes, checksums as XXH3-64 in hexadecimal."""

    name: str
    images: int
    annotations: int
    bytes: int
    xxh3_64: str
    arrays_name: str
    arrays_bytes: int
    arrays_xxh3_64: str

    def files(self) -> tuple[tuple[str, int, str], ...]:
        """(file name, bytes, checksum) of the tar and of its arrays."""
        return (
            (self.name, self.bytes, self.xxh3_64),
            (self.arrays_name, self.arrays_bytes, self.arrays_xxh3_64),
        )


@dataclass(frozen=True)
class ShardIndex:
    """What a folder of shards holds. ``partial`` marks a copy that lists only some of the source's shards."""

    fingerprint: str
    """XXH3-128 of the annotations file that the shards were made from."""
    recipe: dict[str, Any]
    """How the images are stored: ``storage``, ``min_size``, ``max_size`` (pixels), ``shard_mb``,
    ``images_per_shard``.
    """
    categories: tuple[dict[str, Any], ...]
    """Each category's ``id`` and ``name``."""
    shards: tuple[ShardInfo, ...]
    skipped: tuple[SkippedImage, ...] = ()
    partial: bool = False

    @property
    def images(self) -> int:
        """Images in all shards."""
        return sum(shard.images for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of all files but the index."""
        return sum(shard.bytes + shard.arrays_bytes for shard in self.shards)

    def files(self) -> Iterator[tuple[str, int, str]]:
        """(file name, bytes, checksum) of every data file, shard by shard."""
        for shard in self.shards:
            yield from shard.files()


def read_index(folder: str | Path, retries: Retries | None = None) -> ShardIndex:
    """Read ``index.json`` of a folder of shards; where Drive fails, ``retries`` try again.

    Raises:
        ColabUtilsError: if there is no folder or no index, the index is damaged, or a newer version wrote it.
    """
    folder = Path(folder)
    path = folder / INDEX_NAME

    def read() -> str:
        with guard_drive(folder):
            if not folder.is_dir():
                raise ColabUtilsError(f"expected a folder of shards, found nothing at {folder}. Run preprocess first.")
            return read_file(path).decode()

    try:
        raw = json.loads(retries.run(read) if retries else read())
    except FileNotFoundError:
        cure = "Run preprocess (or copy) into this folder, or name another one."
        if any(folder.glob("shard-*.arrays")):
            cure = "It was interrupted here: run the same command again, it continues where it stopped."
        raise ColabUtilsError(f"expected {INDEX_NAME} in {folder}, found none. {cure}") from None
    except OSError as error:
        raise ColabUtilsError(
            f"expected to read {path}, found: {error.strerror}. Name another folder, or make the file readable."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ColabUtilsError(
            f"expected JSON in {path}, found: {error}. Copy the file again, or delete it and run preprocess again."
        ) from None
    return _parse_index(raw, path)


def _parse_index(raw: Any, path: Path) -> ShardIndex:
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise ColabUtilsError(
            f"expected an index of {FORMAT_NAME} in {path}, found something else. Name another folder."
        )
    if raw.get("format_version") != FORMAT_VERSION:
        raise ColabUtilsError(
            f"expected shards of format version {FORMAT_VERSION} in {path.parent}, found version "
            f"{raw.get('format_version')}. Update colab_utils."
        )
    try:
        known = {field.name: raw[field.name] for field in fields(ShardIndex)}
        shards = tuple(ShardInfo(**shard) for shard in raw["shards"])
        for shard in shards:  # a name of another kind could lead out of the folder, or to a file of the user
            if not (_TAR_NAME.fullmatch(shard.name) and _ARRAYS_NAME.fullmatch(shard.arrays_name)):
                raise ValueError(f"files {shard.name!r} and {shard.arrays_name!r}")
            if min(shard.images, shard.annotations, shard.bytes, shard.arrays_bytes) < 0:
                raise ValueError(f"sizes of {shard.name}")
        for category in raw["categories"]:
            if not (isinstance(category["id"], int) and isinstance(category["name"], str)):
                raise ValueError(f"a category {category}")
        skipped = tuple(SkippedImage(**image) for image in raw["skipped"])
        known |= {"recipe": dict(raw["recipe"]), "categories": tuple(raw["categories"])}
        return ShardIndex(**known | {"shards": shards, "skipped": skipped})
    except (KeyError, TypeError, ValueError) as error:
        raise ColabUtilsError(
            f"expected a complete index in {path}, found one that lacks or adds {error}. Copy the file again."
        ) from None


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write ``index.json`` under a temporary name, then rename it."""
    content = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "images": index.images,
        "bytes": index.bytes,
        **asdict(index),
    }
    write_file(folder / INDEX_NAME, json.dumps(content, indent=1).encode())


def has_size(path: Path, size: int) -> bool:
    """Whether there is a file of this size in bytes."""
    return path.is_file() and path.stat().st_size == size


def split_member(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    """One tar member as header, data and padding; the same name and data always give the same bytes.

    Example:
        >>> [len(part) for part in split_member("000000000001.json", b"{}")]
        [512, 2, 510]
    """
    header = tarfile.TarInfo(name)
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % BLOCK_BYTES)


def hash_bytes(*parts: Any) -> str:
    """XXH3-64 of all parts (bytes or arrays), one after the other, in hexadecimal.

    Example:
        >>> hash_bytes(b"")
        '2d06800538d394c2'
    """
    import xxhash

    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.hexdigest()


def hash_file(path: str | Path) -> str:
    """XXH3-64 of a file, in hexadecimal."""
    import xxhash

    state, offset = xxhash.xxh3_64(), 0
    with DriveFile(path) as file:
        while piece := file.pread(_PIECE_BYTES, offset):
            state.update(piece)
            offset += len(piece)
    return state.hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed, here or on a machine that is gone."""
    for path in folder.glob(".*.part"):
        match = _TEMPORARY_NAME.fullmatch(path.name)
        with suppress(FileNotFoundError):  # its process has just finished it
            if match and not _is_running(int(match[1]), path.stat().st_mtime):
                path.unlink()


def _is_running(pid: int, since: float) -> bool:
    """Whether the process with this id runs, and ran at the time ``since``: ids are used again."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + 1
    except psutil.NoSuchProcess:
        return False


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder``: no other process writes into it while the block runs. The folder is made if need be.

    What killed writers left half-written goes before the block, and what the block leaves so, after it.

    The lock is the file ``writer.json``, which only one process can create. The lock of a process that was killed on
    this machine is removed at once. A writer on another machine touches its lock every 30 seconds; when it has not for
    100 seconds, its session has ended, and the lock is removed. (Drive shows another machine's files with a delay, so
    two machines that start within seconds of each other can both get in.)

    Raises:
        ColabUtilsError: if another process writes there, or the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with hold_folder(folder), hold_folder(folder):
        ...     pass
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected no other writer in ..., found process ...
    """
    path, made, owned, done = folder / WRITER_NAME, not folder.exists(), False, threading.Event()

    def acquire() -> None:
        nonlocal owned
        with explain_write(folder):
            folder.mkdir(parents=True, exist_ok=True)
            while not owned:
                try:
                    path.touch(exist_ok=False)
                    owned = True
                except FileExistsError:
                    _remove_dead_lock(path)
            path.write_text(json.dumps({"host": _find_host(), "pid": os.getpid(), "time": time()}))

    def touch() -> None:
        while not done.wait(_TOUCH_S):
            with suppress(OSError):  # the work itself meets the error too
                os.utime(path)

    try:
        Retries().run(acquire)
        threading.Thread(target=touch, name="writer", daemon=True).start()
        with explain_write(folder):
            remove_leftovers(folder)
        yield
    finally:
        done.set()
        with suppress(OSError):
            if owned:
                remove_leftovers(folder)
                path.unlink()
            if made:
                folder.rmdir()  # if it stayed empty


def _remove_dead_lock(path: Path) -> None:
    """Remove a lock whose writer is gone; return, too, where another process has just removed it.

    Raises:
        ColabUtilsError: if the writer is alive.
    """
    import fcntl

    with suppress(FileNotFoundError), open(path) as file:
        text, silent_s = file.read(), time() - path.stat().st_mtime
        try:
            lock = json.loads(text)
            host, pid, since = str(lock["host"]), int(lock["pid"]), float(lock["time"])
        except (ValueError, KeyError, TypeError):  # made a moment ago
            host, pid, since = "", 0, 0.0
        here = host == _find_host()
        if _is_running(pid, since) if here else silent_s < _SILENT_S:
            where = "this machine" if here else f"machine {host.partition(' ')[0]}"
            writer = f"process {pid} on {where}" if host else "another process"
            raise ColabUtilsError(
                f"expected no other writer in {path.parent}, found {writer} at work there. Let "
                "it end, or stop it and run the same command: it continues after the finished shards. (A writer on "
                f"another machine counts as gone {_SILENT_S:.0f} seconds after its session ended.)"
            )
        with suppress(OSError):  # not every Drive has flock
            fcntl.flock(file, fcntl.LOCK_EX)  # of several processes that found it dead, one removes it
        if path.read_text() == text:
            path.unlink()


def _find_host() -> str:
    """This machine since it was started: Colab gives many machines one name."""
    try:
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return platform.node()
