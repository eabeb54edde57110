"""The losses of torchvision's Mask R-CNN on a packed batch: resized on the device, mask targets without dense masks."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import box_iou

from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.masks import flip_boxes, sample_masks, send
from colab_utils.training.augment import Size, View, choose_views, fit_shape

__all__ = ["ModelInput", "assign_anchors", "compute_losses", "make_input", "match_boxes"]

_CHUNK_PAIRS = 1 << 21  # of an object and an anchor: box_iou takes about 40 bytes for each


def match_boxes(matcher: Matcher, objects: Tensor, boxes: Tensor) -> Tensor:
    """What ``matcher(box_iou(objects, boxes))`` gives, without the matrix of N objects times M boxes.

    An image of 300 objects and 243,000 anchors has one of 290 MB, and ``box_iou`` needs ten times that to make it.

    Args:
        matcher: torchvision's.
        objects: float32 [N, 4], one or more: x0, y0, x1, y1 in pixels.
        boxes: float32 [M, 4].

    Returns:
        int64 [M]: the object of each box, -1 for none, -2 for one between the thresholds.

    Example:
        >>> matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
        >>> boxes = torch.tensor([[0.0, 0, 4, 4], [0, 0, 4, 2], [6, 6, 9, 9]])
        >>> match_boxes(matcher, torch.tensor([[0.0, 0, 4, 4]]), boxes).tolist()
        [0, -2, -1]
    """
    chunks = boxes.split(max(1, _CHUNK_PAIRS // len(objects)))
    best, values, overlaps = [], [], torch.empty(0)
    highest = objects.new_full((len(objects),), -1.0)
    for chunk in chunks:
        overlaps = box_iou(objects, chunk)
        value, index = overlaps.max(0)
        best.append(index)
        values.append(value)
        highest = torch.maximum(highest, overlaps.amax(1))
    every, value = torch.cat(best), torch.cat(values)
    matches = every.masked_fill(value < matcher.high_threshold, matcher.BETWEEN_THRESHOLDS)
    matches = matches.masked_fill(value < matcher.low_threshold, matcher.BELOW_LOW_THRESHOLD)
    if not matcher.allow_low_quality_matches:
        return matches
    # an object keeps the boxes that overlap it most, however little that is
    parts = [overlaps] if len(chunks) == 1 else (box_iou(objects, chunk) for chunk in chunks)
    closest = torch.cat([(part == highest[:, None]).any(0) for part in parts])
    return torch.where(closest, every, matches)


def assign_anchors(
    rpn: RegionProposalNetwork, anchors: list[Tensor], targets: list[dict[str, Tensor]]
) -> tuple[list[Tensor], list[Tensor]]:
    """What ``rpn.assign_targets_to_anchors`` gives: labels (1, 0 or -1 for neither) and boxes of every anchor.

    Source: torchvision ``models/detection/rpn.py``.
    """
    labels, matched = [], []
    for boxes, target in zip(anchors, targets, strict=True):
        objects = target["boxes"]
        if not len(objects):
            labels.append(boxes.new_zeros(len(boxes)))
            matched.append(torch.zeros_like(boxes))
            continue
        matches = match_boxes(rpn.proposal_matcher, objects, boxes)
        labels.append((matches >= 0).float() - (matches == rpn.proposal_matcher.BETWEEN_THRESHOLDS).float())
        matched.append(objects[matches.clamp(min=0)])
    return labels, matched


def compute_losses(
    model: MaskRCNN,
    batch: PackedBatch,
    *,
    flips: Sequence[bool] | None = None,
    jitter_side: int | None = None,
    shapes: Sequence[Size] = (),
) -> dict[str, Tensor]:
    """What ``model(images, targets)`` gives in training mode, from a packed batch on the model's device.

    The model's own backbone, proposals and heads run, with its own settings. Its transform is replaced by
    `make_input`; anchors are matched in chunks (`assign_anchors`); each mask target, 28 x 28 pixels, is sampled from
    the stored bits by ``sample_masks``, where torchvision resizes all masks of an image and makes floats of them:
    memory for masks follows the proposals' boxes, not image area times objects. With the same random state the losses
    are torchvision's own, but for rounding.

    Source: ``GeneralizedRCNN.forward`` and ``RoIHeads.forward`` in torchvision ``models/detection``.

    Args:
        model: in training mode, as ``build_mask_rcnn`` or torchvision makes it.
        batch: B images, with their objects or without any.
        flips: bool [B]: the images to mirror left to right; none by default.
        jitter_side: side in pixels of the square that large-scale jitter fills, and that images are padded to; None,
            the default, leaves it out.
        shapes: heights and widths to pad to where one holds the batch; by default sides are rounded up as
            torchvision does it.

    Returns:
        ``loss_classifier``, ``loss_box_reg``, ``loss_mask``, ``loss_objectness`` and ``loss_rpn_box_reg``: float32
        scalars on the device.

    Example:
        >>> from colab_utils.loading.batch import collate_packed
        >>> from colab_utils.loading.batch import pack_target
        >>> from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
        >>> mask = torch.zeros(1, 64, 64, dtype=torch.uint8)
        >>> mask[:, 8:40, 8:40] = 1
        >>> target = {"boxes": torch.tensor([[8.0, 8, 40, 40]]), "labels": torch.tensor([1]), "masks": mask,
        ...           "image_id": 1, "area": torch.tensor([1024.0]), "iscrowd": torch.tensor([0])}
        >>> batch = collate_packed([pack_target(torch.zeros(3, 64, 64, dtype=torch.uint8), target)])
        >>> model = build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64)
        >>> sorted(compute_losses(model, batch))
        ['loss_box_reg', 'loss_classifier', 'loss_mask', 'loss_objectness', 'loss_rpn_box_reg']
    """
    layout = next(iter(model.backbone.parameters()))
    if jitter_side:  # as torchvision's FixedSizeCrop: batch norm learns nothing from one small image alone
        shapes = ((jitter_side, jitter_side),)
    views = choose_views(model.transform, batch.sizes.tolist(), flips=flips, jitter_side=jitter_side)
    given = make_input(model.transform, batch, views, shapes=shapes, channels_last=_is_channels_last(layout))
    images, targets = given.images, given.targets
    features = model.backbone(images.tensors)
    if isinstance(features, Tensor):
        features = OrderedDict([("0", features)])
    with _match_in_chunks(model.rpn):
        proposals, proposal_losses = model.rpn(images, features, targets)
    heads = model.roi_heads
    checked = [{**target, "masks": target["labels"]} for target in targets]  # it asks for the key, and reads it not
    proposals, matched, labels, regression = heads.select_training_samples(proposals, checked)
    found = heads.box_head(heads.box_roi_pool(features, proposals, _list_shapes(images)))
    loss_classifier, loss_box_reg = fastrcnn_loss(*heads.box_predictor(found), labels, regression)
    losses = {"loss_classifier": loss_classifier, "loss_box_reg": loss_box_reg}
    losses["loss_mask"] = _compute_mask_loss(heads, features, given, proposals, matched, labels, batch)
    return {**losses, **proposal_losses}


class ModelInput(NamedTuple):
    """A packed batch as the model's backbone takes it, and where its parts come from."""

    images: ImageList
    """float32 [B, 3, H, W], padded with zeros, and the size of each image in it."""
    targets: list[dict[str, Tensor]]
    """``boxes``, float32 [N, 4] in pixels of the image as it is shown, and ``labels``, int64 [N]."""
    views: list[View]
    rows: NDArray[np.int64]
    """[K]: the object, among those of the batch, that each of the K targets of all images is."""


def make_input(
    transform: GeneralizedRCNNTransform,
    batch: PackedBatch,
    views: Sequence[View],
    *,
    shapes: Sequence[Size] = (),
    channels_last: bool = False,
) -> ModelInput:
    """A packed batch as the model's backbone takes it, on the batch's device, with the settings of its transform.

    Mirrored, normalised, resized (bilinear) and padded as torchvision does it; of an image that is shown in part, only
    objects with an area in the window are kept.
    """
    device = batch.pixels.device
    stored = np.array(batch.sizes, np.float32)
    scales = np.array([view.size for view in views], np.float32)[:, ::-1] / stored[:, ::-1]
    height, width = fit_shape([view.shown for view in views], shapes, step=transform.size_divisible)
    mean, std = send(np.array([transform.image_mean, transform.image_std], np.float32), device)[..., None, None]
    layout = torch.channels_last if channels_last else torch.contiguous_format
    padded = torch.zeros((len(batch), 3, height, width), device=device).contiguous(memory_format=layout)
    for row, image, view in zip(padded, batch.split_images(), views, strict=True):
        normal = (image.flip(2) if view.flip else image).float().div_(255).sub_(mean).div_(std)[None]
        (top, left), (tall, wide) = view.corner, view.shown
        resized = functional.interpolate(normal, view.size, mode="bilinear", align_corners=False)[0]
        row[:, :tall, :wide] = resized[:, top : top + tall, left : left + wide]
    of = np.repeat(np.arange(len(batch)), batch.counts.numpy())
    boxes, rows, counts = batch.boxes, np.arange(len(of)), batch.counts.tolist()
    if any(view.flip for view in views):
        widths = send(batch.sizes[:, 1].numpy()[of], device)
        mask = send(np.array([view.flip for view in views])[of], device)
        boxes = torch.where(mask[:, None], flip_boxes(boxes, widths), boxes)
    boxes, labels = boxes * send(np.tile(scales, 2)[of], device), batch.labels
    if any(view.shown != view.size for view in views):
        limits = np.array([(*view.corner, *view.shown) for view in views], np.float32).reshape(-1, 2, 2)[:, :, ::-1]
        corners, sides = (send(np.tile(part, 2)[of], device) for part in limits.swapaxes(0, 1))
        boxes = torch.minimum((boxes - corners).clamp(min=0), sides)
        rows = np.flatnonzero((boxes[:, 2:] > boxes[:, :2]).all(1).cpu().numpy())
        counts = np.bincount(of[rows], minlength=len(batch)).tolist()
        boxes, labels = (part[send(rows, device)] for part in (boxes, labels))
    parts = zip(boxes.split(counts), labels.split(counts), strict=True)
    targets = [{"boxes": part, "labels": label} for part, label in parts]
    return ModelInput(ImageList(padded, [view.shown for view in views]), targets, list(views), rows)


def _compute_mask_loss(
    heads: RoIHeads, features: dict[str, Tensor], given: ModelInput, proposals: list[Tensor], matched: list[Tensor],
    labels: list[Tensor], batch: PackedBatch,
) -> Tensor:  # fmt: skip
    """``matched``: which of its image's targets each proposal is compared with; ``labels``: 0 for the background."""
    # one reading of all images: each would wait for the device
    every, label, match = map(torch.cat, (proposals, labels, matched))
    known = torch.cat([every.float(), label[:, None], match[:, None]], 1).cpu().numpy()
    positive = np.flatnonzero(known[:, 4] > 0)
    image = np.repeat(np.arange(len(proposals)), [len(part) for part in proposals])[positive]
    places = send(positive, batch.pixels.device)
    boxes = every[places].split(np.bincount(image, minlength=len(proposals)).tolist())
    logits = heads.mask_predictor(heads.mask_head(heads.mask_roi_pool(features, boxes, _list_shapes(given.images))))
    if not len(logits):
        return logits.sum() * 0
    firsts = np.cumsum([0, *(len(target["labels"]) for target in given.targets)])
    of = given.rows[known[positive, 5].astype(np.int64) + firsts[image]]
    corners = np.array([view.corner[::-1] * 2 for view in given.views], np.float32)  # of the window, in the whole image
    targets = sample_masks(
        batch.masks, torch.from_numpy(of), torch.from_numpy(known[positive, :4] + corners[image]), sizes=batch.sizes,
        counts=batch.counts, flips=[view.flip for view in given.views], to_sizes=[view.size for view in given.views],
        size=logits.shape[-1],
    )  # fmt: skip
    chosen = logits[torch.arange(len(of), device=logits.device), label[places]]
    return functional.binary_cross_entropy_with_logits(chosen.float(), targets)


def _list_shapes(images: ImageList) -> list[Size]:
    """The padded shape for each image: torchvision's pooling divides the first batch's feature maps by it, and keeps
    what it finds; by the images' own sizes it is wrong for good where that batch happens to be mostly padding.
    """
    height, width = images.tensors.shape[-2:]
    return [(height, width)] * len(images.image_sizes)


def _is_channels_last(weight: Tensor) -> bool:
    return weight.ndim == 4 and weight.is_contiguous(memory_format=torch.channels_last) and not weight.is_contiguous()


@contextmanager
def _match_in_chunks(rpn: RegionProposalNetwork) -> Iterator[None]:
    name = "assign_targets_to_anchors"
    vars(rpn)[name] = partial(assign_anchors, rpn)
    try:
        yield
    finally:
        del vars(rpn)[name]
