"""The receipt: self-contained, complete, honest about what is emulated, and safe to open."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import describe_null_results, tabulate_comparison, write_receipt


class Reader(HTMLParser):
    """Collects what a page loads and says."""

    def __init__(self, page):
        super().__init__()
        self.loads, self.links, self.text, self.tags = [], [], "", []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.loads += [attributes[key] for key in ("src", "srcset", "data") if key in attributes]
        self.loads += [attributes["href"]] if tag == "link" else []
        self.links += [attributes["href"]] if tag == "a" else []

    def handle_data(self, data):
        self.text += data


def test_the_receipt_holds_everything_itself(tmp_path, timing, fast, make_comparison):
    page = write_receipt(make_comparison(timing, fast), tmp_path / "receipt")
    reader = Reader(page)
    assert page == tmp_path / "receipt" / "index.html"
    assert reader.loads
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.loads)
    assert "script" not in reader.tags
    assert reader.links == ["comparison.json"]
    assert sorted(path.name for path in page.parent.iterdir()) == ["comparison.json", "index.html"]


def test_the_receipt_says_what_is_slowed_and_emulated_and_on_which_machine(tmp_path, timing, fast, make_comparison):
    comparison = make_comparison(timing, fast)
    text = Reader(write_receipt(comparison, tmp_path)).text
    assert "The training step is emulated 100 ms" in text
    assert "Drive is a slowed folder" in text
    assert "59 ms per file" in text
    assert comparison.machine.cpu in text
    assert f"Python {comparison.machine.python}" in text
    assert "median of 3 repeats of 8 batches" in text


def test_a_real_step_on_a_real_drive_carries_no_such_note(tmp_path, timing, make_comparison):
    real = replace(make_comparison(replace(timing, place="Google Drive")), step="real", drive="as it is, not slowed")
    text = Reader(write_receipt(real, tmp_path)).text
    assert "emulated" not in text
    assert "slowed folder" not in text


def test_every_strategy_and_every_figure_is_in_the_table(timing, fast, make_comparison):
    headings = tabulate_comparison(make_comparison(timing, fast)).headings
    rows = [dict(zip(headings, row, strict=True)) for row in tabulate_comparison(make_comparison(timing, fast)).rows]
    assert [row[""] for row in rows] == ["loose files on Drive", "packed shards on SSD"]
    assert rows[0] == {
        "": "loose files on Drive",
        "images/s": "12",
        "times as fast": "1.00 [1.00-1.00]",
        "cold images/s": "10",
        "waits": "70%",
        "first batch s": "1.5",
        "CPU ms per image": "20",
        "RAM": "300.0 MB",
        "on Drive": "8.0 MB",
        "on SSD": "0 B",
        "once, min": "0",
        "each session, min": "0",
        "epoch, min": "10",
        "paid back after, epochs": "0",
        "same samples": "yes",
        "read from": "slowed Drive folder, profile typical",
        "note": "",
    }


def test_a_strategy_that_failed_keeps_its_row(tmp_path, timing, fast, make_comparison):
    lost = replace(
        fast, images_per_second=None, wait_share=None, batch_ms_median=None, batch_ms_p95=None, first_batch_s=None,
        cpu_ms_per_image=None, repeats_images_per_second=(), comparable=False, difference="not checked",
        note="the disk is full",
    )  # fmt: skip
    text = Reader(write_receipt(make_comparison(timing, lost), tmp_path)).text
    assert "the disk is full" in text
    assert "must not be compared" in text


def test_all_text_is_escaped(tmp_path, timing, make_comparison):
    evil = "<script>alert('x')</script>"
    comparison = make_comparison(replace(timing, name=evil, idea=evil, difference=evil, comparable=False, note=evil))
    comparison = replace(comparison, note=evil, drive=evil, step=evil, dataset={**comparison.dataset, "name": evil})
    comparison = replace(comparison, machine=replace(comparison.machine, cpu=evil), no_help=(evil,))
    page = write_receipt(comparison, tmp_path)
    assert "script" not in Reader(page).tags
    assert "<script" not in page.read_text(encoding="utf-8")


def test_the_json_has_the_same_numbers(tmp_path, timing, fast, make_comparison):
    write_receipt(make_comparison(timing, fast), tmp_path)
    content = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert [row["images_per_second"] for row in content["strategies"]] == [12.0, 36.0]
    assert content["machine"]["cores"] >= 1
    assert tabulate_comparison(content) == tabulate_comparison(make_comparison(timing, fast))


def test_writing_again_replaces_the_page(tmp_path, timing, fast, make_comparison):
    write_receipt(make_comparison(timing), tmp_path)
    page = write_receipt(make_comparison(fast), tmp_path)
    assert "packed shards on SSD" in page.read_text(encoding="utf-8")
    assert not [path for path in tmp_path.iterdir() if re.search(r"tmp|part", path.name)]


def test_a_folder_that_cannot_be_is_said(tmp_path, timing, make_comparison):
    (tmp_path / "file").touch()
    with pytest.raises(ColabUtilsError, match="expected to write the receipt into"):
        write_receipt(make_comparison(timing), tmp_path / "file" / "receipt")


def test_somebody_elses_page_stays(tmp_path, timing, make_comparison):
    (tmp_path / "index.html").write_text("<title>my thesis</title>")
    with pytest.raises(ColabUtilsError, match=r"another index.html in .*nothing of yours"):
        write_receipt(make_comparison(timing), tmp_path)
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [
        ("index.html", "<title>my thesis</title>")
    ]


def test_what_did_not_help_is_said(tmp_path, timing, fast, make_comparison):
    slow = replace(fast, name="saved_tensors", ratio=0.8)
    text = Reader(write_receipt(make_comparison(timing, fast, slow), tmp_path)).text
    assert "Did not help here (less than 1.1 times as fast as loose files on Drive): .pt files on Drive." in text
    assert "The first seconds, cold" in text
    assert "When it is paid back" in text
    content = {"no_help": [], "baseline": "dataloader"}
    assert describe_null_results(content) == "Every other way was at least 1.1 times as fast as loose files on Drive."
