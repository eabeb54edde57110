"""Each measure of a slow Drive, on a dozen tiny images at full speed."""

import json

import pytest

from benchmarks import slow_drive
from benchmarks.slow_drive import MEASURES, main
from tests.drive_mount import can_mount


@pytest.mark.parametrize("measure", MEASURES)
def test_a_measure_has_figures_of_each_way(measure, tiny_dataset, tmp_path, monkeypatch, capsys):
    if measure == "width" and can_mount():
        pytest.skip(can_mount())
    monkeypatch.setattr(slow_drive, "MOUNTED_FILES", 300)
    monkeypatch.setattr(slow_drive, "LIMITS", (8, 16))
    monkeypatch.setattr(slow_drive, "SETTLING_S", 0.3)
    path = tmp_path / "rows.json"
    command = (
        f"{measure} --images {tiny_dataset.images} --annotations {tiny_dataset.annotations} "
        f"--work {tmp_path}/work --json {path} "
        "--profile none --seconds 0.3 --repeats 1 --step-ms 1"
    )
    assert main(command.split()) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["way"] for row in rows] == list(MEASURES[measure][1])
    for row in rows:
        figures = {name: value for name, value in row.items() if "/s" in name or ", s" in name}
        assert figures
        assert min(figures.values()) > 0
    assert "times the first" in capsys.readouterr().out
    assert not any((tmp_path / "work").iterdir())
