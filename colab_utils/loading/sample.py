"""Samples: one image and its objects, with packed masks; also from any dataset with torchvision's contract."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.decoding import decode_pixels
from colab_utils.data.masks import PackedMasks
from colab_utils.errors import ColabUtilsError

__all__ = ["BadSampleError", "PackedSample", "Target", "decode_image", "join_tables", "pack_target"]

Target = dict[str, Any]
"""torchvision's target: boxes float32 [N, 4] (x0, y0, x1, y1 in pixels), labels int64 [N], masks uint8 [N, H, W],
image_id int, area float32 [N], iscrowd int64 [N]."""


class PackedSample(NamedTuple):
    """One image and its objects as they cross to the training process; N objects."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3]."""
    image_id: int
    boxes: NDArray[np.float32]
    """float32 [N, 4]: x0, y0, x1, y1 in pixels."""
    labels: NDArray[np.int64]
    """int64 [N]."""
    areas: NDArray[np.float32]
    """float32 [N], in square pixels."""
    iscrowd: NDArray[np.int64]
    """int64 [N]: 0, or 1 for a crowd; shards give none."""
    masks: PackedMasks


def pack_target(image: Tensor, target: Target) -> PackedSample:
    """A sample of any dataset with torchvision's target contract as a packed one; other keys are left behind.

    Raises:
        ColabUtilsError: if the image or the target is not of the contract.
    """
    if not isinstance(image, Tensor) or image.dtype != torch.uint8 or image.ndim != 3 or len(image) != 3:
        raise ColabUtilsError(
            f"expected an image as a uint8 tensor [3, H, W], found {_describe(image)}. Leave out ToTensor and "
            "ToDtype(float32): the loader makes float images on the device."
        )
    try:
        parts = {key: torch.as_tensor(target[key]) for key in ("boxes", "labels", "masks", "area", "iscrowd")}
        image_id = int(target["image_id"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ColabUtilsError(
            "expected a target of torchvision's contract (boxes, labels, masks, image_id, area, iscrowd), found one "
            f"whose {error} is missing or of another kind. Add it to the dict that your dataset gives."
        ) from None
    masks, count = parts["masks"], len(parts["labels"])
    wanted = {"boxes": (count, 4), "area": (count,), "iscrowd": (count,), "masks": (count, *image.shape[1:])}
    wrong = [
        key for key, shape in wanted.items() if len(parts[key]) != count or (count and tuple(parts[key].shape) != shape)
    ]
    if masks.dtype not in (torch.uint8, torch.bool):
        wrong.append("masks")
    if wrong:
        raise ColabUtilsError(
            f"expected {wrong[0]} of shape {list(wanted[wrong[0]])} for {count} labels and an image of "
            f"{list(image.shape)} (masks as uint8 or bool), found {_describe(target[wrong[0]])} in image {image_id}. "
            "Correct the target that your dataset gives."
        )
    return PackedSample(
        pixels=image.as_subclass(Tensor).numpy().transpose(1, 2, 0),
        image_id=image_id,
        boxes=parts["boxes"].numpy().astype(np.float32).reshape(count, 4),
        labels=parts["labels"].numpy().astype(np.int64),
        areas=parts["area"].numpy().astype(np.float32),
        iscrowd=parts["iscrowd"].numpy().astype(np.int64),
        masks=_pack_dense(masks.numpy()),
    )


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _pack_dense(masks: NDArray[Any]) -> PackedMasks:
    """Dense masks [N, H, W] as packed ones; whatever is not 0 belongs to the object."""
    crops, parts = np.zeros((len(masks), 4), np.int32), [np.zeros(0, np.uint8)]
    for row, mask in enumerate(masks):
        ys, xs = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        if len(ys):
            crops[row] = xs[0], ys[0], xs[-1] + 1, ys[-1] + 1
        x0, y0, x1, y1 = crops[row]
        parts.append(np.packbits(mask[y0:y1, x0:x1], axis=None))
    ends = np.cumsum([part.size for part in parts], dtype=np.int64)
    return PackedMasks(np.concatenate(parts), crops, ends)


def join_tables(samples: Sequence[PackedSample]) -> dict[str, NDArray[Any]]:
    """The tables of a batch of one or more samples, and ``mask_bytes``, int64 [T]: the bytes of each mask."""
    return {
        "sizes": np.array([sample.pixels.shape[:2] for sample in samples], np.int32),
        "image_ids": np.array([sample.image_id for sample in samples], np.int64),
        "counts": np.array([len(sample.labels) for sample in samples], np.int64),
        **{
            name: np.concatenate([getattr(sample, name) for sample in samples])
            for name in ("boxes", "labels", "areas", "iscrowd")
        },
        "crops": np.concatenate([sample.masks.crops for sample in samples]),
        "mask_bytes": np.concatenate([np.diff(sample.masks.offsets) for sample in samples]),
    }


class BadSampleError(Exception):
    """Inside the loader: which sample of a batch cannot be loaded, and the error that says why."""

    def __init__(self, error: ColabUtilsError, place: int) -> None:
        super().__init__(error, place)
        self.error, self.place = error, place


def decode_image(data: bytes | bytearray) -> Tensor:
    """JPEG, PNG, any other image, or raw pixels as uint8 [3, H, W]; see ``decode_pixels``.

    Raises:
        ColabUtilsError: if the bytes are not a whole image.
    """
    pixels = decode_pixels(data)
    # by numpy: torch's own copy uses OpenMP threads, which a forked process has lost
    return torch.from_numpy(np.ascontiguousarray(pixels.transpose(2, 0, 1)))
