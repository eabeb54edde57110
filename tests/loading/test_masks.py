"""Masks from their bits against pycocotools, and against torchvision's sampling of dense masks."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as coco_mask
from torchvision.models.detection.roi_heads import project_masks_on_boxes

from colab_utils.data.masks import encode_segmentation, pack_masks
from colab_utils.loading import mask_targets
from colab_utils.loading import masks as module
from colab_utils.loading.mask_targets import sample_masks
from colab_utils.loading.masks import MaskBits, draw_masks, expand_masks, flip_boxes, split_masks

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
)
DEVICES = ["cpu", CUDA]
# With "rows", the CPU runs what a GPU runs.
WAYS = ["cpu", "rows", CUDA]
QUICK = settings(max_examples=80, deadline=None)


def pack_rles(images):
    """The RLE masks of each image, [(height, width), rles], as a batch's masks, sizes and
    counts.
    """
    packed = [pack_masks(rles) for _, rles in images]
    ends = np.cumsum(np.concatenate([[0], *(np.diff(part.offsets) for part in packed)]))
    bits = torch.from_numpy(np.concatenate([part.bits for part in packed]))
    crops = torch.from_numpy(np.concatenate([part.crops for part in packed]))
    counts = torch.tensor([len(rles) for _, rles in images])
    return (
        MaskBits(bits, crops, torch.from_numpy(ends)),
        torch.tensor([size for size, _ in images]),
        counts,
    )


def pack(images):
    """Dense masks [N, height, width] of each image as a batch's masks, sizes and counts."""
    return pack_rles(
        [
            (
                m.shape[1:],
                [coco_mask.encode(np.asfortranarray(mask)) for mask in m],
            )
            for m in images
        ]
    )


def move(masks, device):
    return masks._replace(bits=masks.bits.to(device))


def expand(way, masks, sizes, counts):
    sizes = sizes.tolist()
    counts = counts.tolist()
    if way == "rows":
        flat = torch.zeros(
            sum(count * h * w for count, (h, w) in zip(counts, sizes, strict=True)),
            dtype=torch.uint8,
        )
        module._draw_rows(masks, np.array(sizes).repeat(counts, 0), flat)
        return split_masks(flat, sizes, counts)
    dense = expand_masks(move(masks, way), sizes, counts)
    assert all(part.dtype == torch.uint8 and part.device.type == way for part in dense)
    return [part.cpu() for part in dense]


def make_blobs(seed, *, objects, height=37, width=53):
    """Noise in boxes of any size and place; every fourth mask is empty."""
    rng = np.random.default_rng(seed)
    masks = np.zeros((objects, height, width), np.uint8)
    for i, mask in enumerate(masks):
        if i % 4:
            y0, y1 = np.sort(rng.integers(0, height + 1, 2))
            x0, x1 = np.sort(rng.integers(0, width + 1, 2))
            mask[y0:y1, x0:x1] = rng.random((y1 - y0, x1 - x0)) < 0.7
    return masks


RING = [2, 2, 30, 2, 30, 20, 2, 20], [10, 8, 20, 8, 20, 14, 10, 14]


def draw_hole(height, width):
    outer = coco_mask.decode(encode_segmentation([RING[0]], height, width))
    inner = coco_mask.decode(encode_segmentation([RING[1]], height, width))
    mask = (outer & ~inner).ravel("F")
    runs = np.diff(
        [
            0,
            *(np.flatnonzero(np.diff(mask)) + 1).tolist(),
            mask.size,
        ]
    ).tolist()
    return {"size": [height, width], "counts": runs}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "images",
    [
        # These are a polygon, a hole and an object of two parts.
        [
            (
                (24, 40),
                [[RING[0]], draw_hole(24, 40), [[35, 1, 39, 1, 37, 9], RING[1]]],
            )
        ],
        # These objects touch the borders.
        [
            (
                (5, 7),
                [
                    [[0, 0, 7, 0, 7, 5, 0, 5]],
                    [[-3, -3, 9, -3, 9, 1, -3, 1]],
                    [[6, 0, 9, 0, 9, 9, 6, 9]],
                ],
            )
        ],
        # One object has the only pixel, and the other does not.
        [
            (
                (1, 1),
                [[[0, 0, 1, 0, 1, 1, 0, 1]], {"size": [1, 1], "counts": [1]}],
            )
        ],
        # All masks are empty.
        [((6, 8), [{"size": [6, 8], "counts": [48]}] * 2)],
        # Images without objects lie around others.
        [((6, 8), []), ((9, 4), [[[1, 1, 3, 1, 3, 6, 1, 6]]]), ((3, 3), [])],
        # The batch has no object at all.
        [((6, 8), []), ((3, 3), [])],
    ],
)
def test_dense_masks_are_those_of_pycocotools(images, way):
    rles = [(size, [encode_segmentation(part, *size) for part in parts]) for size, parts in images]
    dense = expand(way, *pack_rles(rles))
    assert len(dense) == len(images)
    for (size, parts), masks in zip(rles, dense, strict=True):
        assert masks.shape == (len(parts), *size)
        for rle, mask in zip(parts, masks.numpy(), strict=True):
            assert np.array_equal(mask, coco_mask.decode(rle))


def dense_images():
    shape = st.tuples(
        st.integers(0, 4),
        st.integers(1, 20),
        st.integers(1, 20),
    )
    return st.lists(
        arrays(np.uint8, shape, elements=st.integers(0, 1)),
        min_size=1,
        max_size=3,
    )


@pytest.mark.parametrize("way", WAYS)
@QUICK
@given(images=dense_images(), chunk=st.sampled_from([module.DRAWN_BYTES, 1000, 64_000_000]))
def test_any_masks_are_drawn_as_they_were(images, way, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", {"cpu": chunk, "cuda": chunk})
        dense = expand(way, *pack(images))
    for drawn, masks in zip(dense, images, strict=True):
        assert torch.equal(drawn, torch.from_numpy(masks))


@QUICK
@given(images=dense_images(), data=st.data())
def test_masks_drawn_into_used_memory_are_mirrored_where_asked(images, data):
    flips = [data.draw(st.booleans()) for _ in images]
    masks, sizes, counts = pack(images)
    memory = torch.full(
        (sum(part.size for part in images),),
        7,
        dtype=torch.uint8,
    )
    draw_masks(
        masks,
        drawn := split_masks(memory, sizes.tolist(), counts.tolist()),
        flips,
    )
    for part, dense, flip in zip(drawn, images, flips, strict=True):
        assert torch.equal(
            part,
            torch.from_numpy(dense).flip(-1 if flip else ()),
        )


def project(images, objects, boxes, flips, size=28):
    """torchvision's targets, made of each image's dense masks."""
    ends = np.cumsum([0, *(len(masks) for masks in images)])
    targets = torch.zeros(len(objects), size, size)
    for masks, flip, (first, end) in zip(images, flips, pairwise(ends.tolist()), strict=True):
        own = (objects >= first) & (objects < end)
        dense = torch.from_numpy(masks[..., ::-1].copy() if flip else masks)
        if own.any():
            targets[own] = project_masks_on_boxes(
                dense,
                boxes[own],
                objects[own] - first,
                size,
            )
    return targets


def sample(masks, objects, boxes, sizes, counts, *, flips=None, to_sizes=None, size=28):
    """Our targets, image after image."""
    targets = torch.zeros(len(objects), size, size)
    first = 0
    for place, count in enumerate(counts.tolist()):
        bits, crops, offsets = masks
        end = first + count
        own = (objects >= first) & (objects < end)
        targets[own.cpu()] = sample_masks(
            MaskBits(bits, crops[first:end], offsets[first : end + 1]),
            objects[own] - first,
            boxes[own],
            stored_size=tuple(sizes[place].tolist()),
            to_size=(to_sizes or sizes.tolist())[place],
            is_flipped=bool(flips and flips[place]),
            size=size,
        ).cpu()
        first = end
    return targets


def make_boxes(count, *, height, width):
    """Boxes that lie partly outside the image."""
    corners = np.sort(np.random.default_rng(0).random((count, 2, 2)), axis=1) * 3 - 1
    return torch.from_numpy((corners * [width, height]).reshape(-1, 4).astype(np.float32))


@pytest.mark.parametrize("device", DEVICES)
# With the first size, each mask is expanded alone; with the second, three are at a time.
@pytest.mark.parametrize("chunk", [2000, 36_000, 64_000_000])
def test_targets_are_those_of_torchvision(device, chunk, monkeypatch):
    monkeypatch.setattr(mask_targets, "CHUNK_BYTES", {"cpu": chunk, "cuda": chunk})
    images = [make_blobs(0, objects=9), make_blobs(1, objects=0), make_blobs(2, objects=8)]
    flips = [False, True, True]
    masks, sizes, counts = pack(images)
    objects = torch.randint(0, 17, (60,), generator=torch.Generator().manual_seed(0))
    boxes = make_boxes(60, height=37, width=53)
    targets = sample(
        move(masks, device), objects.to(device), boxes.to(device), sizes, counts, flips=flips
    )
    assert targets.dtype == torch.float32
    assert targets.device.type == device
    expected = project(images, objects, boxes, flips)
    assert expected.any()
    torch.testing.assert_close(targets.cpu(), expected, atol=1e-6, rtol=0)


@QUICK
@given(
    images=dense_images(),
    data=st.data(),
)
def test_targets_of_any_masks_and_boxes(images, data):
    masks, sizes, counts = pack(images)
    flips = [data.draw(st.booleans()) for _ in images]
    sides = st.tuples(st.integers(1, 60), st.integers(1, 60))
    to_sizes = [
        data.draw(
            st.one_of(
                st.just(tuple(masks.shape[1:])),
                sides,
            )
        )
        for masks in images
    ]
    total = int(counts.sum())
    objects = data.draw(st.lists(st.integers(0, total - 1), max_size=5)) if total else []
    numbers = st.floats(-60, 60, width=32)
    boxes = [data.draw(st.tuples(numbers, numbers, numbers, numbers)) for _ in objects]
    objects = torch.tensor(objects, dtype=torch.int64)
    boxes = torch.tensor(boxes, dtype=torch.float32).view(-1, 4)
    targets = sample(masks, objects, boxes, sizes, counts, flips=flips, to_sizes=to_sizes, size=5)
    resized = [
        torch.nn.functional.interpolate(
            torch.from_numpy(dense).flip(-1 if flip else ())[:, None], to_size
        )[:, 0].numpy()
        for dense, flip, to_size in zip(images, flips, to_sizes, strict=True)
    ]
    expected = project(resized, objects, boxes, [False] * len(images), 5)
    torch.testing.assert_close(targets, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("device", DEVICES)
def test_targets_of_a_thousand_objects_in_half_precision_training(device):
    images = [make_blobs(0, objects=1000, height=90, width=110)]
    masks, sizes, counts = pack(images)
    objects = torch.arange(1000)
    boxes = make_boxes(1000, height=90, width=110)
    boxes.requires_grad_()
    with torch.autocast(device, dtype=torch.bfloat16):
        targets = sample(
            move(masks, device),
            objects.to(device),
            boxes.to(device),
            sizes,
            counts,
        )
    assert not targets.requires_grad
    torch.testing.assert_close(
        targets.cpu(), project(images, objects, boxes.detach(), [False]), atol=1e-6, rtol=0
    )


@pytest.mark.parametrize("device", DEVICES)
# Once there is no object, and once there is no proposal.
@pytest.mark.parametrize("objects", [0, 2])
def test_no_proposals_give_no_targets(device, objects):
    masks, sizes, counts = pack([make_blobs(0, objects=objects)])
    nothing = torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4)
    assert sample(move(masks, device), *nothing, sizes, counts).shape == (0, 28, 28)


MEMORY = """
import numpy as np, torch
from pathlib import Path
from colab_utils.loading.mask_targets import sample_masks
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
sizes = {"stored_size": size, "to_size": size, "is_flipped": False, "size": 28}
sample_masks(masks, objects[-1:], boxes[-1:], **sizes)
before = read_peak_kb()
targets = sample_masks(masks, objects, boxes, **sizes)
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


def test_flipped_boxes_are_those_of_the_flipped_masks():
    images = [make_blobs(3, objects=12), make_blobs(4, objects=7, height=53, width=20)]
    masks, sizes, counts = pack(images)
    widths = sizes[:, 1].repeat_interleave(counts)
    flipped = flip_boxes(masks.crops.float(), widths)
    again, *_ = pack([part[..., ::-1] for part in images])
    # An empty mask has no box to mirror.
    real = masks.crops[:, 2] > 0
    assert torch.equal(flipped[real], again.crops[real].float())
    assert torch.equal(flip_boxes(flipped, widths), masks.crops.float())
