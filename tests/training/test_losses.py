"""Losses and gradients of packed batches are those of torchvision's ``model(images, targets)``.

The batches are those that go wrong most easily: without objects, with crowds of them, with boxes
of one pixel, at borders or beyond the image, and with images of very different sizes.
"""

from __future__ import annotations

import copy
import math
import subprocess
import sys
from functools import lru_cache, partial

import numpy as np
import pytest
import torch
from torch.nn.parallel import DataParallel
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn

from benchmarks.step import make_model
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.masks import expand_masks
from colab_utils.loading.targets import pack_target
from colab_utils.training import losses as losses_module
from colab_utils.training.layers import fold_norms, keep_boxes_exact
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, build_mask_rcnn
from colab_utils.training.model import TINY_MODEL as SMALLEST_MODEL
from colab_utils.training.step import TrainingStep
from tests.tiny_model import TINY_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = 4
MIN_SIZE = 64
# Mask targets differ by as much from those of dense masks, and nothing else does.
ROUNDING = 1.5e-6
GRADIENT_ROUNDING = 1e-5


def scatter(height, width, count, *, largest, seed):
    """Return the size of an image, and boxes with fractions of pixels inside of it."""
    chance = torch.Generator().manual_seed(seed)
    limits = torch.tensor([width, height])
    sides = 1 + torch.rand(count, 2, generator=chance) * (largest - 1)
    corners = torch.rand(count, 2, generator=chance) * (limits - sides)
    return height, width, torch.cat([corners, corners + sides], 1).tolist()


def draw_sample(height, width, boxes, *, seed, empty=()):
    """Return an image of noise, and its target; the masks are noise in their boxes, or empty."""
    chance = torch.Generator().manual_seed(seed)
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for number, box in enumerate(boxes):
        x0, y0, x1, y1 = np.maximum(box, 0).astype(int)
        part = masks[number, y0 : max(y1, y0 + 1), x0 : max(x1, x0 + 1)]
        if number not in empty:
            part[:] = torch.rand(part.shape, generator=chance) < 0.7
    target = {
        "boxes": torch.tensor(boxes, dtype=torch.float32).reshape(-1, 4),
        "labels": 1 + torch.arange(len(boxes)) % (CLASSES - 1),
        "masks": masks,
        "image_id": seed,
        "area": masks.flatten(1).sum(1).float(),
        "iscrowd": torch.zeros(len(boxes), dtype=torch.int64),
    }
    image = torch.randint(256, (3, height, width), dtype=torch.uint8, generator=chance)
    return image, target


TWINS = [[20, 20, 30, 30]] * 40 + [[21, 20, 30, 31]] * 40
THIN = [[0, 126, 160, 128], [158, 0, 160, 128], [0, 0, 160, 2], [0, 0, 1, 128]]
BEYOND = [[-30, -10, 40, 30], [60, 40, 200, 90], [-50, -50, 150, 150]]
USUAL = [scatter(60, 80, 5, largest=30, seed=1), scatter(70, 64, 3, largest=50, seed=2)]
MIXED_SIZES = [(60, 80), (80, 60), (64, 64), (33, 97), (50, 50), (100, 70), (47, 61), (90, 41)]
BATCHES = {
    "a usual batch": USUAL,
    "no object at all": [(60, 80, []), (64, 64, [])],
    "boxes of one pixel": [
        (60, 80, [[0, 0, 1, 1], [79, 59, 80, 60], [40, 30, 41, 31]]),
        USUAL[1],
    ],
    "a crowd beside one object": [
        scatter(90, 120, 300, largest=9, seed=3),
        (64, 64, []),
        (60, 60, [[10, 10, 40, 40]]),
    ],
    "more objects than anchors match": [(64, 64, TWINS), USUAL[1]],
    "very different sizes": [
        (20, 300, [[0, 0, 300, 20], [100, 5, 120, 15]]),
        (250, 16, [[2, 3, 14, 240]]),
        (64, 64, [[8, 8, 30, 50]]),
    ],
    "eight sizes": [
        scatter(*size, number, largest=30, seed=number) for number, size in enumerate(MIXED_SIZES)
    ],
    "boxes thinner than a cell at the borders": [(128, 160, THIN)],
    "boxes beyond the image": [(60, 80, BEYOND), USUAL[1]],
}
MODELS = {
    "v2, norms folded": (GPU_MODEL, "folded"),
    "MobileNet, norms folded": (LIGHT_MODEL, "folded"),
    "three levels, norms trained": (SMALLEST_MODEL, "trained"),
}


@lru_cache(maxsize=2)
def build(name, norms):
    """Return a model in training mode, with few proposals; it is copied before it is trained."""
    torch.manual_seed(0)
    if norms == "folded":
        model = make_model(name, num_classes=CLASSES, min_size=MIN_SIZE)
        fold_norms(model)
        model.to(memory_format=torch.channels_last)
    else:
        sizes = {"min_size": MIN_SIZE, "max_size": 160}
        model = build_mask_rcnn(name, num_classes=CLASSES, weights=None, **sizes)
    model.rpn._post_nms_top_n = {"training": 40, "testing": 40}
    model.rpn.fg_bg_sampler.batch_size_per_image = 64
    model.roi_heads.fg_bg_sampler.batch_size_per_image = 32
    return model.train()


def copy_model():
    """Return a model that a test may change."""
    return copy.deepcopy(build(TINY_MODEL, "folded"))


def make_batch(images, *, empty=()):
    """Return a packed batch, which images to mirror, and torchvision's images and targets."""
    samples = [draw_sample(*image, seed=number, empty=empty) for number, image in enumerate(images)]
    flips = [number % 2 == 0 for number in range(len(samples))]
    packed = collate_packed([pack_target(*sample) for sample in samples])
    dense = []
    for (image, target), is_flipped in zip(samples, flips, strict=True):
        if is_flipped:
            boxes = target["boxes"].clone()
            boxes[:, ::2] = image.shape[2] - boxes[:, [2, 0]]
            image = image.flip(2)
            target = {**target, "boxes": boxes, "masks": target["masks"].flip(2)}
        dense.append((image.float() / 255, target))
    return packed, flips, *map(list, zip(*dense, strict=True))


def collect_gradients(model, losses):
    """Return the gradients of the sum of all losses in one row."""
    torch.stack([loss.float() for loss in losses.values()]).sum().backward()
    gradients = [part.grad.flatten() for part in model.parameters() if part.grad is not None]
    return torch.cat(gradients)


def compare(model, batch, *, precision=torch.float32):
    """Assert that a packed batch has torchvision's losses, gradients and random numbers."""
    packed, flips, images, targets = batch
    ours = copy.deepcopy(model)
    theirs = copy.deepcopy(model)
    if precision != torch.float32:
        keep_boxes_exact(ours)
        keep_boxes_exact(theirs)
    with torch.autocast("cpu", precision, enabled=precision != torch.float32):
        torch.manual_seed(1)
        losses = compute_losses(ours, packed, flips=flips)
        state = torch.get_rng_state()
        torch.manual_seed(1)
        expected_losses = theirs(images, targets)
    assert torch.equal(state, torch.get_rng_state())
    assert list(losses) == list(expected_losses)
    mask_loss = losses["loss_mask"].item()
    assert mask_loss == pytest.approx(expected_losses["loss_mask"].item(), rel=ROUNDING)
    for name in losses.keys() - {"loss_mask"}:
        assert torch.equal(losses[name], expected_losses[name]), name
    gradients = collect_gradients(ours, losses)
    expected = collect_gradients(theirs, expected_losses)
    difference = torch.linalg.norm(gradients - expected)
    assert difference <= GRADIENT_ROUNDING * torch.linalg.norm(expected)


@pytest.mark.parametrize("images", BATCHES.values(), ids=BATCHES.keys())
def test_every_batch_trains_as_by_torchvision(images):
    compare(build(TINY_MODEL, "folded"), make_batch(images))


@pytest.mark.parametrize(("name", "norms"), MODELS.values(), ids=MODELS.keys())
def test_every_model_trains_as_by_torchvision(name, norms):
    compare(build(name, norms), make_batch(USUAL))


def test_masks_expanded_one_at_a_time_train_as_by_torchvision(monkeypatch):
    """Memory grows with a chunk, and not with the number of objects or proposals."""
    counts = []

    def expand(masks, *sizes):
        counts.append(len(masks.crops))
        return expand_masks(masks, *sizes)

    monkeypatch.setattr(losses_module, "expand_masks", expand)
    monkeypatch.setattr(losses_module, "CHUNK_BYTES", {"cpu": 1})
    compare(build(TINY_MODEL, "folded"), make_batch(USUAL))
    assert set(counts) == {1}
    assert 1 < len(counts) <= 8


def test_empty_masks_train_as_by_torchvision():
    compare(build(TINY_MODEL, "folded"), make_batch(USUAL, empty=(0, 2)))


@pytest.mark.parametrize(
    "settings",
    [
        # One of these sizes is drawn at random.
        {"min_size": (48, 64, 80)},
        # The size is given as width and height.
        {"fixed_size": (96, 64)},
        # The references of torchvision set this for multi-scale augmentation.
        {"_skip_resize": True},
    ],
    ids=str,
)
def test_every_size_trains_as_by_torchvision(settings):
    model = copy_model()
    vars(model.transform).update(settings)
    compare(model, make_batch(BATCHES["eight sizes"]))


def test_half_precision_trains_as_by_torchvision():
    compare(build(LIGHT_MODEL, "folded"), make_batch(USUAL), precision=torch.bfloat16)


def test_a_batch_whose_proposals_hold_no_object_has_a_mask_loss_of_zero():
    packed = make_batch(USUAL)[0]
    model = copy_model()
    model.roi_heads.fg_bg_sampler.positive_fraction = 0.0
    assert compute_losses(model, packed)["loss_mask"].item() == 0


def test_what_is_no_mask_rcnn_in_training_is_refused_in_words():
    packed, _, images, targets = make_batch(USUAL)
    model = copy_model()
    boxes_only = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=2
    )
    refused = {
        "DataParallel and .* whose forward calls compute_losses": (
            DataParallel(model),
            packed,
        ),
        "FasterRCNN and .*deliver='dense'": (boxes_only, packed),
        r"after model\.train\(\)": (copy_model().eval(), packed),
        "deliver='packed'.* and a tuple": (model, (images, targets)),
    }
    for message, given in refused.items():
        with pytest.raises(ColabUtilsError, match=message):
            compute_losses(*given)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("boxes", [20.0, 10.0, 20.0, 30.0], "has the box .*no area or is not finite"),
        ("boxes", [20.0, math.nan, 40.0, 30.0], "has the box .*no area or is not finite"),
        ("labels", 0, "has the label 0, .*0 is the background"),
        ("labels", CLASSES, f"has the label {CLASSES}, .*to {CLASSES - 1} in a model of {CLASSES}"),
    ],
    ids=str,
)
def test_an_object_that_cannot_be_trained_on_is_named(name, value, message):
    packed = make_batch(USUAL)[0]
    getattr(packed, name)[int(packed.counts[0])] = torch.tensor(value)
    for call in (partial(compute_losses, copy_model()), TrainingStep(copy_model(), "cpu")):
        with pytest.raises(ColabUtilsError, match=f"Image {packed.image_ids[1]} {message}"):
            call(packed)


def test_the_classes_of_the_box_predictor_count():
    packed = make_batch(USUAL)[0]
    model = copy_model()
    small = build_mask_rcnn(TINY_MODEL, num_classes=CLASSES - 1, weights=None)
    model.roi_heads.box_predictor = small.roi_heads.box_predictor
    with pytest.raises(ColabUtilsError, match=f"has the label {CLASSES - 1}, "):
        compute_losses(model, packed)


def test_weights_that_are_no_numbers_give_losses_that_are_none():
    """Training then stops with the step and the images, and no index is out of bounds."""
    packed = make_batch(USUAL)[0]
    model = copy_model()
    with torch.no_grad():
        model.rpn.head.bbox_pred.weight.fill_(math.nan)
    losses = compute_losses(model, packed)
    assert not torch.stack([*losses.values()]).sum().isfinite()


MEMORY = """
import numpy as np, torch
from pathlib import Path
from colab_utils.training.losses import sample_masks
from colab_utils.loading.masks import MaskBits

def read_peak_kb():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

rng = np.random.default_rng(0)
corners = rng.integers(0, 1400, (100, 2))
crops = np.concatenate([corners, corners + 60], 1).astype(np.int32)
crops[0] = 0, 0, 2000, 1500
sides = crops[:, 2:] - crops[:, :2]
ends = np.concatenate([[0], np.cumsum(-(-sides.prod(1) // 8))])
bits = torch.full((int(ends[-1]),), 255, dtype=torch.uint8)
masks = MaskBits(bits, torch.from_numpy(crops), torch.from_numpy(ends))
objects = torch.from_numpy(np.concatenate([np.zeros(6, np.int64), np.arange(100)]))
boxes = torch.from_numpy(crops).float()[objects]
torch.set_num_threads(1)
size = 1500, 2000
sizes = {"stored_size": size, "to_size": size, "is_flipped": False}
sample_masks(masks, boxes[-1:], objects[-1:], 28, **sizes)
before = read_peak_kb()
targets = sample_masks(masks, boxes, objects, 28, **sizes)
assert (targets.mean((1, 2)) > 0.95).all()
print(read_peak_kb() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_the_number_of_objects():
    """Dense, the masks would be 300 MB, and four times that as floats. To sample the largest box,
    ``roi_align`` takes 97 MB on a CPU, and torchvision's own targets take that, too.
    """
    run = subprocess.run(
        [sys.executable, "-c", MEMORY], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert int(run.stdout) < 160_000
