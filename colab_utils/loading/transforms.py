"""The objects of a sample checked, and transforms of users applied to it."""

import math
from collections.abc import Iterable, Sequence
from inspect import signature
from typing import Any

import numpy as np
import torch
from torch import Tensor

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.contract import Target, Transforms

# An image with values from 0 to 1 has no value above this, even after it was normalised.
_LARGEST_SCALED = 16


def to_corners(boxes: Any) -> Any:
    """Return boxes as x0, y0, x1, y1 if they are tv_tensors, and anything else unchanged."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    if not isinstance(boxes, tv_tensors.BoundingBoxes):
        return boxes
    return functional.convert_bounding_box_format(boxes, new_format="XYXY")


def is_plain(value: Any) -> bool:
    """Return whether a value is a dense tensor on the CPU."""
    is_dense = isinstance(value, Tensor) and value.layout == torch.strided and not value.is_nested
    return is_dense and value.device.type == "cpu"


def describe_part(value: Any) -> str:
    """Describe a part of a sample for messages.

    Example:
        >>> describe_part(torch.zeros(2, 4)), describe_part(torch.eye(2).to_sparse())
        ('float32 [2, 4]', 'float32 [2, 2] (torch.sparse_coo, cpu)')
    """
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return type(value).__name__
    if value.is_nested:
        return "a nested tensor"
    how = "" if is_plain(value) else f" ({value.layout}, {value.device})"
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}{how}"


def check_objects(
    boxes: Tensor, labels: Tensor, image_ids: Any, *, classes: float = math.inf
) -> None:
    """Raise an error if a box has no area or is not finite, or a label is not a class.

    On a GPU, the call waits for the GPU once.

    Args:
        boxes: float32 [T, 4]: x0, y0, x1, y1.
        labels: int64 [T]: label of each object.
        image_ids: int [T], or one number: image id of each object.
        classes: Classes of the model, including the background. Default: no limit.

    Raises:
        ColabUtilsError: An object has a bad box or label.
    """
    sides = boxes[:, 2:] - boxes[:, :2]
    has_area = ((sides > 0) & (sides < math.inf)).all(1)
    is_sound = (has_area & (labels > 0) & (labels < classes)).cpu()
    if is_sound.all():
        return
    row = int(is_sound.long().argmin())
    label = int(labels[row])
    if 0 < label < classes:
        problem = (
            f"box {boxes[row].tolist()}, which has no area or is not finite. Give x0, y0, x1, y1 "
            "in your dataset's target, or end your transforms with v2.SanitizeBoundingBoxes()."
        )
    else:
        last = "" if classes == math.inf else f" to {classes - 1} in a model of {classes} classes"
        problem = (
            f"label {label}, and labels go from 1{last}: 0 is the background. Number your classes "
            "from 1, and build the model with num_classes = last label + 1."
        )
    image_id = np.broadcast_to(image_ids, len(labels))[row]
    raise ColabUtilsError(f"Image {image_id} has the {problem}")


def apply_transforms(
    transforms: Transforms, image: Tensor, target: Target
) -> tuple[Tensor, Target]:
    """Apply transforms to an image, uint8 [3, H, W], and its target.

    The transforms get tv_tensors, and the result has plain tensors. If they drop objects
    (``SanitizeBoundingBoxes``), ``area`` is computed again from the masks and ``iscrowd`` is 0.

    Returns:
        The transformed image and target.

    Raises:
        ColabUtilsError: The transforms do not take or return an image and its target, change the
            size of the image but not of its masks, drop an object from only some parts of the
            target, or leave a box without area.

    Example:
        >>> from torchvision.transforms import v2
        >>> image, masks = torch.zeros(3, 2, 6).byte(), torch.ones(1, 2, 6).byte()
        >>> boxes, labels = torch.tensor([[0.0, 0, 2, 2]]), torch.tensor([1])
        >>> target = {"boxes": boxes, "labels": labels, "masks": masks, "image_id": 1}
        >>> image, target = apply_transforms(v2.RandomHorizontalFlip(1), image, target)
        >>> target["boxes"].tolist()
        [[4.0, 0.0, 6.0, 2.0]]
    """
    from torchvision import tv_tensors

    height, width = image.shape[-2:]
    boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(height, width))
    given = {**target, "boxes": boxes, "masks": tv_tensors.Mask(target["masks"])}
    try:
        pair = transforms(tv_tensors.Image(image), given)
    except TypeError:
        name = _find_image_only(transforms)
        if not name:
            raise
        raise ColabUtilsError(
            f"Your transforms use {name}, which cannot be called with (image, target). Give "
            "callables from (image, target) to (image, target), such as torchvision.transforms.v2: "
            "transforms of the image alone would leave its boxes and masks behind."
        ) from None
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], dict):
        raise ColabUtilsError(
            f"Expected (image, target) from your transforms, found {type(pair).__name__}. "
            "See torchvision.transforms.v2."
        )
    image = pair[0]
    target = {"image_id": given["image_id"], **pair[1]}
    _check_result(image, target)
    for key, value in target.items():
        target[key] = to_corners(value).as_subclass(Tensor) if isinstance(value, Tensor) else value
    if "area" in target and len(target["area"]) != len(target["boxes"]):
        target["area"] = target["masks"].flatten(1).sum(1, dtype=torch.float32)
        target["iscrowd"] = torch.zeros_like(target["area"], dtype=torch.int64)
    check_objects(target["boxes"], target["labels"], given["image_id"])
    return image.as_subclass(Tensor), target


def _find_image_only(transforms: Any) -> str:
    """Return the name of the first transform that takes no pair of image and target, else "".

    Example:
        >>> from torchvision.transforms import ToTensor, v2
        >>> _find_image_only(v2.Compose([ToTensor()]))
        'ToTensor'
    """
    name: str = getattr(transforms, "__name__", type(transforms).__name__)
    if isinstance(transforms, type):
        return name
    # The call of a torch module takes anything, and gives it to its forward.
    call = getattr(transforms, "forward", transforms)
    try:
        signature(call).bind(None, None)
    # A function that is written in C may have no signature.
    except (TypeError, ValueError):
        return name
    parts = getattr(transforms, "transforms", ())
    if not isinstance(parts, Iterable):
        return ""
    return next(filter(None, map(_find_image_only, parts)), "")


def _check_result(image: Any, target: Target) -> None:
    """Raise an error if the parts of a transformed sample do not belong together."""
    parts = [image, *map(target.get, ("labels", "boxes", "masks"))]
    shapes = [part.shape if isinstance(part, Tensor) else () for part in parts]
    size, labels, boxes, masks = map(tuple, shapes)
    if len(size) != 3 or boxes != (*labels, 4) or masks != (*labels, *size[1:]):
        raise ColabUtilsError(
            f"Image {target['image_id']} and its labels, boxes and masks do not belong together "
            f"after your transforms: {', '.join(map(describe_part, parts))}. Return tensors "
            "[3, H, W], [N], [N, 4] and [N, H, W], as torchvision.transforms.v2 do with tv_tensors."
        )


def check_transformed(images: Sequence[Tensor], targets: Sequence[Target]) -> str:
    """Return a warning if transforms have spoilt a batch, else "".

    There are three such faults: masks were not moved with their boxes, or masks or images are not
    scaled to values from 0 to 1. On a GPU, the call waits for the GPU once for each image.

    Raises:
        ColabUtilsError: Two samples share their memory.
    """
    parts = [*images, *(target["masks"] for target in targets)]
    places = [part.data_ptr() for part in parts if part.numel()]
    if len({*places}) < len(places):
        raise ColabUtilsError(
            "Your transforms return the same memory for two samples of a batch, so that one "
            "sample overwrites the other. Return a copy, such as image.clone()."
        )
    for target in targets:
        values = _find_values(target["boxes"], target["masks"])
        if max(values, default=0) > 1:
            return (
                f"Image {target['image_id']} has, after your transforms, a mask with values above "
                "1, and torchvision's models need masks of 0 and 1. Return masks > 0."
            )
        if not all(values):
            return (
                f"Image {target['image_id']} has, after your transforms, an object whose mask has "
                "no pixel in its box. Let the transforms change masks and boxes together, and "
                "leave out objects whose masks a crop has emptied."
            )
    if any(
        # NaN is not at most a number, either.
        image.is_floating_point() and not image[..., ::8, ::8].max() <= _LARGEST_SCALED
        for image in images
    ):
        return (
            "The images from your transforms hold NaN, or floats up to 255, and torchvision's "
            "models need 0 to 1. Use v2.ToDtype(torch.float32, scale=True)."
        )
    return ""


def _find_values(boxes: Tensor, masks: Tensor) -> list[int]:
    """Return the largest value of each mask inside its box.

    Example:
        >>> boxes = torch.tensor([[1.0, 0, 2, 1], [4, 0, 6, 2]])
        >>> _find_values(boxes, torch.eye(6).byte().repeat(2, 1, 1))
        [1, 0]
    """
    last = torch.tensor(masks.shape[:0:-1] * 2) - 1
    corners = boxes.cpu().clamp(min=0).minimum(last).long().tolist()
    pairs = zip(masks, corners, strict=True)
    values = [mask[y0 : y1 + 1, x0 : x1 + 1].max() for mask, (x0, y0, x1, y1) in pairs]
    # All values come in one transfer, because each transfer would wait for the GPU.
    return torch.stack(values).tolist() if values else []
