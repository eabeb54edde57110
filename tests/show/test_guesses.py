"""Guesses: what is typed into a form is set beside the measurement, and never misread."""

from __future__ import annotations

import pytest

from colab_utils.show.guesses import compare_guess, read_guess


@pytest.mark.parametrize(
    ("guess", "number"),
    [
        (50, 50),  # a slider
        ("50", 50),  # a text
        (" 2.5 %", 2.5),  # with its unit
        ("-3", -3),  # nonsense, but a number
        ("", None),  # left empty
        (None, None),  # deleted
        ("many", None),  # a word
        ("1,500", None),  # a comma means thousands to some, and tenths to others
        ("nan", None),  # a number to Python
        ("inf", None),  # a number to Python
        ([3], None),  # a list
    ],
)
def test_a_guess_is_a_number_or_none(guess, number):
    assert read_guess(guess) == number


@pytest.mark.parametrize(
    ("guess", "ending"),
    [
        (50, "You guessed 50, it was 96: more than you thought."),
        (96, "You guessed 96, it was 96: close."),
        (80, "You guessed 80, it was 96: close."),  # within a quarter
        (200, "You guessed 200, it was 96: less than you thought."),
        ("", "You made no guess. It was 96."),
        (None, "You made no guess. It was 96."),
        ("half", "'half' is no number. Type digits, such as 50. It was 96."),
    ],
)
def test_a_guess_is_judged_beside_the_measurement(guess, ending):
    assert compare_guess(guess, 96) == ending


@pytest.mark.parametrize(("guess", "verdict"), [(0, "close"), (5, "less"), (-5, "more")])
def test_a_measurement_of_nothing_can_be_guessed(guess, verdict):
    assert verdict in compare_guess(guess, 0.0, "%")
