"""Frozen batch norm folded into its convolution: the same results, gradients and weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torchvision.models import resnet18, resnet50
from torchvision.ops import FrozenBatchNorm2d

from colab_utils.training.model import LIGHT_MODEL, assemble_mask_rcnn, fold_norms


def make_resnet(builder=resnet18):
    torch.manual_seed(0)
    model = builder(weights=None, norm_layer=FrozenBatchNorm2d, num_classes=3)
    fill_norms(model, seed=1)
    for parameter in model.layer1.parameters():
        parameter.requires_grad_(False)
    return model


def fill_norms(model, seed):
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, FrozenBatchNorm2d):
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(module, name).copy_(torch.rand(len(module.weight), generator=generator) * 0.5 + 0.5)


@pytest.mark.parametrize(("builder", "layers"), [(resnet18, 20), (resnet50, 53)])
def test_results_and_gradients_stay(builder, layers):
    plain = make_resnet(builder).double()  # in float32 a rounding can turn a ReLU, and with it gradients, over
    folded = copy.deepcopy(plain)
    assert fold_norms(folded) == layers
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    expected, found = plain(images), folded(images)
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(expected.detach().abs().max()))
    for model, result in ((plain, expected), (folded, found)):
        model.zero_grad()
        (result / expected.detach().abs().max()).square().sum().backward()
    for (name, theirs), (_, ours) in zip(plain.named_parameters(), folded.named_parameters(), strict=True):
        assert (theirs.grad is None) == (ours.grad is None), name
        if theirs.grad is not None:
            assert torch.linalg.norm(ours.grad - theirs.grad) <= 1e-6 * torch.linalg.norm(theirs.grad) + 1e-12, name


def test_weights_are_compatible_both_ways():
    plain, folded, images = make_resnet(), make_resnet(), torch.rand(1, 3, 64, 64)
    fold_norms(folded)
    assert list(folded.state_dict()) == list(plain.state_dict())
    fill_norms(plain, seed=2)
    with torch.no_grad():
        plain.conv1.weight.mul_(1.5)
    folded.load_state_dict(plain.state_dict())  # other factors than those that were folded
    assert torch.allclose(folded(images), plain(images), rtol=1e-3)
    back = make_resnet()
    back.load_state_dict(folded.state_dict())
    assert torch.equal(back(images), plain(images))
    copied = copy.deepcopy(folded)
    copied.load_state_dict(make_resnet().state_dict())
    assert torch.allclose(copied(images), make_resnet()(images), rtol=1e-3)
    assert torch.allclose(folded(images), plain(images), rtol=1e-3)


def test_a_layer_that_is_unfrozen_later_trains():
    model = make_resnet()
    fold_norms(model)
    convolution = model.layer1[0].conv1
    convolution.weight.requires_grad_(True)
    before = model(torch.ones(1, 3, 64, 64))
    with torch.no_grad():
        convolution.weight.mul_(2.0)
    assert not torch.allclose(model(torch.ones(1, 3, 64, 64)), before)


def test_what_is_no_pair_stays():
    model = nn.Sequential(
        nn.Conv2d(3, 4, 1),  # a bias of its own
        FrozenBatchNorm2d(4),
        nn.Conv2d(4, 4, 1, bias=False),
        nn.BatchNorm2d(4),  # not frozen
        nn.Conv2d(4, 8, 1, bias=False),
        nn.ReLU(),
        FrozenBatchNorm2d(8),  # not right behind it
    )
    assert fold_norms(model) == 0


def test_in_half_precision_it_stays_there():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), FrozenBatchNorm2d(4))
    image = torch.rand(1, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(image).dtype == torch.float32
        fold_norms(model)
        assert model(image).dtype == torch.bfloat16


def test_the_light_model_is_folded_where_it_is_frozen():
    frozen = assemble_mask_rcnn(LIGHT_MODEL, num_classes=2, starts_from="imagenet", min_size=64, max_size=96)
    assert fold_norms(frozen) > 30
    trained = assemble_mask_rcnn(LIGHT_MODEL, num_classes=2, starts_from="random", min_size=64, max_size=96)
    assert fold_norms(trained) == 0
