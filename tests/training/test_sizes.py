"""The sizes that images get, beside those that torchvision's transform gives them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from colab_utils.training.sizes import choose_sizes

SIZES = [(120, 160), (200, 90), (64, 64), (50, 400)]


@pytest.mark.parametrize(
    "settings",
    [{"min_size": 200}, {"min_size": (96, 128)}, {"fixed_size": (100, 60)}, {"_skip_resize": True}],
    ids=str,
)
def test_sizes_are_those_of_torchvision(settings):
    transform = GeneralizedRCNNTransform(
        **{"min_size": 100, **settings}, max_size=300, image_mean=[0], image_std=[1]
    )
    torch.manual_seed(0)
    images, _ = transform([torch.zeros(1, *size) for size in SIZES])
    torch.manual_seed(0)
    sizes = choose_sizes(transform, SIZES)
    assert sizes == images.image_sizes
    in_evaluation, _ = transform.eval()([torch.zeros(1, *size) for size in SIZES])
    assert choose_sizes(transform, SIZES) == in_evaluation.image_sizes
    transform.train().min_size = (max(transform.min_size),)
    assert (np.array(choose_sizes(transform, SIZES)) >= sizes).all()
