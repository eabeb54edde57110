"""Writing shards: what is in them, and what is left when it is interrupted, refused or cut
short.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import threading
import time
import traceback
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from PIL import Image

from colab_utils import files, running
from colab_utils.data.checks import check_dataset
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.machine import find_host
from colab_utils.shards import jobs, write
from colab_utils.shards.folder_state import inspect_folder
from colab_utils.shards.index import read_index, write_index
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from tests.bad_reads import BadReads, cut
from tests.snapshots import snapshot

# A shard holds a few images of the tiny dataset.
SHARD_MB = 0.03


@pytest.fixture(scope="module")
def undisturbed(tiny_dataset, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "shards"
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=folder, shard_mb=SHARD_MB, workers=1
    )
    return folder


def run(dataset, folder, **options: Any):
    return write_shards(*dataset, shards=folder, **{"shard_mb": SHARD_MB, "workers": 1, **options})


def test_reading_goes_on_while_a_shard_is_written(dataset, folder, undisturbed, monkeypatch):
    """Else a slow Drive would wait at the end of each shard."""
    real = jobs.read_image, files.write_file
    read = set()
    are_read = threading.Event()

    def read_image(store, dataset, i, **options):
        content = real[0](store, dataset, i, **options)
        read.add(dataset.file_name(i))
        if len(read) == 12:
            are_read.set()
        return content

    def write_file(path, *parts):
        assert path.suffix not in (".tar", ".arrays") or are_read.wait(60)
        real[1](path, *parts)

    monkeypatch.setattr(jobs, "read_image", read_image)
    monkeypatch.setattr(files, "write_file", write_file)
    run(dataset, folder, streams=2)
    assert snapshot(folder) == snapshot(undisturbed)


def names(annotations) -> list[str]:
    return [image["file_name"] for image in json.loads(annotations.read_text())["images"]]


def change(path, **sections):
    path.write_text(json.dumps({**json.loads(path.read_text()), **sections}))


def test_crowds_are_counted_and_said(tiny_dataset, folder, tmp_path):
    coco = json.loads(tiny_dataset.annotations.read_text())
    for number, annotation in enumerate(coco["annotations"]):
        annotation["iscrowd"] = int(number < 3)
    annotations = tmp_path / "crowds.json"
    annotations.write_text(json.dumps(coco))
    report = run((tiny_dataset.images, annotations), folder, workers=1)
    assert (report.crowds, report.annotations) == (3, len(coco["annotations"]))
    assert f"3 of {report.annotations} objects are crowds and left out of training" in str(report)
    dataset = ShardDataset(folder)
    assert dataset.left_out == 3
    assert dataset.objects == sum(
        len(dataset.describe([index])["labels"]) for index in range(len(dataset))
    )


@pytest.mark.filterwarnings("ignore::DeprecationWarning:webdataset", "ignore::ResourceWarning")
def test_webdataset_reads_real_coco_as_it_is(coco_mini, folder):
    webdataset = pytest.importorskip("webdataset")
    report = write_shards(
        coco_mini.images, coco_mini.annotations, shards=folder, shard_mb=4, workers=2
    )
    assert report.shards > 2
    tars = sorted(str(path) for path in folder.glob("*.tar"))
    samples = list(webdataset.WebDataset(tars, shardshuffle=False))
    coco = json.loads(coco_mini.annotations.read_text())
    assert len(samples) == len(coco["images"]) == report.images
    images = {image["id"]: image for image in coco["images"]}
    for sample in samples:
        record = json.loads(sample["json"])
        image = images.pop(record["image_id"])
        assert sample["__key__"] == f"{image['id']:012d}"
        # Not a bit is changed.
        assert sample["jpg"] == (coco_mini.images / image["file_name"]).read_bytes()
        assert record["image_id"] == image["id"]
        for key in ("file_name", "width", "height"):
            assert record[key] == image[key]
        rows = [row for row in coco["annotations"] if row["image_id"] == image["id"]]
        for annotation, row in zip(record["annotations"], rows, strict=True):
            for key in ("id", "bbox", "category_id", "iscrowd", "area"):
                assert annotation[key] == row[key]
    decoded = next(iter(webdataset.WebDataset(tars[:1], shardshuffle=False).decode("pil")))
    assert decoded["jpg"].mode == "RGB"
    assert decoded["json"]["annotations"]
    # Nothing may be left to collect once the warning of an open shard of webdataset counts again.
    gc.collect()


def test_any_worker_count_writes_the_same_bytes(tiny_dataset, undisturbed, tmp_path):
    expected = snapshot(undisturbed)
    assert len(expected) > 7
    assert verify_shards(undisturbed).bad == ()
    report = run((tiny_dataset.images, tiny_dataset.annotations), tmp_path / "shards", workers=20)
    assert snapshot(tmp_path / "shards") == expected
    assert report.images == 12


def test_a_finished_folder_is_left_as_it_is(tiny_dataset, undisturbed, folder):
    shutil.copytree(undisturbed, folder)
    times = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    report = run(
        (tiny_dataset.images, tiny_dataset.annotations), folder, shard_mb=SHARD_MB, workers=2
    )
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == times
    assert (report.images, report.shards) == (12, len(read_index(folder).shards))


SLOW_RUN = """
import sys, time
from colab_utils import files as module
from colab_utils.shards import write
read = module.read_whole
def read_slowly(path, **options):
    time.sleep(0.15)
    return read(path, **options)
if __name__ == "__main__":
    module.read_whole = read_slowly
    images, annotations, shards, shard_mb, workers = sys.argv[1:]
    options = {"shards": shards, "shard_mb": float(shard_mb), "workers": int(workers)}
    try:
        write.write_shards(images, annotations, **options)
    except KeyboardInterrupt:
        sys.exit(130)
"""


def start_slow_run(data, folder, workers, tmp_path):
    """A run in a process group of its own, once it has finished its first shard."""
    script = tmp_path / "slow_run.py"
    script.write_text(SLOW_RUN)
    command = [
        sys.executable,
        str(script),
        *map(str, data),
        str(folder),
        str(SHARD_MB),
        str(workers),
    ]
    process = subprocess.Popen(command, start_new_session=True, stderr=subprocess.PIPE)
    while not list(folder.glob("shard-*.tar")):
        assert process.poll() is None
        time.sleep(0.01)
    return process


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_the_same_call_ends_byte_identical(
    tiny_dataset, undisturbed, folder, tmp_path, workers
):
    data = tiny_dataset.images, tiny_dataset.annotations
    process = start_slow_run(data, folder, workers, tmp_path)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    # One worker is a thread.
    assert len(children) == (0 if workers == 1 else workers)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    left = snapshot(folder)
    expected = snapshot(undisturbed)
    assert "index.json" not in left
    # The arrays of each finished shard were written before its tar.
    finished = {name for name in left if name.endswith(".tar")}
    assert finished
    assert len(finished) < sum(name.endswith(".tar") for name in expected)
    # A kill in the middle of a write leaves this.
    (folder / f".shard-000009.tar.{find_host()}-{process.pid}-1.part").write_bytes(b"half")
    times = {name: (folder / name).stat().st_mtime_ns for name in finished}
    run(data, folder, workers=3 - workers)
    assert snapshot(folder) == expected
    # The run was continued, not begun again.
    assert {name: (folder / name).stat().st_mtime_ns for name in finished} == times


def test_a_full_disk_leaves_finished_shards_and_continues(
    tiny_dataset, undisturbed, folder, monkeypatch
):
    """The third shard does not fit, and the first two are there when it is written."""
    data = (tiny_dataset.images, tiny_dataset.annotations)
    fsync = os.fsync

    def fill(descriptor):
        if "shard-000002" in os.readlink(f"/proc/self/fd/{descriptor}"):
            while not all((folder / f"shard-00000{number}.arrays").exists() for number in range(2)):
                time.sleep(0.01)
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fill)
        with pytest.raises(ColabUtilsError, match="failed: No space left"):
            run(data, folder, workers=2)
    expected = snapshot(undisturbed)
    left = snapshot(folder)
    assert not [name for name in left if name.startswith((".", "index", "shard-000002"))]
    assert {"shard-000000.tar", "shard-000001.arrays"} <= set(left)
    assert all(expected[name] == content for name, content in left.items())
    run(data, folder)
    assert snapshot(folder) == expected


# The next try would come only after an hour.
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_while_drive_is_waited_for_is_not_kept_waiting(
    tiny_dataset, folder, monkeypatch, workers
):
    real = jobs.read_image

    def fail(images, dataset, i, *, retries=None, cache=None):
        return retries.run(lose) if retries else real(images, dataset, i)

    def lose():
        raise DriveLostError("lost")

    def interrupt(pending):
        time.sleep(1)
        raise KeyboardInterrupt

    monkeypatch.setattr(jobs, "read_image", fail)
    monkeypatch.setattr(running, "pop_done", interrupt)
    monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", (3600.0,))
    with pytest.raises(KeyboardInterrupt):
        run((tiny_dataset.images, tiny_dataset.annotations), folder, workers=workers)


def test_too_little_space_is_told_before_the_first_byte(tiny_dataset, folder, monkeypatch):
    monkeypatch.setattr("colab_utils.machine.find_free_space", lambda folder: 1000)
    with pytest.raises(ColabUtilsError, match=r"of free disk, and 1\.0 kB are free.*--min-size"):
        run((tiny_dataset.images, tiny_dataset.annotations), folder)
    assert not folder.exists()


def test_a_worker_ended_by_the_system(tiny_dataset, undisturbed, folder, monkeypatch):
    data = (tiny_dataset.images, tiny_dataset.annotations)
    parent = os.getpid()
    read = files.read_whole
    last = names(tiny_dataset.annotations)[-1]

    def die(path, **options):
        if os.getpid() != parent and path.name == last:
            os.kill(os.getpid(), signal.SIGKILL)
        return read(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_whole", die)
        with pytest.raises(ColabUtilsError, match="fewer workers"):
            run(data, folder, workers=2)
    assert not list(folder.glob(".*"))
    assert not (folder / "index.json").exists()
    run(data, folder, workers=2)
    assert snapshot(folder) == snapshot(undisturbed)


BAD_FILES = [
    (lambda path: path.unlink(), "the file is missing"),
    (lambda path: (path.unlink(), path.mkdir()), "the file is missing"),
    (lambda path: path.write_bytes(b""), "not an image"),
    (lambda path: path.write_bytes(b"hello"), "not an image"),
    (
        lambda path: path.write_bytes(path.read_bytes()[:-40]),
        "not a complete image",
    ),
    (
        lambda path: Image.new("RGB", (5, 5)).save(path),
        "the annotations say 160 x 128 pixels, the file has 5 x 5",
    ),
]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    BAD_FILES,
    ids=[reason for _, reason in BAD_FILES],
)
def test_one_bad_image_is_named_counted_and_skipped(dataset, folder, spoil, reason):
    bad = names(dataset[1])[7]
    spoil(dataset[0] / bad)
    report = run(dataset, folder, max_bad=0.1)
    assert (report.images, [image.file_name for image in report.skipped]) == (11, [bad])
    assert reason in report.skipped[0].reason
    assert "1 bad image skipped" in str(report)
    assert read_index(folder).skipped == report.skipped
    assert verify_shards(folder).images == 11
    # The same call reports the skipped image again.
    assert run(dataset, folder, max_bad=0.1).skipped == report.skipped


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"segmentation": []}, "the annotation has no mask: polygons or RLE"),
        ({"segmentation": [[1, 2, 3, 4]]}, "one of 4 numbers"),
        (
            {"segmentation": {"size": [4, 4], "counts": [16]}},
            "expected RLE of the image's size [128, 160]",
        ),
        ({"segmentation": {"size": [128, 160], "counts": "zz"}}, "the RLE is damaged"),
        ({"bbox": [float("nan"), 1, 2, 3]}, "finite numbers"),
    ],
)
def test_a_bad_annotation_is_named(dataset, folder, changes, reason):
    rows = json.loads(dataset[1].read_text())["annotations"]
    rows[5].update(changes)
    change(dataset[1], annotations=rows)
    (skipped,) = run(dataset, folder, max_bad=0.1).skipped
    assert reason in skipped.reason
    assert f"annotation {rows[5]['id']}" in skipped.reason


def test_a_shard_holds_fewer_images_where_masks_are_large(tmp_path, folder):
    """150 masks of 12 megapixels are 225 MB an image, beside a JPEG of some KB: a shard of many
    took gigabytes.
    """
    images = []
    annotations = []
    (tmp_path / "images").mkdir()
    for i in range(3):
        Image.new("RGB", (800, 600)).save(tmp_path / "images" / f"{i}.jpg")
        images.append({"id": i, "file_name": f"{i}.jpg", "width": 800, "height": 600})
        box = {
            "bbox": [0, 0, 800, 600],
            "area": 480_000,
            "segmentation": [[0, 0, 800, 0, 800, 600, 0, 600]],
        }
        annotations += [
            {"id": 20 * i + j, "image_id": i, "category_id": 1, "iscrowd": 0, **box}
            for j in range(20)
        ]
    coco = {"images": images, "annotations": annotations, "categories": [{"id": 1, "name": "a"}]}
    (tmp_path / "a.json").write_text(json.dumps(coco))
    assert (
        run((tmp_path / "images", tmp_path / "a.json"), folder, shard_mb=1.3, storage="keep").shards
        == 3
    )


def test_a_locked_file_is_one_bad_image(dataset, folder, monkeypatch):
    bad = names(dataset[1])[3]
    read = files.read_whole

    def lock(path, **options):
        if path.name == bad:
            raise PermissionError(errno.EACCES, "Permission denied")
        return read(path, **options)

    monkeypatch.setattr(files, "read_whole", lock)
    assert (
        run(dataset, folder, max_bad=0.1).skipped[0].reason
        == "the file cannot be read: Permission denied"
    )


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_an_image_that_a_full_disk_does_not_give_is_no_bad_image(
    dataset, folder, monkeypatch, number
):
    images, annotations = dataset
    refused = names(annotations)[9]
    read = files.read_whole

    def read_or_refuse(path, **options):
        if path.name == refused:
            raise OSError(number, os.strerror(number))
        return read(path, **options)

    monkeypatch.setattr(files, "read_whole", read_or_refuse)
    with pytest.raises(UnavailableError, match=r"images: the file cannot be read: .* Free some"):
        write_shards(images, annotations, shards=folder, workers=1)


@pytest.mark.parametrize("workers", [1, 2])
# Image 0 is met while the first images are measured.
@pytest.mark.parametrize("place", [0, 9])
def test_a_lost_drive_stops_and_is_no_bad_image(dataset, folder, monkeypatch, workers, place):
    lost = names(dataset[1])[place]
    read = files.read_whole

    def lose(path, **options):
        callers = [frame.filename for frame in traceback.extract_stack()]
        measures = not any(caller.endswith("jobs.py") for caller in callers)
        if path.name == lost and measures == (place == 0):
            raise DriveLostError("It cannot be read: Drive got disconnected.")
        return read(path, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "read_whole", lose)
        with pytest.raises(DriveLostError, match="disconnected"):
            run(dataset, folder, workers=workers, max_bad=1.0)
    assert not (folder / "index.json").exists()
    assert run(dataset, folder, workers=workers).skipped == ()


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    """100 tiny pictures."""
    folder = tmp_path_factory.mktemp("hundred")
    images = [{"id": i, "file_name": f"{i}.png", "width": 16, "height": 16} for i in range(100)]
    for i in range(100):
        Image.new("L", (16, 16), i).save(folder / f"{i}.png")
    (folder / "a.json").write_text(
        json.dumps({"images": images, "annotations": [], "categories": []})
    )
    return folder


@pytest.mark.parametrize(
    ("bad", "max_bad", "stops", "workers"),
    [
        # This is just 1 %.
        (1, 0.01, False, 1),
        (2, 0.01, True, 2),
        # In floating point, 0.29 x 100 is 28.999999999999996.
        (29, 0.29, False, 1),
        (1, 0, True, 1),
        # A whole number is a number of images.
        (2, 2, False, 1),
        (3, 2, True, 1),
    ],
)
def test_more_than_max_bad_stops(hundred, folder, tmp_path, bad, max_bad, stops, workers):
    images = tmp_path / "images"
    shutil.copytree(hundred, images)
    for i in range(50, 50 + bad):
        (images / f"{i}.png").write_bytes(b"")
    data = images, hundred / "a.json"
    if not stops:
        assert len(run(data, folder, max_bad=max_bad, workers=workers).skipped) == bad
        return
    allowed = max_bad if isinstance(max_bad, int) else int(max_bad * 101)
    with pytest.raises(
        ColabUtilsError, match=rf"Bad images so far: \d+, and at most {allowed} of"
    ) as error:
        run(data, folder, max_bad=max_bad, workers=workers)
    assert ".png: not an image" in str(error.value)
    assert not (folder / "index.json").exists()
    # Once the images are repaired, the same call goes through.
    for i in range(50, 50 + bad):
        shutil.copy(hundred / f"{i}.png", images)
    assert run(data, folder, max_bad=max_bad, workers=workers).skipped == ()
    run((hundred, hundred / "a.json"), tmp_path / "good")
    assert snapshot(folder) == snapshot(tmp_path / "good")


@pytest.mark.parametrize("max_bad", [0.01, 1.0])
def test_the_wrong_image_folder_leaves_nothing(
    tiny_dataset, undisturbed, folder, tmp_path, max_bad
):
    """A first try with another folder must not decide how many images a shard gets."""
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ColabUtilsError, match=r"No image that was tried .*the file is missing"):
        run((tmp_path / "wrong", tiny_dataset.annotations), folder, max_bad=max_bad)
    assert not folder.exists()
    run((tiny_dataset.images, tiny_dataset.annotations), folder)
    assert snapshot(folder) == snapshot(undisturbed)


def keep_first_shard(folder):
    """Leave what a copy of the first shard leaves."""
    index = read_index(folder)
    for shard in index.shards[1:]:
        for name, _, _ in shard.files():
            (folder / name).unlink()
    write_index(folder, replace(index, shards=index.shards[:1], partial=True))


def test_no_index_names_shards_that_are_not_there_yet(
    tiny_dataset, undisturbed, folder, monkeypatch
):
    shutil.copytree(undisturbed, folder)
    keep_first_shard(folder)

    def stop(*_):
        raise ColabUtilsError("stopped")

    monkeypatch.setattr(write, "write_all", stop)
    with pytest.raises(ColabUtilsError, match="stopped"):
        run((tiny_dataset.images, tiny_dataset.annotations), folder)
    assert not list(folder.glob("*index.json"))


def swap_arrays(folder):
    first = (folder / "shard-000000.arrays").read_bytes()
    (folder / "shard-000000.arrays").write_bytes((folder / "shard-000001.arrays").read_bytes())
    (folder / "shard-000001.arrays").write_bytes(first)


def rename_shard(folder):
    for ending in ("tar", "arrays"):
        shutil.copy(folder / f"shard-000001.{ending}", folder / f"shard-000000.{ending}")


def change_byte(folder, find_place):
    path = folder / "shard-000000.arrays"
    content = bytearray(path.read_bytes())
    content[find_place(content)] ^= 1
    path.write_bytes(content)


def lose_index(folder, damage):
    """Damage a folder that is not finished."""
    (folder / "index.json").unlink()
    damage(folder)


DAMAGES = {
    "a lost tar": lambda folder: (folder / "shard-000001.tar").unlink(),
    "lost arrays": lambda folder: (folder / "shard-000001.arrays").unlink(),
    "a cut tar": lambda folder: os.truncate(folder / "shard-000001.tar", 2000),
    "cut arrays": lambda folder: os.truncate(folder / "shard-000001.arrays", 2000),
    "a partial copy": keep_first_shard,
    "swapped arrays, no index": partial(lose_index, damage=swap_arrays),
    "a renamed shard, no index": partial(lose_index, damage=rename_shard),
    "another bit of a mask, no index": partial(
        lose_index, damage=partial(change_byte, find_place=lambda content: len(content) - 3)
    ),
    "another number in a head, no index": partial(
        lose_index,
        damage=partial(
            change_byte, find_place=lambda content: content.index(b'"annotations": ') + 15
        ),
    ),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_the_same_call_makes_damaged_shards_again(tiny_dataset, undisturbed, folder, damage):
    shutil.copytree(undisturbed, folder)
    damage(folder)
    assert run((tiny_dataset.images, tiny_dataset.annotations), folder).images == 12
    assert snapshot(folder) == snapshot(undisturbed)


def test_other_data_in_the_folder_stays(tiny_dataset, dataset, undisturbed, tmp_path):
    """Each is refused in one line, and nothing changes."""
    folders = {}

    def make(name):
        folders[name] = tmp_path / name
        return Path(shutil.copytree(undisturbed, folders[name]))

    make("other settings")
    newer = make("newer")
    raw = json.loads((newer / "index.json").read_text())
    (newer / "index.json").write_text(json.dumps({**raw, "format_version": 3}))
    bare = make("no index")
    for path in [bare / "index.json", *bare.glob("*.arrays")]:
        path.unlink()
    (make("somebody's index") / "index.json").write_text('{"hello": 1}')
    (make("another dataset without an index") / "index.json").unlink()
    make("another dataset")
    expected = {
        "other settings": "made with other settings",
        "newer": "the format version 3",
        "no index": "shards without an index",
        "somebody's index": "is not an index of colab_utils",
        "another dataset": "another dataset",
        "another dataset without an index": "another dataset",
    }
    for name, folder in folders.items():
        before = snapshot(folder)
        if name.startswith("another dataset"):
            change(dataset[1], info={"year": 1999})
        options = {"min_size": 700} if name == "other settings" else {}
        data = (
            dataset
            if name.startswith("another dataset")
            else (tiny_dataset.images, tiny_dataset.annotations)
        )
        with pytest.raises(ColabUtilsError, match=expected[name]) as error:
            run(data, folder, **options)
        assert str(folder) in str(error.value)
        assert "\n" not in str(error.value)
        assert snapshot(folder) == before


def test_files_of_the_user_in_the_folder_stay(tiny_dataset, folder):
    folder.mkdir()
    (folder / "notes.txt").write_text("mine")
    (folder / ".shard-1.part").write_text("mine too")
    run((tiny_dataset.images, tiny_dataset.annotations), folder)
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / ".shard-1.part").read_text() == "mine too"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            lambda c: {"annotations": [{**c["annotations"][0], "image_id": 10**9}]},
            "of an unknown image",
        ),
        (lambda c: {"images": []}, "The list of images in .* is empty"),
    ],
)
def test_references_that_cannot_be_skipped_stop_at_once(dataset, folder, changes, message):
    coco = json.loads(dataset[1].read_text())
    change(dataset[1], **{"annotations": [], **changes(coco)})
    with pytest.raises(ColabUtilsError, match=message) as error:
        run(dataset, folder)
    assert str(dataset[1]) in str(error.value)
    assert not folder.exists()


def test_missing_input_and_unwritable_output(dataset, folder, tmp_path):
    with pytest.raises(ColabUtilsError, match="There is no image folder"):
        run((tmp_path / "no", dataset[1]), folder)
    with pytest.raises(ColabUtilsError, match=r"The annotations .* cannot be read"):
        run((dataset[0], tmp_path / "no.json"), folder)
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        # The target is a file and no folder.
        run(dataset, dataset[1])
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        run(dataset, Path("/proc/shards"))


@pytest.mark.parametrize(
    "options",
    [
        {"shard_mb": float("nan")},
        {"workers": 0},
        {"max_bad": 1.5},
        {"storage": ["shrink"]},
    ],
)
def test_settings_out_of_range_are_refused(tiny_dataset, folder, options):
    name = next(iter(options))
    words = f"expected {name} (between|of|as)|storage must be one of keep, shrink"
    with pytest.raises(ColabUtilsError, match=words):
        run((tiny_dataset.images, tiny_dataset.annotations), folder, **options)
    assert not folder.exists()


def test_numbers_of_numpy_are_numbers(tiny_dataset, folder):
    numbers = {
        "min_size": np.int64(800),
        "shard_mb": np.float32(0.5),
        "max_bad": np.float64(0.1),
    }
    run(
        (tiny_dataset.images, tiny_dataset.annotations),
        folder,
        workers=np.int64(1),
        **numbers,
    )
    recipe = read_index(folder).recipe
    assert (recipe["min_size"], recipe["shard_mb"]) == (800, 0.5)


def test_same_file_twice_sub_folders_and_unicode(dataset, folder):
    images, annotations = dataset
    coco = json.loads(annotations.read_text())
    (images / "日本 sub").mkdir()
    first = coco["images"][0]["file_name"]
    (images / first).rename(images / "日本 sub" / "ä.jpg")
    coco["images"][0]["file_name"] = "日本 sub/ä.jpg"
    coco["images"].append({**coco["images"][0], "id": 10**12 + 5})
    coco["images"].append({**coco["images"][0], "id": -5})
    del coco["images"][1]["width"], coco["images"][1]["height"]
    annotations.write_text(json.dumps(coco, ensure_ascii=False), encoding="utf-8-sig")
    with pytest.warns(match="several entries of '日本 sub/ä.jpg' with different objects"):
        assert run(dataset, folder).images == 14
    seen = {}
    for name, data in read_members(folder).items():
        if name.endswith(".json"):
            record = json.loads(data)
            seen[record["image_id"]] = record
    assert len(seen) == 14
    assert seen[10**12 + 5]["file_name"] == seen[-5]["file_name"] == "日本 sub/ä.jpg"
    record = seen[coco["images"][1]["id"]]
    assert (record["width"], record["height"]) == (160, 128)


def read_members(folder):
    """{member: bytes} of all tars."""
    result = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            result |= {member.name: tar.extractfile(member).read() for member in tar}
    return result


def test_the_storage_decides_what_larger_images_become(tiny_dataset, tmp_path):
    data = (tiny_dataset.images, tiny_dataset.annotations)
    sizes = {}
    for name in ("shrink", "keep"):
        report = run(data, tmp_path / name, min_size=64, shard_mb=1, storage=name)
        sizes[name] = report.bytes
        assert report.storage == inspect_folder(tmp_path / name).recipe["storage"] == name
    assert sizes["shrink"] < sizes["keep"]
    originals = {path.read_bytes() for path in tiny_dataset.images.rglob("*") if path.is_file()}
    kept = read_members(tmp_path / "keep")
    assert {data for name, data in kept.items() if not name.endswith(".json")} == originals


def test_the_recipe_of_a_folder(dataset, folder, tmp_path, monkeypatch):
    assert inspect_folder(folder).recipe == {}
    # The path is a file and no folder.
    assert inspect_folder(dataset[1]).recipe == {}
    with monkeypatch.context() as patch:
        patch.setattr(
            write, "write_index", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOSPC, "full"))
        )
        with pytest.raises(ColabUtilsError, match="failed: full"):
            run(dataset, folder, storage="keep")
    assert not (folder / "index.json").exists()
    # The recipe belongs to a run that is not finished.
    assert inspect_folder(folder).recipe["storage"] == "keep"
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "index.json").write_text("{}")
    with pytest.raises(ColabUtilsError, match="is not an index of colab_utils"):
        inspect_folder(tmp_path / "other")


def test_an_image_that_was_read_badly_is_read_again(tiny_dataset, undisturbed, folder, monkeypatch):
    files = (tiny_dataset.images, tiny_dataset.annotations)
    reads = BadReads(monkeypatch, next(tiny_dataset.images.iterdir()).suffix, cut, 1000)
    # Nothing is known of the image, so it cannot be skipped.
    with pytest.raises(DriveLostError, match=r"bytes of .* came"):
        run(files, folder)
    assert not folder.exists()
    # The bad reads end while images are tried, in this process.
    reads.times = 4
    report = run(files, folder)
    assert report.skipped == ()
    assert reads.times == 0
    assert snapshot(folder) == snapshot(undisturbed)


@pytest.mark.parametrize("times", [1, 4])
def test_arrays_that_were_read_badly_are_no_strange_folder(
    tiny_dataset, undisturbed, folder, monkeypatch, times
):
    shutil.copytree(undisturbed, folder)
    (folder / "index.json").unlink()
    reads = BadReads(monkeypatch, ".arrays", cut, times)
    assert inspect_folder(folder).recipe == read_index(undisturbed).recipe
    assert reads.times == 0


def test_a_refused_writer_changes_nothing(tiny_dataset, undisturbed, folder):
    """The finished folder lost a file: the index goes only once the lock is held."""
    shutil.copytree(undisturbed, folder)
    (folder / "shard-000001.tar").unlink()
    with hold_folder(folder):
        before = snapshot(folder)
        with pytest.raises(
            ColabUtilsError,
            match=rf"Another writer is at work in .* \('process {os.getpid()} on ",
        ):
            run((tiny_dataset.images, tiny_dataset.annotations), folder)
        assert snapshot(folder) == before
    run((tiny_dataset.images, tiny_dataset.annotations), folder)
    assert snapshot(folder) == snapshot(undisturbed)


def test_no_warning_stops_preprocess(tiny_dataset, tmp_path):
    """As under ``python -W error``: pycocotools 2.0.11 gives numpy 2 a DeprecationWarning where it
    decodes.
    """
    coco = json.loads(tiny_dataset.annotations.read_text())
    # The runs include empty ones, for which the mask is encoded anew.
    runs = [0, 128 * 80, 0, 0, 128 * 80]
    coco["annotations"][0].update(
        segmentation={"size": [128, 160], "counts": runs}, bbox=[0, 0, 80, 128]
    )
    (tmp_path / "a.json").write_text(json.dumps(coco))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = run((tiny_dataset.images, tmp_path / "a.json"), tmp_path / "shards", min_size=64)
    assert report.skipped == ()


def spoil_box(box):
    """A fault that is one of the box alone."""

    def spoil(annotation, width, height):
        annotation["bbox"] = box

    return spoil


def spoil_units(annotation, width, height):
    annotation["segmentation"] = [
        [number / (height if place % 2 else width) for place, number in enumerate(polygon)]
        for polygon in annotation["segmentation"]
    ]
    x, y, w, h = annotation["bbox"]
    annotation["bbox"] = [x / width, y / height, w / width, h / height]


def spoil_mask(annotation, width, height):
    annotation["segmentation"] = {"size": [height, width], "counts": [height * width]}


def spoil_corners(annotation, width, height):
    annotation["segmentation"] = [[40, 30, 60, 30, 60, 45, 40, 45]]
    annotation["bbox"] = [40, 30, 60, 45]


# Each kind that check calls serious for training, by what makes it.
FAULTS = {
    "normalised polygon": spoil_units,
    "empty mask": spoil_mask,
    "box of corners": spoil_corners,
    "mask and box disagree": spoil_box([0, 0, 4, 4]),
    "inverted box": spoil_box([50, 40, -20, -10]),
    "box outside the image": spoil_box([5000, 5000, 20, 10]),
}


def spoil_objects(data, path, kind, count):
    """Annotations in which the first objects have a fault; they are no crowds."""
    coco = json.loads(data.annotations.read_text())
    sizes = {image["id"]: (image["width"], image["height"]) for image in coco["images"]}
    objects = [
        annotation
        for annotation in coco["annotations"]
        if not annotation["iscrowd"] and isinstance(annotation["segmentation"], list)
    ]
    for annotation in objects[:count]:
        FAULTS[kind](annotation, *sizes[annotation["image_id"]])
    path.write_text(json.dumps(coco))
    return sum(not annotation["iscrowd"] for annotation in coco["annotations"])


@pytest.mark.parametrize("kind", FAULTS)
def test_objects_that_check_calls_serious_are_counted_and_said(
    tiny_dataset, folder, tmp_path, kind
):
    annotations = tmp_path / "a.json"
    spoil_objects(tiny_dataset, annotations, kind, 2)
    problems = {
        problem.kind: problem
        for problem in check_dataset(tiny_dataset.images, annotations).problems
    }
    assert problems[kind].count == 2

    options: dict[str, Any] = {"max_bad": 1.0, "min_size": 48}
    report = run((tiny_dataset.images, annotations), folder, **options)
    assert report.faults == {kind: 2}
    assert f"2 x {kind}: {problems[kind].effect}" in str(report)
    assert verify_shards(folder).bad == ()
    assert run((tiny_dataset.images, annotations), folder, **options).faults == {kind: 2}

    expected = snapshot(folder)
    (folder / "index.json").unlink()
    assert run((tiny_dataset.images, annotations), folder, **options).faults == {kind: 2}
    assert snapshot(folder) == expected


@pytest.mark.parametrize("kind", ["empty mask", "inverted box"])
def test_more_bad_objects_than_max_bad_stop(tiny_dataset, folder, tmp_path, kind):
    annotations = tmp_path / "a.json"
    objects = spoil_objects(tiny_dataset, annotations, kind, 3)
    data = tiny_dataset.images, annotations
    with pytest.raises(
        ColabUtilsError, match=rf"Bad objects so far: 3, and at most 2 of {objects:,} may be"
    ) as error:
        run(data, folder, max_bad=2 / objects, shard_mb=128)
    assert f"(3 x {kind}: object " in str(error.value)
    assert "check --repair OUT.json" in str(error.value)
    assert "--max-bad" in str(error.value)
    assert not (folder / "index.json").exists()
    assert run(data, folder, max_bad=3 / objects, shard_mb=128).faults == {kind: 3}
