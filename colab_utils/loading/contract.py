"""The contract of a sample: its target, its packed form, and whose fault an error is."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from colab_utils.errors import MACHINE_FAULTS, ColabUtilsError, UnavailableError

Target = dict[str, Any]
"""torchvision's target: boxes float32 [N, 4] (x0, y0, x1, y1 in pixels), labels int64 [N], masks
uint8 [N, H, W], image_id int, area float32 [N], iscrowd int64 [N]."""

Transforms = Callable[..., Any]
"""A callable from (image, target) to (image, target), such as one of
``torchvision.transforms.v2``."""

LEAVE_TO_LOADER = (
    "Leave out .cuda() and .to(device) in your dataset, and give make_loader a device: it sends "
    "whole batches there."
)
"""What to do if a dataset puts its samples on a GPU."""


class PackedSample(NamedTuple):
    """An image and its objects as they are sent to the training process."""

    pixels: NDArray[np.uint8]
    """uint8 [H, W, 3]: the image."""
    bits: NDArray[np.uint8]
    """uint8 [bytes]: the bits of all masks, one mask after the other."""
    tables: dict[str, NDArray[Any]]
    """The tables of this image alone; see `PackedSamples.describe`."""


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
                f"Your dataset used the GPU in a worker, where it cannot work. {LEAVE_TO_LOADER}"
            )
        raise BadSampleError(error, place) from None
