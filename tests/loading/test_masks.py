"""Masks from their bits against pycocotools."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from pycocotools import mask as coco_mask

from colab_utils.data.masks import pack_masks
from colab_utils.loading import masks as module
from colab_utils.loading.masks import MaskBits, expand_masks, split_masks

CUDA = pytest.param(
    "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
)
# With "rows", the CPU runs what a GPU runs.
WAYS = ["cpu", "rows", CUDA]
QUICK = settings(max_examples=80, deadline=None)


def pack(images):
    """Dense masks [N, height, width] of each image as a batch's masks, sizes and counts."""
    packed = [
        pack_masks([coco_mask.encode(np.asfortranarray(mask)) for mask in masks])
        for masks in images
    ]
    ends = np.cumsum(np.concatenate([[0], *(np.diff(part.offsets) for part in packed)]))
    bits = torch.from_numpy(np.concatenate([part.bits for part in packed]))
    crops = torch.from_numpy(np.concatenate([part.crops for part in packed]))
    sizes = [masks.shape[1:] for masks in images]
    return MaskBits(bits, crops, torch.from_numpy(ends)), sizes, [*map(len, images)]


def expand(way, masks, sizes, counts):
    if way == "rows":
        pixels = sum(count * h * w for count, (h, w) in zip(counts, sizes, strict=True))
        flat = torch.zeros(pixels, dtype=torch.uint8)
        module._draw_rows(masks, np.array(sizes).repeat(counts, 0), flat)
        return split_masks(flat, sizes, counts)
    dense = expand_masks(masks._replace(bits=masks.bits.to(way)), sizes, counts)
    assert all(part.dtype == torch.uint8 and part.device.type == way for part in dense)
    return [part.cpu() for part in dense]


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
# All masks are full, all are empty, the batch has no object at all, or one pixel.
@example(images=[np.ones((2, 5, 7), np.uint8)], chunk=1000)
@example(images=[np.zeros((2, 6, 8), np.uint8)], chunk=1000)
@example(images=[np.zeros((0, 6, 8), np.uint8), np.zeros((0, 3, 3), np.uint8)], chunk=1000)
@example(images=[np.array([[[1]], [[0]]], np.uint8)], chunk=1000)
def test_any_masks_are_drawn_as_they_were(images, way, chunk):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_BYTES", {"cpu": chunk, "cuda": chunk})
        dense = expand(way, *pack(images))
    for drawn, masks in zip(dense, images, strict=True):
        assert torch.equal(drawn, torch.from_numpy(masks))
