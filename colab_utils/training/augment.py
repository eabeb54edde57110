"""The size of each image in the model's input: resized and padded as torchvision's transform does it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.shards.images import fit_size

__all__ = ["Augment", "Size", "choose_sizes", "fit_shape", "list_scales", "list_shapes", "resize_all"]

Augment = Literal["none", "flip", "multiscale"]
"""Augmentation by name: nothing; random flips left to right; flips, and each image resized to one of several sizes."""

Size = tuple[int, int]
"""Height and width in pixels."""

_SMALLEST, _SCALES = 0.6, 11  # 480 to 800 pixels in steps of 32, as in torchvision's references


def list_scales(min_size: int) -> tuple[int, ...]:
    """The shorter sides of multi-scale training, pixels: 0.6 to 1 of ``min_size``, the usual one last.

    Source: ``DetectionPresetTrain`` of torchvision's references, which takes 480 to 800 in steps of 32.

    Example:
        >>> list_scales(800)
        (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    """
    return tuple(int(side) for side in np.linspace(_SMALLEST * min_size, min_size, _SCALES).round())


def choose_sizes(transform: GeneralizedRCNNTransform, sizes: Sequence[Sequence[int]]) -> list[Size]:
    """The size that a model's transform gives each image in training; random where it has several ``min_size``.

    Source: ``GeneralizedRCNNTransform.resize`` of torchvision, with its ``_skip_resize`` and ``fixed_size``; the random
    numbers are the same ones, of torch on the CPU.

    Args:
        transform: of the model.
        sizes: height and width of each image, as stored.

    Example:
        >>> choose_sizes(GeneralizedRCNNTransform(800, 1333, [0], [1]), [(480, 640)])
        [(800, 1066)]
    """
    if transform._skip_resize:
        return [(height, width) for height, width in sizes]
    sides = [*transform.min_size]
    return [_resize(transform, size, transform.torch_choice(sides) if sides[1:] else sides[0]) for size in sizes]


def resize_all(
    sizes: NDArray[np.integer], transform: GeneralizedRCNNTransform, *, training: bool = True
) -> NDArray[np.int64]:
    """The largest size that a model's transform gives each image, int [I, 2] in pixels, as ``sizes``.

    Example:
        >>> resize_all(np.array([[480, 640]]), GeneralizedRCNNTransform((480, 800), 1333, [0], [1])).tolist()
        [[800, 1066]]
    """
    if training and transform._skip_resize:
        return sizes.astype(np.int64)
    side = max(transform.min_size) if training else transform.min_size[-1]
    return np.array([_resize(transform, size, side) for size in sizes.tolist()], np.int64).reshape(-1, 2)


def _resize(transform: GeneralizedRCNNTransform, size: Sequence[int], side: float) -> Size:
    if transform.fixed_size is not None:  # width and height
        return int(transform.fixed_size[1]), int(transform.fixed_size[0])
    return fit_size(*size, min_size=float(side), max_size=transform.max_size)


def fit_shape(sizes: Iterable[Sequence[int]], *, step: int, shapes: Sequence[Size] = ()) -> Size:
    """The shape that a batch of images of these sizes is padded to, as torchvision does it: the largest sides, each
    rounded up to a multiple of ``step``; or the first of ``shapes`` that holds it.

    Example:
        >>> fit_shape([(800, 1066), (750, 1000)], step=32)
        (800, 1088)
    """
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    return next((shape for shape in shapes if height <= shape[0] and width <= shape[1]), (height, width))


def list_shapes(sizes: NDArray[np.integer], *, step: int) -> list[Size]:
    """The shape that holds every wide image, and the one that holds every tall one, where there are any.

    Example:
        >>> list_shapes(np.array([(800, 1066), (750, 1000), (1200, 800)]), step=32)
        [(800, 1088), (1216, 800)]
    """
    is_wide = sizes[:, 1] >= sizes[:, 0]
    return [fit_shape(sizes[kind].tolist(), step=step) for kind in (is_wide, ~is_wide) if kind.any()]
