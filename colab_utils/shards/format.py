"""One writer for a folder: who writes there says so in a file, and gives a sign of life twice a minute."""

from __future__ import annotations

import errno
import json
import os
import platform
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from colab_utils.drive import DriveFile, Retries, guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import show_progress, write_file

__all__ = [
    "FORMAT_VERSION",
    "INDEX_NAME",
    "WRITER_NAME",
    "ShardIndex",
    "ShardInfo",
    "SkippedImage",
    "explain_write",
    "hash_bytes",
    "hash_file",
    "hold_folder",
    "is_running",
    "pad_member",
    "read_index",
    "remove_leftovers",
    "split_member",
    "write_index",
]

FORMAT_NAME = "colab_utils shards"


FORMAT_VERSION = 1


INDEX_NAME = "index.json"


UNFINISHED_NAME = "unfinished.json"


BLOCK_BYTES = 512


PIECE_BYTES = 1 << 20  # of a file that is read from its start to its end


_LEFTOVER = re.compile(r"\.(?:shard-\d+\.(?:tar|arrays)|index\.json|unfinished\.json|writer\.json)\.(\d+)\.part")


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
        """(file name, bytes, checksum) of the tar and of the arrays beside it."""
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
    """How the images were stored: ``form`` ("shrink" where there is none), ``min_size``, ``max_size`` (pixels),
    ``jpeg_quality``, ``images_per_shard``.
    """
    categories: tuple[dict[str, Any], ...]
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
            return path.read_text(encoding="utf-8")

    try:
        raw = json.loads(retries.run(read) if retries else read())
    except FileNotFoundError:
        cure = (
            "preprocess was interrupted here: run the same command again, it continues where it stopped."
            if (folder / UNFINISHED_NAME).exists()
            else "Run preprocess (or copy) into this folder, or name another one."
        )
        raise ColabUtilsError(f"expected {INDEX_NAME} in {folder}, found none. {cure}") from None
    except OSError as error:
        raise ColabUtilsError(
            f"expected to read {path}, found: {error.strerror}. Name another folder, or make the file readable."
        ) from None
    except (ValueError, RecursionError) as error:
        raise ColabUtilsError(
            f"expected JSON in {path}, found: {error}. Copy the file again, or delete it and run preprocess again."
        ) from None
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise ColabUtilsError(
            f"expected an index of {FORMAT_NAME} in {path}, found something else. Name another folder."
        )
    version = raw.get("format_version")
    if not isinstance(version, int) or version > FORMAT_VERSION:
        raise ColabUtilsError(
            f"expected shards of format version {FORMAT_VERSION} or older in {folder}, found version {version}. "
            "Update colab_utils."
        )
    try:
        shards = tuple(ShardInfo(**shard) for shard in raw["shards"])
        index = ShardIndex(
            fingerprint=raw["fingerprint"],
            recipe=raw["recipe"],
            categories=tuple(raw["categories"]),
            shards=shards,
            skipped=tuple(SkippedImage(**image) for image in raw["skipped"]),
            partial=raw["partial"],
        )
        for name, size, _ in index.files():
            if Path(name).name != name or size < 0:
                raise ValueError(f"a file {name!r} of {size} bytes")
    except (KeyError, TypeError, ValueError) as error:
        raise ColabUtilsError(
            f"expected a complete index in {path}, found one that lacks or adds {error}. Copy the file again."
        ) from None
    return index


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write ``index.json``: under a temporary name first, so that a half-written one is never seen."""
    content = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "images": index.images,
        "bytes": index.bytes,
        **asdict(index),
    }
    write_file(folder / INDEX_NAME, json.dumps(content, indent=1).encode())


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed, here or on a machine that is gone."""
    for path in folder.glob(".*.part"):
        match = _LEFTOVER.fullmatch(path.name)
        with suppress(FileNotFoundError):  # its process finished it meanwhile
            if match and not is_running(int(match[1]), path.stat().st_mtime):
                path.unlink()


def is_running(pid: int, since: float) -> bool:
    """Whether the process with this id runs, and did so at the time ``since``: ids are used again."""
    import psutil

    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and process.create_time() <= since + 1
    except psutil.NoSuchProcess:
        return False


@contextmanager
def explain_write(folder: Path) -> Iterator[None]:
    """Turn an error of writing into ``folder`` into one line with its cure.

    Example:
        >>> with explain_write(Path("shards")):
        ...     raise OSError(errno.ENOSPC, "No space left on device")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected room for the next file in shards, found the disk full. ...
    """
    try:
        with guard_drive(folder):
            yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ColabUtilsError(
                f"expected room for the next file in {folder}, found the disk full. What is finished is safe: free "
                "some space and run the same command, it continues there."
            ) from None
        raise ColabUtilsError(
            f"expected to write into {folder}, found: {error.strerror}. What is finished is safe: name a folder that "
            "you may write to, or make this one so, and run the same command."
        ) from None


def hash_bytes(*parts: bytes) -> str:
    """XXH3-64 of all parts, one after the other, in hexadecimal.

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

    state, offset, piece = xxhash.xxh3_64(), 0, memoryview(bytearray(PIECE_BYTES))
    with DriveFile(path) as file:
        while count := file.readinto(piece, offset):
            state.update(piece[:count])
            offset += count
    return state.hexdigest()


def pad_member(name: str, data: bytes) -> bytes:
    """One tar member, header and padding included; the same name and data always give the same bytes.

    Example:
        >>> len(pad_member("000000000001.json", b"{}"))
        1024
    """
    return b"".join(split_member(name, data))


def split_member(name: str, data: bytes) -> tuple[bytes, bytes, bytes]:
    """The same as header, data and padding."""
    header = tarfile.TarInfo(name)
    header.size = len(data)
    return header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % BLOCK_BYTES)


WRITER_NAME = "writer.json"


_SIGN_S, _SILENT_S, _LOOK_S = 30.0, 100.0, 2.0


@contextmanager
def hold_folder(folder: Path, retries: Retries | None = None) -> Iterator[None]:
    """Be the only one who writes into ``folder`` while the block lasts; the folder is made if need be.

    A writer that was killed on this machine is known at once. One on another machine may have ended with its session:
    it is gone when it gives no sign of life for 100 seconds, and that is waited for.

    Raises:
        ColabUtilsError: somebody else is at work there, or the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with hold_folder(folder), hold_folder(folder):
        ...     pass
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected nobody else to write into ..., found process ...
    """
    path, made, done = folder / WRITER_NAME, not folder.exists(), threading.Event()

    def enter() -> None:
        with explain_write(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _wait_for_silence(path)
            _sign(path)

    (retries or Retries()).run(enter)
    thread = threading.Thread(target=_sign_on, args=(path, done), name="writer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)  # it may be waiting for a Drive that does not answer
        with suppress(OSError):
            path.unlink()
            if made:
                folder.rmdir()  # if nothing came of it


def _wait_for_silence(path: Path) -> None:
    first = _read_sign(path)
    if first is None:
        return
    if first["host"] == _find_host():
        if is_running(first["pid"], first["time"]):
            raise _refuse(path, first)
        return
    deadline = monotonic() + _SILENT_S - min(max(time() - first["time"], 0), _SILENT_S)
    label = f"another machine wrote into {path.parent.name} a moment ago: is it still at work?"
    with show_progress(label, total=None, unit="look") as bar:
        while monotonic() < deadline:
            sleep(_LOOK_S)
            bar.update(1)
            now = _read_sign(path)
            if now is None:
                return
            if now != first:
                raise _refuse(path, now)


def _read_sign(path: Path) -> dict[str, Any] | None:
    """What the writer said last; None if there is none, or nothing that can be read."""
    try:
        sign = json.loads(path.read_bytes())
        return {"host": str(sign["host"]), "pid": int(sign["pid"]), "time": float(sign["time"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _sign(path: Path) -> None:
    write_file(path, json.dumps({"host": _find_host(), "pid": os.getpid(), "time": time()}).encode())


def _sign_on(path: Path, done: threading.Event) -> None:
    while not done.wait(_SIGN_S):
        with suppress(OSError):  # the work itself says what is wrong
            _sign(path)


def _find_host() -> str:
    """This machine since it was started: Colab gives many of them one name."""
    try:
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return platform.node()


def _refuse(path: Path, sign: dict[str, Any]) -> ColabUtilsError:
    here = "this machine" if sign["host"] == _find_host() else f"machine {sign['host'].split()[0]}"
    return ColabUtilsError(
        f"expected nobody else to write into {path.parent}, found process {sign['pid']} on {here} at work there. Let "
        "it end, or stop it and run the same command: it continues after the finished shards."
    )
