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
        self._handle: Any = None

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

        self._drawn_s = monotonic()
        page = HTML(draw_run(self._lines, plan=self._plan))
        if self._handle is None:
            self._handle = display(page, display_id=True)
        else:
            self._handle.update(page)


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
            f'<div style="border:1px solid;height:6px;margin:.4em 0"><div style="background:{PALETTE[0]};height:6px;'
            f'width:{last.step / max(last.steps, 1):.1%}"></div></div>',
            f'<p style="margin:.2em 0">step {last.step:,} of {last.steps:,}</p>',
            '<div style="display:flex;flex-wrap:wrap;gap:1.2em">',
            _draw_curve("loss", [line.loss for line in lines], f"{fmean(line.loss for line in lines[-3:]):.3f}", 0),
            _draw_curve("images/s", [line.images_per_second for line in lines], f"{last.images_per_second:.1f}", 2),
            _draw_curve("waits for data", [line.wait_share for line in lines], f"{last.wait_share:.0%}", 3, top=1.0),
        ]
        if last.gpu_bytes:
            held = [float(line.gpu_bytes or 0) for line in lines]
            parts.append(_draw_curve("GPU memory", held, format_bytes(last.gpu_bytes), 4))
        parts.append("</div>")
        evaluated = next((line for line in reversed(lines) if line.ap), None)
        if evaluated:
            parts.append(f'<p style="margin:.4em 0">after step {evaluated.ap_step:,}: {escape(str(evaluated.ap))}</p>')
    return f'<div style="font:15px/1.4 system-ui,sans-serif;max-width:72rem">{"".join(parts)}</div>'


def _draw_curve(name: str, values: Sequence[float], text: str, colour: int, top: float = 0.0) -> str:
    """A figure in large type, and its curve up to ``top``, by default its highest value; text has the page's colour."""
    each = -(-len(values) // _WIDTH)  # values that share a pixel
    shown = [value if math.isfinite(value) else 0.0 for value in values[(len(values) - 1) % each :: each]]
    top, across = top or max([*shown, 1e-9]), _WIDTH / max(1, len(shown) - 1)
    points = " ".join(f"{n * across:.1f},{_HEIGHT - 2 - 78 * value / top:.1f}" for n, value in enumerate(shown))
    return (
        f'<div><div style="opacity:.7">{name}</div>'
        f'<div style="font-size:26px;font-weight:600;color:{PALETTE[colour]}">{text}</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{name}: {text}">'
        f'<path d="M0 {_HEIGHT - 2}H{_WIDTH}" stroke="currentColor" stroke-opacity=".3"/>'
        f'<polyline points="{points}" fill="none" stroke="{PALETTE[colour]}" stroke-width="2"/></svg></div>'
    )
