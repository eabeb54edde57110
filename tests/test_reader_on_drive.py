"""The reader on a mounted Drive that serves few reads at once, and refuses more than some."""

import pytest

from colab_utils.files import open_store
from colab_utils.reader import Reader
from colab_utils.slow_drive import DriveProfile
from colab_utils.streams import guess_streams
from tests.drive_mount import mount_or_skip

FILES = 300


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "backing"
    folder.mkdir()
    for number in range(FILES):
        (folder / f"{number}.jpg").write_bytes(b"%d" % number)
    return folder


def read_all(store):
    reader = Reader(store.read, store)
    names = [f"{number}.jpg" for number in range(FILES)]
    contents = [reading.take() for reading in reader.read_all(names)]
    reader.close()
    # A trial of a larger number may be under way. The next reader begins with the one that is kept.
    return contents, guess_streams(store.place)


def test_a_drive_that_refuses_many_reads_gives_every_file(photos, tmp_path, monkeypatch):
    # The waits are to the time of a read as they are on a bad day: 1, 4, 16 and 60 s to 0.6 s.
    monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", (0.03, 0.13, 0.5, 2))
    profile = DriveProfile(
        "strict", open_s=0.02, bytes_per_s=1e9, source="a test", streams=4, most_reads=6
    )
    with mount_or_skip(photos, tmp_path / "mnt", profile=profile) as mount:
        store = open_store(mount.folder)
        contents, streams = read_all(store)
    assert contents == [b"%d" % number for number in range(FILES)]
    # The first guess is wider than this Drive allows: it was refused, and learnt from it.
    assert store.failures > 0
    assert streams <= 8
