"""Values that a function does not know are refused in one line, and all others pass."""

from __future__ import annotations

import numpy as np
import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.require import require_choice, require_count, require_number, require_path


@pytest.mark.parametrize("value", [1, 7, np.int64(7), (1 << 31) - 1])
def test_a_count_passes(value):
    assert require_count("steps", value) is None


@pytest.mark.parametrize(
    ("value", "bounds", "expected"),
    [
        (0, {}, "steps of at least 1, found 0. "),
        (2.5, {}, "steps of at least 1, found 2.5. "),
        (True, {}, "steps of at least 1, found True. "),
        ("7", {}, "steps of at least 1, found '7'. "),
        (1 << 31, {}, "steps of at most 2,147,483,647, found 2147483648. "),
        (-1, {"least": 0}, "steps of at least 0, found -1. "),
        (10_001, {"most": 10_000}, "steps of 1 to 10,000, found 10001. "),
    ],
)
def test_what_is_no_count_is_refused(value, bounds, expected):
    with pytest.raises(ColabUtilsError) as caught:
        require_count("steps", value, **bounds)
    assert str(caught.value) == f"expected {expected}Pass another value."


@pytest.mark.parametrize("value", [0.005, 1, np.float32(0.5)])
def test_a_number_passes(value):
    assert require_number("learning_rate", value, above=0) is None


@pytest.mark.parametrize("value", [0, -0.1, float("nan"), float("inf"), "0.1", True])
def test_what_is_no_number_is_refused(value):
    with pytest.raises(ColabUtilsError) as caught:
        require_number("learning_rate", value, above=0)
    assert str(caught.value) == f"expected learning_rate above 0, found {value!r}. Pass another value."


def test_a_choice_is_one_of_those_that_are_named():
    assert require_choice("resume", "auto", ("auto", "never")) is None
    with pytest.raises(ColabUtilsError, match=r"^expected resume as 'auto' or 'never', found 'x'\. Pass"):
        require_choice("resume", "x", ("auto", "never"))
    with pytest.raises(ColabUtilsError, match=r"^expected model as one of a, b, c, found None\. Pass"):
        require_choice("model", None, ("a", "b", "c"))


def test_a_folder_is_a_path(tmp_path):
    assert require_path("shards", tmp_path) is None
    assert require_path("shards", str(tmp_path)) is None
    with pytest.raises(ColabUtilsError, match=r"^expected shards as the path of a folder, .* found 5\. Pass"):
        require_path("shards", 5)
