"""What changed between two runs: the ratio, its noise, and files that are none."""

from __future__ import annotations

import json

import pytest

from colab_utils.__main__ import main
from colab_utils.diagnosis.change import compare_runs, read_run
from colab_utils.errors import ColabUtilsError

BEFORE = {"images_per_second": 10.0, "wait_share": 0.8, "error": 0.03}


@pytest.mark.parametrize(
    ("rate", "size", "fails"),
    [(30.0, "more than the noise", False), (10.5, "within the noise", False), (8.0, "more than the noise", True)],
)
def test_a_change_is_told_from_the_noise(rate, size, fails):
    change = compare_runs(BEFORE, {"images_per_second": rate, "wait_share": 0.1, "error": 0.04}, fail_below=0.9)
    assert change.ratio == pytest.approx(rate / 10)
    assert change.noise == pytest.approx(0.1)
    assert size in str(change)
    assert change.fails == fails


def test_a_diagnosis_and_a_summary_are_read(tmp_path):
    path = tmp_path / "before.json"
    path.write_text(json.dumps({"images_per_second": 10, "stall_share": 0.8, "error": 0.03, "verdict": "slow"}))
    assert read_run(path) == BEFORE


@pytest.mark.parametrize("text", ["", "[1]", "{}", '{"images_per_second": "many", "wait_share": 1, "error": 0}'])
def test_another_file_is_refused(tmp_path, text):
    path = tmp_path / "before.json"
    path.write_text(text)
    with pytest.raises(ColabUtilsError, match="found something else in"):
        read_run(path)


def test_the_command_says_what_changed_and_fails_below(tiny_dataset, tmp_path, capsys):
    before, command = tmp_path / "before.json", ["diagnose", "--images", str(tiny_dataset.images)]
    command += ["--annotations", str(tiny_dataset.annotations), "--step-ms", "5", "--workers", "0", "--batch-size", "2"]
    assert main([*command, "--fail-below", "0.9"]) == 2
    assert "--against FILE" in capsys.readouterr().err
    assert main([*command, "--against", str(before)]) == 2
    assert "found nothing at" in capsys.readouterr().err
    before.write_text(json.dumps(BEFORE | {"images_per_second": 1e6}))
    assert main([*command, "--against", str(before), "--fail-below", "0.9"]) == 3
    told = capsys.readouterr()
    assert "1000000.0 →" in told.out
    assert "--fail-below" in told.err
