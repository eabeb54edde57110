"""Preprocess beside its plan and the bare calls, on a dozen tiny images."""

import pytest

from benchmarks import preparing


def test_preprocess_beside_its_plan_and_the_bare_calls(tiny_dataset, tmp_path):
    row = preparing.time_preprocess(tiny_dataset, "shrink", 2, tmp_path)
    assert row["bytes"] == pytest.approx(row["planned bytes"], rel=0.2)
    assert min(row.values()) > 0
    text = preparing.tabulate_runs([{"name": "shrink, 2 processes", "repeat": 0, **row}])
    assert "planned / made" in text
