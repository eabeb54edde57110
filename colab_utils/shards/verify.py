"""Compare the files of a folder of shards with its index."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from functools import partial

from colab_utils.files import Store, open_store
from colab_utils.places import Place
from colab_utils.progress import show_progress
from colab_utils.reader import Reader
from colab_utils.shards.index import ShardInfo, read_index
from colab_utils.units import format_count

_MISSING = "is missing"
# On a bad day, it takes 0.6 s until the first byte of a file comes. So shards are read so many at
# once.
_STREAMS = 4


@dataclass(frozen=True)
class BadShard:
    """A shard that differs from its entry in the index, and why."""

    shard: str
    reason: str


@dataclass(frozen=True)
class VerifyReport:
    """Report of :func:`verify_shards`; the shards are complete when ``bad`` is empty."""

    shards: int
    images: int
    bad: tuple[BadShard, ...]

    def __str__(self) -> str:
        state = f"{len(self.bad)} bad" if self.bad else "all complete"
        shards = format_count(self.shards, "shard")
        return f"{shards}, {format_count(self.images, 'image')}: {state}"


def verify_shards(folder: str | Place) -> VerifyReport:
    """Read every file of a folder of shards and compare its size and checksum with the index.

    The folder may be a URL that fsspec knows, such as ``s3://bucket/shards``.

    Raises:
        ColabUtilsError: if there is no folder or no index, or the index was changed or is of
            another version.
        DriveLostError: if Drive went away and did not come back. Nothing was changed.

    Example:
        >>> verify_shards("no/such/folder")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no folder of shards at ...
    """
    store = open_store(folder)
    index = read_index(store.place)
    reader = Reader(partial(_check_shard, store), store, streams=_STREAMS)
    bad = []
    with (
        closing(reader),
        # After an error or Ctrl-C, the threads end after their shard, and are not waited for.
        closing(reader.read_as_done(index.shards, patience_s=0)) as rounds,
        show_progress("verify", total=index.bytes, unit="B", scale=True) as bar,
    ):
        for checked in rounds:
            for shard, reason in checked:
                if reason:
                    bad.append(BadShard(shard.name, reason))
                bar.update(shard.bytes + shard.arrays_bytes)
            bar.set_postfix_str(str(store.retries), refresh=False)
    bad.sort(key=lambda shard: shard.shard)
    return VerifyReport(len(index.shards), index.images, tuple(bad))


def _check_shard(store: Store, shard: ShardInfo) -> tuple[ShardInfo, str]:
    """Return a shard, and what is wrong with it, or "". A missing file is looked for again."""
    reason = find_fault(store, shard.files())
    if reason.endswith(_MISSING):
        store.find_again(name for name, _, _ in shard.files())
        reason = find_fault(store, shard.files())
    return shard, reason


def find_fault(store: Store, files: Iterable[tuple[str, int, str]]) -> str:
    """Return what is wrong with the first bad file: it is missing, or was changed, or cannot be
    read. Return "" if all files are good.
    """
    for name, size, checksum in files:
        try:
            count = store.stamp(name).bytes
            if count < 0:
                return f"{name} {_MISSING}"
            if count != size:
                return (
                    f"{name} has {count:,} bytes, but {size:,} were written: it was cut short or "
                    "changed"
                )
            if store.hash(name)[1] != checksum:
                return f"{name} has another checksum than when it was written: its content changed"
        except FileNotFoundError:
            return f"{name} {_MISSING}"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""
