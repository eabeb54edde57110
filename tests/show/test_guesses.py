"""Guesses: what is typed into a form is set beside the measurement, and never misread."""

from __future__ import annotations

import pytest

from colab_utils.show.guesses import compare_guess


@pytest.mark.parametrize(
    ("guess", "sentence"),
    [
        (50, "You guessed 50, it was 96 %: more than you thought."),  # a slider
        ("50", "You guessed 50, it was 96 %: more than you thought."),  # a text
        (" 96 %", "You guessed 96, it was 96 %: close."),  # with its unit
        (80, "You guessed 80, it was 96 %: close."),  # within a quarter
        (200, "You guessed 200, it was 96 %: less than you thought."),  # too much
        ("-3", "You guessed -3, it was 96 %: more than you thought."),  # nonsense, but a number
        ("", "You made no guess. It was 96 %."),  # left empty
        (None, "You made no guess. It was 96 %."),  # deleted
    ],
)
def test_a_guess_is_judged_beside_the_measurement(guess, sentence):
    assert compare_guess(guess, 96, "%") == sentence


@pytest.mark.parametrize(
    "guess",
    [
        "many",  # a word
        "1,500",  # a comma means thousands to some, and tenths to others
        "nan",  # a number to Python
        "inf",  # a number to Python
        [3],  # a list
        " ",  # a blank
    ],
)
def test_what_is_no_number_is_named_and_not_judged(guess):
    sentence = compare_guess(guess, 96)
    assert sentence == f"{str(guess)!r} is no number. Type digits, such as 50 or 7.5. It was 96."


@pytest.mark.parametrize(("guess", "verdict"), [(0, "close"), (5, "less"), (-5, "more")])
def test_a_measurement_of_nothing_can_be_guessed(guess, verdict):
    assert verdict in compare_guess(guess, 0.0, "%")
