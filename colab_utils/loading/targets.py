"""Samples of any dataset: checked against torchvision's contract, and packed.

A `ShardDataset` without transforms needs none of this, because its shards hold packed samples.
"""

import io
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Subset

from colab_utils.data.masks import pack_pixels
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.sampler import seed_random
from colab_utils.loading.samples import (
    PackedSample,
    Tables,
    Target,
    blame_sample,
    is_own,
)
from colab_utils.loading.transforms import (
    check_objects,
    describe_misfit,
    describe_part,
    is_plain,
    require_pair,
    to_corners,
)
from colab_utils.processes import share_array

# The numpy dtypes that each part of a target may have, by their ``kind``: i and u are integers, f
# is floating point, b is bool.
_KINDS = {"labels": "iu", "boxes": "iuf", "masks": "ub", "area": "iuf", "iscrowd": "iubf"}
_OPTIONAL = ("area", "iscrowd")
# A float32 cannot hold a much larger area.
_LARGEST_AREA = 1e38
# A file may be an attribute of an attribute, as in a zipfile.ZipFile.
_DEPTH = 3


class SamplePacker:
    """A reader of the samples of any dataset with torchvision's contract, for `write_batch`.

    Attributes:
        dataset: The dataset. Set it before you call `pack`.
    """

    dataset: Any

    def __init__(self) -> None:
        # All workers share this memory, so that one of them warns once.
        self._has_warned = share_array(np.bool_)

    def pack(
        self,
        indices: Sequence[int],
        seed: Sequence[int],
        at_work: NDArray[np.int64],
        *,
        by_batch: bool,
        is_own: bool,
    ) -> list[PackedSample]:
        """Read and pack samples, whose random numbers come from ``seed``.

        Without ``by_batch``, ``__getitem__`` reads the samples one after the other. With it, one
        call of ``__getitems__`` reads all of them. The images of a dataset that is not of this
        package (``is_own``) are copied, because it may write the next one into the same memory.
        ``at_work`` gets the index of each sample before the sample is checked.

        Raises:
            BadSampleError: A sample cannot be loaded.
            ColabUtilsError: ``__getitems__`` does not return one sample for each index.
        """
        samples = []
        batch: list[Any] = []
        with seed_random(seed):
            if by_batch:
                # If this call fails, each sample is read alone, to find the sample that fails.
                with suppress(Exception):
                    batch = self._read_at_once(list(indices))
            for place, index in enumerate(indices):
                at_work[0] = index
                with blame_sample(place):
                    if batch:
                        sample = batch[place]
                    elif by_batch:
                        [sample] = self._read_at_once([index])
                    else:
                        sample = self.dataset[index]
                    pair = require_pair(sample, f"your dataset for sample {index}")
                    packed = pack_target(*pair, index=index)
                    if not is_own:
                        self._warn_of_misfit(packed)
                        packed = packed._replace(pixels=packed.pixels.copy("K"))
                    samples.append(packed)
        return samples

    def _read_at_once(self, indices: list[int]) -> list[Any]:
        """Return what ``__getitems__`` returns as a list, with one sample for each index."""
        samples = self.dataset.__getitems__(indices)
        listed = list(samples) if isinstance(samples, Iterable) else []
        if len(listed) != len(indices):
            raise ColabUtilsError(
                f"The __getitems__ of your dataset returned {len(listed)} samples for the indices "
                f"{indices}. Return one sample for each index, in the order of the indices."
            )
        return listed

    def _warn_of_misfit(self, sample: PackedSample) -> None:
        """Warn once of a box and a mask that do not fit."""
        if self._has_warned[0]:
            return
        tables = sample.tables
        misfit = describe_misfit(tables["boxes"], tables["crops"], tables["image_ids"][0])
        if misfit:
            self._has_warned[0] = True
            warnings.warn(misfit, ColabUtilsWarning, stacklevel=2)


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
        The packed sample. Its pixels are those of ``image``, without a copy.

    Raises:
        ColabUtilsError: The image or the target breaks the contract, a box has no area or is not
            finite, a label is below 1, an ``area`` is negative or not finite, or an ``iscrowd`` is
            neither 0 nor 1.
    """
    image_id = _read_image_id(target, index)
    is_bytes = is_plain(image) and image.dtype == torch.uint8
    if not is_bytes or image.ndim != 3 or len(image) != 3 or not image.numel():
        raise ColabUtilsError(
            f"Expected image {image_id} as a uint8 tensor [3, H, W] on the CPU, found "
            f"{describe_part(image)}. Leave out ToTensor and Normalize, and turn a PIL image into "
            'a tensor with PILToTensor()(image.convert("RGB")) of torchvision.transforms.v2.'
        )
    if target.keys() <= {"image_id"}:
        target = {"labels": [], "boxes": [], "masks": []}
    parts = _read_parts(target, image.shape[1:], image_id)
    # The arrays are copied, because a dataset may write the next sample into the same memory.
    # What is too large for float32 becomes infinite, and is refused below.
    with np.errstate(over="ignore"):
        boxes = parts["boxes"].astype(np.float32)
    labels = parts["labels"].astype(np.int64)
    check_objects(torch.from_numpy(boxes), torch.from_numpy(labels), image_id)
    packed = pack_pixels(parts["masks"])
    for mask, (x0, y0, x1, y1) in zip(parts["masks"], packed.crops.tolist(), strict=True):
        _check_values(mask[y0:y1, x0:x1], image_id)
    if "area" not in parts:
        parts["area"] = np.array([np.count_nonzero(mask) for mask in parts["masks"]])
    crowds = parts.get("iscrowd", np.zeros(len(labels)))
    _check_optional(parts["area"], crowds, image_id)
    tables: Tables = {
        "sizes": np.array([image.shape[1:]], np.int32),
        "image_ids": np.array([image_id], np.int64),
        "counts": np.array([len(labels)], np.int64),
        "boxes": boxes,
        "labels": labels,
        "areas": parts["area"].astype(np.float32),
        "iscrowd": crowds.astype(np.int64),
        "crops": packed.crops,
        "mask_bytes": np.diff(packed.offsets),
    }
    return PackedSample(image.as_subclass(Tensor).numpy().transpose(1, 2, 0), packed.bits, tables)


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


def _read_parts(target: Target, size: Sequence[int], image_id: int) -> Tables:
    """Return the checked parts of a target, for an image of this height and width.

    An empty part means no objects, whatever its shape is.
    """
    parts: Tables = {}
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
                f"Image {image_id} has {key} of {describe_part(value)}, and needs {list(shape)}. "
                "Give each part for every object as a dense tensor on the CPU: labels as integers, "
                "boxes as float32, masks as uint8 or bool."
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


def _check_optional(areas: NDArray[Any], crowds: NDArray[Any], image_id: int) -> None:
    """Raise an error if an area is negative or not finite, or a crowd is neither 0 nor 1."""
    is_sound = (areas >= 0) & (areas < _LARGEST_AREA) & np.isin(crowds, (0, 1))
    if not is_sound.all():
        row = int(is_sound.argmin())
        raise ColabUtilsError(
            f"Image {image_id} has an object with the area {areas[row]} and the iscrowd "
            f"{crowds[row]}. An area is 0 or more pixels; an iscrowd is 1 for a crowd, and 0 for "
            "any other object. Or leave them out: the area is then computed from the mask, and no "
            "object is a crowd."
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


def require_same_classes(dataset: Any) -> None:
    """Refuse joined datasets in which a label means different classes.

    Only the datasets of a ``ConcatDataset`` that have ``class_names`` are compared, a dict from
    each label to its class.

    Raises:
        ColabUtilsError: a label has two classes.

    Example:
        >>> require_same_classes(ConcatDataset([[1, 2], [3]]))
    """
    known: dict[int, str] = {}
    for part in dataset.datasets if isinstance(dataset, ConcatDataset) else ():
        while isinstance(part, Subset):
            part = part.dataset
        for label, name in getattr(part, "class_names", {}).items():
            if known.setdefault(label, name) != name:
                raise ColabUtilsError(
                    f"Label {label} is {known[label]!r} in one of the joined datasets, and "
                    f"{name!r} in another. Give the JSON of both the same categories."
                )


def warn_of_open_file(dataset: Any) -> None:
    """Warn of a file that a dataset keeps open while several workers read it.

    Forked workers share the position in such a file, so that samples may get each other's bytes. It
    is the same with torch's ``DataLoader``.
    """
    name = next(_list_open_files(dataset, type(dataset).__name__, _DEPTH), "")
    if name:
        text = (
            f"{name} is an open file. Workers share its position, so that samples may get each "
            "other's bytes. Open it in __getitem__ when the worker first reads it."
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=2)


def _list_open_files(value: Any, name: str, depth: int) -> Iterator[str]:
    """Yield the name of each attribute that is an open file."""
    if isinstance(value, io.IOBase):
        # A file in memory is copied with the process, and a logger's stream is never read.
        is_on_disk = not isinstance(value, io.BytesIO | io.StringIO)
        if is_on_disk and not value.closed and value.readable():
            yield name
    elif isinstance(value, list | tuple) and value:
        yield from _list_open_files(value[0], f"{name}[0]", depth)
    # The datasets of this package share no positions.
    elif depth and hasattr(value, "__dict__") and not is_own(value):
        for key, part in vars(value).items():
            yield from _list_open_files(part, f"{name}.{key}", depth - 1)
