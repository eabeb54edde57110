"""The sizes that images get, beside those that torchvision's transform gives them."""

from __future__ import annotations

import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.training.sizes import find_size

SIZES = [(120, 160), (200, 90), (64, 64), (50, 400), (427, 640)]


@pytest.mark.parametrize("min_size", [100, 200, (96, 128)])
def test_sizes_are_those_of_torchvision(min_size):
    transform = GeneralizedRCNNTransform(min_size, 300, image_mean=[0], image_std=[1]).eval()
    images, _ = transform([torch.zeros(1, *size) for size in SIZES])
    assert [find_size(transform, *size) for size in SIZES] == images.image_sizes
