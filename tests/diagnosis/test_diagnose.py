"""Diagnosis: the verdict, the stages, and the fixes, on loaders whose bottleneck was put there on purpose."""

import dataclasses
import itertools
import json
import multiprocessing
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from colab_utils.data.coco import read_coco, write_subset
from colab_utils.diagnosis import diagnose as stages
from colab_utils.diagnosis import fixes
from colab_utils.diagnosis.diagnose import Fix, describe_verdict, diagnose
from colab_utils.diagnosis.timing import BatchTimes, EmulatedStep
from colab_utils.drive import DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import CocoFolder, ShardDataset, make_loader

SLOW = DriveProfile("test", open_s=0.03, bytes_per_s=50e6, source="made up for the test")


class _Sleepy(Dataset):
    def __init__(self, load_s, n=64):
        self.load_s, self.n = load_s, n

    def __len__(self):
        return self.n

    def __getitem__(self, index):
        time.sleep(self.load_s)
        return torch.zeros(3, 8, 8), index


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    """Trials end with their time, however few batches that is."""
    monkeypatch.setattr(fixes, "_TRIAL_BATCHES", 4)


def _collate(samples):
    return tuple(zip(*samples, strict=True))


def _sleep_step(seconds):
    return lambda *batch: time.sleep(seconds)


def _by_name(parts):
    return {part.name: part for part in parts}


def test_a_loader_that_keeps_up_is_fine():
    loader = DataLoader(_Sleepy(0.0), batch_size=4)
    found = diagnose(loader, _sleep_step(0.2), seconds=4)
    assert found.verdict.startswith("Your loader is fine, stop here")
    assert found.headspace < 1.1
    assert found.fixes == ()
    assert found.stall_share < 0.2
    assert found.step == "real"


def test_a_stalled_loader_is_told_what_it_could_win():
    # loading 4 images takes 40 ms in one worker, the step 10 ms: five times as fast at most, workers cure it
    loader = DataLoader(_Sleepy(0.01), batch_size=4, num_workers=1)
    found = diagnose(loader, _sleep_step(0.01), seconds=3)
    assert found.verdict.startswith("Training waits")
    assert found.headspace > 2
    assert found.stall_share > 0.4
    assert [stage.name for stage in found.stages] == ["sample", "collate", "hand-off", "wait", "step"]
    workers = _by_name(found.fixes)["more workers"]
    assert workers.forecast_images_per_second > 1.3 * found.images_per_second
    assert workers.measured_images_per_second is None
    assert f"{found.batches} batches" in found.verdict
    assert found.confidence.startswith(("high", "medium", "low"))


def test_verify_tries_more_workers():
    loader = DataLoader(_Sleepy(0.02), batch_size=4, num_workers=1)
    found = diagnose(loader, _sleep_step(0.01), seconds=3, verify=True)
    workers = _by_name(found.fixes)["more workers"]
    assert workers.measured_images_per_second > 1.2 * found.images_per_second


def test_a_slow_drive_is_named_and_shards_are_forecast(tiny_dataset):
    loader = make_loader(
        CocoFolder(tiny_dataset.images, tiny_dataset.annotations, profile=SLOW), batch_size=2, workers=1
    )
    try:
        found = diagnose(loader, EmulatedStep(10), seconds=4)
    finally:
        loader.close()
    stages, fixes = _by_name(found.stages), _by_name(found.fixes)
    assert list(stages) == ["read", "decode", "masks", "collate and hand-off", "wait", "step"]
    assert stages["read"].median_ms >= 30
    assert stages["read"].cpu_ms < 5
    assert max(stages.values(), key=lambda stage: stage.median_ms).name in ("read", "wait")
    assert "the largest stage is read" in found.verdict
    assert "(emulated)" in found.verdict
    assert found.step == "emulated 10 ms"
    assert {"more workers", "image files on the local SSD", "shards on the local SSD", "packed masks"} <= set(fixes)
    images = len(loader.dataset)
    assert all(
        fix.minutes_per_epoch * 60 * fix.forecast_images_per_second == pytest.approx(images) for fix in found.fixes
    )
    assert fixes["shards on the local SSD"].once_gb > 0
    assert fixes["shards on the local SSD"].forecast_images_per_second > 1.5 * found.images_per_second
    json.dumps(dataclasses.asdict(found), allow_nan=False)


@pytest.mark.parametrize("plain", [True, False], ids=["torch's DataLoader", "make_loader"])
def test_verify_measures_shards_of_a_sample(tiny_dataset, plain):
    dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, profile=SLOW)
    loader = (
        DataLoader(dataset, batch_size=2, collate_fn=_collate)
        if plain
        else make_loader(dataset, batch_size=2, workers=0)
    )
    found = diagnose(loader, _sleep_step(0.002), seconds=2, verify=True)
    fixes = _by_name(found.fixes)
    for name in ("image files on the local SSD", "shards on the local SSD", "packed masks"):
        assert fixes[name].measured_images_per_second > found.images_per_second


def test_shards_on_a_slow_drive(tiny_shards):
    loader = make_loader(ShardDataset(tiny_shards, profile=SLOW), batch_size=2, workers=0)
    found = diagnose(loader, _sleep_step(0.002), seconds=2, verify=True)
    fixes = _by_name(found.fixes)
    assert "packed masks" not in fixes  # they are packed already
    assert fixes["shards on the local SSD"].measured_images_per_second > found.images_per_second


def test_large_images_should_be_resized_once(tiny_dataset):
    # 160 x 128 pixels where training needs 40 x 32
    loader = make_loader(CocoFolder(tiny_dataset.images, tiny_dataset.annotations), batch_size=2, workers=0)
    found = diagnose(loader, seconds=2, min_size=32, max_size=64)
    assert "6% of the pixels" in _by_name(found.fixes)["resize once offline"].sentence


def test_without_a_step_only_the_loader_is_judged(tiny_shards):
    loader = make_loader(ShardDataset(tiny_shards), batch_size=4, workers=0)
    found = diagnose(loader, seconds=1)
    assert found.verdict.startswith("The loader alone gives")
    assert found.step == "none"
    assert found.headspace > 0
    assert "step" not in _by_name(found.stages)


def test_three_images(tiny_dataset, tmp_path):
    annotations = write_subset(read_coco(tiny_dataset.annotations), range(3), tmp_path / "three.json")
    loader = make_loader(CocoFolder(tiny_dataset.images, annotations), batch_size=2, workers=0)
    found = diagnose(loader, EmulatedStep(5), seconds=1)
    assert found.images_per_second > 0
    assert found.batches > 3


def test_the_order_of_the_loader_is_put_back(tiny_shards):
    loader = make_loader(ShardDataset(tiny_shards), batch_size=5, workers=0, seed=3)
    before, random = loader.state_dict(), torch.random.get_rng_state()
    diagnose(loader, _sleep_step(0.001), seconds=0.5)
    assert loader.state_dict() == before
    assert torch.equal(torch.random.get_rng_state(), random)


def test_a_step_that_lacks_cpu_beside_the_loader_is_named():
    def make_times(wait_s, step_s):
        return BatchTimes((wait_s,) * 20, (step_s,) * 20, 80, 0.1, 1.0, 0.5, 0.1)

    words = describe_verdict(make_times(0.02, 0.15), make_times(0.0, 0.1), (), [], "emulated 100 ms", "high: 20")
    assert "beside the loader the step itself takes 1.5 times as long" in words
    words = describe_verdict(make_times(0.20, 0.10), make_times(0.0, 0.1), (), [], "emulated 100 ms", "high: 20")
    assert "beside the loader" not in words


def test_the_verdict_trusts_what_was_measured():
    def describe(fixes):
        return describe_verdict(now, cached, (), fixes, "real", "low")

    now, cached = (BatchTimes((wait_s,) * 20, (0.1,) * 20, 80, 0.1, 1.0, 0.5, 0.1) for wait_s in (0.2, 0.0))
    fixes = [Fix("more workers", 39.0, 14.0, ""), Fix("packed masks", 20.0, 25.0, "")]
    assert "Best fix: packed masks, 25.0 images/s (measured)." in describe_verdict(
        now, cached, (), fixes, "real", "low"
    )
    fixes = [dataclasses.replace(fix, measured_images_per_second=None) for fix in fixes]
    assert "Best fix: more workers, 39.0 images/s (forecast)." in describe_verdict(
        now, cached, (), fixes, "real", "low"
    )


def test_few_batches_make_low_confidence():
    found = diagnose(DataLoader(_Sleepy(0.05), batch_size=4), _sleep_step(0.01), seconds=1)
    assert found.confidence.startswith("low: ")
    assert "(low confidence" in found.verdict


class _Hangs(_Sleepy):
    def __getitem__(self, index):
        if index >= 8:
            time.sleep(1000)
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_that_never_yields_is_named(monkeypatch, workers):
    monkeypatch.setattr(stages, "_TIMEOUT_S", 1.0)
    loader = DataLoader(_Hangs(0.0), batch_size=4, num_workers=workers)
    with pytest.raises(ColabUtilsError, match=r"expected batch 3 from the loader, found none for .* at sample 8, in "):
        diagnose(loader, _sleep_step(0.001), seconds=2)
    assert not multiprocessing.active_children()


def test_one_that_never_yields_is_named_in_a_background_job(monkeypatch):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # as a shell starts one
    try:
        test_a_loader_that_never_yields_is_named(monkeypatch, 0)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_our_loader_that_never_yields_is_named_with_its_file(monkeypatch, tiny_dataset):
    monkeypatch.setattr(stages, "_TIMEOUT_S", 1.0)
    dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
    monkeypatch.setattr(dataset, "read", lambda index: time.sleep(1000))
    loader = make_loader(dataset, batch_size=2, workers=1)
    with pytest.raises(ColabUtilsError, match=r"waits in clock_nanosleep, at sample \d+ \(.*\.jpg\)"):
        diagnose(loader, _sleep_step(0.001), seconds=2)
    loader.close()


def test_a_step_that_fails_is_named():
    def fail(images, targets):
        raise ValueError("expected 4 channels")

    with pytest.raises(ColabUtilsError, match="a step that takes batch 1, found ValueError: expected 4 channels"):
        diagnose(DataLoader(_Sleepy(0.0), batch_size=4), fail, seconds=1)


def test_one_core(monkeypatch):
    for module in (fixes, stages):
        monkeypatch.setattr(module, "count_cores", lambda: 1, raising=False)
    found = diagnose(DataLoader(_Sleepy(0.01), batch_size=4), EmulatedStep(20), seconds=2)
    assert found.headspace > 1.5
    assert _by_name(found.fixes)["more workers"].forecast_images_per_second > found.images_per_second


def test_a_wall_clock_that_jumps_changes_no_verdict(monkeypatch):
    clock = itertools.count(0, -3600)
    monkeypatch.setattr(time, "time", lambda: float(next(clock)))
    found = diagnose(DataLoader(_Sleepy(0.0), batch_size=4), _sleep_step(0.2), seconds=3)
    assert found.verdict.startswith("Your loader is fine, stop here")


def test_settings_are_forecast_and_tried():
    loader = DataLoader(_Sleepy(0.03), batch_size=4, num_workers=1)
    for _ in range(3):  # on a busy machine one quiet run of three is enough
        found = _by_name(diagnose(loader, EmulatedStep(20), seconds=6, verify=True).fixes)
        memory = found["samples in memory"]
        if memory.forecast_images_per_second == pytest.approx(memory.measured_images_per_second, rel=0.3):
            break
    assert memory.forecast_images_per_second == pytest.approx(memory.measured_images_per_second, rel=0.3)
    assert memory.measured_images_per_second > 1.5 * found["more prefetch"].measured_images_per_second
    assert "of memory in all workers" in memory.sentence
    assert found["a step twice as fast"].measured_images_per_second


def test_samples_that_do_not_fit_in_memory_are_not_offered(monkeypatch):
    monkeypatch.setattr(fixes, "find_free_memory", lambda: 1000)
    found = _by_name(diagnose(DataLoader(_Sleepy(0.01), batch_size=4), EmulatedStep(20), seconds=1, verify=True).fixes)
    assert found["samples in memory"].sentence.startswith("Not here: it needs")
    assert found["samples in memory"].measured_images_per_second is None


def test_the_three_best_fixes_are_printed(tiny_dataset):
    dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, profile=SLOW)
    found = diagnose(DataLoader(dataset, batch_size=2, collate_fn=_collate), EmulatedStep(5), seconds=2)
    shown = [fix for fix in found.fixes if f"{fix.name}: " in str(found)]
    assert len(shown) == 3
    assert f"({len(found.fixes) - 3} more that win less)" in str(found)


def test_on_drive_the_doctor_looks_too(monkeypatch, tiny_shards):
    for module in (fixes, stages):
        monkeypatch.setattr(module, "is_on_drive", lambda folder: True)
    found = diagnose(make_loader(ShardDataset(tiny_shards), batch_size=2, workers=0), EmulatedStep(1), seconds=2)
    assert found.drive.files
    assert str(found.drive).splitlines()[0] in str(found)
    json.dumps(dataclasses.asdict(found), allow_nan=False)


def test_an_iterator_is_refused():
    with pytest.raises(ColabUtilsError, match="found an iterator"):
        diagnose(iter([(["a"], [{}])] * 9))


def test_a_broken_image_is_named(tiny_dataset, tmp_path):
    annotations = write_subset(read_coco(tiny_dataset.annotations), range(3), tmp_path / "three.json")
    loader = make_loader(CocoFolder(tmp_path, annotations), batch_size=2, workers=0)
    with pytest.raises(ColabUtilsError, match=r"batch 1 .*tmp|batch 1 .*\.jpg"):
        diagnose(loader, seconds=1)


def test_late_what_can_be_simulated_is_not_tried(monkeypatch, tiny_dataset):
    tried = []
    real = fixes.Situation.time

    def note(self, dataset, *arguments, **options):
        tried.append(dataset)
        return real(self, dataset, *arguments, **options)

    monkeypatch.setattr(fixes.Situation, "time", note)
    monkeypatch.setattr(fixes, "_LATE", 0)
    dataset = CocoFolder(tiny_dataset.images, tiny_dataset.annotations, profile=SLOW)
    loader = DataLoader(dataset, batch_size=2, num_workers=1, collate_fn=_collate)
    found = _by_name(diagnose(loader, EmulatedStep(5), seconds=2).fixes)
    assert {"more workers", "more prefetch", "a step twice as fast", "samples in memory"} <= set(found)
    assert not any(isinstance(one, CocoFolder | list) for one in tried)
    assert tried  # shards are made and tried all the same
    local = found["image files on the local SSD"].forecast_images_per_second
    assert local > 1.5 * found["more prefetch"].forecast_images_per_second
