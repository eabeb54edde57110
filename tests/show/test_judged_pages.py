"""A receipt and an index as a person reads them: title, text and table against the numbers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from random import Random

import pytest

from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.loading.emulated_step import describe_busy
from colab_utils.show.comparison_charts import plot_cold_start, plot_comparison, plot_epochs
from colab_utils.show.report import write_receipt
from tools.pages import NotebookRun, write_demo_index
from tools.receipts import find_contradictions

RUNS = [NotebookRun(Path("01_detect_bottleneck.html"), "1. Detect the bottleneck", 61.0)]


def to_content(comparison):
    return json.loads(json.dumps(asdict(comparison)))


@pytest.fixture
def content(course, make_comparison):
    return to_content(make_comparison(*course))


@pytest.fixture
def receipt(course, make_comparison, tmp_path):
    return write_receipt(make_comparison(*course), tmp_path / "receipt")


@pytest.fixture
def good_day(make_timing, make_comparison):
    rows = [
        make_timing("sequential", images_per_second=10.4, wait_share=0.74),
        make_timing("packed"),
    ]
    return to_content(make_comparison(*rows))


def test_a_receipt_and_an_index_agree_with_their_numbers(receipt, content, good_day, tmp_path):
    assert find_contradictions(receipt, content) == []
    index = write_demo_index(tmp_path / "index.html", RUNS, comparison=content, good_day=good_day)
    assert find_contradictions(index, content, good_day) == []


def change_row(content, number, **values):
    rows = [dict(row) for row in content["strategies"]]
    rows[number] |= values
    return {**content, "strategies": rows}


@pytest.mark.parametrize(
    ("number", "values", "sentence"),
    [
        (0, {"wait_share": 0.9}, "The step waits 96% → 4% of the time"),
        (4, {"wait_share": 0.2}, "The step waits 96% → 4% of the time"),
        (4, {"images_per_second": 30.0}, "trains 24 times as many images/s"),
        (0, {"repeats_images_per_second": [1.5, 1.6, 60.0]}, "trains 24 times as many"),
        (0, {"timeline": [[2.4, 2.5]]}, "2 with plain loop"),
        (4, {"timeline": [[0.1, 0.2]]}, "with make_loader"),
        (1, {"timeline": [[1.0, 1.1]]}, "waits 93%, 5 batches"),
        (4, {"once_ms_per_image": 1500.0}, "9 epochs of 118,287 images: 13 hours"),
        (2, {"cold_ms_per_image": 5000.0}, "15 hours with 32 streams"),
        (1, {"images_per_second": 3.9}, "3.2  waits 92%"),
        (3, {"images_per_second": 48.0}, "the step alone: 40"),
        (1, {"wait_share": 0.5}, "2 workers: waits, % 92"),
        (1, {"first_batch_s": 2.5}, "2 workers: first batch, s 1.5"),
    ],
)
def test_what_a_receipt_says_is_held_against_each_number(
    receipt, content, number, values, sentence
):
    lines = find_contradictions(receipt, change_row(content, number, **values))
    assert any(sentence in line and " measured: " in line for line in lines)
    assert all(line.startswith("receipt/index.html: ") for line in lines)


def test_the_good_day_is_held_against_its_own_numbers(content, good_day, tmp_path):
    index = write_demo_index(tmp_path / "index.html", RUNS, comparison=content, good_day=good_day)
    changed = change_row(good_day, 0, wait_share=0.5)
    lines = find_contradictions(index, content, changed)
    assert any("The step waits 74% → 4%" in line for line in lines)
    assert not any("96%" in line.partition(" measured: ")[0] for line in lines)


def slow_steps(content, times):
    """The same shares of waiting, and all of it so many times as long."""
    rows = [
        {
            **row,
            "images_per_second": row["images_per_second"] / times,
            "step_ms_median": row["step_ms_median"] * times,
            "repeats_images_per_second": [
                rate / times for rate in row["repeats_images_per_second"]
            ],
        }
        for row in content["strategies"]
    ]
    return {**content, "strategies": rows}


def test_a_busy_machine_has_to_be_said_and_a_quiet_one_must_not_be_called_busy(
    content, good_day, tmp_path
):
    busy = describe_busy(100, 250)
    slow = slow_steps(content, 2.5)
    cases = [
        (slow, "", "the step took 250 ms, not 100"),
        ({**slow, "busy": busy}, busy, ""),
        ({**content, "busy": busy}, busy, "the step took 100 ms, not 100"),
    ]
    for number, (changed, warning, wrong) in enumerate(cases):
        index = write_demo_index(
            tmp_path / f"{number}.html", RUNS, comparison=changed, good_day=good_day
        )
        text = index.read_text(encoding="utf-8")
        assert text.count(f"<h1>{warning}".strip()) == 1
        lines = find_contradictions(index, changed, good_day)
        assert bool(lines) == bool(wrong)
        assert all(wrong in line for line in lines)


def test_a_gain_that_is_none_is_judged_too(make_timing, make_comparison, tmp_path):
    slow = make_timing("packed", images_per_second=1.65, wait_share=0.955)
    comparison = make_comparison(make_timing("sequential"), slow)
    page = write_receipt(comparison, tmp_path)
    content = to_content(comparison)
    assert find_contradictions(page, content) == []
    lines = find_contradictions(page, change_row(content, 1, images_per_second=16.0))
    assert any("no other way is 10% faster" in line for line in lines)


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
    page = write_receipt(comparison, tmp_path)
    assert find_contradictions(page, to_content(comparison)) == []


@pytest.mark.parametrize("seed", [0, 3, 9, 39, 117, 188])
def test_what_is_drawn_is_what_is_written_beside_it(make_random, seed):
    comparison = make_random(seed)
    axis = plot_comparison(comparison).axes[0]
    for patch, text in zip(axis.patches, axis.texts, strict=False):
        rate = float(text.get_text().split()[0])
        assert rate == pytest.approx(patch.get_width(), rel=0.05)
    axis = plot_cold_start(comparison).axes[0]
    shown_s = axis.get_xlim()[1]
    assert len(axis.texts) == len(axis.collections) == len(axis.patches) == len(COURSE_STRATEGIES)
    for frame, bars, text in zip(axis.patches, axis.collections, axis.texts, strict=True):
        spans = [path.get_extents().intervalx for path in bars.get_paths()]
        ends_s = [end_s for _, end_s in spans if end_s <= shown_s + 1e-9]
        worked_s = sum(max(0.0, min(end_s, shown_s) - begin_s) for begin_s, end_s in spans)
        waits = 100 * (1 - worked_s / frame.get_width())
        words = text.get_text().split()
        assert words[0] == "waits"
        assert float(words[1].rstrip("%,")) == pytest.approx(waits, abs=0.51)
        assert int(words[2]) == len(ends_s)
    axis = plot_epochs(comparison).axes[0]
    lines = [line for line in axis.get_lines() if len(line.get_xdata()) > 2]
    hours = sorted(line.get_ydata()[-1] for line in lines)
    texts = sorted(float(text.get_text().split()[-2].replace(",", "")) for text in axis.texts)
    assert texts == pytest.approx(hours, rel=0.06)
