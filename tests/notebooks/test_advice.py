"""Notebook 05's folded cells, run by themselves: verdicts on advice, and checks of exercises."""

from __future__ import annotations

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "05_compare_timings.ipynb"
COURSE = ["sequential", "dataloader", "streams", "shards_on_ssd", "packed"]


@pytest.fixture(scope="module")
def cells():
    notebook = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


@pytest.fixture
def names(cells):
    """What the helper cell defines."""
    values = {"median": None, "perf_counter": None}
    exec(cells["helpers"], values)
    return values


@pytest.mark.parametrize(
    ("is_true", "is_false", "verdict"),
    [
        (True, False, "True here."),
        (False, True, "False here."),
        (False, False, "It depends."),
    ],
)
def test_a_verdict_comes_from_the_measurement(names, capsys, is_true, is_false, verdict):
    names["tell"]("lists are slow", "", is_true, is_false, "3 ms")
    assert capsys.readouterr().out == f"{verdict}\n3 ms\n"


@pytest.mark.parametrize(
    ("guess", "words"),
    [
        ("false", "As you guessed."),
        ("true", "You guessed 'true'."),
        ("perhaps", "'perhaps' is no answer: write true, false or depends."),
        (None, "None is no answer: write true, false or depends."),
        (3, "3 is no answer: write true, false or depends."),
    ],
)
def test_each_guess_is_answered_and_kept(names, capsys, guess, words):
    names["tell"]("lists are slow", guess, False, True, "3 ms")
    assert words in capsys.readouterr().out
    row = {"advice": "lists are slow", "your guess": guess, "here": "false here"}
    assert names["sheet"] == [{**row, "measured": "3 ms"}]


def check_first(cells, epochs, capsys):
    values = {"math": math}
    exec(cells["exercise-answer"], values)
    capsys.readouterr()
    values["epochs"] = epochs
    exec(cells["exercise-cell"], values)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("epochs", "words"),
    [
        (1, "Not yet: 4 hours against 7.3."),
        (2, "The copy of the session has to be paid"),
        (3, "Correct: 12 hours against 9.3."),
        (4, "did so earlier"),
        (6, "It saves 3 hours"),
        (-1, "whole number"),
        (2.5, "whole number"),
        ("three", "whole number"),
        (None, "whole number"),
    ],
)
def test_the_first_exercise_names_the_misconception(cells, capsys, epochs, words):
    assert words in check_first(cells, epochs, capsys)


def test_an_exercise_that_nobody_answered_says_nothing(cells, capsys):
    assert check_first(cells, 0, capsys) == ""
    assert check_second(cells, "", capsys) == ""


def check_second(cells, answer, capsys, *, rates=(1.6, 3.2, 13.0, 32.0, 38.0), waits=0.9):
    ways = {}
    for name, rate in zip(COURSE, rates, strict=True):
        ways[name] = SimpleNamespace(images_per_second=rate, wait_share=waits)
    timed = {name: way.images_per_second for name, way in ways.items() if way.images_per_second}
    values = {"ways": ways, "rates": timed, "course": COURSE, "BATCH_SIZE": 4}
    exec(cells["exercise-own-cell"], values)
    capsys.readouterr()
    values["my_way"] = answer
    exec(cells["exercise-own-check"], values)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("streams", "Correct: with streams the T4 would wait 0%"),
        ("packed", "Beyond the speed of the step it wins nothing"),
        ("shards_on_ssd", "streams costs less and does as well"),
        ("sequential", "Its batch takes 0.7 s"),
        ("dataloader", "the T4 would wait 44%"),
        ("make_loader", "write one of"),
        (None, "write one of"),
    ],
)
def test_the_second_exercise_names_the_misconception(cells, capsys, answer, words):
    assert words in check_second(cells, answer, capsys)


def test_a_way_that_was_not_timed_is_no_answer(cells, capsys):
    rates = (1.6, 3.2, 13.0, 32.0, None)
    assert "could not be timed" in check_second(cells, "packed", capsys, rates=rates)


def test_a_machine_on_which_all_ways_wait_is_told(cells, capsys):
    rates = (0.5, 0.6, 0.7, 0.8, 0.9)
    assert "None of them on your machine" in check_second(cells, "packed", capsys, rates=rates)
