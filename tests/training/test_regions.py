"""What is done for a whole batch at once, against what torchvision does image by image."""

from __future__ import annotations

import pytest
import torch
from torchvision.models.detection._utils import BalancedPositiveNegativeSampler, BoxCoder, Matcher
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import MultiScaleRoIAlign, box_iou

from colab_utils.training import losses
from colab_utils.training.losses import (
    Objects,
    decode_boxes,
    encode_boxes,
    find_proposals,
    join_levels,
    make_anchors,
    match_objects,
    pool_regions,
    sample_regions,
)
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
from tests.training.test_losses import LargestTensor


def draw_boxes(count, seed, *, side=100.0):
    generator = torch.Generator().manual_seed(seed)
    corners = torch.rand(count, 2, generator=generator) * side
    return torch.cat(
        [corners, corners + 1 + torch.rand(count, 2, generator=generator) * side / 3], 1
    )


def pad_objects(*boxes):
    """Objects of several images in as many places."""
    most = max(1, *map(len, boxes))
    exists = torch.tensor([[place < len(part) for place in range(most)] for part in boxes])
    padded = torch.stack([torch.cat([part, torch.zeros(most - len(part), 4)]) for part in boxes])
    return Objects(padded, torch.ones(exists.shape, dtype=torch.int64), exists)


@pytest.mark.parametrize("pairs", [1, 700, 1 << 21])  # a box at a time, some, all at once
@pytest.mark.parametrize("low_quality", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_matches_are_those_of_torchvision(monkeypatch, pairs, low_quality, shared):
    monkeypatch.setitem(losses._PAIRS, "cpu", pairs)
    ours = [draw_boxes(40, 2), draw_boxes(1, 3), draw_boxes(7, 4)]
    boxes = (
        draw_boxes(300, 1)[None]
        if shared
        else torch.stack([draw_boxes(300, seed) for seed in (1, 5, 6)])
    )
    ours[0][0] = boxes[0, 17]  # one that fits, and one that nothing overlaps
    ours[0][-1] = torch.tensor([500.0, 500, 510, 510])
    matcher = Matcher(0.6, 0.3, allow_low_quality_matches=low_quality)
    found = match_objects(matcher, pad_objects(*ours), boxes)
    for mine, objects, part in zip(found, ours, boxes.expand(3, -1, -1), strict=True):
        assert torch.equal(mine, matcher(box_iou(objects, part)))


def test_equal_overlaps_go_to_the_same_object():
    boxes = torch.tensor([[0.0, 0, 10, 10]] * 4)
    twins = torch.tensor([[0.0, 0, 10, 5], [0, 5, 10, 10]])
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    assert torch.equal(
        match_objects(matcher, pad_objects(twins), boxes[None])[0], matcher(box_iou(twins, boxes))
    )


def test_an_image_without_objects_matches_nothing():
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    found = match_objects(
        matcher, pad_objects(torch.zeros(0, 4), draw_boxes(2, 1)), draw_boxes(9, 2)[None]
    )
    assert (found[0] == Matcher.BELOW_LOW_THRESHOLD).all()


def test_memory_does_not_grow_with_objects_times_anchors():
    """300 objects and 243,000 anchors: the matrix alone would be 292 MB."""
    boxes, objects = draw_boxes(243_000, 8, side=1300.0), draw_boxes(300, 9, side=1300.0)
    matcher = Matcher(0.7, 0.3, allow_low_quality_matches=True)
    with LargestTensor() as watched:
        match_objects(matcher, pad_objects(objects), boxes[None])
    assert watched.bytes < 20_000_000


@pytest.mark.parametrize("positives", [0, 3, 40])
@pytest.mark.parametrize("negatives", [0, 10, 60])
def test_as_many_are_sampled_as_by_torchvision(positives, negatives):
    labels = torch.tensor([1] * positives + [0] * negatives + [-1] * 9)[
        torch.randperm(positives + negatives + 9)
    ]
    expected = BalancedPositiveNegativeSampler(32, 0.25)([labels])
    found = sample_regions(labels[None] - 1, BalancedPositiveNegativeSampler(32, 0.25))
    assert found.positive.sum() == expected[0][0].sum()
    assert found.exists.sum() == expected[0][0].sum() + expected[1][0].sum()
    chosen = found.places[0][found.exists[0]]
    assert len(chosen.unique()) == len(chosen)
    assert torch.equal(labels[chosen], found.positive[0][found.exists[0]].long())


def test_every_box_is_as_likely_as_any_other():
    """The count of each over 4,000 draws lies within five standard deviations of what chance
    gives.
    """
    torch.manual_seed(0)
    matches = torch.where(torch.arange(40) < 16, 0, Matcher.BELOW_LOW_THRESHOLD).expand(4000, -1)
    found = sample_regions(matches, BalancedPositiveNegativeSampler(16, 0.25))
    drawn = torch.bincount(found.places[found.exists], minlength=40).float()
    for part, share in ((drawn[:16], 4 / 16), (drawn[16:], 12 / 24)):
        assert ((part - 4000 * share).abs() < 5 * (4000 * share * (1 - share)) ** 0.5).all()


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (10.0, 10.0, 5.0, 5.0)])
def test_boxes_are_coded_as_by_torchvision(weights):
    coder, boxes, objects = BoxCoder(weights), draw_boxes(50, 1), draw_boxes(50, 2)
    said = torch.randn(50, 4, generator=torch.Generator().manual_seed(3)) * 3
    assert torch.allclose(
        encode_boxes(coder, objects, boxes),
        coder.encode([objects], [boxes])[0],
        rtol=1e-5,
        atol=1e-5,
    )
    assert torch.allclose(
        decode_boxes(coder, said, boxes), coder.decode(said, [boxes])[:, 0], rtol=1e-5, atol=1e-4
    )


# boxes of a call of nms: an image at a time, and all together
@pytest.mark.parametrize("most", [1, 1 << 12])
def test_proposals_are_those_of_torchvision(monkeypatch, most):
    monkeypatch.setitem(losses._NMS_BOXES, "cpu", most)
    torch.manual_seed(0)
    rpn, sizes = (
        build_mask_rcnn(LIGHT_MODEL, num_classes=2, weights=None, min_size=64).rpn.train(),
        [(120, 90), (64, 160)],
    )
    features = [torch.randn(2, 64, 32 >> level, 40 >> level) for level in range(5)]
    images = ImageList(torch.zeros(2, 3, 128, 160), sizes)
    scores, said = rpn.head(features)
    said = [10 * part for part in said]
    anchors = make_anchors(
        rpn.anchor_generator,
        (128, 160),
        tuple((part.shape[2], part.shape[3]) for part in features),
        torch.device("cpu"),
    )
    assert torch.equal(anchors, rpn.anchor_generator(images, features)[0])
    levels = [part[0].numel() for part in scores]
    scores, said = (
        torch.cat([part.permute(0, 2, 3, 1).reshape(2, -1, width) for part in parts], 1)
        for parts, width in ((scores, 1), (said, 4))
    )
    decoded = rpn.box_coder.decode(said.flatten(0, 1), [anchors, anchors]).view(2, -1, 4)
    expected, _ = rpn.filter_proposals(decoded, scores.flatten(0, 1), sizes, levels)
    found, exists = find_proposals(
        rpn,
        scores[..., 0],
        said,
        anchors,
        levels=levels,
        limits=torch.tensor(sizes)[:, [1, 0, 1, 0]].float(),
        side=160,
    )
    for mine, there, theirs in zip(found, exists, expected, strict=True):
        assert torch.allclose(mine[there], theirs, atol=1e-3)


@pytest.mark.parametrize("levels", [1, 3, 4])
def test_regions_are_pooled_as_by_torchvision(levels):
    torch.manual_seed(0)
    names = [str(level) for level in range(levels)]
    features = {
        name: torch.randn(2, 5, 64 >> level, 96 >> level) for level, name in enumerate(names)
    }
    pooler = MultiScaleRoIAlign(names, 7, 2)
    boxes = [draw_boxes(60, seed, side=250.0) for seed in (1, 2)]
    boxes = [
        torch.cat([part, torch.tensor([[0.0, 0, 384, 256], [300, 200, 384, 256]])])
        for part in boxes
    ]
    expected = pooler(features, [part.clamp(max=256) for part in boxes], [(256, 384)] * 2)
    canvas = join_levels([*features.values()], (256, 384))
    found = pool_regions(
        pooler, canvas, torch.cat(boxes).clamp(max=256), torch.arange(2).repeat_interleave(62)
    )
    assert torch.allclose(found, expected, atol=1e-4)
