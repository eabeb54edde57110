"""Masks of any outline and in any notation are those of pycocotools."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from pycocotools import mask as coco_mask

from colab_utils.data.masks import encode_segmentation, pack_masks, resize_rles, unpack_masks
from colab_utils.shards.arrays import convert_boxes

SEEDED = settings(max_examples=150, deadline=None, derandomize=True)
side = st.integers(1, 40)
coordinate = st.one_of(
    st.integers(-20, 60), st.floats(-20, 60, width=32), st.floats(0, 40).map(lambda x: round(x, 2))
)
polygon = st.lists(st.tuples(coordinate, coordinate), min_size=3, max_size=9).map(
    lambda points: [*sum(points, ())]
)
polygons = st.lists(polygon, min_size=1, max_size=3)


def draw(polygons: list[list[float]], height: int, width: int) -> np.ndarray:
    """As pycocotools' ``annToMask``."""
    return coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, height, width)))


@SEEDED
@given(polygons=polygons, height=side, width=side)
def test_polygons_are_drawn_as_by_pycocotools(polygons, height, width):
    """In the image and beyond it; as numbers, as text, and flat where there is one."""
    expected = draw(polygons, height, width)
    texts = [[str(number) for number in polygon] for polygon in polygons]
    for notation in (
        polygons,
        texts,
        *([polygons[0], texts[0]] if len(polygons) == 1 else []),
    ):
        rle = encode_segmentation(notation, height, width)
        assert np.array_equal(coco_mask.decode(rle), expected)
        assert np.array_equal(
            unpack_masks(pack_masks([rle]), height, width)[0],
            expected,
        )


@SEEDED
@given(polygons=polygons, height=side, width=side)
def test_all_notations_of_a_mask_give_the_same(polygons, height, width):
    mask = draw(polygons, height, width)
    flat = mask.ravel("F")
    runs = np.diff(
        [
            0,
            *(np.flatnonzero(np.diff(flat)) + 1),
            flat.size,
        ]
    ).tolist()
    counts = [0, *runs] if flat[0] else runs
    text = coco_mask.encode(np.asfortranarray(mask))["counts"].decode()
    size = [height, width]
    result = [
        encode_segmentation({"size": size, "counts": form}, height, width)
        for form in (counts, text, text.encode())
    ]
    result.append(encode_segmentation(polygons, height, width))
    assert all(np.array_equal(coco_mask.decode(rle), mask) for rle in result)
    assert all(coco_mask.area(rle) == mask.sum() for rle in result)


def choose_nearest(before, after):
    scale = np.float32(before) / np.float32(after)
    return np.floor(np.arange(after, dtype=np.float32) * scale).astype(int)


@SEEDED
@given(polygons=polygons, sizes=st.tuples(side, side, side, side))
def test_a_mask_that_is_resized_takes_the_nearest_pixels(polygons, sizes):
    """Each row and column is one of the original's, in the order that they had."""
    mask = draw(polygons, *sizes[:2])
    resized = coco_mask.decode(
        resize_rles([encode_segmentation(polygons, *sizes[:2])], *sizes[2:])[0]
    )
    rows = choose_nearest(sizes[0], sizes[2])
    columns = choose_nearest(sizes[1], sizes[3])
    rows = rows.clip(max=sizes[0] - 1)
    columns = columns.clip(max=sizes[1] - 1)
    assert np.array_equal(resized, mask[rows][:, columns])


@SEEDED
@given(
    boxes=st.lists(st.tuples(coordinate, coordinate, coordinate, coordinate), max_size=6),
    height=side,
    width=side,
)
def test_boxes_lie_in_the_image_and_have_an_area(boxes, height, width):
    """What is kept is the part of the box in the image; what is not kept has no such part."""
    converted, kept = convert_boxes(boxes, height, width)
    for (x, y, w, h), corners, keep in zip(boxes, converted.tolist(), kept.tolist(), strict=True):
        x0 = min(max(x, 0), width)
        y0 = min(max(y, 0), height)
        x1 = min(max(x + w, 0), width)
        y1 = min(max(y + h, 0), height)
        assert np.allclose(corners, [x0, y0, x1, y1], atol=1e-4)
        assert keep == (corners[2] > corners[0] and corners[3] > corners[1])
