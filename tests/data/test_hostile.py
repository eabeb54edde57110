"""Files that somebody made to break a program, and odd ones that nobody meant so: one line,
seconds, little memory.
"""

from __future__ import annotations

import base64
import os
import re
import subprocess
import sys
from pathlib import Path
from xml.dom import minidom

import pytest
from PIL import Image, TiffImagePlugin

from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import write_check
from tests.coco_files import CocoFiles
from tests.pictures import make_chunk, make_png, save

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(tmp_path):
    """One image of 32 x 24 pixels with one square."""
    files = CocoFiles(tmp_path)
    files.add_image(Image.effect_noise((32, 24), 90).convert("RGB"), "0.png")
    files.add_object(1, [2, 2, 10, 8])
    return files


def draw_page(files):
    """Return the report, and the text of its page, whose pictures must be whole."""
    report = files.check()
    output = files.images.parent / "page.html"
    page = write_check(report, files.images, files.annotations, output).read_text()
    for drawing in re.findall('base64,([^"]+)', page):
        minidom.parseString(base64.b64decode(drawing))
    return report, page


def test_a_page_without_any_class(files):
    files.coco.update(annotations=[], categories=[])
    assert draw_page(files)[0].ok


def test_a_giant_image_that_is_not_there_is_drawn_grey(files):
    files.coco["images"][0].update(file_name="no.png", width=100_000, height=100_000)
    assert "no.png" in draw_page(files)[1]


@pytest.mark.parametrize(
    "name", ["\ud800\x00\x1b[2J\uffff", "car (1)\n  9 x fake problem", 999 * "x"]
)
def test_odd_class_names_are_shown_as_text(files, name):
    files.coco["categories"][0]["name"] = name
    # A second object makes the check draw the image.
    files.add_object(1, [2, 2, 10, 8])
    report, page = draw_page(files)
    assert str(report).replace("\n", "").isprintable()
    assert "  9 x fake" not in str(report).splitlines()
    assert len(page) < 500_000


def test_odd_file_names_are_shown_as_text(files):
    files.coco["images"][0]["file_name"] = "0\x1b\uffff.png"
    assert "missing image" in draw_page(files)[1]


def test_a_folder_whose_name_no_json_holds(files):
    odd = os.fsencode(files.images) + b"/\xff"
    os.mkdir(odd)
    os.rename(files.images / "0.png", odd + b"/0.png")
    files.coco["images"][0]["file_name"] = "train/0.png"
    assert r"\udcff/0.png" in draw_page(files)[1]
    # The name stays as it was. The file is found by its base name.
    assert files.repair().ok
    assert "train/0.png" in files.repaired.read_text()


@pytest.mark.parametrize("kind", ["bit", "profile"])
def test_what_pillow_would_not_write_costs_no_image(files, kind):
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
    (files.images / "0.png").write_bytes(data)
    assert files.check().images == 1
    written = files.write()
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
def test_files_that_no_training_reads_are_found(files, data, message):
    (files.images / "0.png").write_bytes(data)
    report = files.check(deep=True)
    [problem] = [problem for problem in report.problems if problem.kind == "bad image"]
    assert message in str(problem)
    with pytest.raises(ColabUtilsError, match=message):
        files.write()


MEMORY = """
import re, resource, sys
import json
from tests.coco_files import CocoFiles
from tests.data.test_hostile import draw_page
from pathlib import Path
def read_peak():
    # ru_maxrss keeps the parent's.
    return int(re.search("VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1])
files = CocoFiles(Path(sys.argv[1]))
files.coco = json.loads(files.annotations.read_text())
imports = read_peak()
draw_page(files)
children = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
print((max(read_peak(), children) - imports) / 1e6)
"""


def test_a_page_takes_little_memory(files):
    """Many outlines took gigabytes; a file of zeros was read as a whole to name what it is."""
    files.coco["images"].clear()
    files.add_image(Image.new("RGB", (640, 640)), "0.png")
    corners = [(x, y) for x in range(0, 624, 32) for y in range(0, 512, 30)]
    for x, y in [*corners, corners[0]]:
        files.add_object(1, [x, y, 9, 9])
    files.add_image(Image.new("L", (32, 24)), "zeros.png")
    os.truncate(files.images / "zeros.png", 0)
    os.truncate(files.images / "zeros.png", 390_000_000)
    files.save()
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = [sys.executable, "-c", MEMORY, files.images.parent]
    done = subprocess.run(
        run, env=environment, capture_output=True, text=True, check=True, timeout=120
    )
    print(done.stdout)
    assert float(done.stdout) < 0.7
