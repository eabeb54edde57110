"""Tables: escaped HTML for notebooks, aligned text for terminals."""

from __future__ import annotations

import re

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import make_table


@pytest.mark.parametrize(
    ("value", "text"),
    [
        # The value was not measured.
        (None, "–"),
        # A flag reads as a word.
        (True, "yes"),
        # A small number has three digits.
        (0.04567, "0.0457"),
        # A smaller number has no powers of ten.
        (7.97e-05, "0.0001"),
        # Whole numbers keep all digits.
        (118287, "118,287"),
        # A large number has no decimals.
        (29114.4, "29,114"),
    ],
)
def test_values_are_written_as_people_read_them(value, text):
    assert make_table([{"column": value}]).rows == ((text,),)


def test_a_notebook_gets_html_and_a_terminal_text():
    table = make_table([{"way": "Drive", "images/s": 16}, {"way": "SSD", "images/s": None}])
    assert "<table" in table._repr_html_()
    assert str(table).splitlines() == ["way    images/s", "Drive        16", "SSD           –"]


@pytest.mark.parametrize(
    ("texts", "right"),
    [
        # Powers of ten are numbers.
        (["7.97e-05", "0.1"], True),
        # Numbers may have units.
        (["4.2 s", "10 minutes", "–"], True),
        # A missing value leaves the column one of numbers.
        (["1,234.5", "not tried"], True),
        # Names are no numbers.
        (["T4", "A100"], False),
    ],
)
def test_numbers_with_units_stand_on_the_right(texts, right):
    assert make_table([{"a": text} for text in texts]).is_number == (right,)


def test_a_long_table_scrolls_and_takes_the_keyboards_focus():
    html = make_table([{"class": n, "AP": 0.1} for n in range(80)]).to_html()
    assert re.match('<div tabindex="0" style="[^"]*max-height:[^"]*overflow:auto"', html)
    # The headings stay while the table scrolls.
    assert html.count("position:sticky") == 2


def test_a_table_without_rows_is_refused_and_what_a_row_lacks_is_a_dash():
    with pytest.raises(ColabUtilsError, match="The table has no rows"):
        make_table([])
    assert make_table([{"a": 1, "b": 2}, {"a": 3}]).rows == (("1", "2"), ("3", "–"))
