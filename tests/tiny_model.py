"""A tiny Mask R-CNN of torchvision's own class: importing this module lets `build_mask_rcnn` and
`train` build it.

``from tests.tiny_model import TINY_MODEL``, then ``train(..., model=TINY_MODEL, weights=None,
min_size=64)``: about 0.3 million parameters, and a few milliseconds a step at 64 pixels. A program
that a test starts imports it, too.
"""

from __future__ import annotations

from itertools import pairwise

from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.ops import Conv2dNormActivation, FrozenBatchNorm2d

from colab_utils.training import model as models
from colab_utils.training.layers import put_heads

__all__ = ["TINY_MODEL", "build_tiny"]

TINY_MODEL = "tiny"


def build_tiny(num_classes: int, *, pretrained: bool) -> MaskRCNN:
    """Four stages of one convolution each; with ``pretrained`` its norms and its first stage are
    frozen.
    """
    norm = FrozenBatchNorm2d if pretrained else nn.BatchNorm2d
    body = nn.Sequential()
    for a, b in pairwise((3, 16, 32, 48, 64)):
        body.append(Conv2dNormActivation(a, b, stride=2, norm_layer=norm))
    if pretrained:
        body[0].requires_grad_(False)
    return put_heads(body, {"1": 32, "2": 48, "3": 64}, (12, 24, 48, 96), num_classes, scale=1)


models.BUILDERS[TINY_MODEL] = build_tiny
