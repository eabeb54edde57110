"""Each image has 300 polygons, which become 300 dense masks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from benchmarks.causes.loop import Loop, Step, make_plain_loader
from colab_utils.loading.dataset import CocoFolder
from colab_utils.sample_data import make_dataset

EXPECTED = "masks"
NEXT = r"(?i)packed|shards|make_loader"
EPOCHS = 1


def collate(samples: list[tuple[Any, Any]]) -> tuple[Any, ...]:
    """As torchvision's references do."""
    return tuple(zip(*samples, strict=True))


def make_loop(folder: Path) -> Loop:
    """Small images that are full of objects."""
    made = make_dataset(folder, n=4, width=160, height=120, objects=(300, 300), workers=1)
    dataset = CocoFolder(made.images, made.annotations)
    return make_plain_loader(dataset, collate_fn=collate), Step(), None
