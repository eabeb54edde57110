"""Mask R-CNN by name: torchvision's two ResNet-50 models and a light one that a laptop's CPU can train."""

from __future__ import annotations

import http.client
import pickle
import socket
import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torchvision.models import get_weight, mobilenet_v3_large
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn_v2
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.backbone_utils import BackboneWithFPN, resnet_fpn_backbone
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import FrozenBatchNorm2d
from torchvision.ops.feature_pyramid_network import LastLevelMaxPool

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import is_watched
from colab_utils.training.checkpoint import CheckpointFolder

__all__ = [
    "GPU_MODEL",
    "LIGHT_MODEL",
    "MODEL_NAMES",
    "assemble_mask_rcnn",
    "build_mask_rcnn",
    "check_model_name",
    "choose_precision",
    "fold_norms",
    "keep_boxes_exact",
    "load_trained_model",
    "shrink_transform",
]


def fold_norms(model: nn.Module) -> int:
    """Fold every ``FrozenBatchNorm2d`` that follows a convolution into it; the model's results stay, but for rounding.

    torchvision's layer works out its factors anew at each call, and multiplies and adds in float32, also where
    autocast computes in half precision. Names, parameters and ``state_dict`` do not change: weights stay compatible
    both ways, and trainable ones go on training.

    Returns:
        How many layers were folded.

    Example:
        >>> block = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), FrozenBatchNorm2d(4))
        >>> fold_norms(block), list(block.state_dict())
        (1, ['0.weight', '1.weight', '1.bias', '1.running_mean', '1.running_var'])
    """
    pairs = list(_find_pairs(model))
    for conv, norm in pairs:
        conv.__class__, norm.__class__ = _FoldedConv2d, _FoldedNorm
        for name in ("scale", "shift", "folded"):
            conv.register_buffer(name, None, persistent=False)
    _refresh(pairs)
    if pairs:  # weights that are loaded later bring factors of their own
        model.register_load_state_dict_post_hook(_refresh_model)
    return len(pairs)


def _find_pairs(model: nn.Module) -> Iterator[tuple[Any, Any]]:
    for conv, norm in _list_neighbours(model):
        follows = type(conv) is nn.Conv2d and conv.bias is None and type(norm) is FrozenBatchNorm2d
        if follows:
            yield conv, norm


def _list_neighbours(model: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Layers that follow each other in a module, in the order in which torchvision's blocks call them."""
    for module in model.modules():
        yield from pairwise(module.children())


def _refresh_model(model: nn.Module, _: Any) -> None:
    _refresh([pair for pair in _list_neighbours(model) if isinstance(pair[0], _FoldedConv2d)])


@torch.no_grad()
def _refresh(pairs: list[tuple[Any, Any]]) -> None:
    for conv, norm in pairs:
        scale = norm.weight * (norm.running_var + norm.eps).rsqrt()
        conv.scale = scale[:, None, None, None]
        conv.shift = norm.bias - norm.running_mean * scale
        conv.folded = None if conv.weight.requires_grad else conv.weight * conv.scale


class _FoldedConv2d(nn.Conv2d):
    scale: Tensor
    shift: Tensor
    folded: Tensor | None

    def forward(self, given: Tensor) -> Tensor:
        weight = self.weight * self.scale if self.folded is None or self.weight.requires_grad else self.folded
        return self._conv_forward(given, weight, self.shift)


class _FoldedNorm(FrozenBatchNorm2d):
    def forward(self, given: Tensor) -> Tensor:
        return given


def load_trained_model(run: str | Path, *, which: Literal["best", "newest"] = "newest") -> MaskRCNN:
    """The model of a run's newest checkpoint, on the CPU, in evaluation mode; averaged weights where there are such.

    ``which="best"`` takes the weights with the highest average precision of masks on the validation images.

    Raises:
        ColabUtilsError: ``run`` holds no such checkpoint.

    Example:
        >>> load_trained_model("no/such/run")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a checkpoint in no/such/run, found none. Train first.
    """
    folder = CheckpointFolder(run)
    state = folder.load_best() if which == "best" else folder.load_newest()
    if state is None:
        cure = "Train with validation shards first" if which == "best" else "Train first"
        raise ColabUtilsError(f"expected a checkpoint in {run}, found none. {cure}.")
    plan = state["plan"]
    names = ("num_classes", "starts_from", "min_size", "max_size")
    model = assemble_mask_rcnn(plan["model"], **{name: plan[name] for name in names})
    for saving in plan.get("savings", ()):
        if saving.startswith("input"):  # it was trained on smaller images than asked for
            shrink_transform(model.transform)
    model.load_state_dict((state.get("average") or state)["model"])
    return model.eval()


GPU_MODEL = "maskrcnn_resnet50_fpn_v2"


LIGHT_MODEL = "maskrcnn_mobilenet_v3_large_fpn"

_WEIGHTS = {
    GPU_MODEL: get_weight("MaskRCNN_ResNet50_FPN_V2_Weights.COCO_V1"),
    "maskrcnn_resnet50_fpn": get_weight("MaskRCNN_ResNet50_FPN_Weights.COCO_V1"),
    LIGHT_MODEL: get_weight("MobileNet_V3_Large_Weights.IMAGENET1K_V1"),
}


MODEL_NAMES = tuple(_WEIGHTS)

_COCO_CLASSES = 91  # background and the 90 category ids of COCO


_DOWNLOAD_TIMEOUT_S = 15.0


def build_mask_rcnn(
    name: str = GPU_MODEL,
    *,
    num_classes: int,
    weights: str | None = "coco",
    min_size: int = 800,
    max_size: int = 1333,
    class_names: Mapping[int, str] | None = None,
) -> MaskRCNN:
    """Build a Mask R-CNN with the right number of classes, in training mode.

    Args:
        name: One of ``MODEL_NAMES``. The light one is a MobileNetV3-Large with a feature pyramid of 64
            channels and about a tenth of the usual proposals.
        num_classes: Classes including the background, as ``ShardDataset.num_classes``.
        weights: ``"coco"`` downloads COCO weights (for the light model ImageNet weights of its backbone, there
            are no others) and freezes the layers that torchvision freezes; if they cannot be had, you are warned
            and get random ones. ``None``: random weights, every layer trains.
        min_size: Shorter side in pixels that the model resizes each image to.
        max_size: Limit of the longer side in pixels.
        class_names: The name of each label, as ``ShardDataset.class_names``: what COCO weights know of classes with
            the same names is kept. Without names the last layers start from random weights.

    Returns:
        torchvision's own ``MaskRCNN``; ``starts_from`` says ``"coco"``, ``"imagenet"`` or ``"random"``.

    Raises:
        ColabUtilsError: Unknown name or weights, or fewer than two classes.

    Example:
        >>> model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, weights=None, min_size=64)
        >>> model.roi_heads.mask_predictor.mask_fcn_logits.out_channels
        3
    """
    check_model_name(name)
    if weights not in ("coco", None):
        raise ColabUtilsError(f"expected weights 'coco' or None, found {weights!r}. Pass one of the two.")
    if num_classes < 2:
        raise ColabUtilsError(
            f"expected num_classes of at least 2 (background and one class), found {num_classes}. "
            "Check the categories of your annotations."
        )
    sizes = {"min_size": min_size, "max_size": max_size}
    state = _fetch_weights(name) if weights else None
    if state is None:
        return assemble_mask_rcnn(name, num_classes=num_classes, starts_from="random", **sizes)
    if name == LIGHT_MODEL:
        model = assemble_mask_rcnn(name, num_classes=num_classes, starts_from="imagenet", **sizes)
        body = model.backbone.body
        body.load_state_dict({key: state[f"features.{key}"] for key in body.state_dict()})
        return model
    model = assemble_mask_rcnn(name, num_classes=_COCO_CLASSES, starts_from="coco", **sizes)
    model.load_state_dict(state)
    if num_classes != _COCO_CLASSES or class_names:
        _replace_heads(model, num_classes, _match_names(class_names or {}))
    return model


def _match_names(class_names: Mapping[int, str]) -> dict[int, int]:
    """Label to COCO's label, of the classes that COCO knows by the same name."""
    coco = _WEIGHTS[GPU_MODEL].meta["categories"]
    labels = {name.lower(): label for label, name in enumerate(coco) if name not in ("__background__", "N/A")}
    found = {label: labels[name.lower()] for label, name in class_names.items() if name.lower() in labels}
    return {0: 0, **found} if found else {}


@torch.no_grad()
def _replace_heads(model: MaskRCNN, num_classes: int, matches: Mapping[int, int]) -> None:
    """Last layers for other classes; what ``matches`` names is copied, the rest is random."""
    heads = model.roi_heads
    boxes, masks = heads.box_predictor, heads.mask_predictor
    heads.box_predictor = FastRCNNPredictor(boxes.cls_score.in_features, num_classes)
    convolution = masks.conv5_mask
    heads.mask_predictor = MaskRCNNPredictor(convolution.in_channels, convolution.out_channels, num_classes)
    heads.mask_predictor.conv5_mask.load_state_dict(convolution.state_dict())
    pairs = (
        (boxes.cls_score, heads.box_predictor.cls_score, 1),
        (boxes.bbox_pred, heads.box_predictor.bbox_pred, 4),
        (masks.mask_fcn_logits, heads.mask_predictor.mask_fcn_logits, 1),
    )
    for there, here, rows in pairs:
        for name in ("weight", "bias"):
            source, target = getattr(there, name), getattr(here, name)
            for label, coco in matches.items():
                target[label * rows : (label + 1) * rows] = source[coco * rows : (coco + 1) * rows]


def assemble_mask_rcnn(name: str, *, num_classes: int, starts_from: str, min_size: int, max_size: int) -> MaskRCNN:
    """Put the layers together without any weights, as a checkpoint needs them; see ``build_mask_rcnn``.

    From ``"random"`` weights all layers train, from ``"imagenet"`` or ``"coco"`` the first ones are frozen.

    Raises:
        ColabUtilsError: Unknown name.

    Example:
        >>> assemble_mask_rcnn(LIGHT_MODEL, num_classes=2, starts_from="imagenet", min_size=64, max_size=96).starts_from
        'imagenet'
    """
    check_model_name(name)
    model = BUILDERS[name](num_classes, pretrained=starts_from != "random", min_size=min_size, max_size=max_size)
    model.starts_from = starts_from
    return model


def _assemble_resnet(num_classes: int, *, pretrained: bool, **sizes: int) -> MaskRCNN:
    # COCO_V1 was trained with an epsilon of 0, see overwrite_eps in torchvision's mask_rcnn.py.
    norm = partial(FrozenBatchNorm2d, eps=0.0) if pretrained else nn.BatchNorm2d
    stages = 3 if pretrained else 5
    backbone = resnet_fpn_backbone(backbone_name="resnet50", weights=None, norm_layer=norm, trainable_layers=stages)
    return MaskRCNN(backbone, num_classes, **sizes)


def _assemble_resnet_v2(num_classes: int, *, pretrained: bool, **sizes: int) -> MaskRCNN:
    model = maskrcnn_resnet50_fpn_v2(weights=None, weights_backbone=None, num_classes=num_classes, **sizes)
    if pretrained:  # torchvision trains the last three of five stages then
        for key, parameter in model.backbone.body.named_parameters():
            parameter.requires_grad_(key.startswith(("layer2", "layer3", "layer4")))
    return model


def _assemble_light(num_classes: int, *, pretrained: bool, **sizes: int) -> MaskRCNN:
    # Momentum 0.1, not MobileNet's 0.01: running statistics must settle within a few hundred steps.
    norm = partial(FrozenBatchNorm2d, eps=1e-3) if pretrained else partial(nn.BatchNorm2d, eps=1e-3, momentum=0.1)
    body = mobilenet_v3_large(weights=None, norm_layer=norm).features
    if pretrained:
        for stage in body[:4]:  # the stages up to stride 4, as torchvision freezes them for its own MobileNet
            stage.requires_grad_(False)
    # The last block of strides 4, 8, 16 and 32, not the first: the more layers, the better the features.
    levels, channels, hidden = {"3": "0", "6": "1", "12": "2", "15": "3"}, 64, 256
    return MaskRCNN(
        BackboneWithFPN(body, levels, [24, 40, 112, 160], channels, extra_blocks=LastLevelMaxPool()),
        # One size a level, from 16 px on: at so small a shorter side, objects of COCO are 10 to 200 px large.
        rpn_anchor_generator=AnchorGenerator(((16,), (32,), (64,), (128,), (256,)), ((0.5, 1.0, 2.0),) * 5),
        rpn_pre_nms_top_n_train=500,
        rpn_post_nms_top_n_train=250,
        rpn_pre_nms_top_n_test=300,
        rpn_post_nms_top_n_test=150,
        rpn_batch_size_per_image=128,
        box_batch_size_per_image=64,
        box_head=TwoMLPHead(channels * 7 * 7, hidden),
        box_predictor=FastRCNNPredictor(hidden, num_classes),
        mask_head=MaskRCNNHeads(channels, (channels,) * 4, 1),
        mask_predictor=MaskRCNNPredictor(channels, channels, num_classes),
        **sizes,
    )


BUILDERS: dict[str, Callable[..., MaskRCNN]] = {
    GPU_MODEL: _assemble_resnet_v2,
    "maskrcnn_resnet50_fpn": _assemble_resnet,
    LIGHT_MODEL: _assemble_light,
}
"""What builds each model without weights: called with the number of classes, ``pretrained``, and the sizes."""


def _fetch_weights(name: str) -> dict[str, Any] | None:
    timeout = socket.getdefaulttimeout()
    socket.setdefaulttimeout(_DOWNLOAD_TIMEOUT_S)  # a network that swallows packets would hang for minutes
    try:
        return _WEIGHTS[name].get_state_dict(progress=is_watched(), check_hash=True)
    # RuntimeError: wrong hash, or a file of torch.hub's cache that was cut short.
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError, http.client.HTTPException) as error:
        warnings.warn(
            f"{name} starts from random weights because its pretrained ones could not be had "
            f"({getattr(error, 'reason', error)}). It will learn, but needs many more steps.",
            ColabUtilsWarning,
            stacklevel=3,
        )
        return None
    finally:
        socket.setdefaulttimeout(timeout)


def check_model_name(name: str) -> None:
    """Refuse a name that is none of ``MODEL_NAMES``.

    Example:
        >>> check_model_name("yolo")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected one of the models maskrcnn_resnet50_fpn_v2, ...
    """
    if name not in BUILDERS:
        raise ColabUtilsError(
            f"expected one of the models {', '.join(MODEL_NAMES)}, found {name!r}. Pass one of these names."
        )


def choose_precision(device: str | torch.device) -> torch.dtype:
    """The dtype for autocast: bfloat16 where the GPU has it (a T4 emulates it, slowly), float16, float32 on a CPU.

    Example:
        >>> choose_precision("cpu")
        torch.float32
    """
    if torch.device(device).type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.get_device_capability(device) >= (8, 0) else torch.float16


def keep_boxes_exact(model: nn.Module) -> bool:
    """Make a model's anchors and proposals in float32, also where autocast computes in half precision.

    torchvision makes them in the dtype of the features. From 512 pixels on, bfloat16 knows only every fourth pixel, and
    float16 every half: boxes are then learned from, and cut out at, places that are off by as much.

    Returns:
        Whether the model has a region proposal network.

    Example:
        >>> keep_boxes_exact(nn.Linear(1, 1))
        False
    """
    rpn = getattr(model, "rpn", None)
    if not isinstance(rpn, RegionProposalNetwork):
        return False
    rpn.head.register_forward_hook(_convert_codes)
    rpn.anchor_generator.register_forward_pre_hook(_stand_in)
    return True


def _convert_codes(head: nn.Module, given: Any, found: tuple[list[Tensor], list[Tensor]]) -> Any:
    return tuple([part.float() for part in parts] for parts in found)


def _stand_in(generator: nn.Module, given: tuple[Any, list[Tensor]]) -> Any:
    """Anchors take shapes, device and dtype of the features, nothing else."""
    images, features = given
    return images, [part.new_empty((), dtype=torch.float32).expand(part.shape) for part in features]


_SMALLER, _LEAST_SIDE = 0.8, 64  # of each side; pixels


def shrink_transform(transform: Any) -> bool:
    """Make the input of a model's transform smaller, in the same shape; False where it is small already."""
    if _SMALLER * min(transform.min_size) < _LEAST_SIDE:
        return False
    transform.min_size = tuple(round(_SMALLER * side) for side in transform.min_size)
    transform.max_size = round(_SMALLER * transform.max_size)
    return True
