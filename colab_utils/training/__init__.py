"""Training a Mask R-CNN on shards: ``train`` chooses, ``trainer`` holds the loop, ``step`` is one step."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

_MODULE_OF = {
    "TrainingStep": "step",
    "build_mask_rcnn": "model",
    "compute_losses": "losses",
    "load_trained_model": "model",
}

__all__ = ["TrainingStep", "build_mask_rcnn", "compute_losses", "load_trained_model"]

if TYPE_CHECKING:
    from colab_utils.training.losses import compute_losses
    from colab_utils.training.model import build_mask_rcnn, load_trained_model
    from colab_utils.training.step import TrainingStep


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'colab_utils.training' has no attribute {name!r}")
    return getattr(import_module(f"colab_utils.training.{_MODULE_OF[name]}"), name)
