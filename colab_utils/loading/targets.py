"""Samples and their targets: checked against torchvision's contract, transformed, and packed."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import pack_pixels
from colab_utils.errors import ColabUtilsError, UnavailableError

Target = dict[str, Any]
"""torchvision's target: boxes float32 [N, 4] (x0, y0, x1, y1 in pixels), labels int64 [N], masks
uint8 [N, H, W], image_id int, area float32 [N], iscrowd int64 [N]."""

Transforms = Callable[..., Any]
"""(image, target) to (image, target): one of ``torchvision.transforms.v2``, or any callable."""


class PackedSample(NamedTuple):
    """One image and its objects as they cross to the training process."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3]."""
    bits: NDArray[np.uint8]
    """uint8 [bytes]: of all masks."""
    tables: dict[str, NDArray[Any]]
    """The rest, as that of a batch of one image: see `PackedSamples.describe`."""


def pack_target(image: Tensor, target: Target) -> PackedSample:
    """A sample of any dataset with torchvision's target contract as a packed one; other keys are
    left behind.

    Raises:
        ColabUtilsError: if the image or the target is not of the contract.
    """
    is_bytes = isinstance(image, Tensor) and image.dtype == torch.uint8
    if not is_bytes or image.ndim != 3 or len(image) != 3:
        raise ColabUtilsError(
            f"expected an image as a uint8 tensor [3, H, W], found {_describe(image)}. "
            "Leave out ToTensor."
        )
    try:
        parts = {
            key: torch.as_tensor(target[key]).numpy()
            for key in ("boxes", "labels", "masks", "area", "iscrowd")
        }
        image_id = int(target["image_id"])
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise ColabUtilsError(
            f"expected a target of torchvision's contract, found one whose {error} is missing "
            "or of another kind: add it to the dict that your dataset gives"
        ) from None
    count = len(parts["labels"])
    masks = parts["masks"]
    wanted = {
        "boxes": (count, 4),
        "area": (count,),
        "iscrowd": (count,),
        "masks": (count, *image.shape[1:]),
    }
    for key, shape in wanted.items():
        fits = len(parts[key]) == count and (not count or parts[key].shape == shape)
        if not fits or (key == "masks" and masks.dtype not in (np.uint8, np.bool_)):
            raise ColabUtilsError(
                f"expected {key} of shape {list(shape)} for {count} labels and an image of "
                f"{list(image.shape)} (masks as uint8 or bool), found {_describe(target[key])} "
                f"in image {image_id}: correct your dataset's target"
            )
    packed = pack_pixels(masks)
    tables: dict[str, NDArray[Any]] = {
        "sizes": np.array([image.shape[1:]], np.int32),
        "image_ids": np.array([image_id], np.int64),
        "counts": np.array([count], np.int64),
        "boxes": parts["boxes"].astype(np.float32).reshape(count, 4),
        "labels": parts["labels"].astype(np.int64),
        "areas": parts["area"].astype(np.float32),
        "iscrowd": parts["iscrowd"].astype(np.int64),
        "crops": packed.crops,
        "mask_bytes": np.diff(packed.offsets),
    }
    return PackedSample(image.as_subclass(Tensor).numpy().transpose(1, 2, 0), packed.bits, tables)


def _describe(value: Any) -> str:
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def apply_transforms(
    transforms: Transforms, image: Tensor, target: Target
) -> tuple[Tensor, Target]:
    """Apply transforms to one image, uint8 [3, H, W], and its target, given as tv_tensors; plain
    tensors come back.

    Where they drop objects (``SanitizeBoundingBoxes``), ``area`` is made again from the masks and
    ``iscrowd`` is 0.

    Raises:
        ColabUtilsError: if they give something else than an image and its target.

    Example:
        >>> from torchvision.transforms import v2
        >>> image, masks = torch.zeros(3, 2, 6).byte(), torch.ones(1, 2, 6).byte()
        >>> target = {"boxes": torch.tensor([[0.0, 0, 2, 2]]), "masks": masks, "image_id": 1}
        >>> image, target = apply_transforms(v2.RandomHorizontalFlip(1), image, target)
        >>> target["boxes"].tolist()
        [[4.0, 0.0, 6.0, 2.0]]
    """
    from torchvision import tv_tensors

    height, width = image.shape[-2:]
    boxes = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(height, width))
    given = {**target, "boxes": boxes, "masks": tv_tensors.Mask(target["masks"])}
    pair = transforms(tv_tensors.Image(image), given)
    if not isinstance(pair, tuple | list) or len(pair) != 2 or not isinstance(pair[1], dict):
        raise ColabUtilsError(
            f"expected (image, target) from your transforms, found {type(pair).__name__}: "
            "see torchvision's v2"
        )
    image = pair[0]
    target = {"image_id": given["image_id"], **pair[1]}
    for key, value in target.items():
        target[key] = value.as_subclass(Tensor) if isinstance(value, Tensor) else value
    if "area" in target and len(target["area"]) != len(target["boxes"]):
        target["area"] = target["masks"].flatten(1).sum(1, dtype=torch.float32)
        target["iscrowd"] = torch.zeros_like(target["area"], dtype=torch.int64)
    return image.as_subclass(Tensor), target


class BadSampleError(Exception):
    """Inside the loader: the error of a sample that cannot be loaded, and its place in the
    batch.
    """


@contextmanager
def blame_sample(place: int) -> Iterator[None]:
    """Raise whatever goes wrong with this sample as BadSampleError, but not a lost Drive or too
    little memory.
    """
    try:
        yield
    except (UnavailableError, MemoryError):
        raise
    except Exception as error:
        raise BadSampleError(error, place) from None


class PackedSamples:
    """Samples at hand as what a batch is written from."""

    def __init__(self, samples: Sequence[PackedSample]) -> None:
        self.samples = samples

    def describe(self, indices: Sequence[int]) -> dict[str, NDArray[Any]]:
        """The tables of ``PackedBatch`` but the pixels, and ``mask_bytes`` int64 [T] in place of
        the offsets.
        """
        tables = [self.samples[index].tables for index in indices]
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    def read_into(self, index: int, pixels: NDArray[np.uint8], bits: NDArray[np.uint8]) -> None:
        """Write one image, uint8 [h, w, 3], and the bits of all its masks."""
        pixels[:], bits[:], _ = self.samples[index]


def pack_samples(dataset: Any, indices: Sequence[int]) -> PackedSamples:
    """Samples of any dataset with torchvision's contract.

    Raises:
        BadSampleError: if one cannot be loaded.
    """
    samples = []
    for place, index in enumerate(indices):
        with blame_sample(place):
            sample = dataset[index]
            if not isinstance(sample, tuple | list) or len(sample) != 2:
                raise ColabUtilsError(
                    "expected (image, target) from your dataset, "
                    f"found {type(sample).__name__}: see torchvision's"
                )
            samples.append(pack_target(*sample))
    return PackedSamples(samples)
