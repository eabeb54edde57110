"""A receipt and the first page of a demo as a person reads them: the finding, the good day beside
it, and titles, text and tables that agree with the numbers.
"""

from __future__ import annotations

import re
from pathlib import Path
from random import Random

import pytest

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.loading.emulated_step import describe_busy
from colab_utils.show.report import write_receipt
from tests.comparisons import make_comparison, make_timing, to_content
from tests.judged_pages import check_page
from tools.pages import NotebookRun, write_demo_index

RUNS = [NotebookRun(Path("01_detect_bottleneck.html"), "1. Detect the bottleneck", 61.0)]


def make_random(seed):
    """A comparison of random rates, shares, spreads and costs, whose step may be busy."""
    random = Random(seed)
    slower = random.choice([1, 1, 2.5])
    rows = []
    for name in COURSE_STRATEGIES:
        waits = random.random()
        rate = 40 / slower * (1 - waits)
        rows.append(
            make_timing(
                name,
                images_per_second=rate,
                wait_share=waits,
                step_ms_median=100 * slower,
                first_batch_s=random.uniform(0.1, 20),
                repeats_images_per_second=(rate * random.uniform(0.7, 1), rate),
                once_ms_per_image=random.uniform(0, 300),
                timeline=make_timeline(random, rate),
            )
        )
    return make_comparison(*rows, busy=describe_busy(100, 100 * slower))


def make_timeline(random, rate):
    spans = []
    begin_s = random.uniform(0.1, 3)
    for _ in range(random.randint(3, 40)):
        spans.append((begin_s, begin_s + 0.1))
        begin_s += 0.1 + random.uniform(0, 8 / rate)
    return tuple(spans)


@pytest.mark.parametrize("seed", [0, 3, 9, 39, 117, 188])
def test_title_text_and_table_agree_whatever_was_measured(tmp_path, seed):
    comparison = make_random(seed)
    check_page(write_receipt(comparison, tmp_path), to_content(comparison))


def write(folder, **comparisons):
    contents = {name: to_content(comparison) for name, comparison in comparisons.items()}
    return write_demo_index(folder / "index.html", RUNS, **contents)


def test_the_first_screen_is_the_finding_the_bars_the_first_seconds_and_the_good_day(tmp_path):
    slow = make_timing("sequential", images_per_second=10.0, wait_share=0.74)
    good = make_comparison(slow, "packed")
    path = write(tmp_path, comparison=make_comparison(), good_day=good)
    check_page(path, to_content(make_comparison()))
    page = path.read_text(encoding="utf-8")
    parts = (
        "The step waits 96% → 4% of the time, and trains 24 times as many images/s",
        "<img",
        "Batches in the first ",
        "<img",
        "And on a good day",
        "The step waits 74% → 4% of the time, and trains 3.8 times as many images/s",
        "<img",
        "Detect the bottleneck",
        "61 s",
        "All figures",
        "606 ms per file",
        "Machine:",
    )
    assert re.search(".*".join(map(re.escape, parts)), page, re.DOTALL)
    assert len(re.findall("<h1", page)) == 1
    assert all(source.startswith("data:") for source in re.findall('src="([^"]*)"', page))


def test_on_a_phone_bars_of_text_say_what_the_charts_say(tmp_path):
    page = write(tmp_path, comparison=make_comparison()).read_text(encoding="utf-8")
    bars, batches = re.findall(r'<ul class="phone">(.*?)</ul>', page, re.DOTALL)
    for name, share in (("plain loop", "96%"), ("make_loader on shards", "4%")):
        assert re.search(rf"{name}: <b>[0-9.]+ images/s, waits {share}</b>", bars), name
        assert re.search(rf"{name}: <b>[0-9]+ batch(es)?</b>", batches), name
    widths = [float(width) for width in re.findall(r"width: ([0-9.]+)%", bars)]
    assert max(widths) == 100
    assert min(widths) < 10
    assert "good day" not in page


def test_without_a_comparison_the_pages_are_found_in_the_colours_of_the_reader(tmp_path):
    page = write(tmp_path).read_text(encoding="utf-8")
    assert "<h1>The notebooks</h1>" in page
    assert "01_detect_bottleneck.html" in page
    assert "color-scheme: light dark" in page
    assert "@media (prefers-color-scheme: dark)" in page
    # A page that is not asked for its colours has no fixed ones for text and ground.
    body = re.search(r"\nbody \{(.*?)\}", page, re.DOTALL)[1]
    assert "color: var(--text)" in body
    assert "background: var(--ground)" in body
