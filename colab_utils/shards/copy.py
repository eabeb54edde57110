"""Copy shards from Drive to this machine's disk, index last."""

import os
from concurrent.futures import CancelledError
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from time import perf_counter

import xxhash

from colab_utils.drive import Retries, explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import DriveFile, has_size, name_temporary
from colab_utils.machine import require_space
from colab_utils.os_errors import explain_os_error
from colab_utils.processes import ThreadPool, pop_done
from colab_utils.progress import show_progress
from colab_utils.require import require_local_path
from colab_utils.shards.index import INDEX_NAME, ShardIndex, ShardInfo, read_index, write_index
from colab_utils.shards.lock import WRITER_NAME, remove_leftovers
from colab_utils.shards.verify import find_fault
from colab_utils.units import format_bytes

COPY_STREAMS = 4
"""Files that are copied at the same time."""

PIECE_BYTES = 1 << 20
"""Bytes of a file between two looks at whether to stop."""

# More of the disk than the files alone take.
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
        text = f"{self.shards} shards in place: {copied}"
        if self.skipped_shards:
            text += f", {self.skipped_shards} were there already"
        if self.left_out_shards:
            text += f", {self.left_out_shards} left out by the limit"
        return text


def copy_shards(
    source: str | Path, target: str | Path, *, limit_gb: float | None = None
) -> CopyReport:
    """Copy a folder of shards, file by file, and check the checksum of each on the way.

    A file that is complete in ``target`` is not copied again, so an interrupted copy continues.
    Each file appears under its name only when it is complete; the index comes last. Where Drive
    fails, the copy goes on from the byte that it had reached; after four tries with growing waits
    (81 s in all) it ends.

    Args:
        source: folder of shards, usually on Drive.
        target: folder to copy into, usually on the SSD; it is made where it is not.
        limit_gb: copy only the first shards that fit into so many GB (1e9 bytes). The index in
            ``target`` then lists only those and is marked ``partial``; a later copy without a limit
            completes it.

    Raises:
        ColabUtilsError: no shards in ``source``, too little free disk, other shards in ``target``,
            or a file whose checksum is wrong twice.
        DriveLostError: Drive went away; what was copied stays, and the same call continues.

    Example:
        >>> copy_shards("no/such/folder", "ssd")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no folder of shards at ...
    """
    source = require_local_path(source)
    target = require_local_path(target)
    retries = Retries()
    index = read_index(source, retries)
    previous = read_target(source, target, index)
    chosen = _choose_shards(index, limit_gb)
    files = [file for shard in chosen for file in shard.files()]
    check_space(target, files, cached=is_on_drive(source))
    with explain_write(target):
        target.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        started = perf_counter()
        copying = Copying(source, target, retries, overwrite=previous is not None)
        copied = copying.run(files)
        merged = _merge(index, previous, chosen, target)
        write_index(target, merged)
    skipped = [shard for shard in chosen if not copied & {shard.name, shard.arrays_name}]
    return CopyReport(
        shards=len(merged.shards),
        bytes=sum(size for name, size, _ in files if name in copied),
        seconds=perf_counter() - started,
        skipped_shards=len(skipped),
        left_out_shards=len(index.shards) - len(chosen),
    )


class Copying:
    """One copy under way.

    Args:
        source: the folder to copy from.
        target: the folder to copy into.
        retries: how often Drive is tried again; its ``stop`` ends the copy.
        overwrite: replace damaged files, which the index in ``target`` lists.
    """

    def __init__(
        self,
        source: Path,
        target: Path,
        retries: Retries,
        *,
        overwrite: bool,
    ) -> None:
        self.source = source
        self.target = target
        self.overwrite = overwrite
        self.retries = retries
        self.stop = retries.stop
        self._bytes_done: dict[str, int] = {}

    def run(self, files: list[tuple[str, int, str]]) -> set[str]:
        """Copy what is not there yet; return the names of these files.

        The bar moves in this thread: a notebook shows nothing from others.
        """
        total = sum(size for _, size, _ in files)
        copied: set[str] = set()
        with (
            show_progress("copying shards", total=total, unit="B", scale=True) as bar,
            ThreadPool(COPY_STREAMS, thread_name_prefix="copy") as pool,
        ):
            try:
                pending = {pool.submit(self.copy_file, *file) for file in files}
                while pending:
                    names = {future.result() for future in pop_done(pending)}
                    copied |= names - {""}
                    bar.set_postfix_str(str(self.retries), refresh=False)
                    bar.update(sum(list(self._bytes_done.values())) - bar.n)
            finally:
                # On an error or Ctrl-C the other threads end at their next piece.
                self.stop.set()
                pool.shutdown(wait=False, cancel_futures=True)
        return copied

    def copy_file(self, name: str, size: int, checksum: str) -> str:
        """Copy one file unless it is there; return its name if it was copied, else ""."""
        path = self.target / name
        with explain_write(self.target):
            if not find_fault(self.target, [(name, size, checksum)]):
                self._bytes_done[name] = size
                return ""
            if path.exists() and not self.overwrite:
                raise ColabUtilsError(
                    f"{self.target} holds another {name}. Name another folder, or delete that file "
                    "if it is a damaged copy."
                )
            temporary = name_temporary(path)
            try:
                self._transfer_twice(name, size, checksum, temporary)
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)
        return name

    def _transfer_twice(self, name: str, size: int, checksum: str, temporary: Path) -> None:
        """Copy the bytes under a temporary name; once more if their checksum is wrong."""
        for _ in range(2):
            if self._transfer(name, size, temporary) == (size, checksum):
                return
        raise ColabUtilsError(
            f"{name} in {self.source} is damaged: its checksum was wrong twice. Run verify on the "
            "source, then preprocess again what it names."
        )

    def _transfer(self, name: str, size: int, temporary: Path) -> tuple[int, str]:
        """Copy the bytes, few more than ``size``; return their number and their checksum."""
        try:
            file = DriveFile(self.source / name, self.retries)
        except OSError as error:
            raise ColabUtilsError(
                f"{name} in {self.source}, which {INDEX_NAME} lists, cannot be read: "
                f"{explain_os_error(error, 'Run verify, then preprocess again what it names.')}"
            ) from error
        state = xxhash.xxh3_64()
        offset = 0
        piece = memoryview(bytearray(PIECE_BYTES))
        with file, open(temporary, "wb") as out:
            while offset <= size:
                count = file.readinto(piece, offset)
                if not count:
                    break
                if self.stop.is_set():
                    raise CancelledError
                out.write(piece[:count])
                state.update(piece[:count])
                offset += count
                self._bytes_done[name] = offset
        return offset, state.hexdigest()


def read_target(source: Path, target: Path, index: ShardIndex) -> ShardIndex | None:
    """Read the index in the target, which must be of the same shards; None where there is none.

    Raises:
        ColabUtilsError: the target is the source, is written by a preprocess, or holds other
            shards.
    """
    with explain_write(target):
        if os.path.realpath(source) == os.path.realpath(target):
            raise ColabUtilsError(
                f"Source and target are the same folder, {source}. Name another target."
            )
        if (target / WRITER_NAME).exists():
            raise ColabUtilsError(
                f"A preprocess is at work in {target}, so that nothing is copied there. Name "
                "another folder."
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
    """Return the first shards that fit into the limit; all of them without one."""
    if limit_gb is None:
        return index.shards
    ends = accumulate(shard.bytes + shard.arrays_bytes for shard in index.shards)
    chosen = [shard for shard, end in zip(index.shards, ends, strict=True) if end <= limit_gb * 1e9]
    if not chosen and index.shards:
        first = index.shards[0]
        first_gb = (first.bytes + first.arrays_bytes) / 1e9
        raise ColabUtilsError(
            f"limit_gb={limit_gb:g} holds no shard: the first one takes {first_gb:.3g} GB. Allow "
            "more, or leave limit_gb out."
        )
    return tuple(chosen)


def check_space(target: Path, files: list[tuple[str, int, str]], *, cached: bool) -> None:
    """Refuse a copy that the disk cannot hold, before its first byte.

    ``cached``: Drive keeps what is read on this disk too. Its cache gives way to what the disk
    needs, but a file only after its last byte was read: the largest files under way count twice.
    """
    sizes = sorted(size for name, size, _ in files if not has_size(target / name, size))
    needed = sum(sizes)
    if cached:
        needed += sum(sizes[-COPY_STREAMS:])
    require_space(
        target,
        needed * _DISK_MARGIN,
        "name a folder on a bigger disk, or copy a part of the shards (--limit-gb)",
    )


def _merge(
    index: ShardIndex, previous: ShardIndex | None, chosen: tuple[ShardInfo, ...], target: Path
) -> ShardIndex:
    """Return the target's new index: what was copied, and what lay there before."""
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
