"""The contract of a sample: its target, its packed form, and whose fault an error is."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

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
