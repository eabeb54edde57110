"""The exercises of notebooks 01 to 04, answered: right, wrong, and with what is no answer."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from colab_utils import copy_shards, simulate
from colab_utils.course.loader_exercise import LEAST_TIMES, grade_loader

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
NO_NUMBERS = ["many", "", None, [], -1, math.nan]


def read_cells(number: str) -> dict[str, str]:
    [path] = FOLDER.glob(f"{number}_*.ipynb")
    notebook = json.loads(path.read_text(encoding="utf-8"))
    return {cell["id"]: "".join(cell["source"]) for cell in notebook["cells"]}


def answer(
    number: str, asks: str, checks: str, values: dict[str, Any], **answers: object
) -> dict[str, Any]:
    """Run the cell with the answer, then its check; returns what both have in memory."""
    cells = read_cells(number)
    exec(cells[asks], values)
    values.update(answers)
    exec(cells[checks], values)
    return values


def answer_workers(workers: object) -> None:
    values = {
        "simulate": simulate,
        "load_s": 2.4,
        "machine": SimpleNamespace(cores=2),
        "BATCH_SIZE": 4,
    }
    answer("01", "exercise-cell", "exercise-check", values, workers_needed=workers)


@pytest.mark.parametrize(
    ("workers", "words"),
    [
        (4, "Correct"),
        (2, "needs none"),
        (5, "fewer workers do as well"),
        (12, "Did you count images?"),
        (2.5, "whole number"),
        (True, "whole number"),
        *[(value, "whole number") for value in NO_NUMBERS],
    ],
)
def test_01_asks_for_workers(capsys, workers, words):
    answer_workers(workers)
    assert words in capsys.readouterr().out


def test_01_says_nothing_of_an_untouched_exercise(capsys):
    values = {"simulate": simulate, "load_s": 2.4}
    answer("01", "exercise-cell", "exercise-check", values)
    assert "Not yet" not in capsys.readouterr().out
    values = {"predict": predict, "photo_read_s": 0.6, "photo_work_s": 0.15}
    answer("01", "exercise-own-cell", "exercise-own-check", values)
    assert "Not yet" not in capsys.readouterr().out


def test_01_grades_a_loader_of_ones_own():
    cells = read_cells("01")
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
    assert len(grades[0].checks) == 9
    checks = [check for check in grades[0].checks if "make_loader" not in check.check]
    assert [check.check for check in checks if not check.passed] == []
    assert grades[0].times_as_fast >= LEAST_TIMES
    assert multiprocessing.active_children() == []


def predict(streams: int, read_s: float, work_s: float) -> dict[str, float]:
    return {
        "read": 4 * (read_s + work_s) / streams,
        "work": (4 * work_s + 0.09) / 2,
        "step": 0.1,
    }


@pytest.mark.parametrize(
    ("choice", "batch_s", "words"),
    [
        ("cores", 0.1725, "Correct"),
        (" Cores ", 0.1725, "Correct"),
        ("cores", 0.0, "Now predict the seconds"),
        ("cores", "soon", "Now predict the seconds"),
        ("cores", 9, "the largest term becomes"),
        ("gpu", 0.1, "A faster step helps only where"),
        ("threads", 0.1, "They bring no core"),
        ("a bigger disk", 0.1, 'write "cores"'),
        *[(value, 0.1, 'write "cores"') for value in NO_NUMBERS if value != ""],
    ],
)
def test_01_asks_what_to_buy(capsys, choice, batch_s, words):
    values = {"predict": predict, "photo_read_s": 0.6, "photo_work_s": 0.15}
    answers = {"my_choice": choice, "my_batch_s": batch_s}
    answer("01", "exercise-own-cell", "exercise-own-check", values, **answers)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"loose_hours": 19.9}, "loose_hours: correct"),
        ({"readers_minutes": 49.8}, "readers_minutes: correct"),
        ({"shard_minutes": 3.04}, "shard_minutes: correct"),
        ({"loose_hours": 1195}, "That is in minutes"),
        ({"readers_minutes": 597}, "24 wait at once"),
        ({"shard_minutes": 1.52}, "A shard is two files"),
        ({"loose_hours": math.nan}, "loose_hours = nan is no number"),
        ({"loose_hours": "20 h"}, "loose_hours = '20 h' is no number"),
        ({"loose_hours": None}, "loose_hours = None is no number"),
        ({"loose_hours": True}, "loose_hours = True is no number"),
        ({"loose_hours": -5}, "too little"),
    ],
)
def test_02_asks_for_the_time_of_opening(capsys, answers, words):
    answer("02", "exercise-cell", "exercise-check", {"np": np}, **answers)
    assert words in capsys.readouterr().out


def test_02_says_nothing_to_who_answered_nothing(capsys):
    answer("02", "exercise-cell", "exercise-check", {"np": np})
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ({"times_less": 2.78}, "times_less: correct"),
        ({"own_size_ms": 144}, "own_size_ms: correct"),
        # What was measured is no error, either.
        ({"own_size_ms": 100}, "own_size_ms: correct"),
        ({"times_less": 1.667}, "You compared sides"),
        ({"times_less": 0.36}, "Upside down"),
        ({"own_size_ms": 240}, "Pixels count"),
        ({"own_size_ms": "fast"}, "is no number"),
    ],
)
def test_02_asks_for_the_time_at_the_images_own_size(capsys, answers, words):
    cells = read_cells("02")
    values: dict[str, Any] = {
        "np": np,
        "loose_hours": 0.0,
        "readers_minutes": 0.0,
        "shard_minutes": 0.0,
    }
    exec(cells["exercise-check"], values)
    values.update(
        time_backbone=lambda height, width: 100.0,
        own_height=480,
        own_width=640,
        times_enlarged=800 / 480,
        default_ms=400,
    )
    answer("02", "exercise-own-cell", "exercise-own-check", values, **answers)
    assert words in capsys.readouterr().out


@pytest.fixture
def places(tiny_shards, tmp_path):
    """A copy of shards on Drive, and what was copied from there to the SSD."""
    drive = tmp_path / "drive"
    shutil.copytree(tiny_shards, drive)
    copy_shards(drive, tmp_path / "ssd")
    return SimpleNamespace(shards_on_drive=drive, shards_on_ssd=tmp_path / "ssd")


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def leave_alone(place: object) -> None:
    """Do what a learner does who only runs the cell."""


def mend(places: SimpleNamespace) -> None:
    copy_shards(places.shards_on_drive, places.shards_on_ssd)


@pytest.mark.parametrize(
    ("damage", "repair", "words"),
    [
        (cut, mend, "Correct."),
        (cut, leave_alone, "it is cut, and not mended"),
        (Path.unlink, mend, "it was deleted, and not cut"),
    ],
)
def test_03_asks_to_damage_and_to_mend_a_shard(capsys, places, damage, repair, words):
    assert words in check_damage(capsys, places, damage, repair)


def test_03_says_nothing_to_who_damaged_nothing(capsys, places):
    assert check_damage(capsys, places, leave_alone, leave_alone) == ""


def check_damage(capsys, places, damage, repair):
    """Return what the check says when the learner's two lines are these."""
    damage_line = "# Cut it on this line: os.truncate(path, length)"
    repair_line = "# Mend it on this line."
    source = read_cells("03")["exercise-edit"]
    assert source.count(damage_line) == source.count(repair_line) == 1
    source = source.replace(damage_line, "damage(victim)")
    source = source.replace(repair_line, "repair(data)")
    values = {"data": places, "os": os, "damage": damage, "repair": repair}
    exec(source, values)
    capsys.readouterr()
    exec(read_cells("03")["exercise-cell"], values)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (1000, "Correct"),
        (10_000, "so many JPEGs would fit"),
        (500, "a copy for each process"),
        (333, "a copy for each process"),
        (2000, "all of the free memory"),
        (70, "divide the bytes"),
        *[(value, "write a number of images") for value in NO_NUMBERS],
    ],
)
def test_03_asks_how_many_images_fit_into_memory(capsys, images, words):
    values = {"room_gb": 4.0, "sample_bytes": 4e6, "jpeg_bytes": 4e5}
    answers = {"my_images": images}
    answer("03", "exercise-memory-edit", "exercise-memory-cell", values, **answers)
    assert words in capsys.readouterr().out


def test_03_says_nothing_to_who_counted_nothing(capsys):
    values = {"room_gb": 4.0, "sample_bytes": 4e6, "jpeg_bytes": 4e5}
    answer("03", "exercise-memory-edit", "exercise-memory-cell", values)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (120, "Correct"),
        (60, "More often is not safer"),
        (3600, "grows with the interval"),
        *[(value, "write a number of seconds") for value in NO_NUMBERS],
    ],
)
def test_04_asks_how_often_to_write_a_checkpoint(capsys, seconds, words):
    answer("04", "exercise-edit", "exercise-cell", {}, interval_s=seconds)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("times", "words"),
    [
        (2.1, "Correct"),
        (1.67, "the ratio of the sides"),
        (2.78, "the ratio of the areas"),
        (0.4, "do not make a step slower"),
        (9, "neither the sides nor the areas"),
        *[(value, "write a number") for value in NO_NUMBERS],
    ],
)
def test_04_asks_how_much_faster_a_smaller_image_trains(capsys, times, words):
    values = {"large_s": 2.1, "small_s": 1.0}
    answers = {"my_times_as_fast": times}
    answer("04", "exercise-size-edit", "exercise-size-cell", values, **answers)
    assert words in capsys.readouterr().out


def test_04_says_nothing_of_an_untouched_exercise(capsys):
    values = answer("04", "exercise-edit", "exercise-cell", {})
    assert "Not yet" not in capsys.readouterr().out
    values.update(large_s=2.1, small_s=1.0)
    answer("04", "exercise-size-edit", "exercise-size-cell", values)
    assert capsys.readouterr().out == ""
