import pytest
from pycocotools import mask as coco_mask

from colab_utils.data.masks import encode_segmentation
from colab_utils.data.segmentations import count_numbers, is_nothing
from colab_utils.errors import ColabUtilsError

HEIGHT = 64
WIDTH = 96
FLAT = [8, 10, 28, 10, 28, 34, 8, 34]
PAIRS = [[8, 10], [28, 10], [28, 34], [8, 34]]


# Drawn by pycocotools alone.
RLE = coco_mask.merge(coco_mask.frPyObjects([FLAT], HEIGHT, WIDTH))


@pytest.mark.parametrize(
    ("segmentation", "words"),
    [
        ([[8, 10, 20, 24]], "one of 4 numbers: a box or a line, not an outline"),
        # The corners of a box, or a line.
        ([[8, 10], [28, 34]], "one of 2 numbers"),
        # Points, as LabelMe and cv2.findContours have them.
        (PAIRS, "one of 2 numbers: a point. If the polygons are points, flatten them"),
        ([PAIRS], "a polygon is a list of lists: flatten it to x, y, x, y"),
        ([[[pair] for pair in PAIRS]], "flatten it"),
        (
            [{"x": x, "y": y} for x, y in PAIRS],
            "COCO has polygons as x, y, x, y, ..., or one RLE",
        ),
        ([{"size": [HEIGHT, WIDTH], "counts": [0]}], "or one RLE"),
        (
            {"size": [HEIGHT, WIDTH], "counts": str(RLE["counts"])},
            "write counts.decode()",
        ),
        # Three numbers a point.
        ([[x, y, 2] for x, y in PAIRS], "one of 3 numbers"),
        ("a.png", "the text 'a.png'"),
        # Start and length of each run, as on Kaggle.
        ("523 24 587 24", "polygons or RLE. For Kaggle's run lengths, docs/FORMATS.md"),
        ({"size": [HEIGHT, WIDTH], "counts": "zz"}, "damaged"),
    ],
)
def test_what_cannot_be_told_is_refused_and_named(segmentation, words):
    with pytest.raises(ColabUtilsError) as error:
        encode_segmentation(segmentation, HEIGHT, WIDTH)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("segmentation", "count"),
    [
        (None, 0),
        ([[], [[]]], 0),
        ({"size": [64, 96], "counts": ""}, 0),
        ([[5, 5]], 2),
        ([{"x": 5, "y": 5.5}], 2),
        ([[1e-05, 0.0, 2e17]], 3),
        ([FLAT], 8),
        ({"size": [64, 96], "counts": "zz"}, 6),
    ],
)
def test_numbers_are_counted_in_whatever_there_is(segmentation, count):
    assert count_numbers(segmentation) == count
    is_empty = count < 6
    for box in ([0, 0, 0, 0], [5, 5, 0, 7]):
        annotation = {"segmentation": segmentation, "bbox": box, "area": 0}
        assert is_nothing(annotation) == is_empty
        assert not is_nothing(annotation | {"area": 40})
        assert not is_nothing(annotation | {"bbox": [5, 5, 9, 9]})
