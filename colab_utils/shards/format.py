"""The folder of shards: its index, the members of its tars, checksums, and the lock of its one writer."""

import json
import math
import os
import re
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from functools import partial
from multiprocessing.util import register_after_fork
from pathlib import Path
from tempfile import gettempdir
from time import time
from typing import Any

import psutil
import xxhash

from colab_utils.drive import DriveFile, Retries, explain_write, open_file, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import hash_bytes, require_linux, write_file

FORMAT_NAME = "colab_utils shards"
FORMAT_VERSION = 2
INDEX_NAME, WRITER_NAME = "index.json", "writer.txt"
_MOST_INDEX_BYTES = 1 << 25  # of 80,000 shards
_PIECE_BYTES = 1 << 20  # of a file that is hashed

_TAR_NAME = re.compile(r"shard-[0-9]{6,12}\.tar")
_PART = re.compile(r"\.(?:shard-\d+\.(?:tar|arrays)|(?:index|arriving)\.json|writer\.txt)\.(\d{1,9})(?:-\d+)?\.part")
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
    tables_xxh3_64: str
    """Of the arrays without the masks' bits, which the tables hold checksums of: what a loader reads at first."""

    def files(self) -> tuple[tuple[str, int, str], ...]:
        """(file name, bytes, checksum) of the tar and of its arrays."""
        return (self.name, self.bytes, self.xxh3_64), (self.arrays_name, self.arrays_bytes, self.arrays_xxh3_64)


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
        ColabUtilsError: if there is no folder or no index, the index was changed since it was written, or another
            version wrote it.
    """
    folder = Path(folder)
    path = folder / INDEX_NAME
    try:
        return _parse_index(json.loads(read_file(path, None, retries, most_bytes=_MOST_INDEX_BYTES)), folder)
    except FileNotFoundError:
        found = f"{INDEX_NAME} in {folder}, found none"
        if not folder.exists():
            found = f"a folder of shards, found nothing at {folder}"
        cure = "Run preprocess (or copy) first: where it was interrupted, it continues where it stopped."
        raise ColabUtilsError(f"expected {found}. {cure}") from None
    except OSError as error:
        raise ColabUtilsError(f"expected to read {path}, found: {error.strerror}. Make the file readable.") from None
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise ColabUtilsError(
            f"expected the index that was written in {path}, found one that was changed since: {error!s:.100}. Copy "
            "the folder again, or delete it and run preprocess again: finished shards stay."
        ) from None


def _parse_index(raw: Any, folder: Path) -> ShardIndex:
    """The index, of JSON that anybody may have written.

    Raises:
        ColabUtilsError: if it is none of ours, or of another version.
        KeyError, TypeError, ValueError: if it is not what was written, or contradicts itself: a checksum shows damage,
            and no hand that made it anew.
    """
    if not isinstance(raw, dict) or raw.get("format") != FORMAT_NAME:
        raise ColabUtilsError(f"expected an index of {FORMAT_NAME} in {folder}, found something else. Name another.")
    if (version := raw.get("format_version")) != FORMAT_VERSION:
        found = f"version {version!s:.20}. Update colab_utils, or run preprocess again, into another folder."
        raise ColabUtilsError(f"expected shards of format version {FORMAT_VERSION} in {folder}, found {found}")
    if raw.pop("xxh3_64") != hash_bytes(_to_text(raw)):
        raise ValueError("another checksum")
    index = ShardIndex(
        fingerprint=raw["fingerprint"],
        recipe=parse_recipe(raw["recipe"]),
        categories=tuple({key: one[key] for key in ("id", "name")} for one in raw["categories"]),
        shards=tuple(parse_fields(ShardInfo, shard) for shard in raw["shards"]),
        skipped=tuple(parse_fields(SkippedImage, image) for image in raw["skipped"]),
        partial=raw["partial"],
    )
    names = {shard.name for shard in index.shards}
    if len(names) < len(index.shards) or (raw["images"], raw["bytes"]) != (index.images, index.bytes):
        raise ValueError("totals that are not those of its shards")
    for shard in index.shards:  # a name of another kind could lead out of the folder, or to a file of the user
        if not _TAR_NAME.fullmatch(shard.name) or shard.arrays_name != shard.name.replace(".tar", ".arrays"):
            raise ValueError(f"files {shard.name!r} and {shard.arrays_name!r}")
    if not (isinstance(index.fingerprint, str) and isinstance(index.partial, bool)):
        raise ValueError("a fingerprint that is no text")
    ids = {one["id"] for one in index.categories if type(one["id"]) is int and isinstance(one["name"], str)}
    if len(ids) < len(index.categories) or max(map(abs, ids), default=0) >= 1 << 62:
        raise ValueError("categories without a number and a name of their own")
    return index


def parse_fields(kind: Any, raw: Any) -> Any:
    """A `ShardInfo` or a `SkippedImage`, of JSON that anybody may have written.

    Raises:
        TypeError, ValueError: if a field is missing, is too many, or is of another type.

    Example:
        >>> parse_fields(SkippedImage, {"file_name": "a.jpg", "reason": 5})
        Traceback (most recent call last):
        ValueError: reason 5
    """
    entry = kind(**raw)
    for field in fields(kind):
        value = getattr(entry, field.name)
        if type(value) is not field.type or (field.type is int and not 0 <= value < 1 << 62):
            raise ValueError(f"{field.name} {value!r}")
    return entry


def parse_recipe(raw: Any) -> dict[str, Any]:
    """A recipe, of JSON that anybody may have written.

    Raises:
        KeyError, TypeError, ValueError: if it is none.
    """
    recipe = {name: raw[name] for name in ("storage", "min_size", "max_size", "shard_mb", "images_per_shard")}
    storage, *numbers = recipe.values()
    sound = all(type(number) in (int, float) and 0 < number < 1 << 32 for number in numbers)
    if not (sound and isinstance(storage, str) and isinstance(raw["images_per_shard"], int)):
        raise ValueError(f"a recipe {raw}")
    return recipe


def write_index(folder: Path, index: ShardIndex) -> None:
    """Write ``index.json`` under a temporary name, then rename it."""
    totals = {"images": index.images, "bytes": index.bytes}
    content = {"format": FORMAT_NAME, "format_version": FORMAT_VERSION, **totals, **asdict(index)}
    content["xxh3_64"] = hash_bytes(_to_text(content))
    write_file(folder / INDEX_NAME, json.dumps(content, indent=1).encode())


def _to_text(content: dict[str, Any]) -> bytes:
    """The one form of an index that its checksum is made of."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


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
    return header.tobuf(tarfile.USTAR_FORMAT), data, bytes(-len(data) % tarfile.BLOCKSIZE)


def hash_file(path: str | Path) -> tuple[int, str]:
    """The size of a file in bytes, and its XXH3-64 in hexadecimal."""
    state, offset = xxhash.xxh3_64(), 0
    with DriveFile(path) as file:
        while piece := file.pread(_PIECE_BYTES, offset):
            state.update(piece)
            offset += len(piece)
    return offset, state.hexdigest()


def remove_leftovers(folder: Path) -> None:
    """Remove the temporary files of processes that were killed, here or on a machine that is gone."""
    for path in folder.glob(".*.part"):
        if (match := _PART.fullmatch(path.name)) and not psutil.pid_exists(int(match[1])):
            path.unlink(missing_ok=True)


@contextmanager
def hold_folder(folder: Path) -> Iterator[None]:
    """Lock ``folder``: no other process writes into it while the block runs. The folder is made if need be.

    What killed writers left half-written goes before the block, and what the block leaves so, after it.

    On this machine the lock is the system's, on a file in the folder for temporary files: it ends with its process.
    Other machines see the file ``writer.txt``, which its writer touches every 30 seconds; when it has not for 100
    seconds, its session has ended. (Drive shows another machine's files with a delay, so two machines that start within
    seconds of each other can both get in.)

    Raises:
        ColabUtilsError: if another process writes there, or the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with hold_folder(folder), hold_folder(folder):
        ...     pass
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected no other writer in ..., found one ...
    """
    require_linux("lock a folder")
    path, made, done, retries = folder / WRITER_NAME, not folder.exists(), threading.Event(), Retries()
    call = explain_write(folder)

    def begin() -> None:
        write_file(path, f"process {os.getpid()} on {os.uname().nodename}\n{_find_host()}\n{os.getpid()}\n".encode())
        remove_leftovers(folder)

    def touch() -> None:
        while not done.wait(_TOUCH_S):
            with suppress(OSError):  # the work itself meets the error too
                os.utime(path)

    retries.run(partial(call(folder.mkdir), parents=True, exist_ok=True))
    with _lock_here(folder) as is_free:
        retries.run(partial(call(_refuse_writer), path, is_locked=not is_free))
        try:
            retries.run(call(begin))
            threading.Thread(target=touch, name="writer", daemon=True).start()
            yield
        finally:
            done.set()
            with suppress(OSError):
                remove_leftovers(folder)
                path.unlink(missing_ok=True)
                if made:
                    folder.rmdir()  # if it stayed empty


@contextmanager
def _lock_here(folder: Path) -> Iterator[bool]:
    """The lock of a folder among the processes of this machine; gives whether it was to be had."""
    import fcntl

    place = hash_bytes(os.fsencode(os.path.realpath(folder)))
    with open(Path(gettempdir(), f"colab_utils-{os.getuid()}-{place}.lock"), "ab") as file:
        register_after_fork(file, type(file).close)  # or the workers of a killed process would go on holding it
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True


def _refuse_writer(path: Path, *, is_locked: bool) -> None:
    """Refuse a folder that somebody writes into: a process on this machine where ``is_locked``, else one elsewhere.

    Raises:
        ColabUtilsError: if there is a writer, which it names.
    """
    writer, host, pid, silent_s = "", "", "", math.inf
    with suppress(FileNotFoundError), open_file(path) as file:
        writer, host, pid, *_ = (file.read(200).decode(errors="replace") + "\n\n").split("\n")
        silent_s = time() - os.fstat(file.fileno()).st_mtime
    # the lock is found by the folder's path; the same folder may be mounted at two of them
    is_alive = host != _find_host() or (pid.isdecimal() and psutil.pid_exists(int(pid[:9])))
    if is_locked or (silent_s < _SILENT_S and is_alive):
        raise ColabUtilsError(
            f"expected no other writer in {path.parent}, found one at work there ({writer!r}). Let it end, or stop it "
            f"and run the same: it continues. (On another machine it counts as gone after {_SILENT_S:.0f} seconds.)"
        )


def _find_host() -> str:
    """This machine since it was started, and this user: Colab gives many machines one name."""
    return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.getuid()}"
