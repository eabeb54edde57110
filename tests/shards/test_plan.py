"""The plan: what it measures, what it picks and why, and what it says when nothing can be picked. Never seconds."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from colab_utils.drive import DriveLostError, DriveProfile
from colab_utils.errors import ColabUtilsError
from colab_utils.sample_data import make_dataset
from colab_utils.shards import plan
from colab_utils.shards import plan as trial
from colab_utils.shards import write as jobs
from colab_utils.shards.plan import plan_shards
from colab_utils.shards.write import write_shards

SMALL = {"min_size": 64, "max_size": 200}  # every image of the tiny dataset is larger
FAST_STEP_MS = 0.0001  # 40 million images/s
SPEED = DriveProfile("test", open_s=0.05, bytes_per_s=50e6, source="made up")


@pytest.fixture
def run(tiny_dataset, tmp_path):
    def call(**options):
        options = {"workers": 1, "profile": SPEED, "shards": tmp_path / "drive" / "shards", **options}
        return plan_shards(options.pop("images", tiny_dataset.images), tiny_dataset.annotations, **options)

    return call


@pytest.fixture
def disk(monkeypatch):
    """Set the free bytes of every disk."""

    def set_free(free):
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**15, 0, round(free)))

    return set_free


def by_name(found):
    return {option.name: option for option in found.options}


def test_where_nothing_is_larger_every_file_keeps_its_bytes(run, tmp_path):
    found = run()
    assert (found.picked.form, found.picked.name) == ("keep", "keep")
    assert "no image is larger" in found.reason
    sizes = by_name(found)
    assert sizes["keep"].bytes == sizes["shrink, JPEG 95"].bytes == sizes["shrink, JPEG 90"].bytes
    assert sizes["pixels"].bytes > 12 * 160 * 128 * 3
    assert not list(tmp_path.iterdir())  # nothing is written


def test_larger_images_are_shrunk_at_the_better_quality(run):
    found = run(**SMALL)
    assert (found.picked.form, found.picked.jpeg_quality) == ("shrink", 95)
    assert found.reason == "12 of 12 images are larger than training needs and are shrunk once"
    sizes = by_name(found)
    assert sizes["shrink, JPEG 90"].bytes < sizes["shrink, JPEG 95"].bytes < sizes["keep"].bytes
    assert all(
        min(option.write_cpu_ms, option.read_cpu_ms, option.make_s, option.copy_s) > 0 for option in found.options
    )
    assert {option.lacking for option in found.options} == {()}


@pytest.mark.parametrize("form", ["keep", "shrink", "pixels"])
def test_the_bytes_are_those_that_are_then_written(coco_mini, tmp_path, form):
    found = plan_shards(coco_mini.images, coco_mini.annotations, form=form, min_size=240, sample=20, workers=2).picked
    report = write_shards(
        coco_mini.images, coco_mini.annotations, shards=tmp_path / "shards", min_size=240, form=form,
        jpeg_quality=found.jpeg_quality, workers=2,
    )  # fmt: skip
    assert found.bytes == pytest.approx(report.bytes, rel=0.15)
    assert found.bytes_per_image == pytest.approx(found.bytes / report.images)


def test_totals_follow_the_sizes_that_the_annotations_give(tmp_path):
    """One image in ten is large, and few of them are in the sample."""
    sides = [1000 if i % 10 == 0 else 100 for i in range(40)]
    images = [{"id": i, "file_name": f"{i}.png", "width": side, "height": side} for i, side in enumerate(sides)]
    for i, side in enumerate(sides):
        Image.new("RGB", (side, side)).save(tmp_path / f"{i}.png")
    (tmp_path / "a.json").write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
    found = by_name(plan_shards(tmp_path, tmp_path / "a.json", min_size=5000, max_size=5000, sample=9, workers=1))
    assert found["pixels"].bytes == pytest.approx(3 * sum(side * side for side in sides), rel=0.05)


def test_sizes_that_the_annotations_lack_are_read_from_the_sample(dataset_without_sizes):
    found = plan_shards(*dataset_without_sizes, workers=1, **SMALL)
    assert found.reason == "12 of 12 images are larger than training needs and are shrunk once"
    assert by_name(found)["shrink, JPEG 95"].bytes < by_name(found)["keep"].bytes
    assert plan_shards(*dataset_without_sizes, workers=1).picked.form == "keep"


@pytest.fixture
def dataset_without_sizes(tiny_dataset, tmp_path):
    coco = json.loads(tiny_dataset.annotations.read_text())
    for image in coco["images"]:
        del image["width"], image["height"]
    (tmp_path / "a.json").write_text(json.dumps(coco))
    return tiny_dataset.images, tmp_path / "a.json"


# which one


def test_a_step_that_decoding_cannot_feed_takes_raw_pixels(run):
    found = run(step_ms=FAST_STEP_MS, **SMALL)
    assert found.picked.form == "pixels"
    assert found.reason.startswith("decoding feeds ")
    assert run(step_ms=1e5, **SMALL).picked.form == "shrink"


@pytest.mark.parametrize("lacking", ["RAM", "Drive"])
def test_raw_pixels_that_do_not_fit_are_not_taken(run, monkeypatch, disk, lacking):
    pixels, best = (by_name(run(**SMALL))[name].bytes for name in ("pixels", "shrink, JPEG 95"))
    if lacking == "RAM":
        monkeypatch.setattr(plan, "find_free_memory", lambda: pixels - 100)
    else:
        disk((pixels + best) / 2)
    found = run(step_ms=FAST_STEP_MS, **SMALL)
    assert (found.picked.form, found.picked.jpeg_quality) == ("shrink", 95)
    assert f"raw pixels do not fit ({lacking})" in found.reason
    assert by_name(found)["pixels"].lacking == (lacking,)
    if lacking == "RAM":  # which other storages do not need
        assert by_name(found)["keep"].lacking == ()


def test_the_lower_quality_only_where_the_better_does_not_fit(run, disk):
    sizes = by_name(run(**SMALL))
    disk((sizes["shrink, JPEG 95"].bytes + sizes["shrink, JPEG 90"].bytes) / 2)
    found = run(**SMALL)
    assert (found.picked.form, found.picked.jpeg_quality) == ("shrink", 90)
    assert "shrink, JPEG 95 needs" in found.reason
    assert "does not fit (Drive)" in found.reason


def test_files_as_they_are_where_shrinking_makes_them_larger(tmp_path, disk):
    """Photos of poor quality, hardly larger than training needs."""
    rng, images = np.random.default_rng(0), []
    for i in range(6):
        pixels = rng.integers(0, 255, (20, 20, 3), np.uint8)
        Image.fromarray(pixels).resize((200, 200)).save(tmp_path / f"{i}.jpg", quality=5)
        images.append({"id": i, "file_name": f"{i}.jpg", "width": 200, "height": 200})
    (tmp_path / "a.json").write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
    options = {"shards": tmp_path / "s", "workers": 1, "min_size": 190}
    sizes = by_name(plan_shards(tmp_path, tmp_path / "a.json", **options))
    disk((sizes["keep"].bytes + sizes["shrink, JPEG 90"].bytes) / 2)
    assert plan_shards(tmp_path, tmp_path / "a.json", **options).picked.form == "keep"


def test_the_copy_counts_twice_where_it_shares_a_disk_or_drive_keeps_one_too(run, tmp_path, disk):
    size = by_name(run())["keep"].bytes
    disk(1.5 * size)
    assert run().picked.lacking == ()  # nothing is known of a copy
    with pytest.raises(ColabUtilsError, match="on SSD"):
        run(local=tmp_path / "ssd")
    disk(2.1 * size)
    assert run(local=tmp_path / "ssd").picked.form == "keep"
    disk(1.5 * size)
    with pytest.raises(ColabUtilsError, match="on SSD"):  # Google Drive, whose cache lies on the local disk
        run(shards="/content/drive/MyDrive/shards", local="/dev/shm")
    assert run(shards=tmp_path / "s", local="/dev/shm").picked.form == "keep"  # two disks that are no Drive


def test_nothing_fits_is_one_line_with_the_numbers(run, disk):
    disk(1000)
    with pytest.raises(
        ColabUtilsError, match=r"expected room for \d+\.\d kB .*found room for 1\.0 kB on Drive"
    ) as error:
        run()
    assert "\n" not in str(error.value)
    assert "--min-size" in str(error.value)
    assert run(form="keep").picked.lacking == ("Drive",)  # who asks for a form gets it, and is told


def test_each_choice_can_be_overruled(run):
    found = run(form="pixels")
    assert (found.picked.form, found.reason) == ("pixels", "you asked for it")
    found = run(jpeg_quality=70, **SMALL)
    assert (found.picked.form, found.picked.jpeg_quality) == ("shrink", 70)
    assert [option.name for option in found.options] == ["keep", "shrink, JPEG 70", "pixels"]
    found = run(form="shrink")
    assert (found.picked.form, found.picked.jpeg_quality) == ("shrink", 95)


def test_shards_that_were_begun_are_continued(run, tiny_dataset, tmp_path):
    folder = tmp_path / "shards"
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=folder, form="pixels", jpeg_quality=80, workers=1
    )
    found = run(shards=folder)
    assert (found.picked.form, found.picked.jpeg_quality) == ("pixels", 80)
    assert "begun" in found.reason
    assert run(shards=folder, form="keep").picked.form == "keep"


# what it says


def test_the_text_is_the_table_and_one_line(run):
    found = run(local="/dev/shm", step_ms=100)
    lines = str(found).splitlines()
    assert lines[0].split()[:2] == ["stored", "as"]
    assert [line.split("  ")[0] for line in lines[1:5]] == ["keep", "shrink, JPEG 95", "shrink, JPEG 90", "pixels"]
    assert len({len(line) for line in lines[:5]}) == 1
    assert "12 of 12 images" in lines[-2]
    assert "40 images/s" in lines[-2]
    assert "test: 50 ms per file" in lines[-2]
    assert lines[-1] == found.sentence
    assert lines[-1].startswith("keep: no image is larger")
    assert "to make" in lines[-1]


def test_the_forms_of_masks(run):
    packed, rle, dense = run().masks
    assert rle.bytes_per_image < packed.bytes_per_image < dense.bytes_per_image
    assert packed.dense_cpu_ms < rle.dense_cpu_ms


def test_a_thousand_objects_and_none(tmp_path, monkeypatch):
    monkeypatch.setattr(trial, "MOST_OBJECTS", 2)
    made = make_dataset(tmp_path, n=4, width=160, height=128, objects=(6, 6), workers=1)
    coco = json.loads(made.annotations.read_text())
    count = sum(not row["iscrowd"] for row in coco["annotations"])
    dense = plan_shards(made.images, made.annotations, workers=1).masks[2]
    assert dense.bytes_per_image == count / 4 * 160 * 128
    made.annotations.write_text(json.dumps({**coco, "annotations": []}))
    assert [mask.bytes_per_image for mask in plan_shards(made.images, made.annotations, workers=1).masks] == [0, 0, 0]


def test_drives_speed_is_measured_where_no_profile_is_given(run):
    assert "Drive as measured: " in run(profile=None).setting
    assert "Drive typical: 59 ms per file, 65 MB/s." in run(profile="typical").setting
    with pytest.raises(ColabUtilsError, match="expected a Drive profile"):
        run(profile="warp")


def test_reads_as_a_profile():
    rate, open_s = 40e6, 0.06
    reads = [(size, open_s + size / rate) for size in (1e5, 1.5e5, 2e5)]
    found = plan._describe_reads([*reads, (4e8, 4e8 / rate)])  # the annotations file is large
    assert found.bytes_per_s == pytest.approx(rate)
    assert found.open_s == pytest.approx(open_s)


@pytest.mark.parametrize(
    ("count", "per_shard", "processes", "expected"),
    [
        (16, 16, 1, 16 + 16),  # one shard, and the 16 images that are looked at first
        (16, 16, 2, 16 + 16),  # a second process has nothing to do, so nothing slows the first
        (200, 100, 2, 16 + 100 * 1.5),  # both busy
        (300, 100, 2, 16 + 100 * 1.5 + 100),  # one of them writes the third alone
        (310, 100, 2, 16 + 200 * 1.5 - 90 * 0.5),  # a short one beside the third
        (210, 100, 2, 16 + 100 * 1.5 + 10),
        (4, 100, 2, 8),  # fewer images than are looked at first
    ],
)
def test_making_goes_in_rounds_of_one_shard_a_process(count, per_shard, processes, expected):
    found = plan._estimate_making(
        count,
        min(count, per_shard),
        processes,
        wait_s=0,
        work_s=1.5 if processes > 1 else 1,
        slowdown=1.5 if processes > 1 else 1,
    )
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("size", "shards", "seconds"),
    [
        (50e6, 1, 1.05),  # one file sets the time
        (5e9, 40, (40 * (2 * 0.05 + 2.5)) / 4 + 2.55 / 2),  # four at a time
    ],
)
def test_copying_takes_some_files_at_a_time(size, shards, seconds):
    assert plan._estimate_copying(size, shards, SPEED, math.inf) == pytest.approx(seconds)


# the sample


def test_the_sample_is_seeded_spread_and_cut_by_time(tiny_dataset, monkeypatch):
    dataset = plan.open_dataset(tiny_dataset.images, tiny_dataset.annotations)
    recipes = [{**SMALL, "form": form, "jpeg_quality": 95} for form in ("keep", "pixels")]

    def find(**options):
        options = {"sample": 6, "workers": 2, **options}
        return list(trial.try_storages(dataset, tiny_dataset.images, recipes, **options).images)

    found = find()
    assert len(found) == 6
    assert [i // 2 for i in sorted(found)] == [0, 1, 2, 3, 4, 5]  # one of every two
    assert found != sorted(found)
    assert find() == found
    assert sorted(find(sample=100)) == list(range(12))
    monkeypatch.setattr(trial, "TOGETHER_S", 0)
    monkeypatch.setattr(trial, "ALONE_S", 0)
    assert trial.FEWEST_IMAGES <= len(find(sample=12, workers=1)) < 12


def test_bad_images_are_passed_over(run, tiny_dataset, tmp_path):
    images = tmp_path / "images"
    shutil.copytree(tiny_dataset.images, images)
    bad = sorted(path for path in images.rglob("*") if path.is_file())[2:5]
    for path, content in zip(bad, (None, b"", b"hello"), strict=True):
        path.unlink() if content is None else path.write_bytes(content)
    found = run(images=images)
    assert (found.images, found.sampled_images) == (12, 9)


def test_no_image_that_can_be_read_is_named(run, tmp_path):
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ColabUtilsError, match=r"every one that was looked at bad, such as .*: the file is missing"):
        run(images=tmp_path / "wrong")


def test_a_lost_drive_is_no_bad_image(run, monkeypatch):
    def lose(path, *options):
        raise DriveLostError("expected to read it, found that Drive got disconnected")

    monkeypatch.setattr(jobs, "read_file", lose)
    with pytest.raises(DriveLostError, match="disconnected"):
        run(workers=2)


def test_a_process_ended_by_the_system(run, monkeypatch):
    parent, read = os.getpid(), jobs.read_file

    def die(path, *options):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(path, *options)

    monkeypatch.setattr(jobs, "read_file", die)
    with pytest.raises(ColabUtilsError, match="fewer workers"):
        run(workers=2)


@pytest.mark.parametrize(
    ("options", "found"),
    [
        *[({"step_ms": value}, "expected step_ms") for value in (0, -1, math.nan, math.inf, "fast")],
        *[({"jpeg_quality": value}, "expected jpeg_quality between 1 and 100") for value in (0, 101, -5, 90.5, "high")],
        *[({"batch_size": value}, "expected batch_size") for value in (0, -1, 1.5)],
        *[({"sample": value}, "expected sample") for value in (0, -1, 2.5)],
        *[({"workers": value}, "expected workers") for value in (0, 1.5, "many")],
        ({"shard_mb": 0}, "expected shard_mb"),
        ({"min_size": 0}, "expected min_size"),
        ({"form": "zip"}, "expected form"),
        ({"form": None}, "expected form"),
        ({"images": Path("no/such/folder")}, "expected an image folder"),
    ],
)
def test_bad_settings_are_named(run, options, found):
    with pytest.raises(ColabUtilsError, match=found):
        run(**options)


def test_a_folder_that_holds_something_else_or_cannot_be_looked_at(run, tmp_path, monkeypatch):
    (tmp_path / "unfinished.json").write_text("{}")
    with pytest.raises(ColabUtilsError, match="the mark of something else"):
        run(shards=tmp_path)

    def refuse(*_):
        raise OSError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(shutil, "disk_usage", refuse)
    with pytest.raises(ColabUtilsError, match="Permission denied"):
        run(shards=tmp_path / "new")
