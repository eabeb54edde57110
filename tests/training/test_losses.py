"""The losses of a packed batch, against those that torchvision computes from dense masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.parallel import DataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn, roi_heads
from torchvision.models.detection.transform import GeneralizedRCNNTransform

from benchmarks.step import record_choices, repeat_choices
from colab_utils.data.coco import read_coco
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed, pack_target
from colab_utils.loading.dataset import CocoFolder
from colab_utils.training import losses as losses_module
from colab_utils.training.losses import choose_sizes, compute_losses, make_input
from colab_utils.training.model import build_mask_rcnn
from colab_utils.training.step import TrainingStep
from tests.tiny_model import TINY_MODEL

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")),
]
FLIPS = [True, False, False, True]
SIZES = [(120, 160), (200, 90), (64, 64), (50, 400)]


class LargestTensor(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        self.bytes = max(self.bytes, made.nbytes if isinstance(made, torch.Tensor) else 0)
        return made


def flip(image, target):
    width = image.shape[-1]
    boxes = target["boxes"].clone()
    boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    return image.flip(-1), {**target, "boxes": boxes, "masks": target["masks"].flip(-1)}


def make_batch(samples, flips):
    """The same samples packed, and as torchvision's references pass them to the model."""
    packed = collate_packed([pack_target(*sample) for sample in samples])
    pairs = [
        flip(*sample) if mirrored else sample
        for sample, mirrored in zip(samples, flips, strict=True)
    ]
    return packed, [image.float() / 255 for image, _ in pairs], [target for _, target in pairs]


@pytest.fixture(scope="module")
def real_samples(coco_mini):
    dataset = CocoFolder(coco_mini.images, coco_mini.annotations, contiguous_labels=True)
    chosen = [dataset[i] for i in range(len(dataset))]
    return [sample for sample in chosen if len(sample[1]["labels"])][:4]


def compute_both(model, packed, images, targets, flips=FLIPS):
    """The losses by torchvision and by ours, with the same sizes, anchors and regions."""
    torch.manual_seed(1)  # of the sizes
    with record_choices() as choices:
        found = compute_losses(model, packed, flips=flips)
    torch.manual_seed(1)
    with repeat_choices(model, choices, packed.counts.tolist()):
        return model(images, targets), found


def build(samples, **sizes):
    classes = 1 + int(max(target["labels"].max() for _, target in samples))
    torch.manual_seed(0)
    return build_mask_rcnn(
        TINY_MODEL, num_classes=classes, weights=None, **{"min_size": 160, **sizes}
    ).train()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings",
    [
        {"min_size": (160,)},
        {"min_size": (320,), "max_size": 400},
        {"min_size": (128, 160, 192)},  # one of them at random
        {"fixed_size": (192, 128)},  # width and height
        {"_skip_resize": True},  # as torchvision's references set it for multi-scale augmentation
    ],
    ids=str,
)
def test_losses_are_those_of_torchvision(real_samples, settings, device):
    packed, images, targets = make_batch(real_samples, FLIPS)
    images = [image.to(device) for image in images]
    targets = [
        {k: v.to(device) if torch.is_tensor(v) else v for k, v in target.items()}
        for target in targets
    ]
    model = build(real_samples).to(device)
    vars(model.transform).update(settings)
    expected, found = compute_both(model, packed.to(device), images, targets)
    assert found.keys() == expected.keys()
    for name, loss in expected.items():
        # a GPU adds up in another order each time
        assert found[name].item() == pytest.approx(
            loss.item(), rel=1e-4 if device == "cpu" else 0.01
        ), name


def test_an_image_without_objects_is_all_background(real_samples):
    image, target = real_samples[0]
    empty = {
        **target,
        **{key: target[key][:0] for key in ("boxes", "labels", "masks", "area", "iscrowd")},
    }
    packed, images, targets = make_batch([(image, empty), real_samples[1]], [True, False])
    model = build(real_samples)
    expected, found = compute_both(model, packed, images, targets, flips=[True, False])
    assert {name: loss.item() for name, loss in found.items()} == pytest.approx(
        {name: loss.item() for name, loss in expected.items()}, rel=1e-4
    )


def draw_sample(height, width, count):
    """An image of noise, with so many squares of 3 to 11 pixels."""
    chance = torch.Generator().manual_seed(count)
    corners = torch.stack(
        [torch.randint(0, side - 12, (count,), generator=chance) for side in (width, height)], 1
    )
    boxes = torch.cat([corners, corners + torch.randint(3, 12, (count, 1), generator=chance)], 1)
    masks = torch.zeros(count, height, width, dtype=torch.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes.tolist(), strict=True):
        mask[y0:y1, x0:x1] = 1
    ones = torch.ones(count, dtype=torch.int64)
    target = {
        "boxes": boxes.float(),
        "labels": ones,
        "masks": masks,
        "image_id": 1,
        "area": ones,
        "iscrowd": 0 * ones,
    }
    return torch.randint(0, 255, (3, height, width), dtype=torch.uint8, generator=chance), target


@pytest.mark.parametrize(
    "shapes",
    [
        [(40, 60, 0), (50, 50, 0)],  # height, width, objects
        [(40, 60, 1)],
        [(200, 300, 1000), (60, 60, 1)],
        [(30, 900, 4), (600, 20, 2), (64, 64, 0)],
    ],
    ids=["no objects at all", "one image", "1,000 objects", "very different sizes"],
)
def test_unusual_batches_have_torchvisions_losses(shapes):
    samples = [draw_sample(*shape) for shape in shapes]
    flips = [False] * len(samples)
    packed, images, targets = make_batch(samples, flips)
    torch.manual_seed(0)
    model = build_mask_rcnn(TINY_MODEL, num_classes=2, weights=None, min_size=64).train()
    expected, found = compute_both(model, packed, images, targets, flips=flips)
    for name, loss in expected.items():
        assert found[name].item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-6), name


def test_gradients_point_the_same_way(real_samples):
    packed, images, targets = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    gradients = []
    for losses in compute_both(model, packed, images, targets):
        model.zero_grad()
        sum(losses.values()).backward()
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    expected, found = gradients
    assert torch.linalg.norm(found - expected) < 1e-4 * torch.linalg.norm(expected)


def test_mask_targets_are_close_to_torchvisions(real_samples, monkeypatch):
    packed, images, targets = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    seen = []
    project, sample = roi_heads.project_masks_on_boxes, losses_module.sample_masks
    monkeypatch.setattr(
        roi_heads,
        "project_masks_on_boxes",
        lambda *given: seen.append(project(*given).detach()) or seen[-1],
    )
    monkeypatch.setattr(
        losses_module,
        "sample_masks",
        lambda *given, **more: seen.append(sample(*given, **more)) or seen[-1],
    )
    compute_both(model, packed, images, targets)
    found, *theirs = seen
    expected = torch.cat(theirs)
    # each samples in its own order
    order = [*map(torch.sort, (found.flatten(1).sum(1), expected.flatten(1).sum(1)))]
    found, expected = found[order[0].indices], expected[order[1].indices]
    assert found.shape == expected.shape
    assert (found - expected).abs().max() < 1e-4


def test_input_is_that_of_torchvisions_transform(real_samples):
    packed, images, targets = make_batch(real_samples, FLIPS)
    transform = build(real_samples, min_size=224, max_size=300).transform
    expected, expected_targets = transform(images, targets)
    sizes = choose_sizes(transform, packed.sizes.tolist())
    found, objects = make_input(transform, packed, sizes, flips=FLIPS)
    assert sizes == expected.image_sizes
    assert found.shape == expected.tensors.shape
    assert torch.allclose(found, expected.tensors, atol=1e-5)
    for boxes, labels, exists, theirs in zip(*objects, expected_targets, strict=True):
        assert torch.allclose(boxes[exists], theirs["boxes"], atol=1e-4)
        assert torch.equal(labels[exists], theirs["labels"])


def test_memory_for_masks_follows_the_boxes():
    """300 objects of 40 x 40 pixels in 1,000 x 1,000: dense masks alone would be 300 MB, as floats
    four times that.
    """
    corners = torch.randint(0, 960, (300, 2), generator=torch.Generator().manual_seed(0))
    masks = torch.zeros(300, 1000, 1000, dtype=torch.uint8)
    for mask, (x, y) in zip(masks, corners.tolist(), strict=True):
        mask[y : y + 40, x : x + 40] = 1
    target = {
        "boxes": torch.cat([corners, corners + 40], 1).float(),
        "labels": torch.ones(300, dtype=torch.int64),
        "masks": masks,
        "image_id": 1,
        "area": torch.full((300,), 1600.0),
        "iscrowd": torch.zeros(300),
    }
    batch = collate_packed([pack_target(torch.zeros(3, 1000, 1000, dtype=torch.uint8), target)])
    model = build([(None, target)], min_size=320)
    with LargestTensor() as watched:
        losses = compute_losses(model, batch)
    assert losses["loss_mask"] > 0
    assert watched.bytes < 70_000_000  # a chunk of the sampler is at most 64 MB


def test_a_batch_in_parts_has_the_mean_of_their_gradients(real_samples):
    packed, _, _ = make_batch(real_samples, FLIPS)
    gradients = []
    for parts in (1, 2):
        model = build(real_samples)
        step = TrainingStep(model, "cpu", optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
        for module in model.modules():  # its statistics would be those of half a batch
            module.train(not isinstance(module, torch.nn.BatchNorm2d))
        step.parts = parts
        torch.manual_seed(1)
        step(packed, flips=FLIPS)
        gradients.append(
            torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        )
    full, halves = gradients
    # other proposals are sampled
    assert torch.nn.functional.cosine_similarity(full, halves, dim=0) > 0.9


def test_a_batch_whose_proposals_hold_no_object_has_a_mask_loss_of_zero(real_samples, monkeypatch):
    packed, _, _ = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    real = losses_module.sample_regions
    monkeypatch.setattr(
        losses_module,
        "sample_regions",
        lambda matches, sampler: real(matches.where(matches < 0, -2), sampler),
    )
    assert compute_losses(model, packed)["loss_mask"].item() == 0


def test_what_is_no_mask_rcnn_in_training_is_refused_in_words(tiny_dataset):
    dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, contiguous_labels=True)
    samples = [dataset[i] for i in range(len(FLIPS))]
    packed, images, targets = make_batch(samples, FLIPS)
    model = build(samples)
    boxes_only = fasterrcnn_mobilenet_v3_large_320_fpn(
        weights=None, weights_backbone=None, num_classes=2
    )
    refused = [
        (
            DataParallel(model),
            packed,
            "found DataParallel around it.* whose forward calls compute_losses",
        ),
        (boxes_only, packed, "found FasterRCNN.*deliver='dense'"),
        (torch.nn.Identity(), packed, "found Identity"),
        (build(samples).eval(), packed, "evaluation mode: call model.train"),
        (model, (images, targets), "expected a packed batch, found tuple.*deliver='packed'"),
    ]
    for one, batch, message in refused:
        with pytest.raises(ColabUtilsError, match=message):
            compute_losses(one, batch)


def test_coco_mini_has_what_the_tests_stand_on(coco_mini):
    assert len({tuple(size) for size in read_coco(coco_mini.annotations).sizes.tolist()}) > 1


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
    found = choose_sizes(transform, SIZES)
    assert found == images.image_sizes
    in_evaluation, _ = transform.eval()([torch.zeros(1, *size) for size in SIZES])
    assert choose_sizes(transform, SIZES) == in_evaluation.image_sizes
    transform.train().min_size = (max(transform.min_size),)
    assert (np.array(choose_sizes(transform, SIZES)) >= found).all()
