"""Slides of an executed demo: each figure on a page of its own, as a PNG file and in one PDF."""

from __future__ import annotations

import base64
import io
import itertools
import json
import re
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from colab_utils.errors import ColabUtilsError
from tools.command import parse_folders, print_result

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Slide", "find_slides", "main", "write_slides"]

# A projector shows 16:9.
_PAGE_INCHES = (13.333, 7.5)
_PNG_DPI = 120
# A chart of receipts joins what was measured in different scenes.
_LEFT_OUT = {"receipt"}
# Height over width: what is taller is cut into pages, what is flatter has words below.
_TALLEST = 1.1
_FLATTEST = 0.36
_PART = 0.85
_LINES = 7


@dataclass(frozen=True)
class Slide:
    """One figure of an executed notebook."""

    name: str
    """Of its PNG file, without ending: the notebook, the figure's number, its section."""
    title: str
    """The notebook's title and the section that the figure stands in."""
    png: bytes
    words: tuple[str, ...] = ()
    """What the figure says, a line each: its alternative text, or what its cell printed."""


def find_slides(notebook: Path) -> list[Slide]:
    """Return the figures of an executed notebook, in order.

    Args:
        notebook: an ``.ipynb`` file with outputs.
    """
    slides: list[Slide] = []
    # The title is that of the first level, the section that of the second.
    headings = {"#": "", "##": ""}
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        if cell["cell_type"] == "markdown":
            for marks, heading in re.findall(
                r"^(#{1,2}) +(.+?)(?: *[(][0-9]+ minutes?[)])?$",
                "".join(cell["source"]),
                re.MULTILINE,
            ):
                headings["##"] = ""
                headings[marks] = heading
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            if "image/png" not in data or cell.get("id") in _LEFT_OUT:
                continue
            png = base64.b64decode("".join(data["image/png"]))
            slug = re.sub(r"[^a-z0-9]+", "-", headings["##"].lower()).strip("-")[:48]
            name = f"{notebook.stem}-{len(slides) + 1:02d}-{slug}".rstrip("-")
            heading = " · ".join(filter(None, headings.values()))
            slides.append(Slide(name, heading, png, _find_words(cell, output)))
    return slides


def _find_words(cell: Mapping[str, Any], output: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the alternative text of a figure in lines, or what its cell printed."""
    known = output.get("metadata", {}).get("image/png", {}).get("alt", "")
    lines = re.split(r"; |(?<=[.]) ", known)
    if not known:
        printed = [each for each in cell["outputs"] if each.get("name") == "stdout"]
        lines = "".join("".join(each["text"]) for each in printed).splitlines()
    return tuple(line.strip() for line in lines if line.strip())


def write_slides(demo: Path, output: Path) -> list[Path]:
    """Write the figures of a demo as PNG files and as ``slides.pdf``; those of an earlier call are
    replaced.

    Args:
        demo: the folder with the executed notebooks, as `make demo` leaves it.
        output: the folder for the slides; made where it is not.

    Returns:
        The PNG files in order, then the PDF.

    Raises:
        ColabUtilsError: there is no executed notebook with a figure.
    """
    notebooks = sorted(demo.glob("[0-9][0-9]_*.ipynb"))
    slides = []
    for path in notebooks:
        for slide in find_slides(path):
            slides += _split_tall(slide)
    if not slides:
        raise ColabUtilsError(
            f"There are no executed notebooks with figures in {demo}. Run make demo first."
        )
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("[0-9][0-9]_*-[0-9][0-9]*.png"):
        old.unlink()
    return _write_pages(slides, output)


def _split_tall(slide: Slide) -> list[Slide]:
    """Return a figure that is taller than a page as several, cut where it is emptiest."""
    with Image.open(io.BytesIO(slide.png)) as picture:
        whole = _flatten(picture)
    width, height = whole.size
    if height <= _TALLEST * width:
        return [slide]
    cuts = _find_cuts(whole)
    count = len(cuts) - 1
    parts = []
    for number, (top, bottom) in enumerate(itertools.pairwise(cuts), start=1):
        data = io.BytesIO()
        whole.crop((0, top, width, bottom)).save(data, "png")
        title = f"{slide.title} ({number} of {count})"
        parts.append(
            replace(slide, name=f"{slide.name}-{number}", title=title, png=data.getvalue())
        )
    return parts


def _find_cuts(picture: Image.Image) -> list[int]:
    """Return the rows at which a tall figure is cut: in its widest white bands, as late as a page
    allows.
    """
    width, height = picture.size
    has_ink = (np.asarray(picture.convert("L")) < 250).any(1)
    edges = np.flatnonzero(np.diff(has_ink, prepend=True, append=True))
    bands = []
    for start, end in edges.reshape(-1, 2).tolist():
        # The margins are no place to cut.
        if start > 0 and end < height:
            bands.append((end - start, (start + end) // 2))
    widest = max((size for size, _ in bands), default=0)
    candidates = [middle for size, middle in bands if 2 * size > widest]
    cuts = [0]
    for place, middle in enumerate(candidates):
        following = [*candidates, height][place + 1]
        if following - cuts[-1] > _PART * width:
            cuts.append(middle)
    return [*cuts, height]


def _flatten(picture: Image.Image) -> Image.Image:
    """Return a picture on white, where it is transparent."""
    white = Image.new("RGBA", picture.size, "white")
    white.alpha_composite(picture.convert("RGBA"))
    return white.convert("RGB")


def _write_pages(slides: Sequence[Slide], output: Path) -> list[Path]:
    from matplotlib.backends.backend_pdf import PdfPages

    pdf = output / "slides.pdf"
    paths = []
    with PdfPages(pdf, metadata={"Title": "Data loading for Mask R-CNN: the figures"}) as pages:
        for slide in slides:
            page = _draw_page(slide)
            pages.savefig(page)
            paths.append(output / f"{slide.name}.png")
            page.savefig(paths[-1], dpi=_PNG_DPI)
    return [*paths, pdf]


def _draw_page(slide: Slide) -> Figure:
    from matplotlib.figure import Figure

    page = Figure(figsize=_PAGE_INCHES, facecolor="white")
    page.text(0.04, 0.94, slide.title, fontsize=24, va="center", parse_math=False)
    with Image.open(io.BytesIO(slide.png)) as opened:
        picture = _flatten(opened)
    share = 0.84
    if picture.height < _FLATTEST * picture.width:
        # The figure takes the width, and what it says in words the rest.
        share = 0.92 * picture.height / picture.width * _PAGE_INCHES[0] / _PAGE_INCHES[1]
        lines = []
        for word in slide.words:
            lines += textwrap.wrap(word, 88, subsequent_indent="   ")
        room = 0.84 - share
        for number, line in enumerate(lines[:_LINES]):
            height = 0.85 - share - (number + 1) * room / (_LINES + 1)
            page.text(0.05, height, line, fontsize=18, va="center", parse_math=False)
    axes = page.add_axes((0.04, 0.88 - share, 0.92, share))
    axes.set_axis_off()
    # Its own pixels, not the page's.
    axes.imshow(picture, interpolation="none")
    return page


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the slides from a terminal; returns the exit status."""
    demo, output = parse_folders("slides", __doc__, arguments, output="runs/slides")

    def write() -> str:
        *pictures, pdf = write_slides(demo, output)
        return f"{len(pictures)} slides in {output}, a page for each in {pdf}"

    return print_result(write)


if __name__ == "__main__":
    sys.exit(main())
