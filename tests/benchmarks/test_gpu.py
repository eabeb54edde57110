"""The command for a GPU, tried out on the CPU: it measures all that it names, and writes its
table.
"""

from __future__ import annotations

import copy
import json

import pytest

from benchmarks import gpu
from benchmarks.gpu import main
from benchmarks.step import (
    CHANGES,
    COMPILED,
    compare_losses,
    make_model,
    make_step,
    time_steps,
)
from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.training import losses
from tests.tiny_model import TINY_MODEL

pytestmark = pytest.mark.usefixtures("few_objects")


@pytest.fixture
def small_batches(monkeypatch):
    """Rows measure images of a sixteenth of the pixels."""
    real = gpu.make_batch
    monkeypatch.setattr(
        gpu,
        "make_batch",
        lambda size, objects: real(size, objects=objects, height=120, width=160),
    )


def run_main(folder):
    """Return the status of the command, which writes its rows to ``found.json``."""
    command = f"--json {folder}/found.json --work {folder} --device cpu --min-size 64"
    return main([*command.split(), "--models", TINY_MODEL, "--batch-sizes", "2"])


@pytest.mark.usefixtures("small_batches", "one_thread")
def test_every_measurement_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(
        gpu, "time_steps", lambda model, batches, device, changes: {"step_ms": 10.0 - len(changes)}
    )
    monkeypatch.setattr(gpu, "WARMUP_STEPS", 1)
    monkeypatch.setattr(gpu, "TIMED_STEPS", 3)
    small = {"n": 8, "width": 96, "height": 80, "workers": 1}
    monkeypatch.setattr(gpu, "make_dataset", lambda folder, n: make_dataset(folder, **small))
    assert run_main(tmp_path) == 0
    content = json.loads((tmp_path / "found.json").read_text())
    assert {row["what"] for row in content["rows"]} == {
        "step",
        "300 objects an image",
        "float16, as a T4",
        "real data",
        "evaluation",
    }
    assert not any("left_out" in row for row in content["rows"])
    assert "of a cached batch" in capsys.readouterr().out


@pytest.mark.usefixtures("small_batches", "one_thread")
def test_rows_that_fail_are_kept_with_their_error_and_the_others_go_on(
    tmp_path, monkeypatch, capsys
):
    def time_steps(model, batches, device, changes):
        if COMPILED in changes:
            raise RuntimeError("Failed to find C compiler.\nPlease specify one.")
        return {"step_ms": 10.0}

    def make_pictures(folder, images):
        import pycocotools.no_such_module  # noqa: F401

    monkeypatch.setattr(gpu, "time_steps", time_steps)
    monkeypatch.setattr(gpu, "compare_losses", lambda model, batches, device: 0.0)
    monkeypatch.setattr(gpu, "make_pictures", make_pictures)
    assert run_main(tmp_path) == 2
    rows = json.loads((tmp_path / "found.json").read_text())["rows"]
    errors = {row["what"]: row["error"] for row in rows if "error" in row}
    assert errors == {
        "real data": "ModuleNotFoundError: No module named 'pycocotools.no_such_module'",
        "evaluation": "ModuleNotFoundError: No module named 'pycocotools.no_such_module'",
        "step": "RuntimeError: Failed to find C compiler.",
    }
    assert len([row for row in rows if "step_ms" in row]) == len(rows) - 4
    printed = capsys.readouterr()
    assert "4 of 13 rows failed, the first with ModuleNotFoundError" in printed.err
    assert "failed: RuntimeError: Failed to find C compiler." in printed.out


@pytest.fixture(scope="module")
def model():
    """It samples all anchors and all regions, so that nothing is left to chance."""
    made = make_model(TINY_MODEL, num_classes=2, min_size=64)
    made.rpn.fg_bg_sampler.batch_size_per_image = 100_000
    made.roi_heads.fg_bg_sampler.batch_size_per_image = 100_000
    return made


@pytest.fixture(scope="module")
def batches():
    return [gpu.make_batch(2, objects=objects, height=120, width=160) for objects in (3, 5)]


@pytest.mark.parametrize("count", range(1, len(CHANGES) + 1))
def test_every_change_trains_as_the_references_do(model, batches, count, one_thread):
    def train(changes):
        step = make_step(copy.deepcopy(model), "cpu", changes)
        return [step(batch).item() for batch in batches]

    assert train(CHANGES[:count]) == pytest.approx(train(()), rel=0.01)


def test_other_losses_are_not_timed(model, batches, monkeypatch, one_thread):
    assert compare_losses(model, batches[:1], "cpu") < 1e-3
    assert time_steps(model, batches, "cpu", CHANGES)["step_ms"] > 0
    real = losses.compute_losses
    monkeypatch.setattr(
        losses, "compute_losses", lambda model, batch: real(model, batches[1].packed)
    )
    with pytest.raises(ColabUtilsError, match="expected losses within 1%"):
        compare_losses(model, batches[:1], "cpu")
