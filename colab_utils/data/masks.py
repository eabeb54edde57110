"""Instance masks: COCO segmentations to RLE, RLE to packed masks, packed masks to dense ones.

Packed masks are what our shards and batches carry: each mask cropped to its own tight box, one bit a pixel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.runs import crop_runs, read_counts, read_runs, resize_runs, write_runs
from colab_utils.errors import ColabUtilsError

__all__ = ["PackedMasks", "encode_segmentation", "nearest_indices", "pack_masks", "resize_rles", "unpack_masks"]

# beyond these a polygon is damage: no mask has such an outline, and drawing it would take gigabytes
FARTHEST_PIXEL = 10_000_000
LONGEST_OUTLINE = 4_000_000


class PackedMasks(NamedTuple):
    """N masks of one image, each cropped to its tight box, one bit a pixel.

    Example:
        >>> rle = encode_segmentation([[1, 1, 4, 1, 4, 3, 1, 3]], 6, 8)
        >>> packed = pack_masks([rle])
        >>> packed.crops.tolist(), packed.bits.tolist()
        ([[1, 1, 4, 3]], [252])
        >>> int(unpack_masks(packed, 6, 8).sum())
        6
    """

    bits: NDArray[np.uint8]
    """uint8 [bytes]: the crops' pixels row by row, most significant bit first; each object starts a byte."""
    crops: NDArray[np.int32]
    """int32 [N, 4]: x0, y0, x1, y1 of each crop in pixels, half open."""
    offsets: NDArray[np.int64]
    """int64 [N + 1]: where each object's bytes start in ``bits``, and where the last one's end."""


def encode_segmentation(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """One COCO segmentation (polygons, uncompressed or compressed RLE) as compressed RLE.

    Polygons become pixels as in pycocotools' ``frPyObjects``, several polygons of one object are united.

    Returns:
        ``{"size": [height, width], "counts": bytes}``.

    Raises:
        ColabUtilsError: if the segmentation is empty, malformed, or made for an image of another size.
    """
    from pycocotools import mask as coco_mask

    if isinstance(segmentation, dict):
        return _encode_rle(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise ColabUtilsError("expected polygons or RLE, found an annotation without a mask")
    for polygon in segmentation:
        _check_polygon(polygon)
    try:
        rles = coco_mask.frPyObjects(segmentation, height, width)
    except (TypeError, ValueError, OverflowError):
        raise ColabUtilsError("expected polygons made of numbers, found something else in one") from None
    return coco_mask.merge(rles) if len(rles) > 1 else rles[0]


def _check_polygon(polygon: Any) -> None:
    """Refuse what pycocotools would take wrongly: it walks every pixel of an edge, however far that goes."""
    if not isinstance(polygon, list) or len(polygon) < 6 or len(polygon) % 2:
        found = f"one of {len(polygon)} numbers" if isinstance(polygon, list) else "something else"
        raise ColabUtilsError(f"expected polygons of at least 3 points (x, y), found {found}")
    try:
        points = np.asarray(polygon, np.float64).reshape(-1, 2)
    except (TypeError, ValueError, OverflowError):
        raise ColabUtilsError("expected polygons made of numbers, found something else in one") from None
    with np.errstate(over="ignore", invalid="ignore"):
        farthest = np.abs(points).max()
        outline = np.abs(np.diff(points, axis=0, append=points[:1])).sum()
    if not (farthest < FARTHEST_PIXEL and outline < LONGEST_OUTLINE):
        raise ColabUtilsError(f"expected polygons in the image, found one that reaches to pixel {farthest:.6g}")


def _encode_rle(rle: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    from pycocotools import mask as coco_mask

    counts, size = rle.get("counts"), rle.get("size")
    if not isinstance(counts, list | str | bytes):
        raise ColabUtilsError("expected RLE with counts and size, found one without counts")
    if not isinstance(size, list | tuple) or list(size) != [height, width]:
        raise ColabUtilsError(f"expected RLE of size [{height}, {width}], the image's, found {size}")
    coded = counts.encode("ascii", "replace") if isinstance(counts, str) else counts
    runs = coded if isinstance(coded, list) else read_counts([coded])[0].tolist()
    if not all(isinstance(run, int) and run >= 0 for run in runs) or sum(runs) != height * width:
        raise ColabUtilsError(f"expected RLE counts that add up to {height} x {width} pixels, found damaged ones")
    if 0 in runs[1:]:  # an empty run makes pycocotools' toBbox wrong: encode the mask afresh
        dense = coco_mask.decode(coco_mask.frPyObjects({"size": [height, width], "counts": runs}, height, width))
        return coco_mask.encode(np.asfortranarray(dense))
    if isinstance(coded, list):
        return coco_mask.frPyObjects({"size": [height, width], "counts": runs}, height, width)
    return {"size": [height, width], "counts": coded}


def resize_rles(rles: Sequence[dict[str, Any]], height: int, width: int) -> list[dict[str, Any]]:
    """Resize N masks of one image as torchvision's Mask R-CNN transform does: nearest neighbour; N may be 0.

    Source: ``torch.nn.functional.interpolate(mode="nearest")``, whose source index is
    ``floor(index * float32(in / out))``.

    Example:
        >>> rle = encode_segmentation([[0, 0, 4, 0, 4, 4, 0, 4]], 8, 8)
        >>> resize_rles([rle], 4, 4) == [encode_segmentation([[0, 0, 2, 0, 2, 2, 0, 2]], 4, 4)]
        True
    """
    if not rles:
        return []
    rows, columns = (nearest_indices(*sides) for sides in zip(rles[0]["size"], (height, width), strict=True))
    return write_runs(resize_runs(read_runs(rles), rows, columns), len(rles), height, width)


def nearest_indices(size_in: int, size_out: int) -> NDArray[np.int64]:
    """The row (or column) that each of ``size_out`` rows takes from ``size_in``, int64: see :func:`resize_rles`.

    Example:
        >>> nearest_indices(8, 4).tolist()
        [0, 2, 4, 6]
    """
    scale = np.float32(size_in) / np.float32(size_out)
    indices = np.floor(np.arange(size_out, dtype=np.float32) * scale).astype(np.int64)
    return np.minimum(indices, size_in - 1)


def pack_masks(rles: Sequence[dict[str, Any]]) -> PackedMasks:
    """Pack N compressed RLE masks of one image; N may be 0."""
    cropped = crop_runs(read_runs(rles), len(rles))
    crops = np.array([box for box, _ in cropped], np.int32).reshape(-1, 4)
    parts = [np.packbits(pixels, axis=None) for _, pixels in cropped]
    offsets = np.zeros(len(rles) + 1, np.int64)
    np.cumsum([part.size for part in parts], out=offsets[1:])
    return PackedMasks(np.concatenate(parts) if parts else np.zeros(0, np.uint8), crops, offsets)


def unpack_masks(packed: PackedMasks, height: int, width: int) -> NDArray[np.uint8]:
    """Packed masks as dense ones: uint8 [N, height, width] of 0 and 1."""
    dense = np.zeros((len(packed.crops), height, width), np.uint8)
    for row, (x0, y0, x1, y1) in enumerate(packed.crops.tolist()):
        bits = packed.bits[packed.offsets[row] : packed.offsets[row + 1]]
        pixels = np.unpackbits(bits, count=(y1 - y0) * (x1 - x0))
        dense[row, y0:y1, x0:x1] = pixels.reshape(y1 - y0, x1 - x0)
    return dense
