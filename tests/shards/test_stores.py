"""Shards in a bucket of S3, at a server in a process of its own whose credentials expire:
`make test-engines` installs what it needs.
"""

from __future__ import annotations

import pytest

from colab_utils.drive import RefusedError
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.training.checkpoint import CheckpointFolder
from tests.snapshots import snapshot
from tests.stores import S3, forget_servers

SETTINGS = {"shard_mb": 0.05, "storage": "keep"}


@pytest.fixture
def store(tmp_path, monkeypatch):
    """A server with an empty bucket."""
    for package in ("s3fs", "moto"):
        pytest.importorskip(package, reason="make test-engines")
    forget_servers()
    server = S3(tmp_path, monkeypatch)
    yield server
    server.close()
    forget_servers()


@pytest.fixture
def url(store):
    """A folder in the bucket."""
    return f"{store.url}/shards"


def write(photos, url, **options):
    settings = {**SETTINGS, "workers": 1, **options}
    return write_shards(photos.images, photos.annotations, shards=url, **settings)


def test_shards_are_written_verified_and_copied(store, url, photos, local, tmp_path):
    report = write(photos, url, workers=2)
    assert report.images == 30
    again = write(photos, url, workers=2)
    assert again.shards == report.shards
    assert verify_shards(url).bad == ()
    copy_shards(url, tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)
    copy_shards(local, f"{store.url}/sent")
    assert verify_shards(f"{store.url}/sent").bad == ()
    assert copy_shards(local, f"{store.url}/sent").bytes == 0


def test_checkpoints_lie_in_a_bucket(store):
    run = f"{store.url}/run"
    folder = CheckpointFolder(run)
    folder.prepare(anew=False)
    for step in (1, 2, 3):
        folder.save({"losses": [step]}, step=step)
    assert CheckpointFolder(run).read()["losses"] == [3]
    CheckpointFolder(run).prepare(anew=True)
    assert CheckpointFolder(run).read() is None
    assert len(open_store(f"{run}/previous-1").list_names()) == 2


def test_a_bucket_is_never_made(store, photos, local):
    url = store.url.replace("bucket", "typo/x")
    for call in (
        lambda: write(photos, url),
        lambda: copy_shards(local, url),
        lambda: CheckpointFolder(url).prepare(anew=False),
    ):
        with pytest.raises(ColabUtilsError, match="its bucket or folder is not there"):
            call()
    assert not open_store(url).find_kind()


# In these tests, the credentials expire in the middle. The same call then continues in the same
# process with new ones.


def expect_expiry(store, skip, call):
    store.expire(skip=skip)
    with pytest.raises(RefusedError, match=r"credentials.*expired"):
        call()
    store.renew()


@pytest.mark.parametrize("skip", [0, 24])
def test_writing_goes_on_with_new_credentials(store, url, photos, local, tmp_path, skip):
    expect_expiry(store, skip, lambda: write(photos, url))
    assert not open_store(url).find_kind("index.json")
    finished = open_store(url).list_names("shard-*")
    assert bool(finished) == bool(skip)
    write(photos, url)
    copy_shards(url, tmp_path / "all")
    assert snapshot(tmp_path / "all") == snapshot(local)
