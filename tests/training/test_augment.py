"""How the model sees an image: sizes, jitter and padded shapes, against torchvision's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.models.detection.roi_heads import project_masks_on_boxes
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.loading.batch import collate_packed, pack_target
from colab_utils.loading.dataset import CocoFolder
from colab_utils.loading.masks import sample_masks
from colab_utils.loading.sampler import BatchSampler
from colab_utils.training.augment import View, choose_shapes, choose_views, fit_shape, list_scales
from colab_utils.training.losses import compute_losses, make_input
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn

TRANSFORM = GeneralizedRCNNTransform(200, 300, [0.0] * 3, [1.0] * 3)


@pytest.fixture(scope="module")
def samples(coco_mini):
    dataset = CocoFolder(coco_mini.images, coco_mini.annotations, contiguous_labels=True)
    return [sample for sample in (dataset[i] for i in range(12)) if len(sample[1]["labels"])][:4]


def pack(samples):
    return collate_packed([pack_target(*sample) for sample in samples])


def crop(sample, view):
    """The reference: mirrored, resized, then cut out, with dense masks."""
    image, target = sample
    (height, width), (top, left), (tall, wide) = view.size, view.corner, view.shown
    if view.flip:
        boxes = target["boxes"].clone()
        boxes[:, [0, 2]] = image.shape[-1] - target["boxes"][:, [2, 0]]
        image, target = image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}
    scale = torch.tensor([width / image.shape[-1], height / image.shape[-2]] * 2)
    resize = torch.nn.functional.interpolate
    pixels = resize(image[None].float() / 255, (height, width), mode="bilinear", align_corners=False)[0]
    masks = resize(target["masks"][:, None].float(), (height, width))[:, 0]
    boxes = target["boxes"] * scale - torch.tensor([left, top, left, top])
    boxes[:, 0::2] = boxes[:, 0::2].clamp(0, wide)
    boxes[:, 1::2] = boxes[:, 1::2].clamp(0, tall)
    keep = (boxes[:, 2:] > boxes[:, :2]).all(1)
    window = (slice(top, top + tall), slice(left, left + wide))
    return pixels[:, *window], {
        "boxes": boxes[keep],
        "labels": target["labels"][keep],
        "masks": masks[keep][:, *window],
    }


@pytest.mark.parametrize("seed", range(4))
def test_large_scale_jitter_is_a_resize_and_a_window(samples, seed):
    batch = pack(samples)
    torch.manual_seed(seed)
    views = choose_views(TRANSFORM, batch.sizes.tolist(), flips=[True, False] * 2, jitter_side=256)
    assert any(view.shown != view.size for view in views) or seed  # of four seeds, one at least cuts
    given = make_input(TRANSFORM, batch, views)
    assert given.images.tensors.shape[-2:] == fit_shape([view.shown for view in views], (), step=32)
    for number, (sample, view, target) in enumerate(zip(samples, views, given.targets, strict=True)):
        pixels, expected = crop(sample, view)
        tall, wide = view.shown
        assert torch.allclose(given.images.tensors[number, :, :tall, :wide], pixels, atol=1e-5)
        assert not given.images.tensors[number, :, tall:].any()
        assert torch.allclose(target["boxes"], expected["boxes"], atol=1e-3)
        assert torch.equal(target["labels"], expected["labels"])
    assert len(given.rows) == sum(len(target["labels"]) for target in given.targets)


def test_mask_targets_in_a_window_are_those_of_the_dense_path(samples):
    batch = pack(samples)
    views = [View((300, 400), flip, (40, 60), (200, 256)) for flip in (True, False, True, False)]
    given = make_input(TRANSFORM, batch, views)
    counts = [len(target["labels"]) for target in given.targets]
    assert 0 < sum(counts) < int(batch.counts.sum())  # some objects lie outside
    boxes = torch.cat([target["boxes"] for target in given.targets])
    found = sample_masks(
        batch.masks, torch.from_numpy(given.rows), boxes + torch.tensor([60.0, 40, 60, 40]), sizes=batch.sizes,
        counts=batch.counts, flips=[view.flip for view in views], to_sizes=[view.size for view in views],
    )  # fmt: skip
    for sample, view, target, part in zip(samples, views, given.targets, found.split(counts), strict=True):
        _, expected = crop(sample, view)
        dense = project_masks_on_boxes(expected["masks"], target["boxes"], torch.arange(len(part)), 28)
        # at the window's edge the dense path knows nothing of what lies beyond
        assert (part - dense).abs().mean() < 0.02


@pytest.mark.parametrize("side", [96, 224])
def test_losses_with_jitter_are_finite_and_objects_are_not_mixed_up(samples, side):
    classes = 1 + int(max(target["labels"].max() for _, target in samples))
    torch.manual_seed(0)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=classes, weights=None, min_size=160).train()
    for seed in range(3):
        torch.manual_seed(seed)
        losses = compute_losses(model, pack(samples), jitter_side=side)
        assert all(torch.isfinite(loss) for loss in losses.values())


def test_jitter_covers_the_range_of_torchvisions(samples):
    torch.manual_seed(0)
    views = choose_views(TRANSFORM, [(480, 640)] * 500, jitter_side=256)
    ratios = np.array([view.size[1] for view in views]) / 256
    assert ratios.min() < 0.15
    assert 1.9 < ratios.max() <= 2.0
    assert all(max(view.shown) <= 256 for view in views)
    assert all(0 <= at <= size - shown for view in views
               for at, size, shown in zip(view.corner, view.size, view.shown, strict=True))  # fmt: skip


def test_losses_in_a_larger_shape_are_those_of_torchvision_padded_so(samples, monkeypatch):
    classes = 1 + int(max(target["labels"].max() for _, target in samples))
    torch.manual_seed(0)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=classes, weights=None, min_size=160).train()
    images = [image.float() / 255 for image, _ in samples]
    targets = [target for _, target in samples]
    monkeypatch.setattr(model.transform, "max_by_axis", lambda sizes: [3, 288, 320])
    torch.manual_seed(1)
    expected = model(images, targets)
    torch.manual_seed(1)
    found = compute_losses(model, pack(samples), shapes=[(288, 320), (640, 640)])
    for name, loss in expected.items():
        assert found[name].item() == pytest.approx(loss.item(), rel=1e-3), name


def test_few_shapes_hold_every_batch():
    chance = np.random.default_rng(0)
    sides = chance.integers(800, 1333, 400)
    sizes = np.array([(800, side) if chance.random() < 0.7 else (side, 800) for side in sides])
    batches = list(BatchSampler(400, 4, 0, sizes=sizes))  # of one kind each, as far as it goes
    shapes = choose_shapes(sizes, batches)
    assert 2 <= len(shapes) <= 6
    padded = [fit_shape([tuple(sizes[i]) for i in batch], shapes, step=32) for batch in batches]
    assert set(padded) <= set(shapes)
    exact = [fit_shape([tuple(sizes[i]) for i in batch], (), step=32) for batch in batches]
    area, least = (sum(h * w for h, w in some) for some in (padded, exact))
    assert area < 1.1 * least  # few shapes cost little


def test_scales_keep_the_usual_size_for_evaluation():
    assert list_scales(800)[-1] == 800
    assert list_scales(192)[-1] == 192
    assert list_scales(192) == tuple(sorted(list_scales(192)))
