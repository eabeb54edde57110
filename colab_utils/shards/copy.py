"""Copy shards from Drive to this machine's disk. The index is written last."""

import threading
from collections import Counter
from collections.abc import Collection, Generator, Iterator
from concurrent.futures import CancelledError
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import Any

import xxhash

from colab_utils.drive import explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError, explain_os_error
from colab_utils.files import open_store
from colab_utils.places import Place, identify_place, open_place
from colab_utils.progress import show_progress
from colab_utils.reader import Reader
from colab_utils.shards.index import (
    INDEX_NAME,
    ShardIndex,
    ShardInfo,
    find_index,
    read_index,
    write_index,
)
from colab_utils.shards.lock import find_writer, remove_leftovers
from colab_utils.shards.verify import find_fault
from colab_utils.streams import require_streams
from colab_utils.units import format_bytes, format_count

COPY_STREAMS = 4
"""Number of shards that are copied at the same time where nothing measures a better number."""

# Size of the buffer of each stream. After each buffer, the stream checks whether to stop. Each
# request to a server takes time, so the buffers are large.
_PIECE_BYTES = 2_000_000
# Copies that are under way at the same time, if their number is measured. Drive's cache keeps a
# second copy of their files, and so does the memory if the target is a server. A file has 128 MB or
# less unless you ask for larger ones.
_MOST_COPIES = 16
_UNDER_WAY_BYTES = 2_000_000_000
# Seconds to wait for the threads of a copy that was stopped. A read of Drive may hang for longer.
_STOP_S = 5.0
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
            a URL, too. Then each file is held in memory until it is sent.
        streams: number of files that are read at the same time, up to 256. "auto" measures how
            many ``source`` can serve, up to 16.

    Raises:
        ColabUtilsError: if ``source`` has no shards, the disk has too little space, ``target``
            holds other shards, ``streams`` is out of range, or the checksum of a file is wrong
            twice.
        DriveLostError: if Drive went away. The files that were copied stay, and the same call
            continues.

    Example:
        >>> copy_shards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There are no shards in ...
    """
    source = open_place(source)
    target = open_place(target)
    streams = require_streams(streams)
    index = read_index(source)
    if find_writer(open_store(target)):
        raise ColabUtilsError(
            f"A preprocess is writing into {target}. Name another folder to copy into."
        )
    started = perf_counter()
    copying = prepare_copy(source, target, index)
    copied: dict[str, int] = {}
    with (
        closing(copying.run(index.shards, streams)) as rounds,
        # A notebook does not show what other threads print.
        show_progress("copying shards", total=index.bytes, unit="B", scale=True) as bar,
    ):
        for shards in rounds:
            copied.update(shards)
            bar.set_postfix_str(copying.source.tell_failures(), refresh=False)
            bar.update(sum(list(copying.bytes_done.values())) - bar.n)
    with explain_write(target):
        write_index(target, index)
    return CopyReport(
        shards=len(index.shards),
        bytes=sum(copied.values()),
        seconds=perf_counter() - started,
        skipped_shards=[*copied.values()].count(0),
    )


class _WrongBytesError(ColabUtilsError):
    """The checksum of a file that was read is not that of the index."""


class Copying:
    """A copy of shards from one folder to another.

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
        # The bytes of each file in the target, with those of files that are under way.
        self.bytes_done = Counter[str]()

    def run(
        self, shards: Collection[ShardInfo], streams: int | str = "auto"
    ) -> Generator[list[tuple[str, int]], None, None]:
        """Copy shards by several threads. Yield the results of `copy_shard` as they come.

        Close this generator. After an error or Ctrl-C, the threads end after their next buffer.
        """
        with explain_write(self.target.place):
            remove_leftovers(self.target)
        reader = Reader(self.copy_shard, self.source, streams=streams, most_streams=_MOST_COPIES)
        with closing(reader), closing(reader.read_as_done(shards, patience_s=_STOP_S)) as rounds:
            yield from rounds

    def copy_shard(self, shard: ShardInfo) -> tuple[str, int]:
        """Copy what the target lacks of a shard; return its name and the bytes that were copied.

        Arrays come first, because a tar alone does not show its dataset. A folder that holds only
        tars belongs to somebody else.
        """
        return shard.name, sum(self.copy_file(*file) for file in reversed(shard.files()))

    def copy_file(self, name: str, size: int, checksum: str) -> int:
        """Copy one file unless it is there; return the bytes that were copied."""
        if self.stop.is_set():
            raise CancelledError
        with explain_write(self.target.place):
            if not find_fault(self.target, [(name, size, checksum)]):
                self.bytes_done[name] = size
                return 0
            if not self.overwrite and self.target.find_kind(name):
                raise ColabUtilsError(
                    f"{self.target.place} holds another {name}. Name another folder, or delete "
                    "that file if it is a damaged copy."
                )
        # The target may be on Drive, too.
        transfer = partial(
            self.target.attempt,
            self.target.place,
            partial(self._transfer, name, size, checksum),
        )
        try:
            transfer()
        except _WrongBytesError:
            # Drive gives wrong bytes at times.
            transfer()
        return size

    def _transfer(self, name: str, size: int, checksum: str) -> None:
        """Copy the bytes of a file, and compare their checksum before the file gets its name."""
        state = xxhash.xxh3_64()
        self.bytes_done[name] = 0
        with explain_write(self.target.place), self.target.create(name) as out:
            for piece in self._read_pieces(name, size):
                out.write(piece)
                state.update(piece)
                self.bytes_done[name] += len(piece)
            if (self.bytes_done[name], state.hexdigest()) != (size, checksum):
                raise _WrongBytesError(
                    f"{name} in {self.source.place} is damaged: its checksum was wrong twice. Run "
                    "verify on the source, delete the damaged files that it names, and run "
                    "preprocess again."
                )

    def _read_pieces(self, name: str, size: int) -> Iterator[memoryview]:
        """Yield the bytes of a file, in a buffer that is filled again and again.

        One byte more than the file should have shows a file that is too long.
        """
        piece = memoryview(bytearray(_PIECE_BYTES))
        offset = 0
        try:
            with self.source.open(name) as file:
                while offset <= size:
                    if self.stop.is_set():
                        raise CancelledError
                    count = file.readinto(piece[: size + 1 - offset], offset)
                    if not count:
                        return
                    yield piece[:count]
                    offset += count
        except OSError as error:
            cure = "Run verify, delete the damaged files that it names, and run preprocess again."
            raise ColabUtilsError(
                f"{name}, which {INDEX_NAME} lists, cannot be read in {self.source.place}: "
                f"{explain_os_error(error, cure)}"
            ) from error


def prepare_copy(source: Place, target: Place, index: ShardIndex) -> Copying:
    """Check that a folder can take the shards of an index, before the first byte is copied.

    Drive's cache is on the same disk as the target. It deletes files when the disk needs space, but
    not those that are being read. So a copy from Drive needs space for these, too.

    Raises:
        ColabUtilsError: if the target is the source, it holds other shards, or the disk has too
            little space.
    """
    store = open_store(target)
    with explain_write(target):
        if identify_place(source) == identify_place(target):
            raise ColabUtilsError(f"{source} is source and target at once. Name another target.")
        previous = find_index(target)
        if previous not in (None, index):
            raise ColabUtilsError(
                f"{target} holds other shards. Name another folder, or delete that one if you no "
                "longer need it."
            )
        needed = sum(size for name, size, _ in index.files() if store.stamp(name).bytes != size)
    if is_on_drive(source):
        needed += min(needed, _UNDER_WAY_BYTES)
    store.require_room(
        needed * _DISK_MARGIN,
        "name a folder on a bigger disk, or read the shards where they are (train --shards without "
        "--ssd)",
    )
    with explain_write(target):
        store.make()
    return Copying(source, target, overwrite=previous is not None)
