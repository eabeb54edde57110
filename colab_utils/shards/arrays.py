"""The flat arrays of all records of a shard. With them, a loader need not parse any JSON.

A file such as ``shard-000000.arrays`` has four parts:

1. the length of the head (eight bytes), and the XXH3-64 of the parts that follow (eight bytes)
2. the head, in JSON
3. the tables of all images and objects, one after another, each as ``numpy.save`` writes it
4. the bits of all masks, which stay on disk when the tables are loaded

The index holds a checksum of the parts 1 to 3. The tables hold checksums of each image, of its
record and of the bits of its masks. So a model trains on no byte that differs from what was
written.

The tables hold the objects that torchvision's references train on. Crowds and boxes without area
are left out. The JSON in the tar still has them.
"""

import io
import json
import math
import tarfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.masks import pack_masks
from colab_utils.errors import DAMAGE, ColabUtilsError, UnavailableError
from colab_utils.files import Store, hash_bytes
from colab_utils.places import Place
from colab_utils.shards.index import ShardIndex, ShardInfo, make_index

# The head begins after this many bytes. They hold the length of the head, and the checksum.
_START_BYTES = 16

# A file of arrays with more bytes than this is refused. The arrays of the largest shard have fewer.
_MOST_ARRAYS_BYTES = 1e10


# The bytes that ``numpy.save`` writes before a table. numpy would read them as Python code, which
# takes longer, and sometimes fails in several threads of Python 3.11.
_NPY_HEADER_BYTES = 128

IMAGE_TABLES = {
    "image_ids": "i8",
    # Height and width as stored, in pixels.
    "sizes": "2i4",
    # Offset of the image's bytes in the tar, and their number.
    "image_spans": "2i8",
    # The same of the record's JSON.
    "record_spans": "2i8",
    # Number of objects.
    "counts": "i8",
    # XXH3-64 of the image's bytes in the tar, of its masks' bits, and of its record's bytes.
    "checks": "3u8",
}
"""The type of a row of each table of images, by numpy's codes."""

OBJECT_TABLES = {
    # x0, y0, x1, y1 in pixels.
    "boxes": "4f4",
    # COCO category ids.
    "labels": "i8",
    # In square pixels.
    "areas": "f4",
    # The tight box of each mask, see `PackedMasks`.
    "crops": "4i4",
    # Number of bytes of each mask.
    "mask_bytes": "i8",
}
"""The same for the tables of objects."""

_CODES = {**IMAGE_TABLES, **OBJECT_TABLES, "mask_ends": "i8"}
# numpy would read these codes as Python code at each call, too.
_ROWS = {name: np.dtype(code) for name, code in _CODES.items()}

# The tables in the order of the file. It has where the masks end in place of ``mask_bytes``.
_IN_FILE = (
    "image_ids",
    "sizes",
    "image_spans",
    "record_spans",
    "counts",
    "boxes",
    "labels",
    "areas",
    "crops",
    "mask_ends",
    "checks",
)

ShardArrays = dict[str, Any]
"""All samples of a shard in flat arrays: the tables by name, and ``bits`` (uint8): all masks, one
bit a pixel. In arrays that were loaded, ``bits`` is the offset of the masks in the file instead.
"""


def pack_record(
    record: dict[str, Any], files: Sequence[bytes], starts: Sequence[int]
) -> ShardArrays:
    """Return the arrays of one record.

    Args:
        record: the result of `make_record`.
        files: the bytes of the image, and those of the record.
        starts: the offsets of both in the tar.
    """
    size = (record["height"], record["width"])
    objects = [annotation for annotation in record["annotations"] if not annotation["iscrowd"]]
    boxes, has_area = convert_boxes([annotation["bbox"] for annotation in objects], *size)
    objects = [*compress(objects, has_area)]
    masks = pack_masks([annotation["segmentation"] for annotation in objects])
    checked = (files[0], masks.bits, files[1])
    spans = [*zip(starts, map(len, files), strict=True)]
    rows: dict[str, Any] = {
        "image_ids": [record["image_id"]],
        "sizes": [size],
        "image_spans": spans[:1],
        "record_spans": spans[1:],
        "counts": [len(objects)],
        "checks": [[int(hash_bytes(part), 16) for part in checked]],
        "boxes": boxes[has_area],
        "labels": [annotation["category_id"] for annotation in objects],
        "areas": [annotation["area"] for annotation in objects],
        "crops": masks.crops,
        "mask_bytes": np.diff(masks.offsets),
    }
    return _make_arrays(rows, masks.bits)


def join_records(records: Iterable[ShardArrays]) -> ShardArrays:
    """Return the arrays of a shard of these records."""
    nothing = dict.fromkeys(IMAGE_TABLES | OBJECT_TABLES, ())
    parts = [_make_arrays(nothing, np.zeros(0, np.uint8)), *records]
    return {**_join_tables(parts), "bits": np.concatenate([part["bits"] for part in parts])}


def _make_arrays(rows: Mapping[str, Any], bits: NDArray[np.uint8]) -> ShardArrays:
    """Return the rows of each table as an array of its dtype and shape."""
    tables: ShardArrays = {"bits": bits}
    for name in IMAGE_TABLES | OBJECT_TABLES:
        row = _ROWS[name]
        tables[name] = np.array(rows[name], row.base).reshape(-1, *row.shape)
    return tables


def _join_tables(parts: Sequence[ShardArrays]) -> dict[str, NDArray[Any]]:
    """Return the tables of all parts, one after the other."""
    names = IMAGE_TABLES | OBJECT_TABLES
    return {name: np.concatenate([part[name] for part in parts]) for name in names}


def convert_boxes(
    boxes: Sequence[Sequence[float]], height: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Convert COCO boxes (x, y, width, height) as torchvision's references do.

    The corners are float32 and clipped to the image. A box without width or height is not kept.
    Source: ``ConvertCocoPolysToMask`` in pytorch/vision ``references/detection/coco_utils.py``.

    Returns:
        Two arrays: the corners x0, y0, x1, y1 of each box in pixels (float32 [N, 4]), and whether
        to keep the box (bool [N]).
    """
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    corners[:, 0::2] = corners[:, 0::2].clip(0, width)
    corners[:, 1::2] = corners[:, 1::2].clip(0, height)
    has_area = (corners[:, 3] > corners[:, 1]) & (corners[:, 2] > corners[:, 0])
    return corners, has_area


def dump_arrays(head: dict[str, Any], arrays: ShardArrays) -> bytes:
    """Return the content of an arrays file. ``head`` stands before the tables, in JSON."""
    file = io.BytesIO()
    mask_ends = np.append(0, arrays["mask_bytes"].cumsum())
    for name in _IN_FILE:
        np.save(file, {**arrays, "mask_ends": mask_ends}[name], allow_pickle=False)
    tables = file.getvalue()
    # The bits are not copied, because they take most of the space.
    bits = memoryview(arrays["bits"])
    sizes = {"tables_bytes": len(tables), "bits_bytes": len(bits)}
    text = json.dumps(head | sizes).encode()
    checksum = bytes.fromhex(hash_bytes(text, tables, bits))
    return b"".join((len(text).to_bytes(8, "little"), checksum, text, tables, bits))


def describe_shard(content: bytes) -> ShardIndex:
    """Return an index of the shard that the content of an arrays file describes.

    The index is ``partial``, because other shards may be missing.

    Raises:
        KeyError, OverflowError, TypeError, ValueError: if the file is damaged.
    """
    checksum = content[8:_START_BYTES]
    if bytes.fromhex(hash_bytes(content[_START_BYTES:])) != checksum:
        raise ValueError("another checksum")
    _, head = _read_head(lambda n, start: content[start : start + n])
    shard = ShardInfo(
        **{name: head[name] for name in ("name", "images", "annotations", "bytes", "xxh3_64")},
        arrays_name=head["name"].replace(".tar", ".arrays"),
        arrays_bytes=len(content),
        arrays_xxh3_64=hash_bytes(content),
        tables_xxh3_64=hash_bytes(content[: len(content) - head["bits_bytes"]]),
    )
    return make_index({**head, "categories": (), "shards": (shard,), "partial": True})


def read_shard_index(store: Store, name: str) -> ShardIndex | None:
    """Return an index of the shard that an arrays file describes; None if the file is missing or
    damaged.
    """
    try:
        content = store.read(name, most_bytes=_MOST_ARRAYS_BYTES, at_full_speed=True)
        return describe_shard(content)
    except (FileNotFoundError, *DAMAGE):
        return None


def load_arrays(store: Store, shard: ShardInfo) -> ShardArrays:
    """Load the arrays of one shard. The bits of the masks stay on disk.

    Args:
        store: the folder of the shards.
        shard: the shard's entry in the index.

    Raises:
        ColabUtilsError: if the file is damaged, or is not the one that the index lists.
    """
    path = store.locate(shard.arrays_name)
    with store.open(path) as file, _explain_damage(path):

        def pread(n: int, start: int) -> bytes:
            # A damaged head may name more bytes than the memory holds.
            return file.pread(min(n, shard.arrays_bytes), start)

        start, head = _read_head(pread)
        tables = pread(head["tables_bytes"], len(start))
        if hash_bytes(start, tables) != shard.tables_xxh3_64:
            raise ValueError("another checksum than the index has")
        bits_start = len(start) + len(tables)
        if store.stamp(path).bytes - bits_start != head["bits_bytes"]:
            raise ValueError("cut short")
        return {**_split_tables(tables, head["images"]), "bits": bits_start}


def _split_tables(data: bytes, images: int) -> ShardArrays:
    """Return the tables of an arrays file by name, as views of ``data``."""
    tables: ShardArrays = {}
    place = 0
    for name in _IN_FILE:
        rows = images
        if name not in IMAGE_TABLES:
            rows = tables["counts"].sum() + (name == "mask_ends")
        place += _NPY_HEADER_BYTES
        tables[name] = np.frombuffer(data, _ROWS[name], rows, place)
        place += tables[name].nbytes
    if place != len(data):
        raise ValueError("tables of another size")
    tables["mask_bytes"] = np.diff(tables.pop("mask_ends"))
    return tables


def rebuild_arrays(store: Store, shard: ShardInfo) -> ShardArrays:
    """Build the arrays of one shard again from its tar; see `load_arrays`.

    Raises:
        ColabUtilsError: if the tar is damaged, or is not the one that the index lists.
    """
    records = []
    with _explain_damage(store.locate(shard.name)):
        content = memoryview(store.read(shard.name, most_bytes=math.inf))
        if (len(content), hash_bytes(content)) != (shard.bytes, shard.xxh3_64):
            raise ValueError("another checksum than the index has")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as tar:
            members = tar.getmembers()
        for pair in zip(members[::2], members[1::2], strict=True):
            starts = [member.offset_data for member in pair]
            files = [bytes(content[member.offset_data :][: member.size]) for member in pair]
            record = json.loads(files[1])
            for annotation in record["annotations"]:
                rle = annotation["segmentation"]
                rle["counts"] = rle["counts"].encode()
            records.append(pack_record(record, files, starts))
        return join_records(records)


def _read_head(pread: Callable[[int, int], bytes]) -> tuple[bytes, dict[str, Any]]:
    """Return all bytes before the tables, and the head that they hold.

    Args:
        pread: takes a number of bytes and where they begin in the file, and returns them.
    """
    start = pread(_START_BYTES, 0)
    text = pread(int.from_bytes(start[:8], "little"), _START_BYTES)
    return start + text, dict(json.loads(text))


@contextmanager
def _explain_damage(path: Place) -> Iterator[None]:
    try:
        yield
    except (OSError, UnavailableError):
        raise
    except Exception as error:
        # Damaged bytes can raise errors of any type.
        reason = str(error) or type(error).__name__
        raise ColabUtilsError(
            f"The arrays in {path} are damaged ({reason:.100}). Run verify on the shards. It names "
            "the damaged files: copy these again, or delete them and run preprocess again."
        ) from None


def join_shards(shards: Sequence[ShardArrays]) -> dict[str, NDArray[Any]]:
    """Return the tables of all shards, and three more for each image.

    ``shard_of`` is the number of its shard. ``first`` is the number of its first object.
    ``bit_starts`` is where the bits of its masks begin: their offset in the arrays file of the
    shard, or in the shard's ``bits`` if these are in memory.
    """
    tables = _join_tables(shards)
    rows = [len(shard["counts"]) for shard in shards]
    tables["shard_of"] = np.repeat(np.arange(len(shards)), rows)
    tables["first"] = tables["counts"].cumsum() - tables["counts"]
    ends = np.append(0, tables["mask_bytes"].cumsum())
    starts = ends[tables["first"]]
    # The bits of a shard begin where its first image's do.
    offsets = [0 if isinstance(shard["bits"], np.ndarray) else shard["bits"] for shard in shards]
    begins = starts[np.cumsum([0, *rows[:-1]])]
    tables["bit_starts"] = starts + np.repeat(offsets - begins, rows)
    return tables
