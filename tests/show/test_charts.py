"""Charts: the title is the finding, the bars are the numbers, whatever the numbers are."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.text import Text

from colab_utils.errors import ColabUtilsError
from colab_utils.show import charts
from colab_utils.show.charts import plot_bars
from colab_utils.show.pictures import draw_samples
from tests.comparisons import read_bars, read_texts


@pytest.mark.parametrize(
    ("values", "texts"),
    [
        # A chart may have one bar.
        ({"a": 3.0}, ["3"]),
        # All bars may be empty.
        ({"a": 0.0, "b": 0.0}, ["0", "0"]),
        # The values lie far apart.
        ({"a": 12345.6, "b": 0.123}, ["12,346", "0.12"]),
    ],
)
def test_bars_carry_their_numbers(values, texts):
    figure = plot_bars(values, title="A finding", unit="images/s")
    figure.draw_without_rendering()
    assert read_bars(figure) == values
    assert read_texts(figure) == texts
    assert figure.get_suptitle() == "A finding"


def make_spans(*begins, step=0.5):
    return [(begin, begin + step) for begin in begins]


def test_the_first_seconds_count_as_the_spans_do():
    rows = {
        "plain loop": make_spans(2, 4.5, 7),
        "shards": make_spans(*np.arange(0, 5, 0.5)),
    }
    figure = charts.plot_first_seconds(rows)
    figure.draw_without_rendering()
    assert figure.get_suptitle() == "The step waits about 80% (plain loop) → 0% (shards)"
    # Of all that each row ran: the picture is as long as the longest.
    assert read_texts(figure) == ["waits 80%, 3 batches", "waits 0%, 10 batches"]
    assert figure.axes[0].get_xlim() == (0, 7.5)
    drawn = [collection.get_paths() for collection in figure.axes[0].collections]
    assert [len(paths) for paths in drawn] == [3, 10]
    assert [paths[0].get_extents().intervalx.tolist() for paths in drawn] == [[2, 2.5], [0, 0.5]]


def test_what_ended_early_is_not_waiting_and_what_is_cut_counts_as_far_as_it_is_seen():
    figure = charts.plot_first_seconds(
        {"short": make_spans(0.5), "long": make_spans(0, 3, 3.75), "none": []}, seconds=4
    )
    # The loops wait 0.5 of 1 s, 2.75 of 4 s, and all the time.
    texts = ["waits 50%, 1 batch", "waits 69%, 2 batches", "waits 100%, 0 batches"]
    assert read_texts(figure) == texts
    # The white frame of each row ends where its loop did.
    assert [patch.get_width() for patch in figure.axes[0].patches] == [1, 4, 4]


@pytest.mark.parametrize("rows", [{}, {"plain loop": []}])
def test_nothing_to_draw_is_said(rows):
    with pytest.raises(ColabUtilsError, match="There are no steps to draw"):
        charts.plot_first_seconds(rows)
    with pytest.raises(ColabUtilsError, match="There are no values to draw"):
        plot_bars({}, title="", unit="")


def find_cut_texts(figure):
    """Texts of an axis that reach out of the figure."""
    figure.draw_without_rendering()
    (axis,) = figure.axes
    for text in (*axis.texts, axis.title, axis._right_title):
        box = text.get_window_extent()
        if box.x0 < 0 or box.x1 > figure.bbox.x1 or box.y1 > figure.bbox.y1:
            yield text.get_text()


# The bars end at the line, just under it, and far from it.
@pytest.mark.parametrize("top", [40, 36, 3])
def test_no_text_is_cut(top):
    notes = {
        "plain loop": "waits 96%",
        "+ 2 workers": "waits 92%",
        "+ make_loader on shards": "waits 2%, NOT the same data",
    }
    values = dict(zip(notes, (1.6, 3.1, float(top)), strict=True))
    limit = (40, "the step alone") if top > 3 else (3.1, "a limit with a very long name")
    figure = plot_bars(
        values, title="T", unit="images/s", notes=notes, limit=limit, spread={"+ 2 workers": (2, 4)}
    )
    assert [*find_cut_texts(figure)] == []


def test_what_is_far_apart_becomes_points_on_a_logarithmic_axis():
    values = {
        "loose files on Drive": 606.0,
        "shards on Drive": 8.0,
        "shards on SSD": 0.03,
    }
    figure = plot_bars(
        values, title="T", unit="ms", log=True, notes={"shards on SSD": "from memory"}
    )
    figure.draw_without_rendering()
    (axis,) = figure.axes
    assert axis.get_xscale() == "log"
    assert [line.get_xdata()[0] for line in axis.lines] == [606, 8, 0.03]
    assert not axis.patches
    assert read_texts(figure) == ["606", "8", "0.03  from memory"]


# The names are formulas, one of them wrong, names that legends hide, and other signs.
NAMES = ["$a_b$", "_x", r"$\nope$", "50% <b> \\n"]


def make_odd_figures():
    """Every figure that shows a user's names, with these names."""
    bars = dict.fromkeys(NAMES, 1.0)
    yield plot_bars(
        bars,
        title=NAMES[2],
        unit=NAMES[2],
        notes=dict.fromkeys(NAMES, NAMES[2]),
        highlight=NAMES[:1],
        limit=(2, NAMES[2]),
    )
    yield charts.plot_first_seconds(
        {name: [(0.0, 1.0)] for name in NAMES},
        title=NAMES[2],
    )
    target = {
        "boxes": np.array([[2, 2, 6, 6]] * 4),
        "labels": np.arange(4),
        "masks": np.ones((4, 8, 8), np.uint8),
    }
    sample = (np.zeros((3, 8, 8), np.uint8), target)
    yield draw_samples({"a": sample}, title="T", class_names=dict(enumerate(NAMES)))


def test_names_in_figures_are_shown_as_they_are():
    for figure in make_odd_figures():
        # Drawing raises where a formula is none.
        figure.draw_without_rendering()
        texts = [text for text in figure.findobj(Text) if text.get_text()]
        shown = {text.get_text().strip() for text in texts}
        assert all(any(name in text for text in shown) for name in NAMES), shown
        assert not [text for text in texts if "$" in text.get_text() and text.get_parse_math()]


def test_a_figure_has_its_numbers_as_words():
    bars = plot_bars({"Drive": 16.0, "SSD": 480.0}, title="SSD wins", unit="images/s")
    _, metadata = bars._repr_mimebundle_()
    assert metadata == {"image/png": {"alt": "SSD wins. Drive: 16. SSD: 480"}}
    steps = charts.plot_first_seconds({"loop": [(1, 2)]})
    words = "The step waits about 50% (loop). loop: waits 50%, 1 batch"
    assert steps.alternative_text == words
