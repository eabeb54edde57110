"""Training a Mask R-CNN on shards.

``train`` chooses the settings, ``trainer`` has the loop, and ``step`` trains one batch.
"""

from colab_utils.training.losses import compute_losses
from colab_utils.training.model import build_mask_rcnn, load_trained_model
from colab_utils.training.step import TrainingStep

__all__ = ["TrainingStep", "build_mask_rcnn", "compute_losses", "load_trained_model"]
