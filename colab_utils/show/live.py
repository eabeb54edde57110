"""What moves in a notebook: the simulated loader, to watch and to touch, and a training run while it goes on."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from html import escape
from statistics import fmean
from time import monotonic
from typing import Any

import numpy as np

from colab_utils.diagnosis.simulator import Simulation, Trace, simulate
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import format_bytes, is_notebook
from colab_utils.show.charts import plot_first_seconds
from colab_utils.show.pictures import PALETTE, embed_figure

__all__ = ["LiveMonitor", "animate_simulation", "draw_run", "explore_simulation"]

_DRAWING_S = 1.0  # between two drawings of a run; one takes about a millisecond
_WIDTH, _HEIGHT = 240, 84  # of a curve, px
_GREEN, _RED = PALETTE[2], PALETTE[3]  # which show on white and on Colab's dark grey
_CHART_STEPS, _MAX_STEPS, _MAX_BOXES = 25, 1500, 16  # more would be too small to see, and heavy

# Text has the page's own colour, so that it can be read on dark and on light; the fillings are PALETTE's, half clear.
_STYLE = """
.colab-sim { max-width: 960px; font: 16px/1.4 system-ui, "Segoe UI", Roboto, sans-serif; }
.colab-sim div { display: flex; gap: 4px; align-items: center; margin: 6px 0; }
.colab-sim i { flex: 1; border: 1px solid; font-style: normal; text-align: center; line-height: 90px; height: 90px; }
.colab-sim .model { flex: 3; }
.colab-sim svg { border: 1px solid; width: 100%; height: 26px; }
.colab-sim output { display: block; font-size: 2.4em; font-weight: 600; }
.colab-sim button { font: inherit; color: inherit; background: none; border: 1px solid; width: 5em; }
"""

# Every moment is drawn from the time alone, so that the slider can go anywhere. It starts when it is seen: after
# "Run all" nobody has missed it.
_SCRIPT = """(() => {
  const {seconds, speed, lanes, steps} = DATA, readyAt = {};
  for (const [batches, , ends] of lanes) batches.forEach((batch, k) => { readyAt[batch] = ends[k]; });
  const fill = (box, colour, share, text) => {
    box.style.background = `linear-gradient(to top, ${colour}99 ${100 * share}%, transparent 0)`;
    box.textContent = text;
  };
  const show = (box, colour, [batch, start, end], t, idle) => {
    const k = start.findLastIndex(begin => begin <= t), busy = t < end[k];
    fill(box, colour, busy ? (t - start[k]) / (end[k] - start[k]) : 0, busy ? batch[k] : idle);
    return k;
  };
  for (const root of document.querySelectorAll('[data-sim="NAME"]:not([data-on])')) {
    root.dataset.on = "yes";
    const all = name => [...root.getElementsByClassName(name)];
    const [model, past, count, button, slider] = ["model", "past", "count", "play", "time"].map(name => all(name)[0]);
    let t = seconds, playing = false, auto = true, before = 0;
    const draw = () => {
      all("load").forEach((box, n) => show(box, "#0072B2", lanes[n], t, ""));
      const k = show(model, "#E69F00", steps, t, "waits"), done = t < steps[2][k] ? k : k + 1;
      all("place").reverse().forEach((box, n) => {
        const batch = k + 1 + n, ready = readyAt[batch] <= t;
        fill(box, "#0072B2", ready ? 1 : 0, ready ? batch : "");
      });
      past.style.clipPath = `inset(0 ${100 - 100 * t / seconds}% 0 0)`;
      count.textContent = `${done} batches in ${t.toFixed(1)} s`;
      slider.value = t / seconds;
    };
    const advance = now => {
      if (!playing) return;
      [t, before] = [Math.min(seconds, t + Math.max(0, now - before) / 1000 * speed), now];
      draw();
      if (t < seconds) requestAnimationFrame(advance); else play(false);
    };
    const play = on => {
      if (on === playing) return;
      [playing, before, t] = [on, performance.now(), on && t >= seconds ? 0 : t];
      button.textContent = on ? "Pause" : "Play";
      if (on) requestAnimationFrame(advance);
    };
    button.onclick = () => { auto = false; play(!playing); };
    slider.oninput = () => { auto = false; play(false); t = slider.value * seconds; draw(); };
    draw();
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches)
      new IntersectionObserver(seen => { if (auto) play(seen.pop().isIntersecting); }).observe(root);
  }
})();"""


def animate_simulation(simulation: Simulation, *, speed: float = 0.5) -> Any:
    """Show a simulation as it happens: workers fill up, batches queue, the model takes them or waits.

    The queue shows the next batches in the order in which the model takes them, the next one on the right: a gap
    there stops the model, however many batches wait behind it. It plays once it is on the screen; where the reader
    prefers reduced motion it waits for a click. Of a long simulation it shows the first 1,500 steps.

    Args:
        simulation: from `simulate`.
        speed: simulated seconds in a second.

    Returns:
        An ``IPython.display.HTML``; its ``data`` is all of it, and needs no server and no network.

    Raises:
        ColabUtilsError: ``speed`` is not more than 0.

    Example:
        >>> from colab_utils.diagnosis.simulator import simulate
        >>> animation = animate_simulation(simulate(workers=7, load_s=2.0, step_s=0.1))
        >>> "98 batches in 30 s with 7 workers: the step worked 33% of the time and waited 67%" in animation.data
        True
    """
    from IPython.display import HTML

    if not 0 < speed < math.inf:
        raise ColabUtilsError(f"expected speed over 0, found {speed!r}: choose another")
    steps, workers = simulation.steps, max(1, simulation.workers)
    shown_s = min([simulation.seconds, *steps.start_s[_MAX_STEPS:].tolist()])
    spans = np.stack(steps[1:], 1)[steps.start_s < shown_s]
    data = json.dumps({
        "seconds": shown_s, "speed": speed,
        "lanes": [_list_spans(lane, shown_s, lane.end_s >= simulation.seconds) for lane in simulation.loads],
        "steps": _list_spans(steps, shown_s, np.arange(len(steps.batch)) >= simulation.batches),
    })  # fmt: skip
    name = hashlib.sha256(data.encode()).hexdigest()[:12]
    path = "".join(f"M{start:.1f} 0H{end:.1f}V26H{start:.1f}" for start, end in (960 / shown_s * spans).tolist())
    loads, places = (min(n, _MAX_BOXES) for n in (workers, simulation.workers * simulation.prefetch))
    html = f"""<div class="colab-sim" data-sim="{name}"><style>{_STYLE}</style><p><b>{simulation}</b></p>
<div>{'<i class="load"></i>' * loads}→{'<i class="place"></i>' * places}→<i class="model"></i></div>
<small>Left: {loads} of {workers} at work on a batch. Middle: batches that are ready, the next one on the right.
Right: the model. Below: its steps in the first {shown_s:.3g} s; a gap is waiting.</small>
<svg viewBox="0 0 960 26" preserveAspectRatio="none"><path class="past" fill="#E69F00" d="{path}"/></svg>
<div><button class="play" type="button">Play</button>
<input class="time" type="range" min="0" max="1" step="any" value="1" aria-label="time" style="flex: 1"></div>
<output class="count"></output><script>{_SCRIPT.replace("NAME", name).replace("DATA", data)}</script></div>"""
    return HTML(html)


def _list_spans(trace: Trace, seconds: float, unfinished: np.ndarray) -> list[list[float]]:
    """Batches, starts and ends for the script; what the end of the simulation cut off has not ended by then."""
    end_s = trace.end_s + unfinished * seconds / 1000
    return [part[trace.start_s < seconds].round(5).tolist() for part in (trace.batch, trace.start_s, end_s)]


def explore_simulation(
    *, workers: int = 2, load_s: float = 0.4, step_s: float = 0.1, load_cv: float = 0.2, prefetch: int = 2
) -> Any:
    """Sliders for what `simulate` takes: each redraws the chart, and says how long the step waits.

    Arguments are those of `simulate`, and where the sliders start.

    Args:
        workers: worker processes.
        load_s: mean seconds in which one worker loads one batch, more than 0.
        step_s: mean seconds of one training step, more than 0.
        load_cv: spread of the loading times, standard deviation / mean.
        prefetch: batches asked for ahead of time for each worker.

    Returns:
        An ``ipywidgets.VBox``.

    Raises:
        ColabUtilsError: a time that is not more than 0.

    Example:
        >>> *sliders, view = explore_simulation(workers=2, load_s=0.4, step_s=0.1, load_cv=0).children
        >>> "the step worked 49% of the time and waited 51%" in view.value
        True
    """
    import ipywidgets

    if not (load_s > 0 and step_s > 0):
        raise ColabUtilsError(f"expected load_s and step_s over 0, found {load_s!r} and {step_s!r}: choose others")

    def make(kind: Any, value: float, text: str, **ends: float) -> Any:
        wide = {"layout": {"width": "44em"}, "style": {"description_width": "20em"}}
        return kind(value, description=f"{text} (yours: {value:.3g})", continuous_update=False, **wide, **ends)

    decades = {"min": min(-3, math.log10(min(load_s, step_s))), "max": max(2, math.log10(max(load_s, step_s)))}
    sliders = {
        "workers": make(ipywidgets.IntSlider, workers, "workers", min=0, max=max(workers, 8)),
        "load_s": make(ipywidgets.FloatLogSlider, load_s, "loading a batch, seconds", step=0.02, **decades),
        "load_cv": make(ipywidgets.FloatSlider, load_cv, "its spread", min=0, max=max(1.5, load_cv), step=0.01),
        "step_s": make(ipywidgets.FloatLogSlider, step_s, "a step, seconds", step=0.02, **decades),
        "prefetch": make(ipywidgets.IntSlider, prefetch, "prefetch, a worker", min=1, max=max(prefetch, 8)),
    }
    view = ipywidgets.HTML()

    def redraw(_change: Any = None) -> None:
        view.value = _draw_settings(**{key: slider.value for key, slider in sliders.items()})

    for slider in sliders.values():
        slider.observe(redraw, "value")
    redraw()
    return ipywidgets.VBox([*sliders.values(), view])


def _draw_settings(*, workers: int, load_s: float, step_s: float, **settings: Any) -> str:
    """The sentence, about 30 s or 100 batches, and the chart of the first steps."""
    seconds = math.ceil(max(30, 100 * step_s, 100 * load_s / max(1, workers)))
    simulation = simulate(workers=workers, load_s=load_s, step_s=step_s, seconds=seconds, seed=4, **settings)
    names, traces = [f"worker {n}" for n in range(workers)] or ["loading"], [*simulation.loads, simulation.steps]
    rows = {name: np.stack(trace[1:], 1).tolist() for name, trace in zip([*names, "step"], traces, strict=True)}
    shown_s = simulation.steps.start_s[: _CHART_STEPS + 1].tolist()[-1]
    figure = plot_first_seconds(rows, seconds=shown_s, blue=names)
    figure.suptitle("")  # the sentence says it
    picture = embed_figure(figure, alt=str(simulation)).replace("<img", '<img style="max-width: 100%"', 1)
    return f'<p style="font-size: 1.2em; font-weight: bold">{simulation}</p>{picture}'


class LiveMonitor:
    """Pass it as ``log`` to ``train``: in a notebook one picture is redrawn in place, elsewhere lines are printed.

    It needs no widgets, so it looks the same in Colab, in Jupyter and on a saved page, and nothing is drawn from a
    background thread, whose updates Colab does not show.

    Example:
        >>> LiveMonitor()("step 40/200  loss 1.912")
        step 40/200  loss 1.912
    """

    def __init__(self) -> None:
        self._plan, self._lines = "", list[Any]()
        self._shown: Any = None  # the picture in the page
        self._drawn_s = 0.0

    def __call__(self, line: Any) -> None:
        """Take in a plan or a log line, as ``train`` gives them; with a plan a new run begins, and a new picture."""
        if not is_notebook():
            print(line)
            return
        if not hasattr(line, "loss"):
            self._plan, self._lines, self._shown = str(line), [], None
        else:
            self._lines.append(line)
            if len(self._lines) > 1 and line.step < line.steps and monotonic() - self._drawn_s < _DRAWING_S:
                return
        from IPython.display import HTML, display

        page = HTML(draw_run(self._lines, plan=self._plan))
        if self._shown is None:
            self._shown = display(page, display_id=True)
        else:
            self._shown.update(page)
        self._drawn_s = monotonic()


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
