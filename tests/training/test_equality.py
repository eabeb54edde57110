"""Losses and gradients of packed batches are those of torchvision's ``model(images, targets)``.

The batches are those that go wrong most easily: without objects, with crowds of them, with boxes
of one pixel, at borders or beyond the image, and with images of very different sizes.
"""

from __future__ import annotations

import copy
from functools import lru_cache

import pytest
import torch

from benchmarks.step import make_model
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.targets import pack_target
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, build_mask_rcnn
from colab_utils.training.model import TINY_MODEL as SMALLEST_MODEL
from colab_utils.training.norms import fold_norms
from colab_utils.training.precision import keep_boxes_exact
from tests.tiny_model import TINY_MODEL

pytestmark = pytest.mark.usefixtures("one_thread")
CLASSES = 4
MIN_SIZE = 64
# Mask targets differ by as much from those of dense masks, and nothing else does.
ROUNDING = 1.5e-6
GRADIENT_ROUNDING = 1e-5


def scatter_boxes(count, height, width, *, largest, seed):
    """Return boxes with fractions of pixels, inside of an image."""
    chance = torch.Generator().manual_seed(seed)
    limits = torch.tensor([width, height])
    sides = 1 + torch.rand(count, 2, generator=chance) * (largest - 1)
    corners = torch.rand(count, 2, generator=chance) * (limits - sides)
    return torch.cat([corners, corners + sides], 1).tolist()


def draw_sample(height, width, boxes, *, seed, empty=()):
    """Return an image of noise, and its target; the masks are noise in their boxes, or empty."""
    chance = torch.Generator().manual_seed(seed)
    masks = torch.zeros(len(boxes), height, width, dtype=torch.uint8)
    for number, (mask, box) in enumerate(zip(masks, boxes, strict=True)):
        x0, y0, x1, y1 = torch.tensor(box).int().clamp(min=0).tolist()
        bottom = max(y1, y0 + 1)
        right = max(x1, x0 + 1)
        part = mask[y0:bottom, x0:right]
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
    image = torch.randint(
        0,
        256,
        (3, height, width),
        dtype=torch.uint8,
        generator=chance,
    )
    return image, target


TWINS = [[20, 20, 30, 30]] * 40 + [[21, 20, 30, 31]] * 40
CORNERS = [
    [0, 0, 80, 60],
    [0, 0, 20, 20],
    [60, 40, 80, 60],
    [0, 30, 30, 60],
    [50, 0, 80, 25],
]
THIN = [[0, 126, 160, 128], [158, 0, 160, 128], [0, 0, 160, 2], [0, 0, 1, 128]]
BEYOND = [[-30, -10, 40, 30], [60, 40, 200, 90], [-50, -50, 150, 150]]
USUAL = [
    (
        60,
        80,
        scatter_boxes(
            5,
            60,
            80,
            largest=30,
            seed=1,
        ),
    ),
    (
        70,
        64,
        scatter_boxes(
            3,
            70,
            64,
            largest=50,
            seed=2,
        ),
    ),
]
MIXED_SIZES = [
    (60, 80),
    (80, 60),
    (64, 64),
    (33, 97),
    (50, 50),
    (100, 70),
    (47, 61),
    (90, 41),
]
BATCHES = {
    "a usual batch": USUAL,
    "one image": USUAL[:1],
    "no object at all": [(60, 80, []), (64, 64, [])],
    "an image without objects between others": [USUAL[0], (64, 64, []), USUAL[1]],
    "boxes of one pixel": [
        (60, 80, [[0, 0, 1, 1], [79, 59, 80, 60], [40, 30, 41, 31]]),
        USUAL[1],
    ],
    "a crowd beside one object": [
        (
            90,
            120,
            scatter_boxes(
                300,
                90,
                120,
                largest=9,
                seed=3,
            ),
        ),
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
        (
            height,
            width,
            scatter_boxes(
                number,
                height,
                width,
                largest=30,
                seed=number,
            ),
        )
        for number, (height, width) in enumerate(MIXED_SIZES)
    ],
    "boxes at the borders": [(60, 80, CORNERS), USUAL[1]],
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


def make_batch(images, *, empty=()):
    """Return a packed batch, which images to mirror, and torchvision's images and targets."""
    samples = [draw_sample(*image, seed=number, empty=empty) for number, image in enumerate(images)]
    flips = [number % 2 == 0 for number in range(len(samples))]
    packed = collate_packed([pack_target(*sample) for sample in samples])
    dense_images = []
    dense_targets = []
    for (image, target), is_flipped in zip(samples, flips, strict=True):
        if is_flipped:
            boxes = target["boxes"].clone()
            boxes[:, 0] = image.shape[2] - target["boxes"][:, 2]
            boxes[:, 2] = image.shape[2] - target["boxes"][:, 0]
            image = image.flip(2)
            target = {**target, "boxes": boxes, "masks": target["masks"].flip(2)}
        dense_images.append(image.float() / 255)
        dense_targets.append(target)
    return packed, flips, dense_images, dense_targets


def collect_gradients(model, losses):
    """Return the gradients of the sum of all losses in one row."""
    torch.stack([loss.float() for loss in losses.values()]).sum().backward()
    return join_gradients(model)


def join_gradients(model):
    """Return all gradients of a model in one row."""
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


def test_empty_masks_train_as_by_torchvision():
    compare(build(TINY_MODEL, "folded"), make_batch(USUAL, empty=(0, 2)))


def test_random_sizes_are_those_of_torchvision():
    model = copy.deepcopy(build(TINY_MODEL, "folded"))
    model.transform.min_size = (48, 64, 80)
    compare(model, make_batch(BATCHES["eight sizes"]))


def test_half_precision_trains_as_by_torchvision():
    compare(build(LIGHT_MODEL, "folded"), make_batch(USUAL), precision=torch.bfloat16)
