"""The command for a GPU, tried out on the CPU: it measures all that it names, and writes its
table.
"""

from __future__ import annotations

import json

import pytest

from benchmarks import gpu
from benchmarks.gpu import MARKS, main, tabulate_results, write_table
from colab_utils.errors import ColabUtilsError
from colab_utils.sample_data import make_dataset
from tests.tiny_model import TINY_MODEL


def test_every_measurement_runs(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.setattr(
        gpu, "time_steps", lambda model, batches, device, changes: {"step_ms": 10.0 - len(changes)}
    )
    small = {"n": 8, "width": 96, "height": 80, "workers": 1}
    monkeypatch.setattr(gpu, "make_dataset", lambda folder, n: make_dataset(folder, **small))
    command = [
        "--json",
        str(tmp_path / "found.json"),
        "--work",
        str(tmp_path),
        "--device",
        "cpu",
        "--min-size",
        "64",
    ]
    assert main([*command, "--models", TINY_MODEL, "--batch-sizes", "2"]) == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert {row["what"] for row in found["rows"]} == {
        "step",
        "300 objects an image",
        "float16, as a T4",
        "real data",
        "evaluation",
    }
    assert not found["left_out"]
    assert "of a cached batch" in capsys.readouterr().out


def test_what_does_not_fit_into_its_minutes_is_named(tmp_path, monkeypatch, one_thread):
    monkeypatch.setattr(gpu, "make_shards", lambda folder, images: None)
    path = tmp_path / "found.json"
    main(
        [
            "--json",
            str(path),
            "--work",
            str(tmp_path),
            "--device",
            "cpu",
            "--models",
            TINY_MODEL,
            "--minutes",
            "0",
        ]
    )
    assert len(json.loads(path.read_text())["left_out"]) > 10


def test_the_table_stands_beside_the_references(tmp_path):
    row = {"what": "step", "model": "v1", "batch_size": 8}
    rows = [
        row | {"step": gpu.REFERENCES, "step_ms": 90.0},
        row | {"step": "+ folded norms", "step_ms": 30.0},
    ]
    text = tabulate_results(rows)
    assert "3.00" in text
    path = tmp_path / "README.md"
    path.write_text(f"before\n{MARKS[0]}\nold\n{MARKS[1]}\nafter\n")
    write_table(text, path)
    assert path.read_text() == f"before\n{MARKS[0]}\n{text}\n{MARKS[1]}\nafter\n"
    path.write_text("no marks")
    with pytest.raises(ColabUtilsError, match="expected the marks"):
        write_table(text, path)
    assert all(mark in gpu.README.read_text() for mark in MARKS)
