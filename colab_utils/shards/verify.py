"""Verify shards: sizes and checksums of all files against the index."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path

from colab_utils.drive import DriveLostError, Retries, guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import show_progress
from colab_utils.shards.arrays import load_arrays
from colab_utils.shards.format import ShardIndex, ShardInfo, hash_file, read_index

__all__ = ["BadShard", "VerifyReport", "verify_shards"]


@dataclass(frozen=True)
class BadShard:
    """A shard that differs from its entry in the index, and why."""

    shard: str
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """What :func:`verify_shards` found; the shards are complete when ``bad`` is empty."""

    shards: int
    images: int
    bad: tuple[BadShard, ...]

    def __str__(self) -> str:
        state = f"{len(self.bad)} bad" if self.bad else "all complete"
        return f"{self.shards} shards, {self.images:,} images: {state}"


def verify_shards(folder: str | Path) -> VerifyReport:
    """Read every file of a folder of shards and compare its size and checksum with the index, as a loader does.

    Raises:
        ColabUtilsError: if there is no folder, no index, or the index is of a newer version.
        DriveLostError: if Drive went away and did not come back; nothing was changed.

    Example:
        >>> verify_shards("no/such/folder")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/folder. ...
    """
    folder, retries = Path(folder), Retries()
    index = read_index(folder, retries)
    with show_progress("verify", total=index.bytes, unit="B", scale=True) as bar:
        bad = []
        for shard in index.shards:
            reason = retries.run(partial(_check_shard, folder, shard, index))
            if reason:
                bad.append(BadShard(shard.name, reason))
            bar.set_postfix_str(str(retries), refresh=False)
            bar.update(shard.bytes + shard.arrays_bytes)
    return VerifyReport(len(index.shards), index.images, tuple(bad))


def _check_shard(folder: Path, shard: ShardInfo, index: ShardIndex) -> str:
    for name, size, checksum in shard.files():
        path = folder / name
        try:
            with guard_drive(path):
                if not path.is_file():
                    return f"{name} is missing"
                found = path.stat().st_size
                if found != size:
                    return f"{name} has {found:,} bytes where {size:,} were written: it was cut short or changed"
                if hash_file(path) != checksum:
                    return f"{name} has another checksum than when it was written: its content changed"
        except PermissionError as error:
            return f"{name} cannot be read: {error.strerror}"
    try:
        load_arrays(folder / shard.arrays_name, shard, index.categories)
    except DriveLostError:
        raise
    except ColabUtilsError as error:  # all as the index says, which somebody has changed
        return str(error)
    return ""
