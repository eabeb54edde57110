"""The receipt: self-contained, complete, honest about what is emulated, and safe to open."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from html.parser import HTMLParser

import pytest

from colab_utils.course.questions import collect_answers
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import describe_busy
from colab_utils.show.report import tabulate_comparison, write_receipt


class Reader(HTMLParser):
    """Collects what a page loads and says."""

    def __init__(self, page):
        super().__init__()
        self.loads = []
        self.links = []
        self.text = ""
        self.tags = []
        self.feed(page.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append(tag)
        self.loads += [attributes[key] for key in ("src", "srcset", "data") if key in attributes]
        self.loads += [attributes["href"]] if tag == "link" else []
        self.links += [attributes["href"]] if tag == "a" else []

    def handle_data(self, data):
        self.text += data


def read(comparison, folder):
    return Reader(write_receipt(comparison, folder)).text


def test_the_receipt_holds_everything_itself(tmp_path, course, make_comparison):
    page = write_receipt(make_comparison(*course), tmp_path / "receipt")
    reader = Reader(page)
    assert page == tmp_path / "receipt" / "index.html"
    # The page loads the bars and the first seconds.
    assert len(reader.loads) == 2
    assert all(source.startswith("data:image/svg+xml;base64,") for source in reader.loads)
    assert "script" not in reader.tags
    assert reader.links == ["comparison.json"]
    assert sorted(path.name for path in page.parent.iterdir()) == ["comparison.json", "index.html"]


def test_the_finding_is_the_first_thing_that_is_read(tmp_path, course, make_comparison):
    page = write_receipt(make_comparison(*course), tmp_path).read_text(encoding="utf-8")
    first = re.search(r"<main>\s*<h1[^>]*>([^<]*)</h1>", page)
    assert first
    assert (
        first[1]
        == "The step waits 96% → 4% of the time, and trains 24 times as many images/s as the "
        "plain loop"
    )


def test_titles_are_text_and_tables_scroll(tmp_path, course, make_comparison):
    page = write_receipt(make_comparison(*course), tmp_path).read_text(encoding="utf-8")
    assert page.count("<table") == len(re.findall(r"<div[^>]*overflow:auto[^>]*><table", page)) == 1
    assert page.count("<img") == page.count('<div class="scroll chart"><img') == 2
    for title in ("The step waits 96%", "Batches in the first"):
        assert re.search(rf"<h[12][^>]*>{title}", page), title


def test_the_receipt_says_what_is_slowed_and_emulated_and_on_which_machine(
    tmp_path, course, make_comparison
):
    comparison = make_comparison(*course)
    text = read(comparison, tmp_path)
    assert "The training step is emulated 100 ms" in text
    assert "Drive is a slowed folder" in text
    assert "606 ms per file" in text
    assert comparison.machine.cpu in text
    assert comparison.machine.software in text
    assert f"Machine: {comparison.machine}." in " ".join(text.split())
    assert "median of 3 repeats, taken in turns" in " ".join(text.split())
    assert "busy with" not in text


def test_the_receipt_says_that_its_machine_was_busy(tmp_path, course, make_comparison):
    busy = describe_busy(100, 250)
    page = write_receipt(make_comparison(*course, busy=busy), tmp_path).read_text(encoding="utf-8")
    headings = re.findall(r"<h[12][^>]*>([^<]*)</h[12]>", page)
    assert len([heading for heading in headings if heading.startswith(busy)]) == 2
    assert f'<p class="note">{busy}</p>' in page


def test_a_real_step_on_a_real_drive_carries_no_such_note(tmp_path, course, make_comparison):
    text = read(make_comparison(*course, step="real", drive="as it is, not slowed"), tmp_path)
    assert "emulated" not in text
    assert "slowed folder" not in text


def test_every_strategy_and_every_figure_is_in_the_table(course, make_comparison):
    table = tabulate_comparison(asdict(make_comparison(*course)))
    rows = [dict(zip(table.headings, row, strict=True)) for row in table.rows]
    assert [row[""] for row in rows] == [
        "plain loop",
        "2 workers",
        "32 streams",
        "shards on SSD",
        "make_loader on shards",
    ]
    assert rows[-1] == {
        "": "make_loader on shards",
        "images/s": "38.4",
        "waits, %": "4",
        "first batch, s": "1.5",
        "CPU, ms": "20",
        "same samples": "yes",
    }


def test_a_strategy_that_failed_keeps_its_row(tmp_path, course, lose, make_comparison):
    lost = lose(course[1], note="the disk is full", difference="not checked")
    text = read(make_comparison(course[0], lost), tmp_path)
    assert "no the disk is full" in text


def test_all_text_is_escaped(tmp_path, make_timing, make_comparison):
    evil = "<script>alert('x')</script>"
    row = make_timing(
        evil,
        title=evil,
        idea=evil,
        difference=evil,
        comparable=False,
        note=evil,
    )
    comparison = make_comparison(row, note=evil, drive=evil, step=evil)
    comparison = replace(comparison, dataset={**comparison.dataset, "name": evil})
    comparison = replace(comparison, machine=replace(comparison.machine, cpu=evil, gpu=evil))
    page = write_receipt(comparison, tmp_path)
    assert "script" not in Reader(page).tags
    assert "<script" not in page.read_text(encoding="utf-8")


def test_the_json_has_the_same_numbers(tmp_path, course, make_comparison):
    write_receipt(make_comparison(*course), tmp_path)
    content = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert [row["images_per_second"] for row in content["strategies"]] == [1.6, 3.2, 20, 32, 38.4]
    assert content["machine"]["cores"] >= 1
    assert tabulate_comparison(content) == tabulate_comparison(asdict(make_comparison(*course)))


def test_a_receipt_carries_the_answers_of_its_learner(tmp_path, course, make_comparison):
    answers = collect_answers({"waits_percent": "90"}, {"waits_percent": 96.0})
    write_receipt(make_comparison(*course), tmp_path, questions=answers)
    content = json.loads((tmp_path / "comparison.json").read_text(encoding="utf-8"))
    assert content["questions"] == answers


def test_writing_again_replaces_the_page(tmp_path, course, make_comparison):
    write_receipt(make_comparison(course[0]), tmp_path)
    page = write_receipt(make_comparison(course[4]), tmp_path)
    assert "make_loader" in page.read_text(encoding="utf-8")
    assert not [path for path in tmp_path.iterdir() if re.search(r"tmp|part", path.name)]


def test_a_folder_that_cannot_be_is_said(tmp_path, course, make_comparison):
    (tmp_path / "file").touch()
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        write_receipt(make_comparison(course[0]), tmp_path / "file" / "receipt")
