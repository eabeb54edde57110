"""What a shard holds of one image, its record, and the flat arrays of all its records.

An image is kept as it is where possible, and shrunk once where it is too large. The arrays are what a loader needs to
know without parsing any JSON. ``shard-000000.arrays`` holds the length of its head (eight bytes) and the XXH3-64 of all
that follows, a head in JSON, then the arrays of :class:`ShardArrays` one after another (``numpy.save``), and last the
bits of all masks, which are not read with them. The index holds a checksum of all but these bits, and the arrays hold
those of each image, of its record and of its masks' bits: so nothing is trained on that was not compared with what was
written. The tables hold what torchvision's references train on: crowds and boxes without area are left out (both stay
in the tar's JSON).
"""

import io
import json
import math
import os
import tarfile
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
from colab_utils.drive import DriveLostError, Retries, open_file, read_file
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.format import ShardInfo, SkippedImage, hash_bytes, hash_file, split_member

Storage = Literal["keep", "shrink", "pixels"]
"""How images lie in a shard: all bytes kept, the larger ones shrunk once, or shrunk and as raw pixels."""
_JPEG_QUALITY = 95
_KEPT_KINDS, _KEPT_MODES = ("JPEG", "MPO", "PNG"), ("RGB", "L")
_PNG_DEPTH = 24  # the byte of a PNG that holds its bits per channel
_START_BYTES = 16  # before the head


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


def fit_size(height: int, width: int, *, min_size: float, max_size: float) -> tuple[int, int]:
    """The size that torchvision's Mask R-CNN resizes an image to, smaller or larger, at least a pixel.

    Source: ``_resize_image_and_masks`` in torchvision ``models/detection/transform.py``: each side times one
    scale, rounded down.

    Example:
        >>> fit_size(3000, 4000, min_size=800, max_size=1333), fit_size(480, 640, min_size=800, max_size=1333)
        ((800, 1066), (800, 1066))
    """
    scale = min(min_size / min(height, width), max_size / max(height, width))
    return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))


def plan_size(height: int, width: int, *, min_size: int, max_size: int) -> tuple[int, int]:
    """The size an image is stored at: what torchvision's Mask R-CNN would shrink it to, never larger than it is.

    Example:
        >>> plan_size(3000, 4000, min_size=800, max_size=1333), plan_size(480, 640, min_size=800, max_size=1333)
        ((800, 1066), (480, 640))
    """
    # both sides are smaller, or none is
    return min((height, width), fit_size(height, width, min_size=min_size, max_size=max_size))


def store_image(
    data: bytes, size: tuple[int, int], *, min_size: int, max_size: int, storage: Storage = "shrink"
) -> StoredImage:
    """Decode an image once to be sure that it is complete, then keep its bytes, shrink it, or store its pixels.

    JPEG and 8-bit RGB or grey PNG keep their bytes. Other kinds become 8-bit RGB PNG; what is larger than
    training needs is shrunk with an antialiased filter (to JPEG, or PNG if it was PNG).

    Args:
        data: the file's bytes.
        size: height and width that the annotations give; 0 where they give none.
        min_size: shorter side that training needs, in pixels.
        max_size: longer side that training needs, in pixels.
        storage: "shrink"; "keep" shrinks nothing; "pixels" shrinks, then stores uint8 [H, W, 3] as ``.npy``.

    Raises:
        ColabUtilsError: if the data is not a complete image, or its size is not what the annotations say.
    """
    image = open_image(data)
    kind, mode = image.format or "", image.mode
    upright = turn_upright(image, *size)
    deep = kind == "PNG" and data[_PNG_DEPTH] == 16  # Pillow reads it as 8 bits a channel, torchvision does not
    kept = upright is image and kind in _KEPT_KINDS and mode in _KEPT_MODES and not deep
    original = upright.height, upright.width
    stored = original if storage == "keep" else plan_size(*original, min_size=min_size, max_size=max_size)
    if kept and stored == original and storage != "pixels":
        return StoredImage("png" if kind == "PNG" else "jpg", data, stored, original)
    rgb, extension = to_rgb(upright), "npy" if storage == "pixels" else "png"
    if stored != original:
        rgb = rgb.resize(stored[::-1], Image.Resampling.BILINEAR, reducing_gap=3.0)
        if storage == "shrink" and kind in ("JPEG", "MPO", "WEBP"):
            extension = "jpg"
    return StoredImage(extension, _encode(rgb, extension), stored, original)


def make_record(image: dict[str, Any], annotations: list[dict[str, Any]], stored: StoredImage) -> dict[str, Any]:
    """The content of ``KEY.json``: COCO form at the stored size, each mask as compressed RLE whose counts are bytes.

    Masks are rasterised at the original size and then resized, as torchvision's transform does.

    Raises:
        ColabUtilsError: if an annotation has no usable mask or box.
    """
    size, original = stored.size, stored.original
    scale_y, scale_x = size[0] / original[0], size[1] / original[1]
    rles, scaled = [], []
    for annotation in annotations:
        (x, y, width, height), area = annotation["bbox"], annotation["area"]
        try:
            rles.append(encode_segmentation(annotation["segmentation"], *original))
        except ColabUtilsError as error:
            raise ColabUtilsError(f"annotation {annotation['id']}: {error}") from None
        box = [x * scale_x, y * scale_y, width * scale_x, height * scale_y]
        scaled.append({**annotation, "bbox": box, "area": area * scale_x * scale_y})
    if size != original:
        rles = resize_rles(rles, *size)
    return {
        "image_id": image["id"],
        "file_name": image["file_name"],
        "width": size[1],
        "height": size[0],
        "original_width": original[1],
        "original_height": original[0],
        "annotations": [{**one, "segmentation": rle} for one, rle in zip(scaled, rles, strict=True)],
    }


def dump_record(record: dict[str, Any]) -> bytes:
    """The bytes of ``KEY.json``, where the counts of RLE are text."""
    return json.dumps(record, separators=(",", ":"), default=bytes.decode).encode()


def load_record(data: bytes) -> dict[str, Any]:
    """The record of the bytes of ``KEY.json``, as `make_record` gives it."""
    record: dict[str, Any] = json.loads(data)
    for annotation in record["annotations"]:
        rle = annotation["segmentation"]
        rle["counts"] = rle["counts"].encode()
    return record


def read_image(images: Path, dataset: CocoDataset, i: int, retries: Retries | None = None) -> bytes:
    """The bytes of one image's file.

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
    """One image's sample, from the bytes of its file; a `SkippedImage` if the image or an annotation is bad.

    Raises:
        DriveLostError: if Drive went away, which tells nothing about the image.
    """
    image, size = dataset.image(i), tuple(dataset.sizes[i].tolist())
    settings = {name: recipe[name] for name in ("min_size", "max_size", "storage")}
    try:
        stored = store_image(read(), size, **settings)
        record = make_record(image, dataset.annotations(i), stored)
    except DriveLostError:
        raise
    except ColabUtilsError as error:
        return SkippedImage(image["file_name"], str(error))
    files = (stored.extension, stored.data), ("json", dump_record(record))
    return Sample(record, [split_member(f"{image['id']:012d}.{extension}", data) for extension, data in files])


def _encode(image: Image.Image, extension: str) -> bytes:
    file, image.info = io.BytesIO(), {}  # of the original file, which Pillow would write
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
    """uint64 [I, 3]: XXH3-64 of each image's bytes in the tar, of its masks' bits, and of its record's bytes."""
    bits: NDArray[np.uint8] | int
    """uint8: all masks, one bit a pixel; of arrays that were loaded, where they start in the file."""


# the tables of images and of objects; of objects' bits the lengths, which become their ends
_SPANS = [("image_spans", "i8", 2), ("record_spans", "i8", 2)]
_IMAGE = np.dtype([("image_ids", "i8"), ("sizes", "i4", 2), ("counts", "i8"), ("checks", "u8", 3), *_SPANS])
_OBJECT = np.dtype([("boxes", "f4", 4), ("labels", "i8"), ("areas", "f4"), ("crops", "i4", 4), ("mask_ends", "i8")])


class ArraysBuilder:
    """Collect records one by one, then build their arrays."""

    def __init__(self) -> None:
        self._images: list[tuple[Any, ...]] = []
        self._objects: list[tuple[Any, ...]] = []
        self._bits = [np.zeros(0, np.uint8)]

    def add(self, record: dict[str, Any], files: Sequence[bytes], starts: Sequence[int]) -> None:
        """Add a record as `make_record` gives it, the bytes of image and record, and where both start in the tar."""
        size = record["height"], record["width"]
        annotations = [annotation for annotation in record["annotations"] if not annotation["iscrowd"]]
        boxes, keep = convert_boxes([annotation["bbox"] for annotation in annotations], *size)
        kept = [annotation for annotation, kept in zip(annotations, keep.tolist(), strict=True) if kept]
        masks = pack_masks([annotation["segmentation"] for annotation in kept])
        spans = [(start, len(data)) for start, data in zip(starts, files, strict=True)]
        checks = tuple(int(hash_bytes(data), 16) for data in (files[0], masks.bits, files[1]))
        self._images.append((record["image_id"], size, len(kept), checks, *spans))
        labels, areas = ([annotation[key] for annotation in kept] for key in ("category_id", "area"))
        self._objects += zip(boxes[keep], labels, areas, masks.crops, np.diff(masks.offsets), strict=True)
        self._bits.append(masks.bits)

    def build(self) -> ShardArrays:
        """The arrays of all records added so far."""
        images, objects = np.array(self._images, _IMAGE), np.array(self._objects, _OBJECT)
        tables = {name: table[name].copy() for table in (images, objects) for name in table.dtype.names or ()}
        tables["mask_ends"] = np.concatenate([[0], np.cumsum(tables["mask_ends"])])
        return ShardArrays(**tables, bits=np.concatenate(self._bits))


def convert_boxes(
    boxes: Sequence[Sequence[float]], height: int, width: int
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """COCO boxes (x, y, width, height) as torchvision's references take them.

    Source: ``ConvertCocoPolysToMask`` in pytorch/vision ``references/detection/coco_utils.py``: corners in
    float32, clipped to the image; a box without width or height is not kept.

    Returns:
        float32 [N, 4] corners x0, y0, x1, y1 in pixels, and bool [N] which to keep.
    """
    corners = np.array(boxes, np.float32).reshape(-1, 4)
    corners[:, 2:] += corners[:, :2]
    corners[:, 0::2] = corners[:, 0::2].clip(0, width)
    corners[:, 1::2] = corners[:, 1::2].clip(0, height)
    return corners, (corners[:, 3] > corners[:, 1]) & (corners[:, 2] > corners[:, 0])


def dump_arrays(head: dict[str, Any], arrays: ShardArrays) -> bytes:
    """The content of an arrays file; ``head`` is kept as JSON in front, with the sizes of the tables and the bits."""
    file = io.BytesIO()
    for field in fields(arrays)[:-1]:
        np.save(file, getattr(arrays, field.name), allow_pickle=False)
    tables, last = file.getvalue(), memoryview(vars(arrays)["bits"])  # masks of a large photo take 200 MB: no copy
    text = json.dumps(head | {"tables_bytes": len(tables), "bits_bytes": len(last)}).encode()
    checksum = bytes.fromhex(hash_bytes(text, tables, last))
    return b"".join((len(text).to_bytes(8, "little"), checksum, text, tables, last))


def describe_shard(content: bytes) -> tuple[dict[str, Any], ShardInfo]:
    """The head of an arrays file, by its content, and its shard as an index lists it.

    Raises:
        KeyError, OverflowError, TypeError, ValueError: if the file is damaged.
    """
    if bytes.fromhex(hash_bytes(content[_START_BYTES:])) != content[8:_START_BYTES]:
        raise ValueError("another checksum")
    head = _read_head(io.BytesIO(content))[1]
    info = {name: head[name] for name in ("name", "images", "annotations", "bytes", "xxh3_64")} | {
        "arrays_name": head["name"].replace(".tar", ".arrays"),
        "arrays_bytes": len(content),
        "arrays_xxh3_64": hash_bytes(content),
        "tables_xxh3_64": hash_bytes(content[: len(content) - head["bits_bytes"]]),
    }
    return head, ShardInfo(**info)


def load_arrays(path: Path, shard: ShardInfo) -> ShardArrays:
    """The arrays of one shard, as the index has it; the bits stay on disk.

    Raises:
        ColabUtilsError: if the file is damaged, or belongs to another index.
    """
    with _explain_damage(path), open_file(path, most_bytes=math.inf) as file:
        start, head = _read_head(file)
        tables = file.read(head["tables_bytes"])
        if hash_bytes(start, tables) != shard.tables_xxh3_64:
            raise ValueError("another checksum than the index has")
        values, place = dict[str, Any](bits=file.tell()), 0
        for field in fields(ShardArrays)[:-1]:
            skip, shape, dtype = read_npy_header(tables[place : place + 256])
            values[field.name] = table = np.frombuffer(tables, dtype, math.prod(shape), place + skip).reshape(shape)
            place += skip + table.nbytes
        if os.fstat(file.fileno()).st_size - file.tell() != head["bits_bytes"]:
            raise ValueError("cut short")
        return ShardArrays(**values)


def rebuild_arrays(path: Path, shard: ShardInfo) -> ShardArrays:
    """Make the arrays of one shard again from its tar, which must have the checksum that the index has.

    Raises:
        ColabUtilsError: if the tar is damaged.
    """
    builder = ArraysBuilder()
    with _explain_damage(path):
        if hash_file(path) != (shard.bytes, shard.xxh3_64):
            raise ValueError("another checksum than the index has")
        with tarfile.open(path, "r:") as tar, open(path, "rb") as file:
            members = [(member.size, member.offset_data) for member in tar]
            for pair in zip(members[::2], members[1::2], strict=True):
                files = [os.pread(file.fileno(), size, start) for size, start in pair]
                builder.add(load_record(files[1]), files, [start for _, start in pair])
        return builder.build()


def _read_head(file: BinaryIO) -> tuple[bytes, dict[str, Any]]:
    """The bytes of the start and the head, and the head."""
    start = file.read(_START_BYTES)
    text = file.read(int.from_bytes(start[:8], "little"))
    return start + text, dict(json.loads(text))


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, DriveLostError):
        raise
    except Exception as error:  # damage fails in many ways
        found = f"a damaged file ({str(error) or type(error).__name__:.100})"
        raise ColabUtilsError(
            f"expected what preprocess wrote in {path}, found {found}. "
            "Run verify on the shards, and copy or preprocess again what it names."
        ) from None
