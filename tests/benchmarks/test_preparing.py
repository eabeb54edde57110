import os

import pytest

from benchmarks import arrival, forecast, preparing, step
from colab_utils.shards.write import write_shards
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
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path / "shards", workers=1
    )
    try:
        row = preparing.time_copy(tmp_path / "shards", "fast", tmp_path)
    except RuntimeError as error:  # a machine that has all it takes may forbid it
        pytest.skip(str(error))
    assert sorted(os.listdir(tmp_path / "ssd")) == sorted(os.listdir(tmp_path / "shards"))
    assert "Drive, fast" in preparing.tabulate_runs([{"name": "Drive, fast", "repeat": 0, **row}])


@pytest.mark.skipif(bool(can_mount()), reason=can_mount() or "none")
def test_preprocess_from_drive_beside_the_bare_calls(tiny_dataset, tmp_path):
    try:
        row = preparing.time_preprocess_from_drive(tiny_dataset, "typical", 2, tmp_path)
    except RuntimeError as error:
        pytest.skip(str(error))
    assert row["made"] > 0 < row["bare"]
    assert "bare calls / made" in preparing.tabulate_runs(
        [{"name": "Drive, typical", "repeat": 0, **row}]
    )


@pytest.mark.parametrize(
    "tabulate",
    [arrival.tabulate_runs, preparing.tabulate_runs, forecast.tabulate_errors, step.tabulate_runs],
)
def test_nothing_measured_is_said(tabulate):
    assert tabulate([]).startswith("nothing was")
