"""Packing, the hand-over in one buffer, and expanding on the device, against dense samples."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from PIL import Image
from torchvision import tv_tensors
from torchvision.transforms.v2 import functional

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed, open_batch, write_batch
from colab_utils.loading.contract import PackedSamples
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
    rng = np.random.default_rng(seed)
    masks = torch.from_numpy((rng.random((objects, height, width)) < fill).astype(np.uint8))
    corners = torch.from_numpy(rng.random((objects, 4)).astype(np.float32)) * 10
    corners[:, 2:] += corners[:, :2] + 1
    return torch.from_numpy(rng.integers(0, 256, (3, height, width), dtype=np.uint8)), {
        "boxes": corners,
        "labels": torch.from_numpy(rng.integers(1, 91, objects)),
        "masks": masks,
        "image_id": 1000 + seed,
        "area": torch.from_numpy(rng.random(objects).astype(np.float32)) * 1e5,
        "iscrowd": torch.from_numpy(rng.integers(0, 2, objects)),
    }


def soften(masks):
    """Return masks with values from 0 to 255."""
    return masks * torch.arange(1, 32, dtype=torch.uint8) * 8


def assert_same(sample, image, target):
    assert image.dtype == torch.float32
    # A GPU divides by multiplying with the inverse, which rounds otherwise.
    tolerance = 1e-7 if image.is_cuda else 0
    torch.testing.assert_close(image.cpu(), sample[0].float() / 255, rtol=0, atol=tolerance)
    assert set(target) == set(sample[1])
    for key, value in sample[1].items():
        if key == "image_id":
            assert target[key] == value
            assert isinstance(target[key], int)
        else:
            assert target[key].dtype == value.dtype
            assert torch.equal(target[key].cpu(), value), key


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
        # Some masks are empty, and some are full.
        [make_sample(0, fill=0), make_sample(1, fill=1)],
        # The image has one pixel.
        [make_sample(0, height=1, width=1, objects=2)],
        # Objects come in crowds.
        [make_sample(0, objects=1000), make_sample(1, objects=300)],
    ],
)
def test_a_batch_gives_back_the_samples(samples, device):
    batch = collate_packed([pack_target(*sample) for sample in samples])
    assert len(batch) == len(samples)
    images = batch.to_images(device)
    targets = batch.to_targets(device)
    moved = batch.to(device)
    for once, twice in (
        (images, moved.to_images(device)),
        (targets, moved.to_targets(device)),
    ):
        assert len(once) == len(twice) == len(samples)
    for sample, image, target in zip(samples, images, targets, strict=True):
        assert image.device.type == target["masks"].device.type == torch.device(device).type
        assert_same(sample, image, target)
    for sample, image, target in zip(
        samples, moved.to_images("cpu"), moved.to_targets("cpu"), strict=True
    ):
        assert_same(sample, image, target)


def test_the_fields_are_those_of_the_contract():
    samples = [make_sample(0, height=24, width=31), make_sample(1, height=40, width=8, objects=2)]
    batch = collate_packed([pack_target(*sample) for sample in samples])
    assert batch.images.shape == (2, 3, 40, 31)
    assert batch.images.dtype == torch.uint8
    assert not batch.images[0, :, 24:].any()
    assert not batch.images[1, :, :, 8:].any()
    assert batch.sizes.tolist() == [[24, 31], [40, 8]]
    assert batch.image_ids.tolist() == [1000, 1001]
    assert batch.counts.tolist() == [3, 2]
    bits, crops, offsets = batch.masks
    assert (bits.dtype, crops.dtype, offsets.dtype) == (torch.uint8, torch.int32, torch.int64)
    assert offsets.tolist()[-1] == len(bits)
    for part in (
        batch.boxes,
        batch.labels,
        batch.areas,
        batch.iscrowd,
        crops,
        offsets[:-1],
    ):
        assert len(part) == 5


def test_what_a_user_keeps_does_not_keep_the_batch():
    batch = collate_packed([pack_target(*make_sample(seed)) for seed in range(2)])
    parts = [
        value
        for target in batch.to_targets("cpu")
        for value in target.values()
        if torch.is_tensor(value)
    ]
    kept = {part.untyped_storage().data_ptr() for part in [*parts, *batch.to_images("cpu")]}
    assert (
        not {batch.pixels.untyped_storage().data_ptr(), batch.images.untyped_storage().data_ptr()}
        & kept
    )


def test_a_batch_is_one_buffer_and_a_short_message():
    samples = PackedSamples([pack_target(*make_sample(seed)) for seed in range(3)])
    # The memory was used before, as that of a pool is.
    memory = np.full(1 << 20, 255, np.uint8)
    layout, _ = write_batch(samples, range(3), lambda size: memory[:size])
    message = pickle.dumps(layout)
    assert len(message) < 1000
    again = open_batch(torch.from_numpy(memory), pickle.loads(message))
    assert isinstance(again, PackedBatch)
    parts = [part for part in (*vars(again).values(), *again.masks) if torch.is_tensor(part)]
    assert all(0 <= part.data_ptr() - memory.ctypes.data < memory.size for part in parts)
    with pytest.raises(TypeError, match=r"not iterable|cannot unpack"):
        # Loops unpack like this where a loader delivers dense batches.
        _, _ = again
    for seed, image, target in zip(
        range(3), again.to_images("cpu"), again.to_targets("cpu"), strict=True
    ):
        assert_same(make_sample(seed), image, target)


@pytest.mark.parametrize(
    "change",
    [
        # Some datasets give masks as booleans.
        lambda image, target: (image, target | {"masks": target["masks"].bool()}),
        # Some masks hold 0 and 255.
        lambda image, target: (image, target | {"masks": target["masks"] * 255}),
        # The types of transforms.v2 are tensors, too.
        lambda image, target: (image, target | {"masks": tv_tensors.Mask(target["masks"])}),
        lambda image, target: (tv_tensors.Image(image), target),
        # The references of torchvision give the number as a tensor.
        lambda image, target: (image, target | {"image_id": torch.tensor([1000])}),
        # Labels may be narrower, and boxes wider.
        lambda image, target: (image, target | {"labels": target["labels"].int()}),
        lambda image, target: (image, target | {"boxes": target["boxes"].double()}),
        # Boxes may come from a model that is trained.
        lambda image, target: (image, target | {"boxes": target["boxes"].requires_grad_()}),
        # Each mask has a value of its own.
        lambda image, target: (image, target | {"masks": target["masks"] * NUMBERS}),
        # Fields beyond the contract are allowed.
        lambda image, target: (image, target | {"keypoints": torch.zeros(3, 17, 3)}),
        # An image from an HWC array has other strides.
        lambda image, target: (image.permute(1, 2, 0).contiguous().permute(2, 0, 1), target),
    ],
)
def test_other_forms_of_the_same_target_are_taken(change):
    image, target = make_sample(0)
    assert_same((image, target), *unpack(pack_target(*change(image, dict(target)))))


@pytest.mark.parametrize(
    "given",
    [{}, {"image_id": 5}, {"labels": [], "boxes": torch.zeros(0), "masks": torch.zeros(0)}],
)
def test_an_image_may_have_no_objects(given):
    image, expected = make_sample(0, objects=0)
    assert_same((image, expected | {"image_id": 5}), *unpack(pack_target(image, given, index=5)))


def test_area_crowds_and_number_of_an_image_may_be_missing():
    image, target = make_sample(0)
    parts = {key: target[key] for key in ("boxes", "labels", "masks")}
    computed = {
        "image_id": 7,
        "area": target["masks"].sum((1, 2)).float(),
        "iscrowd": torch.zeros(3, dtype=torch.int64),
    }
    assert_same((image, parts | computed), *unpack(pack_target(image, parts, index=7)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        # ToTensor gives such an image.
        (lambda i, t: (i.float() / 255, t), r"found float32 \[3, 24, 31\]"),
        # A grey image has one channel.
        (lambda i, t: (i[:1], t), r"found uint8 \[1, 24, 31\]"),
        (lambda i, t: (i[:, :0], t), r"found uint8 \[3, 0, 31\]"),
        (lambda i, t: (i.numpy(), t), "found ndarray"),
        (lambda i, t: (i, t | {"masks": None}), r"masks of nothing, and needs \[3, 24, 31\]"),
        (
            lambda i, t: (i, {k: v for k, v in t.items() if k != "boxes"}),
            "boxes of nothing",
        ),
        # Names of another library must not pass for an image without objects.
        (lambda i, t: (i, {"image_id": 1000, "bbox": t["boxes"]}), "labels of nothing"),
        (lambda i, t: (i, t | {"image_id": "a.jpg"}), "image_id 'a.jpg' of sample 0"),
        # This would become the id of image 1000.
        (lambda i, t: (i, t | {"image_id": 1000.5}), "image_id 1000.5 of sample 0"),
        (lambda i, t: (i, t | {"image_id": 2**63}), "sample 0 is not an integer of 64 bits"),
        (lambda i, t: (Image.fromarray(i.permute(1, 2, 0).numpy()), t), "found Image.*PILToTensor"),
        # These masks have soft edges.
        (
            lambda i, t: (i, t | {"masks": soften(t["masks"])}),
            "a mask with several values up to 248",
        ),
        (
            lambda i, t: (i, t | {"masks": t["masks"].float()}),
            r"masks of float32 \[3, 24, 31\]",
        ),
        # These masks have another size than the image.
        (
            lambda i, t: (i, t | {"masks": t["masks"][:, :5]}),
            r"masks of uint8 \[3, 5, 31\]",
        ),
        (
            lambda i, t: (i, t | {"masks": [{"counts": b"1"}] * 3}),
            "masks of list",
        ),
        (
            lambda i, t: (i, t | {"boxes": t["boxes"][:, :3]}),
            r"boxes of float32 \[3, 3\]",
        ),
        # Masks come without labels.
        (
            lambda i, t: (i, t | {"labels": t["labels"][:0]}),
            r"boxes of .* and needs \[0, 4\]",
        ),
        (
            lambda i, t: (i, t | {"labels": t["labels"].float()}),
            r"labels of float32 \[3\]",
        ),
        (
            lambda i, t: (i, t | {"labels": t["labels"] * 0}),
            "label 0, .* 0 is the background",
        ),
        (
            lambda i, t: (i, t | {"boxes": t["boxes"] * NOT_A_NUMBER}),
            "no area or is not finite",
        ),
        (
            lambda i, t: (i, t | {"boxes": t["boxes"].flip(1)}),
            "no area or is not finite",
        ),
    ],
)
def test_what_is_not_the_contract_is_refused_in_words(change, message):
    with pytest.raises(ColabUtilsError, match=message) as error:
        pack_target(*change(*make_sample(0)))
    assert "\n" not in str(error.value)
    assert "1000" in str(error.value) or "sample 0" in str(error.value)


@pytest.mark.parametrize("form", ["XYXY", "XYWH", "CXCYWH"])
def test_boxes_that_name_their_format_become_corners(form):
    image, target = make_sample(0)
    corners = tv_tensors.BoundingBoxes(target["boxes"], format="XYXY", canvas_size=(24, 31))
    boxes = functional.convert_bounding_box_format(corners, new_format=form)
    batch = collate_packed([pack_target(image, target | {"boxes": boxes})])
    assert torch.allclose(batch.boxes, target["boxes"], atol=1e-5)


@pytest.mark.skipif(
    "XYWHR" not in tv_tensors.BoundingBoxFormat.__members__,
    reason="this torchvision knows no such boxes",
)
def test_boxes_that_stand_at_an_angle_are_refused():
    image, target = make_sample(0)
    rotated = tv_tensors.BoundingBoxes(torch.ones(3, 5), format="XYWHR", canvas_size=(24, 31))
    with pytest.raises(ColabUtilsError, match="boxes of float32"):
        pack_target(image, target | {"boxes": rotated})


def test_a_part_of_a_batch_is_its_images():
    samples = [make_sample(0), make_sample(1, height=40, objects=0), make_sample(2, width=50)]
    batch = collate_packed([pack_target(*sample) for sample in samples])
    for first, end in ((0, 1), (1, 3), (0, 3), (1, 1)):
        part = batch[first:end]
        assert len(part) == end - first
        for sample, image, target in zip(
            samples[first:end], part.to_images("cpu"), part.to_targets("cpu"), strict=True
        ):
            assert_same(sample, image, target)


@pytest.mark.parametrize(
    "change",
    [
        # A mirrored view has negative strides.
        lambda array: array[..., ::-1].copy()[..., ::-1],
        # Files of other programs may have the other order of bytes.
        lambda array: array.astype(array.dtype.newbyteorder(">")),
    ],
)
@pytest.mark.parametrize("key", ["boxes", "labels", "masks"])
def test_arrays_are_taken_in_any_layout(key, change):
    image, target = make_sample(1)
    arrays = {key: change(target[key].numpy())}
    assert_same((image, target), *unpack(pack_target(image, target | arrays)))


def unpack(sample):
    batch = collate_packed([sample])
    return batch.to_images("cpu")[0], batch.to_targets("cpu")[0]


def test_arrays_that_a_dataset_uses_again_are_copied():
    image, target = make_sample(1)
    sample = pack_target(image, {key: copy.copy(value) for key, value in target.items()})
    expected = {key: table.copy() for key, table in sample.tables.items()}
    for key in ("boxes", "labels", "masks", "area", "iscrowd"):
        target[key].fill_(7)
    for key, table in sample.tables.items():
        assert (table == expected[key]).all()
