"""Pictures: what is drawn, what the title says, and that nothing is shown by itself."""

from __future__ import annotations

import matplotlib.pyplot as plt
import numpy as np
import pytest
import torch
from matplotlib.patches import Rectangle

from colab_utils.data.coco import read_coco
from colab_utils.errors import ColabUtilsError
from colab_utils.show import pictures
from colab_utils.show.pictures import draw_annotations, draw_predictions, draw_samples


class Samples(list):
    class_names = {1: "ball", 2: "tile"}  # noqa: RUF012


def make_sample(*boxes, height=40, width=60):
    masks = np.zeros((len(boxes), height, width), np.uint8)
    for mask, (x0, y0, x1, y1) in zip(masks, boxes, strict=True):
        mask[y0:y1, x0:x1] = 1
    target = {
        "boxes": np.array(boxes, np.float32).reshape(-1, 4),
        "labels": np.arange(len(boxes)) % 2 + 1,
        "masks": masks,
    }
    return np.full((3, height, width), 200, np.uint8), target


def draw_twice(sample, names=Samples.class_names):
    """Both axes show the same sample."""
    return draw_samples({"before": sample, "after": sample}, title="T", class_names=names)


def list_boxes(axis):
    return [
        patch.get_bbox().extents.tolist() for patch in axis.patches if isinstance(patch, Rectangle)
    ]


def list_names(axis):
    return [text.get_text() for text in axis.texts]


def test_a_sample_shows_its_mask_box_and_name():
    sample = make_sample((10, 5, 30, 25))
    axis, _ = draw_twice(sample).axes
    assert list_boxes(axis) == [[10, 5, 30, 25]]
    assert list_names(axis) == ["ball"]
    drawn = axis.images[0].get_array()
    assert drawn.shape == (40, 60, 3)
    changed = np.abs(drawn - 200 / 255).max(axis=2) > 0.01
    assert np.array_equal(changed, sample[1]["masks"][0].astype(bool))


@pytest.mark.parametrize(
    "sample",
    [
        # The image has no objects.
        make_sample(),
        # The object fills the image.
        make_sample((0, 0, 60, 40)),
        # The object is a single pixel.
        make_sample((0, 0, 1, 1)),
    ],
)
def test_odd_samples_are_drawn(sample):
    figure = draw_twice(sample)
    figure.draw_without_rendering()
    assert len(list_boxes(figure.axes[0])) == len(sample[1]["boxes"])


def test_only_the_largest_are_named_and_no_name_is_cut():
    # Each box is smaller than the one before.
    boxes = [(n * 10, n * 5, n * 10 + 9 - n, n * 5 + 9 - n) for n in range(6)]
    figure = draw_twice(make_sample(*boxes), {1: "a very long name", 2: "tile"})
    axis, _ = figure.axes
    assert len(list_boxes(axis)) == 6
    assert len(list_names(axis)) == 5
    figure.draw_without_rendering()
    for text in axis.texts:
        assert text.get_window_extent().x1 <= axis.get_window_extent().x1 + 1


def test_masks_have_outlines_that_follow_them():
    figure = draw_twice(make_sample((10, 5, 30, 25), (0, 0, 60, 40)))
    outlines = [
        path.get_extents().extents
        for lines in figure.axes[0].collections
        for path in lines.get_paths()
    ]
    # The outline runs between the pixels.
    assert np.allclose(
        outlines,
        [[-0.5, -0.5, 59.5, 39.5], [9.5, 4.5, 29.5, 24.5]],
    )


def test_only_the_largest_annotations_are_drawn(tiny_dataset, monkeypatch):
    monkeypatch.setattr(pictures, "_DRAWN", 1)
    dataset = read_coco(tiny_dataset.annotations)
    panels = [("", 0, "keep")]
    figure = draw_annotations(tiny_dataset.images, dataset, panels, title="T")
    # The third object is the largest.
    assert [patch.get_width() for patch in figure.axes[0].patches] == [50]


def test_a_large_photo_is_drawn_small():
    sample = make_sample((1000, 500, 3000, 2500), height=3000, width=4000)
    figure = draw_twice(sample)
    # Pyplot would show it a second time.
    assert plt.get_fignums() == []
    assert figure.get_suptitle() == "T"
    axis, other = figure.axes
    assert axis.images[0].get_array().shape == (750, 1000, 3)
    assert list_boxes(axis) == [[250, 125, 750, 625]]
    assert axis.get_title(loc="left") == "before, 4,000 x 3,000"
    assert other.get_title(loc="left") == "after, 4,000 x 3,000"


def make_prediction(scores):
    count = len(scores)
    masks = torch.zeros(count, 1, 40, 60)
    masks[:, :, 5:25, 10:30] = 0.9
    return {
        "boxes": torch.tensor([[10.0, 5, 30, 25]]).repeat(count, 1),
        "labels": torch.ones(count, dtype=torch.int64),
        "scores": torch.tensor(scores),
        # An evaluation may add more.
        "image_id": 7,
        "masks": masks,
    }


def test_predictions_stand_beside_the_truth_and_weak_ones_are_left_out():
    dataset = Samples([make_sample((10, 5, 30, 25), (40, 5, 50, 25))])
    figure = draw_predictions(dataset, [make_prediction([0.9, 0.6, 0.2])], min_score=0.5)
    truth, predicted = figure.axes
    assert len(list_boxes(truth)) == 2
    assert list_names(predicted) == ["ball 0.90", "ball 0.60"]
    assert figure.get_suptitle().replace("\n", " ") == (
        "1 of 2 objects found (thick outlines), by 2 predictions with a score of 0.5 or more"
    )
    widths = [
        [lines.get_linewidth()[0] for lines in axis.collections] for axis in (truth, predicted)
    ]
    assert widths == [[4, 1.5], [4, 4]]
    colours = [[patch.get_edgecolor() for patch in axis.patches] for axis in (truth, predicted)]
    # All of them are balls.
    assert colours[0][0] == colours[1][0] == colours[1][1]
    assert colours[0][0] != colours[0][1]


@pytest.mark.parametrize(
    ("box", "label"),
    [
        # The prediction has another class.
        ((10, 5, 30, 25), 2),
        # The IoU is 0.48.
        ((17, 5, 37, 25), 1),
    ],
)
def test_a_prediction_fits_by_its_mask_and_its_class(box, label):
    image, target = make_sample(box)
    target["labels"][:] = label
    title = draw_predictions(
        Samples([(image, target)]),
        [make_prediction([0.9])],
    ).get_suptitle()
    assert title.startswith("0 of 1 object found")


def test_no_predictions_is_said():
    with pytest.raises(ColabUtilsError, match="There are no predictions to draw"):
        draw_predictions(Samples([make_sample()]), [])
