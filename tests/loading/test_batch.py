"""Packing, the hand-over in one buffer, and expanding on the device, against dense samples."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import collate_packed
from colab_utils.loading.targets import pack_target

NOT_A_NUMBER = float("nan")
NUMBERS = torch.tensor([3, 7, 255], dtype=torch.uint8)[:, None, None]
DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
    ),
]


def make_sample(seed, *, height=24, width=31, objects=3, fill=0.3):
    rand = partial(torch.rand, generator=torch.Generator().manual_seed(seed))
    corners = 10 * rand(objects, 4)
    corners[:, 2:] += corners[:, :2] + 1
    return (256 * rand(3, height, width)).byte(), {
        "boxes": corners,
        "labels": torch.arange(1, objects + 1),
        "masks": (rand(objects, height, width) < fill).byte(),
        "image_id": 1000 + seed,
        "area": 1e5 * rand(objects),
        "iscrowd": torch.arange(objects) % 2,
    }


def change_part(sample, key, change):
    """Return a sample whose image, or one part of its target, is another."""
    image, target = sample
    if key == "image":
        return change(image), target
    return image, target | {key: change(target[key])}


def soften(masks):
    """Return masks with values from 0 to 255."""
    return masks * torch.arange(1, 32, dtype=torch.uint8) * 8


def assert_same(sample, image, target):
    assert image.dtype == torch.float32
    # A GPU divides by multiplying with the inverse, which rounds otherwise.
    tolerance = 1e-7 if image.is_cuda else 0
    torch.testing.assert_close(image.cpu(), sample[0].float() / 255, rtol=0, atol=tolerance)
    target = dict(target)
    expected = dict(sample[1])
    assert type(target["image_id"]) is int
    assert target.pop("image_id") == expected.pop("image_id")
    assert target.keys() == expected.keys()
    for key, value in expected.items():
        assert target[key].dtype == value.dtype
        assert torch.equal(target[key].cpu(), value), key


def assert_same_batch(samples, batch, device="cpu"):
    images = batch.to_images(device)
    targets = batch.to_targets(device)
    for sample, image, target in zip(samples, images, targets, strict=True):
        assert image.device.type == target["masks"].device.type == device
        assert_same(sample, image, target)


def pack(samples):
    return collate_packed([pack_target(*sample) for sample in samples])


def assert_taken(expected, sample):
    assert_same_batch([expected], pack([sample]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "samples",
    [
        # A batch may have one image.
        [make_sample(0)],
        # Images of one batch differ in shape.
        [
            make_sample(0),
            make_sample(1, height=40, width=8),
            make_sample(2, height=3, width=50),
        ],
        # Images without objects lie between others.
        [make_sample(0, objects=0), make_sample(1), make_sample(2, objects=0)],
        # The whole batch has no object.
        [make_sample(0, objects=0), make_sample(1, objects=0)],
        # Objects come in crowds.
        [make_sample(0, objects=1000), make_sample(1, objects=300)],
    ],
)
def test_a_batch_gives_back_the_samples(samples, device):
    batch = pack(samples)
    assert len(batch) == len(samples)
    assert_same_batch(samples, batch, device)
    moved = batch.to(device)
    for place in (device, "cpu"):
        assert_same_batch(samples, moved, place)


def test_the_fields_are_those_of_the_contract():
    batch = pack([make_sample(0), make_sample(1, height=40, width=8, objects=2)])
    assert batch.images.shape == (2, 3, 40, 31)
    assert batch.images.dtype == torch.uint8
    assert not batch.images[0, :, 24:].any()
    assert not batch.images[1, :, :, 8:].any()
    assert batch.sizes.tolist() == [[24, 31], [40, 8]]
    assert batch.counts.tolist() == [3, 2]
    bits, crops, offsets = batch.masks
    assert (bits.dtype, crops.dtype, offsets.dtype) == (torch.uint8, torch.int32, torch.int64)
    assert offsets.tolist()[-1] == len(bits)
    for part in (batch.boxes, batch.labels, batch.areas, batch.iscrowd, crops, offsets[:-1]):
        assert len(part) == 5


def test_what_a_user_keeps_does_not_keep_the_batch():
    batch = pack([make_sample(0), make_sample(1)])
    parts = batch.to_images("cpu")
    for target in batch.to_targets("cpu"):
        parts += filter(torch.is_tensor, target.values())
    kept = {part.untyped_storage().data_ptr() for part in parts}
    for part in (batch.pixels, batch.images):
        assert part.untyped_storage().data_ptr() not in kept


@pytest.mark.parametrize(
    ("key", "change"),
    [
        # Masks may come one by one, as tensors or as Pillow's images.
        ("masks", list),
        ("masks", lambda masks: [Image.fromarray(mask.numpy() * 255) for mask in masks]),
        # Each mask has a value of its own.
        ("masks", lambda masks: masks * NUMBERS),
        # The types of transforms.v2 are tensors, too.
        ("masks", tv_tensors.Mask),
        ("image", tv_tensors.Image),
        # The references of torchvision give the number as a tensor.
        ("image_id", torch.tensor),
        # Boxes may be wider.
        ("boxes", torch.Tensor.double),
        # Boxes may come from a model that is trained.
        ("boxes", lambda boxes: boxes.clone().requires_grad_()),
        # An image from an HWC array has other strides.
        ("image", lambda image: image.permute(1, 2, 0).contiguous().permute(2, 0, 1)),
        # A mirrored view has negative strides.
        ("masks", lambda masks: masks.numpy()[..., ::-1].copy()[..., ::-1]),
        # Files of other programs may have the other order of bytes.
        ("boxes", lambda boxes: boxes.numpy().astype(">f4")),
    ],
)
def test_other_forms_of_the_same_target_are_taken(key, change):
    sample = make_sample(0)
    assert_taken(sample, change_part(sample, key, change))


def test_fields_beyond_the_contract_are_allowed():
    image, target = make_sample(0)
    assert_taken((image, target), (image, target | {"keypoints": torch.zeros(3, 17, 3)}))


@pytest.mark.parametrize(
    "given",
    [{}, {"image_id": 5}, {"labels": [], "boxes": torch.zeros(0), "masks": torch.zeros(0)}],
)
def test_an_image_may_have_no_objects(given):
    image, expected = make_sample(0, objects=0)
    batch = collate_packed([pack_target(image, given, index=5)])
    assert_same_batch([(image, expected | {"image_id": 5})], batch)


def test_area_crowds_and_number_of_an_image_may_be_missing():
    image, target = make_sample(0)
    parts = {key: target[key] for key in ("boxes", "labels", "masks")}
    computed = {
        "image_id": 7,
        "area": target["masks"].sum((1, 2)).float(),
        "iscrowd": torch.zeros(3, dtype=torch.int64),
    }
    batch = collate_packed([pack_target(image, parts, index=7)])
    assert_same_batch([(image, parts | computed)], batch)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        # ToTensor gives such an image.
        (
            "image",
            lambda image: image.float() / 255,
            r"found float32 \[3, 24, 31\]",
        ),
        # A grey image has one channel.
        (
            "image",
            lambda image: image[:1],
            r"found uint8 \[1, 24, 31\]",
        ),
        (
            "image",
            functional.to_pil_image,
            "found Image.*PILToTensor",
        ),
        (
            "image_id",
            lambda _: "a.jpg",
            "image_id 'a.jpg' of sample 0",
        ),
        # This would become the id of image 1000.
        (
            "image_id",
            lambda _: 1000.5,
            "image_id 1000.5 of sample 0",
        ),
        (
            "image_id",
            lambda _: 2**63,
            "sample 0 is not an integer of 64 bits",
        ),
        # These masks have soft edges.
        (
            "masks",
            soften,
            "a mask with several values up to 248",
        ),
        # These masks have another size than the image.
        (
            "masks",
            lambda masks: masks[:, :5],
            r"masks of uint8 \[3, 5, 31\]",
        ),
        # Masks come without labels.
        (
            "labels",
            lambda labels: labels[:0],
            r"boxes of .* and needs \[0, 4\]",
        ),
        (
            "labels",
            torch.Tensor.float,
            r"labels of float32 \[3\].*integers, boxes as float32, masks as uint8 or bool",
        ),
        # These are polygons.
        (
            "masks",
            lambda _: [[[2, 4, 10, 4, 10, 14]], [[17, 2, 28, 2, 28, 8, 17, 8]]],
            "masks of list",
        ),
        (
            "boxes",
            lambda boxes: boxes.numpy().astype(np.longdouble),
            "boxes of ndarray",
        ),
        # Tensors may be dense only.
        (
            "image",
            torch.Tensor.to_sparse,
            "torch.sparse_coo",
        ),
        (
            "area",
            lambda area: area * NOT_A_NUMBER,
            "area nan .* computed from the mask",
        ),
        (
            "area",
            torch.neg,
            "area -",
        ),
        # This number is too large for the float32 that it becomes.
        (
            "area",
            lambda _: np.full(3, 1e300),
            r"area 1e\+300",
        ),
        # This would become 0.
        (
            "iscrowd",
            lambda crowds: crowds / 2,
            r"iscrowd 0\.5",
        ),
        (
            "labels",
            lambda labels: labels * 0,
            "label 0, .* 0 is the background",
        ),
        (
            "boxes",
            lambda boxes: boxes * NOT_A_NUMBER,
            "no area or is not finite",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(beta|prototype)")
def test_what_is_not_the_contract_is_refused_in_words(key, change, message):
    with pytest.raises(ColabUtilsError, match=message) as error:
        pack_target(*change_part(make_sample(0), key, change))
    assert "\n" not in str(error.value)
    assert "1000" in str(error.value) or "sample 0" in str(error.value)


def test_names_of_another_library_do_not_pass_for_an_image_without_objects():
    image, target = make_sample(0)
    with pytest.raises(ColabUtilsError, match="labels of nothing"):
        pack_target(image, {"image_id": 1000, "bbox": target["boxes"]})


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
def test_boxes_that_name_their_format_become_corners(form):
    image, target = make_sample(0)
    corners = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(24, 31))
    boxes = functional.convert_bounding_box_format(corners, new_format=form)
    assert torch.allclose(pack([(image, target | {"boxes": boxes})]).boxes, corners, atol=1e-5)


def test_a_packed_batch_is_no_pair():
    with pytest.raises(TypeError, match=r"not iterable|cannot unpack"):
        # Loops unpack like this where a loader delivers dense batches.
        _, _ = pack([make_sample(0), make_sample(1)])


def test_a_part_of_a_batch_is_its_images():
    samples = [make_sample(0), make_sample(1, height=40, objects=0), make_sample(2, width=50)]
    batch = pack(samples)
    for first, end in ((0, 1), (1, 3), (0, 3), (1, 1)):
        part = batch[first:end]
        assert len(part) == end - first
        assert_same_batch(samples[first:end], part)
