"""A few cases of every kind in the ordinary tests; ``make fuzz`` runs thousands."""

from __future__ import annotations

import os
import sys
import time
from operator import attrgetter

import pytest

from colab_utils.errors import ColabUtilsError
from tests.fuzz.__main__ import describe, prepare
from tests.fuzz.kinds import KINDS
from tests.fuzz.pool import Case, Result, run_cases
from tests.fuzz.truth import WrongDataError

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="limits and memory are read as Linux gives them"
)


@pytest.fixture(autouse=True)
def unrecorded(monkeypatch):
    """The record of errors that `make test` keeps would be a file outside of a case's folder."""
    make = ColabUtilsError.__init__
    monkeypatch.setattr(ColabUtilsError, "__init__", getattr(make, "__wrapped__", make))


@pytest.fixture(scope="module")
def prepared():
    with prepare() as prepared:
        yield prepared


def run(prepared, kinds, numbers, processes=2) -> list[Result]:
    results = run_cases(numbers, 0, kinds, *prepared, processes)
    return sorted(results, key=attrgetter("number"))


def leave(case: Case) -> None:
    (case.folder / "../outside/secret.png").read_bytes()


def take_memory(case: Case) -> None:
    assert bytearray(1100 * 2**20)


def kill(case: Case) -> None:
    os.kill(os.getpid(), 11)


def refuse_in_lines(case: Case) -> None:
    raise ColabUtilsError("not caught")


def accept_wrong(case: Case) -> None:
    raise WrongDataError("pixels differ\n[1]\n[2]")


@pytest.mark.parametrize(
    ("work", "bug"),
    [
        (leave, "Outside in pool.py _refuse: open /dev/shm"),
        (take_memory, "more than 1 GB"),
        (kill, "exit -11"),
        (refuse_in_lines, "ColabUtilsError in"),
        (accept_wrong, "WrongDataError in"),
        (lambda case: 1 / 0, "ZeroDivisionError in"),
    ],
)
def test_each_kind_of_bug_is_told(prepared, work, bug):
    """And the cases before and after it run."""
    kinds = {"fine": (1, lambda case: False), "bad": (1, work)}
    results = run(prepared, kinds, list(range(6)), processes=1)
    assert [result.number for result in results] == list(range(6))
    endings = {(result.kind, result.outcome) for result in results}
    assert endings == {("fine", "correct"), ("bad", "bug")}
    bad = [result for result in results if result.kind == "bad"]
    assert all(result.bug.startswith(bug) for result in bad)
    assert f"python -m tests.fuzz --seed 0 --case {bad[0].number}" in describe(results, 0)


def test_a_hang_is_told(prepared, monkeypatch):
    monkeypatch.setattr("tests.fuzz.pool.SECONDS", 0.2)
    results = run(prepared, {"hang": (1, lambda case: time.sleep(60))}, [0, 1])
    assert [result.outcome for result in results] == ["bug", "bug"]
    assert results[0].bug.startswith("more than 0.2 s")


def test_cases_of_all_kinds_are_correct_or_refused_and_the_same_again(prepared):
    results = run(prepared, KINDS, range(200))
    assert {result.kind for result in results} == set(KINDS)
    assert {result.outcome for result in results} == {"correct", "refused"}, describe(results, 0)
    assert run(prepared, KINDS, range(12), processes=3) == results[:12]


# Each row has the kind, the seed and the number of a case that was a bug once.
FOUND = [
    # EXIF orientation as text was a TypeError in check.
    ("image_jpeg", 4, 673),
    # EXIF orientation as text in a PNG was the same error.
    ("image_png", 7, 1271),
    # A palette with transparency that is too long was a ValueError.
    ("image_png", 5, 1320),
    # An RLE size made of lists was a ValueError of an array's truth.
    ("json_tree", 5, 779),
    # A true in a polygon counted as 1.
    ("json_tree", 4, 1095),
    # Repair left an annotation id of 10**30, which fits into no array.
    ("json_field", 7, 1010),
    # A number where polygons lie was a TypeError in repair.
    ("json_tree", 8, 3361),
    # The index of another folder was taken.
    ("shard_swap", 4, 45),
    # A name that says it is UTF-8 and is not was a UnicodeDecodeError.
    ("zip_bytes", 2026, 98535),
    # An id of a thousand lists in one another was a RecursionError in repair.
    ("json_tree", 21, 34400),
    # A file without a name was an IndexError.
    ("zip_members", 21, 35453),
    # Torchvision's operator decoded a JPEG without a table that it needs.
    ("image_bytes", 20261126, 27948),
]


@pytest.mark.parametrize(("kind", "seed", "number"), FOUND)
def test_what_was_found_is_mended(prepared, kind, seed, number):
    [result] = run_cases([number], seed, {kind: KINDS[kind]}, *prepared, 1)
    assert result.outcome != "bug", result.text
