"""Planted causes are short modules that give the same batches again, and a loop reads the
clocks.
"""

import re
from functools import partial
from pathlib import Path

import pytest
import torch

from benchmarks import causes
from benchmarks.causes import CAUSES, get_cause
from benchmarks.causes.healthy import HEALTHY
from benchmarks.causes.loop import Step, Truth, run_loop
from colab_utils.diagnosis.cures import CURES
from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError


@pytest.mark.parametrize("name", CAUSES)
def test_a_cause_is_one_short_module(name):
    cause = get_cause(name)
    assert cause.EXPECTED in {*CURES, "hang", "memory", "step"}
    assert cause.EPOCHS >= 1
    assert re.compile(cause.NEXT)
    assert len(Path(causes.__file__).with_name(f"{name}.py").read_text().splitlines()) < 40


@pytest.mark.parametrize("name", ["read", "transform", "masks"])
def test_a_cause_gives_the_same_batches_again(name, tmp_path, one_thread):
    first = next(iter(get_cause(name).make_loop(tmp_path)[0]))[0]
    again = next(iter(get_cause(name).make_loop(tmp_path)[0]))[0]
    assert all(torch.equal(*pair) for pair in zip(first, again, strict=True))


def test_the_loop_runs_epoch_after_epoch_and_numbers_its_steps(tmp_path):
    batches = [(["image"], ["target"]), {"image": 1}, [{}, {}]]
    seen = []
    numbers = []
    looked_at = []

    def make_loop(folder):
        return batches, lambda *batch: seen.append(batch), numbers.append

    def around(loader):
        looked_at.append(loader)
        return loader

    truth = run_loop(make_loop, tmp_path, seconds=0.05, around=around)
    assert seen[:4] == [
        (["image"], ["target"]),
        ({"image": 1},),
        ([{}, {}],),
        (["image"], ["target"]),
    ]
    assert numbers == list(range(len(truth.step_s)))
    assert truth.starts == tuple(range(0, len(numbers), 3))[: len(looked_at)]
    assert len(looked_at) > 1


def test_shares_leave_out_the_very_first_wait():
    truth = Truth(
        13,
        wait_s=(5, 1, 3),
        step_s=(1, 1, 1),
        between_s=(0, 1, 0),
        starts=(0, 2),
    )
    assert [truth.wait_share, truth.start_share, truth.step_share, truth.between_share] == [
        0.5,
        0.375,
        0.375,
        0.125,
    ]
    assert "wait 50% (starts 38%)" in str(truth)


def test_the_step_trains():
    step = Step(5)
    images = torch.rand(4, 3, 32, 32)
    before = [weight.clone() for weight in step.model.parameters()]
    step(images, None)
    assert any(not torch.equal(*pair) for pair in zip(before, step.model.parameters(), strict=True))
    again = Step()
    assert all(torch.equal(*pair) for pair in zip(before, again.model.parameters(), strict=True))


def test_twenty_healthy_loops_are_there():
    assert len(HEALTHY) >= 20


def test_the_hang_never_ends(tmp_path):
    around = partial(watch, timeout_s=2, on_stall="raise")
    with pytest.raises(ColabUtilsError, match=r"stuck in a read.*pipe-37.*sample 37"):
        run_loop(get_cause("hang").make_loop, tmp_path, seconds=60, around=around)
