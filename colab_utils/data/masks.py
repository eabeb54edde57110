"""Instance masks: COCO segmentations to RLE, RLE to packed masks, packed masks to dense ones.

Packed masks are what shards and batches carry: each mask cropped to its own tight box, one bit a pixel. Between RLE and
packed masks lie *runs*: the foreground's columns of pixels, for all masks of an image in four arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError

__all__ = [
    "PackedMasks", "Runs", "encode_segmentation", "nearest_indices", "number_within", "pack_masks", "resize_rles",
    "unpack_masks", "write_runs",
]  # fmt: skip

# beyond these a polygon is damage: no mask has such an outline, and drawing it would take gigabytes
_FARTHEST_PIXEL, _LONGEST_OUTLINE = 10_000_000, 4_000_000
_LONGEST_CODE = 6  # characters of a run in compressed RLE: 30 bits, which pycocotools' 32 hold


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
    """int32 [N, 4]: x0, y0, x1, y1 of each crop in pixels, half open; zeros for an empty mask."""
    offsets: NDArray[np.int64]
    """int64 [N + 1]: where each object's bytes start in ``bits``, and where the last one's end."""


class Runs(NamedTuple):
    """The foreground of N masks of one size: R runs, each in one column, in the order of masks, columns and rows."""

    masks: NDArray[np.int64]
    """int64 [R]: the mask that each run is of."""
    columns: NDArray[np.int64]
    """int64 [R]: x of each run, pixels."""
    tops: NDArray[np.int64]
    """int64 [R]: y of its first pixel."""
    bottoms: NDArray[np.int64]
    """int64 [R]: y after its last pixel."""


def encode_segmentation(segmentation: Any, height: int, width: int) -> dict[str, Any]:
    """One COCO segmentation (polygons, uncompressed or compressed RLE) as compressed RLE.

    Polygons become pixels as in pycocotools' ``frPyObjects``, several polygons of one object are united.

    Returns:
        ``{"size": [height, width], "counts": bytes}``.

    Raises:
        ColabUtilsError: if the segmentation is empty, malformed, or made for an image of another size.
    """
    if isinstance(segmentation, dict):
        return _encode_rle(segmentation, height, width)
    if not isinstance(segmentation, list) or not segmentation:
        raise ColabUtilsError("expected polygons or RLE, found an annotation without a mask")
    for polygon in segmentation:
        _check_polygon(polygon)
    from pycocotools import mask as coco_mask

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
    if not (farthest < _FARTHEST_PIXEL and outline < _LONGEST_OUTLINE):
        raise ColabUtilsError(f"expected polygons in the image, found one that reaches to pixel {farthest:.6g}")


def _encode_rle(rle: dict[str, Any], height: int, width: int) -> dict[str, Any]:
    from pycocotools import mask as coco_mask

    counts, size = rle.get("counts"), rle.get("size")
    if not isinstance(counts, list | str | bytes):
        raise ColabUtilsError("expected RLE with counts and size, found one without counts")
    if not isinstance(size, list | tuple) or list(size) != [height, width]:
        raise ColabUtilsError(f"expected RLE of size [{height}, {width}], the image's, found {size}")
    coded = counts.encode("ascii", "replace") if isinstance(counts, str) else counts
    runs = coded if isinstance(coded, list) else _read_counts([coded])[0].tolist()
    if not all(isinstance(run, int) and run >= 0 for run in runs) or sum(runs) != height * width:
        raise ColabUtilsError(f"expected RLE counts that add up to {height} x {width} pixels, found damaged ones")
    if 0 in runs[1:]:  # an empty run makes pycocotools' toBbox wrong: encode the mask afresh
        pixels = np.repeat(np.arange(len(runs)) % 2, runs).astype(np.uint8)
        return coco_mask.encode(pixels.reshape(height, width, order="F"))
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
    return write_runs(_resize_runs(_read_runs(rles), rows, columns), len(rles), height, width)


def pack_masks(rles: Sequence[dict[str, Any]]) -> PackedMasks:
    """Pack N compressed RLE masks of one image; N may be 0."""
    crops, pixels = _crop_runs(_read_runs(rles), len(rles))
    parts = [np.packbits(part, axis=None) for part in pixels]
    offsets = np.zeros(len(rles) + 1, np.int64)
    np.cumsum([part.size for part in parts], out=offsets[1:])
    return PackedMasks(np.concatenate([*parts, np.zeros(0, np.uint8)]), crops.astype(np.int32), offsets)


def unpack_masks(packed: PackedMasks, height: int, width: int) -> NDArray[np.uint8]:
    """Packed masks as dense ones: uint8 [N, height, width] of 0 and 1."""
    dense = np.zeros((len(packed.crops), height, width), np.uint8)
    for row, (x0, y0, x1, y1) in enumerate(packed.crops.tolist()):
        bits = packed.bits[packed.offsets[row] : packed.offsets[row + 1]]
        pixels = np.unpackbits(bits, count=(y1 - y0) * (x1 - x0))
        dense[row, y0:y1, x0:x1] = pixels.reshape(y1 - y0, x1 - x0)
    return dense


def write_runs(runs: Runs, count: int, height: int, width: int) -> list[dict[str, Any]]:
    """The ``count`` masks as compressed RLE, character by character what pycocotools' ``encode`` makes of dense ones.

    Example:
        >>> two = Runs(np.array([0, 0]), np.array([1, 2]), np.array([1, 0]), np.array([2, 2]))
        >>> [rle["counts"] for rle in write_runs(two, 2, height=2, width=4)]
        [b'332', b'8']
    """
    from pycocotools import mask as coco_mask

    column = (runs.masks * width + runs.columns) * height
    starts, ends = column + runs.tops, column + runs.bottoms
    joined = (starts[1:] == ends[:-1]) & (runs.masks[1:] == runs.masks[:-1])
    starts, ends = starts[np.r_[True, ~joined][: len(starts)]], ends[np.r_[~joined, True][: len(ends)]]
    borders = np.arange(count + 1) * (height * width)
    edges = np.insert(np.stack([starts, ends], 1).ravel(), 2 * np.searchsorted(starts, borders), borders)
    places = np.cumsum(2 * np.bincount(starts // (height * width), minlength=count) + 1)
    parts = [part.tolist() for part in np.split(np.diff(edges), places[:-1])]
    counts = [part if part[-1] else part[:-1] for part in parts]
    return coco_mask.frPyObjects([{"size": [height, width], "counts": part} for part in counts], height, width)


def nearest_indices(size_in: int, size_out: int) -> NDArray[np.int64]:
    """The row (or column) that each of ``size_out`` rows takes from ``size_in``, int64: see :func:`resize_rles`.

    Example:
        >>> nearest_indices(8, 4).tolist()
        [0, 2, 4, 6]
    """
    scale = np.float32(size_in) / np.float32(size_out)
    indices = np.floor(np.arange(size_out, dtype=np.float32) * scale).astype(np.int64)
    return np.minimum(indices, size_in - 1)


def number_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0, 1, 2 ... for each of these counts, one after another: int64 [sum].

    Example:
        >>> number_within(np.array([3, 0, 2])).tolist()
        [0, 1, 2, 0, 1]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def _read_counts(texts: Sequence[bytes]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The lengths of all runs of N compressed RLEs, one mask after another, int64; and int64 [N], how many each mask
    has. Both are empty where one of the RLEs is damaged.

    The code is that of ``rleFrString`` in cocoapi's maskApi.c, which reads past its memory on damaged counts: 5 bits
    a character, the sixth says that more follow, the fifth is the sign, and from the fourth run on a run is the
    difference to the last but one.

    Example:
        >>> runs, counts = _read_counts([b"71100000O10", b"4"])
        >>> runs.tolist(), counts.tolist()
        ([7, 1, 1, 1, 1, 1, 1, 1, 0, 2, 0, 4], [11, 1])
    """
    codes = np.frombuffer(b"".join(texts), np.uint8).astype(np.int64) - 48
    lengths = np.array([len(text) for text in texts], np.int64)
    nothing = np.zeros(0, np.int64)
    if not (codes.size and lengths.all() and codes.min() >= 0 and codes.max() < 64):
        return nothing, nothing
    lasts = np.flatnonzero(codes < 32)  # the last character of each run
    wide, ends = np.diff(lasts, prepend=-1), np.cumsum(lengths)
    if codes[ends - 1].max() >= 32 or wide.max() > _LONGEST_CODE:
        return nothing, nothing
    firsts = lasts + 1 - wide
    runs = np.add.reduceat((codes & 31) << 5 * number_within(wide), firsts)
    runs -= (codes[lasts] >> 4 & 1) << 5 * wide
    counts = np.diff(np.searchsorted(lasts, ends), prepend=0)
    for first in (1, 2):  # every second run of a mask is added up, and its very first run stands alone
        terms = (counts - first + 1).clip(0) >> 1
        place = np.repeat(np.cumsum(counts) - counts + first, terms) + 2 * number_within(terms)
        sums = np.cumsum(runs[place])
        runs[place] = sums - np.repeat(np.concatenate([[0], sums])[np.cumsum(terms) - terms], terms)
    return runs, counts


def _read_runs(rles: Sequence[dict[str, Any]]) -> Runs:
    """The runs of compressed RLEs of one size, which `encode_segmentation` made."""
    if not rles:
        return Runs(*np.zeros((4, 0), np.int64))
    height, width = rles[0]["size"]
    lengths, counts = _read_counts([rle["counts"] for rle in rles])
    # as if the masks lay side by side in one wide picture
    is_mask = (number_within(counts) % 2 > 0) & (lengths > 0)
    ends = np.cumsum(lengths)[is_mask]
    starts = ends - lengths[is_mask]
    columns = starts // height
    spans = (ends - 1) // height - columns + 1  # a run may go on at the top of the next column
    columns = np.repeat(columns, spans) + number_within(spans)
    starts = np.maximum(np.repeat(starts, spans), columns * height)
    ends = np.minimum(np.repeat(ends, spans), (columns + 1) * height)
    return Runs(columns // width, columns % width, starts - columns * height, ends - columns * height)


def _resize_runs(runs: Runs, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> Runs:
    """The masks whose row r is the old one's ``rows[r]``, and column c its ``columns[c]``; both rise."""
    tops, bottoms = np.searchsorted(rows, runs.tops), np.searchsorted(rows, runs.bottoms)
    firsts, ends = np.searchsorted(columns, runs.columns), np.searchsorted(columns, runs.columns, "right")
    times = np.where(bottoms > tops, ends - firsts, 0)
    run = np.repeat(np.arange(len(times)), times)
    resized = Runs(runs.masks[run], firsts[run] + number_within(times), tops[run], bottoms[run])
    order = np.lexsort((resized.tops, resized.columns, resized.masks))
    return Runs(*(values[order] for values in resized))


def _crop_runs(runs: Runs, count: int) -> tuple[NDArray[np.int64], list[NDArray[np.uint8]]]:
    """The tight box of each of ``count`` masks, int64 [count, 4] as `PackedMasks` has it, and the pixels in each box,
    uint8 [y1 - y0, x1 - x0].

    Example:
        >>> one = Runs(np.array([0, 0]), np.array([1, 2]), np.array([1, 0]), np.array([2, 2]))
        >>> boxes, pixels = _crop_runs(one, 1)
        >>> boxes.tolist(), pixels[0].tolist()
        ([[1, 0, 3, 2]], [[0, 1], [1, 1]])
    """
    boxes = np.zeros((count, 4), np.int64)
    shown, first = np.unique(runs.masks, return_index=True)
    if len(shown):
        last = np.append(first[1:], len(runs.masks)) - 1
        lows, highs = np.minimum.reduceat(runs.tops, first), np.maximum.reduceat(runs.bottoms, first)
        boxes[shown] = np.stack([runs.columns[first], lows, runs.columns[last] + 1, highs], 1)
    wide, high = (boxes[:, 2:] - boxes[:, :2]).T
    borders = np.concatenate([[0], np.cumsum(wide * high)])
    column = borders[runs.masks] + (runs.columns - boxes[runs.masks, 0]) * high[runs.masks] - boxes[runs.masks, 1]
    edges = np.zeros(borders[-1] + 1, np.int8)
    edges[column + runs.tops] = 1
    edges[column + runs.bottoms] -= 1  # 0 where the next run goes on
    pixels = np.cumsum(edges[:-1], dtype=np.int8).view(np.uint8)
    parts = [pixels[start:end] for start, end in pairwise(borders.tolist())]
    return boxes, [part.reshape(w, h).T for part, w, h in zip(parts, wide, high, strict=True)]
