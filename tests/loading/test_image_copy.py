"""Copying loose images: what arrives, what is not read twice, what is named when it goes wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, namedtuple
from itertools import count
from pathlib import Path

import pytest

from colab_utils import copy_images, files
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.shards.lock import lock_here
from colab_utils.slow_drive import DriveProfile, slow_down
from tests.file_server import FileServer
from tests.snapshots import snapshot
from tests.stress.kill_copy_images import count_rounds
from tests.stress.kill_preprocess import Kills

usage = namedtuple("usage", "total used free")


@pytest.fixture
def source(tmp_path):
    """Nine files in three folders, and what is hidden."""
    folder = tmp_path / "drive"
    for place in ("", "a", "a/b"):
        (folder / place).mkdir(exist_ok=True)
        for number in range(3):
            (folder / place / f"{number}.jpg").write_bytes(os.urandom(1000 + number))
    (folder / ".cache").mkdir()
    (folder / ".cache" / "3.jpg").write_bytes(b"hidden")
    (folder / "._0.jpg").write_bytes(b"hidden")
    return folder


@pytest.fixture
def act_before_reads(tmp_path, monkeypatch):
    """Call a function with the path of each file of this test before it is read."""

    def patch(act, patch=monkeypatch):
        read_whole = files.read_whole

        def act_and_read(path, **options):
            # A thread of an earlier test may still read its own files.
            if Path(path).is_relative_to(tmp_path):
                act(Path(path))
            return read_whole(path, **options)

        patch.setattr(files, "read_whole", act_and_read)

    return patch


@pytest.fixture
def reads(act_before_reads):
    """How often each file of this test was read."""
    counts = Counter()
    act_before_reads(lambda path: counts.update([path.name]))
    return counts


def list_visible(folder):
    tree = snapshot(folder)
    return {name: content for name, content in tree.items() if "/." not in f"/{name}"}


def write_json(path, names):
    """A COCO JSON of images with these names, without objects."""
    images = [
        {"id": number, "file_name": name, "width": 8, "height": 8}
        for number, name in enumerate(names, 1)
    ]
    path.write_text(json.dumps({"images": images, "annotations": [], "categories": []}))
    return path


def test_all_files_arrive_in_their_folders_and_hidden_ones_stay(source, ssd):
    report = copy_images(source, ssd)
    assert snapshot(ssd) == list_visible(source)
    assert (report.files, report.bytes, report.skipped_files) == (9, 9009, 0)
    assert report.missing == ()
    assert str(report).startswith("9 files in place: 9.0 kB copied in ")


def test_each_file_is_read_once_and_again_only_if_its_size_has_changed(source, ssd, reads):
    copy_images(source, ssd)
    assert reads == {"0.jpg": 3, "1.jpg": 3, "2.jpg": 3}
    reads.clear()
    report = copy_images(source, ssd)
    assert not reads
    assert (report.files, report.bytes, report.skipped_files) == (9, 0, 9)
    (source / "a" / "1.jpg").write_bytes(b"longer or shorter")
    # What was left half-written under its own name is copied again, too.
    os.truncate(ssd / "2.jpg", 5)
    report = copy_images(source, ssd)
    assert reads == {"1.jpg": 1, "2.jpg": 1}
    assert (report.files, report.skipped_files) == (9, 7)
    assert snapshot(ssd) == list_visible(source)


def test_many_files_are_read_at_once(source, ssd, act_before_reads):
    together = threading.Barrier(9, timeout=60)
    act_before_reads(lambda _: together.wait())
    assert copy_images(source, ssd, streams=9).files == 9


def test_what_cannot_be_copied_is_named_and_the_rest_is_copied(source, ssd, tmp_path):
    (source / "folder.jpg").mkdir()
    os.mkfifo(source / "pipe.jpg")
    (tmp_path / "elsewhere.jpg").write_bytes(b"elsewhere")
    (source / "link.jpg").symlink_to(tmp_path / "elsewhere.jpg")
    (source / "gone.jpg").symlink_to(source / "nothing.jpg")
    reasons = {
        "folder.jpg": "Is a directory",
        "missing.jpg": f"not in {source}",
        "1.png": f"not in {source}",
        "x" * 300: "too long",
        "a\0.jpg": "",
        "pipe.jpg": "a device or a pipe",
        "link.jpg": "leads out",
        "gone.jpg": "",
    }
    annotations = write_json(tmp_path / "names.json", [*reasons, "a/0.jpg"])
    report = copy_images(source, ssd, annotations=annotations)
    missing = {entry.file_name: entry.reason for entry in report.missing}
    assert missing.keys() == reasons.keys()
    assert all(reasons[name] in missing[name] for name in missing)
    assert [*snapshot(ssd)] == ["a/0.jpg"]
    assert report.files == 1
    assert ", 8 could not be copied" in str(report)
    # Without a JSON, the same are named that the folder holds.
    report = copy_images(source, tmp_path / "all")
    assert {entry.file_name for entry in report.missing} == {"pipe.jpg", "link.jpg", "gone.jpg"}
    assert snapshot(tmp_path / "all").keys() == list_visible(source).keys() - {"link.jpg"}


def test_a_drive_that_is_lost_ends_the_copy_and_the_same_call_goes_on(
    source, ssd, monkeypatch, reads, act_before_reads
):
    def lose(path):
        if reads.total() >= 4:
            with files.guard_drive(path):
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with monkeypatch.context() as patch:
        act_before_reads(lose, patch)
        with pytest.raises(DriveLostError, match="what is done is safe"):
            copy_images(source, ssd, streams=1)
    assert len(snapshot(ssd)) == 4
    report = copy_images(source, ssd)
    assert (report.files, report.skipped_files) == (9, 4)
    assert snapshot(ssd) == list_visible(source)


def test_too_little_disk_is_told_before_the_first_byte(source, ssd, monkeypatch, reads):
    needed = 9009 + 9 * 4096
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(10**6, 0, needed - 1))
    with pytest.raises(ColabUtilsError, match=r"45\.9 kB of free disk, and 45\.9 kB are.*JSON"):
        copy_images(source, ssd)
    assert not reads
    assert not ssd.exists()
    # What is there already needs no room.
    shutil.copytree(source / "a", ssd / "a")
    assert copy_images(source, ssd).skipped_files == 6


def test_a_disk_that_gets_full_is_one_line_and_leaves_whole_files(source, ssd, monkeypatch):
    write_bytes = Path.write_bytes
    numbers = count()

    def fill(path, content):
        if next(numbers) < 3:
            return write_bytes(path, content)
        write_bytes(path, content[:100])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", fill)
        with pytest.raises(ColabUtilsError, match=r"Writing into .*No space left.*continues"):
            copy_images(source, ssd)
    tree = snapshot(ssd)
    assert len(tree) == 3
    assert tree.items() <= snapshot(source).items()
    assert copy_images(source, ssd).skipped_files == 3


@pytest.mark.parametrize("name", ["", "a", "new/deep"])
def test_a_target_in_the_source_is_refused(source, name):
    with pytest.raises(ColabUtilsError, match=r"lies in .*Name another target"):
        copy_images(source, source / name)


def test_bad_input_is_one_line(source, tmp_path):
    (tmp_path / "empty").mkdir()
    nothing = write_json(tmp_path / "nothing.json", [])
    for images, target, options, message in (
        ("nope", "ssd", {}, "no image folder"),
        ("empty", "ssd", {}, "no file to copy in .*empty"),
        ("drive", "ssd", {"annotations": tmp_path / "nope.json"}, "nope.json"),
        ("drive", "ssd", {"annotations": nothing}, "no file to copy in .*nothing.json"),
        ("drive", "ssd", {"streams": 0}, "streams"),
        ("drive", "nothing.json", {}, r"Writing into .*nothing\.json"),
    ):
        with pytest.raises(ColabUtilsError, match=message):
            copy_images(tmp_path / images, tmp_path / target, **options)
        assert not (tmp_path / "ssd").exists()
    with pytest.raises(ColabUtilsError, match="not a folder or file on this machine"):
        copy_images(source, "s3://bucket/images")


def test_a_second_copy_into_the_same_folder_is_refused(source, ssd):
    with lock_here(ssd), pytest.raises(ColabUtilsError, match="Another copy writes into"):
        copy_images(source, ssd)
    assert copy_images(source, ssd).files == 9


def test_kills_at_random_moments_lead_to_the_same_folder(tmp_path):
    assert count_rounds(Kills(2, tmp_path, random.Random(1))) >= 1


def test_ctrl_c_leaves_whole_files_only(source, ssd):
    slow_down(source, DriveProfile("slow", 0.3, 1e9, "test"))
    words = ["copy", "--images", str(source), "--to", str(ssd), "--streams", "1"]
    session = subprocess.Popen(
        [sys.executable, "-m", "colab_utils", *words], stderr=subprocess.PIPE, text=True
    )
    deadline_s = time.monotonic() + 60
    while not [*ssd.rglob("*.jpg")] and time.monotonic() < deadline_s:
        time.sleep(0.01)
    session.send_signal(signal.SIGINT)
    _, err = session.communicate(timeout=60)
    assert session.returncode == 130, err
    tree = snapshot(ssd)
    assert 0 < len(tree) < 9
    assert tree.items() <= snapshot(source).items()
    slow_down(source, None)
    assert copy_images(source, ssd).skipped_files == len(tree)


def test_only_what_the_json_names_is_copied(source, ssd, tmp_path, reads):
    annotations = write_json(tmp_path / "some.json", ["a/1.jpg", "0.jpg", "a/1.jpg"])
    report = copy_images(source, ssd, annotations=annotations)
    assert [*snapshot(ssd)] == ["0.jpg", "a/1.jpg"]
    assert reads == {"some.json": 1, "0.jpg": 1, "1.jpg": 1}
    assert report.files == 2


def test_a_web_server_gives_the_files_that_a_json_names(source, ssd, tmp_path):
    annotations = write_json(tmp_path / "names.json", ["a/b/2.jpg", "0.jpg", "9.jpg"])
    with FileServer(source, tmp_path / "faults.json") as server:
        report = copy_images(server.url, ssd, annotations=annotations)
        with pytest.raises(ColabUtilsError, match="name the JSON"):
            copy_images(server.url, tmp_path / "other")
    assert {*snapshot(ssd)} == {"a/b/2.jpg", "0.jpg"}
    assert [entry.file_name for entry in report.missing] == ["9.jpg"]
