"""What moves: the animation and the sliders show what was simulated, and the monitor what was
trained.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from colab_utils.course import live
from colab_utils.course.live import LiveMonitor, animate_simulation, draw_run
from colab_utils.diagnosis.simulator import simulate
from colab_utils.errors import ColabUtilsError
from colab_utils.training.evaluate import AveragePrecision

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


def read_data(animation):
    """What the page's script draws."""
    return json.loads(re.search("data-spans='([^']*)'", animation.data)[1])


def read_title(animation):
    return re.search("<b>(.*?)</b>", animation.data)[1]


@pytest.fixture(scope="module")
def stalled():
    return simulate(workers=7, load_s=2.0, step_s=0.1)


def test_the_animation_carries_every_span(stalled):
    data = read_data(animate_simulation(stalled, speed=2))
    assert (data["seconds"], data["speed"], len(data["lanes"])) == (30, 2, 7)
    lanes = (*data["lanes"], data["steps"])
    for drawn, trace in zip(lanes, (*stalled.loads, stalled.steps), strict=True):
        # What the end cuts off lasts a little longer.
        spans = [trace.batch, trace.start_s, trace.end_s]
        np.testing.assert_allclose(drawn, spans, atol=0.04)
    assert sum(end <= 30 for end in data["steps"][2]) == stalled.batches == 98
    # At full speed, 3 batches a second are too fast to watch.
    assert read_data(animate_simulation(stalled))["speed"] == 0.5


def test_without_workers_the_title_is_the_finding_and_no_batch_waits():
    alone = animate_simulation(simulate(workers=0, load_s=0.3, step_s=0.1, seconds=4))
    assert (
        read_title(alone)
        == "10 batches in 4 s with 0 workers: the step worked 25% of the time and waited 75%"
    )
    assert 'class="place"' not in alone.data


def test_it_needs_no_network_and_no_server(stalled):
    html = animate_simulation(stalled).data
    assert not re.search(r"https?:|//[a-z]|\bsrc=|\bhref=|@import|\bfetch\(|\beval\(", html)


def test_a_long_simulation_stays_small():
    crowd = simulate(workers=40, load_s=0.04, step_s=0.001, load_cv=0.5, prefetch=4, seconds=60)
    animation = animate_simulation(crowd)
    data = read_data(animation)
    assert len(data["steps"][0]) == 1500
    # The title speaks of the whole simulation.
    assert read_title(animation) == str(crowd)
    assert f"in the first {data['seconds']:.3g} s" in animation.data
    assert len(animation.data) < 150_000
    assert animation.data.count('class="load"') == 16
    assert "16 of 40 workers" in animation.data
    assert animation.data.count('class="place"') == 16


def test_impossible_speeds_are_refused(stalled):
    with pytest.raises(ColabUtilsError, match=r"expected speed over 0, found"):
        animate_simulation(stalled, speed=0)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium is installed")
def test_a_browser_counts_as_the_simulation_does(stalled, tmp_path):
    # It comes twice, as where one output is opened in two views.
    runs = (stalled, stalled)
    half = (
        "for (const slider of document.querySelectorAll('.time')) { slider.value = 0.5; "
        "slider.oninput(); }"
    )
    page = tmp_path / "page.html"
    pages = "".join(animate_simulation(run).data for run in runs)
    page.write_text(f"<body>{pages}<script>{half}</script></body>", encoding="utf-8")
    command = (
        f"{CHROMIUM} --headless --no-sandbox --disable-gpu --disable-quic --no-first-run "
        f"--disable-sync --disable-background-networking --disable-component-update "
        f"--user-data-dir={tmp_path}/user --dump-dom {page.as_uri()}"
    )
    done = subprocess.run(command.split(), check=True, capture_output=True, text=True, timeout=60)
    expected = []
    for run in runs:
        t = run.seconds / 2
        expected.append(f"{int((run.steps.end_s <= t).sum())} batches in {t:.1f} s")
    assert re.findall(r'<output class="count">([^<]*)<', done.stdout) == expected


# These tests look at the monitor of a training run.


def make_line(step, *, steps=1000, loss=1.0, gpu=None, ap=None):
    return SimpleNamespace(
        step=step,
        steps=steps,
        loss=loss,
        images_per_second=5.0,
        wait_share=0.02,
        gpu_bytes=gpu,
        ap=ap,
    )


def test_every_figure_is_shown():
    lines = [make_line(n, loss=4 / n, gpu=9_000_000_000) for n in range(1, 40)]
    page = draw_run(lines, plan="a model <b>")
    text = re.sub("<[^>]*>", " ", page)
    for part in (
        "a model &lt;b&gt;",
        "step 39 of 1,000",
        "loss",
        "0.103",
        "images/s",
        "5.0",
        "waits for data",
        "2%",
        "GPU memory",
        "9.0 GB",
    ):
        assert part in text, part
    assert page.count("<polyline") == 4
    assert '<progress value="39" max="1000"' in page


def test_a_long_run_stays_small():
    # A loss may be no number.
    lines = [make_line(n, loss=math.nan if n % 2 else math.inf) for n in range(20_000)]
    assert len(draw_run(lines)) < 1.5 * len(draw_run(lines[:200]))


def test_without_a_gpu_there_is_no_such_panel_and_an_evaluation_is_said():
    precision = AveragePrecision(0.3049, 0.008, 0.5, 0.1, 9, 156)
    page = draw_run([make_line(1), make_line(156, ap=precision), make_line(160)])
    assert page.count("<polyline") == 3
    assert "after step 156: masks 1% of perfect, boxes 30% (average precision)" in " ".join(
        page.split()
    )


def test_in_a_notebook_one_picture_a_run_is_redrawn_and_not_too_often(monkeypatch):
    pictures = []
    clock = [0.0]

    def display(page, *, display_id):
        assert display_id is True
        pictures.append([page.data])
        return SimpleNamespace(update=lambda page: pictures[-1].append(page.data))

    monkeypatch.setattr(live, "is_notebook", lambda: True)
    monkeypatch.setattr(live, "monotonic", lambda: clock[0])
    monkeypatch.setattr("IPython.display.display", display)
    monitor = LiveMonitor()
    # A second run begins with its plan.
    for _ in range(2):
        monitor("a plan")
        for step in range(1, 11):
            clock[0] += 0.3
            monitor(make_line(step, steps=10))
    assert len(pictures) == 2
    for drawn in pictures:
        assert "step 1 of 10" in drawn[1]
        assert 4 <= len(drawn) <= 7
        # The end is always drawn.
        assert "step 10 of 10" in drawn[-1]
