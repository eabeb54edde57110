"""Receipts of many machines: one line and one bar for each."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from colab_utils.__main__ import main
from colab_utils.course.loader_exercise import LoaderGrade
from colab_utils.course.questions import (
    OWN_LOADER,
    plot_class,
    read_receipts,
    write_class,
)
from colab_utils.errors import ColabUtilsError
from tests.comparisons import make_comparison, read_bars, read_texts, read_title, to_content


@pytest.fixture
def receipts(tmp_path):
    """Two machines: one where all steps helped, one where only workers were compared."""
    paths = [tmp_path / "anna.json", tmp_path / "ben" / "comparison.json"]
    paths[1].parent.mkdir()
    for path, rows in zip(paths, ((), ("sequential", "dataloader")), strict=True):
        path.write_text(json.dumps(to_content(make_comparison(*rows))))
    return paths


def add_own_loader(path, times):
    """Add what `LoaderGrade.to_answer` gives to the answers of a receipt."""
    content = json.loads(path.read_text())
    content["questions"] = {OWN_LOADER: LoaderGrade({}, times).to_answer()}
    path.write_text(json.dumps(content))


def test_many_receipts_in_one_chart(receipts):
    figure = plot_class(read_receipts(receipts[::-1]))
    figure.canvas.draw()
    # The fastest comes first.
    bars = {name.partition(":")[0]: length for name, length in read_bars(figure).items()}
    assert [*bars.items()] == [("1. anna", 24), ("2. ben", 2)]
    texts = read_texts(figure)
    assert "96% → 4%" in texts[0]
    assert "96% → 92%" in texts[1]
    assert read_title(figure) == ("2 receipts: training is 13 times as fast (median)")


def test_the_command_draws_a_class(receipts, tmp_path, capsys):
    words = ["compare", "--against", *map(str, receipts), "--report", str(tmp_path / "class")]
    assert main([*words, "--json", "-"]) == 0
    assert [row[0] for row in json.loads(capsys.readouterr().out)["rows"]] == ["anna", "ben"]
    assert (tmp_path / "class" / "receipts.png").read_bytes().startswith(b"\x89PNG")


def test_the_class_sheet_says_whose_own_loader_won(receipts, tmp_path):
    add_own_loader(receipts[0], None)
    add_own_loader(receipts[1], 20.34)
    table = write_class(receipts, tmp_path / "class")
    assert [row[-1] for row in table.rows] == ["–", "20.3"]
    title = read_title(plot_class(read_receipts(receipts)))
    assert title.endswith("The fastest own loader: ben, 20 times the plain loop")


def test_a_line_for_the_class_sheet(tmp_path):
    comparison = make_comparison()
    machine = replace(comparison.machine, gpu="", cores=2)
    path = tmp_path / "anna.json"
    path.write_text(json.dumps(to_content(replace(comparison, machine=machine))))
    assert read_receipts([path]) == [
        {
            "receipt": "anna",
            "machine": "no GPU, 2 cores",
            "step": "emulated 100 ms",
            "drive": "bad: 606 ms per file",
            "before": "plain loop",
            "waits before": 0.96,
            "after": "make_loader on shards",
            "waits after": 0.04,
            "times as fast": 24.0,
            "own loader": None,
        }
    ]
    path.write_text(json.dumps(to_content(replace(comparison, busy="This machine was busy."))))
    assert read_receipts([path])[0]["machine"].endswith(" cores, busy with other work")


def test_what_is_no_receipt_is_named(tmp_path, receipts):
    (tmp_path / "odd.json").write_text('{"strategies": [{"name": 1}]}')
    with pytest.raises(ColabUtilsError, match=r"odd\.json is no receipt"):
        read_receipts([receipts[0], tmp_path / "odd.json"])
    with pytest.raises(ColabUtilsError, match=r"missing\.json is no receipt"):
        read_receipts([tmp_path / "missing.json"])
