"""Half precision, and boxes that stay exact in it."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from colab_utils.loading.batch import collate_packed, pack_target
from colab_utils.loading.dataset import CocoFolder
from colab_utils.sample_data import make_dataset
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn, choose_precision, keep_boxes_exact


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        ((7, 5), torch.float16),  # T4: bfloat16 is emulated there
        ((8, 0), torch.bfloat16),  # A100
        ((8, 9), torch.bfloat16),  # L4
    ],
)
def test_precision_follows_the_gpu(capability, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision("cuda") is precision


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    made = make_dataset(tmp_path_factory.mktemp("boxes") / "data", n=2, width=320, height=240, workers=1)
    dataset = CocoFolder(made.images, made.annotations, contiguous_labels=True)
    return [dataset[i] for i in range(2)]


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return build_mask_rcnn(LIGHT_MODEL, num_classes=8, weights=None, min_size=512, max_size=853)


def find_losses(model, samples, dtype, *, way):
    """Losses, and the dtype of the proposals."""
    seen = []
    hook = model.roi_heads.box_roi_pool.register_forward_pre_hook(lambda pool, given: seen.append(given[1][0].dtype))
    torch.manual_seed(0)
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        if way == "packed":
            losses = compute_losses(model, collate_packed([pack_target(*sample) for sample in samples]))
        else:
            images = [image / 255 for image, _ in samples]
            losses = model(images, [copy.copy(target) for _, target in samples])
    hook.remove()
    return {name: loss.item() for name, loss in losses.items()}, seen[0]


@pytest.mark.parametrize("way", ["packed", "torchvision"])
def test_boxes_are_exact_in_half_precision(model, samples, way):
    """torchvision's own anchors in bfloat16 are off by pixels, and so is what the proposals learn from."""
    expected, _ = find_losses(model, samples, torch.float32, way=way)
    exact = copy.deepcopy(model)
    assert keep_boxes_exact(exact)
    found, dtype = find_losses(exact, samples, torch.bfloat16, way=way)
    assert dtype == torch.float32
    assert found["loss_rpn_box_reg"] == pytest.approx(expected["loss_rpn_box_reg"], rel=0.02)
    rounded, dtype = find_losses(copy.deepcopy(model), samples, torch.bfloat16, way=way)
    assert dtype == torch.bfloat16
    off = abs(rounded["loss_rpn_box_reg"] / expected["loss_rpn_box_reg"] - 1)
    assert off > 2 * abs(found["loss_rpn_box_reg"] / expected["loss_rpn_box_reg"] - 1)


def test_nothing_else_changes(model, samples):
    exact = copy.deepcopy(model)
    keep_boxes_exact(exact)
    ours, theirs = (find_losses(each, samples, torch.float32, way="torchvision")[0] for each in (exact, model))
    assert ours == theirs
    assert list(exact.state_dict()) == list(model.state_dict())
    assert not keep_boxes_exact(nn.Identity())
