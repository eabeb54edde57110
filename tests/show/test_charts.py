"""Charts: the title is the finding, the bars are the numbers, whatever the numbers are."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from matplotlib.text import Text

from colab_utils.diagnosis.diagnose import Diagnosis, Stage
from colab_utils.diagnosis.simulator import simulate
from colab_utils.errors import ColabUtilsError
from colab_utils.show.charts import draw_lanes, plot_bars, plot_stages, plot_timeline, plot_training
from colab_utils.show.pictures import draw_pairs


def read_bars(figure):
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return dict(zip(labels, [patch.get_width() for patch in figure.axes[0].patches], strict=True))


def read_texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        ({"a": 3.0}, ["3"]),  # one bar
        ({"a": 0.0, "b": 0.0}, ["0", "0"]),  # nothing at all
        ({"a": 12345.6, "b": 0.123}, ["12,346", "0.12"]),  # far apart
    ],
)
def test_bars_carry_their_numbers(values, texts):
    figure = plot_bars(values, title="A finding", unit="images/s")
    figure.canvas.draw()
    assert read_bars(figure) == values
    assert read_texts(figure) == texts
    assert figure.get_suptitle() == "A finding"


def test_no_bars_is_said():
    with pytest.raises(ColabUtilsError, match="expected values to draw"):
        plot_bars({}, title="", unit="")


def test_a_long_title_is_broken_not_cut():
    title = plot_bars({"a": 1.0}, title="word " * 40, unit="").get_suptitle()
    assert title.count("word") == 40
    assert "\n" in title


def make_diagnosis(*stages, stall_share=0.6, step="emulated 100 ms"):
    return Diagnosis("Verdict.", 2.5, 16.0, stall_share, stages, (), "high: 40 batches", 40, step)


def test_layers_name_the_largest_and_leave_the_wait_to_the_title():
    stages = [
        Stage("read", 60, 70, 1),
        Stage("decode", 15, 20, 15),
        Stage("wait", 40, 50, 1),
        Stage("step", 25, 26, 20),
    ]
    figure = plot_stages(make_diagnosis(*stages))
    assert figure.get_suptitle() == "The step waits 60% of the time; read is 80% of loading an image"
    assert read_bars(figure) == {"read": 60, "decode": 15, "step": 25}
    assert read_texts(figure) == ["60", "15", "25  (emulated 100 ms)"]


def test_a_loader_that_is_not_ours_shows_its_wait():
    figure = plot_stages(make_diagnosis(Stage("wait", 40, 50, 1), Stage("step", 25, 26, 20), step="real"))
    assert read_bars(figure) == {"wait": 40, "step": 25}


def test_without_a_step_the_loader_alone_is_the_finding():
    figure = plot_stages(make_diagnosis(Stage("read", 60, 70, 1), Stage("wait", 62, 70, 1), step="none"))
    assert figure.get_suptitle().startswith("The loader alone gives 16 images/s")


def test_the_timeline_has_a_lane_for_each_worker_and_the_step():
    figure = plot_timeline(simulate(workers=3, load_s=0.4, step_s=0.1, seconds=4), seconds=2)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == [
        "worker 0", "worker 1", "worker 2", "step",
    ]  # fmt: skip
    assert figure.axes[0].get_xlim() == (0, 2)


def test_the_timeline_without_workers():
    figure = plot_timeline(simulate(workers=0, load_s=0.3, step_s=0.1, seconds=4))
    assert figure.get_suptitle() == "With 0 workers the step waits 75% of the time"


@pytest.mark.parametrize(
    ("losses", "title"),
    [
        ([4.0, 3.0, 2.0, 1.0], "The loss fell from 3.50 to 1.50 in 4 steps"),
        ([1.0, 2.0], "The loss did not fall: it went from 1.00 to 2.00 in 2 steps"),  # too few for a mean
        ([1.5], "The loss is 1.50 after one step"),  # one step
    ],
)
def test_training_says_where_the_loss_went(losses, title):
    figure = plot_training([SimpleNamespace(step=n, loss=loss) for n, loss in enumerate(losses, 1)])
    figure.canvas.draw()
    assert figure.get_suptitle() == title


def test_no_losses_is_said():
    with pytest.raises(ColabUtilsError, match="losses of a training"):
        plot_training([])


NAMES = ["$a_b$", "_x", r"$\nope$", "50% <b> \\n"]  # formulas, one of them wrong; what legends hide; other signs


def make_odd_figures():
    """Every figure that shows a user's names, with these names."""
    bars = dict.fromkeys(NAMES, 1.0)
    yield plot_bars(
        bars,
        title=NAMES[2],
        unit=NAMES[2],
        notes=dict.fromkeys(NAMES, NAMES[2]),
        highlight=NAMES[0],
        limit=(2, NAMES[2]),
    )
    yield draw_lanes(NAMES[2], {name: [(0.0, 1.0)] for name in NAMES})
    target = {"boxes": np.array([[2, 2, 6, 6]] * 4), "labels": np.arange(4), "masks": np.ones((4, 8, 8), np.uint8)}
    sample = (np.zeros((3, 8, 8), np.uint8), target)
    yield draw_pairs([sample], [sample], class_names=dict(enumerate(NAMES)), titles=(NAMES[0], NAMES[2]))


def test_names_in_figures_are_shown_as_they_are():
    for figure in make_odd_figures():
        figure.canvas.draw()  # a formula that is none would raise here
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        shown = {text.get_text().strip() for text in texts}
        assert all(any(name in text for text in shown) for name in NAMES), shown
        assert not [text for text in texts if "$" in text.get_text() and text.get_parse_math()]
