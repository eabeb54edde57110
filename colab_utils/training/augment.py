"""How the model sees each image of a batch: resized, mirrored, and for large-scale jitter a window of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.shards.images import fit_size

__all__ = ["Augment", "Size", "View", "choose_shapes", "choose_views", "fit_shape", "list_scales", "view_sizes"]

Augment = Literal["none", "flip", "multiscale", "lsj"]


"""Augmentation by name: nothing; mirrored by chance; that, and resized to one of several sizes; that, and large-scale
jitter."""


Size = tuple[int, int]


"""Height and width in pixels."""

_JITTER = (0.1, 2.0)  # of the square: the range of torchvision's ScaleJitter


_SMALLEST, _SCALES = 0.6, 11  # 480 to 800 pixels in steps of 32, as in torchvision's references


_MOST_SHAPES = 3  # for wide images, and as many for tall ones


class View(NamedTuple):
    """One image as the model sees it: mirrored, resized to ``size``, and a window of ``shown`` pixels of that."""

    size: Size
    flip: bool
    corner: tuple[int, int]
    """Row and column of the window's top left pixel in the resized image."""
    shown: Size


def list_scales(min_size: int) -> tuple[int, ...]:
    """The shorter sides of multi-scale training, pixels: 0.6 to 1 of ``min_size``, the usual one last.

    Source: ``DetectionPresetTrain`` of torchvision's references, which takes 480 to 800 in steps of 32.

    Example:
        >>> list_scales(800)
        (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)
    """
    return tuple(int(side) for side in np.linspace(_SMALLEST * min_size, min_size, _SCALES).round())


def choose_views(
    transform: GeneralizedRCNNTransform,
    sizes: Sequence[Size],
    *,
    flips: Sequence[bool] | None = None,
    jitter_side: int | None = None,
) -> list[View]:
    """A view of each image: its whole at the size that the model's transform gives it, or large-scale jitter.

    What is left to chance comes from torch's random state on the CPU. Sources: ``GeneralizedRCNNTransform.resize``,
    which chooses one of its ``min_size``; ``ScaleJitter`` and ``FixedSizeCrop`` of torchvision's references.

    Args:
        transform: of the model.
        sizes: height and width of each image, as stored.
        flips: which images are mirrored; none by default.
        jitter_side: side of the square that large-scale jitter fills, pixels; None leaves it out.

    Example:
        >>> choose_views(GeneralizedRCNNTransform(800, 1333, [0], [1]), [(480, 640)])
        [View(size=(800, 1066), flip=False, corner=(0, 0), shown=(800, 1066))]
    """
    views = []
    for (height, width), flip in zip(sizes, flips or [False] * len(sizes), strict=True):
        if jitter_side is None:
            shortest = float(transform.torch_choice([*map(int, transform.min_size)]))
            size = fit_size(height, width, min_size=shortest, max_size=transform.max_size)
            views.append(View(size, bool(flip), (0, 0), size))
            continue
        scale, place = torch.rand(2).tolist()
        ratio = jitter_side / max(height, width) * (_JITTER[0] + scale * (_JITTER[1] - _JITTER[0]))
        size = max(1, int(height * ratio)), max(1, int(width * ratio))
        shown = min(size[0], jitter_side), min(size[1], jitter_side)
        corner = int((size[0] - shown[0]) * place), int((size[1] - shown[1]) * place)
        views.append(View(size, bool(flip), corner, shown))
    return views


def view_sizes(
    sizes: NDArray[np.integer], transform: GeneralizedRCNNTransform, *, jitter_side: int | None = None
) -> NDArray[np.int64]:
    """The largest size at which the model sees each image: int [I, 2] in pixels, as ``sizes``.

    Example:
        >>> view_sizes(np.array([[480, 640]]), GeneralizedRCNNTransform((480, 800), 1333, [0], [1])).tolist()
        [[800, 1066]]
    """
    if jitter_side is not None:
        return np.full((len(sizes), 2), jitter_side, np.int64)
    shortest, longest = max(transform.min_size), transform.max_size
    return np.array([fit_size(*size, min_size=shortest, max_size=longest) for size in sizes.tolist()], np.int64)


def fit_shape(sizes: Iterable[Size], shapes: Sequence[Size], *, step: int) -> Size:
    """The shape that a batch of images of these sizes is padded to: the smallest of ``shapes`` that holds all of them,
    else the largest sides, each rounded up to a multiple of ``step``, as torchvision does it.

    Example:
        >>> fit_shape([(800, 1066), (750, 1000)], [(800, 1088), (800, 1344)], step=32)
        (800, 1088)
        >>> fit_shape([(800, 1066), (750, 1000)], [], step=32)
        (800, 1088)
    """
    height, width = (-(-max(sides) // step) * step for sides in zip(*sizes, strict=True))
    holding = [shape for shape in shapes if shape[0] >= height and shape[1] >= width]
    return min(holding, key=lambda shape: shape[0] * shape[1], default=(height, width))


def choose_shapes(sizes: NDArray[np.integer], batches: Iterable[Sequence[int]], *, step: int = 32) -> tuple[Size, ...]:
    """Few shapes for all batches of an epoch: a GPU's memory is cut into the same pieces again and again.

    Starting with the one shape that holds every wide batch, and the one for every tall batch, the shape is added that
    saves most padding, up to three of each kind.

    Args:
        sizes: int [I, 2]: height and width of each image as the model sees it, pixels.
        batches: the images of each batch.
        step: sides are multiples of this.

    Example:
        >>> sizes = np.array([[800, 1066]] * 6 + [[800, 1333]] * 2 + [[1066, 800]] * 4)
        >>> choose_shapes(sizes, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11]])
        ((800, 1088), (800, 1344), (1088, 800))
    """
    padded = [fit_shape([tuple(sizes[i]) for i in batch], (), step=step) for batch in batches]
    chosen: list[Size] = []
    for wide in (True, False):
        same = np.array([shape for shape in padded if (shape[1] >= shape[0]) == wide], np.int64).reshape(-1, 2)
        if not len(same):
            continue
        own, places = np.unique(same, axis=0, return_inverse=True)
        counts = np.bincount(places.ravel())
        picked = [own.max(0)]
        while len(picked) < _MOST_SHAPES:
            areas = [_sum_areas(own, counts, [*picked, shape]) for shape in own]
            if min(areas) >= _sum_areas(own, counts, picked):
                break
            picked.append(own[int(np.argmin(areas))])
        chosen += [(int(height), int(width)) for height, width in picked]
    return tuple(sorted(chosen))


def _sum_areas(shapes: NDArray[np.int64], counts: NDArray[np.int64], picked: Sequence[NDArray[np.int64]]) -> int:
    """Pixels of all batches when each is padded to the smallest of the picked shapes that holds it."""
    holds = [np.where((shape >= shapes).all(1), shape.prod(), np.iinfo(np.int64).max) for shape in picked]
    return int((np.min(holds, axis=0) * counts).sum())
