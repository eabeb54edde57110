"""What a finished run says of itself."""

from __future__ import annotations

import math
from types import SimpleNamespace

from colab_utils.training.report import LossPoint, TrainReport


def describe(losses):
    report = TrainReport(
        steps=len(losses),
        losses=tuple(LossPoint(step, loss) for step, loss in enumerate(losses, start=1)),
        images_per_second=2.0,
        wait_share=0.1,
        checkpoint="run/checkpoint-00000004.pt",
        ap=None,
        plan=SimpleNamespace(steps=len(losses)),
    )
    return str(report)


def test_a_skipped_step_hides_no_loss():
    assert describe([4.0, 3.0, 2.0, math.nan]).startswith("4 steps, loss 4.00 -> 2.00, ")
    assert describe([math.inf, 3.0, 2.0]).startswith("3 steps, loss 3.00 -> 2.00, ")


def test_without_a_finite_loss_there_is_none():
    assert "loss nan -> nan" in describe([math.nan])
    assert "0 steps" in describe([])
