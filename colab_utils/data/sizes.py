"""Compute the sizes to which torchvision's Mask R-CNN resizes images."""

import math

import numpy as np
from numpy.typing import NDArray

Size = tuple[int, int]
"""Height and width in pixels."""
SIDE_RANGE = (1, 2**16)
"""Smallest and largest value of a size that training needs, in pixels."""
# No side of an image has so many pixels.
_NO_LIMIT = 2**31 - 1


def fit_size(height: int, width: int, *, min_size: float, max_size: float) -> Size:
    """Return the size to which torchvision's Mask R-CNN shrinks or enlarges an image.

    Each side is multiplied by the scale and rounded down, but has at least one pixel. See
    ``_resize_image_and_masks`` in torchvision's ``models/detection/transform.py``.

    Example:
        >>> fit_size(3000, 4000, min_size=800, max_size=1333)
        (800, 1066)
        >>> fit_size(480, 640, min_size=800, max_size=1333)
        (800, 1066)
    """
    scale = min(min_size / min(height, width), max_size / max(height, width))
    return max(1, math.floor(height * scale)), max(1, math.floor(width * scale))


def plan_size(
    height: int, width: int, /, *, min_size: float = _NO_LIMIT, max_size: float = _NO_LIMIT
) -> Size:
    """Return the size at which an image is stored.

    It is the size to which torchvision's Mask R-CNN would shrink the image. Images that it would
    enlarge keep their own size.

    Example:
        >>> plan_size(3000, 4000, min_size=800, max_size=1333)
        (800, 1066)
        >>> plan_size(480, 640, min_size=800, max_size=1333)
        (480, 640)
    """
    # One side never shrinks while the other grows, so `min` finds the smaller size.
    return min((height, width), fit_size(height, width, min_size=min_size, max_size=max_size))


def plan_sizes(sizes: NDArray[np.int32], **limits: float) -> NDArray[np.int32]:
    """Return the result of `plan_size` for each height and width, int32 [I, 2]. A size that is not
    known, 0, stays.

    Example:
        >>> plan_sizes(np.array([[3000, 4000], [0, 0]], np.int32), min_size=800, max_size=1333)
        array([[ 800, 1066],
               [   0,    0]], dtype=int32)
    """
    kinds, places = np.unique(sizes, axis=0, return_inverse=True)
    planned = [plan_size(*size, **limits) if all(size) else size for size in kinds.tolist()]
    return np.array(planned, np.int32).reshape(-1, 2)[places.reshape(-1)]
