"""Mask R-CNN by name: torchvision's two ResNet-50 models, a light one that a laptop's CPU can
train, and a tiny one for small, easy pictures.

`build_mask_rcnn` makes a model to train, and `load_trained_model` loads one from a run. Every model
is torchvision's own ``MaskRCNN``. So its weights load into a model that torchvision built with the
same layers, and the weights of such a model load here.
"""

import socket
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from torch import nn
from torchvision.models import get_weight
from torchvision.models.detection import (
    MaskRCNN,
    maskrcnn_resnet50_fpn,
    maskrcnn_resnet50_fpn_v2,
)
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor
from torchvision.models.detection.mask_rcnn import MaskRCNNPredictor

from colab_utils.data.defects import USUAL_DETECTIONS
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.places import PlaceLike
from colab_utils.progress import is_watched
from colab_utils.require import require_choice
from colab_utils.training.checkpoint import CheckpointFolder, State
from colab_utils.training.layers import assemble_light, assemble_tiny, freeze_norms, use_cpu

GPU_MODEL = "maskrcnn_resnet50_fpn_v2"

LIGHT_MODEL = "maskrcnn_mobilenet_v3_large_fpn"

TINY_MODEL = "maskrcnn_tiny_fpn"

_WEIGHTS = {
    GPU_MODEL: get_weight("MaskRCNN_ResNet50_FPN_V2_Weights.COCO_V1"),
    "maskrcnn_resnet50_fpn": get_weight("MaskRCNN_ResNet50_FPN_Weights.COCO_V1"),
    LIGHT_MODEL: get_weight("MobileNet_V3_Large_Weights.IMAGENET1K_V1"),
}

# Classes of the COCO weights, with the background.
_COCO_CLASSES = len(_WEIGHTS[GPU_MODEL].meta["categories"])


def build_mask_rcnn(
    name: str = GPU_MODEL,
    *,
    num_classes: int,
    weights: PlaceLike | None = "coco",
    min_size: int = 800,
    max_size: int = 1333,
) -> MaskRCNN:
    """Build a Mask R-CNN with the right number of classes, in training mode.

    Args:
        name: One of the keys of ``BUILDERS``. The light model is a MobileNetV3-Large with a feature
            pyramid of 64 channels and an eighth of the usual proposals. The tiny model has seven
            convolutions before its pyramid, and always starts from random weights. It learns small
            and easy pictures, as notebook 04 shows, and is not for photos.
        num_classes: Classes including the background, as ``ShardDataset.num_classes``.
        weights: ``"coco"`` downloads COCO weights and freezes the layers that torchvision freezes.
            No COCO weights are published for the two small models: the light one gets ImageNet
            weights for its backbone, and the tiny one gets random weights. If the download fails,
            you are warned, and the weights are random. The statistics of pretrained batch norms are
            frozen, as in Detectron2: those of a batch of a few images would be no better, and
            frozen norms save time, see `fold_norms`. Pass the folder of a run to start from its
            best checkpoint, or from its newest if there is no best one. ``None`` makes random
            weights and trains every layer. If the weights have another number of classes, the last
            layers start from random weights.
        min_size: Shorter side in pixels that the model resizes each image to.
        max_size: Limit of the longer side in pixels.

    Returns:
        torchvision's own ``MaskRCNN``. Its attribute ``starts_from`` is ``"coco"``, ``"imagenet"``
        or ``"random"``.

    Raises:
        ColabUtilsError: The name or the weights are unknown, the run has another model, or there
            are fewer than two classes.

    Example:
        >>> model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, weights=None, min_size=64)
        >>> model.roi_heads.mask_predictor.mask_fcn_logits.out_channels
        3
    """
    if num_classes < 2:
        raise ColabUtilsError(
            f"num_classes is {num_classes}, but it counts the background, too. Pass at least 2."
        )
    assemble = partial(assemble_mask_rcnn, name, min_size=min_size, max_size=max_size)
    state = _fetch_pretrained(name) if weights == "coco" and name in _WEIGHTS else None
    if weights not in (None, "coco"):
        model = _load_run(name, weights)
        _set_sizes(model, min_size, max_size)
    elif state is None:
        model = assemble(num_classes=num_classes, starts_from="random")
    elif name == LIGHT_MODEL:
        model = assemble(num_classes=num_classes, starts_from="imagenet")
        body = model.backbone.body
        body.load_state_dict({key: state[f"features.{key}"] for key in body.state_dict()})
    else:
        model = assemble(num_classes=_COCO_CLASSES, starts_from="coco")
        model.load_state_dict(state)
    if model.roi_heads.box_predictor.cls_score.out_features != num_classes:
        _replace_heads(model, num_classes)
    return model


def assemble_mask_rcnn(
    name: str,
    *,
    num_classes: int,
    starts_from: str,
    min_size: int,
    max_size: int,
) -> MaskRCNN:
    """Build the layers of a model with random weights, to load a checkpoint into.

    With ``starts_from="random"`` all layers are trained. With ``"imagenet"`` or ``"coco"`` the
    first layers and all norms are frozen. For the other arguments see ``build_mask_rcnn``.

    Raises:
        ColabUtilsError: Unknown name.

    Example:
        >>> sizes = {"min_size": 64, "max_size": 96}
        >>> model = assemble_mask_rcnn(LIGHT_MODEL, num_classes=2, starts_from="imagenet", **sizes)
        >>> model.starts_from
        'imagenet'
    """
    require_choice("model", name, BUILDERS)
    model = BUILDERS[name](num_classes, pretrained=starts_from != "random")
    _set_sizes(model, min_size, max_size)
    if starts_from != "random":
        freeze_norms(model)
    model.starts_from = starts_from
    return model


@use_cpu()
def load_trained_model(run: PlaceLike, *, which: Literal["best", "newest"] = "newest") -> MaskRCNN:
    """Load the model of a run's newest checkpoint to the CPU, in evaluation mode.

    No file is changed. The model finds up to 100 objects in an image, or as many as an image of the
    training data has. The model has ``class_names`` (label to name) and ``category_ids`` (label to
    COCO category id) of its training data.

    Args:
        run: Folder of the run.
        which: ``"newest"``, the default, or ``"best"``: the checkpoint with the highest average
            precision of masks on the validation images.

    Raises:
        ColabUtilsError: ``run`` holds no such checkpoint.

    Example:
        >>> load_trained_model("no/such/run")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no newest checkpoint in no/such/run. ...
    """
    state = CheckpointFolder(run).read(which)
    if state is None:
        raise ColabUtilsError(
            f"There is no {which} checkpoint in {run}. Train first, for the best with val_shards."
        )
    return read_model(state).eval()


def allow_detections(model: MaskRCNN, objects: int) -> None:
    """Let a model find this many objects in an image, and propose twice as many regions.

    With up to 100 objects, the model stays as it is.
    """
    if objects <= USUAL_DETECTIONS:
        return
    model.roi_heads.detections_per_img = objects
    for regions in (model.rpn._pre_nms_top_n, model.rpn._post_nms_top_n):
        regions["testing"] = max(regions["testing"], 2 * objects)


def read_model(state: State) -> MaskRCNN:
    """Return the model of a checkpoint, as `CheckpointFolder.read` gives it, in training mode."""
    plan = state["plan"]
    names = ("num_classes", "starts_from", "min_size", "max_size")
    model = assemble_mask_rcnn(plan["model"], **{name: plan[name] for name in names})
    model.load_state_dict(state["model"])
    allow_detections(model, plan["most_objects"])
    model.class_names = state["class_names"]
    model.category_ids = state["category_ids"]
    return model


def _assemble_resnet(
    build: Callable[..., MaskRCNN], num_classes: int, *, pretrained: bool
) -> MaskRCNN:
    model = build(weights=None, weights_backbone=None, num_classes=num_classes)
    if pretrained:
        # torchvision, too, trains only the last three of five stages of a pretrained backbone.
        for key, parameter in model.backbone.body.named_parameters():
            parameter.requires_grad_(key.startswith(("layer2", "layer3", "layer4")))
        # These weights were trained with an eps of 0. See overwrite_eps in torchvision's source.
        if build is maskrcnn_resnet50_fpn:
            for norm in model.modules():
                if isinstance(norm, nn.BatchNorm2d):
                    norm.eps = 0.0
    return model


BUILDERS: dict[str, Callable[..., MaskRCNN]] = {
    GPU_MODEL: partial(_assemble_resnet, maskrcnn_resnet50_fpn_v2),
    "maskrcnn_resnet50_fpn": partial(_assemble_resnet, maskrcnn_resnet50_fpn),
    LIGHT_MODEL: assemble_light,
    TINY_MODEL: assemble_tiny,
}
"""The function that builds each model without weights. Its arguments are the number of classes and
``pretrained``.
"""


def _fetch_pretrained(name: str) -> Mapping[str, Any] | None:
    """Download the published weights of a model. If that fails, warn and return None."""
    timeout = socket.getdefaulttimeout()
    # Without a timeout, a network that loses all packets would hang for minutes.
    socket.setdefaulttimeout(15.0)
    try:
        return _WEIGHTS[name].get_state_dict(progress=is_watched(), check_hash=True)
    # The network failed, or the file is cut short or has another checksum.
    except Exception as error:
        text = (
            f"{name} starts from random weights because its weights could not be downloaded "
            f"({error}). It needs many more steps."
        )
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)
        return None
    finally:
        socket.setdefaulttimeout(timeout)


def _load_run(name: str, run: PlaceLike) -> MaskRCNN:
    """Load the model of a run's best checkpoint.

    Without a best checkpoint, take the newest.
    """
    state = CheckpointFolder(run).read("best") or CheckpointFolder(run).read("newest")
    if state is None:
        raise ColabUtilsError(
            f"The weights are {str(run)!r}, which is no folder of a run. Pass 'coco', None or the "
            "folder of a run. A file of weights goes into a model of build_mask_rcnn: "
            "model.load_state_dict(torch.load(FILE))."
        )
    model = read_model(state)
    trained = state["plan"]["model"]
    if trained != name:
        raise ColabUtilsError(
            f"The run in {run} has weights of the model {trained}, and not of {name}. Pass "
            "the name of the run's model."
        )
    return model


def _set_sizes(model: MaskRCNN, min_size: int, max_size: int) -> None:
    """Let a model resize images to these sizes."""
    model.transform.min_size = (min_size,)
    model.transform.max_size = max_size


def _replace_heads(model: MaskRCNN, num_classes: int) -> None:
    """Replace the last layers by layers for so many classes, with random weights."""
    heads = model.roi_heads
    features = heads.box_predictor.cls_score.in_features
    heads.box_predictor = FastRCNNPredictor(features, num_classes)
    channels = heads.mask_predictor.mask_fcn_logits.in_channels
    logits = MaskRCNNPredictor(channels, channels, num_classes).mask_fcn_logits
    heads.mask_predictor.mask_fcn_logits = logits
