"""Eight workers for each core, 16 on two cores: an epoch begins late, as all work at their first
batches at once.
"""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader
from colab_utils.machine import count_cores

EXPECTED = "too_many_workers"
NEXT = r"(?i)fewer workers"
EPOCHS = 40


def augment(image: Tensor, label: int) -> tuple[Tensor, int]:
    """Flip, with much other work for the CPU."""
    burn(10)
    return image.flip(-1), label


def make_loop(folder: Path, *, workers: int | None = None) -> Loop:
    """Each worker has the cores for a moment: all first batches are late, and then none is left to
    load.
    """
    dataset = Photos(folder, transforms=augment)
    count = workers or 8 * count_cores()
    return (
        make_plain_loader(dataset, batches=32, workers=count, persistent_workers=True),
        Step(),
        None,
    )
