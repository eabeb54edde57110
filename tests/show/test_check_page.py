from __future__ import annotations

import json
import re
from html import escape

import pytest

from colab_utils.__main__ import main
from colab_utils.data.checks import check_dataset
from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import write_check


@pytest.fixture
def spoiled(tiny_dataset, tmp_path):
    """A hostile name, and two boxes of corners."""
    coco = json.loads(tiny_dataset.annotations.read_text())
    coco["images"][0]["file_name"] = "<script>alert(1)</script>.jpg"
    coco["categories"][0]["name"] = "<b>$x"
    for annotation in coco["annotations"][4:6]:
        annotation.update(
            segmentation=[[60, 50, 90, 50, 90, 80, 60, 80]],
            bbox=[60, 50, 90, 80],
            area=900,
        )
    (tmp_path / "a.json").write_text(json.dumps(coco))
    return tiny_dataset.images, tmp_path / "a.json"


def read_headings(page):
    return re.findall(r"<h[12][^>]*>([^<]*)</h", page)


def test_the_page_says_what_is_wrong_and_shows_it(spoiled, tmp_path):
    report = check_dataset(*spoiled)
    page = write_check(report, *spoiled, tmp_path / "new" / "page.html").read_text()
    assert read_headings(page) == [
        f"12 images, {report.annotations} annotations: 1 x missing image, 2 x box of corners",
        "What was found",
        "The images to look at first",
        f"{report.objects} objects, {len(report.classes)} classes",
    ]
    assert page.count("<img") == 1
    assert page.count("<progress") == len(report.classes)
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert escape(report.advice) in page
    # The second page replaces the first.
    write_check(report, *spoiled, tmp_path / "new" / "page.html")


def test_somebody_elses_page_stays(spoiled, tmp_path):
    (tmp_path / "mine.html").write_text("mine")
    with pytest.raises(ColabUtilsError, match="Name a new file"):
        write_check(check_dataset(*spoiled), *spoiled, tmp_path / "mine.html")


def test_a_page_says_what_was_repaired(spoiled, tmp_path, capsys):
    page = tmp_path / "page.html"
    command = (
        f"check --images {spoiled[0]} --annotations {spoiled[1]} --repair {tmp_path}/out.json "
        f"--report {page} --json {tmp_path}/out"
    )
    assert main(command.split()) == 0
    headings = read_headings(page.read_text())
    assert headings[1:3] == ["What was repaired", "What was found"]
    assert "bbox written anew" in (tmp_path / "out").read_text()
    assert str(page) in capsys.readouterr().err
