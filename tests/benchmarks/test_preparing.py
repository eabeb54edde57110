import os

import pytest

from benchmarks import arrival, forecast, preparing, step
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.write import write_shards
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
from colab_utils.training.step import TrainingStep
from tests.drive_mount import can_mount


def test_preprocess_beside_its_plan_and_the_bare_calls(tiny_dataset, tmp_path):
    row = preparing.time_preprocess(tiny_dataset, "shrink", 2, tmp_path)
    assert row["bytes"] == pytest.approx(row["planned bytes"], rel=0.2)
    assert min(row.values()) > 0
    text = preparing.tabulate_runs([{"name": "shrink, 2 processes", "repeat": 0, **row}])
    assert "planned / made" in text
    assert "bare reads" not in text


@pytest.mark.skipif(bool(can_mount()), reason=can_mount() or "none")
def test_copy_beside_bare_reads(tiny_dataset, tmp_path):
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path / "shards", workers=1)
    try:
        row = preparing.time_copy(tmp_path / "shards", "fast", tmp_path)
    except RuntimeError as error:  # a machine that has all it takes may forbid it
        pytest.skip(str(error))
    assert sorted(os.listdir(tmp_path / "ssd")) == sorted(os.listdir(tmp_path / "shards"))
    assert "Drive, fast" in preparing.tabulate_runs([{"name": "Drive, fast", "repeat": 0, **row}])


@pytest.mark.parametrize(
    "tabulate", [arrival.tabulate_runs, preparing.tabulate_runs, forecast.tabulate_errors, step.tabulate_runs]
)
def test_nothing_measured_is_said(tabulate):
    assert tabulate([]).startswith("nothing was")


def test_steps_are_compared_before_they_are_timed(tiny_dataset, monkeypatch):
    batches = step.prepare_batches(tiny_dataset, batch_size=2, device="cpu")
    classes = 1 + max(int(target["labels"].max()) for _, _, targets in batches for target in targets)
    model = build_mask_rcnn(LIGHT_MODEL, num_classes=classes, weights=None, min_size=64)
    assert step.compare_losses(model, batches) < 1e-3
    monkeypatch.setattr(step, "TIMED", 2)
    runs = [
        {"data": "tiny", "way": way, **step.time_steps(way, TrainingStep(model, "cpu"), batches)} for way in step.WAYS
    ]
    assert "times as fast" in step.tabulate_runs(runs)
    other = [(packed, [image + 0.5 for image in images], targets) for packed, images, targets in batches]
    with pytest.raises(ColabUtilsError, match="within 1% of torchvision's"):
        step.compare_losses(model, other)
