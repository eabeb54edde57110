"""The five questions: guesses kept, answered by measurements, and never misread."""

from __future__ import annotations

import json

import pytest

from colab_utils.course.questions import (
    OWN_LOADER,
    QUESTIONS,
    collect_answers,
    compare_guess,
    describe_answers,
    read_answers,
)


def publish(drive, answers):
    folder = drive / "results"
    folder.mkdir()
    (folder / "01.json").write_text(json.dumps({"questions": answers}))


def test_guesses_survive_from_the_first_notebook_to_the_last(tmp_path):
    own_loader = {"checks": [{"check": "a slow file"}], "times_as_fast": 20.3}
    answers = collect_answers({"waits_percent": "50"}, {"waits_percent": 96.0})
    publish(tmp_path, {**answers, OWN_LOADER: own_loader})
    before = read_answers(tmp_path)
    answers = collect_answers({"waits_percent": "90"}, {}, before=before)
    assert answers["waits_percent"] == {
        "question": QUESTIONS["waits_percent"][0],
        "unit": "%",
        "guess": "90",
        "guess_before": "50",
        "measured": 96.0,
    }
    assert list(answers) == [*QUESTIONS, OWN_LOADER]
    assert answers[OWN_LOADER] == own_loader
    assert "a slow file" not in describe_answers(answers)
    del answers["waits_percent"]["guess_before"]
    assert "You guessed 90" in describe_answers(answers)


def test_what_nobody_measured_is_said_to_be_unmeasured():
    text = describe_answers(collect_answers({"times_photos": "3"}, {}))
    assert text.count("It was not measured on this machine") == len(QUESTIONS)


def test_the_guess_from_before_the_course_stands_beside():
    before = collect_answers({"waits_percent": "30 %"}, {"waits_percent": 96.0})
    text = describe_answers(collect_answers({"waits_percent": "95"}, {}, before=before))
    assert "You guessed 95, it was 96 %: close." in text
    assert "Before the course you guessed 30." in text


@pytest.mark.parametrize(
    "content",
    [
        "",
        '{"questions": [1]}',
        '{"questions": {"somebody": {"guess": "1"}}}',
    ],
)
def test_a_notebook_that_stopped_half_way_leaves_no_answers(tmp_path, content):
    (tmp_path / "results").mkdir()
    (tmp_path / "results" / "01.json").write_text(content)
    assert read_answers(tmp_path) == {}


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
        # A comma means thousands to some, and tenths to others.
        ("1,5", "'1,5' is no number. Type digits, such as 50 or 7.5. It was 96 %."),
        # Python takes this for a number.
        ("nan", "'nan' is no number. Type digits, such as 50 or 7.5. It was 96 %."),
    ],
)
def test_a_guess_is_judged_beside_the_measurement(guess, sentence):
    assert compare_guess(guess, 96, "%") == sentence


@pytest.mark.parametrize(("guess", "verdict"), [(0, "close"), (5, "less"), (-5, "more")])
def test_a_measurement_of_nothing_can_be_guessed(guess, verdict):
    assert verdict in compare_guess(guess, 0.0, "%")
