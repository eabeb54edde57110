"""The simulated loader to watch and to touch: an animation that plays anywhere, and sliders beside its chart."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from colab_utils.diagnosis.simulator import Advice, Simulation, Trace, find_cures
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import write_file
from colab_utils.show.charts import plot_timeline
from colab_utils.show.html import build_page, embed_figure

__all__ = ["Animation", "animate_simulation", "explore_simulation"]

_CHART_STEPS, _MAX_STEPS, _MAX_LANES, _MAX_SLOTS = 25, 1500, 16, 32  # more would be too small to see, and heavy

# Text has the page's own colour, so that it can be read on dark and on light; the others are PALETTE's.
_STYLE = """
.colab-sim { max-width: 960px; font: 16px/1.4 system-ui, "Segoe UI", Roboto, sans-serif; }
.colab-sim text { fill: currentColor; font-size: 16px; text-anchor: middle; font-variant-numeric: tabular-nums; }
.colab-sim .box { fill: currentColor; fill-opacity: .06; stroke: currentColor; stroke-opacity: .5; }
.colab-sim .load, .colab-sim .slot { fill: #0072B2; }
.colab-sim .step, .colab-sim .past { fill: #E69F00; }
.colab-sim .load, .colab-sim .step { transform-box: fill-box; transform-origin: bottom; }
.colab-sim .number { fill: #fff; font-size: 14px; }
.colab-sim .waits { stroke: #D55E00; stroke-opacity: 1; stroke-width: 4; }
.colab-sim button { font: inherit; color: inherit; background: none; border: 1px solid; width: 5em; }
"""

# Every moment is drawn from the time alone, so that the slider can go anywhere. It starts when it is seen: after
# "Run all" nobody has missed it.
_SCRIPT = """(() => {
  const {seconds, speed, lanes, steps, order} = DATA, readyAt = {};
  for (const lane of lanes) lane.batch.forEach((batch, k) => { readyAt[batch] = lane.end[k]; });
  const find = (starts, t) => starts.findLastIndex(start => start <= t);
  for (const root of document.querySelectorAll('[data-sim="NAME"]:not([data-on])')) {
    root.dataset.on = "yes";
    const all = name => root.querySelectorAll("." + name);
    const [model, frame, state, past, count, button, slider] =
      ["step", "model", "state", "past", "count", "play", "time"].map(name => all(name)[0]);
    let t = seconds, playing = false, auto = true, before = 0;
    const fill = (box, {start, end}, k) => {
      const busy = k >= 0 && t < end[k];
      box.style.transform = `scaleY(${busy ? (t - start[k]) / (end[k] - start[k]) : 0})`;
      return busy;
    };
    const draw = () => {
      all("load").forEach((box, n) => {
        const k = find(lanes[n].start, t);
        all("label")[n].textContent = fill(box, lanes[n], k) ? lanes[n].batch[k] : "idle";
      });
      const k = find(steps.start, t), busy = fill(model, steps, k), done = busy ? k : k + 1;
      all("slot").forEach((box, n) => {
        const batch = order[k + 1 + n], ready = readyAt[batch] <= t;
        box.style.visibility = ready ? "visible" : "hidden";
        all("number")[n].textContent = ready ? batch : "";
      });
      state.textContent = busy ? "trains on " + steps.batch[k] : "waits for " + (order[k + 1] ?? "more");
      frame.classList.toggle("waits", !busy);
      past.setAttribute("width", 960 * t / seconds);
      const worked = steps.start.reduce((sum, start, k) => sum + Math.max(0, Math.min(t, steps.end[k]) - start), 0);
      const share = t ? Math.round(100 * worked / t) : 0, time = t.toFixed(seconds < 10 ? 2 : 1);
      count.textContent = `${time} s, batches done: ${done}, the model worked ${share}% of the time`;
      slider.value = t / seconds;
    };
    const advance = now => {
      if (!playing) return;
      [t, before] = [Math.min(seconds, t + Math.max(0, now - before) / 1000 * speed), now];
      draw();
      if (t < seconds) requestAnimationFrame(advance); else press(false);
    };
    const play = on => {
      if (on === playing) return;
      [playing, before, t] = [on, performance.now(), on && t >= seconds ? 0 : t];
      button.textContent = on ? "Pause" : "Play";
      if (on) requestAnimationFrame(advance);
    };
    const press = on => { auto = false; play(on); };
    button.onclick = () => press(!playing);
    slider.oninput = () => { press(false); t = slider.value * seconds; draw(); };
    draw();
    if (!matchMedia("(prefers-reduced-motion: reduce)").matches)
      new IntersectionObserver(seen => { if (auto) play(seen.pop().isIntersecting); }).observe(root);
  }
})();"""


@dataclass(frozen=True, repr=False)
class Animation:
    """A simulation that plays in a notebook's output; ``html`` is all of it, and needs no server and no network."""

    title: str
    html: str

    def save(self, path: str | Path) -> Path:
        """Write it as a page of its own, and return its path.

        Raises:
            ColabUtilsError: the file cannot be written.
        """
        path = Path(path)
        try:
            write_file(path, build_page(self.title, self.html).encode())
        except OSError as error:
            found = error.strerror or error
            raise ColabUtilsError(f"expected to write {path}, found: {found}. Choose another place.") from error
        return path

    def _repr_html_(self) -> str:
        return self.html

    def __repr__(self) -> str:
        return self.title


def animate_simulation(
    simulation: Simulation, *, seconds: float | None = None, speed: float = 1.0, title: str = ""
) -> Animation:
    """Show a simulation as it happens: workers fill up, batches queue, the model takes them or waits.

    The queue shows the next batches in the order in which the model takes them, the next one on the right: a gap
    there stops the model, however many batches wait behind it. It plays once it is on the screen; where the reader
    prefers reduced motion it waits for a click.

    Args:
        simulation: from `simulate`.
        seconds: how much of it to show; ``None`` shows all. Never more than 1,500 steps.
        speed: simulated seconds in a second.
        title: a few words in front of the finding, such as the name of what is simulated.

    Raises:
        ColabUtilsError: ``seconds`` or ``speed`` is not more than 0.

    Example:
        >>> from colab_utils.diagnosis.simulator import simulate
        >>> animate_simulation(simulate(workers=7, load_s=2.0, step_s=0.1))
        With 7 workers, the model waits 67% of the time
    """
    seconds = simulation.seconds if seconds is None else seconds
    for name, value in {"seconds": seconds, "speed": speed}.items():
        if not (math.isfinite(value) and value > 0):
            raise ColabUtilsError(f"expected {name} to be a number, more than 0; found {value!r}")
    shown = _cut(simulation, seconds)
    crew = (
        f"With {shown.workers} workers"
        if shown.workers > 1
        else "With 1 worker"
        if shown.workers
        else "Without workers"
    )
    title = f"{title}{': ' if title else ''}{crew}, the model waits {shown.stall_share:.0%} of the time"
    slots = min(shown.workers * shown.prefetch, _MAX_SLOTS)
    data = json.dumps(_pack(shown, simulation, slots, speed), separators=(",", ":"))
    name = hashlib.sha256(data.encode()).hexdigest()[:12]
    html = f"""<div class="colab-sim" data-sim="{name}"><style>{_STYLE}</style>
<p><b>{escape(title)}</b></p>{_draw_stage(shown, slots, escape(title))}
<div style="display: flex; gap: 12px; margin: 4px 0"><button class="play" type="button">Play</button>
<input class="time" type="range" min="0" max="1" step="any" value="1" aria-label="time" style="flex: 1"></div>
<output class="count">{shown.batches} batches done in {shown.seconds:.3g} s</output>
<script>{_SCRIPT.replace("NAME", name).replace("DATA", data)}</script></div>"""
    return Animation(title, html)


def _cut(simulation: Simulation, seconds: float) -> Simulation:
    """The first ``seconds`` of a simulation, or less where that holds too many steps."""
    shown_s = min(seconds, simulation.seconds, *simulation.steps.start_s[_MAX_STEPS : _MAX_STEPS + 1].tolist())
    *loads, steps = (
        Trace(*(values[trace.start_s < shown_s] for values in trace)) for trace in (*simulation.loads, simulation.steps)
    )
    return replace(
        simulation, seconds=shown_s, batches=min(int((steps.end_s <= shown_s).sum()), simulation.batches),
        utilisation=float((np.minimum(steps.end_s, shown_s) - steps.start_s).sum() / shown_s),
        loads=tuple(loads), steps=steps,
    )  # fmt: skip


def _pack(shown: Simulation, whole: Simulation, slots: int, speed: float) -> dict[str, Any]:
    """What the script draws: spans in seconds, and the batches in the order in which the model takes them."""
    digits = 4 - math.floor(math.log10(shown.seconds))

    def list_spans(trace: Trace, unfinished: np.ndarray) -> dict[str, list[float]]:
        end_s = trace.end_s + unfinished * shown.seconds / 1000  # what the end cut off has not ended
        start_s = trace.start_s.round(digits)
        return {"batch": trace.batch.tolist(), "start": start_s.tolist(), "end": end_s.round(digits).tolist()}

    lanes = [list_spans(lane, lane.end_s >= whole.seconds) for lane in shown.loads]
    steps = list_spans(shown.steps, np.arange(len(shown.steps.batch)) >= shown.batches)
    sent = np.concatenate([lane.batch for lane in whole.loads])
    order = [*whole.steps.batch.tolist(), *np.setdiff1d(sent, whole.steps.batch).tolist()]
    order = order[: len(shown.steps.batch) + slots + 1]
    return {"seconds": shown.seconds, "speed": speed, "lanes": lanes, "steps": steps, "order": order}


def _draw_stage(shown: Simulation, slots: int, label: str) -> str:
    """The still parts of the drawing, and the model's whole history, which is there without the script too."""
    lanes = min(len(shown.loads), _MAX_LANES)
    crew = f"loading, {lanes} of {shown.workers} workers" if lanes < shown.workers else "loading"
    queue = "ready, the next one on the right" if slots else "no queue"
    pitch, rows = min(80.0, 400 / lanes), max(1, -(-slots // 8))
    columns = max(1, -(-slots // rows))
    width, height = min(60.0, 280 / columns), 104 / rows
    spans = zip(*((960 / shown.seconds * times_s).tolist() for times_s in shown.steps[1:]), strict=True)
    path = "".join(f"M{start:.1f} 0H{end:.1f}V26H{start:.1f}" for start, end in spans)
    parts = [
        f'<text x="200" y="18">{crew}</text><text x="580" y="18">{queue}</text>',
        '<text x="860" y="18">model</text><text x="420" y="90">→</text><text x="745" y="90">→</text>',
        *(_draw_box(200 + (n - lanes / 2) * pitch, 30, pitch, 104, "load box label", 156) for n in range(lanes)),
        *(
            _draw_box(720 - (n % columns + 1) * width, 30 + n // columns * height, width, height, "slot box number")
            for n in range(slots)
        ),
        _draw_box(765, 30, 190, 104, "step model state", 156),
        '<text style="text-anchor: start" x="0" y="192">the model: gaps are waiting</text>',
        f'<text style="text-anchor: end" x="960" y="192">{shown.seconds:.3g} s</text>',
        '<rect class="box" x="0" y="200" width="960" height="26"/>',
        f'<svg class="past" x="0" y="200" width="960" height="26"><path d="{path}"/></svg>',
    ]
    return f'<svg viewBox="0 0 960 230" width="100%" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _draw_box(x: float, y: float, width: float, height: float, names: str, text_y: float | None = None) -> str:
    """What fills up, its frame, and a text in the middle or at ``text_y``; ``names`` are their classes."""
    fill, frame, text = names.split()
    place = f'x="{x + 2:.1f}" y="{y + 2:.1f}" width="{width - 4:.1f}" height="{height - 4:.1f}" rx="3"'
    at = f'x="{x + width / 2:.1f}" y="{text_y or y + height / 2 + 5:.1f}"'
    return f'<rect class="{fill}" {place}/><rect class="box {frame}" {place}/><text class="{text}" {at}/>'


def explore_simulation(
    *, workers: int = 2, load_s: float = 0.4, step_s: float = 0.1, load_cv: float = 0.2, step_cv: float = 0.0,
    prefetch: int = 2, max_workers: int = 8,
) -> Any:  # fmt: skip
    """Sliders for what `simulate` takes: each redraws the chart and says in a sentence what would end the waiting.

    Arguments are those of `simulate`, and where the sliders start. Where widgets do not show, such as in a page made
    of a notebook, the first chart stands there as a picture.

    Args:
        workers: worker processes.
        load_s: mean seconds in which one worker loads one batch, more than 0.
        step_s: mean seconds of one training step, more than 0.
        load_cv: spread of the loading times, standard deviation / mean.
        step_cv: the same for the step; it has no slider.
        prefetch: batches asked for ahead of time for each worker.
        max_workers: the end of the workers' slider, and the most that is recommended.

    Returns:
        An ``ipywidgets.VBox``.

    Raises:
        ColabUtilsError: an argument that no loader could have.

    Example:
        >>> sliders, view, *_ = explore_simulation(workers=2, load_s=0.4, step_s=0.1, load_cv=0).children
        >>> "The step waits 50% of the time; 4 workers or loading a batch in 0.2 s would end it." in view.value
        True
    """
    import ipywidgets
    from IPython.display import HTML, display

    if not (load_s > 0 and step_s > 0):
        raise ColabUtilsError(f"expected load_s and step_s to be numbers, more than 0; found {load_s!r}, {step_s!r}")
    html = _draw_advice(find_cures(
        workers=workers, load_s=load_s, step_s=step_s, load_cv=load_cv, step_cv=step_cv, prefetch=prefetch,
        max_workers=max_workers,
    ))  # fmt: skip
    view = ipywidgets.HTML(html)
    name = f"colab-sim-{hashlib.sha256(html.encode()).hexdigest()[:12]}"

    def make_time_slider(value: float, description: str) -> Any:
        decade = math.log10(value)
        ends = {"min": math.floor(decade) - 1, "max": math.ceil(decade) + 1}
        return ipywidgets.FloatLogSlider(value, description=description, step=0.02, **ends)

    def redraw(_change: Any) -> None:
        now = {key: slider.value for key, slider in sliders.items()}
        view.value = _draw_advice(find_cures(**now, step_cv=step_cv, max_workers=max_workers))

    sliders = {
        "workers": ipywidgets.IntSlider(workers, 0, max(workers, max_workers), description="workers"),
        "load_s": make_time_slider(load_s, "loading a batch, seconds"),
        "load_cv": ipywidgets.FloatSlider(load_cv, min=0, max=max(1.5, load_cv), step=0.05, description="its spread"),
        "step_s": make_time_slider(step_s, "a step, seconds"),
        "prefetch": ipywidgets.IntSlider(prefetch, 1, max(prefetch, 8), description="prefetch, a worker"),
    }
    for slider in sliders.values():
        slider.style.description_width, slider.layout.width, slider.continuous_update = "14em", "36em", False
        slider.observe(redraw, names="value")

    class Explorer(ipywidgets.VBox):
        """Shows the first chart as a picture, which live sliders hide."""

        def _ipython_display_(self, **options: Any) -> None:
            display(HTML(f'<div class="{name}">{html}<p>The sliders need a live notebook.</p></div>'))
            if hasattr(super(), "_ipython_display_"):  # ipywidgets 7
                super()._ipython_display_(**options)
            else:
                display(self._repr_mimebundle_(), raw=True)

    hide = ipywidgets.HTML(f"<style>.{name} {{ display: none; }}</style>")
    return Explorer([ipywidgets.VBox(list(sliders.values())), view, hide])


def _draw_advice(advice: Advice) -> str:
    """The sentence, and the chart of the first steps."""
    figure = plot_timeline(_cut(advice.simulation, float(advice.simulation.steps.start_s[_CHART_STEPS])))
    figure.suptitle("")  # the sentence says it
    picture = embed_figure(figure, alt=str(advice)).replace("<img", '<img style="max-width: 100%"', 1)
    return f'<p style="font-size: 1.2em; font-weight: bold">{advice}</p>{picture}'
