from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from PIL import Image
from pycocotools import mask as coco_mask
from pycocotools.coco import COCO

from colab_utils.data.coco import read_coco
from colab_utils.data.masks import encode_segmentation, pack_masks, resize_rles
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.masks import unpack_masks

QUICK = settings(max_examples=60, deadline=None)
SQUARE = [1, 1, 5, 1, 5, 4, 1, 4]
PAIRS = [[1, 1], [5, 1], [5, 4], [1, 4]]
DAMAGED = "damaged: its counts do not add up to 6 x 8"


def dense_masks(objects: int = 4):
    shape = st.tuples(
        st.integers(0, objects),
        st.integers(1, 24),
        st.integers(1, 24),
    )
    return arrays(np.uint8, shape, elements=st.integers(0, 1))


def encode(mask):
    return coco_mask.encode(np.asfortranarray(mask))


def count_runs(mask) -> list[int]:
    """Uncompressed RLE, column by column, background first."""
    flat = mask.ravel("F")
    edges = np.flatnonzero(np.diff(flat)) + 1
    runs = np.diff([0, *edges.tolist(), flat.size]).tolist()
    return [0, *runs] if flat[0] else runs


@QUICK
@given(masks=dense_masks())
def test_pack_and_unpack_give_back_what_pycocotools_encoded(masks):
    packed = pack_masks([encode(mask) for mask in masks])
    assert np.array_equal(unpack_masks(packed, *masks.shape[1:]), masks)
    assert (packed.crops.shape, packed.offsets[0]) == ((len(masks), 4), 0)
    boxes = [Image.fromarray(mask).getbbox() or (0, 0, 0, 0) for mask in masks]
    assert [*map(tuple, packed.crops.tolist())] == boxes
    assert packed.bits.size == packed.offsets[-1]


@QUICK
@given(masks=dense_masks(), data=st.data())
def test_empty_runs_do_not_move_a_box(masks, data):
    """Runs of no pixels are valid, and pycocotools' toBbox gives 4294967294 pixels for some of
    them.
    """
    size = [*masks.shape[1:]]
    for mask in masks:
        runs = count_runs(mask)
        place = data.draw(st.integers(0, len(runs)))
        runs[place:place] = [0, 0]
        for counts in (runs, [*runs, 0], [*runs, 0, 0]):
            rle = {"size": size, "counts": counts}
            again = coco_mask.frPyObjects(rle, *size)["counts"].decode()
            for notation in (rle, {**rle, "counts": again}):
                packed = pack_masks([encode_segmentation(notation, *size)])
                assert np.array_equal(unpack_masks(packed, *size)[0], mask)


@settings(max_examples=300, deadline=None)
@given(
    counts=st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=12),
    size=st.integers(1, 40),
)
def test_no_compressed_rle_is_read_past_its_end(counts, size):
    """Damaged counts are refused; whatever is taken describes all pixels."""
    try:
        rle = encode_segmentation({"size": [size, size], "counts": counts}, size, size)
    except ColabUtilsError:
        return
    assert coco_mask.decode(rle).shape == (size, size)
    packed = pack_masks([rle])
    assert int(unpack_masks(packed, size, size).sum()) == int(coco_mask.area(rle))


@pytest.mark.parametrize("side", [11_314, 30_000, 60_000, 2**31])
def test_masks_of_giant_images_are_refused_before_they_take_memory(side):
    """An RLE of 60,000 x 60,000 with an empty run ended the interpreter."""
    rle = {"size": [side, side], "counts": [0, side * side]}
    for segmentation in (rle, [SQUARE], {**rle, "counts": "abc"}):
        with pytest.raises(ColabUtilsError, match="an image of 1 to 112,000,000 pixels"):
            encode_segmentation(segmentation, side, side)


coordinate = st.one_of(st.integers(-20, 60), st.floats(0, 40).map(lambda x: round(x, 2)))
polygon = st.lists(coordinate, min_size=6, max_size=18).map(lambda xs: xs[: len(xs) // 2 * 2])


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    polygons=st.lists(polygon, min_size=1, max_size=3),
    height=st.integers(1, 40),
    width=st.integers(1, 40),
)
def test_all_notations_of_a_mask_are_drawn_as_by_pycocotools(polygons, height, width):
    """In the image and beyond it; as numbers, as text, flat if there is one, and as RLE."""
    expected = coco_mask.decode(coco_mask.merge(coco_mask.frPyObjects(polygons, height, width)))
    size = [height, width]
    counts = encode(expected)["counts"]
    notations = [polygons, [[str(number) for number in polygon] for polygon in polygons]]
    if len(polygons) == 1:
        notations += [notation[0] for notation in notations]
    runs = count_runs(expected)
    for form in (runs, [*map(float, runs)], [*map(str, runs)], counts.decode(), counts):
        notations.append({"size": [*map(float, size)], "counts": form})
    for notation in notations:
        rle = encode_segmentation(notation, *size)
        assert np.array_equal(unpack_masks(pack_masks([rle]), *size)[0], expected)
    # More parts than are merged at once.
    many = encode_segmentation(polygons * 60, *size)
    assert np.array_equal(coco_mask.decode(many), expected)


def test_large_runs_are_read():
    rle = {"size": [10_000, 11_000], "counts": [109_999_990, 10]}
    counts = coco_mask.frPyObjects(rle, 10_000, 11_000)["counts"]
    assert (
        encode_segmentation({**rle, "counts": counts.decode()}, 10_000, 11_000)["counts"] == counts
    )


def test_real_coco_masks_are_those_of_pycocotools(coco_mini):
    dataset = read_coco(coco_mini.annotations)
    coco = COCO(str(coco_mini.annotations))
    crowds = 0
    for i in range(len(dataset)):
        image = dataset.image(i)
        size = image["height"], image["width"]
        for annotation in dataset.annotations(i):
            crowds += annotation["iscrowd"]
            rle = encode_segmentation(annotation["segmentation"], *size)
            expected = coco.annToRLE(coco.anns[annotation["id"]])
            assert rle["counts"] == expected["counts"]
            dense = unpack_masks(pack_masks([rle]), *size)[0]
            assert np.array_equal(dense, coco_mask.decode(expected))
    # Uncompressed RLE was among them.
    assert crowds


@QUICK
@given(
    masks=dense_masks(),
    height=st.integers(1, 30),
    width=st.integers(1, 30),
)
def test_resize_is_torch_nearest(masks, height, width):
    import torch

    # An image is never enlarged.
    height = min(height, masks.shape[1])
    width = min(width, masks.shape[2])
    resized = resize_rles([encode(mask) for mask in masks], height, width)
    for mask, rle in zip(masks, resized, strict=True):
        expected = torch.nn.functional.interpolate(
            torch.from_numpy(mask)[None, None].float(), size=(height, width)
        )
        dense = expected[0, 0].numpy().astype(np.uint8)
        assert np.array_equal(coco_mask.decode(rle), dense)
        assert rle == encode(dense)


@pytest.mark.parametrize(
    ("segmentation", "words"),
    [
        ([[]], "one of 0 numbers"),
        # The polygon has an odd number of coordinates.
        ([[1, 1, 5, 1, 5, 4, 1]], "one of 7 numbers"),
        ([[1, 1, 4, 3]], "one of 4 numbers: a box or a line, not an outline"),
        # Points, as LabelMe and cv2.findContours have them.
        (PAIRS, "one of 2 numbers: a point. If the polygons are points, flatten them"),
        ([PAIRS], "a polygon is a list of lists: flatten it to x, y, x, y"),
        ([{"x": 1, "y": 1}], "COCO has polygons as x, y, x, y, ..., or one RLE"),
        # Start and length of each run, as on Kaggle.
        ("523 24 587 24", "polygons or RLE. For Kaggle's run lengths, docs/FORMATS.md"),
        ([[None] * 6], "reaches to pixel nan"),
        # For this polygon, pycocotools would take gigabytes.
        ([[1e9, *SQUARE[1:]]], "reaches to pixel 1e+09"),
        ([[True, *SQUARE[1:]]], "something that is no number"),
        ({"size": [6, 8]}, DAMAGED),
        ({"counts": [48]}, "the image's size [6, 8], found None"),
        # The size has the width first.
        ({"size": [8, 6], "counts": [48]}, "found [8, 6]"),
        ({"size": [6, 8], "counts": "b'`1'"}, "write counts.decode()"),
        ({"size": [6, 8], "counts": [50, -2]}, DAMAGED),
        ({"size": [6, 8], "counts": [47.5, 0.5]}, DAMAGED),
        ({"size": [6, 8], "counts": [[0, 24], [2, 22]]}, DAMAGED),
        # The counts end in the middle of a run.
        ({"size": [6, 8], "counts": "`"}, DAMAGED),
        ({"size": [6, 8], "counts": "zz"}, DAMAGED),
        # The count is 48, in more bits than C shifts.
        ({"size": [6, 8], "counts": "`QPPPPPPPPP0"}, DAMAGED),
    ],
)
def test_what_is_no_mask_is_refused_and_named(segmentation, words):
    with pytest.raises(ColabUtilsError) as error:
        encode_segmentation(segmentation, 6, 8)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


def test_parts_without_an_area_are_left_out_beside_one_with_an_area():
    for parts in (
        [SQUARE, [1, 1, 2, 2]],
        [[], SQUARE],
        [[1, 1, 4, 4], [3, 3], SQUARE],
    ):
        assert encode_segmentation(parts, 6, 8) == encode_segmentation([SQUARE], 6, 8)
