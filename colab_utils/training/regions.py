"""Anchors, proposals and regions of a whole batch at once: tensors [B, ...] on the device, which nothing waits for.

torchvision goes image by image, and asks the device again and again how many boxes are left: a fast GPU then waits for
its next call. Here each step has a fixed number of places, and a mask says which of them count.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import log2
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder, Matcher
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.image_list import ImageList
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import MultiScaleRoIAlign, nms, roi_align

from colab_utils.loading.masks import send

__all__ = [
    "Canvas", "Objects", "Samples", "decode_boxes", "encode_boxes", "find_proposals", "gather_rows", "join_levels",
    "make_anchors", "match_objects", "pool_regions", "sample_regions",
]  # fmt: skip

_PAIRS = {"cuda": 1 << 25, "cpu": 1 << 21}  # of an object and a box that are compared at once, 40 bytes each
_NMS_BOXES = {"cuda": 1 << 15, "cpu": 1 << 12}  # of one call: a GPU compares all pairs, in n² / 8 bytes
_KEPT_SHAPES = 16  # of anchors: 4 MB each


class Objects(NamedTuple):
    """The objects of B images, G places for each."""

    boxes: Tensor
    """float32 [B, G, 4]: x0, y0, x1, y1 in pixels of the resized image."""
    labels: Tensor
    """int64 [B, G]."""
    exists: Tensor
    """bool [B, G]."""


class Samples(NamedTuple):
    """The boxes of B images that a loss looks at, S places for each; positive ones come first."""

    places: Tensor
    """int64 [B, S]: where each box lies among those that it was picked from."""
    positive: Tensor
    """bool [B, S]."""
    exists: Tensor
    """bool [B, S]: whether the place holds a box."""


@lru_cache(maxsize=_KEPT_SHAPES)
def make_anchors(
    generator: AnchorGenerator, shape: tuple[int, int], grids: tuple[tuple[int, int], ...], device: torch.device
) -> Tensor:
    """The anchors of an image of a padded ``shape`` with features of these ``grids``: float32 [A, 4] in pixels."""
    images = ImageList(torch.empty((), device=device).expand(1, 1, *shape), [shape])
    anchors: Tensor = generator(images, [torch.empty((), device=device).expand(1, 1, *grid) for grid in grids])[0]
    return anchors


def match_objects(matcher: Matcher, objects: Objects, boxes: Tensor) -> Tensor:
    """What ``matcher(box_iou(objects, boxes))`` gives for each image, without the whole matrix of pairs.

    Args:
        matcher: torchvision's.
        objects: of B images.
        boxes: float32 [B, N, 4], or [1, N, 4] where all images have the same.

    Returns:
        int64 [B, N]: the object of each box, -1 for none, -2 for one between the thresholds.

    Example:
        >>> found = Objects(torch.tensor([[[0.0, 0, 4, 4]]]), torch.tensor([[1]]), torch.tensor([[True]]))
        >>> boxes = torch.tensor([[[0.0, 0, 4, 4], [0, 0, 4, 2], [6, 6, 9, 9]]])
        >>> match_objects(Matcher(0.7, 0.3, allow_low_quality_matches=True), found, boxes).tolist()
        [[0, -2, -1]]
    """
    chunks = boxes.split(max(1, _PAIRS[boxes.device.type] // objects.exists.numel()), 1)
    best, values, overlaps = [], [], boxes[:0]
    highest = objects.boxes.new_full(objects.exists.shape, -1.0)
    for chunk in chunks:
        overlaps = _compute_overlaps(objects, chunk)
        value, index = overlaps.max(1)
        best.append(index)
        values.append(value)
        highest = torch.maximum(highest, overlaps.amax(2))
    every, value = torch.cat(best, 1), torch.cat(values, 1)
    matches = every.masked_fill(value < matcher.high_threshold, matcher.BETWEEN_THRESHOLDS)
    matches = matches.masked_fill(value < matcher.low_threshold, matcher.BELOW_LOW_THRESHOLD)
    if not matcher.allow_low_quality_matches:
        return matches
    # an object keeps the boxes that overlap it most, even if the overlap is small
    highest = highest.masked_fill(~objects.exists, 2.0)
    parts = [overlaps] if len(chunks) == 1 else (_compute_overlaps(objects, chunk) for chunk in chunks)
    closest = torch.cat([(part == highest[..., None]).any(1) for part in parts], 1)
    return torch.where(closest, every, matches)


def _compute_overlaps(objects: Objects, boxes: Tensor) -> Tensor:
    """The intersection over union of every object with every box, [B, G, N]; -1 where there is no object."""
    left, top, right, bottom = objects.boxes.unsqueeze(2).unbind(3)
    x0, y0, x1, y1 = boxes.unsqueeze(1).unbind(3)
    shared = torch.minimum(right, x1).sub_(torch.maximum(left, x0)).clamp_(min=0)
    shared *= torch.minimum(bottom, y1).sub_(torch.maximum(top, y0)).clamp_(min=0)
    either = (right - left) * (bottom - top) + (x1 - x0) * (y1 - y0) - shared
    return shared.div_(either).masked_fill_(~objects.exists.unsqueeze(2), -1.0)


def sample_regions(matches: Tensor, sampler: BalancedPositiveNegativeSampler) -> Samples:
    """Pick as many boxes of each image by chance, and at most as many positive ones, as torchvision's ``sampler`` does.

    Every positive box is as likely as any other, and so is every negative one: those with the highest random keys are
    taken. torchvision draws with ``nonzero`` and ``randperm``.

    Args:
        matches: int64 [B, N], as `match_objects` gives them.
        sampler: of the model.

    Example:
        >>> found = sample_regions(torch.tensor([[0, 1, -1]]), BalancedPositiveNegativeSampler(2, 0.5))
        >>> found.positive.tolist(), found.places[0, 1].item()
        ([[True, False]], 2)
    """
    positive, negative = matches >= 0, matches == Matcher.BELOW_LOW_THRESHOLD
    keys, number = torch.rand(matches.shape, device=matches.device), matches.shape[1]
    most = min(int(sampler.batch_size_per_image * sampler.positive_fraction), number)
    lowest = keys.masked_fill(~positive, -1.0).topk(most, 1).values[:, -1:] if most else keys.new_full((1, 1), 2.0)
    chosen = positive & (keys >= lowest)
    ranks = torch.where(chosen, keys + 2, keys.masked_fill(~negative, -1.0))
    top = ranks.topk(min(sampler.batch_size_per_image, number), 1)
    return Samples(top.indices, top.values >= 2, top.values >= 0)


def gather_rows(values: Tensor, index: Tensor) -> Tensor:
    """``values[b, index[b, s]]``: [B, S, ...] of values [B, N, ...] by index [B, S]."""
    return values.gather(1, index if values.ndim == 2 else index[..., None].expand(-1, -1, values.shape[2]))


def encode_boxes(coder: BoxCoder, objects: Tensor, boxes: Tensor) -> Tensor:
    """What a model should say of ``boxes`` whose objects are ``objects``: float32 [..., 4], as ``BoxCoder.encode``."""
    (start, end), (object_start, object_end) = boxes.split(2, -1), objects.split(2, -1)
    sides, object_sides = end - start, object_end - object_start
    moved = (object_start - start).add_(object_sides - sides, alpha=0.5)
    return torch.cat([moved / sides, torch.log(object_sides / sides)], -1) * _weights(coder, boxes.device)


def decode_boxes(coder: BoxCoder, said: Tensor, boxes: Tensor) -> Tensor:
    """The boxes that a model means by what it ``said`` of ``boxes``: float32 [..., 4], as ``BoxCoder.decode``."""
    moved, grown = (said / _weights(coder, boxes.device)).split(2, -1)
    start, end = boxes.split(2, -1)
    sides = end - start
    centres = torch.addcmul(torch.add(start, sides, alpha=0.5), moved, sides)
    half = grown.clamp(max=coder.bbox_xform_clip).exp_().mul_(sides).mul_(0.5)
    return torch.cat([centres - half, centres + half], -1)


def _weights(coder: BoxCoder, device: torch.device) -> Tensor:
    return send(np.array(coder.weights, np.float32), device)


@torch.no_grad()
def find_proposals(
    rpn: RegionProposalNetwork, scores: Tensor, said: Tensor, anchors: Tensor, *, levels: Sequence[int],
    limits: Tensor, side: int,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The proposals of each image, as ``RegionProposalNetwork.filter_proposals`` finds them.

    Args:
        rpn: of the model, with its limits.
        scores: float32 [B, A], before the sigmoid.
        said: float32 [B, A, 4]: what the network says of each anchor.
        anchors: float32 [A, 4].
        levels: how many of the anchors belong to each level.
        limits: float32 [B, 4]: width, height, width, height of each image in pixels.
        side: the longer side of the padded images.

    Returns:
        float32 [B, P, 4] in pixels, the best first, and bool [B, P]: whether the place holds a proposal.
    """
    picked, level_of, first, images = [], [], 0, len(scores)
    for number, part in enumerate(scores.split(list(levels), 1)):
        index = part.topk(min(rpn.pre_nms_top_n(), part.shape[1]), 1).indices + first
        picked.append(index)
        level_of.append(index.new_full((index.shape[1],), number))
        first += part.shape[1]
    index = torch.cat(picked, 1)
    boxes = decode_boxes(rpn.box_coder, gather_rows(said, index), anchors[index])
    boxes = boxes.clamp_(min=0).minimum(limits.unsqueeze(1))
    score = scores.gather(1, index).sigmoid()
    start, end = boxes.split(2, -1)
    large = (end - start >= rpn.min_size).all(2) & (score >= rpn.score_thresh)
    # boxes of different levels and images are moved apart, so that none suppresses another
    across = torch.cat(level_of).expand(images, -1)
    down = torch.arange(images, device=index.device)[:, None].expand_as(across)
    apart = boxes + (torch.stack([across, down], 2) * (side + 1)).repeat(1, 1, 2)
    alive, count = torch.zeros_like(score, dtype=torch.bool), max(1, _NMS_BOXES[boxes.device.type] // index.shape[1])
    flat = (part.flatten(0, 1).split(count * index.shape[1]) for part in (apart, score, alive))
    for together, ranks, lives in zip(*flat, strict=True):
        lives.index_fill_(0, nms(together, ranks, rpn.nms_thresh), True)
    top = score.masked_fill(~(alive & large), -1.0).topk(min(rpn.post_nms_top_n(), index.shape[1]), 1)
    return gather_rows(boxes, top.indices), top.values >= 0


class Canvas(NamedTuple):
    """The levels of a feature pyramid side by side in one tensor, so that regions of all levels are pooled at once."""

    features: Tensor
    """float32 [B, C, H, W]."""
    levels: Tensor
    """float32 [L, 5]: of each level its scale, and where it starts: x, y, x, y."""
    finest: float
    """How many times the first level is halved: 2 for a scale of a quarter."""


def join_levels(features: Sequence[Tensor], shape: tuple[int, int]) -> Canvas:
    """Lay the levels side by side, the first on the left, the others below one another on its right.

    The last row and column of each level are repeated once: pooling reads up to a pixel beyond them.

    Args:
        features: [B, C, h, w] of each level, the largest first.
        shape: height and width of the padded images.
    """
    scales = [2.0 ** round(log2(part.shape[2] / shape[0])) for part in features]
    first, *others = [functional.pad(part.float(), (0, 1, 0, 1), mode="replicate") for part in features]
    places, y = [(0, 0)], 0
    for part in others:
        places.append((first.shape[3], y))
        y += part.shape[2]
    height, width = max(first.shape[2], y), max((part.shape[3] for part in others), default=0)
    columns = [functional.pad(first, (0, 0, 0, height - first.shape[2]))]
    if others:
        column = torch.cat([functional.pad(part, (0, width - part.shape[3], 0, 0)) for part in others], 2)
        columns.append(functional.pad(column, (0, 0, 0, height - y)))
    table = np.array([(scale, *place, *place) for scale, place in zip(scales, places, strict=True)], np.float32)
    return Canvas(torch.cat(columns, 3), send(table, first.device), -log2(scales[0]))


def pool_regions(pooler: MultiScaleRoIAlign, canvas: Canvas, boxes: Tensor, images: Tensor) -> Tensor:
    """The features of R boxes, float32 [R, C, size, size], as ``MultiScaleRoIAlign`` pools them.

    Args:
        pooler: of the model.
        canvas: of the batch.
        boxes: float32 [R, 4] in pixels of the resized images.
        images: int64 [R]: the image of each box.
    """
    start, end = boxes.split(2, 1)
    side = (end - start).prod(1).sqrt_()
    level = torch.log2(side / pooler.canonical_scale).add_(pooler.canonical_level + 1e-6).floor_()
    level = level.sub_(canvas.finest).clamp_(0, len(canvas.levels) - 1).long()
    scale, place = canvas.levels[level].split((1, 4), 1)
    rois = torch.cat([images[:, None], torch.addcmul(place, boxes, scale)], 1)
    pooled: Tensor = roi_align(canvas.features, rois, pooler.output_size, 1.0, pooler.sampling_ratio)
    return pooled
