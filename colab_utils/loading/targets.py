"""Samples and their targets: checked against torchvision's contract, transformed, and packed."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from inspect import signature
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.data.masks import pack_pixels
from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, UnavailableError

Target = dict[str, Any]
"""torchvision's target: boxes float32 [N, 4] (x0, y0, x1, y1 in pixels), labels int64 [N], masks
uint8 [N, H, W], image_id int, area float32 [N], iscrowd int64 [N]."""

Transforms = Callable[..., Any]
"""A callable from (image, target) to (image, target), such as one of
``torchvision.transforms.v2``."""

# The numpy dtypes that each part of a target may have, by their ``kind``: i and u are integers, f
# is floating point, b is bool.
_KINDS = {"labels": "iu", "boxes": "iuf", "masks": "ub", "area": "iuf", "iscrowd": "iubf"}
_OPTIONAL = ("area", "iscrowd")
# The box of an object holds at least this share of the rectangle around its mask. A mask whose
# background is 1 reaches far beyond the box.
_LEAST_SHARE = 0.25
# A float32 cannot hold a much larger area.
_LARGEST_AREA = 1e38
# An image with values from 0 to 1 has no value above this, even after it was normalised.
_LARGEST_SCALED = 16
_LEAVE_TO_LOADER = (
    "Leave out .cuda() and .to(device) in your dataset, and give make_loader a device: it sends "
    "whole batches there."
)


class PackedSample(NamedTuple):
    """An image and its objects as they are sent to the training process."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3]: the image."""
    bits: NDArray[np.uint8]
    """uint8 [bytes]: the bits of all masks, one mask after the other."""
    tables: dict[str, NDArray[Any]]
    """The tables of this image alone; see `PackedSamples.describe`."""


def pack_target(image: Tensor, target: Target, *, index: int = 0) -> PackedSample:
    """Pack a sample of any dataset with torchvision's target contract.

    Keys of the target that `Target` does not list are dropped. A missing ``area`` is computed from
    the mask. Without ``iscrowd``, no object is a crowd. A target with no key, or only ``image_id``,
    means an image without objects, as in torchvision's ``wrap_dataset_for_transforms_v2``.

    Args:
        image: Image, uint8 [3, H, W].
        target: Target of the image.
        index: The ``image_id``, if the target has none. Default: 0.

    Returns:
        The packed sample.

    Raises:
        ColabUtilsError: The image or the target breaks the contract, a box has no area or is not
            finite, a label is below 1, an ``area`` is negative or not finite, or an ``iscrowd`` is
            neither 0 nor 1.
    """
    image_id = _read_image_id(target, index)
    is_bytes = isinstance(image, Tensor) and image.dtype == torch.uint8
    if not is_bytes or image.ndim != 3 or len(image) != 3 or not image.numel():
        raise ColabUtilsError(
            f"Expected image {image_id} as a uint8 tensor [3, H, W], found {_describe(image)}. "
            "Leave out ToTensor and Normalize, and turn a PIL image into a tensor with "
            'PILToTensor()(image.convert("RGB")) of torchvision.transforms.v2.'
        )
    _require_plain(image, "image", image_id)
    for key in _KINDS:
        _require_plain(target.get(key), key, image_id)
    if target.keys() <= {"image_id"}:
        target = {"labels": [], "boxes": [], "masks": []}
    parts = _read_parts(target, image.shape[1:], image_id)
    # The arrays are copied, because a dataset may write the next sample into the same memory.
    boxes = torch.from_numpy(parts["boxes"]).to(torch.float32, copy=True)
    labels = torch.from_numpy(parts["labels"]).to(torch.int64, copy=True)
    check_objects(boxes, labels, image_id)
    packed = pack_pixels(parts["masks"])
    for mask, (x0, y0, x1, y1) in zip(parts["masks"], packed.crops.tolist(), strict=True):
        _check_values(mask[y0:y1, x0:x1], image_id)
    if "area" not in parts:
        parts["area"] = np.array([np.count_nonzero(mask) for mask in parts["masks"]])
    crowds = parts.get("iscrowd", np.zeros(len(labels)))
    _check_optional(parts["area"], crowds, image_id)
    tables: dict[str, NDArray[Any]] = {
        "sizes": np.array([image.shape[1:]], np.int32),
        "image_ids": np.array([image_id], np.int64),
        "counts": np.array([len(labels)], np.int64),
        "boxes": boxes.numpy(),
        "labels": labels.numpy(),
        "areas": parts["area"].astype(np.float32),
        "iscrowd": crowds.astype(np.int64),
        "crops": packed.crops,
        "mask_bytes": np.diff(packed.offsets),
    }
    return PackedSample(image.as_subclass(Tensor).numpy().transpose(1, 2, 0), packed.bits, tables)


def _require_plain(value: Any, key: str, image_id: int) -> None:
    """Raise an error if a part of a sample is a sparse tensor, or is not on the CPU."""
    if not isinstance(value, Tensor):
        return
    if value.layout != torch.strided or value.is_nested:
        raise ColabUtilsError(
            f"Image {image_id} has its {key} as a sparse or nested tensor. Return it as a dense "
            "tensor: .to_dense() makes one of a sparse tensor."
        )
    if value.device.type != "cpu":
        raise ColabUtilsError(
            f"Image {image_id} has its {key} on the device {str(value.device)!r}, and samples must "
            f"be on the CPU. {_LEAVE_TO_LOADER}"
        )


def _read_image_id(target: Target, index: int) -> int:
    image_id = target.get("image_id", index)
    # A number with a fraction would become the id of another image.
    with suppress(TypeError, ValueError, OverflowError, RuntimeError):
        if int(image_id) == image_id:
            return int(np.int64(int(image_id)))
    raise ColabUtilsError(
        f"The image_id {image_id!r} of sample {index} is not an integer of 64 bits. Give such an "
        "integer, or leave image_id out: it is then the sample's index."
    )


def _check_optional(areas: NDArray[Any], crowds: NDArray[Any], image_id: int) -> None:
    """Raise an error if an area is negative or not finite, or a crowd is neither 0 nor 1."""
    bad_areas = areas[~((areas >= 0) & (areas < _LARGEST_AREA))]
    if bad_areas.size:
        raise ColabUtilsError(
            f"Image {image_id} has an object with the area {bad_areas[0]}, which is no number of "
            "pixels. Give 0 or more, or leave area out: it is then computed from the masks."
        )
    bad_crowds = crowds[(crowds != 0) & (crowds != 1)]
    if bad_crowds.size:
        raise ColabUtilsError(
            f"Image {image_id} has an object with the iscrowd {bad_crowds[0]}. Give 1 for a crowd "
            "and 0 for any other object, or leave iscrowd out if there are no crowds."
        )


def _check_values(pixels: NDArray[Any], image_id: int) -> None:
    """Raise an error if a mask has several values above 0, such as a mask with soft edges."""
    largest = pixels.max(initial=0)
    # Nearly all masks hold only 0 and 1, and skip the slow comparison.
    if largest > 1 and not np.isin(pixels, (0, largest)).all():
        raise ColabUtilsError(
            f"Image {image_id} has a mask with several values up to {largest}, and every value "
            "above 0 counts as the object. Give masks of 0 and 1. If masks have soft edges, with "
            "values from 0 to 255, give masks > 127."
        )


def describe_misfit(sample: PackedSample) -> str:
    """Return a warning of the first object whose box, mask and image do not fit, else "".

    Either the mask lies mostly outside the box or has no pixel, or the box lies mostly outside the
    image. Such an object shows that something is wrong: the boxes have other units or another order
    of coordinates, the masks belong to other objects, or the background of the masks is 1.
    """
    boxes = sample.tables["boxes"]
    crops = sample.tables["crops"]
    starts = np.maximum(boxes[:, :2], crops[:, :2])
    ends = np.minimum(boxes[:, 2:], crops[:, 2:])
    # torchvision's masks_to_boxes ends a box one pixel before its mask.
    sides = crops[:, 2:] - crops[:, :2]
    shares = (ends + 1 - starts).clip(0, sides) / sides.clip(1)
    is_beside = shares.prod(1) < _LEAST_SHARE
    if not is_beside.any():
        return _describe_stray(sample)
    row = int(is_beside.argmax())
    place = f"lies in {crops[row].tolist()}" if crops[row].any() else "has no pixel"
    return (
        f"Image {sample.tables['image_ids'][0]} has the box {boxes[row].tolist()}, and the mask of "
        f"this object {place}. Give boxes as x0, y0, x1, y1 in pixels of the image, and masks in "
        "the order of the boxes, with 1 for the object. Only the first such object is named."
    )


def _describe_stray(sample: PackedSample) -> str:
    """Return a warning of the first box that lies mostly outside its image, else ""."""
    boxes = sample.tables["boxes"]
    height, width = sample.tables["sizes"][0].tolist()
    corners = boxes.reshape(-1, 2, 2)
    inside = corners.clip(0, [width, height])
    shares = np.diff(inside, axis=1) / np.diff(corners, axis=1)
    is_stray = shares.prod((1, 2)) < _LEAST_SHARE
    if not is_stray.any():
        return ""
    return (
        f"Image {sample.tables['image_ids'][0]} has the box {boxes[is_stray.argmax()].tolist()}, "
        f"and most of this box lies outside the image, which is {width} pixels wide and {height} "
        "high. Give boxes as x0, y0, x1, y1 in pixels of the image as you return it, and end your "
        "transforms with v2.ClampBoundingBoxes(). Only the first such object is named."
    )


def _read_parts(target: Target, size: Sequence[int], image_id: int) -> dict[str, NDArray[Any]]:
    """Return the checked parts of a target, for an image of this height and width.

    An empty part means no objects, whatever its shape is.
    """
    parts: dict[str, NDArray[Any]] = {}
    for key, kinds in _KINDS.items():
        value = target.get(key)
        if value is None and key in _OPTIONAL:
            continue
        part = np.array(None)
        with suppress(TypeError, ValueError, RuntimeError):
            part = _read_array(to_corners(value))
        count = parts.get("labels", part).size
        shape = {"boxes": (count, 4), "masks": (count, *size)}.get(key, (count,))
        fits = part.shape == shape and part.dtype.kind in kinds and part.dtype.itemsize <= 8
        if not fits and (count or part.size):
            raise ColabUtilsError(
                f"Image {image_id} has {key} of {_describe(value)}, and needs {list(shape)}. "
                "Give each part for every object: labels as integers, boxes as float32, masks as "
                "uint8 or bool."
            )
        parts[key] = part.reshape(shape)
    return parts


def _read_array(value: Any) -> NDArray[Any]:
    """Return numbers as an array in this machine's order of bytes.

    They may be a list of arrays, of tensors or of Pillow's images, such as masks.
    """
    if isinstance(value, list | tuple):
        value = np.array(value)
    if isinstance(value, np.ndarray):
        # A tensor cannot have the negative strides of a mirrored array, nor another order of bytes.
        return value.astype(value.dtype.newbyteorder("="), "C", copy=False)
    return torch.as_tensor(value).detach().numpy()


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


def to_corners(boxes: Any) -> Any:
    """Return boxes as x0, y0, x1, y1 if they are tv_tensors, and anything else unchanged."""
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    if not isinstance(boxes, tv_tensors.BoundingBoxes):
        return boxes
    return functional.convert_bounding_box_format(boxes, new_format="XYXY")


def _describe(value: Any) -> str:
    if value is None:
        return "nothing"
    if not isinstance(value, Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


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
            f"after your transforms: {', '.join(map(_describe, parts))}. Return tensors [3, H, W], "
            "[N], [N, 4] and [N, H, W], as torchvision.transforms.v2 do with tv_tensors."
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


def _name_types(sample: Any) -> str:
    """Return the type of a sample, and of its parts.

    Example:
        >>> _name_types(("a", []))
        'tuple of str, list'
    """
    if not isinstance(sample, tuple | list):
        return type(sample).__name__
    return f"{type(sample).__name__} of {', '.join(type(part).__name__ for part in sample)}"


class BadSampleError(Exception):
    """The error of a sample, and the sample's place in its batch. Only the loader handles it."""


@contextmanager
def blame_sample(place: int) -> Iterator[None]:
    """Raise the errors of a sample as BadSampleError, except those of Drive and the machine."""
    try:
        yield
    except (UnavailableError, *MACHINE_FAULTS):
        raise
    except (Exception, GeneratorExit, SystemExit) as error:
        if isinstance(error, StopIteration | GeneratorExit | SystemExit):
            # These would end the loader's own pass, or the program.
            name = type(error).__name__
            error = ColabUtilsError(f"your dataset raised {name}. Mend its __getitem__.")
        elif isinstance(error, RuntimeError) and "CUDA in forked subprocess" in str(error):
            # torch's message advises to spawn the workers, but the loader always forks them.
            error = ColabUtilsError(
                f"Your dataset used the GPU in a worker, where it cannot work. {_LEAVE_TO_LOADER}"
            )
        raise BadSampleError(error, place) from None


class PackedSamples:
    """Samples in memory, from which `write_batch` makes a batch."""

    def __init__(self, samples: Sequence[PackedSample]) -> None:
        self.samples = samples

    def describe(self, indices: Sequence[int]) -> dict[str, NDArray[Any]]:
        """Return the tables of these samples.

        They are the tables of ``PackedBatch``, with two differences. Pixels and mask bits are
        missing. ``mask_bytes``, int64 [T], the size of each mask, takes the place of the offsets.
        """
        tables = [self.samples[index].tables for index in indices]
        return {name: np.concatenate([table[name] for table in tables]) for name in tables[0]}

    def read_into(self, index: int, pixels: NDArray[np.uint8], bits: NDArray[np.uint8]) -> None:
        """Write an image, uint8 [h, w, 3], and the bits of all its masks into these arrays."""
        pixels[:], bits[:], _ = self.samples[index]


def pack_samples(
    dataset: Any,
    indices: Sequence[int],
    by_batch: bool = False,
    *,
    alone: bool = False,
    compares_pixels: bool = True,
    begin: Callable[[int], object] = int,
) -> PackedSamples:
    """Read and pack samples of any dataset with torchvision's contract.

    By default, ``__getitem__`` reads the samples one after the other. With ``by_batch``, one call
    of ``__getitems__`` reads all of them. With ``by_batch`` and ``alone``, each sample has its own
    call of ``__getitems__``. With ``compares_pixels``, an image that the dataset overwrites is
    noticed. ``begin`` is called with the place of each sample in the batch, before the sample is
    checked.

    Raises:
        BadSampleError: A sample cannot be loaded.
        ColabUtilsError: The dataset has written one image over another, or its ``__getitems__``
            does not return one sample for each index.
    """
    samples = []
    marks = []
    batch: Any = ()
    if by_batch and not alone:
        # If this call fails, each sample is read alone, to find the sample that fails.
        with suppress(Exception):
            batch = list(dataset.__getitems__(list(indices)))
    for place, index in enumerate(indices):
        begin(place)
        with blame_sample(place):
            if len(batch) == len(indices):
                sample = batch[place]
            elif by_batch:
                [sample] = _list_samples(dataset.__getitems__([index]), [index])
            else:
                sample = dataset[index]
            is_pair = isinstance(sample, tuple | list) and len(sample) == 2
            if not is_pair or not isinstance(sample[1], dict):
                raise ColabUtilsError(
                    "Expected (image, target) with a dict as target from your dataset for sample "
                    f"{index}, found {_name_types(sample)}. See torchvision's detection tutorial."
                )
            samples.append(pack_target(*sample, index=index))
            if compares_pixels:
                marks.append(_take_mark(samples[-1]))
    if batch:
        # A sample that is missing was named above, if the dataset does not return it alone either.
        _list_samples(batch, indices)
    if compares_pixels and marks != [*map(_take_mark, samples)]:
        raise ColabUtilsError(
            "An image of your dataset changed while the next ones of its batch were loaded. If "
            "your dataset uses one buffer for several images, return a copy of each image, such as "
            "image.clone()."
        )
    return PackedSamples(samples)


def _list_samples(samples: Any, indices: Sequence[int]) -> list[Any]:
    """Return what ``__getitems__`` returned as a list, with one sample for each index."""
    listed = list(samples) if isinstance(samples, Iterable) else []
    if len(listed) != len(indices):
        raise ColabUtilsError(
            f"The __getitems__ of your dataset returned {len(listed)} samples for the indices "
            f"{indices}. Return one sample for each index, in the order of the indices."
        )
    return listed


def _take_mark(sample: PackedSample) -> bytes:
    """Return some pixels of an image, by which a later change of the image is seen."""
    return sample.pixels[::16, ::16].tobytes()
