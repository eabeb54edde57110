"""Shards at URLs: written, verified and copied, with servers that fail."""

import errno
import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from colab_utils.drive import DriveLostError, RefusedError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import read_index
from colab_utils.shards.verify import inspect_folder, verify_shards
from colab_utils.shards.write import finish_shards, write_shards
from tests.faulty_server import FaultyFileSystem, fail_from, fail_times
from tests.file_server import FileServer
from tests.snapshots import snapshot
from tests.stores import forget_servers

URL = "faulty://bucket/shards"
SETTINGS = {"shard_mb": 0.05, "storage": "keep"}


@pytest.fixture(autouse=True)
def bucket(tmp_path):
    """The folder in which the server keeps its shards."""
    FaultyFileSystem.reset(tmp_path / "server")
    yield tmp_path / "server" / "bucket" / "shards"
    FaultyFileSystem.reset("")


@pytest.fixture
def filled(bucket, local):
    """The same folder with the shards in it."""
    shutil.copytree(local, bucket)
    return bucket


def write(photos, images=None, annotations=None, **options):
    places = (images or photos.images, annotations or photos.annotations)
    return write_shards(*places, **{**SETTINGS, "shards": URL, "workers": 2, **options})


def test_shards_at_a_url_are_those_of_a_folder(photos, local, bucket):
    report = write(photos)
    assert report.images == 30
    assert snapshot(bucket) == snapshot(local)
    # A second call finds the shards finished.
    assert write(photos).shards == report.shards
    assert inspect_folder(URL).recipe == read_index(local).recipe


def test_writing_goes_on_after_a_server_that_was_lost(photos, local, bucket):
    FaultyFileSystem.fault = fail_from(3, ConnectionResetError("gone"), call="write")
    with pytest.raises(DriveLostError, match=r"cannot be reached .*gone"):
        write(photos)
    FaultyFileSystem.fault = None
    assert not (bucket / "index.json").exists()
    write(photos)
    assert snapshot(bucket) == snapshot(local)


def test_no_image_is_left_out_because_credentials_have_expired(photos, local, tmp_path):
    """Few are left at the end, so that they would not be too many bad ones."""
    shutil.copytree(photos.images, Path(FaultyFileSystem.root) / "data")
    last = sorted(path.name for path in photos.images.iterdir())[-1]

    def refuse(call, path):
        if call == "read" and path.endswith(last):
            raise PermissionError("The provided token has expired.")

    call = partial(write, photos, "faulty://data", shards=tmp_path / "shards", workers=1, max_bad=1)
    FaultyFileSystem.fault = refuse
    with pytest.raises(RefusedError, match="token has expired"):
        call()
    FaultyFileSystem.fault = None
    assert call().skipped == ()
    assert snapshot(tmp_path / "shards") == snapshot(local)


def test_expired_credentials_are_never_called_a_damage(filled):
    expired = PermissionError("The provided token has expired.")
    for first in range(2, 8):
        FaultyFileSystem.fault = fail_from(first, expired)
        FaultyFileSystem.calls.clear()
        with pytest.raises(RefusedError, match="token has expired"):
            ShardDataset(URL)[29]


def test_parts_are_written_and_finished_at_a_url(photos, local, bucket):
    write(photos, part=(2, 2))
    with pytest.raises(ColabUtilsError, match=r"4 of 8 shards are missing in faulty://"):
        finish_shards(photos.images, photos.annotations, shards=URL)
    write(photos, part=(1, 2), workers=1)
    finish_shards(photos.images, photos.annotations, shards=URL)
    assert snapshot(bucket) == snapshot(local)


def test_verify_tries_again_and_never_calls_a_lost_server_a_damage(filled):
    FaultyFileSystem.fault = fail_times(3, TimeoutError(), name=".tar")
    assert verify_shards(URL).bad == ()
    FaultyFileSystem.fault = fail_from(4, TimeoutError("silence"))
    with pytest.raises(DriveLostError, match="silence"):
        verify_shards(URL)


def test_a_copy_from_a_url_goes_on_where_it_was(filled, local, tmp_path):
    FaultyFileSystem.fault = fail_from(12, ConnectionResetError("gone"))
    with pytest.raises(DriveLostError, match=r"cannot be reached .*gone"):
        copy_shards(URL, tmp_path / "ssd", streams=1)
    names = {path.name for path in (tmp_path / "ssd").iterdir()}
    assert "index.json" not in names
    assert not any(name.endswith(".part") for name in names)
    FaultyFileSystem.fault = None
    report = copy_shards(URL, tmp_path / "ssd")
    assert report.skipped_shards > 0
    assert snapshot(tmp_path / "ssd") == snapshot(local)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (PermissionError("ExpiredToken"), ColabUtilsError, "ExpiredToken"),
        (OSError(errno.EBUSY, "SlowDown"), DriveLostError, "SlowDown"),
        (FileNotFoundError("gone"), ColabUtilsError, "which index.json lists"),
    ],
    ids=repr,
)
def test_an_error_of_reading_is_never_one_of_space(filled, tmp_path, error, kind, words):
    def fail(call, path):
        if call == "read" and path.endswith(".tar"):
            raise error

    FaultyFileSystem.fault = fail
    with pytest.raises(kind, match=words) as caught:
        copy_shards(URL, tmp_path / "ssd")
    assert "space" not in str(caught.value)
    assert "write" not in str(caught.value)


def test_shards_images_and_annotations_come_from_a_web_server(photos, local, tmp_path):
    folder = tmp_path / "web"
    shutil.copytree(local, folder / "shards")
    shutil.copytree(photos.images, folder / "my photos")
    shutil.copy(photos.annotations, folder / "a.json")
    faults = tmp_path / "faults.json"
    faults.write_text(json.dumps({"cut": True, "times": 3}))
    with FileServer(folder, faults) as server:
        url = server.url
        copy_shards(f"{url}/shards", tmp_path / "ssd")
        assert snapshot(tmp_path / "ssd") == snapshot(local)
        assert verify_shards(f"{url}/shards").bad == ()
        places = (f"{url}/my photos", f"{url}/a.json?signature=secret")
        write(photos, *places, shards=tmp_path / "shards")
        assert snapshot(tmp_path / "shards") == snapshot(local)
        with pytest.raises(ColabUtilsError, match="can only be read"):
            copy_shards(local, f"{url}/new")
    # A connection that is open would still be served.
    forget_servers()
    with pytest.raises(DriveLostError, match="cannot be reached"):
        copy_shards(f"{url}/shards", tmp_path / "other")


def test_shards_are_copied_to_a_url(local, bucket):
    FaultyFileSystem.fault = fail_times(3, ConnectionResetError(), call="write")
    report = copy_shards(local, URL)
    assert snapshot(bucket) == snapshot(local)
    assert report.skipped_shards == 0
    FaultyFileSystem.calls.clear()
    again = copy_shards(local, URL)
    assert again.bytes == 0
    assert again.skipped_shards == report.shards
    # Only the indices are written again.
    assert FaultyFileSystem.calls["write"] == 2


@pytest.mark.parametrize("url", ["memory://", "memory:///"])
def test_a_url_without_a_bucket_is_told(photos, local, url):
    with pytest.raises(ColabUtilsError, match="its bucket or folder is not there"):
        copy_shards(local, url)
