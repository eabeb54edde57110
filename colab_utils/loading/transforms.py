"""The objects of a sample checked, and transforms of users applied to it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import pack_pixels
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.samples import Sample, Target, Transforms

# An image with values from 0 to 1 has no value above this, even after it was normalised.
_LARGEST_SCALED = 16
# At least this share of an object's mask lies in its box. A mask whose background is 1 reaches far
# beyond the box. The check of a JSON asks for more, but transforms may leave a box that is much
# larger than its mask: a rotation does.
_LEAST_SHARE = 0.25


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
    return is_dense and value.is_cpu


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


def require_pair(sample: Any, owner: str) -> tuple[Any, Target]:
    """Return a sample as an image and its target, and refuse anything else."""
    if isinstance(sample, tuple | list) and len(sample) == 2 and isinstance(sample[1], dict):
        return sample[0], sample[1]
    raise ColabUtilsError(
        f"Expected (image, target) with a dict as target from {owner}, found "
        f"{type(sample).__name__}. See torchvision's detection tutorial."
    )


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


def apply_transforms(transforms: Transforms | None, image: Tensor, target: Target) -> Sample:
    """Apply transforms, if there are any, to an image, uint8 [3, H, W], and its target.

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
    if transforms is None:
        return image, target
    from torchvision import tv_tensors

    size: Any = image.shape[-2:]
    boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=size)
    given = {**target, "boxes": boxes, "masks": tv_tensors.Mask(target["masks"])}
    try:
        pair = transforms(tv_tensors.Image(image), given)
    except TypeError as error:
        raise ColabUtilsError(
            f"Your transforms failed: {describe_error(error)}. They are called with (image, "
            "target), as those of torchvision.transforms.v2 are. Transforms of the image alone "
            "would leave its boxes and masks behind."
        ) from error
    image, target = require_pair(pair, "your transforms")
    target = {"image_id": given["image_id"], **target}
    _check_result(image, target)
    for key, value in target.items():
        target[key] = to_corners(value).as_subclass(Tensor) if isinstance(value, Tensor) else value
    if "area" in target and len(target["area"]) != len(target["boxes"]):
        target["area"] = target["masks"].flatten(1).sum(1, dtype=torch.float32)
        target["iscrowd"] = torch.zeros_like(target["area"], dtype=torch.int64)
    check_objects(target["boxes"], target["labels"], given["image_id"])
    return image.as_subclass(Tensor), target


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
    scaled to values from 0 to 1. On a GPU, the call waits for the GPU.

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
    for image, target in zip(images, targets, strict=True):
        masks = target["masks"].cpu()
        if (masks > 1).any():
            return (
                f"Image {target['image_id']} has, after your transforms, a mask with values above "
                "1, and torchvision's models need masks of 0 and 1. Return masks > 0."
            )
        crops = pack_pixels(masks.bool().numpy()).crops
        boxes = target["boxes"].cpu().numpy()
        misfit = describe_misfit(boxes, crops, target["image_id"])
        if misfit:
            return f"Your transforms spoil an object. {misfit}"
        # NaN is not at most a number, either.
        if image.is_floating_point() and not image[..., ::8, ::8].max() <= _LARGEST_SCALED:
            return (
                "The images from your transforms hold NaN, or floats up to 255, and torchvision's "
                "models need 0 to 1. Use v2.ToDtype(torch.float32, scale=True)."
            )
    return ""


def describe_misfit(boxes: NDArray[Any], crops: NDArray[Any], image_id: int) -> str:
    """Return a warning of the first object whose mask lies mostly outside its box or has no pixel,
    else "".

    Such an object shows that something is wrong: the boxes have other units or another order of
    coordinates, the masks belong to other objects, or the background of the masks is 1.

    Args:
        boxes: float [N, 4]: box of each object.
        crops: int [N, 4]: smallest box around each mask; 0 if it has no pixel.
        image_id: Id of the image.

    Example:
        >>> crops = np.array([[0, 0, 4, 2]])
        >>> describe_misfit(np.array([[4, 0, 9, 9]]), crops, 7).partition(". ")[0]
        'Image 7 has the box [4, 0, 9, 9], and the mask of this object lies in [0, 0, 4, 2]'
        >>> describe_misfit(np.array([[3, 0, 9, 9]]), crops, 7)
        ''
    """
    # torchvision's masks_to_boxes ends a box one pixel before its mask.
    common = np.minimum(boxes[:, 2:] + 1, crops[:, 2:]) - np.maximum(boxes[:, :2], crops[:, :2])
    areas = (crops[:, 2:] - crops[:, :2]).prod(1)
    is_misfit = common.clip(0).prod(1) < _LEAST_SHARE * areas.clip(1)
    if not is_misfit.any():
        return ""
    row = int(is_misfit.argmax())
    place = f"lies in {crops[row].tolist()}" if crops[row].any() else "has no pixel"
    return (
        f"Image {image_id} has the box {boxes[row].tolist()}, and the mask of this object {place}. "
        "Give boxes as x0, y0, x1, y1 in pixels of the image as you return it, and masks in the "
        "order of the boxes, with 1 for the object. Only the first such object is named."
    )
