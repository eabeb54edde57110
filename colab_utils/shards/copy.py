"""Copy shards from Drive to this machine's disk. The index is written last."""

import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import xxhash

from colab_utils.drive import explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError, explain_os_error
from colab_utils.files import open_store
from colab_utils.places import Place, find_server, identify_place, open_place
from colab_utils.progress import show_progress
from colab_utils.reader import AHEAD_BYTES, Reader
from colab_utils.shards.index import INDEX_NAME, ShardIndex, read_index, write_index
from colab_utils.shards.lock import WRITER_NAME, remove_leftovers
from colab_utils.shards.verify import find_fault
from colab_utils.streams import MOST_STREAMS, require_streams
from colab_utils.units import format_bytes, format_count

COPY_STREAMS = 4
"""Number of files that are copied at the same time, if no better number was measured."""

# Size of the buffer of each stream. After each buffer, the stream checks whether to stop.
_PIECE_BYTES = AHEAD_BYTES // MOST_STREAMS
# Bytes of one request to a server.
_BLOCK_BYTES = 2_000_000
# Bytes of all files that are under way, except that `COPY_STREAMS` files may always be. Drive's
# cache keeps a second copy of them.
_UNDER_WAY_BYTES = 2_000_000_000
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

    def __str__(self) -> str:
        copied = f"{format_bytes(self.bytes)} copied in {self.seconds:.1f} s"
        text = f"{format_count(self.shards, 'shard')} in place: {copied}"
        if self.skipped_shards:
            text += f", {self.skipped_shards} were there already"
        return text


def copy_shards(
    source: str | Place, target: str | Place, *, streams: int | str = "auto"
) -> CopyReport:
    """Copy a folder of shards, and compare the checksum of each file with the index.

    Many files are read at the same time. A file gets its name only when it is complete and its
    checksum is right. The index is written last. A file that is complete in ``target`` is not
    copied again, so an interrupted copy continues. If Drive fails, the copy goes on from the byte
    that it had reached. If Drive goes on failing for 81 seconds, it ends with an error.

    Args:
        source: folder of shards, usually on Drive. It may be a URL that fsspec knows, such as
            ``s3://bucket/shards``.
        target: folder to copy into, usually on the SSD. It is made if it does not exist. It may be
            a URL, too. Then four files are copied at a time if ``streams`` is "auto", because each
            is held in memory until it is sent.
        streams: number of files that are read at the same time, up to 256. "auto" measures how
            many ``source`` can serve.

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
    index = read_index(source)
    is_new = read_target(source, target, index) is None
    files = [*index.files()]
    check_space(target, files, cached=is_on_drive(source))
    started = perf_counter()
    copied = Copying(source, target, overwrite=not is_new).run(files, streams)
    with explain_write(target):
        write_index(target, index)
    skipped = [shard for shard in index.shards if not copied & {shard.name, shard.arrays_name}]
    return CopyReport(
        shards=len(index.shards),
        bytes=sum(size for name, size, _ in files if name in copied),
        seconds=perf_counter() - started,
        skipped_shards=len(skipped),
    )


class _WrongBytesError(ColabUtilsError):
    """The checksum of a file that was read is not that of the index."""


class Copying:
    """A copy of files from one folder to another.

    Args:
        source: the folder to copy from.
        target: the folder to copy into.
        overwrite: whether a damaged file in ``target`` is replaced. If not, such a file raises an
            error, because it may belong to the user.
        stop: event that ends the copy. Default: a new event.
    """

    def __init__(self, source: Place, target: Place, *, overwrite: bool, stop: Any = None) -> None:
        self.stop = stop or threading.Event()
        self.source = open_store(source, self.stop)
        self.target = open_store(target, self.stop)
        self.overwrite = overwrite
        self._bytes_done = Counter[str]()

    def run(self, files: list[tuple[str, int, str]], streams: int | str = "auto") -> set[str]:
        """Copy the files that are not in the target yet; return their names.

        Threads read and write. The progress bar moves in the calling thread, because a notebook
        does not show what other threads print.
        """
        if find_server(self.target.place) and streams == "auto":
            streams = COPY_STREAMS
        sizes = {name: size for name, size, _ in files}
        at_once = _UNDER_WAY_BYTES // max(1, *sizes.values())
        reader = Reader(
            lambda file: self.copy_file(*file),
            self.source,
            streams=streams,
            most_streams=max(COPY_STREAMS, at_once),
        )
        with explain_write(self.target.place):
            self.target.make()
            remove_leftovers(self.target)
        copied: set[str] = set()
        with (
            closing(reader),
            # After an error or Ctrl-C, the other threads end after their next buffer.
            closing(reader.read_as_done(files, patience_s=_STOP_S)) as rounds,
            show_progress("copying shards", total=sum(sizes.values()), unit="B", scale=True) as bar,
        ):
            for names in rounds:
                copied.update(names)
                bar.set_postfix_str(str(self.source.retries), refresh=False)
                bar.update(sum(list(self._bytes_done.values())) - bar.n)
        return copied - {""}

    def copy_file(self, name: str, size: int, checksum: str) -> str:
        """Copy one file unless it is there; return its name if it was copied, else ""."""
        with explain_write(self.target.place):
            if not find_fault(self.target, [(name, size, checksum)]):
                self._bytes_done[name] = size
                return ""
            if not self.overwrite and self.target.find_kind(name):
                raise ColabUtilsError(
                    f"{self.target.place} holds another {name}. Name another folder, or delete "
                    "that file if it is a damaged copy."
                )
        # The target may be on Drive, too.
        transfer = partial(self.target.retries.run, partial(self._transfer, name, size, checksum))
        try:
            transfer()
        except _WrongBytesError:
            # Drive gives wrong bytes at times.
            transfer()
        return name

    def _transfer(self, name: str, size: int, checksum: str) -> None:
        """Copy the bytes of a file, and compare their checksum before the file gets its name."""
        state = xxhash.xxh3_64()
        self._bytes_done[name] = 0
        piece = memoryview(bytearray(_PIECE_BYTES))
        with self._explain_read(name):
            source = self.source.open(name, block_bytes=_BLOCK_BYTES)
            # A file that is missing is named before the target is touched.
            source.find_size()
        with explain_write(self.target.place), source as file, self.target.create(name) as out:
            # One byte more than the file should have shows a file that is too long.
            while self._bytes_done[name] <= size:
                if self.stop.is_set():
                    raise CancelledError
                offset = self._bytes_done[name]
                with self._explain_read(name):
                    count = file.readinto(piece[: size + 1 - offset], offset)
                if not count:
                    break
                out.write(piece[:count])
                state.update(piece[:count])
                self._bytes_done[name] += count
            if (self._bytes_done[name], state.hexdigest()) != (size, checksum):
                raise _WrongBytesError(
                    f"{name} in {self.source.place} is damaged: its checksum was wrong twice. Run "
                    "verify on the source, delete the damaged files that it names, and run "
                    "preprocess again."
                )

    @contextmanager
    def _explain_read(self, name: str) -> Iterator[None]:
        """Turn an error in reading a file of the source into a message that says what to do."""
        try:
            yield
        except OSError as error:
            cure = "Run verify, delete the damaged files that it names, and run preprocess again."
            raise ColabUtilsError(
                f"{name}, which {INDEX_NAME} lists, cannot be read in {self.source.place}: "
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
        store = open_store(target)
        if store.find_kind(WRITER_NAME):
            raise ColabUtilsError(
                f"A preprocess is writing into {target}. Name another folder to copy into."
            )
        if not store.find_kind(INDEX_NAME):
            return None
        previous = read_index(target)
        if previous != index:
            raise ColabUtilsError(
                f"{target} holds other shards. Name another folder, or delete that one if you no "
                "longer need it."
            )
        return previous


def check_space(target: Place, files: list[tuple[str, int, str]], *, cached: bool) -> None:
    """Check, before the first byte is copied, that the disk has space for the copy.

    Args:
        target: the folder to copy into.
        files: name, bytes and checksum of each file.
        cached: whether the files are read through Drive, whose cache is on this disk, too. The
            cache deletes files when the disk needs space, but not the files that are being read.
            So the copy needs more space: that of the files that are under way.

    Raises:
        ColabUtilsError: if the disk has too little space.
    """
    store = open_store(target)
    sizes = sorted(size for name, size, _ in files if store.stamp(name).bytes != size)
    needed = sum(sizes)
    if cached:
        needed += min(needed, max(_UNDER_WAY_BYTES, sum(sizes[-COPY_STREAMS:])))
    store.require_room(
        needed * _DISK_MARGIN,
        "name a folder on a bigger disk, or read the shards where they are (train --shards without "
        "--ssd)",
    )
