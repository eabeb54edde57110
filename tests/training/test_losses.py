"""The losses of a packed batch, against those that torchvision computes from dense masks."""

from __future__ import annotations

import pytest
import torch
from torch.nn.parallel import DataParallel
from torchvision.models.detection import fasterrcnn_mobilenet_v3_large_320_fpn
from torchvision.ops import box_iou

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.targets import pack_target
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import build_mask_rcnn
from colab_utils.training.step import TrainingStep
from tests.tiny_model import TINY_MODEL

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    ),
]
NOT_A_NUMBER = float("nan")
FLIPS = [True, False, False, True]


def flip(image, target):
    width = image.shape[-1]
    boxes = target["boxes"].clone()
    boxes[:, [0, 2]] = width - boxes[:, [2, 0]]
    return (
        image.flip(-1),
        {**target, "boxes": boxes, "masks": target["masks"].flip(-1)},
    )


def make_batch(samples, flips):
    """The same samples packed, and as torchvision's references pass them to the model."""
    packed = collate_packed([pack_target(*sample) for sample in samples])
    pairs = [
        flip(*sample) if mirrored else sample
        for sample, mirrored in zip(samples, flips, strict=True)
    ]
    return (
        packed,
        [image.float() / 255 for image, _ in pairs],
        [target for _, target in pairs],
    )


@pytest.fixture(scope="module")
def real_samples(coco_mini):
    dataset = CocoFolder(coco_mini.images, coco_mini.annotations, contiguous_labels=True)
    chosen = [dataset[i] for i in range(len(dataset))]
    return [sample for sample in chosen if len(sample[1]["labels"])][:4]


def compute_both(model, packed, images, targets, flips=FLIPS):
    """Return the losses by torchvision and by ours, with the same random numbers."""
    torch.manual_seed(1)
    losses = compute_losses(model, packed, flips=flips)
    torch.manual_seed(1)
    return model(images, targets), losses


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
        {"min_size": (320,), "max_size": 400},
        # The size is given as width and height.
        {"fixed_size": (192, 128)},
        # The references of torchvision set this for multi-scale augmentation.
        {"_skip_resize": True},
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
    expected, losses = compute_both(model, packed.to(device), images, targets)
    assert losses.keys() == expected.keys()
    for name, loss in expected.items():
        # A GPU adds up in another order each time.
        tolerance = 1e-6 if device == "cpu" else 0.01
        assert losses[name].item() == pytest.approx(loss.item(), rel=tolerance), name


def test_a_batch_whose_proposals_hold_no_object_has_a_mask_loss_of_zero(real_samples):
    packed, _, _ = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    model.roi_heads.fg_bg_sampler.positive_fraction = 0.0
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
            "DataParallel is no Mask R-CNN.* whose forward calls compute_losses",
        ),
        (boxes_only, packed, "FasterRCNN is no Mask R-CNN.*deliver='dense'"),
        (torch.nn.Identity(), packed, "Identity is no Mask R-CNN"),
        (build(samples).eval(), packed, "evaluation mode. Call model.train"),
        (model, (images, targets), "A batch of type tuple is not packed.*deliver='packed'"),
    ]
    for refused_model, batch, message in refused:
        with pytest.raises(ColabUtilsError, match=message):
            compute_losses(refused_model, batch)


@pytest.mark.parametrize(
    "box",
    [
        [20.0, 10.0, 20.0, 30.0],
        [20.0, NOT_A_NUMBER, 40.0, 30.0],
        [20.0, 10.0, float("inf"), 30.0],
    ],
    ids=str,
)
def test_a_box_without_area_or_number_is_named(real_samples, box):
    packed, _, _ = make_batch(real_samples[:2], [False, False])
    row = int(packed.counts[0])
    packed.boxes[row] = torch.tensor(box)
    message = f"Image {packed.image_ids[1]} has the box .*no area or is not finite"
    with pytest.raises(ColabUtilsError, match=message):
        compute_losses(build(real_samples), packed)


@pytest.mark.parametrize("part", ["box_predictor", "mask_predictor"])
def test_a_label_beyond_a_predictors_classes_is_named(real_samples, part):
    packed, _, _ = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    highest = int(packed.labels.max())
    small = build_mask_rcnn(TINY_MODEL, num_classes=highest, weights=None)
    setattr(model.roi_heads, part, getattr(small.roi_heads, part))
    owner = packed.image_ids.repeat_interleave(packed.counts)[packed.labels.argmax()]
    message = f"Image {owner} has the label {highest}, .*to {highest - 1} in a model of {highest}"
    with pytest.raises(ColabUtilsError, match=message):
        compute_losses(model, packed)
    with pytest.raises(ColabUtilsError, match=message):
        TrainingStep(model, "cpu")(packed)


def test_a_label_of_the_background_is_named(real_samples):
    packed, _, _ = make_batch(real_samples, FLIPS)
    packed.labels[0] = 0
    message = f"Image {packed.image_ids[0]} has the label 0, .*0 is the background"
    with pytest.raises(ColabUtilsError, match=message):
        compute_losses(build(real_samples), packed)


def test_weights_that_are_no_numbers_give_losses_that_are_none(real_samples):
    """Training then stops with the step and the images, and no index is out of bounds."""
    packed, _, _ = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    with torch.no_grad():
        model.rpn.head.bbox_pred.weight.fill_(NOT_A_NUMBER)
    losses = compute_losses(model, packed)
    assert not torch.stack([*losses.values()]).sum().isfinite()


def test_boxes_compared_a_few_at_a_time_have_the_same_overlaps(real_samples):
    packed, _, _ = make_batch(real_samples, FLIPS)
    model = build(real_samples)
    compute_losses(model, packed)
    corners = torch.rand(40, 2, 2, generator=torch.Generator().manual_seed(0)).sort(1).values
    boxes = corners.flatten(1) * 100
    for objects in (boxes, boxes[:16], boxes[:0]):
        assert torch.equal(model.rpn.box_similarity(objects, boxes), box_iou(objects, boxes))
