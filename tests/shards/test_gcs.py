"""Shards in a bucket of Google Cloud Storage, at a server in a process of its own that answers as
Google's does: `make test-engines` installs what they need.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from colab_utils import places
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.places import UrlPath, open_place
from colab_utils.sample_data import make_dataset
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import read_index
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.training.checkpoint_folder import CheckpointFolder

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"shard_mb": 0.05, "storage": "keep"}
GS = "gs://bucket/shards"
ALWAYS = 10**6


def write_account(path, port):
    """Write the key of a service account, whose tokens this server gives."""
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import rsa

    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    account = {
        "type": "service_account",
        "project_id": "project",
        "private_key_id": "1",
        "private_key": key.decode(),
        "client_email": "somebody@project.iam.gserviceaccount.com",
        "token_uri": f"http://127.0.0.1:{port}/token",
    }
    path.write_text(json.dumps(account))


@pytest.fixture
def gs(tmp_path, monkeypatch):
    """A server with an empty bucket: the file of its faults."""
    # gcsfs asks for the kind of a bucket by another protocol, at Google itself.
    monkeypatch.setenv("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    pytest.importorskip("gcsfs", reason="make test-engines")
    faults = tmp_path / "faults.json"
    server = subprocess.Popen(
        [sys.executable, "-m", "tests.gcs_server", str(faults)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    port = int(server.stdout.readline())
    write_account(tmp_path / "account.json", port)
    monkeypatch.setenv("GOOGLE_APPLICATION_CREDENTIALS", str(tmp_path / "account.json"))
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
    places._open_system.cache_clear()
    yield faults
    server.kill()
    server.wait()
    places._open_system.cache_clear()


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder = tmp_path_factory.mktemp("photos")
    return make_dataset(folder, n=30, width=160, height=128, objects=(1, 4), workers=1)


@pytest.fixture(scope="module")
def local(photos, tmp_path_factory):
    folder = tmp_path_factory.mktemp("local") / "shards"
    write_shards(photos.images, photos.annotations, shards=folder, workers=1, **SETTINGS)
    return folder


def snapshot(folder):
    return {path.name: path.read_bytes() for path in sorted(Path(folder).iterdir())}


def set_fault(faults, status, *, skip=0, times=ALWAYS):
    faults.write_text(json.dumps({"status": status, "skip": skip, "times": times}))


def test_shards_are_written_verified_and_copied_at_google(gs, photos, local, tmp_path):
    report = write_shards(photos.images, photos.annotations, shards=GS, workers=2, **SETTINGS)
    assert report.images == 30
    again = write_shards(photos.images, photos.annotations, shards=GS, workers=2, **SETTINGS)
    assert again.shards == report.shards
    assert verify_shards(GS).bad == ()
    copy_shards(GS, tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)
    copy_shards(local, "gs://bucket/sent")
    assert copy_shards(local, "gs://bucket/sent").bytes == 0
    names = open_place("gs://bucket/sent").list_sizes()
    assert names == {name: len(content) for name, content in snapshot(local).items()}


def test_shards_arrive_from_google(gs, local, tmp_path):
    copy_shards(local, GS)
    dataset = ArrivingShards(GS, tmp_path / "ssd")
    dataset.wait()
    assert snapshot(tmp_path / "ssd") == snapshot(local)
    batches = make_loader(ShardDataset(GS), batch_size=4, device="cpu", workers=2)
    assert sum(len(targets) for _, targets in batches) == 30


def test_a_large_file_is_sent_in_parts_and_not_read_back(gs, monkeypatch):
    path = UrlPath("gs://bucket/large")
    content = os.urandom(120_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(UrlPath, "read_bytes", None)
        path.write(content)
        assert path.holds(content)
    assert path.read_range(110_000_000, 1000) == content[110_000_000:110_001_000]


def test_checkpoints_lie_at_google(gs):
    folder = CheckpointFolder("gs://bucket/run")
    folder.prepare(anew=False)
    for step in (1, 2, 3):
        folder.save({"losses": [step]}, step=step)
    assert CheckpointFolder("gs://bucket/run").read()["losses"] == [3]
    CheckpointFolder("gs://bucket/run").prepare(anew=True)
    assert CheckpointFolder("gs://bucket/run").read() is None
    assert len(open_place("gs://bucket/run/previous-1").list_sizes()) == 2


@pytest.mark.parametrize("url", ["gs://nothing/shards", "gs://bucket/nothing"])
def test_a_place_that_is_not_there_is_told(gs, tmp_path, url):
    for call in (
        lambda: read_index(url),
        lambda: verify_shards(url),
        lambda: copy_shards(url, tmp_path / "ssd"),
    ):
        with pytest.raises(ColabUtilsError, match=url) as caught:
            call()
        assert not isinstance(caught.value, DriveLostError)


def test_a_bucket_is_never_made(gs, local):
    with pytest.raises(ColabUtilsError, match="its bucket or folder is not there"):
        copy_shards(local, "gs://typo/x")


@pytest.mark.parametrize("status", [429, 503])
def test_a_server_that_fails_for_a_while_is_asked_again(gs, local, tmp_path, status):
    copy_shards(local, GS)
    set_fault(gs, status, times=3)
    copy_shards(GS, tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)


def test_missing_rights_are_told_at_once_and_the_same_call_continues(gs, local, tmp_path):
    copy_shards(local, GS)
    set_fault(gs, 403, skip=5)
    with pytest.raises(ColabUtilsError, match=r"refused .*storage\.objects\.get") as caught:
        copy_shards(GS, tmp_path / "ssd")
    assert not isinstance(caught.value, DriveLostError)
    assert not (tmp_path / "ssd" / "index.json").exists()
    gs.unlink()
    copy_shards(GS, tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)


@pytest.mark.parametrize("way", ["copy", "write"])
def test_a_token_that_expires_in_the_middle_is_told_and_the_same_call_continues(
    gs, photos, local, tmp_path, way
):
    """The account's key was withdrawn: there are no new tokens, either."""
    target = tmp_path / "ssd" if way == "copy" else open_place(GS)
    if way == "copy":
        copy_shards(local, GS)

    def call():
        if way == "copy":
            copy_shards(GS, target, streams=1)
        else:
            write_shards(photos.images, photos.annotations, shards=GS, workers=1, **SETTINGS)

    set_fault(gs, 401, skip=12)
    with pytest.raises(ColabUtilsError, match=r"401.*Look at .*credentials.*expired") as caught:
        call()
    assert not isinstance(caught.value, DriveLostError)
    assert str(caught.value).count("401") == 1
    gs.unlink()
    finished = list(target.glob("shard-*.tar"))
    assert finished
    assert not (target / "index.json").exists()
    call()
    copy_shards(target, tmp_path / "all")
    assert snapshot(tmp_path / "all") == snapshot(local)


def test_credentials_that_are_missing_are_told(gs, local, monkeypatch, tmp_path):
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS")
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    places._open_system.cache_clear()
    with pytest.raises(ColabUtilsError, match=r"401.*credentials") as caught:
        copy_shards(local, GS)
    assert not isinstance(caught.value, DriveLostError)
