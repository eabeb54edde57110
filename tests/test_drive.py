"""Drive as a mount: what lies on it, what is said when it goes away, and how it is tried again."""

from __future__ import annotations

import errno
import os
import warnings

import pytest

from colab_utils import drive
from colab_utils.drive import RETRY_WAITS_S, DriveLostError, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.places import open_place


def lose():
    raise DriveLostError("gone")


@pytest.mark.parametrize(
    ("number", "is_on_drive", "error", "words"),
    [
        # The mount died; or a quota is used up, or a folder has too many files.
        (errno.ENOTCONN, True, DriveLostError, r"photo\.jpg.*disconnected.*errno 107.*force_remou"),
        (errno.EIO, True, DriveLostError, r"photo\.jpg.*disconnected.*errno 5.*force_remount"),
        # Nothing waits for 81 seconds, and nobody is told to mount Drive again.
        (errno.EIO, False, OSError, "Input/output error"),
    ],
)
def test_a_vanished_drive_is_named_with_its_cure_and_a_broken_disk_is_not(
    photo, monkeypatch, number, is_on_drive, error, words
):
    def fail(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(drive, "is_on_drive", lambda path: is_on_drive)
    store = open_store(photo.parent)
    with store.open(photo.name) as file:
        monkeypatch.setattr(os, "preadv", fail)
        with pytest.raises(error, match=words):
            file.pread(1, 0)
    monkeypatch.setattr("colab_utils.files._open_at_once", fail)
    with pytest.raises(error, match=words):
        store.read(photo.name)
    assert bool(store.failures) is is_on_drive


def write_mounts(path, kinds, monkeypatch):
    """Write a table of mounts as Linux shows it, and let it be the system's."""
    lines = [f"source {folder} {kind} rw,relatime 0 0\n" for folder, kind in kinds.items()]
    path.write_text("".join(lines))
    monkeypatch.setattr(drive, "_MOUNTS", path)


class TestIsOnDrive:
    @pytest.fixture
    def mounts(self, tmp_path, monkeypatch):
        """The mounts of a machine whose Drive is at /content/gdrive and at a path with a space."""
        kinds = {"/": "overlay", "/content/gdrive": "fuse.drive", "/mnt/my\\040drive": "fuse.drive"}
        kinds["/content/gdrive/local"] = "tmpfs"
        write_mounts(tmp_path / "mounts", kinds, monkeypatch)

    @pytest.mark.parametrize(
        ("path", "expected"),
        [
            # Drive is mounted at another path.
            ("/content/gdrive/MyDrive/photos", True),
            ("/content/gdrive", True),
            ("/content/gdrive2/photos", False),
            # Another mount lies within it.
            ("/content/gdrive/local/photos", False),
            ("/mnt/my drive/photos", True),
            # Outside Colab nothing is mounted there, so it is an ordinary folder.
            ("/content/drive/MyDrive", False),
            ("/content/photos", False),
        ],
    )
    def test_the_table_of_mounts_knows(self, mounts, path, expected):
        assert is_on_drive(path) is expected

    def test_no_disk_is_asked_for_anything(self, monkeypatch):
        """A Drive that hangs does not answer, and the question can not be interrupted."""
        for name in ("pathconf", "statvfs"):
            monkeypatch.delattr(os, name)
        assert not is_on_drive("/tmp")

    def test_a_link_into_drive_lies_on_drive(self, mounts, tmp_path):
        (tmp_path / "link").symlink_to("/content/gdrive/MyDrive")
        assert is_on_drive(tmp_path / "link" / "photos")


class TestAPathOnColabsDrive:
    @pytest.fixture
    def content(self, tmp_path, monkeypatch):
        monkeypatch.setattr(drive, "is_colab", lambda: True)
        monkeypatch.setattr(drive, "COLAB_ROOT", tmp_path)
        return tmp_path

    def test_only_the_table_of_mounts_tells_a_mounted_drive(self, content, monkeypatch):
        """A plain folder of each name is refused under any mount point, and through a link."""
        mounted = content / "gdrive"
        write_mounts(content / "mounts", {mounted: "fuse.rclone"}, monkeypatch)
        (content / "link").symlink_to(content / "drive/MyDrive")
        for name in ("drive/MyDrive", "drive/x", "data/My Drive", "a/Shareddrives/team", "link"):
            (content / name).resolve().mkdir(parents=True, exist_ok=True)
            with pytest.raises(ColabUtilsError, match=r"is not mounted, so .*drive\.mount"):
                open_place(content / name / "run")
        (content / "mine").symlink_to(mounted / "MyDrive")
        for name in ("gdrive/MyDrive/run", "gdrive/Shared drives/run", "mine", "runs/drive"):
            assert open_place(content / name) == content / name

    def test_files_in_the_way_of_a_mount_are_to_be_moved_first(self, content):
        (content / "gdrive/MyDrive/data").mkdir(parents=True)
        place = content / "gdrive"
        with pytest.raises(ColabUtilsError, match=rf"`!mv {place} .*mount\('{place}'\)"):
            open_place(place / "MyDrive/data")
        # No command moves a home folder away.
        with pytest.raises(ColabUtilsError, match=r"Run .*drive/?'\)") as caught:
            open_place(content.parent / "MyDrive")
        assert "!mv" not in str(caught.value)


class TestRetries:
    def test_a_call_is_repeated_with_growing_waits(self, monkeypatch):
        # The other tests shorten the waits.
        monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", RETRY_WAITS_S)
        retries = open_store("/tmp")
        waited = []
        monkeypatch.setattr(retries.stop, "wait", waited.append)

        # One line breaks the silence, also where several threads wait.
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            for _ in range(2):
                with pytest.raises(DriveLostError):
                    retries.attempt("/tmp", lose)
        texts = [str(warning.message) for warning in warned]
        assert texts == ["/tmp fails, and is tried again for more than a minute"]
        assert waited == [*RETRY_WAITS_S] * 2
        assert sum(RETRY_WAITS_S) == pytest.approx(81.3)
        assert retries.tell_failures() == "/tmp failed 42 times and was tried again"

    def test_what_was_given_up_is_not_waited_for_again_by_the_caller(self):
        inner = open_store("/tmp")
        outer = open_store("/tmp")

        with pytest.raises(DriveLostError, match="gone"):
            outer.attempt("/tmp", lambda: inner.attempt("/tmp", lose))
        assert (inner.failures, outer.failures) == (len(drive.RETRY_WAITS_S), 0)

    def test_a_file_whose_read_failed_is_opened_anew(self, photo, monkeypatch):
        """A descriptor of a mount that was lost stays lost."""
        real = os.preadv
        opened = []
        offsets = []

        def open_at_once(path, flags):
            opened.append(path)
            return os.open(path, flags)

        def preadv(descriptor, views, offset):
            offsets.append(offset)
            if len(offsets) == 2:
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            return real(descriptor, [views[0][:300]], offset)

        monkeypatch.setattr("colab_utils.files._open_at_once", open_at_once)
        monkeypatch.setattr(os, "preadv", preadv)
        store = open_store(photo)
        content = photo.read_bytes()
        with store.open("") as file:
            assert file.pread(len(content), 0) == content
        # The bytes that came before the error are kept.
        assert offsets[:4] == [0, 300, 300, 600]
        assert opened == [photo, photo]
        assert store.failures == 1

    @pytest.mark.parametrize(("may_pass", "is_stopped"), [(False, False), (True, True)])
    def test_what_does_not_pass_and_what_is_stopped_waits_for_nothing(self, may_pass, is_stopped):
        def fail():
            error = DriveLostError("gone")
            error.may_pass = may_pass
            raise error

        retries = open_store("/tmp")
        if is_stopped:
            retries.stop.set()
        with pytest.raises(DriveLostError):
            retries.attempt("/tmp", fail)
        assert retries.failures == 0
