"""The first page of the demo: the finding, and the good day beside it, before everything else."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

import pytest

from tools.pages import NotebookRun, write_demo_index

RUNS = [NotebookRun(Path("01_detect_bottleneck.html"), "1. Detect the bottleneck", 61.0)]


@pytest.fixture
def write(tmp_path):
    def call(**comparisons):
        contents = {
            name: json.loads(json.dumps(asdict(comparison)))
            for name, comparison in comparisons.items()
        }
        return write_demo_index(tmp_path / "index.html", RUNS, **contents).read_text(
            encoding="utf-8"
        )

    return call


def test_the_first_screen_is_the_finding_the_bars_the_first_seconds_and_the_good_day(
    write, course, make_timing, make_comparison
):
    good = [
        make_timing("sequential", images_per_second=10.0, wait_share=0.74),
        make_timing("dataloader", images_per_second=28.0, wait_share=0.28),
        make_timing("packed"),
    ]
    page = write(comparison=make_comparison(*course), good_day=make_comparison(*good))
    order = [
        "The step waits 96% → 4% of the time, and trains 24 times as many images/s as the plain "
        "loop",
        "<img",
        "Batches in the first ",
        "<img",
        "And on a good day",
        "The step waits 74% → 4% of the time, and trains 3.8 times as many images/s as the plain "
        "loop",
        "<img",
        "Detect the bottleneck",
        "61 s",
        "All figures",
        "606 ms per file",
        "Machine:",
    ]
    places = []
    for part in order:
        places.append(page.index(part, places[-1] + 1 if places else 0))
    assert len(re.findall("<h1", page)) == 1
    assert all(source.startswith("data:") for source in re.findall('src="([^"]*)"', page))


def test_on_a_phone_bars_of_text_say_what_the_charts_say(write, course, make_comparison):
    page = write(comparison=make_comparison(*course))
    lists = re.findall(r'<ul class="phone">(.*?)</ul>', page, re.DOTALL)
    assert len(lists) == 2
    for name, share in (("plain loop", "96%"), ("make_loader on shards", "4%")):
        assert re.search(rf"{name}: <b>[0-9.]+ images/s, waits {share}</b>", lists[0]), name
        assert re.search(rf"{name}: <b>[0-9]+ batch(es)?</b>", lists[1]), name
    widths = [float(width) for width in re.findall(r"width: ([0-9.]+)%", lists[0])]
    assert max(widths) == 100
    assert min(widths) < 10


def test_pages_follow_the_colour_scheme_of_the_reader(write):
    page = write()
    assert "color-scheme: light dark" in page
    assert "@media (prefers-color-scheme: dark)" in page
    # A page that is not asked for its colours has no fixed ones for text and ground.
    body = re.search(r"\nbody \{(.*?)\}", page, re.DOTALL)[1]
    assert "color: var(--text)" in body
    assert "background: var(--ground)" in body


def test_without_a_good_day_or_a_comparison_the_pages_are_still_found(
    write, course, make_comparison
):
    assert "good day" not in write(comparison=make_comparison(*course))
    page = write()
    assert "<h1>The notebooks</h1>" in page
    assert "01_detect_bottleneck.html" in page
