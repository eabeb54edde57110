"""Read and write the index of a folder of shards, which says what the folder holds."""

import dataclasses
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, get_args

from colab_utils.errors import DAMAGE, ColabUtilsError, explain_os_error
from colab_utils.files import hash_bytes, open_store, parse_file
from colab_utils.places import Place, open_place

FORMAT_NAME = "colab_utils shards"

FORMAT_VERSION = 2

INDEX_NAME = "index.json"

TRAIN_INDEX_NAME = "train-index.json"
"""The index by which RF-DETR reads the same shards."""

Storage = Literal["keep", "shrink"]
"""How a shard stores images: "keep" keeps their size, and "shrink" shrinks the larger ones once."""

_TAR_NAME = re.compile(r"shard-[0-9]{6,12}\.tar")


@dataclass(frozen=True)
class SkippedImage:
    """An image that was left out, and why."""

    file_name: str
    reason: str


@dataclass(frozen=True)
class ShardInfo:
    """The index's entry for one shard. Sizes are in bytes, checksums are XXH3-64 in hexadecimal."""

    name: str
    images: int
    annotations: int
    bytes: int
    xxh3_64: str
    arrays_name: str
    arrays_bytes: int
    arrays_xxh3_64: str
    tables_xxh3_64: str
    """Checksum of the tables: the arrays file without the bits of the masks. A loader reads the
    tables first. They hold the checksums of the bits.
    """

    def files(self) -> tuple[tuple[str, int, str], ...]:
        """Return (file name, bytes, checksum) of the tar and of its arrays."""
        return (
            (self.name, self.bytes, self.xxh3_64),
            (self.arrays_name, self.arrays_bytes, self.arrays_xxh3_64),
        )


@dataclass(frozen=True)
class ShardIndex:
    """What a folder of shards holds. If ``partial``, it lists only some shards of the dataset."""

    fingerprint: str
    """XXH3-128 of the annotations file that the shards were made from."""
    recipe: dict[str, Any]
    """The settings of the shards. ``storage``, ``min_size`` and ``max_size`` (pixels) tell how an
    image is stored. With ``reduced_decode``, a JPEG of at least twice its stored size was decoded
    at 1/2, 1/4 or 1/8 of its size; recipes of older versions do not have it. ``shard_mb``,
    ``images_per_shard`` and ``ramp_mb`` (target sizes of the first shards, in MB) tell how many
    images a shard holds. ``seed`` gives the random order of the images. Without a seed, the images
    have the order of the annotations.
    """
    categories: tuple[dict[str, Any], ...]
    """Each category's ``id`` and ``name``."""
    shards: tuple[ShardInfo, ...]
    skipped: tuple[SkippedImage, ...] = ()
    partial: bool = False
    faults: dict[str, int] = dataclasses.field(default_factory=dict)
    """Number of objects that would be trained wrongly, or not at all, by kind of defect. If there
    is no such object, ``index.json`` lacks this entry.
    """

    @property
    def images(self) -> int:
        """Return the number of images in all shards."""
        return sum(shard.images for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Return the bytes of all shards."""
        return sum(shard.bytes + shard.arrays_bytes for shard in self.shards)

    def files(self) -> Iterator[tuple[str, int, str]]:
        """Yield (file name, bytes, checksum) of every data file, shard by shard."""
        for shard in self.shards:
            yield from shard.files()


def read_index(folder: str | Place) -> ShardIndex:
    """Read ``index.json`` of a folder of shards. The folder may be a URL; see `find_index`.

    Raises:
        ColabUtilsError: if there is no folder or no index, or it cannot be read.
    """
    folder = open_place(folder)
    index = find_index(folder)
    if index is not None:
        return index
    raise ColabUtilsError(
        f"There are no shards in {folder}, or they are not finished. Run preprocess (or copy) "
        "first, or wait until it has ended: if it was interrupted, it continues where it stopped."
    )


def find_index(folder: Place) -> ShardIndex | None:
    """Read ``index.json`` of a folder of shards; return None if there is none.

    A damaged index is refused only after two reads gave the same bytes.

    Raises:
        ColabUtilsError: if the index cannot be read, it was changed since it was written, or
            another version wrote it.
    """
    path = folder / INDEX_NAME
    read = partial(open_store(folder).read, INDEX_NAME)
    try:
        with explain_read(path):
            return parse_file(path, read, lambda content: _parse_index(json.loads(content), folder))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except DAMAGE as error:
        raise ColabUtilsError(
            f"The index in {path} was changed since it was written: {error!s:.100}. Copy the "
            "folder again, or delete index.json and run preprocess again: finished shards stay."
        ) from None


@contextmanager
def explain_read(path: Place) -> Iterator[None]:
    """Turn an error of reading a file or a folder into a `ColabUtilsError` that says what to do.

    A file or a folder that is missing raises its own error. The block reads by a store, which tells
    that Drive or a server was lost.
    """
    try:
        yield
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        reason = explain_os_error(error, "Make it readable.")
        raise ColabUtilsError(f"{path} cannot be read: {reason}") from None


def _parse_index(raw: Any, folder: Place) -> ShardIndex:
    """Make the index from its JSON. A checksum in the JSON shows every change.

    Raises:
        ColabUtilsError: if the JSON is not an index of shards, or another version wrote it.
        KeyError, TypeError, ValueError: if the JSON was changed, or names a file outside the
            folder.
    """
    unknown = ColabUtilsError(
        f"The index in {folder} is not one of {FORMAT_NAME} that this version reads. Update "
        "colab_utils, or run preprocess again, into another folder."
    )
    is_ours = isinstance(raw, dict) and raw.get("format") == FORMAT_NAME
    if not is_ours or raw.get("format_version") != FORMAT_VERSION:
        raise unknown
    checksum = raw.pop("xxh3_64")
    if checksum != hash_bytes(_to_text(raw)):
        raise ValueError("another checksum")
    raw["shards"] = [ShardInfo(**shard) for shard in raw["shards"]]
    index = make_index(raw)
    # Any other name could lead out of the folder, or to a file of the user.
    for shard in index.shards:
        arrays_name = shard.name.replace(".tar", ".arrays")
        if not _TAR_NAME.fullmatch(shard.name) or shard.arrays_name != arrays_name:
            raise ValueError(f"files {shard.name!r} and {shard.arrays_name!r}")
    if index.recipe["storage"] not in get_args(Storage):
        raise unknown
    return index


def make_index(raw: dict[str, Any]) -> ShardIndex:
    """Return the index that the JSON of a folder, or of a shard, describes."""
    return ShardIndex(
        fingerprint=raw["fingerprint"],
        recipe=raw["recipe"],
        categories=tuple(raw["categories"]),
        shards=tuple(raw["shards"]),
        skipped=tuple(SkippedImage(**image) for image in raw["skipped"]),
        partial=raw["partial"],
        faults=raw.get("faults", {}),
    )


def write_index(folder: Place, index: ShardIndex) -> None:
    """Write ``train-index.json``, then ``index.json``, each under a temporary name first."""
    content = {
        "format": FORMAT_NAME,
        "format_version": FORMAT_VERSION,
        "images": index.images,
        "bytes": index.bytes,
        **asdict(index),
    }
    if not index.faults:
        del content["faults"]
    content["xxh3_64"] = hash_bytes(_to_text(content))
    train_content = {
        "version": 1,
        "split": "train",
        "shards": [shard.name for shard in index.shards],
        "num_samples": index.images,
        "categories": index.categories,
        # RF-DETR leaves out others that are named as a group of categories. Here none is.
        "annotated_category_ids": [category["id"] for category in index.categories],
        # Labels are the ids of categories, as those of a `ShardDataset` are.
        "category_ids": "raw",
        "samples_per_shard": [shard.images for shard in index.shards],
    }
    store = open_store(folder)
    for name, entries in ((TRAIN_INDEX_NAME, train_content), (INDEX_NAME, content)):
        store.write(name, json.dumps(entries, indent=1).encode())


def _to_text(content: dict[str, Any]) -> bytes:
    """Return the JSON of an index in the form that its checksum is computed from."""
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
