"""Views that change in a notebook: an animation of a simulated loader, sliders for its settings,
and the curves of a training run.
"""

import math
from collections.abc import Sequence
from statistics import fmean
from time import monotonic
from typing import Any

import numpy as np

from colab_utils.diagnosis.simulator import Simulation, Trace, simulate
from colab_utils.progress import is_notebook
from colab_utils.require import require_number
from colab_utils.show import render
from colab_utils.show.charts import plot_first_seconds
from colab_utils.show.pictures import PALETTE, embed_figure
from colab_utils.units import format_bytes

# A run is drawn again after at least this many seconds.
_DRAWING_S = 1.0
# A curve has at most this many points, about one a pixel.
_POINTS = 240
# These colours are visible on white and on Colab's dark grey.
_GREEN = PALETTE[2]
_RED = PALETTE[3]
# More steps or boxes would be too small to see, and would make the page slow.
_CHART_STEPS = 25
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

    require_number("speed", speed, above=0, below=math.inf)
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


def explore_simulation(
    *,
    workers: int = 2,
    load_s: float = 0.4,
    step_s: float = 0.1,
    load_cv: float = 0.2,
    prefetch: int = 2,
) -> Any:
    """Show a slider for each argument of `simulate`, with a chart and how long the step waits.

    Moving a slider redraws the chart. The sliders start at the values of the arguments.

    Args:
        workers: Worker processes. Default: 2.
        load_s: Mean seconds that one worker takes to load one batch, above 0. Default: 0.4.
        step_s: Mean seconds of one training step, above 0. Default: 0.1.
        load_cv: Standard deviation of the loading times, divided by their mean. Default: 0.2.
        prefetch: Batches that each worker loads ahead. Default: 2.

    Returns:
        An ``ipywidgets.VBox``.

    Raises:
        ColabUtilsError: ``load_s`` or ``step_s`` is not above 0.

    Example:
        >>> page = explore_simulation(workers=2, load_s=0.4, step_s=0.1, load_cv=0)
        >>> *sliders, view = page.children
        >>> "the step worked 49% of the time and waited 51%" in view.value
        True
    """
    import ipywidgets

    require_number("load_s", load_s, above=0)
    require_number("step_s", step_s, above=0)

    def make(kind: Any, text: str, value: float, low: float, high: float, step: float) -> Any:
        return kind(
            value,
            min=low,
            max=high,
            step=step,
            description=f"{text} (yours: {value:.3g})",
            continuous_update=False,
            layout={"width": "44em"},
            style={"description_width": "20em"},
        )

    whole = ipywidgets.IntSlider
    powers = ipywidgets.FloatLogSlider
    # The ends of a slider of powers of ten are exponents.
    low = min(-3, math.log10(min(load_s, step_s)))
    high = max(2, math.log10(max(load_s, step_s)))
    widest = max(1.5, load_cv)
    sliders = {
        "workers": make(whole, "workers", workers, 0, max(workers, 8), 1),
        "load_s": make(powers, "loading a batch, seconds", load_s, low, high, 0.02),
        "load_cv": make(ipywidgets.FloatSlider, "spread of loading", load_cv, 0, widest, 0.01),
        "step_s": make(powers, "a step, seconds", step_s, low, high, 0.02),
        "prefetch": make(whole, "batches ahead, each worker", prefetch, 1, max(prefetch, 8), 1),
    }
    view = ipywidgets.HTML()

    def redraw(_change: Any = None) -> None:
        view.value = _draw_settings(**{key: slider.value for key, slider in sliders.items()})

    for slider in sliders.values():
        slider.observe(redraw, "value")
    redraw()
    return ipywidgets.VBox([*sliders.values(), view])


def _draw_settings(*, workers: int, load_s: float, step_s: float, **settings: Any) -> str:
    """Return HTML: how long the step waits, and a chart of the first steps.

    The simulation covers at least 30 s and about 100 batches.
    """
    seconds = math.ceil(max(30, 100 * step_s, 100 * load_s / max(1, workers)))
    simulation = simulate(
        workers=workers, load_s=load_s, step_s=step_s, seconds=seconds, seed=4, **settings
    )
    names = [f"worker {n}" for n in range(workers)] or ["loading"]
    traces = [*simulation.loads, simulation.steps]
    rows = {}
    for name, trace in zip([*names, "step"], traces, strict=True):
        rows[name] = np.stack([trace.start_s, trace.end_s], 1).tolist()
    shown_s = simulation.steps.start_s[: _CHART_STEPS + 1].tolist()[-1]
    figure = plot_first_seconds(
        rows,
        seconds=shown_s,
        title=str(simulation),
        blue=names,
    )
    # A picture never becomes wider than the page.
    picture = str(embed_figure(figure)).replace("<img", '<img style="max-width: 100%"', 1)
    return f'<p style="font-size: 1.2em; font-weight: bold">{simulation}</p>{picture}'


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
    if lines:
        last = lines[-1]
        loss = fmean(line.loss for line in lines[-3:])
        rates = [line.images_per_second for line in lines]
        waits = [line.wait_share for line in lines]
        curves += [
            ("loss", f"{loss:.3f}", _GREEN, _draw_curve([line.loss for line in lines])),
            ("images/s", f"{last.images_per_second:.1f}", _GREEN, _draw_curve(rates)),
            ("waits for data", f"{last.wait_share:.0%}", _RED, _draw_curve(waits, top=1.0)),
        ]
        if last.gpu_bytes:
            held = _draw_curve([line.gpu_bytes or 0 for line in lines])
            curves.append(("GPU memory", format_bytes(last.gpu_bytes), _GREEN, held))
    return render("run", plan=plan, lines=lines, curves=curves)


def _draw_curve(values: Sequence[float], *, top: float = 0.0) -> str:
    """Return the points of a curve in a square of 1 x 1.

    The upper edge of the square is ``top``, or the highest value if ``top`` is 0. Of many values,
    only every n-th is drawn.
    """
    each = -(-len(values) // _POINTS)
    first = (len(values) - 1) % each
    shown = np.nan_to_num(values[first::each], posinf=0, neginf=0)
    down = 1 - shown / (top or max(shown.max(), 1e-9))
    across = np.linspace(0, 1, len(shown))
    return " ".join(f"{x:.4f},{y:.3f}" for x, y in zip(across, down, strict=True))
