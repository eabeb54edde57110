"""A tiny Mask R-CNN of torchvision's own class: importing this module lets `build_mask_rcnn` and
`train` build it.

``from tests.tiny_model import TINY_MODEL``, then ``train(..., model=TINY_MODEL, weights=None,
min_size=64)``: about 0.2 million parameters, and a few milliseconds a step at 64 pixels. A program
that a test starts imports it, too.
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise

from torch import nn
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from colab_utils.training import model as models

__all__ = ["TINY_MODEL", "build_tiny"]

TINY_MODEL = "tiny"


def build_tiny(num_classes: int, *, pretrained: bool) -> MaskRCNN:
    """Four stages of one convolution each; with ``pretrained`` its norms and its first stage are
    frozen.
    """
    norm = FrozenBatchNorm2d if pretrained else partial(nn.BatchNorm2d, momentum=0.1)
    widths = (3, 16, 32, 48, 64)
    stages = [
        nn.Sequential(
            nn.Conv2d(a, b, 3, stride=2, padding=1, bias=False),
            norm(b),
            nn.ReLU(),
        )
        for a, b in pairwise(widths)
    ]
    if pretrained:
        stages[0].requires_grad_(False)
    channels = 32
    hidden = 64
    return MaskRCNN(
        BackboneWithFPN(
            nn.Sequential(*stages),
            {"1": "0", "2": "1", "3": "2"},
            widths[2:],
            channels,
            extra_blocks=LastLevelMaxPool(),
        ),
        rpn_anchor_generator=AnchorGenerator(
            ((12,), (24,), (48,), (96,)),
            ((0.5, 1.0, 2.0),) * 4,
        ),
        rpn_pre_nms_top_n_train=100,
        rpn_post_nms_top_n_train=50,
        rpn_pre_nms_top_n_test=100,
        rpn_post_nms_top_n_test=50,
        rpn_batch_size_per_image=64,
        box_batch_size_per_image=32,
        box_head=TwoMLPHead(channels * 7 * 7, hidden),
        box_predictor=FastRCNNPredictor(hidden, num_classes),
        mask_head=MaskRCNNHeads(channels, (channels,), 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, num_classes),
    )


models.BUILDERS[TINY_MODEL] = build_tiny
