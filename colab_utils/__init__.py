"""Find and cure data-loading stalls when you train torchvision Mask R-CNN on Google Colab.

Importing this package is fast: it does not import torch, use the network, mount Drive or make a
folder. Each public name is imported from its module when you first use it.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING

__version__ = "0.1.0"

# Waiting threads of OpenMP must sleep. If they spin, they take the cores from the loader's workers,
# and training on a CPU falls to a fifth of its speed. OpenMP reads this variable once, when torch
# is loaded, so import colab_utils before torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

__all__ = [  # noqa: RUF022
    "ArrivingShards",
    "CocoFolder",
    "ColabUtilsError",
    "ShardDataset",
    "Workspace",
    "build_mask_rcnn",
    "check_dataset",
    "compare",
    "copy_images",
    "copy_shards",
    "diagnose",
    "finish_shards",
    "load_trained_model",
    "make_loader",
    "open_dataset",
    "simulate",
    "train",
    "verify_shards",
    "watch",
    "write_shards",
    "__version__",
]

if TYPE_CHECKING:
    from colab_utils.comparison.compare import compare
    from colab_utils.course.workspace import Workspace
    from colab_utils.data.checks import check_dataset
    from colab_utils.diagnosis.diagnose import diagnose
    from colab_utils.diagnosis.simulator import simulate
    from colab_utils.diagnosis.watch import watch
    from colab_utils.errors import ColabUtilsError
    from colab_utils.loading.arriving import ArrivingShards
    from colab_utils.loading.coco_folder import CocoFolder
    from colab_utils.loading.dataset import ShardDataset
    from colab_utils.loading.image_copy import copy_images
    from colab_utils.loading.loader import make_loader
    from colab_utils.loading.opening import open_dataset
    from colab_utils.shards.copy import copy_shards
    from colab_utils.shards.verify import verify_shards
    from colab_utils.shards.write import finish_shards, write_shards
    from colab_utils.training.model import build_mask_rcnn, load_trained_model
    from colab_utils.training.train import train


_MODULES = {
    "ArrivingShards": "colab_utils.loading.arriving",
    "CocoFolder": "colab_utils.loading.coco_folder",
    "ColabUtilsError": "colab_utils.errors",
    "ShardDataset": "colab_utils.loading.dataset",
    "Workspace": "colab_utils.course.workspace",
    "build_mask_rcnn": "colab_utils.training.model",
    "check_dataset": "colab_utils.data.checks",
    "compare": "colab_utils.comparison.compare",
    "copy_images": "colab_utils.loading.image_copy",
    "copy_shards": "colab_utils.shards.copy",
    "diagnose": "colab_utils.diagnosis.diagnose",
    "finish_shards": "colab_utils.shards.write",
    "load_trained_model": "colab_utils.training.model",
    "make_loader": "colab_utils.loading.loader",
    "open_dataset": "colab_utils.loading.opening",
    "simulate": "colab_utils.diagnosis.simulator",
    "train": "colab_utils.training.train",
    "verify_shards": "colab_utils.shards.verify",
    "watch": "colab_utils.diagnosis.watch",
    "write_shards": "colab_utils.shards.write",
}


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'colab_utils' has no attribute {name!r}")
    return getattr(import_module(_MODULES[name]), name)


def load_ipython_extension(shell: object) -> None:
    """Watch the loaders of each cell from now on: ``%load_ext colab_utils``."""
    from colab_utils.diagnosis.script import watch_notebook

    watch_notebook(shell)


def __dir__() -> list[str]:
    return sorted(__all__)
