"""The simulated DataLoader: a published reference, the exact laws, and the real DataLoader beside it."""

import itertools
import time

import numpy as np
import pytest
from torch.utils.data import DataLoader, Dataset

from colab_utils.diagnosis.simulator import simulate
from colab_utils.errors import ColabUtilsError

# Python 3.12 warns that a process with threads forks: torch's DataLoader does, by design
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


@pytest.mark.parametrize(
    ("load_s", "load_cv", "batches", "tolerance"),
    [
        (2.0, 0.0, 98, 0),  # the loaders are the limit
        (0.35, 0.0, 295, 2),  # the step is the limit
        (0.7, 0.22, 275, 1),  # in balance, where variance costs most
    ],
)
def test_reference_of_seven_loaders(load_s, load_cv, batches, tolerance):
    runs = [
        simulate(workers=7, load_s=load_s, step_s=0.1, load_cv=load_cv, seed=seed).batches
        for seed in range(200 if load_cv else 1)
    ]
    assert np.mean(runs) == pytest.approx(batches, abs=tolerance)


@pytest.mark.parametrize(
    ("workers", "prefetch", "ratio", "in_order", "efficiency"),
    [
        (1, 2, 0.8, True, 0.985),  # one worker: order is no question
        (2, 2, 1.0, True, 0.886),  # balance, two workers
        (2, 2, 1.0, False, 0.950),  # taking what is ready wins half of it back
        (2, 8, 1.0, True, 0.973),  # so does asking for more ahead
        (12, 2, 1.25, True, 0.764),  # many workers wait for the slowest one
        (12, 2, 1.25, False, 0.996),  # unless the order is free
    ],
)
def test_efficiency_table(workers, prefetch, ratio, in_order, efficiency):
    # loading CV 0.5, step CV 0.1: the table was computed with the recursion over 20,000 batches
    seconds = 1000
    run = simulate(
        workers=workers, load_s=ratio * workers * 0.1, step_s=0.1, load_cv=0.5, step_cv=0.1,
        prefetch=prefetch, in_order=in_order, seconds=seconds,
    )  # fmt: skip
    assert run.batches / (seconds * min(10, 10 / ratio)) == pytest.approx(efficiency, abs=0.02)


def test_without_workers_loading_and_training_alternate():
    run = simulate(workers=0, load_s=0.3, step_s=0.1, seconds=4)
    assert run.batches == 10
    assert run.stall_share == pytest.approx(0.75)
    np.testing.assert_allclose(run.loads[0].start_s, run.steps.end_s - 0.4, atol=1e-9)


def test_traces_follow_the_recursion():
    workers, prefetch = 3, 2
    run = simulate(workers=workers, load_s=0.2, step_s=0.1, load_cv=0.5, step_cv=0.3, prefetch=prefetch, seconds=20)
    loads = sorted(
        (batch, start, end)
        for trace in run.loads
        for batch, start, end in zip(*trace, strict=True)
    )  # fmt: skip
    batch, taken, stepped = run.steps
    assert (np.diff(batch) == 1).all()
    assert len(batch) > 100
    for i in range(len(batch) - workers * prefetch):
        _, start, done = loads[i]
        earliest = loads[i - workers][2] if i >= workers else 0.0
        asked = taken[i - workers * prefetch] if i >= workers * prefetch else 0.0
        assert start == pytest.approx(max(earliest, asked))
        assert taken[i] == pytest.approx(max(done, stepped[i - 1] if i else 0.0))


@pytest.mark.parametrize("in_order", [True, False])
def test_nobody_does_two_things_at_once(in_order):
    run = simulate(workers=4, load_s=0.4, step_s=0.1, load_cv=1.0, step_cv=0.5, in_order=in_order, seconds=30)
    for _, start, end in (*run.loads, run.steps):
        assert (start[1:] >= end[:-1] - 1e-12).all()
        assert (end >= start).all()
        assert end[-1] <= 30
    assert len(set(run.steps.batch.tolist())) == len(run.steps.batch)
    ready = {batch: end for trace in run.loads for batch, _, end in zip(*trace, strict=True)}
    assert all(taken >= ready[batch] for batch, taken, _ in zip(*run.steps, strict=True))


def test_seed_repeats_and_changes():
    settings = {"workers": 2, "load_s": 0.2, "step_s": 0.1, "load_cv": 0.5, "seconds": 20}
    first, again, other = (simulate(**settings, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.steps.end_s, again.steps.end_s)
    assert first.steps.end_s[5] != other.steps.end_s[5]


def test_a_load_longer_than_the_simulation_gives_no_batch():
    run = simulate(workers=2, load_s=50, step_s=0.1, seconds=10)
    assert (run.batches, run.utilisation, run.stall_share) == (0, 0.0, 1.0)
    assert "0 batches in 10 s" in str(run)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"workers": -1}, "workers"),  # fewer than none
        ({"workers": 1.5}, "workers"),  # half a worker
        ({"prefetch": 0}, "prefetch"),  # nothing ever asked for
        ({"load_s": -1}, "load_s"),  # negative time
        ({"load_s": float("nan")}, "load_s"),  # no number
        ({"load_s": 0, "step_s": 0}, "time to pass"),  # endless batches
        ({"seconds": 0}, "time to pass"),  # no time at all
        ({"load_s": 1e-9, "step_s": 1e-9}, "fewer seconds"),  # would run for hours
    ],
)
def test_impossible_settings_are_refused(settings, words):
    with pytest.raises(ColabUtilsError, match=words):
        simulate(**{"workers": 2, "load_s": 0.1, "step_s": 0.1, **settings})


class _Sleepy(Dataset):
    def __init__(self, load_s):
        self.load_s = load_s

    def __len__(self):
        return 40

    def __getitem__(self, index):
        time.sleep(self.load_s)
        return index


@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # three workers on two cores: they only sleep
@pytest.mark.parametrize(
    ("workers", "load_s", "step_s"),
    [
        (0, 0.015, 0.010),  # loading and training alternate
        (2, 0.050, 0.010),  # the workers are the limit
        (2, 0.015, 0.025),  # the step is the limit
        (3, 0.060, 0.020),  # in balance
    ],
)
def test_real_dataloader_takes_as_long(workers, load_s, step_s):
    simulated = simulate(workers=workers, load_s=load_s, step_s=step_s, seconds=10).steps
    expected_s = simulated.end_s[39] - simulated.end_s[0]
    ratios = []
    for _ in range(4):  # on a busy machine sleepers oversleep: one quiet run of four is enough
        ended_s = []
        for _ in DataLoader(_Sleepy(load_s), batch_size=None, num_workers=workers):
            time.sleep(step_s)
            ended_s.append(time.perf_counter())
        ratios.append((ended_s[-1] - ended_s[0]) / expected_s)
        if abs(ratios[-1] - 1) < 0.1:
            break
    assert ratios[-1] == pytest.approx(1, abs=0.1), ratios


def test_more_workers_never_lose_batches():
    runs = [simulate(workers=w, load_s=0.5, step_s=0.1, load_cv=0.4, seconds=60).batches for w in (1, 2, 4, 8)]
    assert all(more > fewer for fewer, more in itertools.pairwise(runs))
