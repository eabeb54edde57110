"""A training run while it goes on: its loss, pace, waiting and memory, redrawn in place by the loop itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from statistics import fmean
from time import monotonic
from typing import Any, NamedTuple

from colab_utils.runtime import format_bytes, is_notebook
from colab_utils.show.pictures import PALETTE

__all__ = ["LiveMonitor", "draw_run"]

_MOST_POINTS = 240  # of a curve: more cannot be told apart
_WIDTH, _HEIGHT = 240, 84  # of a curve, px
_GREY = "#b8b8b8"


class _Panel(NamedTuple):
    name: str
    values: list[float]
    text: str
    colour: str
    top: float | None = None


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
    parts = [f'<p style="margin:.2em 0;color:#555">{escape(plan)}</p>'] if plan else []
    if lines:
        last = lines[-1]
        losses = [line.loss for line in lines]
        panels = [
            _Panel("loss", losses, f"{fmean(losses[-3:]):.3f}", PALETTE[0]),
            _Panel("images/s", [line.images_per_second for line in lines], f"{last.images_per_second:.1f}", PALETTE[2]),
            _Panel("waits for data", [line.wait_share for line in lines], f"{last.wait_share:.0%}", PALETTE[3], 1.0),
        ]
        if last.gpu_bytes:
            held = [float(line.gpu_bytes) for line in lines if line.gpu_bytes]
            panels.append(_Panel("GPU memory", held, format_bytes(last.gpu_bytes), PALETTE[4]))
        share = last.step / max(last.steps, 1)
        parts.append(
            f'<div style="background:#eef0f3;height:6px;margin:.4em 0"><div style="background:{PALETTE[0]};'
            f'height:6px;width:{share:.1%}"></div></div><p style="margin:.2em 0">step {last.step:,} of '
            f"{last.steps:,}</p>"
        )
        parts.append(
            '<div style="display:flex;flex-wrap:wrap;gap:1.2em">' + "".join(map(_draw_panel, panels)) + "</div>"
        )
        judged = [line for line in lines if line.ap]
        if judged:
            parts.append(
                f'<p style="margin:.4em 0">after step {judged[-1].ap_step:,}: {escape(str(judged[-1].ap))}</p>'
            )
    return f'<div style="font:15px/1.4 system-ui,sans-serif;color:#1a1a1a;max-width:72rem">{"".join(parts)}</div>'


def _draw_panel(panel: _Panel) -> str:
    values = _thin(panel.values)
    top = panel.top if panel.top is not None else max([*values, 1e-9])
    across = _WIDTH / max(1, len(values) - 1)
    points = " ".join(
        f"{n * across:.1f},{_HEIGHT - 2 - (_HEIGHT - 6) * min(max(value, 0.0) / top, 1.0):.1f}"
        for n, value in enumerate(values)
    )
    return (
        f'<div><div style="color:#555">{panel.name}</div>'
        f'<div style="font-size:26px;font-weight:600;color:{panel.colour}">{panel.text}</div>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" role="img" aria-label="{panel.name}: {panel.text}">'
        f'<line x1="0" y1="{_HEIGHT - 2}" x2="{_WIDTH}" y2="{_HEIGHT - 2}" stroke="{_GREY}"/>'
        f'<polyline points="{points}" fill="none" stroke="{panel.colour}" stroke-width="2"/></svg></div>'
    )


def _thin(values: Sequence[float]) -> list[float]:
    """At most so many values, each the mean of those it stands for."""
    each = -(-len(values) // _MOST_POINTS)
    finite = [value if abs(value) < float("inf") else 0.0 for value in values]
    return [fmean(finite[n : n + each]) for n in range(0, len(finite), max(1, each))]
