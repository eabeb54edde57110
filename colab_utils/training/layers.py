"""Layers that torchvision lacks: batch norms that are frozen or folded, boxes in float32 under
autocast, and the light and the tiny Mask R-CNN.

`freeze_norms` freezes the statistics of pretrained weights. `fold_norms` makes them part of the
convolutions before them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle
from torchvision.models import mobilenet_v3_large
from torchvision.models.detection import FasterRCNN, MaskRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.ops import Conv2dNormActivation, FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool


def freeze_norms(model: nn.Module) -> None:
    """Replace every batch norm by a ``FrozenBatchNorm2d``. The names in ``state_dict`` stay.

    Example:
        >>> model = nn.Sequential(nn.BatchNorm2d(4))
        >>> freeze_norms(model)
        >>> model
        Sequential(
          (0): FrozenBatchNorm2d(4, eps=1e-05)
        )
    """
    for module in [*model.modules()]:
        for name, norm in module.named_children():
            if type(norm) is nn.BatchNorm2d:
                setattr(module, name, FrozenBatchNorm2d(norm.num_features, eps=norm.eps))


def fold_norms(model: nn.Module) -> None:
    """Fold every ``FrozenBatchNorm2d`` into the convolution before it.

    Results stay the same, except for rounding. Folding saves time: torchvision's layer computes its
    factors again at each call, and multiplies and adds in float32, even under autocast. The names,
    the parameters and the ``state_dict`` of the model do not change. So the weights of a folded
    model load into one that is not folded, and the other way round. Weights that were trainable
    are still trained.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), FrozenBatchNorm2d(4))
        >>> fold_norms(block)
        >>> list(block.state_dict())
        ['0.weight', '1.weight', '1.bias', '1.running_mean', '1.running_var']
    """
    for conv, norm in [*_find_pairs(model, nn.Conv2d)]:
        conv.__class__ = _FoldedConv2d
        norm.__class__ = _FoldedNorm
    _compute_factors(model)
    # Weights that are loaded later need new factors.
    model.register_load_state_dict_post_hook(_compute_factors)


def _find_pairs(model: nn.Module, kind: type[nn.Conv2d]) -> Iterator[tuple[Any, Any]]:
    """Yield each convolution with the norm that follows it among the children of a module.

    torchvision's blocks call their children in the order in which ``children`` lists them.
    """
    for module in model.modules():
        for conv, norm in pairwise(module.children()):
            if type(conv) is kind and conv.bias is None and isinstance(norm, FrozenBatchNorm2d):
                yield conv, norm


@torch.no_grad()
def _compute_factors(model: nn.Module, _: Any = None) -> None:
    for conv, norm in _find_pairs(model, _FoldedConv2d):
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        shift = norm.bias - norm.running_mean * scale
        conv.register_buffer("scale", scale[:, None, None, None], persistent=False)
        conv.register_buffer("shift", shift, persistent=False)


class _FoldedConv2d(nn.Conv2d):
    scale: Tensor
    shift: Tensor

    def forward(self, features: Tensor) -> Tensor:
        return self._conv_forward(features, self.weight * self.scale, self.shift)


class _FoldedNorm(FrozenBatchNorm2d):
    def forward(self, features: Tensor) -> Tensor:
        return features


def choose_precision(device: str | torch.device) -> torch.dtype:
    """Choose the dtype for autocast: float32 on a CPU, and on a GPU bfloat16 or float16.

    bfloat16 needs a GPU with compute capability 8.0. Older ones, such as a T4, emulate it slowly.

    Example:
        >>> choose_precision("cpu")
        torch.float32
    """
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def keep_boxes_exact(model: nn.Module) -> list[RemovableHandle]:
    """Compute a model's anchors, proposals and boxes in float32, even under autocast.

    torchvision computes them in the dtype of the features. From 512 pixels on, bfloat16 rounds
    positions to 4 pixels, and float16 to half a pixel. Boxes would be wrong by as much.

    Returns:
        The handles that remove the hooks; none for a model without a region proposal network.

    Example:
        >>> keep_boxes_exact(nn.Linear(1, 1))
        []
    """
    if not isinstance(model, FasterRCNN):
        return []
    return [
        model.rpn.head.register_forward_hook(_to_float),
        model.rpn.anchor_generator.register_forward_pre_hook(_give_float_features),
        model.roi_heads.box_predictor.register_forward_hook(_to_float),
    ]


def _to_float(module: nn.Module, inputs: Any, outputs: Any) -> Any:
    return tree_map(Tensor.float, outputs)


def _give_float_features(generator: nn.Module, inputs: tuple[Any, list[Tensor]]) -> Any:
    """Replace the features for the anchor generator by float32 tensors of the same shapes.

    The generator reads only shape, device and dtype, so the values do not matter.
    """
    images, features = inputs
    return images, [part.new_empty((), dtype=torch.float32).expand(part.shape) for part in features]


@contextmanager
def use_cpu() -> Iterator[None]:
    """Use the CPU as torch's default device, whatever ``torch.set_default_device`` has set."""
    cpu = torch.device("cpu")
    # Setting a default device makes each of torch's functions a little slower. So none is set if
    # the CPU is the default already.
    with nullcontext() if torch.get_default_device() == cpu else cpu:
        yield


def assemble_light(num_classes: int, *, pretrained: bool) -> MaskRCNN:
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
    return put_heads(body, levels, anchors, num_classes, scale=2)


def assemble_tiny(num_classes: int, *, pretrained: bool) -> MaskRCNN:
    """Build a Mask R-CNN on seven convolutions. It ignores ``pretrained``: no weights exist."""
    widths = (24, 48, 64, 96)
    body = nn.Sequential(Conv2dNormActivation(3, widths[0], stride=2))
    for a, b in pairwise(widths):
        body.append(nn.Sequential(Conv2dNormActivation(a, b, stride=2), Conv2dNormActivation(b, b)))
    levels = {"1": 48, "2": 64, "3": 96}
    return put_heads(body, levels, (12, 24, 48, 96), num_classes, scale=1)


def put_heads(
    body: nn.Sequential,
    levels: dict[str, int],
    anchors: Sequence[int],
    num_classes: int,
    *,
    scale: int,
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
    )
