"""The layers of the light and the tiny Mask R-CNN, with random weights."""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

from torch import nn
from torchvision.models import mobilenet_v3_large
from torchvision.models.detection import (
    MaskRCNN,
)
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import Conv2dNormActivation
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool


def assemble_light(num_classes: int, *, pretrained: bool, **sizes: int) -> MaskRCNN:
    """Build a Mask R-CNN on MobileNetV3-Large. With ``pretrained``, freeze its first stages."""
    # The batch norm of MobileNet has a momentum of 0.01. With 0.1, its running statistics settle in
    # a few hundred steps.
    norm = partial(nn.BatchNorm2d, eps=1e-3, momentum=0.1)
    body = mobilenet_v3_large(weights=None, norm_layer=norm).features
    if pretrained:
        # torchvision, too, freezes the stages up to stride 4 of its MobileNet.
        for stage in body[:4]:
            stage.requires_grad_(False)
    # For each of the strides 4, 8, 16 and 32, the pyramid takes the last block: of the blocks of a
    # stride, the deepest has the best features. The smallest anchors have 16 px, because objects of
    # COCO are 10 to 200 px long after the images are resized.
    levels = {"3": 24, "6": 40, "12": 112, "15": 160}
    anchors = (16, 32, 64, 128, 256)
    return _put_heads(body, levels, anchors, num_classes, scale=2, **sizes)


def assemble_tiny(num_classes: int, *, pretrained: bool, **sizes: int) -> MaskRCNN:
    """Build a Mask R-CNN on seven convolutions. It ignores ``pretrained``: no weights exist."""
    widths = (24, 48, 64, 96)
    body = nn.Sequential(Conv2dNormActivation(3, widths[0], stride=2))
    for a, b in pairwise(widths):
        body.append(nn.Sequential(Conv2dNormActivation(a, b, stride=2), Conv2dNormActivation(b, b)))
    levels = {"1": 48, "2": 64, "3": 96}
    return _put_heads(body, levels, (12, 24, 48, 96), num_classes, scale=1, **sizes)


def _put_heads(
    body: nn.Sequential,
    levels: dict[str, int],
    anchors: Sequence[int],
    num_classes: int,
    *,
    scale: int,
    **sizes: int,
) -> MaskRCNN:
    """Build a Mask R-CNN on a body, with a feature pyramid.

    Args:
        body: The backbone.
        levels: The stages of the body that the pyramid takes, with their channels.
        anchors: The size of the anchors in pixels on each level. The last size is for the level
            that pooling adds.
        num_classes: Classes, the background included.
        scale: Factor that multiplies the numbers of channels and of proposals. At 2, the heads have
            a quarter of the channels that torchvision's Mask R-CNN has.
        **sizes: ``min_size`` and ``max_size``.
    """
    names = {stage: str(level) for level, stage in enumerate(levels)}
    channels = 32 * scale
    hidden = 128 * scale
    return MaskRCNN(
        BackboneWithFPN(body, names, [*levels.values()], channels, extra_blocks=LastLevelMaxPool()),
        rpn_anchor_generator=AnchorGenerator(
            [(size,) for size in anchors], [(0.5, 1.0, 2.0)] * len(anchors)
        ),
        rpn_pre_nms_top_n_train=250 * scale,
        rpn_post_nms_top_n_train=125 * scale,
        rpn_pre_nms_top_n_test=150 * scale,
        rpn_post_nms_top_n_test=75 * scale,
        rpn_batch_size_per_image=64 * scale,
        box_batch_size_per_image=32 * scale,
        box_head=TwoMLPHead(channels * 7 * 7, hidden),
        box_predictor=FastRCNNPredictor(hidden, num_classes),
        mask_head=MaskRCNNHeads(channels, (channels,) * 2 * scale, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, num_classes),
        **sizes,
    )
