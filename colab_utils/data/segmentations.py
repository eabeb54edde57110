"""COCO segmentations as flat bytes: every number comes back as it was, and none of them is a Python object.

Polygon coordinates are kept as int32 of 2, 4 or 6 decimals where that gives each back exactly (COCO's own
have two), so most take half the bytes of a float64.
"""

from __future__ import annotations

import json
from array import array
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["SegmentationsBuilder", "unpack_segmentation"]

# the first byte says what follows; 10 + d: polygons of d decimals
OTHER, RLE, COMPRESSED_RLE, EXACT_POLYGONS, POLYGONS = 0, 1, 2, 3, 10
DECIMALS = (2, 4, 6)
CHUNK_NUMBERS = 1 << 15
_KIND_BYTES = [bytes([kind]) for kind in range(POLYGONS + max(DECIMALS) + 1)]


class SegmentationsBuilder:
    """Collect segmentations one by one; whatever is neither polygons nor RLE is kept as JSON, for the checks.

    Example:
        >>> builder = SegmentationsBuilder()
        >>> builder.add([[0, 0, 4.25, 0, 4, 4]])
        >>> builder.add({"size": [6, 8], "counts": [40, 8]})
        >>> blob, ends = builder.build()
        >>> [unpack_segmentation(blob[a:b]) for a, b in zip(ends[:-1], ends[1:])]
        [[[0.0, 0.0, 4.25, 0.0, 4.0, 4.0]], {'size': [6, 8], 'counts': [40, 8]}]
    """

    def __init__(self) -> None:
        self._blob = bytearray()
        self._ends = array("q", [0])
        self._start_chunk()

    def add(self, segmentation: Any) -> None:
        """Add one segmentation as it stands in the JSON."""
        kind, head = self._add_polygons(segmentation) or _pack_other(segmentation)
        self._kinds.append(kind)
        self._heads.append(head)
        self._number_ends.append(len(self._numbers))
        if len(self._numbers) > CHUNK_NUMBERS:
            self._finish_chunk()

    def build(self) -> tuple[bytearray, NDArray[np.int64]]:
        """All segmentations one after another, and int64 [A + 1] offsets into them."""
        self._finish_chunk()
        return self._blob, np.frombuffer(self._ends, np.int64)

    def _start_chunk(self) -> None:
        self._kinds, self._heads = bytearray(), list[bytes]()
        self._numbers, self._number_ends = array("d"), array("q", [0])

    def _add_polygons(self, segmentation: Any) -> tuple[int, bytes] | None:
        if not isinstance(segmentation, list) or not segmentation:
            return None
        if not all(isinstance(polygon, list) for polygon in segmentation):
            return None
        try:
            for polygon in segmentation:
                self._numbers.extend(polygon)
            lengths = [len(polygon) for polygon in segmentation]
        except (TypeError, OverflowError):
            del self._numbers[self._number_ends[-1] :]
            return None
        return EXACT_POLYGONS, array("i", [len(lengths), *lengths]).tobytes()

    def _finish_chunk(self) -> None:
        exact = np.frombuffer(self._numbers, np.float64) if self._numbers else np.zeros(0)
        ends = np.frombuffer(self._number_ends, np.int64)
        decimals, fixed = _fix_points(exact, ends)
        kinds = np.frombuffer(bytes(self._kinds), np.uint8)
        kinds = np.where((kinds == EXACT_POLYGONS) & (decimals > 0), POLYGONS + decimals, kinds)
        wide, small = memoryview(exact.tobytes()), memoryview(fixed.tobytes())
        position, start = self._ends[-1], 0
        for kind, head, end in zip(kinds.tolist(), self._heads, ends[1:].tolist(), strict=True):
            body = small[4 * start : 4 * end] if kind >= POLYGONS else wide[8 * start : 8 * end]
            self._blob += _KIND_BYTES[kind]
            self._blob += head
            self._blob += body
            position += 1 + len(head) + len(body)
            self._ends.append(position)
            start = end
        self._start_chunk()


def unpack_segmentation(packed: bytes) -> Any:
    """One segmentation as it stood in the JSON; numbers of polygons as floats."""
    kind = packed[0]
    if kind == OTHER:
        return json.loads(packed[1:])
    if kind in (RLE, COMPRESSED_RLE):
        size = np.frombuffer(packed, np.int32, 2, 1).tolist()
        return {
            "size": size,
            "counts": packed[9:].decode() if kind == COMPRESSED_RLE else np.frombuffer(packed[9:], np.int32).tolist(),
        }
    count = int(np.frombuffer(packed, np.int32, 1, 1)[0])
    body = packed[5 + 4 * count :]
    ends = np.cumsum(np.frombuffer(packed, np.int32, count, 5))
    if kind == EXACT_POLYGONS:
        numbers = np.frombuffer(body, np.float64)
    else:
        numbers = np.frombuffer(body, np.int32) / 10.0 ** (kind - POLYGONS)
    return [polygon.tolist() for polygon in np.split(numbers, ends[:-1])]


def _fix_points(exact: NDArray[np.float64], ends: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int32]]:
    """For each row its decimals (0: none gives all its numbers back), and all numbers as int32 of those decimals."""
    decimals = np.zeros(len(ends) - 1, np.int64)
    fixed = np.zeros(len(exact), np.int32)
    for digits in DECIMALS:
        if decimals.all():
            break
        with np.errstate(over="ignore", invalid="ignore"):
            scaled = np.rint(exact * 10.0**digits)
            fits = (np.abs(scaled) < 2**31) & (scaled / 10.0**digits == exact)
        misses = np.concatenate([np.zeros(1, np.int64), np.cumsum(~fits)])
        chosen = (decimals == 0) & (misses[ends[1:]] == misses[ends[:-1]])
        decimals[chosen] = digits
        numbers = np.repeat(chosen, np.diff(ends))
        fixed[numbers] = scaled[numbers].astype(np.int32)
    return decimals, fixed


def _pack_other(segmentation: Any) -> tuple[int, bytes]:
    if isinstance(segmentation, dict):
        size, counts = segmentation.get("size"), segmentation.get("counts")
        if isinstance(size, list) and len(size) == 2 and all(_is_count(number) for number in size):
            shape = array("i", size).tobytes()
            if isinstance(counts, str) and counts.isascii():
                return COMPRESSED_RLE, shape + counts.encode()
            if isinstance(counts, list) and all(_is_count(number) for number in counts):
                return RLE, shape + array("i", counts).tobytes()
    return OTHER, json.dumps(segmentation).encode()


def _is_count(number: Any) -> bool:
    return isinstance(number, int) and 0 <= number < 2**31
