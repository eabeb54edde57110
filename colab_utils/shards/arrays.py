"""The flat arrays of a shard: what a loader needs to know without parsing any JSON.

``shard-000000.arrays`` holds a head in JSON after eight bytes that say how long it is, then the arrays of
:class:`ShardArrays` one after another (``numpy.save``), and last the bits of all masks, which are mapped and not read.
They hold what torchvision's references train on: crowds and boxes without area are left out (both stay in the tar's
JSON).
"""

from __future__ import annotations

import errno
import io
import json
import math
import os
import tarfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.decoding import read_npy_header
from colab_utils.data.masks import PackedMasks, encode_segmentation, pack_masks
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.format import hash_bytes

__all__ = ["ArraysBuilder", "ShardArrays", "convert_boxes", "dump_arrays", "load_arrays", "read_head", "rebuild_arrays"]


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
    """uint64 [I, 2]: XXH3-64 of each image's bytes in the tar, and of its masks' bits."""
    bits: NDArray[np.uint8]
    """uint8: all masks, one bit a pixel."""


class ArraysBuilder:
    """Collect records one by one, then build their arrays."""

    def __init__(self) -> None:
        self._images: list[tuple[int, ...]] = []
        self._boxes: list[NDArray[np.float32]] = []
        self._objects: list[tuple[int, float]] = []
        self._masks: list[PackedMasks] = []
        self._checks: list[tuple[int, int]] = []

    def add(
        self, record: dict[str, Any], image: bytes, image_span: tuple[int, int], record_span: tuple[int, int]
    ) -> None:
        """Add a record as `make_record` gives it, its image's bytes, and the start and length of both in the tar."""
        height, width = record["height"], record["width"]
        annotations = [annotation for annotation in record["annotations"] if not annotation["iscrowd"]]
        boxes, keep = convert_boxes([annotation["bbox"] for annotation in annotations], height, width)
        kept = [annotation for annotation, kept in zip(annotations, keep.tolist(), strict=True) if kept]
        masks = pack_masks([annotation["segmentation"] for annotation in kept])
        self._images.append((record["image_id"], height, width, len(kept), *image_span, *record_span))
        self._boxes.append(boxes[keep])
        self._objects += [(annotation["category_id"], annotation["area"]) for annotation in kept]
        self._masks.append(masks)
        self._checks.append((int(hash_bytes(image), 16), int(hash_bytes(masks.bits), 16)))

    def build(self) -> ShardArrays:
        """The arrays of all records added so far."""
        images = np.array(self._images, np.int64).reshape(-1, 8)
        sizes = [np.diff(masks.offsets) for masks in self._masks]
        return ShardArrays(
            image_ids=images[:, 0].copy(),
            sizes=images[:, 1:3].astype(np.int32),
            image_spans=images[:, 4:6].copy(),
            record_spans=images[:, 6:8].copy(),
            counts=images[:, 3].copy(),
            boxes=np.concatenate([np.zeros((0, 4), np.float32), *self._boxes]),
            labels=np.array([category for category, _ in self._objects], np.int64),
            areas=np.array([area for _, area in self._objects], np.float32),
            crops=np.concatenate([np.zeros((0, 4), np.int32), *(masks.crops for masks in self._masks)]),
            mask_ends=np.cumsum(np.concatenate([np.zeros(1, np.int64), *sizes])),
            checks=np.array(self._checks, np.uint64).reshape(-1, 2),
            bits=np.concatenate([np.zeros(0, np.uint8), *(masks.bits for masks in self._masks)]),
        )


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
    """The content of an arrays file; ``head`` is kept as JSON in front, with sizes and a checksum of the tables."""
    *names, bits = (field.name for field in fields(arrays))
    file = io.BytesIO()
    for name in names:
        np.save(file, getattr(arrays, name), allow_pickle=False)
    tables, last = file.getvalue(), getattr(arrays, bits).tobytes()
    sizes = {"tables_bytes": len(tables), "bits_bytes": len(last), "tables_xxh3_64": hash_bytes(tables)}
    text = json.dumps(head | sizes).encode()
    return b"".join((len(text).to_bytes(8, "little"), text, tables, last))


def read_head(path: Path) -> dict[str, Any]:
    """The head of an arrays file.

    Raises:
        ColabUtilsError: if the file is damaged.
    """
    with _explain_damage(path), open(path, "rb") as file:
        return _read_head(file)


def load_arrays(path: Path) -> ShardArrays:
    """The arrays of one shard; ``bits`` stays on disk and is mapped.

    Raises:
        ColabUtilsError: if the file is damaged.
    """
    with _explain_damage(path), open(path, "rb") as file:
        head = _read_head(file)
        tables = _read(file, head["tables_bytes"])
        if hash_bytes(tables) != head["tables_xxh3_64"]:
            raise ValueError("another checksum")
        *names, bits = (field.name for field in fields(ShardArrays))
        values, place = dict[str, Any](), 0
        for name in names:
            skip, shape, dtype = read_npy_header(tables[place : place + 256])
            values[name] = np.frombuffer(tables, dtype, math.prod(shape), place + skip).reshape(shape)
            place += skip + values[name].nbytes
        offset, size = file.tell(), head["bits_bytes"]
        if os.fstat(file.fileno()).st_size != offset + size:
            raise ValueError("cut short")
        try:
            # numpy cannot map nothing
            values[bits] = np.memmap(path, np.uint8, "r", offset, (size,)) if size else np.zeros(0, np.uint8)
        except OSError as error:
            if error.errno != errno.ENODEV:  # a mount whose files cannot be mapped
                raise
            values[bits] = np.frombuffer(file.read(), np.uint8)
    return ShardArrays(**values)


def rebuild_arrays(tar_path: Path) -> ShardArrays:
    """Make the arrays of one shard again from its tar.

    Raises:
        ColabUtilsError: if the tar is damaged.

    Example:
        >>> rebuild_arrays(Path(__file__))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a shard in ...
    """
    builder = ArraysBuilder()
    try:
        with open(tar_path, "rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            members = tar.getmembers()
            for image, member in zip(members[::2], members[1::2], strict=True):
                file.seek(member.offset_data)
                record = json.loads(file.read(member.size))
                for one in record["annotations"]:  # checked: pycocotools would read past damaged counts
                    one["segmentation"] = encode_segmentation(one["segmentation"], record["height"], record["width"])
                file.seek(image.offset_data)
                data = file.read(image.size)
                builder.add(record, data, (image.offset_data, image.size), (member.offset_data, member.size))
    except (tarfile.TarError, ValueError, KeyError, TypeError, AttributeError, ColabUtilsError) as error:
        raise ColabUtilsError(
            f"expected a shard in {tar_path}, found a damaged file ({error}). Copy it again, or run preprocess again."
        ) from None
    return builder.build()


def _read_head(file: BinaryIO) -> dict[str, Any]:
    return dict(json.loads(_read(file, int.from_bytes(file.read(8), "little"))))


def _read(file: BinaryIO, size: int) -> bytearray:
    """So many bytes: a damaged size never takes more memory than the file holds."""
    content = bytearray(min(size, os.fstat(file.fileno()).st_size))
    del content[file.readinto(content) :]  # type: ignore[attr-defined]
    return content


@contextmanager
def _explain_damage(path: Path) -> Iterator[None]:
    try:
        yield
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ColabUtilsError(
            f"expected arrays in {path}, found a damaged file ({error}). Run verify on the shards."
        ) from None
