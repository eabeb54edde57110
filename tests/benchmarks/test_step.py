"""The cumulative benchmark of a step: every change gives the references' losses, and the table
keeps null results.
"""

import copy

import pytest

from benchmarks.step import (
    CHANGES,
    compare_losses,
    make_model,
    make_step,
    prepare_batches,
    tabulate_runs,
    time_steps,
)
from colab_utils.errors import ColabUtilsError
from colab_utils.training import losses
from tests.tiny_model import TINY_MODEL


@pytest.fixture(scope="module")
def model():
    """It samples all anchors and all regions, so that nothing is left to chance."""
    made = make_model(TINY_MODEL, num_classes=7, min_size=64)
    made.rpn.fg_bg_sampler.batch_size_per_image = 100_000
    (
        made.roi_heads.fg_bg_sampler.batch_size_per_image
    ) = made.rpn.fg_bg_sampler.batch_size_per_image
    return made


@pytest.fixture(scope="module")
def batches(tiny_dataset):
    return prepare_batches(tiny_dataset, batch_size=2)


@pytest.mark.parametrize("count", range(1, len(CHANGES) + 1))
def test_every_change_trains_as_the_references_do(model, batches, count, one_thread):
    def train(changes):
        step = make_step(copy.deepcopy(model), "cpu", changes)
        return [step(batch).item() for batch in batches[:2]]

    assert train(CHANGES[:count]) == pytest.approx(train(()), rel=0.01)


def test_other_losses_are_not_timed(model, batches, monkeypatch, one_thread):
    assert compare_losses(model, batches[:1], "cpu") < 1e-3
    real = losses.compute_losses
    monkeypatch.setattr(
        losses, "compute_losses", lambda model, batch: real(model, batches[1].packed)
    )
    with pytest.raises(ColabUtilsError, match="expected losses within 1%"):
        compare_losses(model, batches[:1], "cpu")


def test_steps_are_timed(model, batches, one_thread):
    assert time_steps(model, batches, "cpu", CHANGES)["step_ms"] > 0


def test_the_table_compares_within_a_repeat():
    rows = [
        {"data": "kept", "step": name, "step_ms": ms, "repeat": repeat}
        for repeat, drift in enumerate((1, 2))
        for name, ms in (
            ("torchvision's references", 100 * drift),
            ("+ one", 50 * drift),
            ("+ two", 50 * drift),
        )
    ]
    lines = tabulate_runs(rows).splitlines()
    assert "2.00 [2.00-2.00]" in lines[-2]
    assert "1.00 [1.00-1.00]" in lines[-1]
