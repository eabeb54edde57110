"""Images and records as a shard stores them, and the flat arrays of all its records.

An image is kept as it is where possible, and shrunk once where it is too large. The arrays are what
a loader needs to know without parsing any JSON. ``shard-000000.arrays`` holds the length of its
head (eight bytes) and the XXH3-64 of all that follows, a head in JSON, then the arrays of
:class:`ShardArrays` one after another (``numpy.save``), and last the bits of all masks, which are
not read with them. The index holds a checksum of all but these bits, and the arrays hold those of
each image, of its record and of its masks' bits: so nothing is trained on that was not compared
with what was written. The tables hold what torchvision's references train on: crowds and boxes
without area are left out (both stay in the tar's JSON).
"""

import io
import json
import math
import os
import tarfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from colab_utils.data.coco import CocoDataset
from colab_utils.data.decoding import open_image, read_npy_header, to_rgb, turn_upright
from colab_utils.data.masks import encode_segmentation, pack_masks, resize_rles
from colab_utils.data.object_checks import count_faults
from colab_utils.data.sizes import plan_size
from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import hash_bytes, open_file, read_file
from colab_utils.shards.format import ShardInfo, SkippedImage, hash_file, split_member

Storage = Literal["keep", "shrink", "pixels"]
"""How images lie in a shard: all bytes kept, the larger ones shrunk once, or shrunk and as raw
pixels.
"""
_JPEG_QUALITY = 95
_KEPT_KINDS = ("JPEG", "MPO", "PNG")
_KEPT_MODES = ("RGB", "L")
# The byte of a PNG that holds its bits a channel.
_PNG_DEPTH = 24
# What lies before the head of an arrays file: its length, and a checksum.
_START_BYTES = 16
# Enough of a table to hold its header.
_NPY_HEADER_BYTES = 256


class StoredImage(NamedTuple):
    """An image as it goes into a shard; sizes are height and width in pixels."""

    extension: str
    data: bytes
    size: tuple[int, int]
    original: tuple[int, int]


class Sample(NamedTuple):
    """One image as it goes into a shard."""

    record: dict[str, Any]
    """As `make_record` gives it."""
    members: list[tuple[bytes, bytes, bytes]]
    """Those of the tar, the image and its record: each as header, data and padding."""
    faults: Counter[str]
    """Objects that are trained wrongly, or not at all, by their kind: see `count_faults`."""


def store_image(
    data: bytes, size: tuple[int, int], *, min_size: int, max_size: int, storage: Storage = "shrink"
) -> StoredImage:
    """Decode an image once to be sure that it is complete, then keep its bytes, shrink it, or store
    its pixels.

    JPEG and 8-bit RGB or grey PNG keep their bytes. Other kinds become 8-bit RGB PNG; what is
    larger than training needs is shrunk with an antialiased filter (to JPEG, or PNG if it was PNG).

    Args:
        data: the file's bytes.
        size: height and width that the annotations give; 0 where they give none.
        min_size: shorter side that training needs, in pixels.
        max_size: longer side that training needs, in pixels.
        storage: "shrink"; "keep" shrinks nothing; "pixels" shrinks, then stores uint8 [H, W, 3] as
            ``.npy``.

    Raises:
        ColabUtilsError: if the data is not a complete image, or its size is not what the
            annotations say.
    """
    image = open_image(data)
    kind = image.format or ""
    mode = image.mode
    upright = turn_upright(image, *size)
    original = (upright.height, upright.width)
    stored = original
    if storage != "keep":
        stored = plan_size(*original, min_size=min_size, max_size=max_size)
    # Pillow reads 16 bits a channel as 8, torchvision does not.
    is_deep = kind == "PNG" and data[_PNG_DEPTH] == 16
    is_kept = upright is image and kind in _KEPT_KINDS and mode in _KEPT_MODES and not is_deep
    if is_kept and stored == original and storage != "pixels":
        return StoredImage("png" if kind == "PNG" else "jpg", data, stored, original)
    rgb = to_rgb(upright)
    extension = "npy" if storage == "pixels" else "png"
    if stored != original:
        rgb = rgb.resize(stored[::-1], Image.Resampling.BILINEAR, reducing_gap=3.0)
        if storage == "shrink" and kind in ("JPEG", "MPO", "WEBP"):
            extension = "jpg"
    return StoredImage(extension, _encode(rgb, extension), stored, original)


def make_record(
    image: dict[str, Any],
    annotations: list[dict[str, Any]],
    stored: StoredImage,
    faults: Counter[str] | None = None,
) -> dict[str, Any]:
    """Make the content of ``KEY.json``: COCO form at the stored size, masks as compressed RLE.

    The counts of RLE are bytes. Masks are rasterised at the original size and then resized, as
    torchvision's transform does. What `count_faults` finds is added to ``faults``.

    Raises:
        ColabUtilsError: if an annotation has no usable mask or box.
    """
    height, width = stored.size
    original_height, original_width = stored.original
    scale_y = height / original_height
    scale_x = width / original_width
    rles = []
    scaled = []
    for annotation in annotations:
        left, top, box_width, box_height = annotation["bbox"]
        area = annotation["area"]
        try:
            rle = encode_segmentation(annotation["segmentation"], original_height, original_width)
        except ColabUtilsError as error:
            raise ColabUtilsError(f"annotation {annotation['id']}: {error}") from None
        rles.append(rle)
        box = [left * scale_x, top * scale_y, box_width * scale_x, box_height * scale_y]
        scaled.append({**annotation, "bbox": box, "area": area * scale_x * scale_y})
    if faults is not None:
        faults.update(count_faults(annotations, rles))
    if stored.size != stored.original:
        rles = resize_rles(rles, height, width)
    for annotation, rle in zip(scaled, rles, strict=True):
        annotation["segmentation"] = rle
    return {
        "image_id": image["id"],
        "file_name": image["file_name"],
        "width": width,
        "height": height,
        "original_width": original_width,
        "original_height": original_height,
        "annotations": scaled,
    }


def dump_record(record: dict[str, Any]) -> bytes:
    """Return the bytes of ``KEY.json``, where the counts of RLE are text."""
    return json.dumps(record, separators=(",", ":"), default=bytes.decode).encode()


def load_record(data: bytes) -> dict[str, Any]:
    """Read the bytes of ``KEY.json`` back into a record, as `make_record` gives it."""
    record: dict[str, Any] = json.loads(data)
    for annotation in record["annotations"]:
        rle = annotation["segmentation"]
        rle["counts"] = rle["counts"].encode()
    return record


def read_image(images: Path, dataset: CocoDataset, i: int, retries: Retries | None = None) -> bytes:
    """Read the bytes of one image's file.

    Raises:
        ColabUtilsError: if the file is missing, cannot be read, or lies outside the folder.
        DriveLostError: if Drive went away.
    """
    try:
        return read_file(dataset.find_image(images, i)[0], retries)
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise ColabUtilsError("the file is missing") from None
    except OSError as error:
        raise ColabUtilsError(f"the file cannot be read: {error.strerror}") from None


def try_sample(
    read: Callable[[], bytes], dataset: CocoDataset, i: int, recipe: dict[str, Any]
) -> Sample | SkippedImage:
    """Make one image's sample; a `SkippedImage` if the image or an annotation is bad.

    Args:
        read: gives the bytes of the image's file.
        dataset: the annotations.
        i: which of their images.
        recipe: how to store it.

    Raises:
        DriveLostError: if Drive went away, which tells nothing about the image.
    """
    image = dataset.image(i)
    faults = Counter[str]()
    try:
        stored = store_image(
            read(),
            (image["height"], image["width"]),
            min_size=recipe["min_size"],
            max_size=recipe["max_size"],
            storage=recipe["storage"],
        )
        record = make_record(image, dataset.annotations(i), stored, faults)
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        return SkippedImage(image["file_name"], str(error))
    key = f"{image['id']:012d}"
    members = [
        split_member(f"{key}.{stored.extension}", stored.data),
        split_member(f"{key}.json", dump_record(record)),
    ]
    return Sample(record, members, faults)


def _encode(image: Image.Image, extension: str) -> bytes:
    file = io.BytesIO()
    # Pillow would write what the original file held beside its pixels.
    image.info = {}
    if extension == "npy":
        np.save(file, np.asarray(image))
    elif extension == "jpg":
        image.save(file, "JPEG", quality=_JPEG_QUALITY)
    else:
        image.save(file, "PNG", compress_level=1)
    return file.getvalue()


@dataclass(frozen=True, eq=False)
class ShardArrays:
    """One shard's samples in flat arrays: I images, N objects in all."""

    image_ids: NDArray[np.int64]
    """int64 [I]."""
    sizes: NDArray[np.int32]
    """int32 [I, 2]: height and width as stored, in pixels."""
    image_spans: NDArray[np.int64]
    """int64 [I, 2]: where the image's bytes start in the tar, and how many they are."""
    record_spans: NDArray[np.int64]
    """int64 [I, 2]: the same for the record's JSON."""
    counts: NDArray[np.int64]
    """int64 [I]: objects of each image."""
    boxes: NDArray[np.float32]
    """float32 [N, 4]: x0, y0, x1, y1 in pixels."""
    labels: NDArray[np.int64]
    """int64 [N]: COCO category ids."""
    areas: NDArray[np.float32]
    """float32 [N], in square pixels."""
    crops: NDArray[np.int32]
    """int32 [N, 4]: each mask's tight box, see ``PackedMasks``."""
    mask_ends: NDArray[np.int64]
    """int64 [N + 1]: offsets into ``bits``."""
    checks: NDArray[np.uint64]
    """uint64 [I, 3]: XXH3-64 of each image's bytes in the tar, of its masks' bits, and of its
    record's bytes.
    """
    bits: NDArray[np.uint8] | int
    """uint8: all masks, one bit a pixel; of arrays that were loaded, where they start in the
    file.
    """


# The type of each table of images, and how many numbers a row has (none: one number, and no list).
_IMAGE_TABLES: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "image_ids": (np.int64, ()),
    "sizes": (np.int32, (2,)),
    "counts": (np.int64, ()),
    "checks": (np.uint64, (3,)),
    "image_spans": (np.int64, (2,)),
    "record_spans": (np.int64, (2,)),
}
# The same of the tables of objects.
_OBJECT_TABLES: dict[str, tuple[type[np.generic], tuple[int, ...]]] = {
    "boxes": (np.float32, (4,)),
    "labels": (np.int64, ()),
    "areas": (np.float32, ()),
    "crops": (np.int32, (4,)),
}


class ArraysBuilder:
    """Collect records one by one, then build their arrays."""

    def __init__(self) -> None:
        self._rows: dict[str, list[Any]] = {name: [] for name in _IMAGE_TABLES | _OBJECT_TABLES}
        self._mask_lengths: list[int] = []
        self._bits = [np.zeros(0, np.uint8)]

    def add(self, record: dict[str, Any], files: Sequence[bytes], starts: Sequence[int]) -> None:
        """Add one record.

        Args:
            record: as `make_record` gives it.
            files: the bytes of its image, and those of the record.
            starts: where these start in the tar.
        """
        height = record["height"]
        width = record["width"]
        annotations = [one for one in record["annotations"] if not one["iscrowd"]]
        boxes, has_area = convert_boxes([one["bbox"] for one in annotations], height, width)
        kept = [one for one, keep in zip(annotations, has_area.tolist(), strict=True) if keep]
        masks = pack_masks([one["segmentation"] for one in kept])
        image, record_bytes = files
        image_start, record_start = starts
        checksums = [hash_bytes(image), hash_bytes(masks.bits), hash_bytes(record_bytes)]
        rows = self._rows
        rows["image_ids"].append(record["image_id"])
        rows["sizes"].append((height, width))
        rows["counts"].append(len(kept))
        rows["checks"].append([int(checksum, 16) for checksum in checksums])
        rows["image_spans"].append((image_start, len(image)))
        rows["record_spans"].append((record_start, len(record_bytes)))
        rows["boxes"].extend(boxes[has_area])
        rows["labels"].extend(one["category_id"] for one in kept)
        rows["areas"].extend(one["area"] for one in kept)
        rows["crops"].extend(masks.crops)
        self._mask_lengths.extend(np.diff(masks.offsets))
        self._bits.append(masks.bits)

    def build(self) -> ShardArrays:
        """Return the arrays of all records added so far."""
        tables = {}
        for name, (kind, shape) in (_IMAGE_TABLES | _OBJECT_TABLES).items():
            tables[name] = np.array(self._rows[name], kind).reshape(-1, *shape)
        mask_ends = np.cumsum([0, *self._mask_lengths], dtype=np.int64)
        return ShardArrays(**tables, mask_ends=mask_ends, bits=np.concatenate(self._bits))


def convert_boxes(
    boxes: Sequence[Sequence[float]], height: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return COCO boxes (x, y, width, height) as torchvision's references take them.

    Source: ``ConvertCocoPolysToMask`` in pytorch/vision ``references/detection/coco_utils.py``:
    corners in float32, clipped to the image; a box without width or height is not kept.

    Returns:
        float32 [N, 4] corners x0, y0, x1, y1 in pixels, and bool [N] which to keep.
    """
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    corners[:, 0::2] = corners[:, 0::2].clip(0, width)
    corners[:, 1::2] = corners[:, 1::2].clip(0, height)
    has_area = (corners[:, 3] > corners[:, 1]) & (corners[:, 2] > corners[:, 0])
    return corners, has_area


def dump_arrays(head: dict[str, Any], arrays: ShardArrays) -> bytes:
    """Return the content of an arrays file; ``head`` is kept as JSON in front of it."""
    file = io.BytesIO()
    for name in _list_tables():
        np.save(file, getattr(arrays, name), allow_pickle=False)
    tables = file.getvalue()
    # The masks of a large photo take 200 MB: they are not copied.
    bits = memoryview(vars(arrays)["bits"])
    sizes = {"tables_bytes": len(tables), "bits_bytes": len(bits)}
    text = json.dumps(head | sizes).encode()
    checksum = bytes.fromhex(hash_bytes(text, tables, bits))
    return b"".join((len(text).to_bytes(8, "little"), checksum, text, tables, bits))


def describe_shard(content: bytes) -> tuple[dict[str, Any], ShardInfo]:
    """Return the head of an arrays file, by its content, and its shard as an index lists it.

    Raises:
        KeyError, OverflowError, TypeError, ValueError: if the file is damaged.
    """
    checksum = content[8:_START_BYTES]
    if bytes.fromhex(hash_bytes(content[_START_BYTES:])) != checksum:
        raise ValueError("another checksum")
    _, head = _read_head(io.BytesIO(content))
    shard = ShardInfo(
        name=head["name"],
        images=head["images"],
        annotations=head["annotations"],
        bytes=head["bytes"],
        xxh3_64=head["xxh3_64"],
        arrays_name=head["name"].replace(".tar", ".arrays"),
        arrays_bytes=len(content),
        arrays_xxh3_64=hash_bytes(content),
        tables_xxh3_64=hash_bytes(content[: len(content) - head["bits_bytes"]]),
    )
    return head, shard


def load_arrays(path: Path, shard: ShardInfo) -> ShardArrays:
    """Load the arrays of one shard, as the index has it; the bits stay on disk.

    Raises:
        ColabUtilsError: if the file is damaged, or belongs to another index.
    """
    with _explain_damage(path), open_file(path, most_bytes=math.inf) as file:
        start, head = _read_head(file)
        tables = file.read(head["tables_bytes"])
        if hash_bytes(start, tables) != shard.tables_xxh3_64:
            raise ValueError("another checksum than the index has")
        bits_start = file.tell()
        if os.fstat(file.fileno()).st_size - bits_start != head["bits_bytes"]:
            raise ValueError("cut short")
        return ShardArrays(**_split_tables(tables), bits=bits_start)


def _split_tables(data: bytes) -> dict[str, Any]:
    """Return the tables of an arrays file by name: views of the bytes that hold them."""
    tables = {}
    place = 0
    for name in _list_tables():
        header_bytes, shape, dtype = read_npy_header(data[place : place + _NPY_HEADER_BYTES])
        place += header_bytes
        table = np.frombuffer(data, dtype, math.prod(shape), place).reshape(shape)
        tables[name] = table
        place += table.nbytes
    return tables


def _list_tables() -> list[str]:
    """Return the names of the tables, in the order of the file."""
    return [field.name for field in fields(ShardArrays) if field.name != "bits"]


def rebuild_arrays(path: Path, shard: ShardInfo) -> ShardArrays:
    """Make the arrays of one shard again from its tar, which must have the checksum that the index
    has.

    Raises:
        ColabUtilsError: if the tar is damaged.
    """
    builder = ArraysBuilder()
    with _explain_damage(path):
        if hash_file(path) != (shard.bytes, shard.xxh3_64):
            raise ValueError("another checksum than the index has")
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            members = tar.getmembers()
            for pair in zip(members[::2], members[1::2], strict=True):
                starts = [member.offset_data for member in pair]
                files = [
                    os.pread(file.fileno(), member.size, member.offset_data) for member in pair
                ]
                builder.add(load_record(files[1]), files, starts)
        return builder.build()


def _read_head(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """Return the bytes before the tables, and the head among them."""
    start = file.read(_START_BYTES)
    text = file.read(int.from_bytes(start[:8], "little"))
    return start + text, dict(json.loads(text))


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, DriveLostError):
        raise
    except Exception as error:
        # Damage fails in many ways.
        reason = str(error) or type(error).__name__
        raise ColabUtilsError(
            f"expected what preprocess wrote in {path}, found a damaged file ({reason:.100}). "
            "Run verify on the shards, and copy or preprocess again what it names."
        ) from None
