"""The forward pass in training: the losses of torchvision's Mask R-CNN on a packed batch.

The modules of the model run in the order in which torchvision calls them, so that they draw the
same random numbers. Only the mask targets are made in another way: they are sampled from packed
masks, so that no dense mask is made or resized.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.data.sizes import Size
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.mask_targets import sample_masks
from colab_utils.loading.masks import flip_boxes
from colab_utils.loading.targets import check_objects
from colab_utils.training.torch_defaults import use_cpu

Tensors = dict[str, Tensor]
"""A target of torchvision's models, or their losses, by name."""
_COMPARED_OBJECTS = 16


@use_cpu()
def compute_losses(
    model: MaskRCNN,
    batch: PackedBatch,
    *,
    flips: Sequence[bool] | None = None,
) -> Tensors:
    """Return the losses of ``model(images, targets)`` in training mode, from a packed batch.

    With the same random state, the losses and their gradients are those of torchvision. Only mask
    targets differ, by a rounding of 1e-6. torchvision resizes all masks of an image as floats. This
    function calls ``sample_masks``, which makes each target of 28 x 28 pixels from the stored bits.
    So the memory for masks grows with the number of boxes, and not with the area of the image.

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
    _check_input(model, batch)
    if flips is None:
        flips = [False] * len(batch)
    images, targets = make_input(model.transform, batch, flips=flips)
    # This check waits for the device. It comes after the images are queued, so that the device has
    # work meanwhile.
    image_ids = batch.image_ids.repeat_interleave(batch.counts)
    check_objects(batch.boxes, batch.labels, image_ids, classes=_count_classes(model.roi_heads))
    features = model.backbone(images.tensors)
    if isinstance(features, Tensor):
        features = {"0": features}
    proposals, proposal_losses = _find_proposals(model.rpn, images, features, targets)
    heads = model.roi_heads
    regions, matches, labels, offsets = heads.select_training_samples(proposals, targets)
    box_losses = _compute_box_losses(
        heads,
        features,
        regions,
        labels,
        offsets,
        sizes=images.image_sizes,
    )
    mask_loss = _compute_mask_loss(
        heads,
        features,
        regions,
        matches,
        labels,
        batch,
        flips=flips,
        sizes=images.image_sizes,
    )
    return {**box_losses, "loss_mask": mask_loss, **proposal_losses}


def _check_input(model: Any, batch: Any) -> None:
    """Refuse a model that is no Mask R-CNN in training mode, and a batch that is not packed."""
    name = type(model).__name__
    if isinstance(model, DistributedDataParallel | DataParallel):
        raise ColabUtilsError(
            f"The model is wrapped in {name}, which compute_losses cannot look into. Wrap a module "
            "whose forward calls compute_losses instead."
        )
    if not isinstance(model, MaskRCNN):
        raise ColabUtilsError(
            f"{name} is no Mask R-CNN of torchvision. Make the loader with deliver='dense', and "
            "call model(images, targets)."
        )
    if not model.training:
        raise ColabUtilsError("The model is in evaluation mode. Call model.train() first.")
    if not isinstance(batch, PackedBatch):
        raise ColabUtilsError(
            f"A batch of type {type(batch).__name__} is not packed. Make the loader with "
            "deliver='packed'."
        )


def make_input(
    transform: GeneralizedRCNNTransform,
    batch: PackedBatch,
    *,
    flips: Sequence[bool],
) -> tuple[ImageList, list[Tensors]]:
    """Transform a packed batch as ``transform(images, targets)`` does, but without masks.

    Images are transformed one at a time. torchvision needs all images of a batch as floats in their
    stored size at once, and a photo of 12 megapixels then takes 144 MB.

    Args:
        transform: The transform of the model.
        batch: B images, on the model's device.
        flips: bool [B]: the images to mirror left to right.

    Returns:
        The images, mirrored, normalised, resized and padded, and a dict for each image with its
        ``boxes``, ``labels`` and ``masks``. ``masks`` is an empty tensor: torchvision's sampling
        requires the key, and does not read the value.
    """
    counts = batch.counts.tolist()
    boxes_of_images = batch.boxes.split(counts)
    labels_of_images = batch.labels.split(counts)
    rows = zip(batch.split_images(), boxes_of_images, labels_of_images, flips, strict=True)
    resized = []
    targets = []
    for pixels, boxes, labels, is_flipped in rows:
        if is_flipped:
            pixels = pixels.flip(2)
            boxes = flip_boxes(boxes, pixels.shape[2])
        image = pixels.to(torch.float32, memory_format=torch.contiguous_format).div_(255)
        target = {"boxes": boxes, "labels": labels}
        image, target = transform.resize(transform.normalize(image), target)
        target["masks"] = boxes.new_empty(0)
        resized.append(image)
        targets.append(target)
    padded = transform.batch_images(resized, transform.size_divisible)
    sizes = [(image.shape[1], image.shape[2]) for image in resized]
    return ImageList(padded, sizes), targets


def _count_classes(heads: RoIHeads) -> float:
    """Return the number of classes of the predictors, the background included. It is infinity for
    predictors of an unknown kind.
    """
    scores = getattr(heads.box_predictor, "cls_score", None)
    masks = getattr(heads.mask_predictor, "mask_fcn_logits", None)
    return min(getattr(scores, "out_features", math.inf), getattr(masks, "out_channels", math.inf))


def _find_proposals(
    rpn: RegionProposalNetwork,
    images: ImageList,
    features: Mapping[str, Tensor],
    targets: list[Tensors],
) -> tuple[list[Tensor], Tensors]:
    """Return the proposals of each image, and the losses of the proposal network.

    torchvision compares all objects of an image with all anchors at once. Its tensors together take
    eight times the memory of the result: 2.6 GB for 300 objects and the 269,000 anchors of 800 x
    1333 pixels. This function compares a few objects at a time, and gets the same values.
    """
    compare = rpn.box_similarity
    rpn.box_similarity = partial(_compare_in_parts, compare)
    try:
        proposals, losses = rpn(images, features, targets)
    finally:
        rpn.box_similarity = compare
    return proposals, losses


def _compare_in_parts(
    compare: Callable[[Tensor, Tensor], Tensor],
    objects: Tensor,
    boxes: Tensor,
) -> Tensor:
    """Return ``compare(objects, boxes)``, a row for each object. Compare a few at a time."""
    rows = boxes.new_empty(len(objects), len(boxes))
    parts = rows.split(_COMPARED_OBJECTS)
    for part, few in zip(parts, objects.split(_COMPARED_OBJECTS), strict=True):
        part.copy_(compare(few, boxes))
    return rows


def _take_rows(parts: Sequence[Tensor], rows: Sequence[Tensor]) -> list[Tensor]:
    """Return, for each image, those rows of its tensor in ``parts`` that ``rows`` lists."""
    return [part[row] for part, row in zip(parts, rows, strict=True)]


def _compute_box_losses(
    heads: RoIHeads,
    features: Mapping[str, Tensor],
    regions: Sequence[Tensor],
    labels: list[Tensor],
    offsets: list[Tensor],
    *,
    sizes: list[Size],
) -> Tensors:
    """Return the losses of the classes and of the boxes of all regions.

    Args:
        heads: The heads of the model.
        features: The features that its backbone computed.
        regions: float [R, 4] of each image.
        labels: int64 [R] of each image: the class of each region, 0 for the background.
        offsets: float [R, 4] of each image: regression targets from each region to its object.
        sizes: Height and width that each image was resized to.
    """
    pooled = heads.box_roi_pool(features, regions, sizes)
    scores, predicted = heads.box_predictor(heads.box_head(pooled))
    class_loss, box_loss = fastrcnn_loss(scores, predicted, labels, offsets)
    return {"loss_classifier": class_loss, "loss_box_reg": box_loss}


def _compute_mask_loss(
    heads: RoIHeads,
    features: Mapping[str, Tensor],
    regions: Sequence[Tensor],
    matches: Sequence[Tensor],
    labels: Sequence[Tensor],
    batch: PackedBatch,
    *,
    flips: Sequence[bool],
    sizes: list[Size],
) -> Tensor:
    """Return the loss of the masks of all positive regions.

    Args:
        heads: The heads of the model.
        features: The features that its backbone computed.
        regions: float [R, 4] of each image.
        matches: int64 [R] of each image: the index of the object that each region belongs to.
        labels: int64 [R] of each image: the class of each region, 0 for the background.
        batch: The batch that holds the masks.
        flips: bool [B]: the images that are mirrored.
        sizes: Height and width that each image was resized to.
    """
    positives = [torch.where(part > 0)[0] for part in labels]
    boxes = _take_rows(regions, positives)
    pooled = heads.mask_roi_pool(features, boxes, sizes)
    logits: Tensor = heads.mask_predictor(heads.mask_head(pooled))
    if len(logits) == 0:
        return logits.sum() * 0
    # The index of each image's first object among all objects of the batch.
    firsts = accumulate(batch.counts.tolist()[:-1], initial=0)
    objects = _take_rows(matches, positives)
    objects = [part + first for part, first in zip(objects, firsts, strict=True)]
    targets = sample_masks(
        batch.masks,
        torch.cat(objects),
        torch.cat(boxes),
        sizes=batch.sizes,
        counts=batch.counts,
        flips=flips,
        to_sizes=sizes,
        size=logits.shape[-1],
    )
    label = torch.cat(_take_rows(labels, positives))
    row = torch.arange(len(label), device=label.device)
    return functional.binary_cross_entropy_with_logits(logits[row, label], targets)
