"""Anchors matched in chunks, against torchvision's matcher on the whole matrix."""

from __future__ import annotations

import pytest
import torch
from torchvision.models.detection._utils import Matcher
from torchvision.ops import box_iou

from colab_utils.training import losses as matching
from colab_utils.training.losses import assign_anchors, match_boxes
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn


def draw_boxes(count, seed, *, side=100.0):
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=generator) * side
    return torch.cat([corners, corners + 1 + torch.rand(count, 2, generator=generator) * side / 3], 1)


@pytest.mark.parametrize("pairs", [1, 700, 1 << 21])  # a box at a time, some, all at once
@pytest.mark.parametrize("low_quality", [True, False])
@pytest.mark.parametrize("objects", [1, 7, 40])
def test_matches_are_those_of_torchvision(monkeypatch, pairs, low_quality, objects):
    monkeypatch.setattr(matching, "_CHUNK_PAIRS", pairs)
    boxes, ours = draw_boxes(300, 1), draw_boxes(objects, 2)
    ours[0] = boxes[17]  # one that fits, and one that nothing overlaps
    ours[-1] = torch.tensor([500.0, 500, 510, 510])
    matcher = Matcher(0.6, 0.3, allow_low_quality_matches=low_quality)
    assert torch.equal(match_boxes(matcher, ours, boxes), matcher(box_iou(ours, boxes)))


def test_equal_overlaps_go_to_the_same_object():
    boxes = torch.tensor([[0.0, 0, 10, 10]] * 4)
    twins = torch.tensor([[0.0, 0, 10, 5], [0, 5, 10, 10]])
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    assert torch.equal(match_boxes(matcher, twins, boxes), matcher(box_iou(twins, boxes)))


def test_anchors_of_a_batch_are_assigned_as_by_torchvision():
    rpn = build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64).rpn
    anchors = [draw_boxes(500, seed) for seed in (3, 4, 5)]
    targets = [{"boxes": draw_boxes(9, 6)}, {"boxes": torch.zeros(0, 4)}, {"boxes": draw_boxes(2, 7)}]
    expected, found = rpn.assign_targets_to_anchors(anchors, targets), assign_anchors(rpn, anchors, targets)
    for theirs, ours in zip(expected, found, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(theirs, ours, strict=True))


def test_memory_does_not_grow_with_objects_times_anchors():
    """300 objects and 243,000 anchors: the matrix alone would be 292 MB."""
    from tests.training.fake_gpu import FakeGpu

    boxes, objects = draw_boxes(243_000, 8, side=1300.0), draw_boxes(300, 9, side=1300.0)
    gpu = FakeGpu(limit=150_000_000)
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    gpu.measure_peak(lambda: match_boxes(matcher, objects, boxes))
    with pytest.raises(torch.cuda.OutOfMemoryError):
        gpu.measure_peak(lambda: matcher(box_iou(objects, boxes)))
