"""The comparison: equal samples first, then rows that survive what goes wrong."""

import dataclasses
import json
import multiprocessing
import shutil
import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from colab_utils.comparison import compare as trials
from colab_utils.comparison import strategies as stores
from colab_utils.comparison import strategies as ways
from colab_utils.comparison.compare import StrategyTiming, compare, find_pay_back
from colab_utils.comparison.equality import describe_difference
from colab_utils.comparison.strategies import DEFAULT_STRATEGIES, STRATEGIES, Strategy
from colab_utils.data.coco import read_coco
from colab_utils.drive import DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import CocoFolder

QUICK = {
    "step_ms": 2, "batch_size": 2, "batches": 2, "repeats": 1, "workers": 1, "drive_profile": "fast",
    "timeline_s": 0.1, "forecast_s": 0,
}  # fmt: skip


def _rows(found):
    return {row.name: row for row in found.strategies}


def _change_packed(name, change):
    """A strategy that is opened as ``packed`` is, and then changed."""
    return Strategy(name, "Made for the test.", "shards_on_ssd", lambda s: change(STRATEGIES["packed"].open(s)))


def test_every_strategy_gives_the_same_samples(tiny_dataset, tmp_path):
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=list(STRATEGIES), **QUICK
    )
    assert [row.name for row in found.strategies] == list(STRATEGIES)
    for row in found.strategies:
        assert (row.comparable, row.difference, row.note) == (True, "", "")
        assert row.images_per_second > 0
        assert row.cold_images_per_second > 0
        assert len(row.repeats_images_per_second) == 1
        assert row.timeline[0][0] == 0
        assert all(asked <= began < ended for asked, began, ended in row.timeline)
        assert row.ratio_low <= row.ratio <= row.ratio_high
        assert row.drive_bytes > 0
        assert row.epoch_minutes > 0
    rows = _rows(found)
    assert rows["sequential"].place == "slowed Drive folder, profile fast"
    assert rows["packed"].place == "local disk"
    assert found.baseline == "dataloader"
    assert rows["dataloader"].ratio == 1
    assert set(found.no_help) <= set(STRATEGIES) - {"dataloader"}
    # what each needs: files copied, shards made once and copied, arrays larger than files
    assert (rows["sequential"].once_minutes, rows["sequential"].session_minutes) == (0, 0)
    assert rows["dataloader_on_ssd"].session_minutes > 0
    assert rows["packed"].once_minutes > 0 < rows["packed"].session_minutes
    assert rows["memory_mapped"].ssd_bytes > rows["dataloader_on_ssd"].ssd_bytes
    assert found.step == "emulated 2 ms"
    assert found.dataset["images"] == 12
    text = json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert set(json.loads(text)) >= {"machine", "dataset", "strategies"}
    assert not list(tmp_path.rglob("*.part"))


def test_the_default_is_every_way_that_people_are_told_to_use():
    assert set(DEFAULT_STRATEGIES) <= set(STRATEGIES)
    asked_for = {
        "sequential", "thread_queue", "process_queue", "dataloader", "saved_tensors", "memory_mapped", "in_memory",
        "autotuned", "shards_on_drive", "shards_on_ssd", "packed", "train_while_copying",
    }  # fmt: skip
    assert asked_for <= set(DEFAULT_STRATEGIES)
    for strategy in STRATEGIES.values():
        assert strategy.idea.endswith(".")


@pytest.mark.parametrize("name", ["thread_queue", "process_queue", "autotuned", "dataloader"])
def test_a_pass_that_is_broken_off_leaves_nothing_behind(tiny_dataset, tmp_path, name):
    prepared = ways.PreparedData(
        tiny_dataset.images, read_coco(tiny_dataset.annotations), tmp_path, profile=None, count=12, min_size=800,
        max_size=1333,
    )  # fmt: skip
    before = threading.active_count()
    loader = STRATEGIES[name].open(ways.Setting(prepared, None, 1, 1, "cpu"))
    batches = iter(loader)
    next(batches)
    batches.close()
    loader.close()
    assert threading.active_count() <= before + (name == "dataloader")
    assert not multiprocessing.active_children()


def test_an_error_in_a_producer_reaches_the_loop(tiny_dataset, tmp_path):
    for name in ("thread_queue", "process_queue"):
        load = getattr(ways, f"load_by_{name.split('_')[0]}")

        class Failing(list):
            def __getitem__(self, index):
                raise ColabUtilsError("image 7 is damaged")

        with pytest.raises(ColabUtilsError, match="image 7 is damaged"):
            list(load(Failing(), [[0]]))


def test_more_memory_than_there_is_is_refused(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(stores, "find_free_memory", lambda: 100_000)
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["in_memory", "dataloader"], **QUICK
    )
    rows = _rows(found)
    assert rows["in_memory"].images_per_second is None
    assert "all 12 images to fit into half of the free memory" in rows["in_memory"].note
    assert rows["dataloader"].images_per_second > 0


def test_more_disk_than_there_is_is_refused(tiny_dataset, tmp_path, monkeypatch):
    monkeypatch.setattr(
        "colab_utils.comparison.prepared.shutil.disk_usage", lambda _: SimpleNamespace(free=1000, total=2000, used=1000)
    )
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["memory_mapped", "sequential"],
        **QUICK,
    )  # fmt: skip
    assert "of free disk" in _rows(found)["memory_mapped"].note
    assert _rows(found)["sequential"].images_per_second > 0


def test_a_library_that_is_not_installed_is_named_in_its_row(tiny_dataset, tmp_path):
    names = ["litdata", "dataloader"]
    found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=names, **QUICK)
    note = _rows(found)["litdata"].note
    assert "litdata" in note
    assert _rows(found)["dataloader"].images_per_second > 0


def test_forecasts_are_held_against_what_was_measured(tiny_dataset, tmp_path):
    slow = DriveProfile("slow", open_s=0.03, bytes_per_s=50e6, source="made up for the test")
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["dataloader", "packed"],
        **QUICK | {"drive_profile": slow, "forecast_s": 2, "batches": 8},
    )  # fmt: skip
    (checked,) = found.forecasts
    assert (checked.fix, checked.strategy) == ("packed masks", "packed")
    assert checked.measured_images_per_second == _rows(found)["packed"].images_per_second
    assert checked.error == pytest.approx(checked.forecast_images_per_second / checked.measured_images_per_second - 1)


def _make_timing(**minutes):
    names = [field.name for field in dataclasses.fields(StrategyTiming)]
    return StrategyTiming(**dict.fromkeys(names) | minutes)


@pytest.mark.parametrize(
    ("own", "epochs"),
    [
        ((0, 0, 10, 10), 0.0),  # the same
        ((6, 0, 4, 4), 1.0),  # paid at the end of the first epoch
        ((3, 0, 4, 4), 0.5),  # in the middle of it
        ((12, 6, 10, 4), 4.0),  # nothing won in the first epoch, 6 minutes in each later one
        ((1, 0, 12, 12), None),  # never
        ((0, 0, 8, 8), 0.0),  # faster from the start
    ],
)
def test_when_it_has_paid(own, epochs):
    names = ("once_minutes", "session_minutes", "first_epoch_minutes", "epoch_minutes")
    base = _make_timing(**dict(zip(names, (0, 0, 10, 10), strict=True)))
    assert find_pay_back(_make_timing(**dict(zip(names, own, strict=True))), base) == epochs


def test_shrunk_images_are_compared_at_their_stored_size(coco_mini, tmp_path):
    names = ["dataloader_on_ssd", "shards_on_ssd", "packed"]
    found = compare(
        coco_mini.images, coco_mini.annotations, folder=tmp_path, strategies=names, max_images=10, min_size=300,
        max_size=500, **QUICK,
    )  # fmt: skip
    assert [(row.comparable, row.difference) for row in found.strategies] == [(True, "")] * 3
    assert found.dataset["images"] == 10


def test_a_bad_image_is_left_out_of_every_form(tiny_dataset, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(tiny_dataset.images, images)
    min(images.iterdir()).write_bytes(b"cut short")
    found = compare(
        images, tiny_dataset.annotations, folder=tmp_path / "work", strategies=["sequential", "packed"], **QUICK
    )
    assert found.dataset["images"] == 11
    assert [(row.comparable, row.images_per_second > 0) for row in found.strategies] == [(True, True)] * 2


def test_drive_is_slow_where_it_is_read_and_only_there(tiny_dataset, tmp_path):
    slow = DriveProfile("slow", open_s=0.02, bytes_per_s=50e6, source="made up for the test")
    names = ["sequential", "dataloader", "dataloader_on_ssd", "shards_on_drive", "packed"]
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=names,
        **QUICK | {"drive_profile": slow},
    )  # fmt: skip
    rows = _rows(found)
    # two images a batch, each a known sleep of 20 ms; a shard is one such sleep
    assert rows["sequential"].batch_ms_median >= 40
    assert min(rows["dataloader"].first_batch_s, rows["sequential"].first_batch_s) >= 0.04
    assert rows["shards_on_drive"].first_batch_s >= 0.02
    assert rows["dataloader_on_ssd"].session_minutes * 60 >= 12 * 0.02 / 4  # four streams copy the files
    places = {row.name for row in found.strategies if "slowed Drive folder" in row.place}
    assert places == {"sequential", "dataloader", "shards_on_drive"}


def test_a_second_run_finds_its_forms_and_what_they_took(tiny_dataset, tmp_path):
    rows = []
    for _ in range(2):
        found = compare(
            tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["packed", "memory_mapped"],
            **QUICK,
        )  # fmt: skip
        rows.append(_rows(found))
    times = [rows[0]["memory_mapped"].once_minutes, rows[1]["memory_mapped"].once_minutes]
    assert times[1] == pytest.approx(times[0], rel=0.9)  # the copy of the files is timed anew, the conversion not
    assert rows[1]["packed"].session_minutes == rows[0]["packed"].session_minutes


def test_a_strategy_that_changes_the_data_is_not_comparable(tiny_dataset, tmp_path):
    class Shifted:
        def __init__(self, loader):
            self.loader, self.close = loader, loader.close

        def __iter__(self):
            for images, targets in self.loader:
                yield images, [target | {"boxes": target["boxes"] + 3} for target in targets]

    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path,
        strategies=["packed", _change_packed("shifted", Shifted)], **QUICK,
    )  # fmt: skip
    rows = _rows(found)
    assert rows["packed"].comparable
    assert not rows["shifted"].comparable
    assert "a box differs by 3.0 pixels" in rows["shifted"].difference
    assert rows["shifted"].images_per_second > 0
    assert "NOT COMPARABLE" in str(found)


def test_an_image_that_comes_twice_is_not_comparable(tiny_dataset, tmp_path):
    class Repeating:
        def __init__(self, loader):
            self.loader, self.close = loader, loader.close

        def __iter__(self):
            first = next(iter(self.loader))
            yield from [first] * 6

    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path,
        strategies=[_change_packed("repeating", Repeating)], **QUICK,
    )  # fmt: skip
    assert "twice" in found.strategies[0].difference
    assert not found.strategies[0].comparable


def test_an_image_that_does_not_come_is_not_comparable(tiny_dataset, tmp_path):
    class Lazy:
        def __init__(self, loader):
            self.loader, self.close = loader, loader.close

        def __iter__(self):
            yield from list(self.loader)[:-1]

    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=[_change_packed("lazy", Lazy)],
        **QUICK,
    )  # fmt: skip
    assert "images did not come" in found.strategies[0].difference


def test_a_strategy_that_fails_leaves_a_note(tiny_dataset, tmp_path):
    def fail(loader):
        loader.close()
        raise ImportError("no module named fastloader")

    names = [_change_packed("failing", fail), "dataloader_on_ssd"]
    found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=names, **QUICK)
    rows = _rows(found)
    assert rows["failing"].note == "ImportError: no module named fastloader"
    assert rows["failing"].images_per_second is None
    assert not rows["failing"].comparable
    assert rows["dataloader_on_ssd"].images_per_second > 0
    json.dumps(dataclasses.asdict(found))


def test_without_shards_the_loose_files_are_still_compared(tiny_dataset, tmp_path):
    (tmp_path / "drive").write_text("a file where the folder of shards should be")
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["sequential", "shards_on_ssd"],
        **QUICK,
    )  # fmt: skip
    rows = _rows(found)
    assert rows["sequential"].images_per_second > 0
    assert rows["shards_on_ssd"].images_per_second is None
    assert "drive" in rows["shards_on_ssd"].note


def test_a_drive_that_is_lost_in_the_middle_costs_its_rows_only(tiny_dataset, tmp_path, monkeypatch):
    images = tmp_path / "images"
    shutil.copytree(tiny_dataset.images, images)
    run = trials.TrialRunner.run_cold

    def lose(self, row):
        if row.strategy.name == "sequential":
            shutil.rmtree(images)
        run(self, row)

    monkeypatch.setattr(trials.TrialRunner, "run_cold", lose)
    names = ["sequential", "dataloader", "packed"]
    found = compare(images, tiny_dataset.annotations, folder=tmp_path / "work", strategies=names, **QUICK)
    rows = _rows(found)
    assert "expected an image file, found none" in rows["sequential"].note
    assert rows["sequential"].images_per_second is rows["dataloader"].images_per_second is None
    assert rows["packed"].images_per_second > 0
    assert found.baseline == "packed"


def _watch_timing(monkeypatch, watch):
    """Call ``watch(name)`` each time that a strategy is about to be timed warm."""
    run = trials.TrialRunner.run_warm

    def run_warm(self, row):
        watch(row.strategy.name)
        run(self, row)

    monkeypatch.setattr(trials.TrialRunner, "run_warm", run_warm)


def test_interrupting_keeps_what_is_measured(tiny_dataset, tmp_path, monkeypatch):
    def interrupt_later(name):
        if name == "dataloader_on_ssd":
            raise KeyboardInterrupt

    _watch_timing(monkeypatch, interrupt_later)
    names = ["sequential", "dataloader_on_ssd"]
    found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=names, **QUICK)
    assert [row.name for row in found.strategies] == ["sequential"]
    assert "Ctrl-C" in found.note


def test_interrupting_before_the_first_row_goes_through(tiny_dataset, tmp_path, monkeypatch):
    def interrupt(_):
        raise KeyboardInterrupt

    _watch_timing(monkeypatch, interrupt)
    with pytest.raises(KeyboardInterrupt):
        compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["sequential"], **QUICK)


def test_repeats_are_interleaved(tiny_dataset, tmp_path, monkeypatch):
    order = []
    _watch_timing(monkeypatch, order.append)
    names = ["sequential", "dataloader_on_ssd"]
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=names, **QUICK | {"repeats": 3}
    )
    assert order == [*names, *names[::-1], *names]
    row = found.strategies[0]
    assert row.images_per_second == np.median(row.repeats_images_per_second)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategies": ["packed", "teleport"]}, "'teleport'"),  # unknown: the message lists those there are
        ({"strategies": []}, "found none"),  # nothing to do
        ({"batches": 0}, "1 or more"),  # nothing to time
        ({"drive_profile": "warp"}, "Drive profile"),  # unknown profile
    ],
)
def test_bad_settings_are_refused(tiny_dataset, tmp_path, settings, words):
    with pytest.raises(ColabUtilsError, match=words):
        compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, **{**QUICK, **settings})


def test_a_missing_folder_is_refused(tiny_dataset, tmp_path):
    with pytest.raises(ColabUtilsError, match="image folder"):
        compare(tmp_path / "nowhere", tiny_dataset.annotations, folder=tmp_path, **QUICK)


class TestDescribeDifference:
    @pytest.fixture
    def sample(self, tiny_dataset):
        image, target = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)[0]
        assert len(target["labels"])
        return image, target

    def test_the_same_is_no_difference(self, sample):
        assert describe_difference(sample, sample) == ""

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            (lambda i, t: (i.flip(-1), t), "pixels"),  # mirrored
            (lambda i, t: (i, t | {"boxes": t["boxes"] + 2}), "a box"),  # shifted
            (lambda i, t: (i, t | {"labels": t["labels"] + 1}), "labels"),  # another class
            (lambda i, t: (i, t | {"masks": t["masks"].roll(3, -1)}), "a mask"),  # shifted
            (lambda i, t: (i, {key: value[:0] for key, value in t.items() if key != "image_id"}), "labels"),  # lost
        ],
    )
    def test_every_change_is_found(self, sample, change, words):
        assert words in describe_difference(change(*sample), sample)

    def test_a_damaged_corner_is_found(self, sample):
        image = sample[0].clone()
        image[:, :10, :10] = 255 - image[:, :10, :10]
        assert "pixels" in describe_difference((image, sample[1]), sample)

    def test_float_images_are_scaled(self, sample):
        assert describe_difference((sample[0].float() / 255, sample[1]), sample) == ""
        assert torch.is_floating_point(sample[1]["boxes"])
