"""The flat arrays of all records of a shard. With them, a loader need not parse any JSON.

A file such as ``shard-000000.arrays`` has four parts:

1. the length of the head (eight bytes), and the XXH3-64 of the parts that follow (eight bytes)
2. the head, in JSON
3. the tables of :class:`ShardArrays`, one after another, each as ``numpy.save`` writes it
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from itertools import compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.decoding import read_npy_header
from colab_utils.data.masks import pack_masks
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.files import Store, hash_bytes
from colab_utils.places import Place
from colab_utils.shards.index import ShardIndex, ShardInfo, make_index

# The head begins after this many bytes. They hold the length of the head, and the checksum.
_START_BYTES = 16

# Bytes of the smallest request for a part of an arrays file at a URL.
_BLOCK_BYTES = 1 << 20

# A number of bytes that is enough for the header that ``numpy.save`` writes before a table.
_NPY_HEADER_BYTES = 256


@dataclass(frozen=True, eq=False)
class ShardArrays:
    """All samples of a shard in flat arrays: I images with N objects in all."""

    image_ids: NDArray[np.int64]
    """int64 [I]."""
    sizes: NDArray[np.int32]
    """int32 [I, 2]: height and width as stored, in pixels."""
    image_spans: NDArray[np.int64]
    """int64 [I, 2]: offset of the image's bytes in the tar, and their number."""
    record_spans: NDArray[np.int64]
    """int64 [I, 2]: offset of the record's JSON in the tar, and the number of its bytes."""
    counts: NDArray[np.int64]
    """int64 [I]: number of objects of each image."""
    boxes: NDArray[np.float32]
    """float32 [N, 4]: x0, y0, x1, y1 in pixels."""
    labels: NDArray[np.int64]
    """int64 [N]: COCO category ids."""
    areas: NDArray[np.float32]
    """float32 [N], in square pixels."""
    crops: NDArray[np.int32]
    """int32 [N, 4]: each mask's tight box, see ``PackedMasks``."""
    mask_ends: NDArray[np.int64]
    """int64 [N + 1]: mask n is ``bits[mask_ends[n] : mask_ends[n + 1]]``."""
    checks: NDArray[np.uint64]
    """uint64 [I, 3]: XXH3-64 of each image's bytes in the tar, of its masks' bits, and of its
    record's bytes.
    """
    bits: NDArray[np.uint8] | int
    """uint8: all masks, one bit a pixel. In arrays that were loaded, it is the offset of the masks
    in the file instead.
    """


# The names of the tables, in the order in which the file has them.
_TABLES = [field.name for field in fields(ShardArrays) if field.name != "bits"]

IMAGE_TABLES: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "image_ids": (np.int64, ()),
    "sizes": (np.int32, (2,)),
    "counts": (np.int64, ()),
    "checks": (np.uint64, (3,)),
    "image_spans": (np.int64, (2,)),
    "record_spans": (np.int64, (2,)),
}
"""The dtype of each table of images, and the shape of a row."""

OBJECT_TABLES: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "boxes": (np.float32, (4,)),
    "labels": (np.int64, ()),
    "crops": (np.int32, (4,)),
    "areas": (np.float32, ()),
}
"""The same for the tables of objects."""

Tables = dict[str, NDArray[Any]]
"""Tables by name."""


class ArraysBuilder:
    """Collect records one by one, then build their arrays."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Any]] = {name: [] for name in IMAGE_TABLES | OBJECT_TABLES}
        self._mask_lengths: list[int] = []
        self._bits = [np.zeros(0, np.uint8)]

    def add(self, record: dict[str, Any], files: Sequence[bytes], starts: Sequence[int]) -> None:
        """Add one record.

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
            "counts": [len(objects)],
            "checks": [[int(hash_bytes(part), 16) for part in checked]],
            "image_spans": spans[:1],
            "record_spans": spans[1:],
            "boxes": boxes[has_area],
            "labels": [annotation["category_id"] for annotation in objects],
            "areas": [annotation["area"] for annotation in objects],
            "crops": masks.crops,
        }
        for name, values in rows.items():
            self._rows[name].extend(values)
        self._mask_lengths.extend(np.diff(masks.offsets))
        self._bits.append(masks.bits)

    def build(self) -> ShardArrays:
        """Return the arrays of all records added so far."""
        tables = {}
        for name, (kind, shape) in (IMAGE_TABLES | OBJECT_TABLES).items():
            tables[name] = np.array(self._rows[name], kind).reshape(-1, *shape)
        mask_ends = np.cumsum([0, *self._mask_lengths], dtype=np.int64)
        return ShardArrays(**tables, mask_ends=mask_ends, bits=np.concatenate(self._bits))


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
    for name in _TABLES:
        np.save(file, getattr(arrays, name), allow_pickle=False)
    tables = file.getvalue()
    # The bits are not copied, because they take most of the space.
    bits = memoryview(vars(arrays)["bits"])
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


def load_arrays(store: Store, shard: ShardInfo) -> ShardArrays:
    """Load the arrays of one shard. The bits of the masks stay on disk.

    Args:
        store: the folder of the shards.
        shard: the shard's entry in the index.

    Raises:
        ColabUtilsError: if the file is damaged, or is not the one that the index lists.
    """
    path = store.locate(shard.arrays_name)
    with store.open(path, block_bytes=_BLOCK_BYTES) as file, _explain_damage(path):
        size = file.find_size()

        def pread(n: int, start: int) -> bytes:
            # A damaged head may name more bytes than the memory holds.
            return file.pread(min(n, size), start)

        start, head = _read_head(pread)
        tables = pread(head["tables_bytes"], len(start))
        if hash_bytes(start, tables) != shard.tables_xxh3_64:
            raise ValueError("another checksum than the index has")
        bits_start = len(start) + len(tables)
        if size - bits_start != head["bits_bytes"]:
            raise ValueError("cut short")
        return ShardArrays(**_split_tables(tables), bits=bits_start)


def _split_tables(data: bytes) -> dict[str, Any]:
    """Return the tables of an arrays file by name, as views of ``data``."""
    tables = {}
    place = 0
    for name in _TABLES:
        header_bytes, shape, dtype = read_npy_header(data[place : place + _NPY_HEADER_BYTES])
        place += header_bytes
        table = np.frombuffer(data, dtype, math.prod(shape), place).reshape(shape)
        tables[name] = table
        place += table.nbytes
    return tables


def rebuild_arrays(store: Store, shard: ShardInfo) -> ShardArrays:
    """Build the arrays of one shard again from its tar; see `load_arrays`.

    Raises:
        ColabUtilsError: if the tar is damaged, or is not the one that the index lists.
    """
    builder = ArraysBuilder()
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
            builder.add(record, files, starts)
        return builder.build()


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


def make_tables(images: int, objects: int) -> Tables:
    """Return tables of zeros, with one row for each image, or for each object.

    They are those of ``IMAGE_TABLES`` and ``OBJECT_TABLES``, and four more. ``shard_of`` is the
    number of each image's shard. ``first`` is the number of the image's first object.
    ``bit_starts`` is where the bits of the image's masks begin: their offset in the arrays file of
    the shard, or in the shard's ``bits`` if these are in memory. ``mask_bytes`` is the number of
    bytes of each object's mask.

    Args:
        images: the number of images.
        objects: the number of rows for objects. It may be larger than the number of objects, such
            as the number of all annotations.

    Example:
        >>> make_tables(2, 5)["boxes"].shape
        (5, 4)
    """
    number = IMAGE_TABLES["counts"]
    image_tables = {**IMAGE_TABLES, "shard_of": number, "first": number, "bit_starts": number}
    object_tables = {"mask_bytes": number, **OBJECT_TABLES}
    tables = {}
    for rows, kinds in ((images, image_tables), (objects, object_tables)):
        for name, (kind, row) in kinds.items():
            tables[name] = np.zeros((rows, *row), kind)
    return tables


def join_shards(tables: Tables, shards: Iterable[ShardArrays]) -> list[Any]:
    """Fill tables from the arrays of all shards. Return the ``bits`` of each shard."""
    row = 0
    first = 0
    bits: list[Any] = []
    for shard in shards:
        rows = slice(row, row + len(shard.counts))
        objects = slice(first, first + len(shard.labels))
        starts = np.cumsum(shard.counts) - shard.counts
        for name in IMAGE_TABLES:
            tables[name][rows] = getattr(shard, name)
        tables["shard_of"][rows] = len(bits)
        tables["first"][rows] = first + starts
        tables["bit_starts"][rows] = shard.mask_ends[starts]
        if isinstance(shard.bits, int):
            tables["bit_starts"][rows] += shard.bits
        for name in OBJECT_TABLES:
            tables[name][objects] = getattr(shard, name)
        tables["mask_bytes"][objects] = np.diff(shard.mask_ends)
        bits.append(shard.bits)
        row = rows.stop
        first = objects.stop
    return bits
