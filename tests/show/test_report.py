"""The receipt: self-contained, complete, honest about what is emulated, and safe to open."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace

import pytest

from colab_utils.course.questions import collect_answers
from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import tabulate_comparison, write_receipt
from tests.comparisons import lose, make_comparison, make_timing
from tests.judged_pages import Page


def read(folder, *rows, **settings):
    """The words of a receipt."""
    page = write_receipt(make_comparison(*rows, **settings), folder)
    return " ".join(Page(page).text.split())


def test_the_receipt_holds_everything_itself(tmp_path):
    path = write_receipt(make_comparison(), tmp_path / "receipt")
    page = Page(path)
    assert path == tmp_path / "receipt" / "index.html"
    # The page loads the bars and the first seconds.
    assert len(page.loads) == 2
    assert all(source.startswith("data:image/svg+xml;base64,") for source in page.loads)
    assert "script" not in page.tags
    assert page.links == ["comparison.json"]
    assert sorted(file.name for file in path.parent.iterdir()) == ["comparison.json", "index.html"]
    html = path.read_text(encoding="utf-8")
    # The finding is the first thing that is read.
    assert re.search(r"<main>\s*<h1[^>]*>The step waits 96% → 4% of the time, ", html)
    # Tables and charts scroll.
    assert html.count("<table") == len(re.findall(r"<div[^>]*overflow:auto[^>]*><table", html)) == 1
    assert html.count("<img") == html.count('<div class="scroll chart"><img') == 2


def test_the_receipt_says_what_is_slowed_and_emulated_and_on_which_machine(tmp_path):
    text = read(tmp_path)
    machine = make_comparison().machine
    for part in (
        "The training step is emulated 100 ms",
        "Drive is a slowed folder",
        "606 ms per file",
        machine.cpu,
        machine.software,
        f"Machine: {machine}.",
        "median of 3 repeats, taken in turns",
    ):
        assert part in text
    assert "busy with" not in text
    real = read(tmp_path, step="real", drive="as it is, not slowed")
    assert "emulated" not in real
    assert "slowed folder" not in real


def test_every_strategy_and_every_figure_is_in_the_table():
    table = tabulate_comparison(asdict(make_comparison()))
    assert len(table.rows) == 5
    assert dict(zip(table.headings, table.rows[-1], strict=True)) == {
        "": "make_loader on shards",
        "images/s": "38.4",
        "waits, %": "4",
        "first batch, s": "1.5",
        "CPU, ms": "20",
        "same samples": "yes",
    }


def test_a_strategy_that_failed_keeps_its_row(tmp_path):
    lost = lose("packed", note="the disk is full", difference="not checked")
    assert "no the disk is full" in read(tmp_path, "sequential", lost)


def test_all_text_is_escaped(tmp_path):
    evil = "<script>alert('x')</script>"
    words = dict.fromkeys(("title", "idea", "difference", "note"), evil)
    row = make_timing(evil, comparable=False, **words)
    comparison = make_comparison(row, note=evil, drive=evil, step=evil)
    comparison = replace(
        comparison,
        dataset={**comparison.dataset, "name": evil},
        machine=replace(comparison.machine, cpu=evil, gpu=evil),
    )
    assert "<script" not in write_receipt(comparison, tmp_path).read_text(encoding="utf-8")


def test_the_json_has_the_same_numbers_and_the_answers_of_its_learner(tmp_path):
    answers = collect_answers({"waits_percent": "90"}, {"waits_percent": 96.0})
    write_receipt(make_comparison(), tmp_path, questions=answers)
    content = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert tabulate_comparison(content) == tabulate_comparison(asdict(make_comparison()))
    assert content["questions"] == answers


def test_a_folder_that_cannot_be_is_said(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        read(tmp_path / "file" / "receipt")
