"""The charts of a comparison: the story of five steps, hours that are true of a real
dataset.
"""

from __future__ import annotations

import re
from dataclasses import replace

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

STEPS = ["plain loop", "+ 2 workers", "+ 32 streams", "+ shards on SSD", "+ make_loader on shards"]


def read_bars(figure):
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    return dict(
        zip(
            labels,
            [patch.get_width() for patch in figure.axes[0].patches],
            strict=True,
        )
    )


def read_texts(figure):
    return [text.get_text() for text in figure.axes[0].texts]


def read_title(figure):
    return figure.get_suptitle().replace("\n", " ")


# These tests look at the chart of images a second.


def test_the_course_is_five_steps_each_on_top_of_the_one_before(course, make_comparison):
    comparison = make_comparison(*course)
    assert tuple(row.name for row in comparison.strategies) == COURSE_STRATEGIES
    figure = plot_comparison(comparison)
    figure.canvas.draw()
    assert read_bars(figure) == dict(zip(STEPS, (1.6, 3.2, 20, 32, 38.4), strict=True))
    assert [re.search(r"\d+%", text)[0] for text in read_texts(figure)[:5]] == [
        "96%",
        "92%",
        "50%",
        "20%",
        "4%",
    ]
    assert "the step alone: 40" in read_texts(figure)
    assert read_title(figure) == (
        "The step waits 96% → 4% of the time, and trains 24 times as many images/s as the plain "
        "loop"
    )
    assert "emulated 100 ms" in figure.axes[0].get_xlabel()


def test_the_figure_grows_while_the_steps_are_timed(course, lose, make_comparison):
    first, *rest = course
    figure = plot_comparison(make_comparison(first, *(lose(row) for row in rest)))
    assert read_bars(figure) == dict(zip(STEPS, (1.6, 0, 0, 0, 0), strict=True))
    assert read_texts(figure)[1:5] == ["…"] * 4
    assert read_title(figure) == "The step waits 96% of the time with the plain loop"
    whole = plot_comparison(make_comparison(*course))
    # The axis stays as it is.
    assert whole.axes[0].get_xlim() == pytest.approx(figure.axes[0].get_xlim())


def test_other_strategies_are_named_by_what_they_are(make_timing, make_comparison):
    names = ("sequential", "dataloader", "dataloader_on_ssd", "packed", "my own")
    bars = read_bars(plot_comparison(make_comparison(*map(make_timing, names))))
    assert list(bars) == [
        "plain loop",
        "2 workers",
        "loose files on SSD",
        "make_loader on shards",
        "my own",
    ]


def test_a_null_result_is_said(make_timing, make_comparison):
    equal = make_timing("shards_on_ssd", images_per_second=1.7)
    title = describe_gain(make_comparison(make_timing("sequential"), equal))
    assert title == "The step waits 96% of the time with the plain loop: no other way is 7% faster"


def test_a_gain_within_the_spread_of_the_repeats_is_none(make_timing, make_comparison):
    wide = make_timing("packed", images_per_second=2.0, repeats_images_per_second=(1.6, 2.0, 2.4))
    title = describe_gain(make_comparison(make_timing("sequential"), wide))
    assert title == "The step waits 96% of the time with the plain loop: no other way is 40% faster"


def test_where_the_way_that_ties_wins_nothing_the_fastest_is_named(make_timing, make_comparison):
    fastest = make_timing(
        "dataloader",
        images_per_second=2.4,
        repeats_images_per_second=(1.6, 2.4, 2.68),
    )
    tied = make_timing("packed", images_per_second=1.7)
    title = describe_gain(make_comparison(make_timing("sequential"), fastest, tied))
    assert title.endswith("trains 1.5 times as many images/s as the plain loop")


def test_of_ways_that_tie_make_loader_is_named(make_timing, make_comparison):
    close = make_timing("train_while_copying", images_per_second=38.5, wait_share=0.03)
    comparison = make_comparison(make_timing("sequential"), make_timing("packed"), close)
    assert describe_gain(comparison).startswith("The step waits 96% → 4%")


def test_what_is_not_the_same_data_never_wins(make_timing, make_comparison):
    cheat = make_timing("packed", comparable=False, difference="labels are missing")
    figure = plot_comparison(
        make_comparison(make_timing("sequential"), make_timing("dataloader"), cheat)
    )
    assert read_title(figure).startswith("The step waits 96% → 92%")
    assert any("NOT the same data" in text for text in read_texts(figure))


def test_what_could_not_be_timed_has_no_bar(make_timing, lose, make_comparison):
    lost = lose(make_timing("packed"), note="disk is full")
    figure = plot_comparison(make_comparison(make_timing("sequential"), lost))
    assert read_bars(figure) == {"plain loop": 1.6, "make_loader on shards": 0}
    assert read_texts(figure)[1] == "not timed"
    with pytest.raises(ColabUtilsError, match="No strategy was timed"):
        plot_comparison(make_comparison(lost))


# These tests look at the chart of the first seconds and at the hours.


def test_the_first_seconds_are_those_of_the_course(course, make_timing, make_comparison, lose):
    figure = plot_cold_start(make_comparison(*course), seconds=5.02)
    assert (
        read_title(figure)
        == "Batches in the first 5 seconds: 2 with plain loop, 48 with make_loader on shards"
    )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == STEPS
    plain = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert plain.intervalx.tolist() == pytest.approx([2.4, 2.5])
    more = plot_cold_start(make_comparison(*course, make_timing("saved_tensors")))
    names = ["plain loop", "2 workers", "32 streams", "shards on SSD", "make_loader on shards"]
    assert [label.get_text() for label in more.axes[0].get_yticklabels()] == names
    # The axis ends at the whole seconds that all of them ran.
    assert more.axes[0].get_xlim() == (0, 7)
    with pytest.raises(ColabUtilsError, match="No strategy was timed"):
        plot_cold_start(make_comparison(lose(course[0])))


def test_hours_are_those_of_coco_over_sessions_of_three_epochs(
    course, make_timing, make_comparison
):
    assert describe_hours(make_comparison(*course)) == (
        "9 epochs of 118,287 images: 185 hours with plain loop, 92 hours with 2 workers, "
        "15 hours with 32 streams, 14 hours with shards on SSD, 13 hours with make_loader on shards"
    )
    costs = {
        "once_ms_per_image": 200.0,
        "session_ms_per_image": 50.0,
        "cold_ms_per_image": 300.0,
    }
    workers = make_timing("dataloader", images_per_second=10.0, **costs)
    # An image takes 200 ms once, three times 50 + 300 ms, and six times 100 ms.
    assert describe_hours(make_comparison(workers)).endswith(": 61 hours with 2 workers")


# These tests look at names and spreads.


def test_a_wide_spread_is_written_on_the_bar(make_timing, make_comparison):
    row = replace(make_timing("packed"), repeats_images_per_second=(30.0, 34.0))
    assert "repeats differ by" in read_texts(plot_comparison(make_comparison(row)))[0]


@pytest.mark.parametrize("plot", [plot_comparison, plot_cold_start])
def test_a_busy_machine_is_named_before_any_finding(course, make_comparison, plot):
    busy = describe_busy(100, 250)
    comparison = replace(make_comparison(*course), busy=busy)
    assert read_title(plot(comparison)).startswith(f"{busy} ")
    assert not read_title(plot(make_comparison(*course))).startswith("This machine")
    assert busy in str(comparison)


def test_where_a_way_hardly_waits_a_longer_step_is_written_on_its_bar(make_timing, make_comparison):
    # The step alone gives 40 images/s; beside the workers of the last way it gives 32.
    repeats = {"repeats_images_per_second": (31.0, 31.1)}
    longer = make_timing("packed", images_per_second=31.0, wait_share=0.03, **repeats)
    texts = read_texts(plot_comparison(make_comparison(make_timing("sequential"), longer)))
    assert texts[:3] == [
        "1.6  waits 96%, repeats differ by 7%",
        "31  waits 3%, step 1.3 x",
        "the step alone: 40",
    ]
