"""What a folder of shards holds, and whether its files are as they were written."""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from colab_utils.errors import ColabUtilsError
from colab_utils.files import Store, open_store
from colab_utils.places import Place, open_place
from colab_utils.progress import show_progress
from colab_utils.reader import Reader
from colab_utils.shards.arrays import read_shard_index
from colab_utils.shards.index import (
    TRAIN_INDEX_NAME,
    ShardIndex,
    ShardInfo,
    explain_read,
    find_index,
    read_index,
)
from colab_utils.units import format_count

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


def inspect_folder(folder: str | Place) -> ShardIndex | None:
    """Look which shards a folder holds, without looking at each of them.

    Return the index; None if there are no shards. If no index is written yet, it is that of one
    shard, and ``partial``: its fingerprint and its recipe are those of all shards.

    Raises:
        ColabUtilsError: if the folder cannot be read, it holds tars that no index describes, or its
            index is damaged.

    Example:
        >>> inspect_folder("no/such/folder")
    """
    store = open_store(open_place(folder))
    with explain_read(store.place):
        index = find_index(store.place)
        if index is not None:
            return index
        # The arrays of each shard hold the fingerprint and the recipe of all shards.
        for name in store.list_names("shard-*.arrays"):
            shard = read_shard_index(store, name)
            if shard is not None:
                return shard
        if store.list_names("shard-*.tar") + store.list_names(TRAIN_INDEX_NAME):
            raise ColabUtilsError(
                f"{store.place} holds shards without an index, or the index of another program. "
                "Name another folder."
            )
    return None


def find_begun(folder: Place, fingerprint: str, recipe: dict[str, Any]) -> ShardIndex | None:
    """Return what `inspect_folder` does for a folder of shards to write.

    Raises:
        ColabUtilsError: if the shards there are of another dataset than ``fingerprint`` tells, or
            made with other settings than the recipe has.
    """
    index = inspect_folder(folder)
    if index is None:
        return None
    names = [name for name in recipe if index.recipe.get(name) != recipe[name]]
    difference = f"made with other settings ({', '.join(names)})"
    if index.fingerprint != fingerprint:
        difference = "of another dataset"
    elif not names:
        return index
    raise ColabUtilsError(
        f"{folder} holds shards {difference}. Name another folder (in a notebook: "
        "DRIVE_FOLDER), or delete these."
    )


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
        colab_utils.errors.ColabUtilsError: There are no shards in ...
    """
    store = open_store(folder)
    index = read_index(store.place)

    def check(shard: ShardInfo) -> tuple[ShardInfo, str]:
        # Drive may not show a file for a while.
        store.find_again(name for name, _, _ in shard.files())
        return shard, find_fault(store, shard.files())

    reader = Reader(check, store, streams=_STREAMS)
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
            bar.set_postfix_str(store.tell_failures(), refresh=False)
    bad.sort(key=lambda shard: shard.shard)
    return VerifyReport(len(index.shards), index.images, tuple(bad))


def find_fault(store: Store, files: Iterable[tuple[str, int, str]]) -> str:
    """Return what is wrong with the first bad file: it is missing, or was changed, or cannot be
    read. Return "" if all files are good.
    """
    for name, size, checksum in files:
        try:
            count = store.stamp(name).bytes
            if count < 0:
                return f"{name} is missing"
            # Drive gives wrong bytes at times.
            if count != size or all(store.hash(name)[1] != checksum for _ in range(2)):
                return f"{name} is not as it was written: it was cut short or changed"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""
