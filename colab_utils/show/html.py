"""The frame of every page: one self-contained HTML file with its own style, readable offline and on paper."""

from __future__ import annotations

import base64
import io
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["WIDE", "build_page", "embed_figure"]

# for pages whose table matters more than their prose; on a phone a chart scrolls, so that its text can be read
WIDE = """body { max-width: 78rem; } pre { overflow-x: auto; }
@media (max-width: 45rem) { .chart img { max-width: none; width: 44rem; } }"""

_STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; padding: 2rem 1.5rem 4rem; max-width: 62rem; color: #1a1a1a; background: #fff;
  font: 17px/1.55 system-ui, "Segoe UI", Roboto, "Liberation Sans", sans-serif; }
h1 { font-size: 2rem; line-height: 1.2; margin: .2em 0 .5em; }
h2 { font-size: 1.4rem; margin: 2.2em 0 .4em; }
a { color: #0060a0; }
img, svg { max-width: 100%; height: auto; }
table { font-size: 15px; }
.scroll { overflow-x: auto; }
.quiet { color: #555; font-size: 15px; }
.note { background: #fff6e0; border-left: 4px solid #E69F00; padding: .6em 1em; margin: 1em 0; }
code { font-size: .92em; background: #f2f4f7; padding: .1em .3em; border-radius: 3px; }
@media print { body { padding: 0; } }
"""


def build_page(title: str, body: str, *, style: str = "") -> str:
    """A whole HTML page; ``title`` is escaped, ``body`` is HTML already.

    Example:
        >>> "<title>a &lt; b</title>" in build_page("a < b", "<p>hello</p>")
        True
    """
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}{style}</style></head>\n<body><main>\n{body}\n</main></body></html>\n"
    )


def embed_figure(figure: Figure, *, alt: str = "") -> str:
    """The figure as an ``<img>`` that holds its own drawing (SVG), with ``alt``, or its title, for screen readers."""
    drawing = io.BytesIO()
    figure.savefig(drawing, format="svg", metadata={"Date": None})
    data = base64.b64encode(drawing.getvalue()).decode("ascii")
    alt = alt or figure.get_suptitle().replace("\n", " ")
    return f'<img alt="{escape(alt)}" src="data:image/svg+xml;base64,{data}">'
