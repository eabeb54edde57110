"""The Drive doctor: it gives back what a slowed folder was set to, ends in time on dead mounts, and weighs cures."""

import ast
import dataclasses
import errno
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from colab_utils.diagnosis import drive_doctor as doctor
from colab_utils.diagnosis.drive_doctor import DriveHealth, examine_drive
from colab_utils.drive import DriveProfile, get_profile
from colab_utils.errors import ColabUtilsError
from colab_utils.loading import CocoFolder, ShardDataset

SLOW = DriveProfile("slow", open_s=0.06, bytes_per_s=20e6, source="made up for the test")

COCO = DriveHealth(
    "/content/drive/MyDrive/coco", "Google Drive", 10, files=118_287, bytes=19_300_000_000,
    open_ms_median=38.0, open_ms_p95=90.0, cold_mb_per_s=53.0,
    epoch_s=38 * 60, later_epoch_s=38 * 60, copy_s=6 * 60,
    fullest_folder="/content/drive/MyDrive/coco/train2017", entries=5_000, free_bytes=65_000_000_000,
)  # fmt: skip


def _fill(folder, count, size, suffix=".jpg"):
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"{number:04}{suffix}").write_bytes(bytes(size))
    return folder


class TestMeasuring:
    @pytest.mark.parametrize("size", [400_000, 3_000_000])  # images; large photos
    def test_a_slowed_folder_gives_back_its_profile(self, tmp_path, size):
        folder = _fill(tmp_path / "photos", 16, size)
        for attempt in range(3):  # on a busy machine sleeping takes longer
            health = examine_drive(folder, profile=SLOW, seconds=5)
            found = (health.open_ms_median, health.cold_mb_per_s)
            if attempt == 2 or found == pytest.approx((60, 20), rel=0.2):
                break
        assert found == pytest.approx((60, 20), rel=0.2)
        assert health.open_ms_p95 >= health.open_ms_median
        assert (health.kind, health.files, health.bytes) == ("slowed folder", 16, 16 * size)
        assert (health.entries, health.fullest_folder) == (16, str(folder))
        assert health.epoch_s == pytest.approx(16 * (0.06 + size / 20e6), rel=0.2)
        assert health.copy_s == pytest.approx(16 * size / 20e6, rel=0.2)
        assert health.troubles == ()

    def test_a_local_disk_is_not_what_you_wait_for(self, tmp_path):
        folder = _fill(tmp_path / "photos", 20, 5_000)
        before = {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]}
        health = examine_drive(folder, seconds=1)
        assert health.kind == "other disk"
        assert len(health.cures) == 1
        assert health.cures[0].startswith("This folder is not on Drive")
        assert {path: path.stat().st_mtime_ns for path in [folder, *folder.iterdir()]} == before

    def test_every_epoch_costs_what_a_slowed_folder_forgets(self, tmp_path):
        folder = _fill(tmp_path / "photos", 30, 20_000)
        health = examine_drive(folder, profile=SLOW, seconds=2, epochs=50)
        assert health.later_epoch_s == pytest.approx(health.epoch_s, rel=0.5)
        assert health.cures[0].startswith("Make shards and copy those: 50 epochs read from here for")
        assert examine_drive(folder, profile=SLOW, seconds=2, epochs=1).cures[0].startswith("Leave the files")

    def test_small_images_show_no_stream_on_a_mount(self, tmp_path, monkeypatch):
        monkeypatch.setattr(doctor, "is_on_drive", lambda path: True)  # which is mounted on Colab only
        monkeypatch.setenv("HOME", str(tmp_path))
        folder = _fill(tmp_path / "coco", 10, 50_000)
        for _ in range(3):  # on a busy machine a first read may be slower by chance
            health = examine_drive(folder, profile=SLOW, seconds=2)
            if health.troubles:
                break
        assert health.open_ms_median < 30  # a mounted Drive has its own speed
        assert health.cold_mb_per_s is None
        assert "as fast as second ones" in health.troubles[0]
        (folder / "large.jpg").write_bytes(bytes(3_000_000))
        assert examine_drive(folder, images=["large.jpg"], seconds=1).cold_mb_per_s > 0


class TestWhatAnEpochReads:
    def test_a_dataset_and_a_list(self, tiny_dataset):
        images = Path(tiny_dataset.images)
        total = sum(path.stat().st_size for path in images.iterdir())
        dataset = CocoFolder(images, tiny_dataset.annotations, profile=DriveProfile("quick", 0.001, 1e9, source=""))
        names = [dataset.coco.file_name(i) for i in range(len(dataset))]
        health = examine_drive(images, images=dataset, seconds=1)
        assert (health.kind, health.files, health.bytes) == ("slowed folder", 12, total)
        assert examine_drive(images, images=names[:5], seconds=1).files == 5

    def test_shards_count_by_their_index(self, tiny_shards):
        index = ShardDataset(tiny_shards).index
        for images in (None, ShardDataset(tiny_shards)):
            health = examine_drive(tiny_shards, images=images, profile=SLOW, seconds=1)
            assert (health.files, health.bytes, health.sharded) == (2 * len(index.shards), index.bytes, True)
            assert health.cures[0].startswith("Copy the shards")

    def test_an_index_of_something_else_is_no_trouble(self, tmp_path):
        (_fill(tmp_path / "photos", 3, 100) / "index.json").write_text("{}")
        health = examine_drive(tmp_path / "photos", seconds=1)
        assert (health.files, health.sharded, health.troubles) == (3, False, ())


class TestCures:
    @pytest.mark.parametrize(
        ("change", "cure"),
        [
            # every epoch costs the same
            (
                {},
                "Make shards and copy those: 10 epochs read from here for 6.3 hours, a copy costs 44 minutes, 6 min",
            ),
            # Drive's cache helps in later epochs
            (
                {"later_epoch_s": 600},
                "Make shards and copy those: 10 epochs read from here for 2.1 hours, a copy costs 44",
            ),
            # and may help so much that a copy is not worth it
            ({"later_epoch_s": 10}, "Leave the files where they are: 10 epochs read for 40 minutes, a copy costs 44"),
            # shards are there already
            ({"sharded": True}, "Copy the shards: 10 epochs read from here for 6.3 hours, a copy costs 6 minutes."),
        ],
    )
    def test_the_first_cure_weighs_reading_from_here_against_a_copy(self, change, cure):
        health = dataclasses.replace(COCO, **change)
        assert health.cures[0].startswith(cure)
        assert len(health.cures) == 1
        assert "118,287 files, 19.3 GB: 38 minutes, later " in str(health)

    def test_the_cache_counts_twice(self):
        cures = dataclasses.replace(COCO, free_bytes=30_000_000_000).cures
        assert cures[1].startswith("Free some disk, or copy a part (limit_gb=15): with Drive's cache it takes 38.6 GB")

    def test_the_order(self):
        troubles = ("/x/a.jpg: Transport endpoint is not connected",)
        cures = dataclasses.replace(COCO, entries=118_287, free_bytes=1, troubles=troubles).cures
        starts = ("Mount Drive again", "Make shards", "Free some disk", "Make fewer, larger files")
        assert [cure.startswith(start) for cure, start in zip(cures, starts, strict=True)] == [True] * 4


class TestBadInput:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("none", r"expected files in .*none, found No such file or directory: mount Drive first"),
            ("file", r"expected files in .*file, found Not a directory: .*another folder"),
            ("empty", r"expected files in .*empty, found none"),
        ],
    )
    def test_a_folder_that_is_none(self, tmp_path, name, message):
        (tmp_path / "file").touch()
        (tmp_path / "empty").mkdir()
        with pytest.raises(ColabUtilsError, match=message) as caught:
            examine_drive(tmp_path / name, seconds=1)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("arguments", [{"seconds": 0}, {"seconds": float("nan")}, {"epochs": 0}])
    def test_numbers_out_of_range(self, tmp_path, arguments):
        with pytest.raises(ColabUtilsError, match="epochs of 1 or more, found"):
            examine_drive(tmp_path, **arguments)

    @pytest.mark.parametrize("images", [[], "no/such/folder", 7])  # none, missing, and of no known kind
    def test_images_that_are_none(self, tmp_path, images):
        _fill(tmp_path / "photos", 3, 100)
        with pytest.raises(
            ColabUtilsError, match=r"expected files in .*photos, found none of (\[\]|'no/such/folder'|7):"
        ):
            examine_drive(tmp_path / "photos", images=images, seconds=1)

    def test_three_files(self, tmp_path):
        health = examine_drive(_fill(tmp_path / "photos", 3, 100), profile=SLOW, seconds=1)
        assert health.open_ms_median is not None

    def test_files_that_cannot_be_read(self, tmp_path):
        folder = _fill(tmp_path / "photos", 4, 100)
        names = [*(path.name for path in folder.iterdir()), "gone.jpg", "lost.jpg", "bad\0name.jpg"]
        health = examine_drive(folder, images=names, profile=SLOW, seconds=1)
        assert health.open_ms_median is not None
        assert len(health.troubles) == 1
        assert health.troubles[0].endswith(".jpg and 1 more: No such file or directory")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
    def test_a_folder_that_may_not_be_listed(self, tmp_path):
        folder = _fill(tmp_path / "photos", 1, 100)
        folder.chmod(0)
        health = examine_drive(folder, profile=SLOW, seconds=1)
        folder.chmod(0o700)
        assert health.troubles == (f"{folder}: Permission denied",)

    def test_a_folder_of_100_000_entries(self):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as root:  # made fast
            folder = _fill(Path(root) / "photos", 4, 10_000)
            for number in range(4, 100_000):
                os.link(f"{folder}/000{number % 4}.jpg", f"{folder}/{number}.jpg")
            health = examine_drive(folder, profile=SLOW, seconds=1)
        assert (health.entries, health.files, health.bytes) == (100_000, 100_000, 1_000_000_000)
        assert any(cure.startswith("Make fewer, larger files") for cure in health.cures)


class TestMountsThatFail:
    def test_a_file_that_hangs_is_left_behind(self, tmp_path):
        folder = _fill(tmp_path / "photos", 12, 1_000)
        os.mkfifo(folder / "pipe.jpg")  # opening it waits for a writer, which never comes
        before, began = threading.active_count(), time.perf_counter()
        try:
            health = examine_drive(folder, seconds=2)
            assert time.perf_counter() - began < 7
            assert health.troubles == (f"{folder / 'pipe.jpg'}: no answer (read_start)",)
            assert health.open_ms_median is not None
        finally:
            os.close(os.open(folder / "pipe.jpg", os.O_WRONLY | os.O_NONBLOCK))  # lets the thread go
        while threading.active_count() > before and time.perf_counter() - began < 20:
            time.sleep(0.01)
        assert threading.active_count() == before

    @pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EIO])
    def test_a_drive_that_goes_away_half_way(self, tmp_path, monkeypatch, number):
        folder, calls, preadv = _fill(tmp_path / "photos", 20, 1_000), [], os.preadv

        def vanish(*arguments):
            calls.append(1)
            if len(calls) > 6:
                raise OSError(number, os.strerror(number))
            return preadv(*arguments)

        monkeypatch.setattr(os, "preadv", vanish)
        health = examine_drive(folder, profile=get_profile("fast"), seconds=1)
        assert health.open_ms_median is not None
        assert [line.partition(": ")[2] for line in health.troubles] == [os.strerror(number)]
        wanted = "Mount Drive again" if number == errno.ENOTCONN else "Make fewer, larger files"
        assert any(cure.startswith(wanted) for cure in health.cures)

    def test_a_mount_that_hangs_and_one_that_died(self, tmp_path):
        done = subprocess.run(
            [sys.executable, "-c", _DEAD_MOUNT, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
        )
        if done.returncode == 77:
            pytest.skip(f"no FUSE mount can be made here: {done.stdout.strip()}")
        assert done.returncode == 0, done.stderr
        (hung_s, hung), (died_s, died) = ast.literal_eval(done.stdout)
        assert max(hung_s, died_s) < 7
        assert hung["troubles"][0] == f"{tmp_path}: no answer (list_files)"
        assert died["troubles"] == (f"{tmp_path}: Transport endpoint is not connected",)
        assert hung["kind"] == died["kind"] == "Google Drive"
        assert hung["cures"][0].startswith("Mount Drive again")
        assert died["cures"][0].startswith("Mount Drive again")


# a FUSE mount of Colab's type that nobody serves, seen by this process only; it dies when its descriptor is closed
_DEAD_MOUNT = """
import ctypes, dataclasses, os, sys, time
libc, folder = ctypes.CDLL(None, use_errno=True), sys.argv[1]
def need(result):
    if result:
        print(os.strerror(ctypes.get_errno()))
        sys.exit(77)
need(libc.unshare(0x20000))  # CLONE_NEWNS
need(libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None))  # MS_REC | MS_PRIVATE
try:
    served = os.open("/dev/fuse", os.O_RDWR)
except OSError as error:
    print(error)
    sys.exit(77)
options = f"fd={served},rootmode=40000,user_id=0,group_id=0".encode()
need(libc.mount(b"drive", folder.encode(), b"fuse.drive", 0, options))
from colab_utils.diagnosis.drive_doctor import examine_drive
def examine():
    began = time.perf_counter()
    health = examine_drive(folder, seconds=2)
    return time.perf_counter() - began, dataclasses.asdict(health) | {"cures": health.cures}
hung = examine()
os.close(served)
print([hung, examine()])
"""
