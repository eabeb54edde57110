"""Guesses: what is typed into a form is set beside the measurement, and never misread."""

from __future__ import annotations

import pytest

from colab_utils.course.guesses import compare_guess


@pytest.mark.parametrize(
    ("guess", "sentence"),
    [
        # A slider gives a number.
        (50, "You guessed 50, it was 96 %: more than you thought."),
        # A form field gives text.
        ("50", "You guessed 50, it was 96 %: more than you thought."),
        # The reader typed the unit, too.
        (" 96 %", "You guessed 96, it was 96 %: close."),
        # The guess is within a quarter.
        (80, "You guessed 80, it was 96 %: close."),
        # The guess is too high.
        (200, "You guessed 200, it was 96 %: less than you thought."),
        # The reader left the field empty.
        ("", "You made no guess. It was 96 %."),
    ],
)
def test_a_guess_is_judged_beside_the_measurement(guess, sentence):
    assert compare_guess(guess, 96, "%") == sentence


@pytest.mark.parametrize(
    "guess",
    [
        # A word is no number.
        "many",
        # A comma means thousands to some, and tenths to others.
        "1,500",
        # Python takes this for a number.
        "nan",
    ],
)
def test_what_is_no_number_is_named_and_not_judged(guess):
    sentence = compare_guess(guess, 96)
    assert sentence == f"{str(guess)!r} is no number. Type digits, such as 50 or 7.5. It was 96."


@pytest.mark.parametrize(("guess", "verdict"), [(0, "close"), (5, "less"), (-5, "more")])
def test_a_measurement_of_nothing_can_be_guessed(guess, verdict):
    assert verdict in compare_guess(guess, 0.0, "%")
