"""The simulated loop: a published reference, the exact laws, and the real DataLoader beside it."""

import dataclasses
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader

from colab_utils.diagnosis.simulator import Loop, forecast_rate, simulate
from colab_utils.errors import ColabUtilsError
from tests.diagnosis.loops import Samples


@pytest.mark.parametrize(
    ("load_s", "load_cv", "batches", "tolerance"),
    [
        # The loaders are the limit.
        (2.0, 0.0, 98, 0),
        # The step is the limit.
        (0.35, 0.0, 295, 2),
        # Loading and step are in balance, where variance costs most.
        (0.7, 0.22, 275, 1),
    ],
)
def test_seven_loaders_deliver_as_many_batches_as_the_reference(
    load_s, load_cv, batches, tolerance
):
    runs = [
        simulate(workers=7, load_s=load_s, step_s=0.1, load_cv=load_cv, seed=seed).batches
        for seed in range(60 if load_cv else 1)
    ]
    assert np.mean(runs) == pytest.approx(batches, abs=tolerance)


def test_traces_follow_the_recursion():
    times = {"load_s": 0.2, "load_cv": 0.5, "step_s": 0.1, "step_cv": 0.3}
    run = simulate(workers=3, prefetch=2, seconds=20, **times)
    loads = np.hstack(run.loads)
    _, starts, ends = loads[:, loads[0].argsort()]
    batch, taken, stepped = run.steps
    assert (np.diff(batch) == 1).all()
    assert len(batch) > 100
    assert max(stepped) <= 20
    for i in range(6, len(batch) - 6):
        assert starts[i] == pytest.approx(max(ends[i - 3], taken[i - 6]))
        assert taken[i] == pytest.approx(max(ends[i], stepped[i - 1]))


def test_seed_repeats_and_changes():
    settings = {"workers": 2, "load_s": 0.2, "step_s": 0.1, "load_cv": 0.5}
    ends_s = [simulate(**settings, seed=seed).steps.end_s.tolist() for seed in (1, 1, 2)]
    assert ends_s[0] == ends_s[1] != ends_s[2]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # There cannot be fewer workers than none.
        ({"workers": -1}, "workers"),
        # This is no number.
        ({"load_s": float("nan")}, "load_s"),
        # The batches would never end.
        ({"load_s": 0, "step_s": 0}, "load_s or step_s more than 0"),
        # This leaves no time at all.
        ({"seconds": 0}, "no batch, or more than 1,000,000"),
        # There is no machine without a core.
        ({"cores": 0}, "cores"),
        # One of the measured times is no time, or none was measured.
        ({"read_s": [0.1, -0.1]}, "read_s"),
        ({"read_s": []}, "read_s"),
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ColabUtilsError, match=words):
        simulate(**{"workers": 2, "load_s": 0.1, "step_s": 0.1, **settings})


# Reads with a long tail, as those of a slow Drive.
_READS = tuple(np.random.default_rng(0).lognormal(-0.8, 0.8, 160).tolist())
_SLOW = Loop(workers=2, step_s=0.1, batch_size=4, read_s=_READS, work_s=0.004, cores=2)


def _forecast(**changes):
    return forecast_rate(dataclasses.replace(_SLOW, **changes), batches=400)


@pytest.mark.parametrize(
    ("changes", "limit"),
    [
        # Each term of the law decides once: the mean of the reads, the cores, the link, the step.
        ({"in_order": False}, 2 / (np.mean(_READS) + 0.004)),
        ({"workers": 8, "read_s": (0.0,), "work_s": 0.08}, 2 / (0.08 + 0.09 / 4)),
        ({"streams": 64, "files_per_s": 20}, 20),
        ({"streams": 64}, 4 / 0.1),
        # Without workers, all is done one after the other.
        ({"workers": 0}, 4 / (4 * np.mean(_READS) + 4 * 0.004 + 0.1)),
        # A batch is handed over by its worker, and received by the process that trains.
        ({"read_s": (0.0,), "work_s": 0.0, "handoff_s": 0.4, "cores": 4}, 2 * 4 / 0.4),
        ({"read_s": (0.0,), "work_s": 0.0, "take_s": 0.1}, 4 / 0.2),
        # Threads that hand over what comes first read all the time.
        (
            {"workers": 0, "streams": 8, "read_ahead": 8, "in_order": False},
            8 / (np.mean(_READS) + 0.004),
        ),
    ],
)
def test_the_largest_term_decides(changes, limit):
    assert _forecast(**changes) == pytest.approx(limit, rel=0.05)


_BUSY = {"workers": 8, "read_s": (0.0,), "work_s": 0.08}
_LOCKED = {"workers": 0, "streams": 8, "read_ahead": 8, "read_s": (0.0,), "work_s": 0.02}


# Two loops, and the rate of the first one over that of the second one: from, and to.
@pytest.mark.parametrize(
    ("first", "second", "low", "high"),
    [
        # In order, all wait for the slowest.
        ({"workers": 8}, {"workers": 8, "in_order": False}, 0, 0.95),
        # Times that are equal make no difference.
        (
            {"workers": 8, "read_s": (0.5,)},
            {"workers": 8, "read_s": (0.5,), "in_order": False},
            0.99,
            1.01,
        ),
        # Reading far ahead of the step wins it back.
        ({"streams": 16}, {"streams": 16, "in_order": False}, 0.98, 1.01),
        # Streams that read only their own batch wait for its slowest file.
        ({}, {"streams": 4, "read_ahead": 0}, 0, 0.7),
        # A step takes longer where work has its core.
        (_BUSY, {**_BUSY, "cores": 9}, 0, 0.5),
        # Threads that hold the lock share a few cores.
        (_LOCKED, {**_LOCKED, "cores": 3.3}, 0, 0.9),
        # An epoch that ends uses up what was loaded ahead.
        ({"workers": 4, "epoch_batches": 8}, {"workers": 4}, 0, 0.9),
    ],
)
def test_one_loop_is_so_much_slower_than_another_one(first, second, low, high):
    assert low <= _forecast(**first) / _forecast(**second) <= high


def test_workers_that_start_again_add_their_time_to_each_epoch():
    epoch = {"workers": 4, "epoch_batches": 8}
    restarts = _forecast(**epoch, start_s=1.0)
    assert 32 / restarts == pytest.approx(32 / _forecast(**epoch) + 1.0, rel=0.02)


def test_measured_reads_come_once_before_any_comes_again():
    run = simulate(workers=0, step_s=0.0, read_s=[0.1, 0.2, 0.4], seconds=7)
    lengths = (run.loads[0].end_s - run.loads[0].start_s).round(9)[:27].reshape(-1, 3)
    assert np.sort(lengths).tolist() == [[0.1, 0.2, 0.4]] * 9


def _time_loader(load_s, step_s, seconds, **settings):
    """Seconds a batch of the real DataLoader, with workers and a step that sleep, and the number of
    batches.
    """
    if settings["num_workers"] == 0:
        settings["prefetch_factor"] = None
    samples = Samples(len(load_s), act=lambda index: time.sleep(max(0, load_s[index])))
    loader = DataLoader(samples, batch_size=None, **settings)
    ended_s = []
    for _, sleep_s in zip(loader, step_s, strict=False):
        time.sleep(max(0, sleep_s))
        ended_s.append(time.perf_counter())
        if ended_s[-1] - ended_s[0] > seconds:
            break
    return (ended_s[-1] - ended_s[0]) / (len(ended_s) - 1), len(ended_s)


def _measure_surplus(workers, load_s, step_s):
    """Seconds that a load and a step take beyond their sleep: this machine wakes up late, and gets
    going late.
    """
    many = [load_s] * 1000
    none = [0.0] * 1000
    if not workers:
        return _time_loader(many, none, 0.4, num_workers=0)[0] - load_s, 0.0
    load, _ = _time_loader(many, none, 0.4, num_workers=1)
    step, _ = _time_loader(none, [step_s] * 1000, 0.4, num_workers=1, prefetch_factor=8)
    return load - load_s, step - step_s


def _compare_loader(run, settings):
    """Batches of the real DataLoader over simulated ones in the same time."""
    over_load, over_step = _measure_surplus(
        settings["workers"], settings["load_s"], settings["step_s"]
    )
    spans = sorted(
        (batch, end - start)
        for trace in run.loads
        for batch, start, end in zip(*trace, strict=True)
    )
    batch_s, count = _time_loader(
        [load_s - over_load for _, load_s in spans],
        run.steps.end_s - run.steps.start_s - over_step,
        1.5,
        num_workers=settings["workers"],
    )
    return (run.steps.end_s[count - 1] - run.steps.end_s[0]) / (count - 1) / batch_s


@pytest.mark.clock
# There may be more workers than cores, because they only sleep.
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    "settings",
    [
        # Without workers, loading and training alternate.
        {"workers": 0, "load_s": 0.03, "step_s": 0.02},
        # Loading and step are in balance, and unsteady.
        {"workers": 4, "load_s": 0.16, "step_s": 0.04, "load_cv": 0.5, "step_cv": 0.2},
    ],
)
def test_real_dataloader_does_as_many_batches(settings):
    run = simulate(**settings, seconds=60)
    rates = []
    # On a busy machine one quiet run of four is enough.
    for _ in range(4):
        rates.append(_compare_loader(run, settings))
        if abs(rates[-1] - 1) < 0.03:
            break
    assert rates[-1] == pytest.approx(1, abs=0.03), rates
