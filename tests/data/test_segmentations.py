import pytest
from pycocotools import mask as coco_mask

from colab_utils.data.masks import encode_segmentation
from colab_utils.data.segmentations import count_numbers, is_nothing
from colab_utils.errors import ColabUtilsError

HEIGHT = 64
WIDTH = 96
FLAT = [8, 10, 28, 10, 28, 34, 8, 34]
PAIRS = [[8, 10], [28, 10], [28, 34], [8, 34]]


def draw(polygons):
    """Draw polygons by pycocotools alone."""
    return coco_mask.merge(coco_mask.frPyObjects(polygons, HEIGHT, WIDTH))


def to_contour(pairs):
    """Nest points as cv2.findContours does."""
    return [[pair] for pair in pairs]


RLE = draw([FLAT])


@pytest.mark.parametrize(
    ("segmentation", "words"),
    [
        ([[8, 10, 20, 24]], "one of 4 numbers: a box or a line, not an outline"),
        # The corners of a box, or a line.
        ([[8, 10], [28, 34]], "one of 2 numbers"),
        # Points, as LabelMe and cv2.findContours have them.
        (PAIRS, "one of 2 numbers: a point. If the polygons are points, flatten them"),
        ([PAIRS], "a polygon is a list of lists: flatten it to x, y, x, y"),
        ([to_contour(PAIRS)], "flatten it"),
        ([{"x": x, "y": y} for x, y in PAIRS], "COCO has polygons as x, y, x, y, ..., or one RLE"),
        ([{"size": [HEIGHT, WIDTH], "counts": [0]}], "or one RLE"),
        ({"size": [HEIGHT, WIDTH], "counts": str(RLE["counts"])}, "write counts.decode()"),
        # Three numbers a point.
        ([[x, y, 2] for x, y in PAIRS], "one of 3 numbers"),
        ([["8", "ten", "28", "10", "28", "34"]], "something that is no number"),
        ("a.png", "the text 'a.png'"),
        # Start and length of each run, as on Kaggle.
        ("523 24 587 24", "polygons or RLE. For Kaggle's run lengths, docs/FORMATS.md"),
        ({"size": [WIDTH, HEIGHT], "counts": [WIDTH * HEIGHT]}, "the image's size [64, 96]"),
        ({"size": [HEIGHT, WIDTH], "counts": "zz"}, "damaged"),
        ({"size": [HEIGHT, WIDTH], "counts": [6144.5, -0.5]}, "damaged"),
    ],
)
def test_what_cannot_be_told_is_refused_and_named(segmentation, words):
    with pytest.raises(ColabUtilsError) as error:
        encode_segmentation(segmentation, HEIGHT, WIDTH)
    assert words in str(error.value)


def to_runs(kind):
    return [
        kind(run)
        for run in [
            8 * 64 + 10,
            *[24, 40] * 19,
            24,
            64 * 96 - 8 * 64 - 10 - 1240,
        ]
    ]


@pytest.mark.parametrize("kind", [int, float, str])
def test_whole_numbers_are_runs_of_any_type(kind):
    rle = {"size": [64.0, 96.0], "counts": to_runs(kind)}
    mask = encode_segmentation(rle, HEIGHT, WIDTH)
    assert coco_mask.area(mask) == 480
    whole = {"size": [64, 96], "counts": to_runs(int)}
    assert mask == coco_mask.frPyObjects(whole, HEIGHT, WIDTH)


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
