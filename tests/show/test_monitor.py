"""The live picture of a training run."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest

from colab_utils.show import monitor
from colab_utils.show.monitor import LiveMonitor, draw_run


def make_line(step, *, steps=1000, loss=1.0, gpu=None, ap=None):
    return SimpleNamespace(
        step=step, steps=steps, loss=loss, images_per_second=5.0, wait_share=0.02, gpu_bytes=gpu, ap=ap, ap_step=step
    )


def test_every_figure_is_shown():
    lines = [make_line(n, loss=4 / n, gpu=9_000_000_000) for n in range(1, 40)]
    page = draw_run(lines, plan="a model <b>")
    text = re.sub("<[^>]*>", " ", page)
    for part in ("a model &lt;b&gt;", "step 39 of 1,000", "loss", "0.105", "images/s", "5.0", "waits for data", "2%",
                 "GPU memory", "9.0 GB"):  # fmt: skip
        assert part in text, part
    assert page.count("<polyline") == 4
    assert '<progress value="39" max="1000"' in page


def test_a_long_run_stays_small():
    few, many = (draw_run([make_line(n) for n in range(count)]) for count in (200, 20_000))
    assert len(many) < 1.5 * len(few)


def test_without_a_gpu_there_is_no_such_panel_and_an_evaluation_is_said():
    page = draw_run([make_line(1), make_line(156, ap=SimpleNamespace(bbox=0.3049, segm=0.008)), make_line(160)])
    assert page.count("<polyline") == 3
    assert "after step 156: masks 1% of perfect, boxes 30% (average precision)" in page


def test_text_has_the_pages_colour_and_curves_stand_on_a_zero():
    page = draw_run([make_line(n) for n in (1, 2, 3)], plan="a plan")
    assert set(re.findall(r"[^-]color:([^;\"]*)", page)) == {"inherit"}
    assert set(re.findall('fill="([^"]*)"', page)) == {"currentColor", "none"}
    assert re.findall("<text[^>]*>(.*?)</text>", page) == ["0", "0", "0"]


@pytest.mark.parametrize("page", [(255, 255, 255), (56, 56, 56), (17, 17, 17)])  # white, Colab's dark, JupyterLab's
def test_curves_are_seen_on_light_and_dark(page):
    def light(*colour):
        parts = (c / 255 / 12.92 if c < 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour)
        return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), parts, strict=True)) + 0.05

    strokes = set(re.findall('stroke="(#[^"]*)"', draw_run([make_line(1, gpu=1)])))
    assert len(strokes) == 2
    for stroke in strokes:
        pair = sorted((light(*bytes.fromhex(stroke[1:])), light(*page)))
        assert pair[1] / pair[0] >= 3  # what WCAG asks of graphics


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_draws(loss):
    assert "<polyline" in draw_run([make_line(1), make_line(2, loss=loss)])


def test_in_a_notebook_one_picture_is_redrawn_and_not_too_often(monkeypatch):
    drawn, clock = [], [0.0]

    def display(page, *, display_id, update):
        drawn.append((display_id, update, page.data))

    monkeypatch.setattr(monitor, "is_notebook", lambda: True)
    monkeypatch.setattr(monitor, "monotonic", lambda: clock[0])
    monkeypatch.setattr("IPython.display.display", display)
    live = LiveMonitor(every_s=1.0)
    live(SimpleNamespace(steps=10))  # the plan has no loss
    for step in range(1, 11):
        clock[0] += 0.3
        live(make_line(step, steps=10))
    ids, updates, pages = zip(*drawn, strict=True)
    assert len(set(ids)) == 1
    assert updates == (False, *[True] * (len(drawn) - 1))
    assert 4 <= len(drawn) <= 7
    assert "step 10 of 10" in pages[-1]  # the end is always drawn


def test_elsewhere_lines_are_printed(capsys):
    LiveMonitor()("a line")
    assert capsys.readouterr().out == "a line\n"
