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


def draw_png(colour):
    picture = io.BytesIO()
    Image.new("RGBA", (64, 32), colour).save(picture, "png")
    return picture.getvalue()


RED = draw_png("red")
CLEAR = draw_png((0, 0, 0, 0))


@pytest.fixture
def demo(tmp_path):
    """An executed demo: two figures in one notebook, one in the next."""
    # At the top, this import would take two seconds of every process that collects tests.
    import nbformat
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


def write_notebook(path, *outputs, cell_id="figure", metadata=None):
    """A notebook with one cell that shows these outputs."""
    import nbformat
    import nbformat.v4 as v4

    made = [v4.new_output("display_data", data=data, metadata=metadata or {}) for data in outputs]
    cell = v4.new_code_cell("show()", outputs=made, id=cell_id)
    nbformat.write(v4.new_notebook(cells=[v4.new_markdown_cell("# 1. A"), cell]), path)
    return path


def test_an_animation_is_no_slide(demo):
    html = animate_simulation(simulate(workers=7, load_s=2.0, step_s=0.1)).data
    assert find_slides(write_notebook(demo / "03_c.ipynb", {"text/html": html})) == []


def test_a_tall_figure_is_cut_between_its_rows(tmp_path):
    tall = Image.new("RGB", (200, 900), "white")
    rows = (10, 240, 470, 700)
    for top in rows:
        tall.paste("red", (0, top, 200, top + 150))
    data = io.BytesIO()
    tall.save(data, "png")
    picture = {"image/png": base64.b64encode(data.getvalue()).decode()}
    write_notebook(tmp_path / "01_a.ipynb", picture)
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
    data = io.BytesIO()
    Image.new("RGB", (600, 60), "red").save(data, "png")
    picture = {"image/png": base64.b64encode(data.getvalue()).decode()}
    path = tmp_path / "01_a.ipynb"
    words = {"image/png": {"alt": "The step waits. plain loop, 96 %; make_loader, 4 %"}}
    [slide] = find_slides(write_notebook(path, picture, metadata=words))
    assert slide.words == ("The step waits.", "plain loop, 96 %", "make_loader, 4 %")
    [with_words, _] = write_slides(tmp_path, tmp_path / "with")
    write_notebook(path, picture)
    [without, _] = write_slides(tmp_path, tmp_path / "without")
    below = (0, 400, 1500, 800)
    with Image.open(with_words) as captioned, Image.open(without) as silent:
        assert captioned.convert("L").crop(below).getextrema()[0] < 100
        assert silent.convert("L").crop(below).getextrema()[0] == 255


def test_the_chart_of_receipts_is_on_no_slide(tmp_path):
    picture = {"image/png": base64.b64encode(RED).decode()}
    assert find_slides(write_notebook(tmp_path / "05_a.ipynb", picture, cell_id="receipt")) == []
    assert len(find_slides(write_notebook(tmp_path / "05_a.ipynb", picture, cell_id="bars"))) == 1


def test_no_demo_is_said(tmp_path, capsys):
    with pytest.raises(ColabUtilsError, match="Run make demo first"):
        write_slides(tmp_path, tmp_path / "slides")
    (tmp_path / "01_a.ipynb").write_text(json.dumps({"cells": []}))
    assert main(["--demo", str(tmp_path), "--output", str(tmp_path / "slides")]) == 2
    assert "There are no executed notebooks" in capsys.readouterr().err
    assert not (tmp_path / "slides").exists()
