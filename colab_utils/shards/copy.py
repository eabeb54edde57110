"""Copy shards from Drive to this machine's disk. The index is written last."""

import math
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError, wait
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import xxhash

from colab_utils.drive import Retries, explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import (
    PieceFile,
    has_size,
    hash_bytes,
    hash_file,
    name_temporary,
    open_pieces,
    read_file,
    require_room,
    write_file,
)
from colab_utils.os_errors import explain_os_error
from colab_utils.places import Place, UrlPath, identify_place, open_place
from colab_utils.processes import pop_done
from colab_utils.progress import show_progress
from colab_utils.reader import AHEAD_BYTES, Reader
from colab_utils.shards.index import INDEX_NAME, ShardIndex, ShardInfo, read_index, write_index
from colab_utils.shards.lock import WRITER_NAME, remove_leftovers
from colab_utils.shards.verify import find_fault
from colab_utils.streams import MOST_STREAMS, require_streams
from colab_utils.units import format_bytes, format_count

COPY_STREAMS = 4
"""Number of whole files that are copied at the same time, if no better number was measured."""

RANGE_BYTES = 8_000_000
"""Size of the ranges of a large file. Each stream reads one range at a time."""

PIECE_BYTES = AHEAD_BYTES // MOST_STREAMS
"""Size of the buffer of each stream. After each buffer, the stream checks whether to stop."""

# Seconds to wait for the threads of a copy that was stopped. A read of Drive may hang for longer.
_STOP_S = 10.0
# Files take more space on a disk than the sum of their sizes: about this many times as much.
_DISK_MARGIN = 1.02


@dataclass(frozen=True)
class CopyReport:
    """Report of :func:`copy_shards`."""

    shards: int
    """Shards in the target now."""
    bytes: int
    """Bytes that were copied."""
    seconds: float
    skipped_shards: int
    """Shards that were in the target before."""
    left_out_shards: int = 0
    """Shards beyond ``limit_gb``."""

    def __str__(self) -> str:
        copied = f"{format_bytes(self.bytes)} copied in {self.seconds:.1f} s"
        text = f"{format_count(self.shards, 'shard')} in place: {copied}"
        if self.skipped_shards:
            text += f", {self.skipped_shards} were there already"
        if self.left_out_shards:
            text += f", {self.left_out_shards} left out by the limit"
        return text


def copy_shards(
    source: str | Place,
    target: str | Place,
    *,
    limit_gb: float | None = None,
    streams: int | str = "auto",
) -> CopyReport:
    """Copy a folder of shards, and compare the checksum of each file with the index.

    Many small files, or many ranges of large files, are read at the same time. At most 64 MB are in
    flight. A file gets its name only when it is complete and its checksum is right. The index is
    written last. A file that is complete in ``target`` is not copied again, so an interrupted copy
    continues. If Drive fails, the copy goes on from the byte that it had reached. If Drive goes on
    failing for 81 seconds, it ends with an error.

    Args:
        source: folder of shards, usually on Drive. It may be a URL that fsspec knows, such as
            ``s3://bucket/shards``. If the server fails, the same range is read again.
        target: folder to copy into, usually on the SSD. It is made if it does not exist. It may be
            a URL, too. Files are then read whole and sent, four at a time if ``streams`` is "auto".
        limit_gb: copy only the first shards that fit into this many GB (1e9 bytes). The index in
            ``target`` then lists only these shards and is marked ``partial``. A later copy without
            a limit completes it.
        streams: number of reads at the same time, up to 256. "auto" measures how many ``source``
            can serve.

    Raises:
        ColabUtilsError: if ``source`` has no shards, the disk has too little space, ``target``
            holds other shards, ``streams`` is out of range, or the checksum of a file is wrong
            twice.
        DriveLostError: if Drive went away. The files that were copied stay, and the same call
            continues.

    Example:
        >>> copy_shards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no folder of shards at ...
    """
    source = open_place(source)
    target = open_place(target)
    streams = require_streams(streams)
    retries = Retries()
    index = read_index(source, retries)
    previous = read_target(source, target, index)
    chosen = _choose_shards(index, limit_gb)
    files = [file for shard in chosen for file in shard.files()]
    check_space(
        target,
        files,
        cached=is_on_drive(source),
        ahead_bytes=MOST_STREAMS * RANGE_BYTES,
    )
    with explain_write(target):
        target.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        started = perf_counter()
        copying = Copying(source, target, retries, overwrite=previous is not None)
        copied = copying.run(files, streams)
        merged = merge_index(index, previous, chosen, target)
        write_index(target, merged)
    skipped = [shard for shard in chosen if not copied & {shard.name, shard.arrays_name}]
    return CopyReport(
        shards=len(merged.shards),
        bytes=sum(size for name, size, _ in files if name in copied),
        seconds=perf_counter() - started,
        skipped_shards=len(skipped),
        left_out_shards=len(index.shards) - len(chosen),
    )


@dataclass(frozen=True)
class _Range:
    """A range of a file to copy, or a whole file."""

    name: str
    size: int
    """Bytes of the whole file."""
    checksum: str
    """Checksum of the whole file."""
    start: int = 0
    """Offset of the range's first byte in the file."""
    stop: int = 0
    """Offset at which the range ends. The last range ends one byte after the file, so that
    a file that is too long is noticed.
    """
    temporary: Path | None = None
    """The file that all ranges are written to; None if the file is copied whole."""


class Copying:
    """A copy of files from one folder to another.

    Args:
        source: the folder to copy from.
        target: the folder to copy into.
        retries: tries Drive again after errors. Its event ``stop`` ends the copy.
        overwrite: whether a damaged file in ``target`` is replaced. If not, such a file raises an
            error, because it may belong to the user.
    """

    def __init__(
        self,
        source: Place,
        target: Place,
        retries: Retries,
        *,
        overwrite: bool,
    ) -> None:
        self.source = source
        self.target = target
        self.overwrite = overwrite
        self.retries = retries
        self.stop = retries.stop
        self._lock = threading.Lock()
        self._bytes_done = Counter[str]()
        # Bytes that one request to a server asks for.
        self._block_bytes = RANGE_BYTES
        # How many ranges of each file have not been copied yet.
        self._ranges_left = Counter[str]()

    def run(self, files: list[tuple[str, int, str]], streams: int | str) -> set[str]:
        """Copy the files that are not in the target yet; return their names.

        Threads read and write. The progress bar moves in the calling thread, because a notebook
        does not show what other threads print.
        """
        if isinstance(self.target, UrlPath) and streams == "auto":
            streams = COPY_STREAMS
        total = sum(size for _, size, _ in files)
        ranges = [piece for file in files for piece in self._cut_file(*file)]
        self._ranges_left.update(piece.name for piece in ranges)
        reader = Reader(
            self._copy_range,
            place=self.source,
            streams=streams,
            retries=self.retries,
        )
        copied: set[str] = set()
        with (
            closing(reader),
            show_progress("copying shards", total=total, unit="B", scale=True) as bar,
        ):
            pending = {reading.content for reading in reader.ask(ranges)}
            try:
                while pending:
                    self._block_bytes = min(RANGE_BYTES, AHEAD_BYTES // reader.streams)
                    names = {content.result() for content in pop_done(pending)}
                    copied |= names - {""}
                    bar.set_postfix_str(str(self.retries), refresh=False)
                    bar.update(sum(list(self._bytes_done.values())) - bar.n)
            finally:
                # After an error or Ctrl-C, the other threads end after their next buffer.
                self.stop.set()
                wait(pending, _STOP_S)
                for piece in ranges:
                    if piece.temporary is not None:
                        piece.temporary.unlink(missing_ok=True)
        return copied

    def _cut_file(self, name: str, size: int, checksum: str) -> Iterator[_Range]:
        """Yield the ranges of a file.

        The whole file is one range if it is small, if the target has a file of this name, or if the
        target is on a server.
        """
        path = self.target / name
        if isinstance(path, UrlPath) or size <= RANGE_BYTES or path.exists():
            yield _Range(name, size, checksum)
            return
        temporary = name_temporary(path)
        for start in range(0, size, RANGE_BYTES):
            stop = start + RANGE_BYTES
            if stop >= size:
                stop = size + 1
            yield _Range(name, size, checksum, start, stop, temporary)

    def _copy_range(self, piece: _Range) -> str:
        """Copy a range; return the name of its file if no other range is missing, else ""."""
        if self.stop.is_set():
            raise CancelledError
        if piece.temporary is None:
            return self.copy_file(piece.name, piece.size, piece.checksum)
        with explain_write(self.target):
            self._transfer(piece.name, piece.start, piece.stop, piece.temporary)
            if self._count_left(piece.name):
                return ""
            if hash_file(piece.temporary) != (piece.size, piece.checksum):
                self._transfer_whole(piece.name, piece.size, piece.checksum, piece.temporary, 1)
            piece.temporary.replace(piece.temporary.with_name(piece.name))
        return piece.name

    def _count_left(self, name: str) -> int:
        """Count one more range of a file as copied; return how many are left."""
        with self._lock:
            self._ranges_left[name] -= 1
            return self._ranges_left[name]

    def copy_file(self, name: str, size: int, checksum: str) -> str:
        """Copy one file unless it is there; return its name if it was copied, else ""."""
        path = self.target / name
        files = [(name, size, checksum)]
        if not self.retries.write(self.target, find_fault, self.target, files):
            self._bytes_done[name] = size
            return ""
        self.retries.write(self.target, self._refuse_other, path)
        if isinstance(path, UrlPath):
            self._send_file(path, size, checksum)
            return name
        with explain_write(self.target):
            temporary = name_temporary(path)
            try:
                self._transfer_whole(name, size, checksum, temporary, 2)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return name

    def _send_file(self, path: Place, size: int, checksum: str) -> None:
        """Read one file whole, and send it to a server."""
        for _ in range(2):
            with self._explain_read(path.name):
                content = read_file(self.source / path.name, self.retries, most_bytes=math.inf)
            if len(content) == size and hash_bytes(content) == checksum:
                break
        else:
            raise self._explain_difference(path.name)
        if self.stop.is_set():
            raise CancelledError
        self.retries.write(self.target, write_file, path, content)
        self._bytes_done[path.name] = size

    def _refuse_other(self, path: Place) -> None:
        if path.exists() and not self.overwrite:
            raise ColabUtilsError(
                f"{self.target} holds another {path.name}. Name another folder, or delete that "
                "file if it is a damaged copy."
            )

    def _explain_difference(self, name: str) -> ColabUtilsError:
        return ColabUtilsError(
            f"{name} in {self.source} is damaged: its checksum was wrong twice. Run verify on the "
            "source, delete the damaged files that it names, and run preprocess again."
        )

    def _transfer_whole(
        self, name: str, size: int, checksum: str, temporary: Path, tries: int
    ) -> None:
        """Copy a whole file under a temporary name; try again if its checksum is wrong."""
        for _ in range(tries):
            temporary.unlink(missing_ok=True)
            self._bytes_done[name] = 0
            if self._transfer(name, 0, size + 1, temporary) == (size, checksum):
                return
        raise self._explain_difference(name)

    def _transfer(self, name: str, start: int, stop: int, temporary: Path) -> tuple[int, str]:
        """Copy the bytes from ``start`` to ``stop``; return their number and their checksum."""
        state = xxhash.xxh3_64()
        offset = start
        piece = memoryview(bytearray(PIECE_BYTES))
        temporary.touch()
        with self._open_source(name) as file, open(temporary, "r+b") as out:
            out.seek(start)
            while offset < stop:
                with self._explain_read(name):
                    count = file.readinto(piece[: stop - offset], offset)
                if not count:
                    break
                if self.stop.is_set():
                    raise CancelledError
                out.write(piece[:count])
                state.update(piece[:count])
                offset += count
                with self._lock:
                    self._bytes_done[name] += count
        return offset - start, state.hexdigest()

    def _open_source(self, name: str) -> PieceFile:
        """Open a file to copy; its ``readinto`` reads a range into a buffer."""
        with self._explain_read(name):
            return open_pieces(self.source / name, self.retries, block_bytes=self._block_bytes)

    @contextmanager
    def _explain_read(self, name: str) -> Iterator[None]:
        """Turn an error in reading a file of the source into a message that says what to do."""
        try:
            yield
        except OSError as error:
            cure = "Run verify, delete the damaged files that it names, and run preprocess again."
            raise ColabUtilsError(
                f"{name}, which {INDEX_NAME} lists, cannot be read in {self.source}: "
                f"{explain_os_error(error, cure)}"
            ) from error


def read_target(source: Place, target: Place, index: ShardIndex) -> ShardIndex | None:
    """Read the index in the target; None if there is none.

    Raises:
        ColabUtilsError: if the target is the source, a preprocess is writing into it, or it holds
            other shards than the source.
    """
    with explain_write(target):
        if identify_place(source) == identify_place(target):
            raise ColabUtilsError(f"{source} is source and target at once. Name another target.")
        if (target / WRITER_NAME).exists():
            raise ColabUtilsError(
                f"A preprocess is writing into {target}. Name another folder to copy into."
            )
        if not (target / INDEX_NAME).exists():
            return None
        previous = read_index(target)
        if not _is_copy(previous, index):
            raise ColabUtilsError(
                f"{target} holds other shards. Name another folder, or delete that one if you no "
                "longer need it."
            )
        return previous


def _is_copy(previous: ShardIndex, index: ShardIndex) -> bool:
    """Return whether two indexes are of the same data and agree on the shards that both list."""
    if previous.fingerprint != index.fingerprint or previous.recipe != index.recipe:
        return False
    if previous.categories != index.categories:
        return False
    known = {shard.name: shard for shard in index.shards}
    return all(known.get(shard.name, shard) == shard for shard in previous.shards)


def _choose_shards(index: ShardIndex, limit_gb: float | None) -> tuple[ShardInfo, ...]:
    """Return the first shards that fit into the limit; all shards if there is no limit."""
    if limit_gb is None:
        return index.shards
    ends = accumulate(shard.bytes + shard.arrays_bytes for shard in index.shards)
    chosen = [shard for shard, end in zip(index.shards, ends, strict=True) if end <= limit_gb * 1e9]
    if not chosen and index.shards:
        first = index.shards[0]
        first_gb = (first.bytes + first.arrays_bytes) / 1e9
        raise ColabUtilsError(
            f"limit_gb={limit_gb:g} is too small: the first shard takes {first_gb:.3g} GB. Raise "
            "the limit."
        )
    return tuple(chosen)


def check_space(
    target: Place, files: list[tuple[str, int, str]], *, cached: bool, ahead_bytes: int = 0
) -> None:
    """Check, before the first byte is copied, that the disk has space for the copy.

    Args:
        target: the folder to copy into.
        files: name, bytes and checksum of each file.
        cached: whether the files are read through Drive, whose cache is on this disk, too. The
            cache deletes files when the disk needs space, but not the files that are being read.
            So the copy needs more space: that of its four largest files a second time, and
            ``ahead_bytes``.
        ahead_bytes: bytes of all ranges of large files that are read at the same time.

    Raises:
        ColabUtilsError: if the disk has too little space.
    """
    sizes = sorted(size for name, size, _ in files if not has_size(target / name, size))
    needed = sum(sizes)
    if cached:
        needed += min(needed, ahead_bytes + sum(sizes[-COPY_STREAMS:]))
    require_room(
        target,
        needed * _DISK_MARGIN,
        "name a folder on a bigger disk, copy a part of the shards (copy --limit-gb), or read them "
        "where they are (train --shards without --ssd)",
    )


def merge_index(
    index: ShardIndex, previous: ShardIndex | None, chosen: tuple[ShardInfo, ...], target: Place
) -> ShardIndex:
    """Return the new index of the target: the chosen shards, and sound shards of earlier copies."""
    shards = list(chosen)
    full = index
    if previous is not None:
        rest = [shard for shard in previous.shards if shard not in chosen]
        shards += [shard for shard in rest if not find_fault(target, shard.files())]
        if not previous.partial:
            full = previous
    shards.sort(key=lambda shard: shard.name)
    is_partial = full.partial or len(shards) < len(full.shards)
    return replace(full, shards=tuple(shards), partial=is_partial)
