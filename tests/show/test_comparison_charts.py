"""The charts of a comparison: the story of five steps, hours that are true of a real
dataset.
"""

from __future__ import annotations

import re

import pytest

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import describe_busy
from colab_utils.show.comparison_charts import (
    describe_gain,
    describe_hours,
    plot_cold_start,
    plot_comparison,
)
from tests.comparisons import (
    COURSE,
    lose,
    make_comparison,
    make_timing,
    read_bars,
    read_texts,
    read_title,
)

STEPS = ["plain loop", "2 workers", "32 streams", "shards on SSD", "make_loader on shards"]

# These tests look at the chart of images a second.


def test_the_course_is_five_steps_each_on_top_of_the_one_before():
    assert tuple(COURSE) == COURSE_STRATEGIES
    figure = plot_comparison(make_comparison())
    figure.canvas.draw()
    assert read_bars(figure) == dict(zip(STEPS, (1.6, 3.2, 20, 32, 38.4), strict=True))
    shares = [re.search(r"\d+%", text)[0] for text in read_texts(figure)]
    assert shares == ["96%", "92%", "50%", "20%", "4%"]
    assert figure.axes[0].get_title("right") == "the step alone: 40"
    assert "emulated 100 ms" in figure.axes[0].get_xlabel()


def test_the_figure_grows_while_the_steps_are_timed():
    first, *rest = COURSE
    figure = plot_comparison(make_comparison(first, *map(lose, rest)))
    assert read_bars(figure) == dict(zip(STEPS, (1.6, 0, 0, 0, 0), strict=True))
    assert read_texts(figure)[1:5] == ["not timed"] * 4
    whole = plot_comparison(make_comparison())
    # The axis stays as it is.
    assert whole.axes[0].get_xlim() == pytest.approx(figure.axes[0].get_xlim())


FAST = {
    "images_per_second": 2.4,
    "repeats_images_per_second": (1.6, 2.4, 2.68),
}
WIDE = {
    "images_per_second": 2.0,
    "repeats_images_per_second": (1.6, 2.0, 2.4),
}
PLAIN = "The step waits 96% of the time with the plain loop"
GAIN = (
    "The step waits 96% → {}% of the time, and trains {} times as many images/s as the plain loop"
)


@pytest.mark.parametrize(
    ("rows", "title"),
    [
        (COURSE, GAIN.format(4, 24)),
        # A null result is said.
        (
            ["sequential", make_timing("shards_on_ssd", images_per_second=1.7)],
            f"{PLAIN}: no other way is 7% faster",
        ),
        # A gain within the spread of the repeats is none.
        (
            ["sequential", make_timing("packed", **WIDE)],
            f"{PLAIN}: no other way is 40% faster",
        ),
        # Where the way that ties wins nothing, the fastest is named.
        (
            [
                "sequential",
                make_timing("dataloader", **FAST),
                make_timing("packed", images_per_second=1.7),
            ],
            GAIN.format(92, "1.5"),
        ),
        # Of ways that tie, make_loader is named.
        (
            [
                "sequential",
                "packed",
                make_timing("train_while_copying", images_per_second=38.5, wait_share=0.03),
            ],
            GAIN.format(4, 24),
        ),
        # What is not the same data never wins.
        (
            ["sequential", "dataloader", make_timing("packed", comparable=False)],
            GAIN.format(92, 2),
        ),
    ],
)
def test_the_title_is_the_gain(rows, title):
    assert describe_gain(make_comparison(*rows)) == title


@pytest.mark.parametrize(
    ("row", "text"),
    [
        (lose("packed", note="disk is full"), "not timed"),
        (
            make_timing("packed", comparable=False),
            "38  waits 4%, NOT the same data, spread 7%",
        ),
    ],
)
def test_what_a_bar_does_not_show_is_written_on_it(row, text):
    figure = plot_comparison(make_comparison("sequential", row))
    assert read_texts(figure)[:2] == ["1.6  waits 96%, spread 7%", text]


# These tests look at the chart of the first seconds and at the hours.


def test_the_first_seconds_are_those_of_the_course():
    figure = plot_cold_start(make_comparison())
    # The axis ends at the whole seconds that all of them ran.
    assert figure.axes[0].get_xlim() == (0, 7)
    assert (
        read_title(figure)
        == "Batches in the first 7 s: 2 with plain loop, 67 with make_loader on shards"
    )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == STEPS
    plain = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert plain.intervalx.tolist() == pytest.approx([2.4, 2.5])


def test_hours_are_those_of_coco_over_sessions_of_three_epochs():
    assert describe_hours(make_comparison()) == (
        "9 epochs of 118,287 images: 185 hours with plain loop, 13 hours with make_loader on shards"
    )
    costs = {
        "once_ms_per_image": 200.0,
        "session_ms_per_image": 50.0,
        "cold_ms_per_image": 300.0,
    }
    workers = make_timing("dataloader", images_per_second=10.0, **costs)
    # An image takes 200 ms once, three times 50 + 300 ms, and six times 100 ms.
    assert describe_hours(make_comparison(workers)).endswith(": 61 hours with 2 workers")


@pytest.mark.parametrize("plot", [plot_comparison, plot_cold_start])
def test_a_busy_machine_is_named_before_any_finding_and_no_figure_is_said(plot):
    busy = describe_busy(100, 250)
    comparison = make_comparison(busy=busy)
    assert read_title(plot(comparison)).startswith(f"{busy} ")
    assert not read_title(plot(make_comparison())).startswith("This machine")
    assert busy in str(comparison)
    with pytest.raises(ColabUtilsError, match="No strategy was timed"):
        plot(make_comparison(lose("packed")))
