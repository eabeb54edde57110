"""Anchors matched to objects as torchvision does it, in chunks: memory does not grow with objects times anchors."""

from __future__ import annotations

import torch
from torch import Tensor
from torchvision.models.detection._utils import Matcher
from torchvision.models.detection.rpn import RegionProposalNetwork
from torchvision.ops import box_iou

__all__ = ["assign_anchors", "match_boxes"]

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
