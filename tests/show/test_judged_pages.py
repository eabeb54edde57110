"""A receipt and an index as a person reads them: title, text and table against the numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.loading.emulated_step import describe_busy
from colab_utils.show.report import write_receipt
from tests.judged_pages import check_page
from tools.pages import NotebookRun, write_demo_index

RUNS = [NotebookRun(Path("01_detect_bottleneck.html"), "1. Detect the bottleneck", 61.0)]


def to_content(comparison):
    return json.loads(json.dumps(asdict(comparison)))


def test_a_receipt_and_an_index_agree_with_their_numbers(
    course, make_timing, make_comparison, tmp_path
):
    comparison = make_comparison(*course)
    content = to_content(comparison)
    check_page(write_receipt(comparison, tmp_path / "receipt"), content)
    slow = make_timing("sequential", images_per_second=10.4, wait_share=0.74)
    good_day = to_content(make_comparison(slow, make_timing("packed")))
    index = write_demo_index(tmp_path / "index.html", RUNS, comparison=content, good_day=good_day)
    check_page(index, content)
    assert "The step waits 74% → 4% of the time" in index.read_text(encoding="utf-8")


def test_a_gain_that_is_none_is_not_called_one(make_timing, make_comparison, tmp_path):
    slow = make_timing("packed", images_per_second=1.65, wait_share=0.955)
    comparison = make_comparison(make_timing("sequential"), slow)
    page = write_receipt(comparison, tmp_path)
    check_page(page, to_content(comparison))
    assert "no other way is 7% faster" in page.read_text(encoding="utf-8")


@pytest.fixture
def make_random(make_timing, make_comparison):
    """A comparison of random rates, shares, spreads and costs, whose step may be busy."""

    def make(seed):
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

    return make


def make_timeline(random, rate):
    spans = []
    begin_s = random.uniform(0.1, 3)
    for _ in range(random.randint(3, 40)):
        spans.append((begin_s, begin_s + 0.1))
        begin_s += 0.1 + random.uniform(0, 8 / rate)
    return tuple(spans)


@pytest.mark.parametrize("seed", [0, 3, 9, 39, 117, 188])
def test_title_text_and_table_agree_whatever_was_measured(make_random, tmp_path, seed):
    comparison = make_random(seed)
    check_page(write_receipt(comparison, tmp_path), to_content(comparison))
