"""The fixes: all are forecast by the model, the best one is tried, and one that cannot be tried
keeps the others.
"""

import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler

from colab_utils import CocoFolder, ShardDataset, make_loader
from colab_utils.course.sample_data import make_dataset
from colab_utils.diagnosis import fixes
from colab_utils.diagnosis.diagnose import diagnose
from colab_utils.diagnosis.fixes import (
    Fix,
    Situation,
    find_fixes,
    open_like,
    rank_fixes,
)
from colab_utils.diagnosis.simulator import Loop
from colab_utils.diagnosis.stages import LoadingStages, time_stages
from colab_utils.diagnosis.timing import BatchTimes, time_batches
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.diagnosis.loops import Samples, collate

# There may be more workers than cores, because they only sleep.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")

SLOW = DriveProfile("test", open_s=0.03, bytes_per_s=50e6, source="made up for the test")


class _Endless:
    """A sampler as Detectron2's: it has no length."""

    def __iter__(self):
        return itertools.cycle(range(64))


class _Stream(IterableDataset):
    def __iter__(self):
        for number in range(64):
            time.sleep(0.005)
            yield torch.zeros(3, 8, 8), number


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    """Trials end after a few batches."""
    monkeypatch.setattr(fixes, "_TRIAL_BATCHES", 6)


def _look_at(loader, step=None, *, seconds=1.0, verify=False):
    """What `diagnose` measures before it looks for fixes, in a shorter time."""
    step = step or EmulatedStep(5)
    now = time_batches(loader, step, batches=20, max_s=0.2)
    cached = BatchTimes((0.0,) * 20, (0.005,) * 20, 20 * now.batch_size, 0.05, 0.05)
    timed = time_stages(loader, images=now.batch_size, seconds=0.4)
    return Situation(loader, step, now, cached, timed, seconds, verify)


def _situate(rate=5.0, *, read_s=(0.2,), cpu_ms=1.0, step_ms=20, workers=1, **changes):
    """A loop of a dataset that waits and works so long for an image, and was measured so."""
    loop = BatchTimes((4 / rate,), (0.0,), 4, 0.004 * cpu_ms, 0.0)
    cached = BatchTimes((0.0,) * 10, (step_ms / 1000,) * 10, 40, 0.0, 9 * step_ms / 1000)
    timed = LoadingStages(read_s=read_s)
    loader = DataLoader(Samples(), batch_size=4, num_workers=workers, sampler=_Endless())
    return Situation(loader, EmulatedStep(step_ms), loop, cached, timed, 1.0, **changes)


@pytest.fixture
def tries(monkeypatch):
    """Let a trial give the forecast times a factor; return the factors, one for each trial, and the
    workers that were tried.
    """
    factors = [1.0] * 20
    workers = []

    def try_out(watched, step, **options):
        workers.append(watched.num_workers)
        rate = by_model[watched.num_workers, watched.prefetch_factor, watched.in_order]
        return BatchTimes((1 / rate / factors[len(workers) - 1],), (0.0,), 1, 1.0, 0.0)

    by_model = {}
    forecast = fixes._Model.forecast

    def note(model, loop):
        result = forecast(model, loop)
        by_model[loop.workers, loop.prefetch, loop.in_order] = result[0]
        return result

    monkeypatch.setattr(fixes, "measure_cores", lambda: 2.0)
    monkeypatch.setattr(fixes._Model, "forecast", note)
    monkeypatch.setattr(fixes, "time_batches", try_out)
    return factors, workers


def _find(now):
    return {fix.id: fix for fix in find_fixes(now)}


@pytest.fixture
def slow_folder(tiny_dataset):
    slow_down(tiny_dataset.images, SLOW)
    return CocoFolder(tiny_dataset.images, tiny_dataset.annotations, streams=1)


@pytest.mark.clock
@pytest.mark.parametrize("plain", [True, False], ids=["torch's DataLoader", "make_loader"])
def test_each_fix_of_a_slow_folder_is_forecast_and_measured(slow_folder, plain):
    if plain:
        loader = DataLoader(slow_folder, batch_size=2, collate_fn=collate)
    else:
        loader = make_loader(slow_folder, batch_size=2, workers=0)
    now = _look_at(loader, verify=True)
    fixes_by_id = _find(now)
    own = {"streams", "packed_masks"} if plain else {"streams"}
    nearer = {"local_files", "shards", *own}
    assert set(fixes_by_id) == nearer | {"workers"}
    for id in nearer:
        fix = fixes_by_id[id]
        rates = fix.measured_images_per_second, fix.forecast_images_per_second
        assert min(rates) > 1.2 * now.loop.images_per_second, id


def test_images_that_are_larger_than_training_needs_are_forecast_in_both_sizes(tmp_path):
    made = make_dataset(tmp_path / "large", n=4, width=2400, height=1800, workers=1)
    large = CocoFolder(made.images, made.annotations)
    fixes_by_id = _find(_look_at(DataLoader(large, batch_size=2, collate_fn=collate)))
    rates = {id: fix.forecast_images_per_second for id, fix in fixes_by_id.items()}
    assert rates["resize"] > 1.2 * rates["shards"]


@pytest.mark.clock
def test_shards_on_a_slow_drive(tiny_shards):
    slow_down(tiny_shards, SLOW)
    loader = make_loader(ShardDataset(tiny_shards), batch_size=2, workers=0)
    now = _look_at(loader, verify=True)
    fixes_by_id = _find(now)
    # The masks are packed already.
    assert set(fixes_by_id) == {"shards", "workers"}
    assert fixes_by_id["shards"].measured_images_per_second > now.loop.images_per_second


def test_no_forecast_is_above_the_rate_on_batches_that_lie_ready(tries):
    fixes_by_id = _find(_situate(ceiling=7.0))
    assert fixes_by_id["workers"].forecast_images_per_second == 7.0


def test_a_forecast_may_be_off_by_the_spread_of_what_was_measured(tries):
    even = _find(_situate())["workers"]
    uneven = _find(_situate(read_s=(0.1, 0.1, 0.1, 0.9, 0.1)))["workers"]
    assert 0.05 <= even.error < 0.06 < 0.15 < uneven.error
    assert f"give or take {uneven.error:.0%}" in uneven.sentence


# Seconds of reads with a long tail.
UNEVEN = tuple(0.05 * 1.02**number for number in range(150))


def test_an_order_that_waits_for_the_slowest_is_a_fix(tries):
    assert _find(_situate(read_s=UNEVEN, workers=8))["any_order"].gain > 1.1
    assert "any_order" not in _find(_situate(read_s=UNEVEN, workers=1))


# What a trial gives over its forecast, and how many of three fixes are tried.
@pytest.mark.parametrize(("factor", "count"), [(1.0, 1), (0.7, 3), (1.3, 3)])
def test_the_next_fixes_are_tried_where_a_trial_is_far_from_its_forecast(tries, factor, count):
    factors, tried = tries
    factors[0] = factor
    ranked = find_fixes(_situate(read_s=UNEVEN, workers=2))
    assert [fix.measured_images_per_second is not None for fix in ranked].count(True) == count
    assert len(tried) == count
    # The first one was the forecast's best.
    assert tried[0] == 8
    assert next(fix for fix in ranked if fix.id == "workers").is_confirmed == (factor == 1)


def test_nothing_is_tried_where_no_fix_wins(tries):
    _, tried = tries
    # The step is the limit.
    ranked = find_fixes(_situate(40.0, read_s=(0.0,), step_ms=100))
    assert not tried
    assert all(": no sure gain, " in fix.sentence for fix in ranked)


def test_your_own_step_is_never_run_in_a_trial():
    calls = []
    now = _look_at(DataLoader(Samples(), batch_size=4), lambda *batch: calls.append(1))
    calls.clear()
    assert find_fixes(now)
    assert not calls


def test_one_fix_that_cannot_be_tried_keeps_the_others(monkeypatch, slow_folder):
    def fail(*arguments, **options):
        raise ColabUtilsError("There is no room in /tmp. Make some.")

    monkeypatch.setattr(fixes, "write_shards", fail)
    loader = DataLoader(slow_folder, batch_size=2, collate_fn=collate)
    fixes_by_id = _find(_look_at(loader, verify=True))
    for id in ("shards", "packed_masks"):
        assert fixes_by_id[id].forecast_images_per_second > 0
        assert fixes_by_id[id].measured_images_per_second is None
        assert "not be tried: There is no room in /tmp. Make some." in fixes_by_id[id].sentence
    assert fixes_by_id["local_files"].measured_images_per_second > 0


def test_data_without_a_length_is_forecast():
    endless = DataLoader(Samples(64, 0.002), sampler=_Endless(), batch_size=None)
    for loader in (endless, DataLoader(_Stream(), batch_size=4)):
        diagnosis = diagnose(loader, EmulatedStep(2), seconds=0.3)
        (fix,) = diagnosis.fixes
        assert fix.id == "workers"
        assert fix.forecast_images_per_second > 0
    # A stream divides its samples among the workers itself.
    assert [stage.name for stage in diagnosis.stages] == ["wait", "step"]
    assert fix.measured_images_per_second is None


def test_a_trial_keeps_what_the_loader_was_given():
    batches = BatchSampler(RandomSampler(range(64)), 8, drop_last=False)
    options = {"collate_fn": collate, "num_workers": 1, "prefetch_factor": 3, "timeout": 50}
    loader = DataLoader(Samples(), batch_sampler=batches, **options)
    loop = Loop(2, 0.0, prefetch=6, batch_size=8, epoch_batches=len(loader))
    with open_like(loader, loop) as tried:
        assert (tried.batch_sampler, tried.collate_fn) == (batches, collate)
        assert (tried.num_workers, tried.prefetch_factor, tried.timeout) == (2, 6, 50)
        assert tried.persistent_workers
        assert tried.in_order
    loop = replace(loop, in_order=False, start_s=0.1)
    with open_like(loader, loop, [1, 2, 3]) as tried:
        assert not tried.persistent_workers
        assert not tried.in_order
        # An epoch is as long as yours, and ends as yours does.
        assert (tried.batch_size, len(tried)) == (8, 8)
        # Each of the three comes once before any comes again.
        assert sorted(tried.dataset[index] for index in range(3)) == [1, 2, 3]


@pytest.mark.parametrize(
    ("wait_ms", "cpu_ms", "step_ms", "now", "chosen"),
    [
        # Loading waits for files: as many workers as keep the step busy.
        (80, 1, 100, 1, 4),
        # The step is the limit.
        (0, 20, 100, 0, 1),
        # You have 8 already.
        (1000, 1, 20, 8, 16),
    ],
)
def test_workers_are_chosen_for_the_limit(tries, wait_ms, cpu_ms, step_ms, now, chosen):
    situation = _situate(read_s=(wait_ms / 1000,), cpu_ms=cpu_ms, step_ms=step_ms, workers=now)
    assert f"Use workers={chosen}, not {now}" in _find(situation)["workers"].sentence


def test_of_fixes_that_are_as_good_the_one_that_costs_least_comes_first():
    rates = {"packed_masks": 100.0, "workers": 96.0, "shards": 60.0, "prefetch": 59.0}
    candidates = [Fix(id, id, "", rate) for id, rate in rates.items()]
    order = ["workers", "packed_masks", "shards", "prefetch"]
    assert [fix.id for fix in rank_fixes(candidates)] == order
