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
from colab_utils.loading.masks import MaskBits, expand_masks, split_masks

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


def project(images, objects, boxes, flips):
    """torchvision's targets, made of each image's dense masks."""
    ends = np.cumsum([0, *(len(masks) for masks in images)])
    targets = torch.zeros(len(objects), 28, 28)
    for masks, flip, (first, end) in zip(images, flips, pairwise(ends.tolist()), strict=True):
        own = (objects >= first) & (objects < end)
        dense = torch.from_numpy(masks[..., ::-1].copy() if flip else masks)
        if own.any():
            targets[own] = project_masks_on_boxes(
                dense,
                boxes[own],
                objects[own] - first,
                28,
            )
    return targets


def sample(masks, objects, boxes, sizes, counts, *, flips):
    """Our targets, image after image."""
    targets = torch.zeros(len(objects), 28, 28)
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
            to_size=sizes[place].tolist(),
            is_flipped=flips[place],
            size=28,
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
