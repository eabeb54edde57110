"""From a mask to COCO: polygons that follow the edges of its pixels, or runs column by column."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["encode_runs", "trace_polygons"]

_TOLERANCE_PX = 0.7  # how far a polygon may stray from the pixels' edges: about what an annotator does
_SLIVER_PX = 10  # parts and holes smaller than this are left out, as annotators leave them out


def trace_polygons(mask: np.ndarray, x0: int = 0, y0: int = 0) -> list[list[float]]:
    """Trace a mask as COCO polygons ``[x, y, x, y, ...]`` in pixels, clockwise on the screen.

    Every part that hangs together (by its sides) is one polygon. COCO polygons have no holes, so a part
    with a hole is cut in two at the hole's middle. Parts under 10 pixels are dropped beside larger ones.

    Args:
        mask: bool [H, W].
        x0: column of the mask's left edge in the picture.
        y0: row of the mask's top edge in the picture.

    Example:
        >>> trace_polygons(np.ones((2, 3), bool), x0=10)
        [[10.0, 0.0, 13.0, 0.0, 13.0, 2.0, 10.0, 2.0]]
    """
    loops = [(loop, _measure_area(loop)) for loop in _follow_edges(mask)]
    hole = next((loop for loop, area in loops if area <= -_SLIVER_PX), None)
    if hole is not None:
        cut = int(hole[:, 0].min() + hole[:, 0].max() + 1) // 2
        return trace_polygons(mask[:, :cut], x0, y0) + trace_polygons(mask[:, cut:], x0 + cut, y0)
    largest = max((area for _, area in loops), default=0.0)
    kept = [loop for loop, area in loops if area >= min(_SLIVER_PX, largest)]
    shift = np.array([x0, y0])
    return [(_simplify(loop) + shift).ravel().tolist() for loop in kept]


def encode_runs(mask: np.ndarray) -> dict[str, Any]:
    """Encode a mask as uncompressed COCO RLE, the form of crowd regions.

    Args:
        mask: bool [H, W], of the whole picture.

    Returns:
        ``counts``: lengths of the runs of 0 and 1 by turns, column by column, 0 first; ``size``: [H, W].

    Example:
        >>> encode_runs(np.array([[1, 0], [1, 0]], bool))
        {'counts': [0, 2, 2], 'size': [2, 2]}
    """
    flat = mask.ravel(order="F")
    ends = np.flatnonzero(flat[1:] != flat[:-1]) + 1
    counts = np.diff(np.concatenate([[0], ends, [flat.size]])).tolist()
    return {"counts": [0, *counts] if flat[0] else counts, "size": list(mask.shape)}


def _follow_edges(mask: np.ndarray) -> list[np.ndarray]:
    """Corners along every border of a mask, one pixel apart, int64 [K, 2] x, y; the mask lies on the right."""
    wide = np.pad(mask, 1)
    outside = (wide[:-2, 1:-1], wide[1:-1, 2:], wide[2:, 1:-1], wide[1:-1, :-2])  # above, right, below, left
    corner = ((0, 0), (0, 1), (1, 1), (1, 0))  # where that side of a pixel starts: row, column
    pitch = mask.shape[1] + 1
    codes = []  # an edge is its first corner and its way (0 east, 1 south, 2 west, 3 north) in one number
    for way, (beyond, (down, right)) in enumerate(zip(outside, corner, strict=True)):
        rows, columns = np.nonzero(mask & ~beyond)
        codes.append((((rows + down) * pitch + columns + right) * 4 + way).tolist())
    edges = {code for side in codes for code in side}
    step = (4, 4 * pitch, -4, -4 * pitch)
    loops = []
    for start in codes[0]:  # every border has an edge that goes east
        if start not in edges:
            continue
        code, path = start, []
        while code in edges:
            edges.discard(code)
            path.append(code >> 2)
            way = code & 3
            here = code - way + step[way]
            # To the right first: pixels that touch at a corner only are two parts.
            code = here + (way + 1 & 3)
            if code not in edges:
                code = here + way if here + way in edges else here + (way + 3 & 3)
        corners = np.array(path)
        loops.append(np.stack([corners % pitch, corners // pitch], axis=1))
    return loops


def _measure_area(loop: np.ndarray) -> float:
    """Shoelace formula: positive for a part, negative for a hole."""
    x, y = loop.T
    return float(x @ np.roll(y, -1) - y @ np.roll(x, -1)) / 2


def _simplify(loop: np.ndarray) -> np.ndarray:
    """Douglas and Peucker (1973) on a closed loop, float64 [K, 2]."""
    points, tolerance = loop[:, 0] + 1j * loop[:, 1], 0.01  # x + iy: one number per corner
    area = _measure_area(loop)
    if area >= 32:  # large enough to smooth: edge midpoints take the stairs out of a slope
        points = (points + np.roll(points, -1)) / 2
        tolerance = min(_TOLERANCE_PX, 0.03 * area**0.5)  # a small part would lose too large a share
    points = np.roll(points, -int(np.abs(points - points.mean()).argmax()))
    far = int(np.abs(points - points[0]).argmax())
    closed = np.append(points, points[0])
    keep = np.zeros(len(closed), bool)
    keep[[0, far]] = True
    spans = [(0, far), (far, len(points))]
    while spans:
        start, end = spans.pop()
        if end - start < 2:
            continue
        chord = complex(closed[end] - closed[start])
        distance = np.abs(((closed[start + 1 : end] - closed[start]) * chord.conjugate()).imag)
        middle = int(distance.argmax())
        if distance[middle] > tolerance * abs(chord):
            middle += start + 1
            keep[middle] = True
            spans += [(start, middle), (middle, end)]
    kept = closed[:-1][keep[:-1]]
    return np.stack([kept.real, kept.imag], axis=1)
