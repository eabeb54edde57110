"""Samples of other people: what is said where their values cannot be right."""

from __future__ import annotations

import re

import pytest
import torch
from torchvision import transforms as transforms_v1
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.targets import pack_target
from colab_utils.loading.transforms import apply_transforms, describe_misfit

from .test_batch import change_part

BOXES = torch.tensor([[2.0, 4, 10, 14], [17, 2, 28, 8]])


def make_sample(index=0):
    """Return an image, uint8 [3, 24, 32], with two objects."""
    masks = torch.zeros(2, 24, 32, dtype=torch.uint8)
    masks[0, 4:14, 2:10] = 1
    masks[1, 2:8, 17:28] = 1
    return torch.full((3, 24, 32), index, dtype=torch.uint8), {
        "boxes": BOXES.clone(),
        "labels": torch.tensor([1, 2]),
        "masks": masks,
        "image_id": index,
        "area": torch.tensor([80.0, 66]),
        "iscrowd": torch.tensor([0, 1]),
    }


def find_misfit(image, target):
    tables = pack_target(image, target).tables
    return describe_misfit(tables["boxes"], tables["crops"], tables["image_ids"][0])


@pytest.mark.parametrize(
    ("key", "change"),
    [
        # Boxes are given in shares of the image.
        ("boxes", lambda boxes: boxes / torch.tensor([32, 24, 32, 24])),
        # Boxes name y before x.
        ("boxes", lambda boxes: boxes[:, [1, 0, 3, 2]]),
        # Boxes lie beyond the image.
        ("boxes", lambda boxes: boxes + 100),
        # Masks belong to other objects.
        ("masks", lambda masks: masks.flip(0)),
        # Masks were compared with the wrong value, and are empty.
        ("masks", lambda masks: masks == 255),
        # The background is 1, and the objects are 0.
        ("masks", lambda masks: 1 - masks),
    ],
)
def test_a_mask_beside_its_box_is_said(key, change):
    misfit = find_misfit(*change_part(make_sample(3), key, change))
    assert re.search(r"Image 3 has the box .* mask of this object (lies in|has no)", misfit)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        # Boxes may enclose the whole of an object that is partly hidden.
        {"boxes": BOXES + torch.tensor([-6, -6, 6, 6])},
        # This is what masks_to_boxes of torchvision gives for masks two pixels wide and high.
        {
            "boxes": torch.tensor([[4.0, 5, 5, 6]] * 2),
            "masks": functional.pad(torch.ones(2, 2, 2, dtype=torch.uint8), [4, 5, 26, 17]),
        },
        # An image may have no objects.
        dict.fromkeys(("boxes", "labels", "masks", "area", "iscrowd"), ()),
        # Boxes may leave the image by a part.
        {"boxes": BOXES + torch.tensor([[-4, -4, 4, 4], [-1, -6, 8, 0]])},
    ],
)
def test_boxes_may_be_larger_than_masks_or_end_a_pixel_before_them(parts):
    image, target = make_sample()
    assert find_misfit(image, target | parts) == ""


def brighten(image):
    return image + 1


def augment(*, image, masks=None):
    """Augment as albumentations do: arguments have names."""
    return {"image": image, "masks": masks}


@pytest.mark.parametrize(
    "transforms",
    [
        brighten,
        augment,
        v2.Compose([v2.RandomHorizontalFlip(1), transforms_v1.ToTensor()]),
        torch.nn.Sequential(v2.RandomHorizontalFlip(1)),
        # The brackets were forgotten.
        v2.ColorJitter,
    ],
)
def test_transforms_of_the_image_alone_are_explained(transforms):
    with pytest.raises(ColabUtilsError, match=r"They are called with \(image, target\)"):
        apply_transforms(transforms, *make_sample())


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_masks_of_255_after_transforms_are_told(make, dtype):
    def scale(image, target):
        return image, target | {"masks": target["masks"].to(dtype) * 255}

    with pytest.warns(ColabUtilsWarning, match=r"a mask with values above 1.*masks of 0 and 1"):
        list(make([make_sample()], deliver="dense", transforms=scale))


@pytest.mark.parametrize(
    "transforms",
    [
        v2.Compose([v2.RandomCrop((12, 12)), v2.SanitizeBoundingBoxes()]),
        v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize([0.5] * 3, [0.5] * 3)]),
    ],
)
def test_transforms_of_torchvision_go_in_without_a_word(make, transforms):
    samples = [make_sample(0), make_sample(1)]
    images, targets = next(iter(make(samples, deliver="dense", transforms=transforms)))
    for image, target in zip(images, targets, strict=True):
        assert image.dtype == torch.float32
        assert target["masks"].shape == (len(target["boxes"]), *image.shape[1:])
        assert len(target["area"]) == len(target["iscrowd"]) == len(target["labels"])
