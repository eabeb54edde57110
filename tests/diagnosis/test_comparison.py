"""The comparison: equal samples first, then rows that survive what goes wrong."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
import torch

from colab_utils.diagnosis import comparison
from colab_utils.diagnosis.comparison import compare, describe_difference
from colab_utils.diagnosis.strategies import STRATEGIES, Places, Strategy
from colab_utils.drive import DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import CocoFolder

QUICK = {"step_ms": 2, "batch_size": 2, "batches": 2, "repeats": 1, "workers": 1, "drive_profile": "fast"}


def _rows(found):
    return {row.name: row for row in found.strategies}


def _add_strategy(monkeypatch, name, change):
    """A strategy that is built as ``packed`` is, and then changed."""
    build_loader = Places.build_loader

    def build(self, strategy, **settings):
        loader = build_loader(self, strategy, **settings)
        return change(loader) if strategy.name == name else loader

    monkeypatch.setattr(Places, "build_loader", build)
    strategy = Strategy(name, "Made for the test.", shards=True, packed=True)
    monkeypatch.setattr(comparison, "STRATEGIES", STRATEGIES | {name: strategy})


def test_every_strategy_gives_the_same_samples(tiny_dataset, tmp_path):
    found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, **QUICK)
    assert [row.name for row in found.strategies] == list(STRATEGIES)
    for row in found.strategies:
        assert (row.comparable, row.difference) == (True, "")
        assert row.images_per_second > 0
        assert len(row.repeats_images_per_second) == 1
    rows = _rows(found)
    assert rows["sequential"].place == "slowed Drive folder, profile fast"
    assert rows["packed"].place == "local disk"
    assert "copying its shards took" in rows["packed"].note
    assert found.step == "emulated 2 ms"
    assert found.dataset["images"] == 12
    text = json.dumps(dataclasses.asdict(found), allow_nan=False)
    assert set(json.loads(text)) >= {"machine", "dataset", "strategies"}
    assert not list(tmp_path.rglob("*.part"))


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
    found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, **QUICK | {"drive_profile": slow})
    rows = _rows(found)
    # two images a batch, each a known sleep of 20 ms; a shard is one such sleep
    assert rows["sequential"].batch_ms_median >= 40
    assert min(rows["dataloader"].first_batch_s, rows["sequential"].first_batch_s) >= 0.04
    assert rows["shards_on_drive"].first_batch_s >= 0.02
    places = {row.name for row in found.strategies if "slowed Drive folder" in row.place}
    assert places == {"sequential", "dataloader", "shards_on_drive"}


def test_a_second_run_finds_its_shards(tiny_dataset, tmp_path):
    for _ in range(2):
        found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["packed"], **QUICK)
    assert found.strategies[0].note == ""


def test_a_strategy_that_changes_the_data_is_not_comparable(tiny_dataset, tmp_path, monkeypatch):
    class Shifted:
        def __init__(self, loader):
            self.loader, self.close = loader, loader.close

        def __iter__(self):
            for images, targets in self.loader:
                yield images, [target | {"boxes": target["boxes"] + 3} for target in targets]

    _add_strategy(monkeypatch, "shifted", Shifted)
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["packed", "shifted"], **QUICK
    )
    rows = _rows(found)
    assert rows["packed"].comparable
    assert not rows["shifted"].comparable
    assert "a box differs by 3.0 pixels" in rows["shifted"].difference
    assert rows["shifted"].images_per_second > 0
    assert "NOT COMPARABLE" in str(found)


def test_an_image_that_comes_twice_is_not_comparable(tiny_dataset, tmp_path, monkeypatch):
    class Repeating:
        def __init__(self, loader):
            self.loader, self.close = loader, loader.close

        def __iter__(self):
            first = next(iter(self.loader))
            yield from [first] * 6

    _add_strategy(monkeypatch, "repeating", Repeating)
    found = compare(tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=["repeating"], **QUICK)
    assert "twice" in found.strategies[0].difference
    assert not found.strategies[0].comparable


def test_a_strategy_that_fails_leaves_a_note(tiny_dataset, tmp_path, monkeypatch):
    def fail(loader):
        loader.close()
        raise ImportError("no module named fastloader")

    _add_strategy(monkeypatch, "failing", fail)
    names = ["failing", "dataloader_on_ssd"]
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


def _watch_timing(monkeypatch, watch):
    """Call ``watch(name)`` each time that a strategy is about to be timed, with the Drive profile of the test."""
    build_loader = Places.build_loader

    def build(self, strategy, *, profile, **settings):
        if profile is not None:  # the check reads without one
            watch(strategy.name)
        return build_loader(self, strategy, profile=profile, **settings)

    monkeypatch.setattr(Places, "build_loader", build)


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
