"""Slides of an executed demo: each figure as a PNG file, and one PDF with a figure on each page."""

from __future__ import annotations

import argparse
import base64
import io
import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from colab_utils.errors import ColabUtilsError

__all__ = ["Slide", "find_slides", "main", "write_slides"]

_PAGE_INCHES = (13.333, 7.5)  # 16:9, as a projector has it


@dataclass(frozen=True)
class Slide:
    """One figure of an executed notebook."""

    name: str
    """Of its PNG file, without ending: the notebook, the figure's number, its section."""
    title: str
    """The notebook's title and the section that the figure stands in."""
    png: bytes


def find_slides(notebook: Path) -> list[Slide]:
    """Return the figures of an executed notebook, in order.

    Args:
        notebook: an ``.ipynb`` file with outputs.
    """
    slides: list[Slide] = []
    title = ""
    section = ""
    for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            for marks, heading in re.findall(
                r"^(#{1,2}) +(.+?)(?: *[(][0-9]+ minutes?[)])?$", source, re.MULTILINE
            ):
                if marks == "#":
                    title = heading
                    section = ""
                else:
                    section = heading
        for output in cell.get("outputs", ()):
            picture = output.get("data", {}).get("image/png")
            if picture:
                slug = re.sub(r"[^a-z0-9]+", "-", section.lower()).strip("-")[:48]
                name = "-".join(
                    part for part in (notebook.stem, f"{len(slides) + 1:02d}", slug) if part
                )
                heading = " · ".join(part for part in (title, section) if part)
                slides.append(Slide(name, heading, base64.b64decode("".join(picture))))
    return slides


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
    slides = [
        slide for path in sorted(demo.glob("[0-9][0-9]_*.ipynb")) for slide in find_slides(path)
    ]
    if not slides:
        raise ColabUtilsError(
            f"expected executed notebooks with figures in {demo}, found none: run make demo first"
        )
    output.mkdir(parents=True, exist_ok=True)
    for old in output.glob("[0-9][0-9]_*-[0-9][0-9]*.png"):
        old.unlink()
    paths = [output / f"{slide.name}.png" for slide in slides]
    for path, slide in zip(paths, slides, strict=True):
        path.write_bytes(slide.png)
    _write_pdf(slides, output / "slides.pdf")
    return [*paths, output / "slides.pdf"]


def _write_pdf(slides: Sequence[Slide], path: Path) -> None:
    from matplotlib.backends.backend_pdf import PdfPages
    from matplotlib.figure import Figure
    from PIL import Image

    with PdfPages(path, metadata={"Title": "Data loading for Mask R-CNN: the figures"}) as pages:
        for slide in slides:
            page = Figure(figsize=_PAGE_INCHES, facecolor="white")
            page.text(0.04, 0.94, slide.title, fontsize=24, va="center", parse_math=False)
            axes = page.add_axes((0.04, 0.04, 0.92, 0.84))
            axes.set_axis_off()
            with Image.open(io.BytesIO(slide.png)) as picture:
                white = Image.new("RGBA", picture.size, "white")
                white.alpha_composite(picture.convert("RGBA"))
                # its own pixels, not the page's
                axes.imshow(white.convert("RGB"), interpolation="none")
            pages.savefig(page)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the slides from a terminal; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.slides", description=__doc__)
    parser.add_argument(
        "--demo", metavar="DIR", type=Path, default=Path("runs/demo"), help="runs/demo"
    )
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("runs/slides"), help="runs/slides"
    )
    options = parser.parse_args(arguments)
    try:
        *pictures, pdf = write_slides(options.demo, options.output)
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{len(pictures)} figures in {options.output}, a page for each in {pdf}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
