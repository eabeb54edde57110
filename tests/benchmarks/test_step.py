"""The cumulative benchmark of a step: every change gives the references' losses, and the table keeps null results."""

import copy

import pytest
import torch

from benchmarks.step import CHANGES, ChangedStep, compare_losses, make_model, prepare_batches, tabulate_runs
from colab_utils.errors import ColabUtilsError
from colab_utils.training.model import LIGHT_MODEL

NOT_HERE = ("bfloat16, no scaler", "cuDNN's own choice", "compiled backbone")
ON_CPU = [change for change in CHANGES if change not in NOT_HERE]


@pytest.fixture(scope="module")
def model():
    return make_model(LIGHT_MODEL, num_classes=7, min_size=64)


@pytest.fixture(scope="module")
def batches(tiny_dataset):
    return prepare_batches(tiny_dataset, batch_size=2)


@pytest.mark.parametrize("count", range(len(ON_CPU) + 1))
def test_every_change_trains_as_the_references_do(model, batches, count, one_thread):
    def train(changes):
        step = ChangedStep(copy.deepcopy(model), "cpu", changes, [(64, 96)])
        torch.manual_seed(0)
        return [step(*batches[:2]).item(), step(*batches[1:3]).item()]

    assert train(ON_CPU[:count]) == pytest.approx(train(()), rel=0.01)


def test_other_losses_are_not_timed(model, batches, monkeypatch, one_thread):
    assert compare_losses(model, batches[:1], "cpu") < 1e-3
    real = ChangedStep._move

    def mirror(self, batch):
        given = real(self, batch)
        return given if isinstance(given, tuple) else real(self, batches[1])

    monkeypatch.setattr(ChangedStep, "_move", mirror)
    with pytest.raises(ColabUtilsError, match="expected losses within 1%"):
        compare_losses(model, batches[:1], "cpu")


def test_the_table_compares_within_a_repeat():
    rows = [
        {"data": "kept", "step": name, "step_ms": ms, "repeat": repeat}
        for repeat, drift in enumerate((1, 2))
        for name, ms in (("torchvision's references", 100 * drift), ("+ one", 50 * drift), ("+ two", 50 * drift))
    ]
    lines = tabulate_runs(rows).splitlines()
    assert "2.00 [2.00-2.00]" in lines[-2]
    assert "1.00 [1.00-1.00]" in lines[-1]
