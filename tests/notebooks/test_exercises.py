"""The exercises of the notebooks, answered: right, wrong, and with what is no answer."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import islice, repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colab_utils import copy_shards, simulate
from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.course.loader_exercise import grade_loader

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NO_NUMBERS = ["many", "", None, [], -1, math.nan]


def read_cells(number: str, folder: Path = FOLDER) -> dict[str, str]:
    """Return the sources of a notebook's cells by their ids."""
    [path] = folder.glob(f"{number}*.ipynb")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


def predict(streams: int, read_s: float, work_s: float) -> dict[str, float]:
    return {
        "read": 4 * (read_s + work_s) / streams,
        "work": (4 * work_s + 0.09) / 2,
        "step": 0.1,
    }


def race(*rates: float | None) -> dict[str, Any]:
    """Return what notebook 05 knows of ways of these images a second."""
    pairs = dict(zip(COURSE_STRATEGIES, rates, strict=True))
    ways = {
        name: SimpleNamespace(images_per_second=rate, wait_share=0.9)
        for name, rate in pairs.items()
    }
    timed = {name: rate for name, rate in pairs.items() if rate}
    return {"ways": ways, "rates": timed, "course": COURSE_STRATEGIES, "BATCH_SIZE": 4}


MACHINE = {
    "simulate": simulate,
    "load_s": 2.4,
    "machine": SimpleNamespace(cores=2),
    "BATCH_SIZE": 4,
}
PHOTOS = {"predict": predict, "photo_read_s": 0.6, "photo_work_s": 0.15}
SIZES = {
    "np": np,
    "loose_hours": 0.0,
    "readers_minutes": 0.0,
    "shard_minutes": 0.0,
    "time_backbone": lambda height, width: 100.0,
    "own_height": 480,
    "own_width": 640,
    "times_enlarged": 800 / 480,
    "default_ms": 400,
}
MEMORY = {"room_gb": 4.0, "sample_bytes": 4e6, "jpeg_bytes": 4e5}
RACE = race(1.6, 3.2, 13.0, 32.0, 38.0)
BUY = "01 exercise-own-cell exercise-own-check"
OPENING = "02 exercise-cell exercise-check"
OWN_SIZE = "02 exercise-check exercise-own-cell exercise-own-check"
WAY = "05 exercise-own-cell exercise-own-check"
# The cells, the last of which checks; what they know; the name of the answer; and answers, each
# with words of the check.
EXERCISES: list[tuple[str, dict[str, Any], str, list[tuple[Any, str]]]] = [
    (
        "01 exercise-cell exercise-check",
        MACHINE,
        "workers_needed",
        [
            (4, "Correct"),
            (2, "needs none"),
            (5, "fewer workers do as well"),
            (12, "Did you count images?"),
            (2.5, "whole number"),
            (True, "whole number"),
            *zip(NO_NUMBERS, repeat("whole number")),
        ],
    ),
    (
        BUY,
        PHOTOS,
        "my_choice",
        [
            (" Cores ", "Now predict the seconds"),
            ("gpu", "A faster step helps only where"),
            ("threads", "They bring no core"),
            ("a bigger disk", 'write "cores"'),
            (None, 'write "cores"'),
            (math.nan, 'write "cores"'),
        ],
    ),
    (
        BUY,
        PHOTOS,
        "my_batch_s",
        [
            (0.1725, "Correct"),
            ("soon", "Now predict the seconds"),
            (9, "the largest term becomes"),
        ],
    ),
    (
        OPENING,
        {"np": np},
        "loose_hours",
        [
            (19.9, "loose_hours: correct"),
            (1195, "That is in minutes"),
            (math.nan, "loose_hours = nan is no number"),
            ("20 h", "loose_hours = '20 h' is no number"),
            (None, "loose_hours = None is no number"),
            (True, "loose_hours = True is no number"),
            (-5, "too little"),
        ],
    ),
    (
        OPENING,
        {"np": np},
        "readers_minutes",
        [
            (49.8, "readers_minutes: correct"),
            (597, "24 wait at once"),
        ],
    ),
    (
        OPENING,
        {"np": np},
        "shard_minutes",
        [
            (3.04, "shard_minutes: correct"),
            (1.52, "A shard is two files"),
        ],
    ),
    (
        OWN_SIZE,
        SIZES,
        "times_less",
        [
            (2.78, "times_less: correct"),
            (1.667, "You compared sides"),
            (0.36, "Upside down"),
        ],
    ),
    (
        OWN_SIZE,
        SIZES,
        "own_size_ms",
        [
            (144, "own_size_ms: correct"),
            # What was measured is no error, either.
            (100, "own_size_ms: correct"),
            (240, "Pixels count"),
            ("fast", "is no number"),
        ],
    ),
    (
        "03 exercise-memory-edit exercise-memory-cell",
        MEMORY,
        "my_images",
        [
            (1000, "Correct"),
            (10_000, "so many JPEGs would fit"),
            (500, "a copy for each process"),
            (2000, "all of the free memory"),
            (70, "divide the bytes"),
            *zip(NO_NUMBERS, repeat("write a number of images")),
        ],
    ),
    (
        "04 exercise-edit exercise-cell",
        {},
        "interval_s",
        [
            (120, "Correct"),
            (60, "More often is not safer"),
            (3600, "grows with the interval"),
            *zip(NO_NUMBERS, repeat("write a number of seconds")),
        ],
    ),
    (
        "04 exercise-size-edit exercise-size-cell",
        {"large_s": 2.1, "small_s": 1.0},
        "my_times_as_fast",
        [
            (2.1, "Correct"),
            (1.67, "the ratio of the sides"),
            (2.78, "the ratio of the areas"),
            (0.4, "do not make a step slower"),
            (9, "neither the sides nor the areas"),
            *zip(NO_NUMBERS, repeat("write a number")),
        ],
    ),
    (
        "05 exercise-answer exercise-cell",
        {"math": math},
        "epochs",
        [
            (1, "Not yet: 4 hours against 7.3."),
            (2, "The copy of the session has to be paid"),
            (3, "Correct: 12 hours against 9.3."),
            (4, "did so earlier"),
            (6, "It saves 3 hours"),
            (-1, "whole number"),
            (2.5, "whole number"),
            ("three", "whole number"),
        ],
    ),
    (
        WAY,
        RACE,
        "my_way",
        [
            ("streams", "Correct: with streams the T4 would wait 0%"),
            ("packed", "Beyond the speed of the step it wins nothing"),
            ("shards_on_ssd", "streams costs less and does as well"),
            ("sequential", "Its batch takes 0.7 s"),
            ("dataloader", "the T4 would wait 44%"),
            ("make_loader", "write one of"),
            (None, "write one of"),
        ],
    ),
    (
        WAY,
        race(1.6, 3.2, 13.0, 32.0, None),
        "my_way",
        [("packed", "could not be timed")],
    ),
    (
        WAY,
        race(0.5, 0.6, 0.7, 0.8, 0.9),
        "my_way",
        [("packed", "None of them on your machine")],
    ),
]


@pytest.fixture
def check(capsys):
    """Answer an exercise; returns what its check says."""

    def run(cells: str, values: dict[str, Any], **answers: object) -> str:
        number, *ids = cells.split()
        *asks, checks = map(read_cells(number).__getitem__, ids)
        known = dict(values)
        for source in asks:
            exec(source, known)
        known.update(answers)
        capsys.readouterr()
        exec(checks, known)
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize(
    ("cells", "values", "name", "answer", "words"),
    [(*exercise, *row) for *exercise, rows in EXERCISES for row in rows],
)
def test_an_exercise_names_the_misconception(check, cells, values, name, answer, words):
    others = {"my_choice": "cores"} if name == "my_batch_s" else {}
    assert words in check(cells, values, **others, **{name: answer})


@pytest.mark.parametrize(("cells", "values"), [exercise[:2] for exercise in EXERCISES])
def test_an_exercise_says_nothing_to_who_answered_nothing(check, cells, values):
    assert check(cells, values) == ""


def test_01_grades_a_loader_of_ones_own():
    cells = read_cells("01")
    before = {*multiprocessing.active_children()}
    grades: list[Any] = []
    values: dict[str, Any] = {
        "ThreadPoolExecutor": ThreadPoolExecutor,
        "islice": islice,
        "grade_loader": grade_loader,
        "display": grades.append,
    }
    exec(cells["exercise-loader-cell"], values)
    exec(cells["exercise-loader-check"], values)
    assert values["loader_grade"] is None
    exec(cells["solution-loader"].replace("SOLUTION = False", "SOLUTION = True"), values)
    # How fast it is depends on what else this machine does.
    assert len(grades[0].checks) == 5
    failed = {trial for trial, mistake in grades[0].checks.items() if mistake}
    assert failed <= {"a whole epoch"}
    assert before.issuperset(multiprocessing.active_children())


CUT = "os.truncate(victim, whole_bytes // 2)"
MEND = "copy_shards(data.shards_on_drive, data.shards_on_ssd)"


@pytest.mark.parametrize(
    ("damage", "repair", "words"),
    [
        (CUT, MEND, "Correct."),
        (CUT, "", "it is cut, and not mended"),
        ("victim.unlink()", MEND, "it was deleted, and not cut"),
        ("", "", ""),
    ],
)
def test_03_asks_to_damage_and_to_mend_a_shard(
    capsys, tiny_shards, tmp_path, damage, repair, words
):
    drive = tmp_path / "drive"
    shutil.copytree(tiny_shards, drive)
    copy_shards(drive, tmp_path / "ssd")
    cells = read_cells("03")
    source = cells["exercise-edit"]
    for comment, line in (
        ("# Cut it on this line: os.truncate(path, length)", damage),
        ("# Mend it on this line.", repair),
    ):
        assert source.count(comment) == 1
        source = source.replace(comment, line)
    places = SimpleNamespace(shards_on_drive=drive, shards_on_ssd=tmp_path / "ssd")
    values = {"data": places, "os": os, "copy_shards": copy_shards}
    exec(source, values)
    capsys.readouterr()
    exec(cells["exercise-cell"], values)
    printed = capsys.readouterr().out
    assert words in printed
    assert bool(printed) == bool(words)


@pytest.mark.parametrize(
    ("is_true", "is_false", "guess", "verdict"),
    [
        (True, False, "", "True here.\n3 ms\n"),
        (False, True, "", "False here.\n3 ms\n"),
        (False, False, "", "It depends.\n3 ms\n"),
        (False, True, "false", "As you guessed."),
        (False, True, "true", "You guessed 'true'."),
        (False, True, "perhaps", "'perhaps' is no answer: write true, false or depends."),
        (False, True, None, "None is no answer: write true, false or depends."),
    ],
)
def test_05_judges_advice_and_each_guess_by_the_measurement(
    capsys, is_true, is_false, guess, verdict
):
    values: dict[str, Any] = {"median": None, "perf_counter": None}
    exec(read_cells("05")["helpers"], values)
    values["tell"]("lists are slow", guess, is_true, is_false, "3 ms")
    printed = capsys.readouterr().out
    assert verdict in printed
    assert values["sheet"] == [
        {
            "advice": "lists are slow",
            "your guess": guess,
            "here": printed.partition(".")[0].lower(),
            "measured": "3 ms",
        }
    ]
