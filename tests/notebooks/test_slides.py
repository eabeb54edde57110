"""Slides: the figures of an executed demo, with what stands above them."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
from PIL import Image

from colab_utils.course.live import animate_simulation
from colab_utils.diagnosis.simulator import simulate
from colab_utils.errors import ColabUtilsError
from tools.slides import find_slides, main, write_slides


def picture(image):
    """What a cell shows of a picture."""
    data = io.BytesIO()
    image.save(data, "png")
    return {"image/png": base64.b64encode(data.getvalue()).decode(), "text/plain": "<Figure>"}


RED = picture(Image.new("RGB", (64, 32), "red"))
CLEAR = picture(Image.new("RGBA", (64, 32), (0, 0, 0, 0)))


def show(*outputs, cell_id="figure", metadata=None):
    """A cell that shows these outputs."""
    # At the top, this import would take two seconds of every process that collects tests.
    import nbformat.v4 as v4

    made = [v4.new_output("display_data", data=data, metadata=metadata or {}) for data in outputs]
    return v4.new_code_cell("show()", outputs=[*made, v4.new_output("stream")], id=cell_id)


def write_notebook(path, *cells):
    """A notebook of cells, some of them by their text."""
    import nbformat
    import nbformat.v4 as v4

    made = [v4.new_markdown_cell(cell) if isinstance(cell, str) else cell for cell in cells]
    nbformat.write(v4.new_notebook(cells=made), path)
    return path


@pytest.fixture
def demo(tmp_path):
    """An executed demo: two figures in one notebook, one in the next."""
    write_notebook(
        tmp_path / "01_a.ipynb",
        "# 1. Detect",
        show(CLEAR),
        "text\n\n## 3. Why $5, and how?",
        "### no",
        show(RED, cell_id="red"),
        # The chart of a class's receipts is on no slide.
        show(RED, cell_id="receipt"),
    )
    cells = ("# 2. Pack", "## Go (5 minutes)", show(RED), show(cell_id="none"))
    write_notebook(tmp_path / "02_b.ipynb", *cells)
    return tmp_path


def test_figures_are_named_by_notebook_and_section(demo):
    result = [
        (slide.name, slide.title)
        for path in sorted(demo.glob("*.ipynb"))
        for slide in find_slides(path)
    ]
    assert result == [
        ("01_a-01", "1. Detect"),
        ("01_a-02-3-why-5-and-how", "1. Detect · 3. Why $5, and how?"),
        ("02_b-01-go", "2. Pack · Go"),
    ]


def count_pages(pdf):
    return pdf.read_bytes().count(b"/Type /Page\n") + pdf.read_bytes().count(b"/Type /Page ")


def test_slides_are_pictures_of_a_page_and_one_pdf(demo, tmp_path):
    output = tmp_path / "slides"
    *pictures, pdf = write_slides(demo, output)
    assert len(pictures) == 3
    for path in pictures:
        with Image.open(path) as picture:
            assert picture.width / picture.height == pytest.approx(16 / 9, abs=0.01)
    assert pdf.read_bytes().startswith(b"%PDF")
    assert count_pages(pdf) == 3
    (output / "mine.png").touch()
    (demo / "02_b.ipynb").unlink()
    write_slides(demo, output)
    assert sorted(path.name for path in output.iterdir()) == [
        "01_a-01.png",
        "01_a-02-3-why-5-and-how.png",
        "mine.png",
        "slides.pdf",
    ]


def test_an_animation_is_no_slide(demo):
    html = animate_simulation(simulate(workers=7, load_s=2.0, step_s=0.1)).data
    assert find_slides(write_notebook(demo / "03_c.ipynb", show({"text/html": html}))) == []


def test_a_tall_figure_is_cut_between_its_rows(tmp_path):
    tall = Image.new("RGB", (200, 900), "white")
    rows = (10, 240, 470, 700)
    for top in rows:
        tall.paste("red", (0, top, 200, top + 150))
    write_notebook(tmp_path / "01_a.ipynb", "# 1. A", show(picture(tall)))
    *pictures, pdf = write_slides(tmp_path, tmp_path / "slides")
    assert len(pictures) == len(rows)
    assert count_pages(pdf) == len(rows)
    for path in pictures:
        with Image.open(path) as page:
            is_red = (np.asarray(page.convert("RGB")) == (255, 0, 0)).all(2)
        height = is_red.any(1).sum()
        # The page shows one whole row of the figure: no more of it is red, and no less.
        assert np.diff(np.flatnonzero(is_red.any(1))).max() == 1
        assert is_red.any(0).sum() / height == pytest.approx(200 / 150, abs=0.03)


def test_a_flat_figure_has_what_it_says_below_it(tmp_path):
    darkest = []
    for text in ("The step waits. plain loop, 96 %; make_loader, 4 %", ""):
        figure = show(
            picture(Image.new("RGB", (600, 60), "red")), metadata={"image/png": {"alt": text}}
        )
        [slide] = find_slides(write_notebook(tmp_path / "01_a.ipynb", "# 1. A", figure))
        assert "; ".join(slide.words) == text.replace("waits. ", "waits.; ")
        page, _ = write_slides(tmp_path, tmp_path / "slides")
        with Image.open(page) as shown:
            darkest.append(shown.convert("L").crop((0, 400, 1500, 800)).getextrema()[0])
    assert darkest[0] < 100
    assert darkest[1] == 255


def test_no_demo_is_said(tmp_path, capsys):
    with pytest.raises(ColabUtilsError, match="Run make demo first"):
        write_slides(tmp_path, tmp_path / "slides")
    (tmp_path / "01_a.ipynb").write_text(json.dumps({"cells": []}))
    assert main(["--demo", str(tmp_path), "--output", str(tmp_path / "slides")]) == 2
    assert "There are no executed notebooks" in capsys.readouterr().err
    assert not (tmp_path / "slides").exists()
