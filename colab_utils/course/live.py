"""Views that change in a notebook: an animation of a simulated loader, and the curves of a training
run.
"""

from collections.abc import Callable, Sequence
from time import monotonic
from typing import Any

import numpy as np

from colab_utils.diagnosis.simulator import Simulation, Trace
from colab_utils.progress import is_notebook
from colab_utils.require import require_number
from colab_utils.show import render
from colab_utils.show.pictures import PALETTE
from colab_utils.units import format_bytes

# A run is drawn again after at least this many seconds.
_DRAWING_S = 1.0
# A curve has at most this many points, about one a pixel.
_POINTS = 240
# These colours are visible on white and on Colab's dark grey.
_GREEN = PALETTE[2]
_RED = PALETTE[3]
# The curves of a run: each has a name, a field of a log line, the format of its latest value, a
# colour, and its upper edge. 0 is the highest value.
_CURVES: tuple[tuple[str, str, Callable[[Any], str], str, float], ...] = (
    ("loss", "loss", "{:.3f}".format, _GREEN, 0),
    ("images/s", "images_per_second", "{:.1f}".format, _GREEN, 0),
    ("waits for data", "wait_share", "{:.0%}".format, _RED, 1),
    ("GPU memory", "gpu_bytes", format_bytes, _GREEN, 0),
)
# More steps or boxes would be too small to see, and would make the page slow.
_MAX_STEPS = 1500
_MAX_BOXES = 16


def animate_simulation(simulation: Simulation, *, speed: float = 0.5) -> Any:
    """Animate a simulation: workers load batches, batches queue, and the model takes them or waits.

    The queue shows the batches in the order in which the model takes them, the next one on the
    right. If the next batch is missing, the model waits, even if later batches are ready. The
    animation begins when it is on the screen. If the browser asks for reduced motion, it begins
    with a click. A long simulation is cut after 1,500 steps.

    Args:
        simulation: Result of `simulate`.
        speed: Simulated seconds that the animation shows in one second. Default: 0.5.

    Returns:
        An ``IPython.display.HTML``. Its ``data`` is complete: it needs no server and no network.

    Raises:
        ColabUtilsError: ``speed`` is not above 0.

    Example:
        >>> from colab_utils.diagnosis.simulator import simulate
        >>> animation = animate_simulation(simulate(workers=7, load_s=2.0, step_s=0.1))
        >>> "the step worked 33% of the time and waited 67%" in animation.data
        True
    """
    from IPython.display import HTML

    require_number("speed", speed, above=0)
    steps = simulation.steps
    shown_s = min([simulation.seconds, *steps.start_s[_MAX_STEPS:].tolist()])
    end_s = simulation.seconds
    lanes = [_list_spans(lane, shown_s, lane.end_s >= end_s) for lane in simulation.loads]
    is_unfinished = np.arange(len(steps.batch)) >= simulation.batches
    spans = {
        "seconds": shown_s,
        "speed": speed,
        "lanes": lanes,
        "steps": _list_spans(steps, shown_s, is_unfinished),
    }
    return HTML(
        render(
            "animation",
            simulation=simulation,
            spans=spans,
            boxes=_MAX_BOXES,
        )
    )


def _list_spans(trace: Trace, seconds: float, unfinished: np.ndarray) -> list[list[float]]:
    """Return the batch numbers, starts and ends of spans for the script of the animation.

    If the simulation ended during a span, the span gets a slightly later end. So the animation
    never shows it as done.
    """
    end_s = trace.end_s + unfinished * seconds / 1000
    is_shown = trace.start_s < seconds
    parts = (trace.batch, trace.start_s, end_s)
    return [part[is_shown].round(5).tolist() for part in parts]


class LiveMonitor:
    """A ``log`` for ``train``, which draws the run in a notebook and prints lines elsewhere.

    In a notebook, one picture is redrawn in place. It needs no widgets, so it looks the same in
    Colab, in Jupyter and on a saved page. It is not redrawn by a background thread, because Colab
    does not show updates that come from such a thread.

    Example:
        >>> LiveMonitor()("step 40/200  loss 1.912")
        step 40/200  loss 1.912
    """

    def __init__(self) -> None:
        self._plan = ""
        self._lines = list[Any]()
        # The handle of the picture in the page.
        self._shown: Any = None
        self._drawn_s = 0.0

    def __call__(self, line: Any) -> None:
        """Show a plan or a log line of ``train``. A plan begins a new run and a new picture."""
        if not is_notebook():
            print(line)
            return
        if not hasattr(line, "loss"):
            self._plan = str(line)
            self._lines = []
            self._shown = None
        else:
            self._lines.append(line)
            is_first_or_last = len(self._lines) == 1 or line.step >= line.steps
            if not is_first_or_last and monotonic() - self._drawn_s < _DRAWING_S:
                return
        from IPython.display import HTML, display

        page = HTML(draw_run(self._lines, plan=self._plan))
        if self._shown is None:
            self._shown = display(page, display_id=True)
        else:
            self._shown.update(page)
        self._drawn_s = monotonic()


def draw_run(lines: Sequence[Any], *, plan: str = "") -> str:
    """Return the curves of a run so far as HTML, each with its latest value.

    The curves show the loss, the images a second, the share of time spent waiting for data, and the
    GPU memory if there is a GPU.

    Args:
        lines: Log lines of ``train``.
        plan: Plan of ``train``, shown above the curves. Default: "".

    Example:
        >>> "a &lt; b" in draw_run([], plan="a < b")
        True
    """
    curves = list[tuple[str, str, str, str]]()
    for name, field, write, colour, top in _CURVES:
        values = [getattr(line, field) for line in lines]
        if values and values[-1] is not None:
            points = _draw_curve([value or 0 for value in values], top)
            curves.append((name, write(values[-1]), colour, points))
    return render("run", plan=plan, lines=lines, curves=curves)


def _draw_curve(values: Sequence[float], top: float) -> str:
    """Return the points of a curve in a square of 1 x 1.

    The upper edge of the square is ``top``, or the highest value if ``top`` is 0. Of many values,
    only every n-th is drawn.
    """
    each = 1 + len(values) // _POINTS
    shown = np.nan_to_num(values[::each], posinf=0, neginf=0)
    down = 1 - shown / (top or max(shown.max(), 1e-9))
    across = np.linspace(0, 1, len(shown))
    return " ".join(f"{x:.4f},{y:.3f}" for x, y in zip(across, down, strict=True))
