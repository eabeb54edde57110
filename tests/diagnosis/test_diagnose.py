"""Diagnosis: the verdict, and what calling it changes and does not change."""

import dataclasses
import itertools
import multiprocessing
import random
import signal
import time

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from colab_utils import CocoFolder, ShardDataset, make_loader
from colab_utils.diagnosis import diagnose as module
from colab_utils.diagnosis.diagnose import describe_verdict, diagnose
from colab_utils.diagnosis.fixes import Fix, Situation, rank_fixes
from colab_utils.diagnosis.stages import LoadingStages, Stage
from colab_utils.diagnosis.timing import BatchTimes
from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.diagnosis.loops import Samples, crowd

SLOW = DriveProfile("test", open_s=0.03, bytes_per_s=50e6, source="made up for the test")


@pytest.fixture
def no_fixes(monkeypatch):
    monkeypatch.setattr(module, "find_fixes", lambda now: [])


def _sleep_step(seconds):
    return lambda *batch: time.sleep(seconds)


def _make_times(wait_s, step_s, batches=20):
    return BatchTimes((wait_s,) * batches, (step_s,) * batches, 4 * batches, 1.0, 0.5)


def _situate(ceiling, stages=()):
    """A loop that waits two thirds of its time."""
    timed = LoadingStages({stage.name: stage for stage in stages})
    times = _make_times(0.2, 0.1)
    return Situation([], lambda batch: None, times, times, timed, 1.0, ceiling=ceiling)


def test_the_largest_stage_is_the_one_with_the_largest_mean():
    # Half of the files lie in Drive's cache, so their median says nothing.
    stages = [Stage("read", 2, 600, 1, mean_ms=300), Stage("decode", 10, 12, 10, mean_ms=10)]
    words = describe_verdict(_situate(40, stages), [])
    assert "the largest stage is read: 300.0 ms an image" in words
    assert "It lacks CPU" not in words


# These tests run whole diagnoses.


@pytest.mark.clock
def test_a_loader_that_keeps_up_is_fine():
    diagnosis = diagnose(DataLoader(Samples(), batch_size=4), _sleep_step(0.05), seconds=1)
    assert diagnosis.verdict.startswith("Your loader is fine, stop here")
    assert diagnosis.headspace < 1.1
    assert diagnosis.fixes == ()
    assert diagnosis.stall_share < 0.2
    assert diagnosis.step == "real"


@pytest.mark.clock
def test_a_stalled_loader_is_told_what_it_could_win():
    # Loading 4 images takes 160 ms in one worker, and the step takes 40 ms. So it can be at most
    # five times as fast, and workers cure it. A busy machine adds some ms to each.
    loader = DataLoader(Samples(64, 0.04), batch_size=4, num_workers=1, persistent_workers=True)
    diagnosis = diagnose(loader, _sleep_step(0.04), seconds=4, verify=True)
    assert diagnosis.verdict.startswith("Training waits")
    assert "the largest stage is sample" in diagnosis.verdict
    assert diagnosis.headspace > 2
    assert diagnosis.stall_share > 0.4
    assert [stage.name for stage in diagnosis.stages] == ["sample", "collate", "wait", "step"]
    assert [fix.id for fix in diagnosis.fixes] == ["workers", "prefetch"]
    for fix in diagnosis.fixes:
        # A fix says itself how far off it may be where other programs take a part of the cores.
        measured = pytest.approx(fix.measured_images_per_second, rel=0.2 + 2 * fix.error)
        assert fix.forecast_images_per_second == measured, fix
    assert diagnosis.fixes[0].measured_images_per_second > 1.3 * diagnosis.images_per_second


@pytest.mark.clock
def test_a_slow_drive_is_named_and_its_fixes_are_forecast(tiny_dataset):
    slow_down(tiny_dataset.images, SLOW)
    dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
    loader = make_loader(dataset, batch_size=2, workers=1)
    try:
        diagnosis = diagnose(loader, EmulatedStep(10), seconds=1.5)
    finally:
        loader.close()
    stages = {stage.name: stage for stage in diagnosis.stages}
    assert list(stages) == ["read", "decode", "masks", "wait", "step"]
    assert stages["read"].median_ms >= 30
    assert "the largest stage is read" in diagnosis.verdict
    assert "emulated 10 ms step" in diagnosis.verdict
    # Its files are read ahead already, so more streams are no fix.
    assert {fix.id for fix in diagnosis.fixes} == {"local_files", "shards", "workers", "prefetch"}
    assert str(diagnosis).endswith("\n".join(f"  {fix}" for fix in diagnosis.fixes))


@pytest.mark.parametrize(
    ("samples", "settings", "restarts"),
    [
        (4, {"num_workers": 1}, True),
        (4, {"num_workers": 1, "persistent_workers": True}, False),
        (40_000, {"num_workers": 1}, False),
    ],
    ids=["start anew", "stay", "no end of an epoch was seen"],
)
def test_workers_that_stay_are_a_fix_where_they_were_seen_to_start_anew(
    samples, settings, restarts, monkeypatch
):
    situations = []
    monkeypatch.setattr(module, "find_fixes", lambda now: situations.append(now) or [])
    loader = DataLoader(Samples(samples, 0.01), batch_size=4, **settings)
    diagnose(loader, _sleep_step(0.005), seconds=1)
    assert [now.restart_s > 0.01 for now in situations] == [restarts]


def test_without_a_step_only_the_loader_is_judged(tiny_shards, no_fixes):
    diagnosis = diagnose(
        make_loader(ShardDataset(tiny_shards), batch_size=4, workers=0), seconds=0.5
    )
    assert diagnosis.verdict.startswith("The loader alone gives")
    assert diagnosis.step == "none"
    assert diagnosis.headspace == 1
    assert "step" not in [stage.name for stage in diagnosis.stages]


# These tests look at what a diagnosis leaves behind.


def test_random_states_and_the_order_are_put_back(tiny_shards, no_fixes):
    def draw(*batch):
        random.random()
        np.random.rand()
        torch.rand(1)

    def get_states():
        states = random.getstate(), np.random.get_state(), ours.state_dict()
        return repr((*states, torch.get_rng_state().tolist(), order.get_state().tolist()))

    order = torch.Generator().manual_seed(5)
    ours = make_loader(ShardDataset(tiny_shards), batch_size=5, workers=0, seed=3)
    for loader in (ours, DataLoader(Samples(), batch_size=4, shuffle=True, generator=order)):
        before = get_states()
        diagnose(loader, draw, seconds=0.2)
        assert get_states() == before


def test_a_watched_loader_is_diagnosed_as_the_loader_itself(tiny_shards, no_fixes, capsys):
    loader = make_loader(ShardDataset(tiny_shards), batch_size=4, workers=0)
    state = loader.state_dict()
    diagnosis = diagnose(watch(loader), EmulatedStep(1), seconds=0.5)
    assert "decode" in [stage.name for stage in diagnosis.stages]
    assert loader.state_dict() == state
    # No pass of a diagnosis is one of the watched loader.
    assert capsys.readouterr().err == ""


def test_the_step_trains_and_what_it_trained_is_put_back(no_fixes):
    model = torch.nn.Linear(192, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(images, targets):
        optimizer.zero_grad()
        model(images.flatten(1) + 1).sum().backward()
        optimizer.step()

    loader = DataLoader(Samples(), batch_size=4)
    weights = model.weight.clone()
    before = repr(optimizer.state_dict())
    diagnose(loader, step, seconds=0.2, restore=(model, optimizer))
    assert torch.equal(model.weight, weights)
    assert repr(optimizer.state_dict()) == before
    diagnose(loader, step, seconds=0.2)
    assert not torch.equal(model.weight, weights)
    with pytest.raises(ColabUtilsError, match="restore takes a model"):
        diagnose(loader, step, seconds=0.2, restore=(3,))


def test_copies_of_batches_have_a_budget(monkeypatch):
    def note(free_bytes, count):
        monkeypatch.setattr(module, "find_free_memory", lambda: free_bytes)
        kept = {}
        for number in range(count):
            # The batch has 10,000 bytes.
            module._keep_batch(kept, number, (torch.zeros(1000), [{"masks": torch.zeros(1500)}]))
        return list(kept)

    assert note(1e9, 3) == [0, 1]
    assert note(1e9, 100) == [7, 15, 31, 63]
    assert note(1, 100) == [63]


# These tests look at the verdict.


@pytest.mark.clock
def test_batches_that_differ_make_no_headspace(no_fixes):
    seen = []

    # The loader is never waited for, because the first batches are small, or the step still warms
    # up.
    def step(*batch):
        seen.append(1)
        time.sleep(0.005 if len(seen) <= 4 else 0.02)

    diagnosis = diagnose(DataLoader(Samples(), batch_size=4), step, seconds=2)
    assert diagnosis.headspace < 1.2
    assert diagnosis.headspace >= 1 / (1 - diagnosis.stall_share) - 1e-9


@pytest.mark.clock
def test_a_step_that_lacks_cpu_beside_the_loader_is_named(no_fixes):
    class Loader:
        """Batches that cost nothing, beside processes that take all cores."""

        def __iter__(self):
            with crowd(2):
                yield from itertools.repeat((["image"], [{}]))

    diagnosis = diagnose(Loader(), EmulatedStep(20), seconds=2)
    assert diagnosis.headspace > 1.3
    assert "It lacks CPU: beside the loader, the step takes" in diagnosis.verdict


# The best of some fixes, and the end of the verdict.
@pytest.mark.parametrize(
    ("fix", "words"),
    [
        (
            Fix("packed_masks", "masks packed", "", 24.0, 25.0, gain=2.0),
            "Best fix: masks packed, 25.0 images/s (measured; the forecast was 24.0).",
        ),
        (
            Fix("workers", "more workers", "", 39.0, error=0.1, gain=3.0),
            "Best fix: more workers, 39.0 images/s (forecast, give or take 10%).",
        ),
        # A gain within its error is none.
        (Fix("workers", "more workers", "", 20.0, error=0.3, gain=1.5), ""),
    ],
)
def test_the_verdict_names_the_best_fix_where_it_is_sure(fix, words):
    candidates = rank_fixes([fix, Fix("prefetch", "more prefetch", "", 39.0, 8.0, gain=1.1)])
    verdict = describe_verdict(_situate(400), candidates)
    assert verdict.partition("Best fix")[1:] == tuple(words.partition("Best fix")[1:])


def test_stages_that_could_not_be_timed_are_told(no_fixes, monkeypatch):
    unseen = LoadingStages(unseen="no such share")
    monkeypatch.setattr(module, "time_stages", lambda *rest, **options: unseen)
    diagnosis = diagnose(DataLoader(Samples(), batch_size=4), _sleep_step(0.01), seconds=0.5)
    assert "The stages of a sample could not be timed: no such share" in diagnosis.verdict


@pytest.mark.parametrize(
    ("batches", "spread_s", "level", "lowered"),
    [
        (4, 0, "low", "low"),
        (9, 0.01, "medium", "low"),
        (40, 0.01, "high", "medium"),
    ],
)
def test_confidence_comes_with_batches_and_with_a_trial(batches, spread_s, level, lowered):
    waits = tuple(0.1 + spread_s * (number % 2) for number in range(batches))
    now = dataclasses.replace(_make_times(0.1, 0.1, batches), wait_s=waits)
    fix = Fix("workers", "more workers", "", 20.0, 17.0)
    near = module._describe_confidence(now, [fix])
    far = module._describe_confidence(
        now, [dataclasses.replace(fix, measured_images_per_second=12.0)]
    )
    assert near.startswith(f"{level}: {batches} batches")
    assert far.startswith(f"{lowered}: {batches} batches")
    assert "more workers: 12.0 images/s in a trial, 20.0 by the model" in far


# These tests look at what is refused or named.


def _hang(index):
    if index >= 8:
        time.sleep(1000)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_that_never_yields_is_named(monkeypatch, workers):
    monkeypatch.setattr(module, "TIMEOUT_S", 1.0)
    # Other tests may have left processes.
    before = set(multiprocessing.active_children())
    loader = DataLoader(Samples(act=_hang), batch_size=4, num_workers=workers)
    # Only the lines of this process are seen.
    where = r"at sample 8\." if workers else "at sample 8, in "
    with pytest.raises(ColabUtilsError, match=f"no batch 3: No batch came for .* {where}"):
        diagnose(loader, _sleep_step(0.001), seconds=2)
    # Older versions of torch end a worker, and do not wait for its end.
    for worker in set(multiprocessing.active_children()) - before:
        worker.join(10)
    assert set(multiprocessing.active_children()) <= before


def test_one_that_never_yields_is_named_in_a_background_job(monkeypatch):
    # A shell starts a background process like this.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        test_a_loader_that_never_yields_is_named(monkeypatch, 0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_what_is_no_loader_is_refused():
    with pytest.raises(ColabUtilsError, match="An iterator cannot start again"):
        diagnose(iter([(["a"], [{}])] * 9))
    with pytest.raises(ColabUtilsError, match="'some/folder' cannot start again"):
        diagnose("some/folder")
    with pytest.raises(ColabUtilsError, match="seconds over 0"):
        diagnose([(["a"], [{}])], seconds=0)
