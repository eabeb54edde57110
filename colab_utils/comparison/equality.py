"""Whether a strategy's samples are those of the reference: every image once, pixels, boxes, labels and masks equal."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from colab_utils.loading.dataset import CocoFolder

__all__ = ["describe_difference", "find_difference"]

_CHECKED_IMAGES = 32  # of an epoch
_KEPT_LEVELS = (1.0, 16.0)  # of 255, mean and 99.9th percentile: two JPEG decoders on the same bytes
_SHRUNK_LEVELS = (3.0, 48.0)  # the same after one resize and JPEG at quality 95
_ALL_PIXELS = 2_000_000  # a larger image is compared by every second row and column, or third


def describe_difference(sample: tuple[Any, Any], reference: tuple[Any, Any]) -> str:
    """How a sample differs from the reference sample of the same image; empty where it does not.

    Samples are ``(image, target)``, images uint8 or float32 in 0 to 1, [3, h, w]. Boxes may differ by 1 pixel, masks
    must overlap by an IoU of 0.99, pixels may differ by what a JPEG codec changes. A sample stored smaller is compared
    at its own size.

    Example:
        >>> target = {"boxes": torch.zeros(0, 4), "labels": torch.zeros(0), "masks": torch.zeros(0, 8, 8)}
        >>> grey, white = torch.full((3, 8, 8), 128, dtype=torch.uint8), torch.ones(3, 8, 8)
        >>> describe_difference((white, target), (grey, target))
        'pixels differ by 127.0 of 255 on average'
    """
    (image, target), (wanted_image, wanted) = sample, reference
    size, full = tuple(image.shape[-2:]), tuple(wanted_image.shape[-2:])
    scale = torch.tensor([size[1] / full[1], size[0] / full[0]] * 2)
    mean, peak = _KEPT_LEVELS if size == full else _SHRUNK_LEVELS
    masks, wanted_masks = target["masks"], wanted["masks"]
    if size == full:
        rows = slice(None, None, 1 + math.isqrt(size[0] * size[1] // _ALL_PIXELS))
        image, wanted_image = image[:, rows, rows], wanted_image[:, rows, rows]
        masks, wanted_masks = masks[:, rows, rows], wanted_masks[:, rows, rows]
    pixels, wanted_pixels = (i.cpu().float() * (255 if i.is_floating_point() else 1) for i in (image, wanted_image))
    if size != full:
        wanted_pixels = functional.interpolate(wanted_pixels[None], size=size, mode="bilinear", antialias=True)[0]
    difference = (pixels - wanted_pixels).abs()
    if float(difference.mean()) > mean:
        return f"pixels differ by {float(difference.mean()):.1f} of 255 on average"
    if float(np.percentile(difference.numpy(), 99.9)) > peak:
        return f"some pixels differ by {float(difference.max()):.0f} of 255"
    if target["labels"].tolist() != wanted["labels"].tolist():
        return f"labels are {target['labels'].tolist()}, not {wanted['labels'].tolist()}"
    boxes = target["boxes"].cpu() - wanted["boxes"] * scale
    if boxes.numel() and float(boxes.abs().max()) > 1:
        return f"a box differs by {float(boxes.abs().max()):.1f} pixels"
    for mask, there in zip(masks.cpu() > 0, wanted_masks > 0, strict=True):
        if size != full:  # a smaller mask takes the nearest pixels, as in torchvision's own transform
            there = functional.interpolate(there[None, None].byte(), size=size)[0, 0] > 0
        iou = int((mask & there).count_nonzero()) / max(int((mask | there).count_nonzero()), 1)
        if iou < 0.99 and (mask | there).any():
            return f"a mask overlaps the reference by an IoU of {iou:.2f}"
    return ""


def find_difference(batches: Iterable[Any], reference: CocoFolder) -> str:
    """How an epoch differs from the reference: every image once, and the first ones equal; empty where it does not."""
    row_of = {int(image_id): row for row, image_id in enumerate(reference.image_ids)}
    checked = 0
    for images, targets in batches:
        for image, target in zip(images, targets, strict=True):
            image_id = int(target["image_id"])
            if image_id not in row_of:
                return f"image {image_id} is unknown, or came twice"
            row = row_of.pop(image_id)
            if checked < _CHECKED_IMAGES:
                checked += 1
                difference = describe_difference((image, target), reference[row])
                if difference:
                    return f"image {image_id}: {difference}"
    return f"{len(row_of)} images did not come, such as {min(row_of)}" if row_of else ""
