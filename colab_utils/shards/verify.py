"""Compare the files of a folder of shards with its index."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial

from colab_utils.drive import Retries, guard_drive
from colab_utils.files import hash_file
from colab_utils.places import Place, open_place
from colab_utils.progress import show_progress
from colab_utils.shards.index import read_index
from colab_utils.units import format_count

_MISSING = "is missing"


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
    folder = open_place(folder)
    retries = Retries()
    index = read_index(folder, retries)
    bad = []
    with show_progress("verify", total=index.bytes, unit="B", scale=True) as bar:
        for shard in index.shards:
            look = partial(find_fault, folder, shard.files(), retries)
            reason = retries.run(look)
            if reason.endswith(_MISSING):
                retries.find_again([folder / name for name, _, _ in shard.files()])
                reason = retries.run(look)
            if reason:
                bad.append(BadShard(shard.name, reason))
            bar.set_postfix_str(str(retries), refresh=False)
            bar.update(shard.bytes + shard.arrays_bytes)
    return VerifyReport(len(index.shards), index.images, tuple(bad))


def find_fault(
    folder: Place, files: Iterable[tuple[str, int, str]], retries: Retries | None = None
) -> str:
    """Return what is wrong with the first bad file: it is missing, or was changed, or cannot be
    read. Return "" if all files are good.
    """
    for name, size, checksum in files:
        path = folder / name
        try:
            with guard_drive(path):
                count = path.stat().st_size
                if count != size:
                    return (
                        f"{name} has {count:,} bytes, but {size:,} were written: it was cut short "
                        "or changed"
                    )
            if hash_file(path, retries)[1] != checksum:
                return f"{name} has another checksum than when it was written: its content changed"
        except FileNotFoundError:
            return f"{name} {_MISSING}"
        except OSError as error:
            return f"{name} cannot be read: {error.strerror}"
    return ""
