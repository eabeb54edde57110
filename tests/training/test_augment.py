"""Sizes and padded shapes of the model's input, against torchvision's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.loading.batch import collate_packed, pack_target
from colab_utils.loading.dataset import CocoFolder
from colab_utils.loading.sampler import BatchSampler
from colab_utils.training.augment import choose_shapes, choose_sizes, fit_shape, list_scales, resize_all
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import build_mask_rcnn
from tests.tiny_model import TINY_MODEL

SIZES = [(120, 160), (200, 90), (64, 64), (50, 400)]


@pytest.mark.parametrize(
    "settings",
    [{"min_size": 200}, {"min_size": (96, 128)}, {"fixed_size": (100, 60)}, {"_skip_resize": True}],
    ids=str,
)
def test_sizes_are_those_of_torchvision(settings):
    transform = GeneralizedRCNNTransform(**{"min_size": 100, **settings}, max_size=300, image_mean=[0], image_std=[1])
    torch.manual_seed(0)
    images, _ = transform([torch.zeros(1, *size) for size in SIZES])
    torch.manual_seed(0)
    found = choose_sizes(transform, SIZES)
    assert found == images.image_sizes
    largest = resize_all(np.array(SIZES), transform)
    assert (largest >= found).all()
    in_evaluation, _ = transform.eval()([torch.zeros(1, *size) for size in SIZES])
    assert resize_all(np.array(SIZES), transform, training=False).tolist() == list(map(list, in_evaluation.image_sizes))


def test_losses_in_a_larger_shape_are_those_of_torchvision_padded_so(coco_mini, monkeypatch):
    dataset = CocoFolder(coco_mini.images, coco_mini.annotations, contiguous_labels=True)
    samples = [sample for sample in (dataset[i] for i in range(12)) if len(sample[1]["labels"])][:4]
    classes = 1 + int(max(target["labels"].max() for _, target in samples))
    torch.manual_seed(0)
    model = build_mask_rcnn(TINY_MODEL, num_classes=classes, weights=None, min_size=160).train()
    images = [image.float() / 255 for image, _ in samples]
    targets = [target for _, target in samples]
    monkeypatch.setattr(model.transform, "max_by_axis", lambda sizes: [3, 288, 320])
    torch.manual_seed(1)
    expected = model(images, targets)
    torch.manual_seed(1)
    found = compute_losses(
        model, collate_packed([pack_target(*sample) for sample in samples]), shapes=[(288, 320), (640, 640)]
    )
    for name, loss in expected.items():
        assert found[name].item() == pytest.approx(loss.item(), rel=1e-3), name


def test_few_shapes_hold_every_batch():
    generator = np.random.default_rng(0)
    sides = generator.integers(800, 1333, 400)
    sizes = np.array([(800, side) if generator.random() < 0.7 else (side, 800) for side in sides])
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
