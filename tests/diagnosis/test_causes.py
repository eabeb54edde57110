"""Each cause of a slow loop is named with its share and its cure."""

import re

import numpy as np
import pytest

from colab_utils.diagnosis import causes as module
from colab_utils.diagnosis.causes import find_causes, refine_causes
from colab_utils.diagnosis.memory_growth import Growth
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.summary import LoopRecord


def make_record(**settings):
    """Two workers that take turns with nobody, in a loop of ten seconds."""
    record = LoopRecord([])
    usual = {"workers": 2, "cpu_s": 5.0}
    for name, value in {**usual, **settings}.items():
        assert hasattr(record, name)
        setattr(record, name, value)
    return record


def find(waits=None, between=None, firsts=(0,), **settings):
    """The causes in a loop of 100 batches that takes ten seconds."""
    waits = np.full(100, 0.0) if waits is None else np.array(waits, float)
    between = np.zeros(100) if between is None else np.array(between, float)
    return find_causes(
        waits, between, np.isin(np.arange(100), firsts), 10.0, make_record(**settings)
    )


def spread(value, *, every=1):
    return [value if number % every == every - 1 else 0.0 for number in range(100)]


def sum_up(samples):
    """What workers note of samples, each with its seconds and its index; half of the time is
    work.
    """
    spread = [(0, 0.0)] * 48
    wall_s = sum(seconds for seconds, _ in samples)
    for seconds, _ in samples:
        bits = int(seconds * 1e9).bit_length()
        spread[bits] = spread[bits][0] + 1, spread[bits][1] + seconds
    return SampleTimes(
        len(samples), wall_s, wall_s / 2, 0.0, 0, max(samples), wall_s / 2, tuple(spread)
    )


def test_a_loop_that_never_waits_has_no_cause():
    assert find(waits=spread(0.005), between=spread(0.005)) == []
    assert find(waits=[3.0, *[0.0] * 99]) == []  # every run starts once


@pytest.mark.parametrize(
    ("loop", "id", "words"),
    [
        ({"between": spread(0.06)}, "between", r"busy for 60 ms .*optimizer.step"),
        ({"between": spread(0.8, every=10)}, "periodic", r"About every 10 batches .* busy 0.8 s"),
        (
            {"waits": spread(1.0, every=25), "firsts": (24, 49, 74, 99)},
            "restarts",
            r"4 passes waits 1 s .* start anew.*persistent_workers=True.*make passes longer",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4, 0.2)},
            "read",
            r"takes 70 ms, and waits 67 ms",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4, 0.2, 200 * 300_000)},
            "read",
            r"data: only 300.0 kB, so mostly for the first byte",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4, 0.2, 200 * 4_000_000)},
            "read",
            r"data: 4.0 MB, at 60 MB/s. It is the bandwidth. .*Shrink",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 13.0, 0.2), "cpu_s": 14.0},
            "work",
            r"65 ms of work.*1.4 of 2 cores are busy.*more workers",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 4.0, 9.5)},
            "work",
            r"more workers would not help",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 1.0, 1.0, worker_cpu_s=6.0)},
            "collate",
            r"83% of their CPU",
        ),
        # other children of this process are busy, too: the evaluation
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 0.2, worker_cpu_s=0.5),
                "cpu_s": 30.0,
            },
            "read",
            r"waits 67 ms",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 9.0, 8.0),
                "cpu_s": 19.0,
                "workers": 16,
            },
            "too_many_workers",
            r"16 workers share 2 cores.*num_workers=2",
        ),
        (
            {
                "waits": spread(1.0, every=25),
                "times": sum_up([*[(0.01, 4)] * 196, *[(1.0, 37)] * 4]),
            },
            "slow_sample",
            r"Sample 37 takes 1 s: loads as slow \(4 of 200\) hold 67% of the time",
        ),
        (
            {
                "waits": spread(1.0, every=25),
                "times": sum_up([*[(0.01, 4)] * 196, (0.9, 5), *[(1.0, 37)] * 3]),
            },
            "slow_sample",
            r"Sample 37 takes 1 s: loads as slow \(4 of 200\) hold 6\d%",
        ),
        # hours later: a thousand times as many samples, the eight slowest of which are kept
        (
            {
                "waits": spread(1.0, every=25),
                "times": sum_up([*[(0.01, 4)] * 196_000, *[(1.0, 37)] * 4_000]),
            },
            "slow_sample",
            r"Sample 37 takes 1 s: loads as slow \(4,000 of 200,000\) hold 67% of the time",
        ),
        # one sample that had no core for a moment, in a loop that waits for something else
        (
            {
                "waits": spread(0.05),
                "times": sum_up([*[(0.0005, 4)] * 200, (0.3, 37)])._replace(worker_cpu_s=6.0),
            },
            "collate",
            r"of their CPU time outside of samples",
        ),
        (
            {"waits": spread(1.0, every=25), "seen": {24: (37,), 49: (3,)}, "workers": 0},
            "slow_sample",
            r"Sample 37 takes 1 s: 2 of 100 batches are so slow",
        ),
        (
            {"waits": spread(0.05), "workers": 0},
            "work",
            r"loads the samples itself.*Use worker processes",
        ),
    ],
)
def test_each_cause_is_named_with_its_cure(loop, id, words, monkeypatch):
    monkeypatch.setattr(module, "count_cores", lambda: 2)
    (cause,) = find(**loop)
    assert cause.id == id
    assert cause.share == pytest.approx(
        sum(loop.get("waits") or loop["between"]) / 10, rel=0.02
    )  # a first batch is no wait
    assert re.search(words, f"{cause.why} {cause.next}"), cause


def test_two_causes_stand_in_the_order_of_their_shares():
    found = find(between=spread(0.06), waits=spread(0.02), times=SampleTimes(200, 14.0, 0.4, 0.2))
    assert [cause.id for cause in found] == ["between", "read"]


def test_contention_has_its_share_of_the_loop_not_of_the_step():
    (cause,) = refine_causes([], [], slower=2, step_share=0.5, waits=True)
    assert (cause.id, cause.share) == ("contention", 0.25)


def test_memory_that_grows_is_named_beside_a_fine_loop():
    (cause,) = find(growth=Growth(2.5, 4000, {"this process": 2.5}))
    assert cause.id == "memory"
    assert "at step 4,000" in cause.why
