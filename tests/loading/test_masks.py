"""Masks from their bits against pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as coco_mask

from colab_utils.data.masks import encode_segmentation, pack_masks
from colab_utils.loading import masks as module
from colab_utils.loading.masks import MaskBits, expand_masks, split_masks

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
)
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
