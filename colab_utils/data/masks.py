"""Convert instance masks: COCO segmentations to RLE, and RLE to packed masks.

Shards and batches hold packed masks: each mask is cropped to its own tight box and takes one bit a
pixel.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from colab_utils.data.decoding import MOST_PIXELS
from colab_utils.data.segmentations import (
    Rle,
    read_numbers,
    read_polygons,
)
from colab_utils.errors import DAMAGE, ColabUtilsError

# Number of polygons that are merged at a time. For each further polygon, pycocotools goes through
# all that it has merged, so merging many at once is slow.
_MERGED_PARTS = 50
# Bits that a run of compressed RLE may have. pycocotools uses integers of 32 bits.
_MOST_BITS = 30
# A character of compressed RLE holds six bits: five of the run, and one that says whether more
# characters of the run follow.
_FIRST_CODE = 48
_RUN_BITS = 5
_MORE_FOLLOWS = 32
_IS_NEGATIVE = 16


class PackedMasks(NamedTuple):
    """Hold N masks of one image, each cropped to its tight box, with one bit a pixel.

    Example:
        >>> rle = encode_segmentation([[1, 1, 4, 1, 4, 3, 1, 3]], 6, 8)
        >>> packed = pack_masks([rle])
        >>> packed.crops.tolist(), packed.bits.tolist()
        ([[1, 1, 4, 3]], [252])
    """

    bits: NDArray[np.uint8]
    """uint8 [bytes]: the pixels of the crops, row by row, most significant bit first. Each mask
    starts at a new byte.
    """
    crops: NDArray[np.int32]
    """int32 [N, 4]: x0, y0, x1, y1 of each crop in pixels. x1 and y1 are exclusive. An empty mask
    has four zeros.
    """
    offsets: NDArray[np.int64]
    """int64 [N + 1]: where each mask's bytes start in ``bits``, and where the last ones end."""


def encode_segmentation(segmentation: Any, height: int, width: int) -> Rle:
    """Convert one COCO segmentation to compressed RLE.

    The segmentation is a list of polygons, uncompressed RLE or compressed RLE. Polygons are drawn
    as pycocotools' ``frPyObjects`` draws them, and the mask is their union. See
    :func:`read_polygons` for the polygons that are accepted.

    Args:
        segmentation: the segmentation, as COCO has it.
        height: the image's height in pixels.
        width: the image's width in pixels.

    Returns:
        ``{"size": [height, width], "counts": bytes}``.

    Raises:
        ColabUtilsError: if the image has no pixels or more than `MOST_PIXELS`; or if the
            segmentation is empty, malformed, or made for an image of another size.

    Example:
        >>> encode_segmentation([[1, 1, 4, 1, 4, 3, 1, 3]], 6, 8)
        {'size': [6, 8], 'counts': b'724000g0'}
    """
    if height < 1 or width < 1 or height * width > MOST_PIXELS:
        raise ColabUtilsError(
            f"expected an image of 1 to {MOST_PIXELS:,} pixels, found {width} x {height}"
        )
    if isinstance(segmentation, dict):
        return _encode_rle(segmentation, height, width)
    if isinstance(segmentation, list) and segmentation:
        return _encode_polygons(segmentation, height, width)
    if isinstance(segmentation, str) and segmentation:
        raise ColabUtilsError(
            f"the segmentation is the text {segmentation!r:.40}, and not polygons or RLE. For "
            "Kaggle's run lengths, docs/FORMATS.md has a recipe"
        )
    raise ColabUtilsError("the annotation has no mask: polygons or RLE")


def _encode_polygons(segmentation: list[Any], height: int, width: int) -> Rle:
    from pycocotools import mask as coco_mask

    rles = coco_mask.frPyObjects(read_polygons(segmentation), height, width)
    while len(rles) > _MERGED_PARTS:
        starts = range(0, len(rles), _MERGED_PARTS)
        rles = [coco_mask.merge(rles[start : start + _MERGED_PARTS]) for start in starts]
    return coco_mask.merge(rles)


def _encode_rle(rle: Rle, height: int, width: int) -> Rle:
    counts = rle.get("counts")
    size = rle.get("size")
    if not isinstance(size, list | tuple) or list(size) != [height, width]:
        raise ColabUtilsError(f"expected RLE of the image's size [{height}, {width}], found {size}")
    if isinstance(counts, str):
        if counts.startswith(("b'", 'b"')):
            raise ColabUtilsError(
                "the counts of the RLE are Python's bytes as text (b'...'): write counts.decode()"
            )
        counts = counts.encode("ascii", "xmlcharrefreplace")
    runs: NDArray[Any] = np.zeros(0)
    with suppress(*DAMAGE):
        # Some tools write runs as floats without a fraction, or as text.
        runs = read_numbers(counts) if isinstance(counts, list) else read_counts(counts or b"")
    # A list within the list is no run.
    is_sound = runs.ndim == 1 and (runs >= 0).all() and runs.sum() == height * width
    if not is_sound or (runs % 1).any():
        raise ColabUtilsError(
            f"the RLE is damaged: its counts do not add up to {height} x {width} pixels"
        )
    return _encode_runs(np.cumsum(runs.astype(np.int64)), height, width)


def _encode_runs(ends: NDArray[np.int64], height: int, width: int) -> Rle:
    """Return the mask whose runs end there. Two runs around one of length 0 are joined.

    If a run has length 0, pycocotools' ``toBbox`` returns a wrong box.

    Example:
        >>> _encode_runs(np.array([5, 5, 8, 12]), 4, 3)
        {'size': [4, 3], 'counts': b'84'}
    """
    from pycocotools import mask as coco_mask

    changes, times = np.unique(ends[ends < ends[-1]], return_counts=True)
    runs = np.diff(changes[times % 2 == 1], prepend=0, append=ends[-1]).tolist()
    rle: Rle = coco_mask.frPyObjects({"size": [height, width], "counts": runs}, height, width)
    return rle


def measure_mask(rle: Rle) -> tuple[list[float], int]:
    """Return the tight box (x, y, width, height) of a mask in RLE, and its number of pixels.

    Example:
        >>> measure_mask(encode_segmentation([[1, 1, 4, 1, 4, 3, 1, 3]], 6, 8))
        ([1.0, 1.0, 3.0, 2.0], 6)
    """
    from pycocotools import mask as coco_mask

    return coco_mask.toBbox(rle).tolist(), int(coco_mask.area(rle))


def resize_rles(rles: Sequence[Rle], height: int, width: int) -> list[Rle]:
    """Shrink N masks of one image with the nearest neighbour, as torchvision's Mask R-CNN does.

    N may be 0. torchvision calls ``torch.nn.functional.interpolate(mode="nearest")``, which takes
    the pixel ``floor(index * float32(in / out))`` of the source.

    Example:
        >>> rle = encode_segmentation([[0, 0, 4, 0, 4, 4, 0, 4]], 8, 8)
        >>> resize_rles([rle], 4, 4) == [encode_segmentation([[0, 0, 2, 0, 2, 2, 0, 2]], 4, 4)]
        True
    """
    resized = []
    for rle in rles:
        rows, columns = map(nearest_indices, rle["size"], (height, width))
        resized.append(_encode_runs(_take_runs(rle, rows, columns), height, width))
    return resized


def _take_runs(rle: Rle, rows: NDArray[np.int64], columns: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return where the runs of a mask end if only these rows and columns are taken.

    A run ends in a column, at a row. The pixels that are taken before this place are those of whole
    columns, and the upper ones of its own column, if that is taken.
    """
    in_columns, at_rows = np.divmod(np.cumsum(read_counts(rle["counts"])), rle["size"][0])
    before = np.searchsorted(columns, in_columns)
    is_taken = np.searchsorted(columns, in_columns, "right") > before
    ends: NDArray[np.int64] = before * len(rows) + is_taken * np.searchsorted(rows, at_rows)
    return ends


def pack_masks(rles: Sequence[Rle]) -> PackedMasks:
    """Pack N masks of one image from compressed RLE; N may be 0."""
    return _pack_crops(map(_draw_crop, rles))


def pack_pixels(masks: Iterable[NDArray[Any]]) -> PackedMasks:
    """Pack N masks of one image from arrays [height, width], which are 0 outside the object.

    Example:
        >>> pack_pixels([np.array([[0, 0, 1], [0, 1, 1]])]).crops.tolist()
        [[1, 0, 3, 2]]
    """
    return _pack_crops(map(crop_pixels, masks))


def _pack_crops(masks: Iterable[tuple[int, int, NDArray[Any]]]) -> PackedMasks:
    """Pack masks that are cropped already, each given as left, top and pixels [rows, columns]."""
    crops = []
    parts = [np.zeros(0, np.uint8)]
    for x0, y0, pixels in masks:
        rows, columns = pixels.shape
        crops.append((x0, y0, x0 + columns, y0 + rows))
        parts.append(np.packbits(pixels, axis=None))
    offsets = np.cumsum([part.size for part in parts], dtype=np.int64)
    return PackedMasks(np.concatenate(parts), np.array(crops, np.int32).reshape(-1, 4), offsets)


def crop_pixels(mask: NDArray[Any]) -> tuple[int, int, NDArray[Any]]:
    """Crop a mask to its tight box; return left, top and the pixels in the box."""
    ys = np.flatnonzero(mask.any(1))
    xs = np.flatnonzero(mask.any(0))
    if not len(ys):
        return 0, 0, mask[:0, :0]
    return xs[0], ys[0], mask[ys[0] : ys[-1] + 1, xs[0] : xs[-1] + 1]


def _draw_crop(rle: Rle) -> tuple[int, int, NDArray[np.uint8]]:
    """Draw only the tight box of a mask; return left, top and uint8 [rows, columns].

    A mask of the image's full size is never made, because it would take much more memory.
    """
    x0, y0, width, height = map(int, measure_mask(rle)[0])
    ends = _take_runs(rle, np.arange(y0, y0 + height), np.arange(x0, x0 + width))
    values = np.arange(len(ends), dtype=np.uint8) % 2
    return x0, y0, np.repeat(values, np.diff(ends, prepend=0)).reshape(width, height).T


def nearest_indices(size_in: int, size_out: int) -> NDArray[np.int64]:
    """Return the source row (or column) of each of ``size_out`` resized rows, int64 [size_out].

    See :func:`resize_rles`.

    Example:
        >>> nearest_indices(8, 4).tolist()
        [0, 2, 4, 6]
    """
    scale = np.float32(size_in) / np.float32(size_out)
    indices = np.floor(np.arange(size_out, dtype=np.float32) * scale).astype(np.int64)
    return np.minimum(indices, size_in - 1)


def number_within(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the numbers 0 to n - 1 for each count n, one count after another: int64 [sum].

    Example:
        >>> number_within(np.array([3, 0, 2])).tolist()
        [0, 1, 2, 0, 1]
    """
    return np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)


def read_counts(text: bytes) -> NDArray[np.int64]:
    """Decode the lengths of the runs of a compressed RLE; return no runs if it is damaged.

    pycocotools would read past the end of its memory if the RLE is damaged, so it is decoded here.
    The format is that of ``rleFrString`` in cocoapi's maskApi.c. Each character holds 5 bits of a
    number, lowest bits first, and a sixth bit that says whether more characters follow. The highest
    of all bits is the sign. From the fourth run on, the number is the difference to the run two
    places before.

    Example:
        >>> read_counts(b"71100000O10").tolist()
        [7, 1, 1, 1, 1, 1, 1, 1, 0, 2, 0]
    """
    codes = np.frombuffer(text, np.uint8) - np.uint8(_FIRST_CODE)
    ends = np.flatnonzero(codes & _MORE_FOLLOWS == 0)
    sizes = np.diff(ends, prepend=-1)
    is_whole = sizes.sum() == len(codes) > 0
    # A character below the first one has become a code of more than six bits.
    if not is_whole or codes.max() >= 64 or sizes.max() * _RUN_BITS > _MOST_BITS:
        return np.zeros(0, np.int64)
    shifts = number_within(sizes) * _RUN_BITS
    runs = np.add.reduceat((codes & 31) << shifts, ends - sizes + 1)
    is_negative = codes[ends] & _IS_NEGATIVE > 0
    runs -= is_negative << sizes * _RUN_BITS
    for start in (1, 2):
        runs[start::2] = np.cumsum(runs[start::2])
    return runs
