"""The plan of `write_shards`: what it measures, what it picks and why. Never seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal

import numpy as np
import pytest

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.shards import plan as module
from colab_utils.shards.estimate import plan_shards
from colab_utils.shards.records import try_sample
from colab_utils.shards.write import write_shards
from tests.snapshots import snapshot

# Every image of the tiny dataset is larger.
SMALL = {"min_size": 64, "max_size": 200}


@pytest.fixture
def run(tiny_dataset):
    def call(**options):
        return plan_shards(
            tiny_dataset.images, tiny_dataset.annotations, **{"workers": 1, **options}
        )

    return call


def test_where_nothing_is_larger_every_file_keeps_its_bytes(run):
    plan = run()
    assert (plan.storage, plan.images, plan.sampled_images) == ("keep", 12, 12)
    assert "no image is larger" in plan.reason
    assert plan.bytes == run(storage="shrink").bytes
    assert plan.write_s > 0


def test_larger_images_are_shrunk(run):
    plan = run(**SMALL)
    assert (plan.storage, plan.reason) == (
        "shrink",
        "12 of 12 images are larger than training needs and are shrunk once",
    )
    assert plan.bytes < run(storage="keep", **SMALL).bytes


@pytest.mark.parametrize(
    ("sides", "larger"),
    [((160, 128), 0), ((159, 128), 12), ((160, 127), 12)],
)
def test_what_counts_as_larger_is_what_is_shrunk(run, sides, larger):
    plan = run(min_size=sides[1], max_size=sides[0])
    assert (plan.storage, plan.reason.startswith(f"{larger} of 12")) == (
        "shrink" if larger else "keep",
        larger > 0,
    )


def test_an_image_without_a_size_counts_as_larger(tiny_dataset, tmp_path):
    coco = json.loads(tiny_dataset.annotations.read_text())
    del coco["images"][3]["width"], coco["images"][3]["height"]
    (tmp_path / "a.json").write_text(json.dumps(coco))
    plan = plan_shards(tiny_dataset.images, tmp_path / "a.json", workers=1)
    assert (plan.storage, plan.reason.split()[0]) == ("shrink", "1")


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("storage", ["keep", "shrink"])
def test_planned_bytes_are_those_that_are_written(run, tiny_dataset, tmp_path, storage, workers):
    plan = run(storage=storage, workers=workers, **SMALL)
    assert (plan.storage, plan.reason) == (storage, "you asked for it")
    made = write_shards(
        tiny_dataset.images,
        tiny_dataset.annotations,
        shards=tmp_path / "shards",
        storage=storage,
        workers=1,
        **SMALL,
    )
    assert plan.bytes == pytest.approx(made.bytes, rel=0.05)


def test_the_words_of_a_plan(run):
    text = str(run())
    assert text.startswith("keep: no image is larger than training needs")
    assert "measured on 12 of 12 images" in text


def test_bad_images_are_left_out(tiny_dataset, tmp_path):
    shutil.copytree(tiny_dataset.images, tmp_path / "images")
    names = [
        image["file_name"] for image in json.loads(tiny_dataset.annotations.read_text())["images"]
    ]
    (tmp_path / "images" / names[0]).write_bytes(b"hello")
    assert (
        plan_shards(tmp_path / "images", tiny_dataset.annotations, workers=2).sampled_images == 11
    )
    for name in names:
        (tmp_path / "images" / name).unlink()
    with pytest.raises(
        ColabUtilsError, match=r"No image that was tried .* the first is .*: the file is missing"
    ):
        plan_shards(tmp_path / "images", tiny_dataset.annotations, workers=1)


def test_a_lost_drive_and_an_ended_process(run, monkeypatch):
    parent = os.getpid()

    def lose(*_):
        raise DriveLostError("lost")

    def die(*arguments):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return try_sample(*arguments)

    monkeypatch.setattr(module, "read_image", lose)
    with pytest.raises(DriveLostError):
        run()
    monkeypatch.undo()
    monkeypatch.setattr(module, "try_sample", die)
    with pytest.raises(ColabUtilsError, match="fewer workers"):
        run()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"storage": "zip"}, "storage must be one of"),
        ({"min_size": 0}, "expected min_size of 1 or more"),
        ({"workers": 0}, "expected workers of 1 or more"),
    ],
)
def test_mistakes_are_named(run, options, message):
    with pytest.raises(ColabUtilsError, match=message):
        run(**options)


@pytest.mark.parametrize("same", [4.0, np.float32(4), np.int64(4)])
def test_a_whole_number_of_any_type_gives_the_same_bytes(tiny_dataset, tmp_path, same):
    for name, shard_mb in (("one", 4), ("other", same)):
        write_shards(
            tiny_dataset.images,
            tiny_dataset.annotations,
            shards=tmp_path / name,
            shard_mb=shard_mb,
            min_size=type(shard_mb)(24),
            workers=1,
        )
    assert snapshot(tmp_path / "one") == snapshot(tmp_path / "other")
