"""Users' own ``torchvision.transforms.v2``: on samples in the worker, or on batches on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import Target

__all__ = ["Transforms", "apply_transforms", "find_flip"]

Transforms = Callable[..., Any]
"""(image, target) to (image, target): one of ``torchvision.transforms.v2``, or any callable."""


def apply_transforms(transforms: Transforms, image: Tensor, target: Target) -> tuple[Tensor, Target]:
    """Apply transforms to one image, uint8 [3, H, W], and its target, given as tv_tensors; plain tensors come back.

    Where they drop objects (``SanitizeBoundingBoxes``), ``area`` is made again from the masks and ``iscrowd`` is 0.

    Raises:
        ColabUtilsError: if they give something else than an image and its target.

    Example:
        >>> from torchvision.transforms import v2
        >>> target = {"boxes": torch.tensor([[0.0, 0, 2, 2]]), "masks": torch.ones(1, 2, 6, dtype=torch.uint8)}
        >>> image, target = apply_transforms(v2.RandomHorizontalFlip(1), torch.zeros(3, 2, 6).byte(), target)
        >>> target["boxes"].tolist()
        [[4.0, 0.0, 6.0, 2.0]]
    """
    from torchvision import tv_tensors

    given: Target = dict(target)
    height, width = image.shape[-2:]
    given["boxes"] = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(height, width))
    given["masks"] = tv_tensors.Mask(target["masks"])
    found = transforms(tv_tensors.Image(image), given)
    if not isinstance(found, tuple | list) or len(found) != 2 or not isinstance(found[1], dict):
        raise ColabUtilsError(
            f"expected (image, target) from your transforms, found {type(found).__name__}. See "
            "torchvision.transforms.v2 for the contract."
        )
    image, target = found[0], dict(found[1])
    for key, value in target.items():
        target[key] = value.as_subclass(Tensor) if isinstance(value, Tensor) else value
    if "image_id" in given:
        target.setdefault("image_id", given["image_id"])
    count = len(target["boxes"])
    if "area" in target and len(target["area"]) != count:
        target["area"] = target["masks"].flatten(1).sum(1, dtype=torch.float32)
        target["iscrowd"] = torch.zeros_like(target["area"], dtype=torch.int64)
    return image.as_subclass(Tensor), target


def find_flip(transforms: Any) -> float | None:
    """The share of images that transforms mirror left to right, where they do nothing else; else None.

    Example:
        >>> from torchvision.transforms import v2
        >>> find_flip(v2.RandomHorizontalFlip(0.3)), find_flip(v2.RandomPhotometricDistort())
        (0.3, None)
    """
    if transforms is None:
        return None
    from torchvision.transforms import v2

    if type(transforms) is not v2.RandomHorizontalFlip:  # a subclass may do anything
        return None
    return float(transforms.p)
