"""Sizes and padded shapes of the model's input, against torchvision's own."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.training.augment import choose_sizes, list_scales, resize_all

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


def test_scales_keep_the_usual_size_for_evaluation():
    assert list_scales(800)[-1] == 800
    assert list_scales(192)[-1] == 192
    assert list_scales(192) == tuple(sorted(list_scales(192)))
