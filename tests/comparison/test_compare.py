"""The comparison: equal samples first, then rows that survive what goes wrong."""

import dataclasses
import json
import multiprocessing
import os
import shutil
import threading
from contextlib import closing, nullcontext
from importlib.util import find_spec
from itertools import islice
from types import SimpleNamespace
from unittest.mock import MagicMock, Mock

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from colab_utils import CocoFolder
from colab_utils.comparison import COURSE_STRATEGIES
from colab_utils.comparison import compare as comparing
from colab_utils.comparison import strategies as strategies_module
from colab_utils.comparison.compare import compare, describe_difference
from colab_utils.comparison.prepared import PreparedData
from colab_utils.comparison.strategies import (
    STRATEGIES,
    PillowFolder,
    Setting,
    Strategy,
    collate,
    deliver,
)
from colab_utils.course.sample_data import make_dataset
from colab_utils.diagnosis.timing import BatchTimes
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.slow_drive import DriveProfile, find_profile, slow_down

HAS_TENSORFLOW = find_spec("tensorflow") is not None
QUICK = {
    "run_s": 0,
    "step": EmulatedStep(2),
    "batch_size": 2,
    "batches": 2,
    "repeats": 1,
    "workers": 1,
    "drive_profile": "fast",
    "timeline_s": 0.1,
}
SLOW = DriveProfile("slow", open_s=0.02, bytes_per_s=50e6, source="made up for the test")


@pytest.fixture
def race(tiny_dataset, tmp_path):
    """Compare strategies over the tiny dataset; the rows by name, and the comparison itself."""

    def run(*strategies, images=tiny_dataset.images, **settings):
        comparison = compare(
            images,
            tiny_dataset.annotations,
            folder=tmp_path / "work",
            strategies=strategies,
            **QUICK | settings,
        )
        return {row.name: row for row in comparison.strategies}, comparison

    return run


@pytest.fixture
def prepare(tiny_dataset, tmp_path):
    def make(images=tiny_dataset.images, annotations=tiny_dataset.annotations, **settings):
        return PreparedData(
            images, annotations, tmp_path / "work", **{"profile": None, "count": 12} | settings
        )

    return make


def fake(name, change=list, *, keeps=False):
    """A strategy that has the reference's samples in memory; ``change`` gets the batches of an
    epoch.
    """

    def open_fake(setting):
        reference = setting.prepared.reference
        samples = DataLoader(reference, setting.batch_size, collate_fn=collate)
        return Batches(change([deliver(batch, "cpu") for batch in samples]))

    return Strategy(name, "Made for the test.", "files_on_drive", open_fake, keeps)


class Batches(list):
    def close(self):
        pass


# These tests look at the strategies.


def test_every_strategy_gives_the_same_samples(race):
    names = [name for name in STRATEGIES if name != "tensorflow" or HAS_TENSORFLOW]
    rows, comparison = race(*names)
    assert list(rows) == names
    for row in rows.values():
        assert (row.comparable, row.difference, row.note) == (True, "", "")
        assert row.images_per_second > 0
        assert all(0 <= began < ended for began, ended in row.timeline)
        assert row.cold_ms_per_image > 0
    assert rows["dataloader"].title == "1 worker"
    # The first prepares nothing, the second copies files, and the third makes shards once and
    # copies them.
    assert (rows["sequential"].once_ms_per_image, rows["sequential"].session_ms_per_image) == (0, 0)
    assert rows["dataloader_on_ssd"].session_ms_per_image > 0
    assert rows["packed"].once_ms_per_image > 0 < rows["packed"].session_ms_per_image
    assert comparison.step == "emulated 2 ms"
    assert comparison.dataset["images"] == 12
    json.dumps(dataclasses.asdict(comparison), allow_nan=False)


@pytest.mark.skipif(HAS_TENSORFLOW, reason="TensorFlow is installed")
def test_without_tensorflow_its_pipeline_is_left_out_in_words(race):
    rows, _ = race("tensorflow", fake("other"))
    assert "TensorFlow is not installed on this machine" in rows["tensorflow"].note
    assert rows["other"].images_per_second > 0


def test_the_default_is_every_strategy_that_people_are_told_to_use():
    asked_for = (
        "sequential thread_queue process_queue dataloader saved_tensors memory_mapped in_memory "
        "tensorflow streams shards_on_drive shards_on_ssd packed train_while_copying"
    )
    assert {*asked_for.split(), *COURSE_STRATEGIES} < set(STRATEGIES)


@pytest.fixture
def open_way(prepare):
    """Open the loader of a strategy that has one worker and one image in a batch."""
    return lambda name: closing(STRATEGIES[name].open(Setting(prepare(), 1, 1, "cpu")))


@pytest.mark.parametrize("name", ["thread_queue", "dataloader"])
def test_an_epoch_that_is_broken_off_leaves_nothing_behind(open_way, name):
    before = set(threading.enumerate())
    with open_way(name) as loader, closing(iter(loader)) as batches:
        next(batches)
    for thread in set(threading.enumerate()) - before:
        if "pin_memory" not in thread.name:
            thread.join(30)
    assert not multiprocessing.active_children()


def test_a_thread_that_hangs_in_a_read_is_not_waited_for(open_way, monkeypatch):
    go_on = threading.Event()
    calls = []
    read = PillowFolder.read

    def hang(self, index):
        calls.append(index)
        if len(calls) > 1:
            go_on.wait(60)
        return read(self, index)

    monkeypatch.setattr(PillowFolder, "read", hang)
    with open_way("thread_queue") as loader, closing(iter(loader)) as batches:
        next(batches)
    # Closing returns while the read still hangs.
    assert not go_on.is_set()
    go_on.set()


# These tests look at prepared data.


def test_shrunk_images_are_compared_at_their_stored_size(prepare, tmp_path):
    photos = make_dataset(
        tmp_path / "photos", n=3, width=1100, height=900, objects=(1, 4), workers=1
    )
    prepared = prepare(photos.images, photos.annotations)
    for name in ("dataloader_on_ssd", "saved_tensors", "memory_mapped", "packed"):
        loader = STRATEGIES[name].open(Setting(prepared, 4, 0, "cpu"))
        batches = [deliver(batch, "cpu") for batch in islice(loader, 3)]
        loader.close()
        assert comparing._find_difference(batches, prepared.reference) == "", name
        shorter = max(min(image.shape[1:]) for images, _ in batches for image in images)
        assert (shorter == 800) == (name != "dataloader_on_ssd"), name


def test_a_bad_image_is_left_out(race, tiny_dataset, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(tiny_dataset.images, images)
    min(images.iterdir()).write_bytes(b"cut short")
    rows, comparison = race("sequential", fake("other"), images=images)
    assert comparison.dataset["images"] == 11
    assert "1 bad images are left out" in comparison.note
    assert all(row.comparable for row in rows.values())


@pytest.mark.clock
def test_drive_is_slow_where_it_is_read_and_only_there(race):
    rows, comparison = race(
        "sequential", "dataloader_on_ssd", "shards_on_drive", "packed", drive_profile=SLOW
    )
    # A batch has two images, each a known sleep of 20 ms, and a shard is two such sleeps, one for
    # each of its files.
    assert rows["sequential"].batch_ms_median >= 40
    assert rows["sequential"].first_batch_s >= 0.04
    assert rows["shards_on_drive"].first_batch_s >= 0.04
    # Sixteen streams would copy the files.
    assert rows["dataloader_on_ssd"].session_ms_per_image >= 20 / 16
    # The one-off cost also reads the files, before they are converted.
    assert rows["packed"].once_ms_per_image >= 20 / 16
    # A copy of shards waits once for each file of a shard, sixteen at once, and for no image.
    assert rows["packed"].session_ms_per_image >= 20 / 16
    assert comparison.drive.startswith("slow: 20 ms per file")


# These tests look at the rows.


def mirror_images(batches):
    return [([image.flip(-1) for image in images], targets) for images, targets in batches]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (mirror_images, "pixels"),
        (lambda batches: [batches[0]] * len(batches), "twice"),
        (lambda batches: batches[:-1], "2 images did not come"),
    ],
)
def test_a_strategy_that_changes_the_data_is_not_comparable(race, change, words):
    rows, comparison = race(fake("same"), fake("changed", change))
    assert rows["same"].comparable
    assert not rows["changed"].comparable
    assert words in rows["changed"].difference
    assert "NOT COMPARABLE" in str(comparison)


def test_the_random_state_is_put_back(race):
    before = torch.get_rng_state().tolist()
    race(fake("good"), step=lambda *_: torch.rand(1))
    assert torch.get_rng_state().tolist() == before


def test_a_strategy_that_fails_leaves_a_note(race, monkeypatch):
    fail = Mock(side_effect=ImportError("no module named fastloader"))
    monkeypatch.setattr(strategies_module, "find_free_memory", lambda: 100_000)
    rows, _ = race(fake("failing", fail), "in_memory", fake("other"))
    assert rows["failing"].note == "ImportError: no module named fastloader"
    assert "more than half of the free memory" in rows["in_memory"].note
    for name, is_timed in (("failing", False), ("in_memory", False), ("other", True)):
        assert (rows[name].images_per_second is not None) is is_timed
    with pytest.raises(
        ColabUtilsError, match=r"Mend this first: ImportError: no module named fastloader"
    ):
        race(fake("failing", fail))


def test_drive_is_slow_while_a_strategy_is_timed_and_as_it_was_after(race, tiny_dataset, tmp_path):
    seen = []
    work = tmp_path / "work"

    def look(batches):
        drive = [tiny_dataset.images / "a.jpg", work / "drive" / "shards" / "a.tar"]
        local = [work / "annotations.json", work / "ssd" / "shards" / "a.tar"]
        seen.append([find_profile(path) for path in drive + local])
        if len(seen) > 2:
            raise ColabUtilsError("gone")
        return batches

    slow_down(tiny_dataset.images, "bad")
    before = dict(os.environ)
    with pytest.raises(ColabUtilsError, match="gone"):
        race(fake("looking", look), drive_profile=SLOW)
    # The check comes first, and nothing is slowed down for it.
    assert seen == [[None] * 4, *[[SLOW, SLOW, None, None]] * 2]
    assert dict(os.environ) == before


def test_the_comparison_so_far_is_given_after_each_run(race):
    seen = []
    rows, comparison = race(fake("first"), fake("second"), repeats=2, on_run=seen.append)
    # The first report already knows who is to come.
    first, second = seen[0].strategies
    assert first.images_per_second > 0
    assert (second.name, second.images_per_second) == ("second", None)
    assert len(rows["second"].repeats_images_per_second) == 2
    assert seen[-1].strategies == comparison.strategies


@pytest.fixture
def watch_timing(monkeypatch):
    """Call ``watch(name)`` each time that a strategy is about to be timed warm."""
    run = comparing._Row.run_warm

    def install(watch):
        def run_warm(self):
            watch(self.strategy.name)
            run(self)

        monkeypatch.setattr(comparing._Row, "run_warm", run_warm)

    return install


@pytest.mark.parametrize("interrupted", ["first", "second"])
def test_interrupting_keeps_what_is_measured(race, watch_timing, interrupted):
    def interrupt(name):
        if name == interrupted:
            raise KeyboardInterrupt

    watch_timing(interrupt)
    # At the first interruption nothing has been measured yet.
    is_first = interrupted == "first"
    with pytest.raises(KeyboardInterrupt) if is_first else nullcontext():
        rows, comparison = race(fake("first"), fake("second"))
        assert list(rows) == ["first"]
        assert "Ctrl-C" in comparison.note


def test_repeats_are_interleaved(race, watch_timing):
    order = []
    watch_timing(order.append)
    rows, _ = race(fake("first"), fake("second"), repeats=3)
    assert order == 3 * ["first", "second"]
    assert rows["first"].images_per_second == np.median(rows["first"].repeats_images_per_second)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        # This leaves nothing to do.
        ({"strategies": []}, "No strategy is named"),
        # This leaves nothing to time.
        ({"batches": 0}, "expected batches of 1 or more"),
        # Nobody knows this profile.
        ({"drive_profile": "warp"}, "Drive profile"),
        ({"images": "no/such/folder"}, "image folder"),
    ],
)
def test_bad_settings_are_refused(tiny_dataset, tmp_path, settings, words):
    settings = {"images": tiny_dataset.images} | QUICK | settings
    with pytest.raises(ColabUtilsError, match=words):
        compare(annotations=tiny_dataset.annotations, folder=tmp_path, **settings)


def test_a_dataset_without_usable_images_is_refused(tiny_dataset, tmp_path, prepare):
    (tmp_path / "empty.json").write_text('{"images": [], "annotations": [], "categories": []}')
    with pytest.raises(
        ColabUtilsError, match=r"No image in .* can be used\. .*empty.json lists no image"
    ):
        prepare(annotations=tmp_path / "empty.json")
    # The folder belongs to another dataset.
    (tmp_path / "images").mkdir()
    with pytest.raises(
        ColabUtilsError, match=r"No image in .* can be used\. The first error: .*Run check"
    ):
        prepare(images=tmp_path / "images")


# These tests look at what a dataset costs.


def summarise(*, opened_s=0.0, first_s=0.0, **files):
    """The row of a strategy whose steps take 0.1 s for 4 of 96 images, with a first batch that
    comes ``first_s`` later.
    """
    cold = BatchTimes((first_s, *[0.0] * 23), (0.1,) * 24, 96, 0.0, 0.0)
    prepared = MagicMock(get=lambda kind: SimpleNamespace(**files))
    prepared.__len__.return_value = 96
    setting = Setting(prepared, 4, 1, "cpu")
    row = comparing._Row(fake("any"), setting, EmulatedStep(100), 4, 0, 1)
    row.opened_s = opened_s
    row.cold = cold
    row.times = [cold]
    return row.summarise()


def test_a_start_is_no_cost_of_an_image():
    # The run has 96 of 118,287 images, and its first batch comes after 1.5 s, which, scaled up,
    # were 31 minutes of the first epoch.
    row = summarise(opened_s=0.5, first_s=1.0, once_s=6.0, session_s=3.0)
    assert row.cold_ms_per_image == pytest.approx(100 / 4)
    assert row.first_batch_s == 1.5
    assert row.timeline[:2] == ((1.5, 1.6), (1.6, 1.7))
    assert row.once_ms_per_image == pytest.approx(6000 / 96)
    assert row.session_ms_per_image == pytest.approx(3000 / 96)


# These tests look at equality.


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        # The boxes are shifted.
        ("boxes", lambda boxes: boxes + 2, "a box"),
        # The objects get another class.
        ("labels", lambda labels: labels + 1, "labels"),
        # An object is lost.
        ("labels", lambda labels: labels[:-1], "labels"),
        # The masks are shifted.
        ("masks", lambda masks: masks.roll(3, -1), "a mask"),
    ],
)
def test_every_change_is_found(tiny_dataset, name, change, words):
    image, target = CocoFolder(tiny_dataset.images, tiny_dataset.annotations)[0]
    changed = target | {name: change(target[name])}
    assert words in describe_difference((image, changed), (image, target))
    damaged = image.clone()
    damaged[:, :10, :10] = 255 - image[:, :10, :10]
    assert "pixels" in describe_difference((damaged, target), (image, target))
