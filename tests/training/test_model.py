"""Models by name: classes, frozen layers, and what happens when the weights cannot be had."""

from __future__ import annotations

import socket
import urllib.error

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v3_large
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn, maskrcnn_resnet50_fpn_v2
from torchvision.ops import FrozenBatchNorm2d

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.training import model as model_module
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, assemble_mask_rcnn, build_mask_rcnn


def count_outputs(model: MaskRCNN) -> tuple[int, int, int]:
    heads = model.roi_heads
    return (
        heads.box_predictor.cls_score.out_features,
        heads.box_predictor.bbox_pred.out_features // 4,
        heads.mask_predictor.mask_fcn_logits.out_channels,
    )


@pytest.mark.parametrize("name", [GPU_MODEL, LIGHT_MODEL])
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
        ("maskrcnn_resnet50_fpn", maskrcnn_resnet50_fpn, 91),  # COCO's own classes: the heads stay
        ("maskrcnn_resnet50_fpn_v2", maskrcnn_resnet50_fpn_v2, 4),  # a dataset of three classes
    ],
)
def test_coco_weights_are_loaded_and_heads_replaced(name, build, num_classes, monkeypatch):
    source = build(weights=None, weights_backbone=None)
    # The published file of the first model was saved with frozen norms: they count no batches.
    state = {k: v for k, v in source.state_dict().items() if "v2" in name or "num_batches" not in k}
    monkeypatch.setattr(model_module, "_fetch_weights", lambda name: state)
    model = build_mask_rcnn(name, num_classes=num_classes, min_size=64, max_size=96)
    assert model.starts_from == "coco"
    assert count_outputs(model) == (num_classes,) * 3
    loaded = model.state_dict()
    heads = ("roi_heads.box_predictor", "roi_heads.mask_predictor")
    for key, value in state.items():
        if num_classes == 91 or not key.startswith(heads):
            assert torch.equal(loaded[key], value), key
    frozen = {key.split(".")[2] for key, p in model.named_parameters() if not p.requires_grad}
    assert frozen - {"bn1"} == {"conv1", "layer1"}  # torchvision trains three of the five stages
    if name == "maskrcnn_resnet50_fpn":
        norms = [module for module in model.modules() if isinstance(module, FrozenBatchNorm2d)]
        assert norms
        assert {norm.eps for norm in norms} == {0.0}


def test_light_model_takes_imagenet_weights(monkeypatch):
    source = mobilenet_v3_large(weights=None)
    monkeypatch.setattr(model_module, "_fetch_weights", lambda name: source.state_dict())
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, min_size=64, max_size=96)
    assert model.starts_from == "imagenet"
    assert torch.equal(model.backbone.body["0"][0].weight, source.features[0][0].weight)
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.backbone.body.modules())
    # The same features as torchvision's own network gives, up to stride 32.
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        features = model.eval().backbone.body(image)["3"]
        expected = source.eval().features[:16](image)
    assert torch.allclose(features, expected, atol=1e-5)


def test_light_model_sees_small_and_large_objects():
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, weights=None, min_size=256, max_size=256)
    with torch.no_grad():
        maps = model.backbone(torch.rand(1, 3, 256, 256))
    assert [feature.shape[-1] for feature in maps.values()] == [64, 32, 16, 8, 4]
    assert len(model.rpn.anchor_generator.sizes) == len(maps)


@pytest.mark.parametrize(
    "error",
    [
        urllib.error.URLError("Name or service not known"),  # no network
        TimeoutError("timed out"),  # a network that swallows packets
        RuntimeError('invalid hash value (expected "73cbd019", got "0000")'),  # another file than published
        EOFError("Ran out of input"),  # a cached file that was cut short
    ],
)
def test_no_weights_warns_and_starts_from_random(error, monkeypatch):
    seen = []

    def fail(url, **options):
        seen.append(socket.getdefaulttimeout())
        raise error

    monkeypatch.setattr("torchvision.models._api.load_state_dict_from_url", fail)
    with pytest.warns(ColabUtilsWarning, match=rf"{LIGHT_MODEL} starts from random weights because"):
        model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, min_size=64, max_size=96)
    assert model.starts_from == "random"
    assert seen == [15.0]
    assert socket.getdefaulttimeout() is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "yolo", "num_classes": 3}, "maskrcnn_resnet50_fpn_v2, .* found 'yolo'"),  # unknown name
        ({"num_classes": 1}, "at least 2"),  # no class but the background
        ({"num_classes": 3, "weights": "imagenet"}, "'coco' or None"),  # unknown weights
    ],
)
def test_bad_arguments_are_refused_in_words(options, message):
    with pytest.raises(ColabUtilsError, match=message):
        build_mask_rcnn(**options)


@pytest.mark.parametrize("weights", [None, "coco"])  # norms that train, and frozen ones
def test_a_resumed_model_has_the_layers_of_the_built_one(weights: str | None, monkeypatch):
    monkeypatch.setattr(model_module, "_fetch_weights", lambda name: mobilenet_v3_large(weights=None).state_dict())
    sizes = {"num_classes": 3, "min_size": 64, "max_size": 96}
    built = build_mask_rcnn(LIGHT_MODEL, weights=weights, **sizes)
    resumed = assemble_mask_rcnn(LIGHT_MODEL, starts_from=built.starts_from, **sizes)
    resumed.load_state_dict(built.state_dict())
    assert [p.requires_grad for p in resumed.parameters()] == [p.requires_grad for p in built.parameters()]
