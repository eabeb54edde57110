"""A training run while it goes on: its loss, throughput, waiting and memory, redrawn in place by the loop itself."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from statistics import fmean
from time import monotonic
from typing import Any

from colab_utils.runtime import format_bytes, is_notebook
from colab_utils.show.pictures import PALETTE

__all__ = ["LiveMonitor", "draw_run"]

_WIDTH, _HEIGHT = 240, 84  # of a curve, px
_GREEN, _RED = PALETTE[2], PALETTE[3]  # which show on white and on Colab's dark grey


class LiveMonitor:
    """Pass it as ``log`` to ``train``: in a notebook one picture is redrawn in place, elsewhere lines are printed.

    It needs no widgets, so it looks the same in Colab, in Jupyter and on a saved page, and nothing is drawn from a
    background thread, whose updates Colab does not show.

    Args:
        every_s: at most one drawing in so many seconds; a drawing takes about a millisecond.

    Example:
        >>> LiveMonitor()("step 40/200  loss 1.912")
        step 40/200  loss 1.912
    """

    def __init__(self, *, every_s: float = 1.0) -> None:
        self._every_s, self._drawn_s = every_s, 0.0
        self._plan, self._lines = "", list[Any]()
        self._shown = False

    def __call__(self, line: Any) -> None:
        """Take in a plan or a log line, as ``train`` gives them."""
        if not is_notebook():
            print(line)
            return
        if not hasattr(line, "loss"):
            self._plan = str(line)
        else:
            self._lines.append(line)
        done = hasattr(line, "loss") and line.step >= line.steps
        if done or len(self._lines) < 2 or monotonic() - self._drawn_s >= self._every_s:
            self._draw()

    def _draw(self) -> None:
        from IPython.display import HTML, display

        page = HTML(draw_run(self._lines, plan=self._plan))
        display(page, display_id=f"colab-utils-run-{id(self)}", update=self._shown)
        self._drawn_s, self._shown = monotonic(), True


def draw_run(lines: Sequence[Any], *, plan: str = "") -> str:
    """The run so far as HTML: a curve and the latest figure for each of loss, images a second, waiting and memory.

    Args:
        lines: log lines of ``train``.
        plan: its plan, shown above.

    Example:
        >>> draw_run([], plan="a < b")
        '<div style="..."><p style="...">a &lt; b</p></div>'
    """
    parts = [f'<p style="margin:.2em 0;opacity:.7">{escape(plan)}</p>'] if plan else []
    if lines:
        last = lines[-1]
        parts += [
            f'<progress value="{last.step}" max="{last.steps}" style="width:100%"></progress>',
            f'<p style="margin:.2em 0">step {last.step:,} of {last.steps:,}</p>',
            '<div style="display:flex;flex-wrap:wrap;gap:1.2em">',
            _draw_curve("loss", [line.loss for line in lines], f"{fmean(line.loss for line in lines[-3:]):.3f}"),
            _draw_curve("images/s", [line.images_per_second for line in lines], f"{last.images_per_second:.1f}"),
            _draw_curve("waits for data", [line.wait_share for line in lines], f"{last.wait_share:.0%}", _RED, top=1.0),
        ]
        if last.gpu_bytes:
            held = [float(line.gpu_bytes or 0) for line in lines]
            parts.append(_draw_curve("GPU memory", held, format_bytes(last.gpu_bytes)))
        parts.append("</div>")
        for evaluated in [line for line in lines if line.ap][-1:]:
            found = f"masks {evaluated.ap.segm:.0%} of perfect, boxes {evaluated.ap.bbox:.0%} (average precision)"
            parts.append(f'<p style="margin:.4em 0">after step {evaluated.ap_step:,}: {found}</p>')
    return f'<div style="color:inherit;font:15px/1.4 system-ui,sans-serif;max-width:72rem">{"".join(parts)}</div>'


def _draw_curve(name: str, values: Sequence[float], text: str, colour: str = _GREEN, top: float = 0.0) -> str:
    """A figure in large type, and its curve from 0 to ``top`` or the highest value; text has the page's colour."""
    each = -(-len(values) // _WIDTH)  # values that share a pixel
    shown = [value if math.isfinite(value) else 0.0 for value in values[(len(values) - 1) % each :: each]]
    top, across = top or max([*shown, 1e-9]), (_WIDTH - 14) / max(1, len(shown) - 1)
    points = " ".join(f"{14 + n * across:.1f},{_HEIGHT - 2 - 78 * value / top:.1f}" for n, value in enumerate(shown))
    return (
        f'<div><div style="opacity:.7">{name}</div>'
        f'<div style="font-size:26px;font-weight:600">{text}</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{name}: {text}">'
        f'<path d="M0 {_HEIGHT - 2}H{_WIDTH}" stroke="currentColor" stroke-opacity=".4"/>'
        f'<text y="{_HEIGHT - 5}" font-size="13" fill="currentColor">0</text>'
        f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/></svg></div>'
    )
