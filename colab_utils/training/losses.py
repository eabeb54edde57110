"""The forward pass in training: the losses of torchvision's Mask R-CNN on a packed batch.

The modules of the model run in the order in which torchvision calls them, so that they draw the
same random numbers. Only the mask targets are made in another way: packed masks are expanded a few
at a time, and only those that a proposal belongs to.
"""

import math
import operator
from collections.abc import Sequence
from functools import partial
from types import FunctionType

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection import MaskRCNN, roi_heads
from torchvision.models.detection.roi_heads import RoIHeads, project_masks_on_boxes
from torchvision.ops import box_iou

from colab_utils.data.sizes import Size
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.devices import send
from colab_utils.loading.masks import CHUNK_BYTES, MaskBits, expand_masks
from colab_utils.loading.transforms import check_objects
from colab_utils.training.layers import use_cpu

_COMPARED_OBJECTS = 16

# The heads of torchvision, as they are, except that the masks of a target are a function that gives
# the mask targets. Copies of two functions look up names here, so torchvision itself stays as it
# is, for other threads and other models, too.
_NAMES = {**vars(roi_heads), "project_masks_on_boxes": operator.call}
_NAMES["maskrcnn_loss"] = FunctionType(roi_heads.maskrcnn_loss.__code__, _NAMES)
_run_heads = FunctionType(RoIHeads.forward.__code__, _NAMES)

Tensors = dict[str, Tensor]
"""A target of torchvision's models, or their losses, by name."""


@use_cpu()
def compute_losses(
    model: MaskRCNN,
    batch: PackedBatch,
    *,
    flips: Sequence[bool] | None = None,
) -> Tensors:
    """Return the losses of ``model(images, targets)`` in training mode, from a packed batch.

    With the same random state, the losses and their gradients are those of torchvision. Only mask
    targets are made in another way: torchvision resizes all masks of a batch as floats. This
    function calls ``sample_masks``, which expands a few masks at a time. So the memory for masks
    does not grow with the number of objects. For the same reason, the model keeps a function that
    compares objects with anchors a few at a time, ``rpn.box_similarity``.

    As in torchvision, autocast in half precision rounds boxes, too. To prevent it, call
    `keep_boxes_exact` for the model once, as ``TrainingStep`` does.

    Source: ``GeneralizedRCNN.forward`` and ``RoIHeads.forward`` in torchvision's
    ``models/detection``.

    Args:
        model: A Mask R-CNN in training mode, as ``build_mask_rcnn`` or torchvision makes it.
        batch: B images, with or without objects, on the model's device.
        flips: bool [B]: the images to mirror left to right. Default: none.

    Returns:
        ``loss_classifier``, ``loss_box_reg``, ``loss_mask``, ``loss_objectness`` and
        ``loss_rpn_box_reg``: scalars on the device.

    Raises:
        ColabUtilsError: The model is no Mask R-CNN in training mode, the batch is not packed, a
            box has no area or is not finite, or a label is none of the model's classes.

    Example:
        >>> from colab_utils.loading.batch import collate_packed
        >>> from colab_utils.loading.targets import pack_target
        >>> from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
        >>> mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
        >>> mask[:, 8:40, 8:40] = 1
        >>> target = {
        ...     "boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1]),
        ...     "masks": mask, "image_id": 1, "area": torch.tensor([1024.0]),
        ...     "iscrowd": torch.tensor([0]),
        ... }
        >>> batch = collate_packed([pack_target(torch.zeros(3, 64, 64, dtype=torch.uint8), target)])
        >>> model = build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64)
        >>> sorted(compute_losses(model, batch))
        ['loss_box_reg', 'loss_classifier', 'loss_mask', 'loss_objectness', 'loss_rpn_box_reg']
    """
    if not (isinstance(model, MaskRCNN) and model.training and isinstance(batch, PackedBatch)):
        raise ColabUtilsError(
            "compute_losses takes a Mask R-CNN of torchvision after model.train(), and a batch of "
            f"a loader with deliver='packed'. These are a {type(model).__name__} and a "
            f"{type(batch).__name__}. Otherwise, call model(images, targets) with deliver='dense'. "
            "For several GPUs, wrap a module whose forward calls compute_losses in "
            "DistributedDataParallel."
        )
    if flips is None:
        flips = [False] * len(batch)
    images, targets = model.transform(*_make_input(batch, flips))
    # This check waits for the device. It comes after the images are queued, so that the device has
    # work meanwhile.
    check_objects(
        batch.boxes,
        batch.labels,
        batch.image_ids.repeat_interleave(batch.counts),
        classes=_count_classes(model.roi_heads),
    )
    features = model.backbone(images.tensors)
    if isinstance(features, Tensor):
        features = {"0": features}
    model.rpn.box_similarity = _compare_boxes
    proposals, proposal_losses = model.rpn(images, features, targets)
    for place, target in enumerate(targets):
        target["masks"] = partial(
            sample_masks,
            batch[place : place + 1].masks,
            stored_size=batch.sizes[place].tolist(),
            to_size=images.image_sizes[place],
            is_flipped=flips[place],
        )
    _, losses = _run_heads(model.roi_heads, features, proposals, images.image_sizes, targets)
    return losses | proposal_losses


def _make_input(batch: PackedBatch, flips: Sequence[bool]) -> tuple[list[Tensor], list[Tensors]]:
    """Return images and targets as torchvision models take them, but without their masks."""
    images = batch.to_images(batch.pixels.device)
    counts = batch.counts.tolist()
    targets = []
    rows = zip(batch.boxes.split(counts), batch.labels.split(counts), flips, strict=True)
    for place, (boxes, labels, is_flipped) in enumerate(rows):
        if is_flipped:
            images[place] = images[place].flip(2)
            x0, y0, x1, y1 = boxes.unbind(-1)
            width = images[place].shape[2]
            boxes = torch.stack([width - x1, y0, width - x0, y1], -1)
        targets.append({"boxes": boxes, "labels": labels})
    return images, targets


def _count_classes(heads: RoIHeads) -> float:
    """Return the number of classes of the predictors, the background included. It is infinity for
    predictors of an unknown kind.
    """
    scores = getattr(heads.box_predictor, "cls_score", None)
    masks = getattr(heads.mask_predictor, "mask_fcn_logits", None)
    return min(getattr(scores, "out_features", math.inf), getattr(masks, "out_channels", math.inf))


def _compare_boxes(objects: Tensor, boxes: Tensor) -> Tensor:
    """Return the IoU of boxes, float [N, M], as torchvision's ``box_iou`` does, a few rows at once.

    torchvision compares all objects of an image with all anchors at once, which takes eight times
    the memory of the result: 2.6 GB for 300 objects and the 269,000 anchors of 800 x 1333 pixels.

    Example:
        >>> boxes = torch.tensor([[0.0, 0.0, 2.0, 2.0], [1.0, 0.0, 3.0, 2.0]])
        >>> _compare_boxes(boxes[:1], boxes)
        tensor([[1.0000, 0.3333]])
    """
    return torch.cat([box_iou(few, boxes) for few in objects.split(_COMPARED_OBJECTS)])


@torch.no_grad()
def sample_masks(
    masks: MaskBits,
    boxes: Tensor,
    objects: Tensor,
    size: int,
    *,
    stored_size: list[int],
    to_size: Size,
    is_flipped: bool,
) -> Tensor:
    """Return the mask targets of R proposals of one image, from its packed masks.

    They are torchvision's own. Only masks that a proposal belongs to are expanded, a few at a time:
    the memory grows neither with the number of objects nor with the number of proposals.

    Args:
        masks: The packed masks of the image's N objects.
        boxes: float [R, 4]: x0, y0, x1, y1 of each proposal, in pixels of the mirrored and resized
            image. All are finite.
        objects: int64 [R]: index of each proposal's object among the N. It is read on the CPU. If
            it is on a GPU, the call waits for the GPU.
        size: Rows and columns of a target: 28 in Mask R-CNN.
        stored_size: Height and width of the stored image in pixels.
        to_size: Height and width in pixels after resizing. Masks are resized by nearest neighbour.
        is_flipped: Whether the image is mirrored left to right.

    Returns:
        float32 [R, size, size] from 0 to 1, on the device of the bits.

    Example:
        >>> crops = torch.tensor([[1, 0, 3, 2]], dtype=torch.int32)
        >>> bits = torch.tensor([0b10110000], dtype=torch.uint8)
        >>> masks = MaskBits(bits, crops, torch.tensor([0, 1]))
        >>> box, image = torch.tensor([[0.0, 0.0, 4.0, 2.0]]), [2, 4]
        >>> objects = torch.tensor([0])
        >>> sizes = {"stored_size": image, "to_size": image}
        >>> sample_masks(masks, box, objects, 2, is_flipped=False, **sizes).tolist()
        [[[0.625, 0.125], [0.75, 0.25]]]
    """
    device = masks.bits.device
    targets = torch.empty(len(objects), size, size, device=device)
    owners, places = np.unique(objects.cpu().numpy(), return_inverse=True)
    # A pixel of a resized mask takes one byte, and four as float32.
    count = max(1, CHUNK_BYTES[device.type] // (math.prod(stored_size) + 5 * math.prod(to_size)))
    for first in range(0, len(owners), count):
        few = owners[first : first + count]
        part = MaskBits(masks.bits, masks.crops[few], masks.offsets[few])
        [dense] = expand_masks(part, [stored_size], [len(few)])
        if is_flipped:
            dense = dense.flip(2)
        resized = functional.interpolate(dense[:, None], to_size)[:, 0]
        rows = np.flatnonzero(places // count == first // count)
        row, place = send(np.stack([rows, places[rows] - first]), device)
        targets[row] = project_masks_on_boxes(resized, boxes[row], place, size).float()
    return targets
