"""The forward pass in training: the losses of torchvision's Mask R-CNN on a packed batch.

Images are resized on the device, anchors are matched in chunks, and mask targets are sampled from packed masks: no
dense mask is made.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torchvision.models.detection import MaskRCNN
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.generalized_rcnn import GeneralizedRCNN
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.roi_heads import RoIHeads, fastrcnn_loss
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.models.detection.transform import GeneralizedRCNNTransform
from torchvision.ops import box_iou

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.masks import flip_boxes, sample_masks, send
from colab_utils.training.augment import Size, choose_sizes, fit_shape

__all__ = ["compute_losses", "make_input", "match_boxes", "match_in_chunks"]

_CHUNK_PAIRS = 1 << 21  # of an object and an anchor: box_iou takes about 40 bytes for each


def compute_losses(model: MaskRCNN, batch: PackedBatch, *, flips: Sequence[bool] | None = None) -> dict[str, Tensor]:
    """The losses that ``model(images, targets)`` gives in training mode, from a packed batch on the model's device.

    The model's own backbone, proposals and heads run, with its own settings. Three parts are replaced: `make_input`
    does the work of its transform, `match_in_chunks` matches anchors, and ``sample_masks`` takes each mask
    target, 28 x 28 pixels, from the stored bits. torchvision resizes all masks of an image and makes floats of them;
    here memory for masks follows the boxes of the proposals, not the image's area times its objects. With the same
    random state the losses equal torchvision's, except for rounding.

    Source: ``GeneralizedRCNN.forward`` and ``RoIHeads.forward`` in torchvision ``models/detection``.

    Args:
        model: in training mode, as ``build_mask_rcnn`` or torchvision makes it.
        batch: B images, with or without objects.
        flips: bool [B]: the images to mirror left to right; none by default.

    Returns:
        ``loss_classifier``, ``loss_box_reg``, ``loss_mask``, ``loss_objectness`` and ``loss_rpn_box_reg``: float32
        scalars on the device.

    Raises:
        ColabUtilsError: The model is no Mask R-CNN in training mode, or the batch is not packed.

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
    _check_input(model, batch)
    flips = [False] * len(batch) if flips is None else flips
    sizes = choose_sizes(model.transform, batch.sizes.tolist())
    images, targets = make_input(model.transform, batch, sizes, flips=flips)
    features = model.backbone(images.tensors)
    if isinstance(features, Tensor):
        features = OrderedDict([("0", features)])
    with match_in_chunks(model.rpn):
        proposals, proposal_losses = model.rpn(images, features, targets)
    heads = model.roi_heads
    # torchvision checks that there are masks, but does not read them here
    checked = [{**target, "masks": target["labels"]} for target in targets]
    proposals, matched, labels, regression = heads.select_training_samples(proposals, checked)
    pooled = heads.box_head(heads.box_roi_pool(features, proposals, _list_shapes(images)))
    loss_classifier, loss_box_reg = fastrcnn_loss(*heads.box_predictor(pooled), labels, regression)
    return {
        "loss_classifier": loss_classifier,
        "loss_box_reg": loss_box_reg,
        "loss_mask": _compute_mask_loss(heads, features, images, proposals, matched, labels, batch, flips),
        **proposal_losses,
    }


def _check_input(model: Any, batch: Any) -> None:
    name = type(model).__name__
    problem = ""
    if isinstance(model, DistributedDataParallel | DataParallel):
        problem = f"a model without {name} around it: wrap a module whose forward calls compute_losses instead"
    elif not isinstance(model, GeneralizedRCNN) or not getattr(model.roi_heads, "has_mask", bool)():
        problem = f"a Mask R-CNN of torchvision, found {name}: call model(images, targets) with deliver='dense'"
    elif not model.training:
        problem = "a model in training mode, found one in evaluation mode: call model.train() first"
    elif not isinstance(batch, PackedBatch):
        problem = f"a packed batch, found {type(batch).__name__}: make the loader with deliver='packed'"
    if problem:
        raise ColabUtilsError(f"expected {problem}")


def make_input(
    transform: GeneralizedRCNNTransform, batch: PackedBatch, sizes: Sequence[Size], *, flips: Sequence[bool]
) -> tuple[ImageList, list[dict[str, Tensor]]]:
    """A packed batch as the model's backbone takes it, on the batch's device, with the settings of its transform.

    Args:
        transform: of the model.
        batch: B images.
        sizes: height and width that each image is resized to, see `choose_sizes`.
        flips: bool [B]: the images to mirror left to right.

    Returns:
        The images, float32 [B, 3, H, W], mirrored, normalised, resized (bilinear) and padded with zeros as torchvision
        does it; and for each image ``boxes``, float32 [N, 4] in pixels of the resized image, and ``labels``, int64 [N].
    """
    device = batch.pixels.device
    shape = fit_shape(sizes, step=transform.size_divisible)
    padded = torch.zeros((len(batch), 3, *shape), device=device)
    mean, std = send(np.array([transform.image_mean, transform.image_std], np.float32), device)[..., None, None]
    for row, image, (height, width), flip in zip(padded, batch.split_images(), sizes, flips, strict=True):
        normal = (image.flip(2) if flip else image).float().div_(255).sub_(mean).div_(std)
        resized = functional.interpolate(normal[None], (height, width), mode="bilinear", align_corners=False)
        row[:, :height, :width] = resized[0]
    counts = batch.counts.tolist()
    boxes = _resize_boxes(batch, sizes, flips).split(counts)
    targets = [
        {"boxes": part, "labels": labels} for part, labels in zip(boxes, batch.labels.split(counts), strict=True)
    ]
    return ImageList(padded, list(sizes)), targets


def _resize_boxes(batch: PackedBatch, sizes: Sequence[Size], flips: Sequence[bool]) -> Tensor:
    """All boxes of a batch, float32 [T, 4], in pixels of the mirrored and resized images."""
    boxes, device = batch.boxes, batch.boxes.device
    image_of = np.repeat(np.arange(len(batch)), batch.counts.numpy())  # the image of each object
    if any(flips):
        widths, mirrored = batch.sizes[:, 1].numpy()[image_of], np.array(flips)[image_of]
        boxes = torch.where(send(mirrored, device)[:, None], flip_boxes(boxes, send(widths, device)), boxes)
    ratios = np.array(sizes, np.float32) / batch.sizes.numpy().astype(np.float32)  # of heights and widths
    return boxes * send(ratios[:, [1, 0, 1, 0]][image_of], device)


def _compute_mask_loss(
    heads: RoIHeads, features: dict[str, Tensor], images: ImageList, proposals: list[Tensor], matched: list[Tensor],
    labels: list[Tensor], batch: PackedBatch, flips: Sequence[bool],
) -> Tensor:  # fmt: skip
    """The loss of the masks of all positive proposals.

    ``matched`` has the object of its image that each proposal is compared with; ``labels`` are 0 for the background.
    """
    boxes, label, match = map(torch.cat, (proposals, labels, matched))
    # the device is read once for all images: each reading waits for it
    table = torch.cat([boxes.float(), label[:, None], match[:, None]], 1).cpu().numpy()
    positive = np.flatnonzero(table[:, 4] > 0)
    image_of = np.repeat(np.arange(len(proposals)), [len(part) for part in proposals])[positive]
    rows = send(positive, boxes.device)
    positives = boxes[rows].split(np.bincount(image_of, minlength=len(proposals)).tolist())
    pooled = heads.mask_roi_pool(features, list(positives), _list_shapes(images))
    logits = heads.mask_predictor(heads.mask_head(pooled))
    if not len(logits):
        return logits.sum() * 0
    first_object = np.cumsum(batch.counts.numpy()) - batch.counts.numpy()  # of each image
    objects = table[positive, 5].astype(np.int64) + first_object[image_of]
    targets = sample_masks(
        batch.masks, torch.from_numpy(objects), torch.from_numpy(table[positive, :4]), sizes=batch.sizes,
        counts=batch.counts, flips=flips, to_sizes=images.image_sizes, size=logits.shape[-1],
    )  # fmt: skip
    chosen = logits[torch.arange(len(objects), device=logits.device), label[rows]]
    return functional.binary_cross_entropy_with_logits(chosen.float(), targets)


def _list_shapes(images: ImageList) -> list[Size]:
    """The padded shape, for each image. From these shapes torchvision's pooling computes the scale of each feature map
    in its first batch, and keeps it. From the images' own sizes that scale is wrong where the batch has much padding.
    """
    height, width = images.tensors.shape[-2:]
    return [(height, width)] * len(images.image_sizes)


def match_boxes(matcher: Matcher, objects: Tensor, boxes: Tensor) -> Tensor:
    """The result of ``matcher(box_iou(objects, boxes))``, without the matrix of N objects times M boxes.

    For an image of 300 objects and 243,000 anchors the matrix takes 290 MB, and ``box_iou`` ten times that.

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
    # an object keeps the boxes that overlap it most, even if the overlap is small
    parts = [overlaps] if len(chunks) == 1 else (box_iou(objects, chunk) for chunk in chunks)
    closest = torch.cat([(part == highest[:, None]).any(0) for part in parts])
    return torch.where(closest, every, matches)


class _ChunkedMatcher(Matcher):
    """A model's matcher of anchors, which is given objects and anchors in place of their overlaps."""

    def __call__(self, pair: Any) -> Tensor:
        return match_boxes(self, *pair)


@contextmanager
def match_in_chunks(rpn: RegionProposalNetwork) -> Iterator[None]:
    """Let a model's anchors be matched by `match_boxes`."""
    matcher, similarity = rpn.proposal_matcher, rpn.box_similarity
    limits = matcher.high_threshold, matcher.low_threshold, matcher.allow_low_quality_matches
    rpn.proposal_matcher, rpn.box_similarity = _ChunkedMatcher(*limits), lambda objects, anchors: (objects, anchors)
    try:
        yield
    finally:
        rpn.proposal_matcher, rpn.box_similarity = matcher, similarity
