"""Models by name: classes, frozen and folded layers, weights from COCO or from a run, half
precision.
"""

from __future__ import annotations

import copy
import urllib.error
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torchvision.models import mobilenet_v3_large, resnet18, resnet50
from torchvision.models.detection import MaskRCNN, maskrcnn_resnet50_fpn, maskrcnn_resnet50_fpn_v2
from torchvision.ops import FrozenBatchNorm2d

from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.targets import pack_target
from colab_utils.shards.write import write_shards
from colab_utils.training import model as model_module
from colab_utils.training.layers import choose_precision, fold_norms, keep_boxes_exact
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import (
    GPU_MODEL,
    LIGHT_MODEL,
    assemble_mask_rcnn,
    build_mask_rcnn,
)
from colab_utils.training.train import train
from tests.tiny_model import TINY_MODEL


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
    assert {norm.eps for norm in norms} == {1e-5 if "v2" in name else 0.0}
    # The second version has norms in pyramid and heads, too.
    assert len(norms) == (69 if "v2" in name else 53)
    # All of them can be folded.
    fold_norms(model)
    assert all(type(norm) is not FrozenBatchNorm2d for norm in norms)
    build(weights=None, weights_backbone=None, num_classes=num_classes).load_state_dict(
        model.state_dict()
    )


def test_light_model_takes_imagenet_weights(monkeypatch):
    source = mobilenet_v3_large(weights=None)
    patch_download(monkeypatch, source.state_dict())
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=3, min_size=64, max_size=96)
    assert model.starts_from == "imagenet"
    assert torch.equal(
        model.backbone.body["0"][0].weight,
        source.features[0][0].weight,
    )
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.backbone.body.modules())
    # The features are those of torchvision's own network, up to stride 32.
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        features = model.eval().backbone.body(image)["3"]
        expected = source.eval().features[:16](image)
    assert torch.allclose(features, expected, atol=1e-5)


@pytest.mark.parametrize(
    "error",
    [
        # There is no network.
        urllib.error.URLError("Name or service not known"),
        # The cached file was cut short.
        EOFError("Ran out of input"),
    ],
)
def test_no_weights_warns_and_starts_from_random(error, monkeypatch):
    def fail(url, **options):
        raise error

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


def test_the_tiny_model_learns(tmp_path):
    settings = {
        "n": 10,
        "width": 128,
        "height": 96,
        "objects": (1, 3),
        "categories": ("ball", "heart"),
        "workers": 1,
    }
    made = make_dataset(tmp_path / "data", **settings)
    write_shards(made.images, made.annotations, shards=tmp_path / "shards", workers=1)
    report = train(
        tmp_path / "shards",
        tmp_path / "run",
        model=model_module.TINY_MODEL,
        steps=12,
        batch_size=4,
        min_size=96,
        learning_rate=0.005,
        workers=0,
    )
    assert report.plan.starts_from == "random", (
        "there are no weights to download, and none are missed"
    )
    losses = [point.loss for point in report.losses]
    assert sum(losses[-3:]) < 0.9 * sum(losses[:3])


# The norms train without weights, and are frozen with them.
@pytest.mark.parametrize("weights", [None, "coco"])
def test_a_resumed_model_has_the_layers_of_the_built_one(weights: str | None, monkeypatch):
    patch_download(monkeypatch, mobilenet_v3_large(weights=None).state_dict())
    sizes = {"num_classes": 3, "min_size": 64, "max_size": 96}
    built = build_mask_rcnn(LIGHT_MODEL, weights=weights, **sizes)
    resumed = assemble_mask_rcnn(LIGHT_MODEL, starts_from=built.starts_from, **sizes)
    resumed.load_state_dict(built.state_dict())
    assert [p.requires_grad for p in resumed.parameters()] == [
        p.requires_grad for p in built.parameters()
    ]


NAMES = {1: "cat", 2: "dog", 3: "cow"}


@pytest.fixture
def run(monkeypatch):
    """A run whose best checkpoint holds the weights of a tiny model."""
    model = build_mask_rcnn(
        TINY_MODEL,
        num_classes=4,
        weights=None,
        min_size=64,
        max_size=96,
    )
    plan = {
        "model": TINY_MODEL,
        "num_classes": 4,
        "starts_from": "random",
        "min_size": 64,
        "max_size": 96,
        "most_objects": 5,
    }
    ids = {label: 10 * label for label in NAMES}
    best = {
        "plan": plan,
        "model": model.state_dict(),
        "class_names": NAMES,
    }
    checkpoints = {"best": {**best, "category_ids": ids, "path": "run/best-00000009.pt"}}
    monkeypatch.setattr(
        model_module, "CheckpointFolder", lambda run: SimpleNamespace(read=checkpoints.get)
    )
    return model


def test_training_starts_from_a_run_with_other_classes(run, tmp_path):
    model = build_mask_rcnn(TINY_MODEL, num_classes=3, weights=tmp_path)
    assert model.starts_from == "random"
    weights = run.state_dict()
    differing = {key for key, value in model.state_dict().items() if not value.equal(weights[key])}
    assert differing == {
        f"roi_heads.{head}.{kind}"
        for head in (
            "box_predictor.cls_score",
            "box_predictor.bbox_pred",
            "mask_predictor.mask_fcn_logits",
        )
        for kind in ("weight", "bias")
    }
    assert model.roi_heads.box_predictor.cls_score.out_features == 3
    with pytest.raises(ColabUtilsError, match=r"of the model tiny, and not of .*mobilenet"):
        build_mask_rcnn(LIGHT_MODEL, num_classes=3, weights=str(tmp_path))


def test_the_same_number_of_classes_keeps_the_last_layers(run, tmp_path):
    model = build_mask_rcnn(TINY_MODEL, num_classes=4, weights=tmp_path)
    weights = run.state_dict()
    assert all(value.equal(weights[key]) for key, value in model.state_dict().items())


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
                getattr(module, name).copy_(
                    torch.rand(len(module.weight), generator=generator) * 0.5 + 0.5
                )


def test_folding_keeps_results_and_gradients():
    # A rounding in float32 can turn a ReLU over, and with it gradients.
    plain = make_resnet(resnet50).double()
    folded = copy.deepcopy(plain)
    fold_norms(folded)
    assert type(folded.bn1) is not FrozenBatchNorm2d
    images = torch.rand(2, 3, 64, 64, dtype=torch.float64)
    expected = plain(images)
    features = folded(images)
    assert torch.allclose(
        features, expected, rtol=1e-6, atol=1e-6 * float(expected.detach().abs().max())
    )
    for model, result in ((plain, expected), (folded, features)):
        model.zero_grad()
        (result / expected.detach().abs().max()).square().sum().backward()
    for (name, theirs), (_, ours) in zip(
        plain.named_parameters(), folded.named_parameters(), strict=True
    ):
        assert (theirs.grad is None) == (ours.grad is None), name
        if theirs.grad is not None:
            assert (
                torch.linalg.norm(ours.grad - theirs.grad)
                <= 1e-6 * torch.linalg.norm(theirs.grad) + 1e-12
            ), name


def test_folded_and_plain_weights_load_into_each_other():
    plain = make_resnet()
    folded = make_resnet()
    images = torch.rand(1, 3, 64, 64)
    fold_norms(folded)
    assert list(folded.state_dict()) == list(plain.state_dict())
    fill_norms(plain, seed=2)
    with torch.no_grad():
        plain.conv1.weight.mul_(1.5)
    # These factors differ from those that were folded.
    folded.load_state_dict(plain.state_dict())
    assert torch.allclose(folded(images), plain(images), rtol=1e-3)
    back = make_resnet()
    back.load_state_dict(folded.state_dict())
    assert torch.equal(back(images), plain(images))


def test_a_layer_that_is_unfrozen_later_trains():
    model = make_resnet()
    fold_norms(model)
    convolution = model.layer1[0].conv1
    convolution.weight.requires_grad_(True)
    before = model(torch.ones(1, 3, 64, 64))
    with torch.no_grad():
        convolution.weight.mul_(2.0)
    assert not torch.allclose(model(torch.ones(1, 3, 64, 64)), before)


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


@pytest.mark.parametrize(
    ("capability", "precision"),
    [
        # A T4 emulates bfloat16.
        ((7, 5), torch.float16),
        # This is the capability of an L4.
        ((8, 9), torch.bfloat16),
    ],
)
def test_precision_follows_the_gpu(capability, precision, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert choose_precision("cuda") is precision


@pytest.fixture(scope="module")
def samples(tmp_path_factory):
    made = make_dataset(
        tmp_path_factory.mktemp("boxes") / "data",
        n=2,
        width=480,
        height=120,
        objects=(12, 15),
        workers=1,
    )
    dataset = CocoFolder(made.images, made.annotations, contiguous_labels=True)
    return [dataset[i] for i in range(2)]


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return build_mask_rcnn(
        TINY_MODEL,
        num_classes=8,
        weights=None,
        min_size=160,
        max_size=640,
    )


def find_losses(model, samples, dtype):
    """Losses, and the dtype of the proposals' regression."""
    seen = []
    hook = model.rpn.head.register_forward_hook(
        lambda head, given, inputs: seen.append(inputs[1][0].dtype)
    )
    torch.manual_seed(0)
    batch = collate_packed([pack_target(*sample) for sample in samples])
    with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
        losses = compute_losses(model, batch)
    hook.remove()
    return {name: loss.item() for name, loss in losses.items()}, seen[0]


def test_boxes_are_exact_in_half_precision(tiny, samples):
    """torchvision's own anchors in bfloat16 are off by pixels, and so is what the proposals learn
    from.
    """
    expected, _ = find_losses(tiny, samples, torch.float32)
    exact = copy.deepcopy(tiny)
    assert keep_boxes_exact(exact)
    losses, dtype = find_losses(exact, samples, torch.bfloat16)
    assert dtype == torch.float32
    assert losses["loss_rpn_box_reg"] == pytest.approx(expected["loss_rpn_box_reg"], rel=0.02)
    rounded, dtype = find_losses(copy.deepcopy(tiny), samples, torch.bfloat16)
    assert dtype == torch.bfloat16
    off = abs(rounded["loss_rpn_box_reg"] / expected["loss_rpn_box_reg"] - 1)
    assert off > 2 * abs(losses["loss_rpn_box_reg"] / expected["loss_rpn_box_reg"] - 1)
