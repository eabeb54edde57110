"""Find and cure data-loading stalls when you train torchvision Mask R-CNN on Google Colab.

Importing this package is light: no torch, no network, no mount, no folder made. Each name below is
imported from its module when you first use it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

_MODULE_OF = {
    "ColabUtilsError": "errors",
    "Workspace": "workspace",
    "check_dataset": "data.checks",
    "write_shards": "shards.write",
    "verify_shards": "shards.verify",
    "copy_shards": "shards.copy",
    "ShardDataset": "loading.dataset",
    "make_loader": "loading.loader",
    "diagnose": "diagnosis.diagnose",
    "simulate": "diagnosis.simulator",
    "compare": "comparison.compare",
    "build_mask_rcnn": "training.model",
    "train": "training.train",
}

__all__ = [*_MODULE_OF, "__version__"]

if TYPE_CHECKING:
    from colab_utils.comparison.compare import compare
    from colab_utils.data.checks import check_dataset
    from colab_utils.diagnosis.diagnose import diagnose
    from colab_utils.diagnosis.simulator import simulate
    from colab_utils.errors import ColabUtilsError
    from colab_utils.loading.dataset import ShardDataset
    from colab_utils.loading.loader import make_loader
    from colab_utils.shards.copy import copy_shards
    from colab_utils.shards.verify import verify_shards
    from colab_utils.shards.write import write_shards
    from colab_utils.training.model import build_mask_rcnn
    from colab_utils.training.train import train
    from colab_utils.workspace import Workspace


def __getattr__(name: str) -> object:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'colab_utils' has no attribute {name!r}")
    return getattr(import_module(f"colab_utils.{_MODULE_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
