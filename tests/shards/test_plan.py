"""The plan: what it measures, what it picks and why. Never seconds."""

from __future__ import annotations

import json
import os
import shutil
import signal

import pytest

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.shards import plan as module
from colab_utils.shards.images import read_image
from colab_utils.shards.plan import plan_shards
from colab_utils.shards.write import write_shards

SMALL = {"min_size": 64, "max_size": 200}  # every image of the tiny dataset is larger
FAST_STEP_MS = 0.0001  # 40 million images/s


@pytest.fixture
def run(tiny_dataset):
    def call(**options):
        return plan_shards(tiny_dataset.images, tiny_dataset.annotations, **{"workers": 1, **options})

    return call


def by_name(found):
    return {option.storage: option for option in found.options}


def test_where_nothing_is_larger_every_file_keeps_its_bytes(run):
    found = run()
    assert (found.picked.storage, found.images, found.sampled_images) == ("keep", 12, 12)
    assert "no image is larger" in found.reason
    sizes = by_name(found)
    assert sizes["keep"].bytes == sizes["shrink"].bytes
    assert sizes["pixels"].bytes > 12 * 160 * 128 * 3
    assert min(value for option in found.options for value in (option.write_s, option.load_cpu_ms)) > 0


def test_larger_images_are_shrunk(run):
    found = run(**SMALL)
    assert (found.picked.storage, found.reason) == (
        "shrink", "12 of 12 images are larger than training needs and are shrunk once",
    )  # fmt: skip
    sizes = by_name(found)
    assert sizes["shrink"].bytes < sizes["keep"].bytes


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("storage", ["keep", "shrink", "pixels"])
def test_planned_bytes_are_those_that_are_written(run, tiny_dataset, tmp_path, storage, workers):
    found = run(storage=storage, workers=workers, **SMALL)
    assert (found.picked.storage, found.reason) == (storage, "you asked for it")
    made = write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path / "shards", storage=storage, workers=1, **SMALL
    )
    assert found.picked.bytes == pytest.approx(made.bytes, rel=0.05)


def test_raw_pixels_where_decoding_is_slower_than_the_step(run, monkeypatch):
    assert run(step_ms=10_000).picked.storage == "keep"
    monkeypatch.setattr(module, "find_free_memory", lambda: 10**12)
    found = run(step_ms=FAST_STEP_MS)
    assert found.picked.storage == "pixels"
    assert "decoding reaches" in found.reason
    monkeypatch.setattr(module, "find_free_memory", lambda: 1)
    found = run(step_ms=FAST_STEP_MS)
    assert found.picked.storage == "keep"
    assert found.reason.endswith("and raw pixels do not fit")


def test_what_does_not_fit_on_the_disk(run, tmp_path, monkeypatch):
    size = run().picked.bytes
    monkeypatch.setattr(module, "find_free_space", lambda folder: size)
    assert {name: option.fits for name, option in by_name(run(shards=tmp_path / "shards")).items()} == {
        "keep": True, "shrink": True, "pixels": False,
    }  # fmt: skip


def test_the_words_of_a_plan(run):
    found = run()
    assert [option.storage for option in found.options] == ["keep", "shrink", "pixels"]
    assert str(found).startswith("keep: no image is larger than training needs")
    assert "measured on 12 of 12 images" in str(found)


def test_bad_images_are_left_out(tiny_dataset, tmp_path):
    shutil.copytree(tiny_dataset.images, tmp_path / "images")
    names = [image["file_name"] for image in json.loads(tiny_dataset.annotations.read_text())["images"]]
    (tmp_path / "images" / names[0]).write_bytes(b"hello")
    assert plan_shards(tmp_path / "images", tiny_dataset.annotations, workers=2).sampled_images == 11
    for name in names:
        (tmp_path / "images" / name).unlink()
    with pytest.raises(ColabUtilsError, match=r"every one that was looked at bad, such as .*: the file is missing"):
        plan_shards(tmp_path / "images", tiny_dataset.annotations, workers=1)


def test_a_lost_drive_and_an_ended_process(run, monkeypatch):
    parent = os.getpid()

    def lose(*_):
        raise DriveLostError("lost")

    def die(*arguments):
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return read_image(*arguments)

    monkeypatch.setattr(module, "read_image", lose)
    with pytest.raises(DriveLostError):
        run()
    monkeypatch.setattr(module, "read_image", die)
    with pytest.raises(ColabUtilsError, match="fewer workers"):
        run()


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ({"storage": "zip"}, "expected storage as one of"),
        ({"min_size": 0}, "expected min_size between"),
        ({"step_ms": 0}, "expected step_ms between"),
        ({"workers": 0}, "expected workers between"),
    ],
)
def test_mistakes_are_named(run, options, found):
    with pytest.raises(ColabUtilsError, match=found):
        run(**options)
