"""Writing shards: what is in them, and what is left when it is interrupted, refused or cut
short.
"""

from __future__ import annotations

import errno
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
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import psutil
import pytest
from PIL import Image

from colab_utils import files, processes
from colab_utils.data.checks import check_dataset
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.machine import find_host
from colab_utils.shards import jobs, write
from colab_utils.shards.index import read_index, write_index
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.verify import inspect_folder, verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.bad_reads import BadReads, cut
from tests.coco_files import CocoFiles
from tests.snapshots import snapshot

# A shard holds a few images of the tiny dataset.
SHARD_MB = 0.03


@pytest.fixture(scope="module")
def data(tiny_dataset):
    """The images and the annotations of the tiny dataset: read them, never change them."""
    return tiny_dataset.images, tiny_dataset.annotations


@pytest.fixture(scope="module")
def undisturbed(data, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed") / "shards"
    run(data, folder)
    return folder


def run(dataset, folder, **options: Any):
    return write_shards(*dataset, shards=folder, **{"shard_mb": SHARD_MB, "workers": 1, **options})


def test_reading_goes_on_while_a_shard_is_written(data, folder, undisturbed, monkeypatch):
    """Else a slow Drive would wait at the end of each shard."""
    write_file = files.write_file
    read_image = jobs.read_image
    reads = threading.Semaphore(0)

    def read(*arguments, **options):
        content = read_image(*arguments, **options)
        reads.release()
        return content

    def write(path, *parts):
        # All images are read before the first shard is written.
        if path.name == "shard-000000.arrays":
            assert all(reads.acquire(timeout=60) for _ in range(12))
        write_file(path, *parts)

    monkeypatch.setattr(jobs, "read_image", read)
    monkeypatch.setattr(files, "write_file", write)
    run(data, folder, streams=2)
    assert snapshot(folder) == snapshot(undisturbed)


def names(annotations) -> list[str]:
    return [image["file_name"] for image in json.loads(annotations.read_text())["images"]]


def before_read(patch, data, place, call):
    """Call a function before this image is read."""
    read = files.read_whole
    name = names(data[1])[place]

    def call_and_read(path, **options):
        if path.name == name:
            call()
        return read(path, **options)

    patch.setattr(files, "read_whole", call_and_read)


def change(path, **sections):
    path.write_text(json.dumps({**json.loads(path.read_text()), **sections}))


@contextmanager
def edit_objects(dataset):
    """Change the annotations of a dataset."""
    rows = json.loads(dataset[1].read_text())["annotations"]
    yield rows
    change(dataset[1], annotations=rows)


def test_crowds_are_counted_and_said(dataset, folder):
    with edit_objects(dataset) as rows:
        for number, row in enumerate(rows):
            row["iscrowd"] = int(number < 3)
    report = run(dataset, folder)
    assert (report.crowds, report.annotations) == (3, len(rows))
    assert f"3 of {len(rows)} objects are crowds and left out of training" in str(report)
    assert ShardDataset(folder).counts.sum() == len(rows) - 3


def test_any_worker_count_writes_the_same_bytes(data, undisturbed, folder):
    expected = snapshot(undisturbed)
    assert len(expected) > 7
    assert verify_shards(undisturbed).bad == ()
    assert run(data, folder, workers=20).images == 12
    assert snapshot(folder) == expected
    # A finished folder is left as it is.
    times = read_times(folder)
    report = run(data, folder, workers=2)
    assert read_times(folder) == times
    assert (report.images, report.shards) == (12, len(read_index(folder).shards))


def read_times(folder):
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


@pytest.mark.parametrize("workers", [1, 2])
def test_killed_in_the_middle_the_same_call_ends_byte_identical(
    dataset, undisturbed, folder, workers
):
    slow_down(dataset[0], DriveProfile("slow", 0.15, 1e9, "a test"))
    words = f"--images {dataset[0]} --annotations {dataset[1]} --shards {folder} --streams 1"
    words += f" --shard-mb {SHARD_MB} --workers {workers}"
    command = [sys.executable, "-m", "colab_utils", "preprocess", *words.split()]
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while not list(folder.glob("shard-*.tar")):
        assert process.poll() is None
        time.sleep(0.01)
    children = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    # One worker is a thread.
    assert len(children) == (0 if workers == 1 else workers)
    _, alive = psutil.wait_procs(children, timeout=20)
    assert [child for child in alive if child.status() != psutil.STATUS_ZOMBIE] == []
    left = read_times(folder)
    expected = snapshot(undisturbed)
    assert "index.json" not in left
    # The arrays of each finished shard were written before its tar.
    finished = {name for name in left if name.endswith(".tar")}
    assert 0 < len(finished) < sum(name.endswith(".tar") for name in expected)
    # A kill in the middle of a write leaves this.
    (folder / f".shard-000009.tar.{find_host()}-{process.pid}-1.part").write_bytes(b"half")
    run(dataset, folder, workers=3 - workers)
    assert snapshot(folder) == expected
    # The run was continued, not begun again.
    times = read_times(folder)
    assert all(times[name] == left[name] for name in finished)


def test_a_full_disk_leaves_finished_shards_and_continues(data, undisturbed, folder, monkeypatch):
    """The third shard does not fit, and the first two are there when it is written."""
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
    assert left.items() <= expected.items()
    run(data, folder)
    assert snapshot(folder) == expected


# The next try would come only after an hour.
@pytest.mark.timeout(120)
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupt_while_drive_is_waited_for_is_not_kept_waiting(
    data, folder, monkeypatch, workers
):
    def interrupt(pending):
        time.sleep(0.5)
        raise KeyboardInterrupt

    lose = Mock(side_effect=DriveLostError("lost"))
    monkeypatch.setattr(jobs, "read_image", lambda store, *_, **__: store.attempt(folder, lose))
    monkeypatch.setattr(processes, "pop_done", interrupt)
    monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", (3600.0,))
    with pytest.raises(KeyboardInterrupt):
        run(data, folder, workers=workers)


def test_too_little_space_is_told_before_the_first_byte(data, folder, monkeypatch):
    monkeypatch.setattr("colab_utils.machine.find_free_space", lambda folder: 1000)
    with pytest.raises(ColabUtilsError, match=r"of free disk, and 1\.0 kB are free.*--min-size"):
        run(data, folder)
    assert not folder.exists()


def test_a_worker_ended_by_the_system(data, undisturbed, folder, monkeypatch):
    parent = os.getpid()

    def die():
        if os.getpid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)

    with monkeypatch.context() as patch:
        before_read(patch, data, -1, die)
        with pytest.raises(ColabUtilsError, match="fewer workers"):
            run(data, folder, workers=2)
    assert not list(folder.glob(".*"))
    assert not (folder / "index.json").exists()
    run(data, folder, workers=2)
    assert snapshot(folder) == snapshot(undisturbed)


BAD_FILES = [
    (lambda path: path.unlink(), "the file is missing"),
    (lambda path: (path.unlink(), path.mkdir()), "the file is missing"),
    (lambda path: os.truncate(path, 5000), "not a complete image"),
    (
        lambda path: Image.new("RGB", (5, 5)).save(path),
        "the annotations say 160 x 128 pixels, the file has 5 x 5",
    ),
]


@pytest.mark.parametrize(("spoil", "reason"), BAD_FILES)
def test_one_bad_image_is_named_counted_and_skipped(dataset, folder, spoil, reason):
    bad = names(dataset[1])[7]
    spoil(dataset[0] / bad)
    report = run(dataset, folder, max_bad=0.1)
    (skipped,) = report.skipped
    assert (report.images, skipped.file_name) == (11, bad)
    assert reason in skipped.reason
    assert "1 bad image skipped" in str(report)
    assert read_index(folder).skipped == (skipped,)
    assert verify_shards(folder).images == 11
    # The same call reports the skipped image again.
    assert run(dataset, folder, max_bad=0.1).skipped == (skipped,)


@pytest.mark.filterwarnings("ignore:.* has several entries")
def test_a_bad_annotation_is_named(dataset, folder):
    with edit_objects(dataset) as rows:
        rows[5].update(segmentation=[])
    images = json.loads(dataset[1].read_text())["images"]
    # A sound image has the same file.
    [file_name] = [image["file_name"] for image in images if image["id"] == rows[5]["image_id"]]
    change(dataset[1], images=[*images, {**images[0], "id": -1, "file_name": file_name}])
    (skipped,) = run(dataset, folder, max_bad=0.1).skipped
    assert "the annotation has no mask: polygons or RLE" in skipped.reason
    assert f"annotation {rows[5]['id']}" in skipped.reason
    # The finished folder stays as it is.
    written_ns = (folder / "index.json").stat().st_mtime_ns
    run(dataset, folder, max_bad=0.1)
    assert (folder / "index.json").stat().st_mtime_ns == written_ns


def test_a_shard_holds_fewer_images_where_masks_are_large(tmp_path):
    """150 masks of 12 megapixels are 225 MB an image, beside a JPEG of some KB: a shard of many
    took gigabytes.
    """
    data = CocoFiles(tmp_path)
    for number in range(1, 4):
        data.add_image(Image.new("RGB", (800, 600)), f"{number}.jpg")
        for _ in range(20):
            data.add_object(number, [0, 0, 800, 600])
    assert data.write(shard_mb=1.3, storage="keep").shards == 3


def test_a_locked_file_is_one_bad_image(data, folder, monkeypatch):
    lock = Mock(side_effect=PermissionError(errno.EACCES, "Permission denied"))
    before_read(monkeypatch, data, 3, lock)
    (skipped,) = run(data, folder, max_bad=0.1).skipped
    assert skipped.reason == "the file cannot be read: Permission denied"


def test_an_image_that_a_full_disk_does_not_give_is_no_bad_image(data, folder, monkeypatch):
    refuse = Mock(side_effect=OSError(errno.EDQUOT, "Disk quota exceeded"))
    before_read(monkeypatch, data, 9, refuse)
    with pytest.raises(UnavailableError, match=r"images: the file cannot be read: .* Free some"):
        run(data, folder)


# Image 0 is met while the first images are measured.
@pytest.mark.parametrize(("workers", "place"), [(1, 0), (1, 9), (2, 9)])
def test_a_lost_drive_stops_and_is_no_bad_image(data, folder, monkeypatch, workers, place):
    def lose():
        callers = [frame.filename for frame in traceback.extract_stack()]
        measures = not any(caller.endswith("jobs.py") for caller in callers)
        if measures == (place == 0):
            raise DriveLostError("It cannot be read: Drive got disconnected.")

    with monkeypatch.context() as patch:
        before_read(patch, data, place, lose)
        with pytest.raises(DriveLostError, match="disconnected"):
            run(data, folder, workers=workers, max_bad=1.0)
    assert not (folder / "index.json").exists()
    assert run(data, folder, workers=workers).skipped == ()


@pytest.fixture(scope="module")
def hundred(tmp_path_factory):
    """100 tiny pictures."""
    data = CocoFiles(tmp_path_factory.mktemp("hundred"))
    for i in range(100):
        data.add_image(Image.new("L", (16, 16), i), f"{i}.png")
    data.save()
    return data


@pytest.mark.parametrize(
    ("max_bad", "allowed", "workers"),
    [
        (0.01, 1, 2),
        # In floating point, 0.29 x 100 is 28.999999999999996.
        (0.29, 29, 1),
        # A whole number is a number of images.
        (2, 2, 1),
    ],
)
def test_more_than_max_bad_stops(hundred, folder, tmp_path, max_bad, allowed, workers):
    images = shutil.copytree(hundred.images, tmp_path / "images")
    spoiled = [f"{i}.png" for i in range(50, 51 + allowed)]
    for name in spoiled:
        (images / name).write_bytes(b"")
    data = (images, hundred.annotations)
    message = rf"Bad images so far: \d+, and at most {allowed} of .*\.png: not an image"
    with pytest.raises(ColabUtilsError, match=message):
        run(data, folder, max_bad=max_bad, workers=workers)
    assert not (folder / "index.json").exists()
    # Once one of them is repaired, the same call goes through.
    shutil.copy(hundred.images / spoiled[0], images)
    assert len(run(data, folder, max_bad=max_bad, workers=workers).skipped) == allowed


def test_the_wrong_image_folder_leaves_nothing(data, undisturbed, folder, tmp_path):
    """A first try with another folder must not decide how many images a shard gets."""
    (tmp_path / "wrong").mkdir()
    with pytest.raises(ColabUtilsError, match=r"No image that was tried .*the file is missing"):
        run((tmp_path / "wrong", data[1]), folder, max_bad=1.0)
    assert not folder.exists()
    run(data, folder)
    assert snapshot(folder) == snapshot(undisturbed)


def keep_first_shard(folder):
    """Leave what a copy of the first shard leaves."""
    index = read_index(folder)
    for shard in index.shards[1:]:
        for name, _, _ in shard.files():
            (folder / name).unlink()
    write_index(folder, replace(index, shards=index.shards[:1], partial=True))


def test_no_index_names_shards_that_are_not_there_yet(data, undisturbed, folder, monkeypatch):
    shutil.copytree(undisturbed, folder)
    keep_first_shard(folder)
    monkeypatch.setattr(write, "write_all", Mock(side_effect=ColabUtilsError("stopped")))
    with pytest.raises(ColabUtilsError, match="stopped"):
        run(data, folder)
    assert not list(folder.glob("*index.json"))


def lose_files(folder):
    (folder / "shard-000001.tar").unlink()
    os.truncate(folder / "shard-000002.arrays", 2000)


def damage_before_the_end(folder):
    """Give a shard another name, and change a bit of a mask."""
    (folder / "index.json").unlink()
    for ending in ("tar", "arrays"):
        shutil.copy(folder / f"shard-000001.{ending}", folder / f"shard-000002.{ending}")
    path = folder / "shard-000000.arrays"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("damage", [lose_files, keep_first_shard, damage_before_the_end])
def test_the_same_call_makes_damaged_shards_again(data, undisturbed, folder, damage):
    shutil.copytree(undisturbed, folder)
    damage(folder)
    assert run(data, folder).images == 12
    assert snapshot(folder) == snapshot(undisturbed)


def keep_tars(folder):
    for path in [folder / "index.json", *folder.glob("*.arrays")]:
        path.unlink()


def keep_another_index(folder):
    """As RF-DETR's converter leaves it."""
    for path in folder.iterdir():
        path.unlink()
    (folder / "train-index.json").write_text("{}")


@pytest.mark.parametrize(
    ("damage", "options", "message"),
    [
        (str, {"min_size": 700}, "made with other settings"),
        (keep_tars, {}, "shards without an index"),
        (keep_another_index, {}, "index of another program"),
        (str, {}, "another dataset"),
    ],
)
def test_other_data_in_the_folder_stays(dataset, undisturbed, folder, damage, options, message):
    """Each is refused in one line, and nothing changes."""
    shutil.copytree(undisturbed, folder)
    damage(folder)
    before = snapshot(folder)
    if message == "another dataset":
        change(dataset[1], info={"year": 1999})
    with pytest.raises(ColabUtilsError, match=message) as error:
        run(dataset, folder, **options)
    assert str(folder) in str(error.value)
    assert "\n" not in str(error.value)
    assert snapshot(folder) == before


def test_same_file_twice_sub_folders_and_unicode(dataset, folder):
    images, annotations = dataset
    coco = json.loads(annotations.read_text())
    first, second = coco["images"][:2]
    (images / "日本 sub").mkdir()
    (images / first["file_name"]).rename(images / "日本 sub" / "ä.jpg")
    first["file_name"] = "日本 sub/ä.jpg"
    coco["images"] += [{**first, "id": 10**12 + 5}, {**first, "id": -5}]
    del second["width"], second["height"]
    annotations.write_text(json.dumps(coco, ensure_ascii=False), encoding="utf-8-sig")
    with pytest.warns(match="several entries of '日本 sub/ä.jpg' with different objects"):
        assert run(dataset, folder).images == 14
    members = read_members(folder)
    records = [json.loads(data) for name, data in members.items() if name.endswith(".json")]
    seen = {record["image_id"]: record for record in records}
    assert len(seen) == 14
    assert seen[10**12 + 5]["file_name"] == seen[-5]["file_name"] == "日本 sub/ä.jpg"
    record = seen[second["id"]]
    assert (record["width"], record["height"]) == (160, 128)


def read_members(folder):
    """{member: bytes} of all tars."""
    result = {}
    for path in sorted(folder.glob("*.tar")):
        with tarfile.open(path) as tar:
            result |= {member.name: tar.extractfile(member).read() for member in tar}
    return result


def test_the_storage_decides_what_larger_images_become(data, tmp_path):
    sizes = []
    for name in ("shrink", "keep"):
        report = run(data, tmp_path / name, min_size=64, shard_mb=1, storage=name)
        sizes.append(report.bytes)
        assert report.storage == inspect_folder(tmp_path / name).recipe["storage"] == name
    assert sizes[0] < sizes[1]
    kept = {*read_members(tmp_path / "keep").values()}
    assert kept.issuperset(path.read_bytes() for path in data[0].iterdir())


def test_an_image_that_was_read_badly_is_read_again(data, undisturbed, folder, monkeypatch):
    reads = BadReads(monkeypatch, next(data[0].iterdir()).suffix, cut, 1000)
    # Nothing is known of the image, so it cannot be skipped.
    with pytest.raises(DriveLostError, match=r"bytes of .* came"):
        run(data, folder)
    assert not folder.exists()
    # The bad reads end while images are tried, in this process.
    reads.times = 4
    assert run(data, folder).skipped == ()
    assert reads.times == 0
    assert snapshot(folder) == snapshot(undisturbed)
    # Later, one image has wrong bytes once, as many as it should have.
    shutil.rmtree(folder)
    numbers = iter(range(99))
    reads.change = lambda content: (
        content[:99].ljust(len(content)) if next(numbers) == 15 else content
    )
    reads.times = 99
    assert run(data, folder, workers=1).skipped == ()
    assert next(numbers) == 12 + 12 + 1
    assert snapshot(folder) == snapshot(undisturbed)


def test_arrays_that_were_read_badly_are_no_strange_folder(undisturbed, folder, monkeypatch):
    shutil.copytree(undisturbed, folder)
    (folder / "index.json").unlink()
    reads = BadReads(monkeypatch, ".arrays", cut, 4)
    assert inspect_folder(folder).recipe == read_index(undisturbed).recipe
    assert reads.times == 0


def test_a_refused_writer_changes_nothing(data, undisturbed, folder):
    """The finished folder lost a file: the index goes only once the lock is held."""
    shutil.copytree(undisturbed, folder)
    (folder / "shard-000001.tar").unlink()
    message = rf"Another writer is at work in .* \('process {os.getpid()} on "
    with hold_folder(folder):
        before = snapshot(folder)
        with pytest.raises(ColabUtilsError, match=message):
            run(data, folder)
        assert snapshot(folder) == before
    run(data, folder)
    assert snapshot(folder) == snapshot(undisturbed)


def test_no_warning_stops_preprocess(dataset, folder):
    """As under ``python -W error``: pycocotools 2.0.11 gives numpy 2 a DeprecationWarning where it
    decodes.
    """
    with edit_objects(dataset) as rows:
        # The runs include empty ones, for which the mask is encoded anew.
        runs = [0, 128 * 80, 0, 0, 128 * 80]
        rows[0].update(segmentation={"size": [128, 160], "counts": runs}, bbox=[0, 0, 80, 128])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(dataset, folder, min_size=64).skipped == ()


def test_objects_that_check_calls_serious_are_counted_and_said_and_too_many_stop(dataset, folder):
    kind = "box outside the image"
    # None of the objects is a crowd.
    with edit_objects(dataset) as rows:
        for row in rows[:3]:
            row.update(bbox=[50, 40, -20, -10])
    problems = {problem.kind: problem for problem in check_dataset(*dataset).problems}
    assert problems[kind].count == 3
    message = (
        rf"Bad objects so far: 3, and at most 2 of {len(rows):,} may be .*\(3 x {kind}: object "
        r".*check --repair OUT\.json.*--max-bad"
    )
    with pytest.raises(ColabUtilsError, match=message):
        run(dataset, folder, max_bad=2 / len(rows), shard_mb=128)
    assert not (folder / "index.json").exists()
    report = run(dataset, folder, max_bad=3 / len(rows), shard_mb=128)
    assert f"3 x {kind}: {problems[kind].effect}" in str(report)
    assert verify_shards(folder).bad == ()
    expected = snapshot(folder)
    again = run(dataset, folder, shard_mb=128)
    (folder / "index.json").unlink()
    resumed = run(dataset, folder, max_bad=3, shard_mb=128)
    assert report.faults == again.faults == resumed.faults == {kind: 3}
    assert snapshot(folder) == expected
