"""The fixes: each is tried on a small loader; one that cannot be tried keeps the others."""

import time
from dataclasses import replace
from time import perf_counter
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
)

from colab_utils import CocoFolder, ShardDataset, make_loader
from colab_utils.diagnosis import fixes
from colab_utils.diagnosis.diagnose import diagnose
from colab_utils.diagnosis.fixes import (
    Fix,
    Situation,
    find_fixes,
    open_like,
    rank_fixes,
)
from colab_utils.diagnosis.stages import time_stages
from colab_utils.diagnosis.timing import BatchTimes, time_batches
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.slow_drive import DriveProfile, slow_down

SLOW = DriveProfile("test", open_s=0.03, bytes_per_s=50e6, source="made up for the test")


class _Sleepy(Dataset):
    def __init__(self, load_s=0.0):
        self.load_s = load_s

    def __len__(self):
        return 64

    def __getitem__(self, index):
        time.sleep(self.load_s)
        return torch.zeros(3, 8, 8), index


class _Endless(Sampler):
    """As Detectron2's: it has no length."""

    def __iter__(self):
        while True:
            yield from range(64)


class _Stream(IterableDataset):
    def __iter__(self):
        for number in range(64):
            time.sleep(0.005)
            yield torch.zeros(3, 8, 8), number


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    """Trials end with their time, however few batches they had; and on a slow machine all are
    made.
    """
    monkeypatch.setattr(fixes, "_LEAST_BATCHES", 4)
    monkeypatch.setattr(fixes, "_LATE", 1000)


def _collate(samples):
    return tuple(zip(*samples, strict=True))


def _look_at(loader, step=None, *, seconds=0.6, verify=False):
    """What `diagnose` measures before it looks for fixes, in a shorter time."""
    step = step or EmulatedStep(5)
    now = time_batches(loader, step, batches=20, max_s=0.2)
    images = round(now.images / len(now.wait_s))
    cached = BatchTimes((0.0,) * 20, (0.005,) * 20, 20 * images, 0.05, 0.05)
    _, indices, _ = time_stages(loader, [torch.zeros(1)], images=images, seconds=0.4)
    return Situation(loader, step, now, cached, indices[:8], seconds, verify, perf_counter())


def _make_times(rate, *, error=0.0):
    """Return times with this many images/s, and with this standard error as a share."""
    seconds = 1 / rate
    # `find_error` enlarges the error of ten blocks by 11 / 9.
    spread = error * seconds * 3 * 9 / 11
    return BatchTimes((seconds + spread, seconds - spread) * 5, (0.0,) * 10, 10, 1.0, 0.0)


def _find(now):
    return {fix.id: fix for fix in find_fixes(now)}


@pytest.fixture
def slow_folder(tiny_dataset):
    slow_down(tiny_dataset.images, SLOW)
    return CocoFolder(tiny_dataset.images, tiny_dataset.annotations, streams=1)


@pytest.mark.clock
@pytest.mark.parametrize("plain", [True, False], ids=["torch's DataLoader", "make_loader"])
def test_each_fix_of_a_slow_folder_is_forecast_and_measured(monkeypatch, slow_folder, plain):
    # Images of 160 x 128 pixels become 40 x 32.
    monkeypatch.setattr(fixes, "_SIDES", {"min_size": 32, "max_size": 64})
    if plain:
        loader = DataLoader(slow_folder, batch_size=2, collate_fn=_collate)
    else:
        loader = make_loader(slow_folder, batch_size=2, workers=0)
    now = _look_at(loader, verify=True)
    fixes_by_id = _find(now)
    own = {"streams", "packed_masks"} if plain else {"streams"}
    assert set(fixes_by_id) == {"shards", "resize", "workers"} | own
    for id in {"shards", "resize", *own}:
        assert fixes_by_id[id].measured_images_per_second > 1.2 * now.loop.images_per_second, id
        assert fixes_by_id[id].forecast_images_per_second > 1.2 * now.loop.images_per_second, id
    assert "6% of the pixels" in fixes_by_id["resize"].sentence
    # How sure the gain is depends on how busy the machine is.
    assert fixes_by_id["shards"].sentence.startswith("Run preprocess, then copy: ")


def test_files_that_are_read_ahead_already_need_no_streams(tiny_dataset):
    slow_down(tiny_dataset.images, DriveProfile("quick", 0.001, 1e9, "a test"))
    wide = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
    loader = make_loader(wide, batch_size=2, workers=0)
    assert "streams" not in _find(_look_at(loader))
    loader.close()


@pytest.mark.clock
def test_shards_on_a_slow_drive(tiny_shards):
    slow_down(tiny_shards, SLOW)
    loader = make_loader(ShardDataset(tiny_shards), batch_size=2, workers=0)
    now = _look_at(loader, verify=True)
    fixes_by_id = _find(now)
    # The masks are packed already.
    assert set(fixes_by_id) == {"shards", "workers"}
    assert fixes_by_id["shards"].measured_images_per_second > now.loop.images_per_second


@pytest.mark.clock
def test_settings_are_forecast_and_measured(quiet_machine):
    now = _look_at(
        DataLoader(_Sleepy(0.02), batch_size=4, num_workers=1),
        EmulatedStep(20),
        seconds=3,
        verify=True,
    )
    fixes_by_id = _find(replace(now, has_restarts=True))
    assert set(fixes_by_id) == {"workers", "persistent_workers", "prefetch"}
    # The order of the fixes depends on the noise, too.
    best = max(fixes_by_id.values(), key=lambda fix: fix.images_per_second)
    assert best.id == "workers"
    for fix in fixes_by_id.values():
        assert fix.forecast_images_per_second == pytest.approx(
            fix.measured_images_per_second, rel=0.3
        ), fix
    assert fixes_by_id["workers"].measured_images_per_second > 1.2 * now.loop.images_per_second


def test_no_forecast_is_above_the_rate_on_batches_that_lie_ready():
    now = _look_at(DataLoader(_Sleepy(), batch_size=4))
    fixes_by_id = _find(replace(now, ceiling=7.0))
    assert [fix.forecast_images_per_second for fix in fixes_by_id.values()] == [7.0]


def test_your_own_step_is_never_run_in_a_trial():
    calls = []
    now = _look_at(DataLoader(_Sleepy(), batch_size=4), lambda *batch: calls.append(1))
    calls.clear()
    fixes_by_id = _find(now)
    assert all(
        fix.forecast_images_per_second and fix.measured_images_per_second is None
        for fix in fixes_by_id.values()
    )
    assert not calls


def test_one_fix_that_cannot_be_tried_keeps_the_others(monkeypatch, slow_folder):
    def fail(*arguments, **options):
        raise ColabUtilsError("There is no room in /tmp. Make some.")

    monkeypatch.setattr(fixes, "write_shards", fail)
    fixes_by_id = _find(_look_at(DataLoader(slow_folder, batch_size=2, collate_fn=_collate)))
    for id in ("shards", "packed_masks"):
        assert fixes_by_id[id].forecast_images_per_second is None
        assert fixes_by_id[id].images_per_second == 0
        assert fixes_by_id[id].sentence.endswith("Not tried: There is no room in /tmp. Make some.")
    assert fixes_by_id["workers"].forecast_images_per_second > 0


def test_late_nothing_is_tried_but_what_to_do_is_said(monkeypatch, slow_folder):
    monkeypatch.setattr(fixes, "_LATE", 0)
    now = _look_at(DataLoader(slow_folder, batch_size=2, num_workers=1, collate_fn=_collate))
    monkeypatch.setattr(fixes, "time_batches", lambda *arguments, **options: pytest.fail("a trial"))
    fixes_by_id = _find(replace(now, has_restarts=True))
    assert len(fixes_by_id) == 6
    assert all(fix.forecast_images_per_second is None for fix in fixes_by_id.values())
    assert fixes_by_id["shards"].sentence == (
        "Run preprocess, then copy. Not tried: no time is left. The trial takes 1 s or more. "
        "Raise seconds."
    )


@pytest.mark.parametrize("batch_size", [4, None])
def test_an_endless_sampler_without_a_length(batch_size):
    options = {"sampler": _Endless(), "batch_size": None}
    if batch_size:
        options = {"batch_sampler": BatchSampler(_Endless(), batch_size, drop_last=True)}
    diagnosis = diagnose(DataLoader(_Sleepy(0.002), **options), EmulatedStep(2), seconds=0.3)
    assert {fix.id for fix in diagnosis.fixes} == {"workers"}
    assert all(fix.forecast_images_per_second for fix in diagnosis.fixes)


@pytest.mark.parametrize("batch_size", [4, None])
def test_an_iterable_dataset_is_diagnosed_and_its_fixes_are_not_tried(batch_size):
    diagnosis = diagnose(DataLoader(_Stream(), batch_size=batch_size), EmulatedStep(2), seconds=0.3)
    assert [stage.name for stage in diagnosis.stages] == ["wait", "step"]
    assert {fix.id: fix.forecast_images_per_second for fix in diagnosis.fixes} == {"workers": None}
    assert (
        "an iterable dataset divides its samples among the workers itself"
        in diagnosis.fixes[0].sentence
    )


def test_a_trial_keeps_what_the_loader_was_given():
    batches = BatchSampler(RandomSampler(range(64)), 8, drop_last=False)
    loader = DataLoader(
        _Sleepy(),
        batch_sampler=batches,
        collate_fn=_collate,
        num_workers=1,
        prefetch_factor=3,
        timeout=50,
    )
    now = _look_at(loader)
    with open_like(now, workers=2) as tried:
        assert (tried.batch_sampler, tried.collate_fn) == (batches, _collate)
        assert (tried.num_workers, tried.prefetch_factor, tried.timeout) == (2, 3, 50)
    with open_like(now, [1, 2, 3], prefetch=6) as tried:
        assert (tried.batch_size, tried.num_workers, tried.prefetch_factor) == (8, 1, 6)
        # An epoch is as long as yours, and ends as yours does.
        assert len(tried) == len(loader) == 8
        assert not tried.persistent_workers
        assert [tried.dataset[index] for index in next(iter(tried.batch_sampler))] == [
            *(1, 2, 3, 1, 2, 3, 1, 2)
        ]
    with open_like(now, persistent=True) as tried:
        assert tried.persistent_workers
        assert (tried.batch_sampler, tried.prefetch_factor) == (batches, 3)


@pytest.mark.parametrize(
    ("load_ms", "cpu_ms", "step_ms", "cores", "now", "tried"),
    [
        # Loading waits for files, so as many workers are tried as keep the step busy.
        (80, 1, 20, 2, 1, 4),
        # No number of workers is ever enough.
        (1000, 1, 20, 2, 1, 8),
        # The step is the limit.
        (20, 20, 100, 2, 0, 1),
        # The cores are the limit.
        (20, 20, 1, 2, 1, 2),
        # All cores are busy already, so the next count up is tried.
        (20, 20, 1, 2, 2, 4),
        (20, 20, 1, 1, 0, 1),
        (20, 20, 1, 2, 8, 16),
    ],
)
def test_workers_are_chosen_for_the_limit(monkeypatch, load_ms, cpu_ms, step_ms, cores, now, tried):
    monkeypatch.setattr(fixes, "count_cores", lambda: cores)
    cached = BatchTimes((0.0,), (step_ms / 1000,), 1, 0.05, 0.05)
    loader = SimpleNamespace(workers=now)
    situation = Situation(loader, EmulatedStep(step_ms), cached, cached, (), 1, False, 0.0)
    assert situation.choose_workers(load_ms, cpu_ms) == tried


def test_of_fixes_that_are_as_good_the_one_that_costs_least_comes_first():
    rates = {
        "resize": 100.0,
        "workers": 96.0,
        "packed_masks": 97.0,
        "shards": 60.0,
        "prefetch": 59.0,
        "streams": 0,
    }
    candidates = [Fix(id, id, "", rate or None) for id, rate in rates.items()]
    assert [fix.id for fix in rank_fixes(candidates)] == [
        "workers",
        "packed_masks",
        "resize",
        "shards",
        "prefetch",
        "streams",
    ]


@pytest.mark.parametrize(
    ("rates", "first"),
    [
        # The lead of the last one is larger than the noise of both.
        ({"workers": (80.0, 0.1), "resize": (100.0, 0.1)}, "resize"),
        # It is within the noise of one of them, and of both.
        ({"workers": (80.0, 0.0), "resize": (100.0, 0.25)}, "workers"),
        ({"workers": (80.0, 0.25), "resize": (100.0, 0.0)}, "workers"),
        ({"workers": (80.0, 0.15), "resize": (100.0, 0.15)}, "workers"),
        # What was not tried is never as good.
        ({"workers": (0.0, 0.0), "resize": (100.0, 2.0)}, "resize"),
    ],
)
def test_the_best_fix_is_the_best_beyond_the_noise(rates, first):
    candidates = [Fix(id, id, "", rate, error=error) for id, (rate, error) in rates.items()]
    assert rank_fixes(candidates)[0].id == first
    assert rank_fixes(candidates[::-1])[0].id == first


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (0.03, ": about 14.0 images/s."),
        (0.10, ": about 14.0 images/s (give or take 10%)."),
        (0.30, ": not known yet, because the times of batches differ too much. Raise seconds."),
    ],
)
@pytest.mark.parametrize("verify", [False, True])
def test_a_fix_says_how_sure_its_rate_is(monkeypatch, error, text, verify):
    loop = _make_times(10)
    loader = DataLoader(_Sleepy(), batch_size=2)
    now = Situation(loader, None, loop, loop, [], 1.0, verify, perf_counter())

    def time_trial(now, options, step, share):
        if not options:
            return loop
        return _make_times(14.0, error=error if share < 0.5 else 0.2)

    monkeypatch.setattr(fixes, "_time", time_trial)
    fix = find_fixes(now)[0]
    assert fix.sentence.endswith(text)
    assert fix.error == pytest.approx(0.2 if verify else error)
    assert ("Measured: 14.0 images/s (give or take 20%)." in str(fix)) == verify


@pytest.mark.parametrize(
    ("rate", "error", "text"),
    [
        # Twice the error is smaller than the gain that counts, then larger.
        (10.0, 0.02, "wins nothing"),
        (10.0, 0.03, "not known yet"),
        # A rate that is far lower than yours is no gain, though it is not sure.
        (4.0, 0.2, "wins nothing"),
        (10.45, 0.01, "not known yet"),
        (11.0, 0.01, "about 11.0 images/s"),
    ],
)
def test_that_a_fix_wins_nothing_is_said_only_if_it_is_known(monkeypatch, rate, error, text):
    loop = _make_times(10)
    loader = DataLoader(_Sleepy(), batch_size=2)
    now = Situation(loader, None, loop, loop, [], 1.0, False, perf_counter())
    monkeypatch.setattr(
        fixes,
        "_time",
        lambda now, options, *_: _make_times(rate, error=error) if options else loop,
    )
    assert f": {text}" in find_fixes(now)[0].sentence


def test_a_gain_of_the_loader_itself_adds_its_noise(monkeypatch):
    loop = _make_times(10, error=0.03)
    loader = DataLoader(_Sleepy(), batch_size=2)
    now = Situation(loader, None, loop, loop, [], 1.0, False, perf_counter())
    monkeypatch.setattr(
        fixes,
        "_time",
        lambda now, options, *_: _make_times(40.0 if options else 20.0, error=0.04),
    )
    fix = find_fixes(now)[0]
    assert fix.images_per_second == pytest.approx(20)
    assert fix.error == pytest.approx((0.04**2 + 0.03**2 + 0.04**2) ** 0.5)


def test_a_loader_that_is_as_fast_as_before_but_for_noise_takes_nothing_from_a_fix(monkeypatch):
    loop = _make_times(10, error=0.1)
    loader = DataLoader(_Sleepy(), batch_size=2)
    now = Situation(loader, None, loop, loop, [], 1.0, False, perf_counter())
    monkeypatch.setattr(
        fixes, "_time", lambda now, options, *_: _make_times(40.0 if options else 12.0)
    )
    assert find_fixes(now)[0].images_per_second == pytest.approx(40)


@pytest.mark.parametrize(
    ("again", "gains"),
    [
        # The loader itself is as fast as the trial: the files are in the page cache by now.
        (30.0, "wins nothing"),
        # Its rate changes as much as the trial says, so that is noise.
        (3.5, "wins nothing"),
        (10.0, "about 29.0 images/s"),
        (12.5, "about 23.2 images/s"),
    ],
)
def test_a_fix_wins_only_what_the_loader_does_not_win_when_it_is_timed_again(
    monkeypatch, again, gains
):
    loop = BatchTimes((0.1,) * 20, (0.0,) * 20, 20, 1.0, 0.0)
    loader = DataLoader(_Sleepy(), batch_size=2, num_workers=1)
    now = Situation(loader, None, loop, loop, [], 1.0, False, perf_counter())
    monkeypatch.setattr(
        fixes, "_time", lambda now, options, *_: _make_times(29.0 if options else again)
    )
    for fix in find_fixes(now):
        assert fix.sentence.endswith(f": {gains}.")
        assert (fix.images_per_second > 10.5) == gains.startswith("about")


def test_other_data_is_not_compared_with_what_the_page_cache_holds(monkeypatch, slow_folder):
    now = _look_at(DataLoader(slow_folder, batch_size=2, collate_fn=_collate))
    rate = now.loop.images_per_second

    def time_trial(now, options, *_):
        return _make_times(9 * rate if "dataset" in options else 8 * rate)

    monkeypatch.setattr(fixes, "_time", time_trial)
    fixes_by_id = _find(now)
    assert fixes_by_id["shards"].images_per_second == pytest.approx(9 * rate)
    assert fixes_by_id["workers"].images_per_second == pytest.approx(rate)
