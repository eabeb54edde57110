"""The charts of a comparison: the story of five steps, hours that are true of a real
dataset.
"""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from matplotlib.text import Text

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import describe_busy
from colab_utils.show.comparison_charts import (
    describe_gain,
    plot_cold_start,
    plot_comparison,
    plot_epochs,
)

STEPS = ["plain loop", "+ 2 workers", "+ 32 streams", "+ shards on SSD", "+ make_loader"]


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
    assert list(bars) == ["plain loop", "2 workers", "loose files on SSD", "make_loader", "my own"]


def test_a_null_result_is_said(make_timing, make_comparison):
    equal = make_timing("shards_on_ssd", images_per_second=1.7)
    title = describe_gain(make_comparison(make_timing("sequential"), equal))
    assert title == "The step waits 96% of the time with the plain loop: no other way is 10% faster"


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
    assert read_bars(figure) == {"plain loop": 1.6, "make_loader": 0}
    assert read_texts(figure)[1] == "not timed"
    with pytest.raises(ColabUtilsError, match="No strategy was timed"):
        plot_comparison(make_comparison(lost))


# These tests look at the charts of the first seconds and of the hours.


def test_the_first_seconds_are_those_of_the_course(course, make_timing, make_comparison, lose):
    figure = plot_cold_start(make_comparison(*course), seconds=5.02)
    assert (
        read_title(figure)
        == "Batches in the first 5 seconds: 2 with plain loop, 48 with make_loader"
    )
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == STEPS
    plain = figure.axes[0].collections[0].get_paths()[0].get_extents()
    assert plain.intervalx.tolist() == pytest.approx([2.4, 2.5])
    more = plot_cold_start(make_comparison(*course, make_timing("saved_tensors")))
    names = ["plain loop", "2 workers", "32 streams", "shards on SSD", "make_loader"]
    assert [label.get_text() for label in more.axes[0].get_yticklabels()] == names
    # The axis ends at the whole seconds that all of them ran.
    assert more.axes[0].get_xlim() == (0, 7)
    with pytest.raises(ColabUtilsError, match="No strategy was timed"):
        plot_cold_start(make_comparison(lose(course[0])))


def test_hours_are_those_of_coco_over_sessions_of_three_epochs(course, make_comparison):
    figure = plot_epochs(make_comparison(*course))
    hours = 118_287 / 3600
    lines = {
        line.get_color(): line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 2
    }
    assert len(lines) == 3
    assert sorted(line.get_ydata()[-1] for line in lines.values()) == [
        # The data are converted once and copied three times.
        pytest.approx(9 * hours / 38.4 + (0.15 + 3 * 0.002) * hours),
        pytest.approx(9 * hours / 20),
        pytest.approx(9 * hours / 1.6),
    ]
    assert read_title(figure) == (
        "Paid back after 6.5 epochs. 9 epochs of 118,287 images: 13 hours with make_loader, 15 "
        "hours with 32 streams"
    )
    assert read_texts(figure) == [
        " + make_loader: 13 hours",
        " + 32 streams: 15 hours",
        " plain loop: 185 hours",
    ]
    assert not figure.axes[0].get_legend()


def test_names_at_the_ends_of_lines_do_not_overlap(make_timing, make_comparison):
    close = [
        make_timing("sequential", images_per_second=35.0),
        make_timing("dataloader", images_per_second=36.0),
    ]
    figure = plot_epochs(make_comparison(*close, make_timing("packed")))
    figure.canvas.draw()
    low, middle, high = sorted(text.get_window_extent().y0 for text in figure.axes[0].texts)
    height = figure.axes[0].texts[0].get_window_extent().height
    assert min(middle - low, high - middle) >= height


@pytest.mark.parametrize(
    ("rate", "once_ms", "paid"),
    [
        # Each epoch wins 26 ms an image, and 10 ms were spent.
        (19.2, 10, "Paid back in the first epoch. 9 epochs"),
        # Each epoch wins 26 ms an image, and 90 ms were spent.
        (19.2, 90, "Paid back after 3.5 epochs. 9 epochs"),
        # The pay-back comes long after the chart ends.
        (37.0, 100, "Paid back after "),
        # Nothing is won, so no pay-back is named.
        (
            38.4,
            100,
            "9 epochs of 118,287 images: 11 hours with make_loader, 7.7 hours with 2 workers",
        ),
    ],
)
def test_when_it_is_paid_back(make_timing, make_comparison, rate, once_ms, paid):
    workers = make_timing("dataloader", images_per_second=rate, cold_ms_per_image=1000 / rate)
    packed = make_timing("packed", once_ms_per_image=once_ms, session_ms_per_image=0.0)
    title = read_title(plot_epochs(make_comparison(workers, packed)))
    assert title.startswith(paid)
    assert not any(word in title for word in ("never", " 0 ", "minutes"))


def test_a_first_epoch_and_copies_count(make_timing, make_comparison):
    costs = {
        "once_ms_per_image": 200.0,
        "session_ms_per_image": 50.0,
        "cold_ms_per_image": 300.0,
    }
    figure = plot_epochs(
        make_comparison(make_timing("dataloader", images_per_second=10.0, **costs))
    )
    lines = [line for line in figure.axes[0].get_lines() if len(line.get_xdata()) > 2]
    (line,) = lines
    assert list(line.get_xdata()) == [0, 0, 1, 3, 3, 4, 6, 6, 7, 9]
    ms = [200, 250, 550, 750, 800, 1100, 1300, 1350, 1650, 1850]
    assert list(line.get_ydata()) == pytest.approx(
        [duration_ms * 118_287 / 3.6e6 for duration_ms in ms]
    )


# These tests look at names.

# The names are formulas, one of them wrong, names that legends hide, and other signs.
NAMES = ["$a_b$", "_x", r"$\nope$", "50% <b> \\n"]


def test_names_in_figures_are_shown_as_they_are(make_timing, make_comparison):
    rows = [make_timing(name, images_per_second=1.6 + n) for n, name in enumerate(NAMES)]
    comparison = replace(make_comparison(*rows), step=NAMES[2])
    for plot, least in ((plot_comparison, 4), (plot_epochs, 2)):
        figure = plot(comparison)
        # Drawing raises where a formula is none.
        figure.canvas.draw()
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        assert sum(any(name in text.get_text() for text in texts) for name in NAMES) >= least
        assert not [text for text in texts if "$" in text.get_text() and text.get_parse_math()]


# These tests look at what one method wins over another.


def test_a_difference_within_the_spread_of_the_repeats_is_called_equal(
    make_timing, make_comparison
):
    slow = replace(make_timing("dataloader"), images_per_second=30.0)
    close = replace(make_timing("packed"), images_per_second=31.4)
    steady = (31.0, 31.4, 31.6)
    wide = (28.0, 31.4, 35.0)
    for repeats, words in ((steady, "is, within 5%, as fast as"), (wide, "within 22%")):
        rows = make_comparison(
            replace(slow, repeats_images_per_second=(29.9, 30.0, 30.1)),
            replace(close, repeats_images_per_second=repeats),
        )
        assert words in rows.describe_steps()[0]


@pytest.mark.parametrize(
    ("rate", "words"),
    [
        (60.0, "make_loader trains 2.0 times as many images/s as 2 workers"),
        (24.0, "make_loader trains 20% fewer images/s than 2 workers"),
    ],
)
def test_a_difference_beyond_the_spread_is_told(make_timing, make_comparison, rate, words):
    rows = [
        replace(
            make_timing(name),
            images_per_second=median,
            repeats_images_per_second=(median, median * 1.01),
        )
        for name, median in (("dataloader", 30.0), ("packed", rate))
    ]
    assert make_comparison(*rows).describe_steps() == [words]


def test_a_wide_spread_is_written_on_the_bar(make_timing, make_comparison):
    row = replace(make_timing("packed"), repeats_images_per_second=(30.0, 34.0))
    assert "repeats differ by" in read_texts(plot_comparison(make_comparison(row)))[0]


@pytest.mark.parametrize("plot", [plot_comparison, plot_cold_start, plot_epochs])
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
