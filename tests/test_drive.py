"""The slowed folder: what it returns, how long it asks to wait, and what it says when Drive goes
away.
"""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from colab_utils import drive
from colab_utils.drive import (
    DRIVE_PROFILES,
    RETRY_WAITS_S,
    DriveFile,
    DriveLostError,
    DriveProfile,
    Retries,
    ShortReadError,
    find_profile,
    get_profile,
    is_on_drive,
    parse_file,
    read_at_full_speed,
    read_file,
    slow_down,
)
from colab_utils.errors import ColabUtilsError
from tests.bad_reads import BadReads, cut
from tests.drive_mount import mount_or_skip

SLOW = DriveProfile("slow", open_s=10.0, bytes_per_s=100.0, source="a test")


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A clock that only sleeping and the real reads move; ``clock.slept`` lists the waits in
    seconds.
    """

    class Clock:
        def __init__(self):
            self.now, self.slept = 0.0, []

        def sleep(self, seconds):
            self.slept.append(seconds)
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(drive, "sleep", clock.sleep)
    monkeypatch.setattr(drive, "perf_counter", lambda: clock.now)
    monkeypatch.setattr(drive, "_LINK", str(tmp_path / "link"))  # it holds times of this clock
    return clock


@pytest.fixture
def photo(tmp_path):
    path = tmp_path / "photo.jpg"
    path.write_bytes(bytes(range(200)) * 5)
    return path


@pytest.mark.parametrize("read", [read_file, lambda path: DriveFile(path).pread(1, 0)])
def test_a_pipe_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ColabUtilsError, OSError), match=r"found a device or a pipe|Illegal seek"):
        read(tmp_path / "pipe")


def test_what_no_memory_holds_is_not_read(tmp_path):
    with open(tmp_path / "photo.jpg", "wb") as file:
        file.truncate(10**9 + 1)
    with pytest.raises(
        ColabUtilsError, match=r"expected a file at .*photo.jpg that memory holds, found 1.0 GB"
    ):
        read_file(tmp_path / "photo.jpg")
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


def test_read_file_waits_for_opening_and_for_every_byte(photo, clock, tmp_path):
    slow_down(tmp_path, SLOW)
    assert read_file(photo) == photo.read_bytes()
    assert clock.slept == [pytest.approx(10.0 + 1000 / 100)]


def test_without_a_slowed_folder_nothing_waits(photo, clock):
    assert read_file(photo) == photo.read_bytes()
    with DriveFile(photo) as file:
        assert file.pread(10, 500) == photo.read_bytes()[500:510]
    assert clock.slept == []


def test_the_time_of_the_real_read_is_part_of_the_wait(photo, clock, monkeypatch, tmp_path):
    slow_down(tmp_path, SLOW)

    def slow_preadv(descriptor, buffers, offset):
        clock.now += 3.0
        return len(buffers[0])

    with DriveFile(photo) as file:
        file.pread(100, 0)
        clock.slept.clear()
        monkeypatch.setattr(os, "preadv", slow_preadv)
        file.pread(400, 100)
        assert clock.slept == [pytest.approx(1.0)]  # 4 s asked, 3 s spent
        clock.slept.clear()
        file.pread(100, 500)
        assert clock.slept == []  # the real read was slower than the profile


def test_contiguous_reads_pay_the_opening_once_and_jumps_pay_it_again(photo, clock, tmp_path):
    slow_down(tmp_path, SLOW)
    with DriveFile(photo) as file:
        for offset in (300, 400, 500, 200, 300):  # one jump: back to 200
            file.pread(100, offset)
    assert clock.slept == pytest.approx([11, 1, 1, 11, 1])


class TestSlowDown:
    def test_what_lies_below_waits(self, photo, clock, tmp_path):
        slow_down(tmp_path, SLOW)
        read_file(photo)
        with DriveFile(photo) as file:
            file.pread(1000, 0)
        assert clock.slept == [20, 20]
        (tmp_path.parent / "other.jpg").write_bytes(b"x")
        read_file(tmp_path.parent / "other.jpg")
        slow_down(tmp_path, None)
        read_file(photo)
        assert len(clock.slept) == 2

    def test_the_inner_folder_counts_and_links_are_followed(self, tmp_path):
        slow_down(tmp_path, "bad")
        slow_down(tmp_path / "ssd", None)
        slow_down(tmp_path / "ssd" / "unpacked", SLOW)
        (tmp_path.parent / "link").symlink_to(tmp_path)
        found = [find_profile(tmp_path / name) for name in ("a", "ssd/a", "ssd/unpacked/b/c")]
        assert found == [DRIVE_PROFILES["bad"], None, SLOW]
        assert find_profile(tmp_path.parent / "link" / "a") == DRIVE_PROFILES["bad"]
        with read_at_full_speed():
            assert find_profile(tmp_path / "a") is None
        assert find_profile(tmp_path / "a") == DRIVE_PROFILES["bad"]
        with pytest.raises(ColabUtilsError, match="slowish"):
            slow_down(tmp_path, "slowish")

    def test_what_is_slowed_within_a_block_at_full_speed_is_slow_until_its_end(self, tmp_path):
        @read_at_full_speed()
        def fail():
            slow_down(tmp_path / "within", SLOW)
            assert find_profile(tmp_path / "within" / "a") == SLOW
            assert find_profile(tmp_path / "before" / "a") is None
            raise ColabUtilsError("stopped")

        slow_down(tmp_path / "before", "bad")
        with pytest.raises(ColabUtilsError, match="stopped"):
            fail()
        assert find_profile(tmp_path / "within" / "a") is None
        assert find_profile(tmp_path / "before" / "a") == DRIVE_PROFILES["bad"]

    @pytest.mark.parametrize("method", ["fork", "spawn"])
    def test_worker_processes_are_slowed_too(self, tmp_path, method):
        slow_down(tmp_path, SLOW)
        with ProcessPoolExecutor(1, get_context(method)) as pool:
            assert pool.submit(find_profile, tmp_path / "a").result() == SLOW

    def test_a_command_is_slowed_too(self, tmp_path):
        slow_down(tmp_path, SLOW)
        code = (
            "import sys; from colab_utils.drive import find_profile; "
            "print(find_profile(sys.argv[1]).open_s)"
        )
        run = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "a"], capture_output=True, text=True, check=True
        )
        assert float(run.stdout) == SLOW.open_s


@pytest.mark.parametrize("pool", ["threads", "processes"])
def test_all_streams_together_have_one_link(photo, pool, tmp_path):
    """Each would take 0.1 s alone; no slower limit is asserted, because the machine may be busy."""
    slow_down(tmp_path, DriveProfile("narrow", 0.0, 10_000, "a test"))
    started = perf_counter()
    with (
        ThreadPoolExecutor(4)
        if pool == "threads"
        else ProcessPoolExecutor(4, get_context("fork")) as workers
    ):
        for content in workers.map(read_file, [photo] * 4):
            assert content == photo.read_bytes()
    assert perf_counter() - started >= 0.4


def test_a_bad_day_has_a_heavy_tail_that_is_the_same_for_everybody():
    bad, typical = DRIVE_PROFILES["bad"], DRIVE_PROFILES["typical"]
    drawn = np.array([bad.draw_open_s(f"images/{number:012d}.jpg") for number in range(20_000)])
    assert drawn.mean() == pytest.approx(bad.open_s, rel=0.05)
    assert 2.2 < np.percentile(drawn, 95) / drawn.mean() < 3.0
    assert 0.1 < np.percentile(drawn, 5) / drawn.mean() < 0.3
    assert bad.draw_open_s("images/1.jpg") == bad.draw_open_s("/another/place/images/1.jpg")
    assert bad.draw_open_s("images/1.jpg") != bad.draw_open_s("images/1.jpg", 512)
    assert {typical.draw_open_s(f"{number}.jpg") for number in range(9)} == {typical.open_s}


def test_pread_gives_the_bytes_and_stops_at_the_end(photo):
    content = photo.read_bytes()
    with DriveFile(photo) as file:
        assert file.pread(50, 10) == content[10:60]
        assert file.pread(500, 900) == content[900:]
        assert file.pread(10, 5000) == b""


def test_short_reads_are_completed(photo, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(
        os, "preadv", lambda descriptor, buffers, offset: real(descriptor, [buffers[0][:7]], offset)
    )
    with DriveFile(photo) as file:
        assert file.pread(100, 50) == photo.read_bytes()[50:150]


def test_a_file_of_a_lost_mount_closes_without_an_error(photo, monkeypatch):
    def lose(*arguments):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    file, close = DriveFile(photo), os.close
    with monkeypatch.context() as patch:
        patch.setattr(os, "close", lambda descriptor: (close(descriptor), lose()))
        file.close()
    file.close()


def test_a_closed_file_frees_its_descriptor(photo):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        file = DriveFile(photo)
        file.close()
        file.close()
    for _ in range(20):
        DriveFile(photo)  # forgotten: collected with the object
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize(
    "number",
    [
        errno.ENOTCONN,  # the mount died
        errno.EIO,  # quota, or a folder with too many files
    ],
)
def test_a_vanished_drive_is_named_with_its_cure(photo, monkeypatch, number):
    def vanish(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(drive, "is_on_drive", lambda path: True)
    with DriveFile(photo) as file:
        monkeypatch.setattr(os, "preadv", vanish)
        with pytest.raises(
            DriveLostError, match=rf"photo\.jpg.*disconnected.*errno {number}.*force_remount"
        ) as caught:
            file.pread(1, 0)
    assert isinstance(caught.value, ColabUtilsError)
    assert "\n" not in str(caught.value)
    monkeypatch.setattr("colab_utils.drive._open_at_once", vanish)
    with pytest.raises(DriveLostError, match="disconnected"):
        read_file(photo)


def test_a_broken_disk_is_not_a_lost_drive(photo, monkeypatch, clock):
    """Nothing waits for 81 seconds, and nobody is told to mount Drive again."""

    def fail(*_):
        raise OSError(errno.EIO, "Input/output error")

    retries = Retries()
    with DriveFile(photo, retries) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(OSError, match="Input/output error"):
            file.pread(1, 0)
    monkeypatch.setattr("colab_utils.drive._open_at_once", fail)
    with pytest.raises(OSError, match="Input/output error"):
        read_file(photo, retries)
    assert retries.count == 0


class TestIsOnDrive:
    @pytest.fixture
    def mounts(self, monkeypatch):
        """The mounts of a machine whose Drive is at /content/gdrive and at a path with a space."""
        kinds = {"/": "overlay", "/content/gdrive": "fuse.drive", "/mnt/my drive": "fuse.drive"}
        kinds["/content/gdrive/local"] = "tmpfs"
        table = [SimpleNamespace(mountpoint=at, fstype=kind) for at, kind in kinds.items()]
        monkeypatch.setattr("psutil.disk_partitions", lambda all: table)

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            ("/content/gdrive/MyDrive/photos", True),  # a mount at another path
            ("/content/gdrive", True),
            ("/content/gdrive2/photos", False),
            ("/content/gdrive/local/photos", False),  # another mount within it
            ("/mnt/my drive/photos", True),
            ("/content/drive/MyDrive", False),  # not Colab, not mounted: an ordinary folder
            ("/content/photos", False),
        ],
    )
    def test_the_table_of_mounts_knows(self, mounts, path, expected):
        assert is_on_drive(path) is expected

    def test_colabs_own_path_counts_before_it_is_mounted(self, monkeypatch):
        monkeypatch.setattr(drive, "is_colab", lambda: True)
        assert is_on_drive("/content/drive/MyDrive/photos")
        assert not is_on_drive("/content/photos")

    def test_a_link_into_drive_lies_on_drive(self, mounts, tmp_path):
        (tmp_path / "link").symlink_to("/content/gdrive/MyDrive")
        assert is_on_drive(tmp_path / "link" / "photos")

    def test_a_real_mount(self, tmp_path, photo):
        with mount_or_skip(tmp_path, tmp_path.parent / "mounted") as mount:
            assert is_on_drive(mount.folder / "photo.jpg")
            mount.fail(errors=9)
            with pytest.raises(DriveLostError, match="refuses") as caught:
                read_file(mount.folder / "photo.jpg")
            assert f"drive.mount('{mount.folder}', force_remount=True)" in str(caught.value)
        assert not is_on_drive(photo)


@pytest.mark.parametrize("retries", [None, Retries()])
@pytest.mark.parametrize("times", [1, 4])
def test_a_file_of_which_too_few_bytes_came_is_read_again(photo, monkeypatch, retries, times):
    reads = BadReads(monkeypatch, ".jpg", cut, times)
    assert read_file(photo, retries) == photo.read_bytes()
    assert reads.times == 0


@pytest.mark.parametrize("retries", [None, Retries()])
def test_too_few_bytes_are_never_taken_for_the_file(photo, monkeypatch, retries):
    BadReads(monkeypatch, ".jpg", cut, 1000)
    with pytest.raises(ShortReadError, match=r"Only 500 of the 1,000 bytes of .*photo\.jpg came"):
        read_file(photo, retries)
    assert read_file("/proc/self/stat")  # the system gives no size of it


def test_what_is_refused_is_read_again_until_the_same_bytes_came_twice(photo):
    contents = [b"a", b"b", b"b", b"5"]

    def read():
        return contents.pop(0)

    with pytest.raises(ValueError, match="'b'"):
        parse_file(photo, read, int)
    assert contents == [b"5"]
    contents[:] = [b"a", b"b", b"c", b"d", b"e", b"5"]
    with pytest.raises(
        DriveLostError, match=r"Each time that .*photo\.jpg was read, other bytes came"
    ):
        parse_file(photo, read, int)
    assert parse_file(photo, read, int) == 5


def test_a_missing_file_stays_an_os_error(tmp_path):
    slow_down(tmp_path, SLOW)
    with pytest.raises(FileNotFoundError):
        read_file(tmp_path / "none.jpg")
    with pytest.raises(FileNotFoundError):
        DriveFile(tmp_path / "none.jpg")


def test_get_profile_knows_names_profiles_and_none():
    assert get_profile("bad") is DRIVE_PROFILES["bad"]
    assert get_profile(SLOW) is SLOW
    assert get_profile(None) is None
    assert get_profile("none") is None
    with pytest.raises(ColabUtilsError, match=r"fast, typical, bad, none.*'slowish'"):
        get_profile("slowish")


def test_profiles_say_where_they_come_from_and_travel_to_workers():
    assert list(DRIVE_PROFILES) == ["fast", "typical", "bad"]
    opens = [profile.open_s for profile in DRIVE_PROFILES.values()]
    assert opens == sorted(opens)
    for name, profile in DRIVE_PROFILES.items():
        assert profile.name == name
        assert profile.source
        assert pickle.loads(pickle.dumps(profile)) == profile
    assert 1 / DRIVE_PROFILES["bad"].open_s == pytest.approx(1.65, rel=0.01)


class TestRetries:
    def test_four_tries_more_with_growing_waits(self, monkeypatch):
        # the tests shorten them
        monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", RETRY_WAITS_S)
        retries, waited = Retries(), []
        monkeypatch.setattr(retries.stop, "wait", waited.append)

        def fail():
            raise DriveLostError("gone")

        with pytest.raises(DriveLostError):
            retries.run(fail)
        assert waited == list(RETRY_WAITS_S) == [1, 4, 16, 60]
        assert retries.count == 4
        assert str(retries) == "Drive failed 4 times and was tried again"

    def test_the_last_try_may_succeed(self):
        retries, results = Retries(), iter([DriveLostError("gone")] * 4 + ["read"])

        def call():
            result = next(results)
            if isinstance(result, Exception):
                raise result
            return result

        assert retries.run(call) == "read"
        assert retries.count == 4

    def test_other_errors_come_through_at_once(self):
        retries = Retries()
        with pytest.raises(FileNotFoundError):
            retries.run(lambda: read_file("no/such/file"))
        assert (retries.count, str(retries)) == (0, "")

    def test_stopped_they_wait_for_nothing(self, photo):
        retries = Retries()
        retries.stop.set()

        def fail():
            raise DriveLostError("gone")

        with pytest.raises(DriveLostError):
            retries.run(fail)
        assert retries.count == 0

    def test_a_file_is_opened_anew_and_read_on_where_it_was(self, photo, monkeypatch):
        real, calls = os.preadv, []

        def preadv(descriptor, views, offset):
            calls.append((descriptor, offset))
            if len(calls) == 2:
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            return real(descriptor, [views[0][:300]], offset)

        monkeypatch.setattr(os, "preadv", preadv)
        retries, content = Retries(), photo.read_bytes()
        with DriveFile(photo, retries) as file:
            assert file.pread(len(content), 0) == content
        assert [offset for _, offset in calls[:3]] == [0, 300, 300]
        assert calls[2][0] != calls[0][0]  # a descriptor of a mount that was lost stays lost
        assert retries.count == 1
