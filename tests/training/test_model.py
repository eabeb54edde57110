"""Models by name: classes, frozen and folded layers, weights from COCO or from a run, half
precision.
"""

from __future__ import annotations

import urllib.error
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v3_large
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn, maskrcnn_resnet50_fpn_v2
from torchvision.models.detection.image_list import ImageList
from torchvision.ops import FrozenBatchNorm2d

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.training import model as model_module
from colab_utils.training.layers import fold_norms, keep_boxes_exact
from colab_utils.training.model import (
    GPU_MODEL,
    LIGHT_MODEL,
    build_mask_rcnn,
)
from colab_utils.training.train import train
from tests.tiny_model import TINY_MODEL
from tests.training.small_shards import make_shards


def patch_download(monkeypatch, state):
    monkeypatch.setattr(
        "torchvision.models._api.load_state_dict_from_url", lambda url, **options: state
    )


def count_outputs(model: MaskRCNN) -> tuple[int, int, int]:
    heads = model.roi_heads
    return (
        heads.box_predictor.cls_score.out_features,
        heads.box_predictor.bbox_pred.out_features // 4,
        heads.mask_predictor.mask_fcn_logits.out_channels,
    )


@pytest.mark.parametrize("name", [GPU_MODEL, LIGHT_MODEL, model_module.TINY_MODEL])
def test_random_weights_train_everything(name: str):
    model = build_mask_rcnn(name, num_classes=5, weights=None)
    assert type(model) is MaskRCNN
    assert model.starts_from == "random"
    assert count_outputs(model) == (5, 5, 5)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not any(isinstance(module, FrozenBatchNorm2d) for module in model.modules())
    assert (model.transform.min_size, model.transform.max_size) == ((800,), 1333)


@pytest.mark.parametrize(
    ("name", "build", "num_classes"),
    [
        # The heads stay where the classes are those of COCO.
        ("maskrcnn_resnet50_fpn", maskrcnn_resnet50_fpn, 91),
        # The heads are replaced for a dataset of three classes.
        ("maskrcnn_resnet50_fpn_v2", maskrcnn_resnet50_fpn_v2, 4),
    ],
)
def test_coco_weights_are_loaded_and_heads_replaced(name, build, num_classes, monkeypatch):
    source = build(weights=None, weights_backbone=None)
    # The published file of the first model was saved with frozen norms, which count no batches.
    state = {k: v for k, v in source.state_dict().items() if "v2" in name or "num_batches" not in k}
    patch_download(monkeypatch, state)
    model = build_mask_rcnn(name, num_classes=num_classes, min_size=64, max_size=96)
    assert model.starts_from == "coco"
    assert count_outputs(model) == (num_classes,) * 3
    loaded = model.state_dict()
    heads = ("roi_heads.box_predictor", "roi_heads.mask_predictor")
    for key, value in state.items():
        if (num_classes == 91 or not key.startswith(heads)) and "num_batches" not in key:
            assert torch.equal(loaded[key], value), key
    frozen = {key.split(".")[2] for key, p in model.named_parameters() if not p.requires_grad}
    # The weights of torchvision train three of the five stages.
    assert frozen - {"bn1"} == {"conv1", "layer1"}
    norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]
    # The second version has norms in pyramid and heads, too.
    assert (len(norms), norms[0].eps) == ((69, 1e-5) if "v2" in name else (53, 0.0))
    # All of them can be folded.
    fold_norms(model)
    assert all(type(norm) is not FrozenBatchNorm2d for norm in norms)


def test_light_model_takes_imagenet_weights(monkeypatch):
    source = mobilenet_v3_large(weights=None)
    patch_download(monkeypatch, source.state_dict())
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, min_size=64, max_size=96)
    assert model.starts_from == "imagenet"
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.backbone.body.modules())
    # The features are those of torchvision's own network, up to stride 32.
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        features = model.eval().backbone.body(image)["3"]
        expected = source.eval().features[:16](image)
    assert torch.allclose(features, expected, atol=1e-5)


def test_no_weights_warns_and_starts_from_random(monkeypatch):
    fail = Mock(side_effect=urllib.error.URLError("Name or service not known"))
    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.warns(
        ColabUtilsWarning, match=rf"{LIGHT_MODEL} starts from random weights because"
    ):
        model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, min_size=64, max_size=96)
    assert model.starts_from == "random"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        # The name is unknown.
        ({"name": "yolo", "num_classes": 3}, "maskrcnn_resnet50_fpn_v2, .* it is 'yolo'"),
        # There is no class but the background.
        ({"num_classes": 1}, "at least 2"),
        # The weights are unknown.
        ({"num_classes": 3, "weights": "imagenet"}, "'coco', None or the folder of a run"),
    ],
)
def test_bad_arguments_are_refused_in_words(options, message):
    with pytest.raises(ColabUtilsError, match=message):
        build_mask_rcnn(**options)


@pytest.mark.usefixtures("one_thread")
def test_the_tiny_model_learns(tmp_path):
    kinds = ("ball", "heart")
    make_shards(tmp_path, n=10, width=128, height=96, categories=kinds)
    options = {"batch_size": 4, "min_size": 96, "learning_rate": 0.005, "workers": 0}
    name = model_module.TINY_MODEL
    report = train(tmp_path / "shards", tmp_path / "run", model=name, steps=24, **options)
    # There are no weights to download, and none are missed.
    assert report.plan.starts_from == "random"
    losses = [point.loss for point in report.losses]
    assert sum(losses[-6:]) < 0.9 * sum(losses[:6])


def make_network(seed):
    """Return two convolutions with frozen norms. Only the second one is trained."""
    torch.manual_seed(seed)
    layers = []
    for channels in (3, 4):
        norm = FrozenBatchNorm2d(4)
        for buffer in norm.buffers():
            buffer.uniform_(0.5, 1)
        layers += [nn.Conv2d(channels, 4, 3, bias=False), norm, nn.ReLU()]
    layers[0].requires_grad_(False)
    return nn.Sequential(*layers).double()


def test_folding_keeps_results_and_gradients():
    plain = make_network(0)
    folded = make_network(0)
    fold_norms(folded)
    assert type(folded[1]) is not FrozenBatchNorm2d
    images = torch.rand(2, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(folded(images), plain(images))
    for model in (plain, folded):
        model(images).square().sum().backward()
    assert folded[0].weight.grad is None
    torch.testing.assert_close(folded[3].weight.grad, plain[3].weight.grad)


def test_folded_and_plain_weights_load_into_each_other():
    plain = make_network(0)
    folded = make_network(1)
    fold_norms(folded)
    # These factors differ from those that were folded.
    folded.load_state_dict(plain.state_dict())
    images = torch.rand(1, 3, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(folded(images), plain(images))
    back = make_network(2)
    back.load_state_dict(folded.state_dict())
    assert torch.equal(back(images), plain(images))


def test_what_is_no_convolution_with_its_norm_is_not_folded():
    model = nn.Sequential(
        # The convolution has a bias of its own.
        nn.Conv2d(3, 4, 1),
        FrozenBatchNorm2d(4),
        nn.Conv2d(4, 4, 1, bias=False),
        # The norm is not frozen.
        nn.BatchNorm2d(4),
        nn.Conv2d(4, 8, 1, bias=False),
        nn.ReLU(),
        # The norm is not right behind its convolution.
        FrozenBatchNorm2d(8),
    )
    kinds = [*map(type, model)]
    fold_norms(model)
    assert [*map(type, model)] == kinds


def test_folded_layers_stay_in_half_precision():
    model = nn.Sequential(nn.Conv2d(3, 4, 3, bias=False), FrozenBatchNorm2d(4))
    image = torch.rand(1, 3, 8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(image).dtype == torch.float32
        fold_norms(model)
        assert model(image).dtype == torch.bfloat16


def test_boxes_are_exact_in_half_precision():
    """torchvision's own anchors in bfloat16 are off by pixels, and so is what the proposals learn
    from.
    """
    model = build_mask_rcnn(TINY_MODEL, num_classes=3, weights=None)
    anchors = model.rpn.anchor_generator
    images = ImageList(torch.zeros(1, 3, 120, 480), [(120, 480)])
    features = [torch.zeros(1, 1, 15, 60)] * len(anchors.sizes)
    (expected,) = anchors(images, features)
    assert keep_boxes_exact(model)
    (exact,) = anchors(images, [part.bfloat16() for part in features])
    assert torch.equal(exact, expected)
    channels = model.backbone.out_channels
    with torch.autocast("cpu", torch.bfloat16):
        scores, deltas = model.rpn.head([torch.zeros(1, channels, 8, 8)])
    assert (scores[0].dtype, deltas[0].dtype) == (torch.float32, torch.float32)
