"""Slides: the figures of an executed demo, with what stands above them."""

from __future__ import annotations

import base64
import io
import json

import pytest
from PIL import Image

from colab_utils.errors import ColabUtilsError
from tools.slides import find_slides, main, write_slides


def draw_png(colour):
    picture = io.BytesIO()
    Image.new("RGBA", (64, 32), colour).save(picture, "png")
    return picture.getvalue()


RED = draw_png("red")
CLEAR = draw_png((0, 0, 0, 0))


@pytest.fixture
def demo(tmp_path):
    """An executed demo: two figures in one notebook, one in the next."""
    import nbformat  # importing it takes two seconds of every process that collects tests
    import nbformat.v4 as v4

    def show(*pngs):
        data = [
            {"image/png": base64.b64encode(png).decode(), "text/plain": "<Figure>"} for png in pngs
        ]
        outputs = [v4.new_output("display_data", data=each) for each in data]
        return v4.new_code_cell("plot()", outputs=[*outputs, v4.new_output("stream", text="done")])

    cells = [
        v4.new_markdown_cell("# 1. Detect"),
        show(CLEAR),
        v4.new_markdown_cell("text\n\n## 3. Why $5, and how?"),
    ]
    nbformat.write(
        v4.new_notebook(cells=[*cells, v4.new_markdown_cell("### no"), show(RED)]),
        tmp_path / "01_a.ipynb",
    )
    cells = [
        v4.new_markdown_cell("# 2. Pack"),
        v4.new_markdown_cell("## Go (5 minutes)"),
        show(RED),
        show(),
    ]
    nbformat.write(v4.new_notebook(cells=cells), tmp_path / "02_b.ipynb")
    return tmp_path


def test_figures_are_named_by_notebook_and_section(demo):
    found = [
        (slide.name, slide.title)
        for path in sorted(demo.glob("*.ipynb"))
        for slide in find_slides(path)
    ]
    assert found == [
        ("01_a-01", "1. Detect"),
        ("01_a-02-3-why-5-and-how", "1. Detect · 3. Why $5, and how?"),
        ("02_b-01-go", "2. Pack · Go"),
    ]


def test_slides_are_pictures_and_one_pdf(demo, tmp_path):
    output = tmp_path / "slides"
    *pictures, pdf = write_slides(demo, output)
    assert [path.read_bytes() for path in pictures] == [CLEAR, RED, RED]
    assert pdf.read_bytes().startswith(b"%PDF")
    assert pdf.read_bytes().count(b"/Type /Page\n") + pdf.read_bytes().count(b"/Type /Page ") == 3
    (output / "mine.png").touch()
    (demo / "02_b.ipynb").unlink()
    write_slides(demo, output)
    assert sorted(path.name for path in output.iterdir()) == [
        "01_a-01.png",
        "01_a-02-3-why-5-and-how.png",
        "mine.png",
        "slides.pdf",
    ]


def test_no_demo_is_said(tmp_path, capsys):
    with pytest.raises(ColabUtilsError, match="run make demo first"):
        write_slides(tmp_path, tmp_path / "slides")
    (tmp_path / "01_a.ipynb").write_text(json.dumps({"cells": []}))
    assert main(["--demo", str(tmp_path), "--output", str(tmp_path / "slides")]) == 2
    assert "found none" in capsys.readouterr().err
    assert not (tmp_path / "slides").exists()
