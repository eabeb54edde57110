"""Planted causes give the same batches again, and a loop reads the clocks."""

import re
from functools import partial

import pytest
import torch

from benchmarks.causes.__main__ import try_cause, try_healthy
from benchmarks.causes.healthy import HEALTHY
from benchmarks.causes.loop import Truth, run_loop
from benchmarks.causes.planted import CAUSES
from colab_utils.diagnosis.cures import CURES
from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError


@pytest.mark.parametrize("name", CAUSES)
def test_a_planted_cause_is_one_that_there_is(name):
    assert CAUSES[name].expected in {*CURES, "hang", "memory", "step"}
    assert re.compile(CAUSES[name].advice)
    assert CAUSES[name].make_loop.__doc__


@pytest.mark.parametrize("name", ["read", "masks"])
def test_a_cause_gives_the_same_batches_again(name, tmp_path, one_thread):
    first = next(iter(CAUSES[name].make_loop(tmp_path)[0]))[0]
    again = next(iter(CAUSES[name].make_loop(tmp_path)[0]))[0]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_loops_are_tried_under_watch_and_diagnose(one_thread):
    planted = try_cause("between", seconds=0.5)
    assert set(planted) >= {"truth", "watch", "diagnose", "named", "advice fits"}
    healthy = try_healthy(next(iter(HEALTHY)), seconds=0.5)
    assert healthy["planted"].startswith("healthy")


def test_shares_leave_out_the_very_first_wait():
    truth = Truth(13, wait_s=(5, 1, 3), step_s=(1, 1, 1), between_s=(0, 1, 0), starts=(0, 2))
    assert str(truth).startswith("wait 50% (starts 38%), step 38%, between 12%")


def test_the_hang_never_ends(tmp_path):
    around = partial(watch, timeout_s=2, on_stall="raise")
    with pytest.raises(ColabUtilsError, match=r"waits in a read.*pipe-37.*sample 37"):
        run_loop(CAUSES["hang"].make_loop, tmp_path, seconds=60, around=around)
