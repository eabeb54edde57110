"""Checks of arguments: what passes, as which type, and what the message says."""

import math

import numpy as np
import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.require import (
    require_choice,
    require_count,
    require_max_bad,
    require_number,
    require_part,
)


# Two values have no hash.
@pytest.mark.parametrize("value", ["x", [1], {}, None])
def test_a_choice_passes_and_all_else_is_named_with_the_choices(value):
    choices = {"dense": 1, "packed": 2}
    require_choice("deliver", "dense", choices)
    with pytest.raises(ColabUtilsError, match="deliver must be one of dense, packed; it is"):
        require_choice("deliver", value, choices)


@pytest.mark.parametrize("value", [1, np.uint8(1), 0.5, np.float32(0.5)])
def test_numbers_become_pythons_own(value):
    assert type(require_number("x", value)) is (int if value == 1 else float)


# A count that is too small, a flag, a number that is not whole, and no number.
@pytest.mark.parametrize("value", [0, True, 1.0, None])
def test_what_is_no_count_is_refused(value):
    assert type(require_count("n", np.int64(1))) is int
    with pytest.raises(
        ColabUtilsError, match=r"expected n (of 1 or more|as a whole number), found"
    ):
        require_count("n", value)


@pytest.mark.parametrize("value", [b"\1\2", {1, 2}, {1: 1, 2: 2}, (1,)])
def test_what_is_no_pair_is_no_part(value):
    with pytest.raises(ColabUtilsError, match=r"Pass \(i, n\)"):
        require_part(value)


@pytest.mark.parametrize("value", [float("nan"), "1", True, [1.0]])
@pytest.mark.parametrize("bounds", [{}, {"minimum": 0}])
def test_what_is_no_number_is_refused(value, bounds):
    with pytest.raises(ColabUtilsError, match=r"expected x .*found "):
        require_number("x", value, **bounds)


@pytest.mark.parametrize(
    ("bounds", "good", "bad", "words"),
    [
        ({"above": 0}, [0.1, 1e300], [0, -1, math.inf], "over 0,"),
        ({"minimum": 0}, [0, 1e300], [-0.1, math.inf], "of 0 or more,"),
        ({"maximum": 1}, [1, -1e300], [1.1, -math.inf], "of 1 or less,"),
        ({"above": 0, "maximum": 1}, [0.1, 1], [0, 1.1], "over 0 and of 1 or less,"),
    ],
)
def test_a_number_outside_its_bounds_is_refused(bounds, good, bad, words):
    assert [require_number("x", value, **bounds) for value in good] == good
    for value in bad:
        with pytest.raises(ColabUtilsError, match=f"expected x {words} found {value}"):
            require_number("x", value, **bounds)


@pytest.mark.parametrize("value", [-1, 1.5, True])
def test_max_bad_is_nothing_else(value):
    with pytest.raises(ColabUtilsError, match="expected max_bad"):
        require_max_bad(value)
