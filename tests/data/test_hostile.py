"""Files that somebody made to break a program, and odd ones that nobody meant so: one line,
seconds, little memory.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.dom import minidom

import pytest
from PIL import Image, TiffImagePlugin

from colab_utils.data.checks import check_dataset
from colab_utils.data.repair import repair_annotations
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.write import write_shards
from colab_utils.show.report import write_check
from tests.coco_files import make_object
from tests.pictures import make_chunk, make_png, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def coco(tmp_path):
    """One image of 32 x 24 pixels with one square."""
    (tmp_path / "images").mkdir()
    Image.effect_noise((32, 24), 90).convert("RGB").save(tmp_path / "images/0.png")
    return {
        "images": [{"id": 1, "file_name": "0.png", "width": 32, "height": 24}],
        "annotations": [make_object(1, 1, [2, 2, 10, 8])],
        "categories": [{"id": 1, "name": "car"}],
    }


def write(folder):
    return write_shards(folder / "images", folder / "a.json", shards=folder / "shards", workers=1)


def check(folder, coco, **options):
    (folder / "a.json").write_text(coco if isinstance(coco, str) else json.dumps(coco))
    return check_dataset(folder / "images", folder / "a.json", **options)


def draw_page(folder, coco):
    """Return the report, and the text of its page, whose pictures must be whole."""
    report = check(folder, coco)
    page = write_check(
        report, folder / "images", folder / "a.json", folder / "page.html"
    ).read_text()
    for drawing in re.findall('base64,([^"]+)', page):
        minidom.parseString(base64.b64decode(drawing))
    return report, page


def test_a_page_without_any_class(tmp_path, coco):
    assert draw_page(tmp_path, {**coco, "annotations": [], "categories": []})[0].ok


def test_a_giant_image_that_is_not_there_is_drawn_grey(tmp_path, coco):
    coco["images"][0].update(file_name="no.png", width=100_000, height=100_000)
    assert "no.png" in draw_page(tmp_path, coco)[1]


@pytest.mark.parametrize(
    "name", ["\ud800\x00\x1b[2J\uffff", "car (1)\n  9 x fake problem", 999 * "x"]
)
def test_odd_class_names_are_shown_as_text(tmp_path, coco, name):
    coco["categories"][0]["name"] = name
    # A second object makes the check draw the image.
    coco["annotations"].append({**coco["annotations"][0], "id": 2})
    report, page = draw_page(tmp_path, coco)
    assert str(report).replace("\n", "").isprintable()
    assert "  9 x fake" not in str(report).splitlines()
    assert len(page) < 500_000


def test_odd_file_names_are_shown_as_text(tmp_path, coco):
    coco["images"][0]["file_name"] = "0\x1b\uffff.png"
    assert "missing image" in draw_page(tmp_path, coco)[1]


def test_a_folder_whose_name_no_json_holds(tmp_path, coco):
    odd = os.fsencode(tmp_path / "images") + b"/\xff"
    os.mkdir(odd)
    os.rename(tmp_path / "images/0.png", odd + b"/0.png")
    coco["images"][0]["file_name"] = "train/0.png"
    assert r"\udcff/0.png" in draw_page(tmp_path, coco)[1]
    with pytest.raises(ColabUtilsError, match="1 x unsafe file_name"):
        repair_annotations(tmp_path / "images", tmp_path / "a.json", output=tmp_path / "new.json")
    assert not (tmp_path / "new.json").exists()


@pytest.mark.parametrize("kind", ["bit", "profile"])
def test_what_pillow_would_not_write_costs_no_image(tmp_path, coco, kind):
    """A scan with a transparent colour, and a TIFF whose colour profile is text: both stopped the
    whole run.
    """
    if kind == "bit":
        data = make_png((32, 24), 1, 0, [bytes(4)] * 24, make_chunk(b"tRNS", b"\0\0"))
    else:
        entries = TiffImagePlugin.ImageFileDirectory_v2()
        entries[34675] = "abc"
        entries.tagtype[34675] = 2
        data = save(Image.new("RGB", (32, 24)), "TIFF", tiffinfo=entries)
    (tmp_path / "images/0.png").write_bytes(data)
    check(tmp_path, coco)
    written = write(tmp_path)
    assert (written.images, written.skipped) == (1, ())


@pytest.mark.parametrize(
    ("data", "message"),
    [
        # Pillow would start gs for this.
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 24\n{} loop\n", "PostScript"),
        (
            make_png(
                (32, 24),
                8,
                3,
                [b"\t" * 32] * 24,
                make_chunk(b"PLTE", bytes(6)),
                make_chunk(b"tRNS", bytes(300)),
            ),
            "not a complete image: palette index out of range",
        ),
        (
            b"\0\0\1\0\1\0 \0\0\0\0\0\1\0\1\0 \0\0\0\x16\0\0\0"
            + make_png((32, 24), 8, 0, [bytes(32)] * 24),
            "image",
        ),
    ],
    ids=["EPS", "palette", "icon"],
)
def test_files_that_no_training_reads_are_found(tmp_path, coco, data, message):
    (tmp_path / "images/0.png").write_bytes(data)
    report = check(tmp_path, coco, deep=True)
    [problem] = [problem for problem in report.problems if problem.kind == "bad image"]
    assert message in str(problem)
    with pytest.raises(ColabUtilsError, match=message):
        write(tmp_path)


MEMORY = """
import re, resource, sys
from tests.data.test_hostile import draw_page
from pathlib import Path
draw_page(Path(sys.argv[1]), Path(sys.argv[1], "a.json").read_text())
# ru_maxrss keeps the parent's.
own = int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss) / 1e6)
"""


def test_a_page_takes_little_memory(tmp_path, coco):
    """1,300 outlines took 16 GB; a file of zeros was read as a whole to name what it is."""
    Image.new("RGB", (640, 640)).save(tmp_path / "images/0.png")
    coco["images"][0].update(width=640, height=640)
    corners = [(x, y) for x in range(0, 624, 32) for y in range(0, 512, 15)]
    coco["annotations"] = [
        make_object(n, 1, [x, y, 9, 9]) for n, (x, y) in enumerate([*corners, corners[0]])
    ]
    coco["images"].append({"id": 2, "file_name": "zeros.png", "width": 32, "height": 24})
    (tmp_path / "images/zeros.png").touch()
    os.truncate(tmp_path / "images/zeros.png", 390_000_000)
    (tmp_path / "a.json").write_text(json.dumps(coco))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", MEMORY, tmp_path]
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    assert float(done.stdout) < 1
