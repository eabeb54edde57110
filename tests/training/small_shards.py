"""Small shards and quick runs for tests of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from colab_utils.course.sample_data import BuiltinDataset, make_dataset
from colab_utils.shards.write import write_shards
from tests.tiny_model import TINY_MODEL

TINY: dict[str, Any] = {
    "model": TINY_MODEL,
    "weights": None,
    "min_size": 64,
    "max_size": 96,
    "workers": 0,
    "batch_size": 2,
}
"""Arguments of ``train`` that train in no time."""


def make_shards(folder: Path, *, shard_mb: float = 128, **settings: Any) -> BuiltinDataset:
    """Make a dataset of small images in ``data``, and its shards in ``shards``."""
    usual = {"width": 96, "height": 80, "objects": (1, 3), "workers": 1}
    made = make_dataset(folder / "data", **usual | settings)
    shards = folder / "shards"
    write_shards(made.images, made.annotations, shards=shards, shard_mb=shard_mb, workers=1)
    return made


def list_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())
