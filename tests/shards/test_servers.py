"""Shards at web servers, and at an S3 server that fails, each in a process of its own: `make
test-engines` installs what they need.
"""

from __future__ import annotations

import json

import pytest

from colab_utils.data.checks import check_dataset
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.places import open_place
from colab_utils.shards import copy as copying
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from tests.snapshots import snapshot
from tests.stores import forget_servers, start

pytest.importorskip("s3fs", reason="make test-engines")

SETTINGS = {"shard_mb": 0.05, "storage": "keep"}
S3 = "s3://bucket/shards"


@pytest.fixture(params=["", "--no-ranges"], ids=["ranges", "no ranges"])
def web(request, tmp_path):
    """A web server of the folder ``web``: its address, and the file of its faults."""
    (tmp_path / "web").mkdir()
    options = [option for option in [request.param] if option]
    faults = tmp_path / "faults.json"
    server = start("-m", "tests.file_server", tmp_path / "web", faults, *options)
    port = int(server.stdout.readline())
    forget_servers()
    yield f"http://127.0.0.1:{port}", faults, server
    server.kill()
    server.wait()
    forget_servers()


def test_shards_are_copied_from_a_web_server(web, local, tmp_path, monkeypatch):
    url, faults, _ = web
    monkeypatch.setattr(copying, "PART_BYTES", 10_000)
    copy_shards(local, tmp_path / "web" / "shards")
    copy_shards(f"{url}/shards", tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)
    assert verify_shards(f"{url}/shards").bad == ()
    dataset = ArrivingShards(f"{url}/shards", tmp_path / "other")
    dataset.wait()
    assert snapshot(tmp_path / "other") == snapshot(local)
    assert ShardDataset(f"{url}/shards")[3][0].shape == ShardDataset(local)[3][0].shape
    assert not faults.exists()


@pytest.mark.parametrize(
    "fault",
    [{"status": 429}, {"status": 503}, {"status": 500}, {"cut": True}],
    ids=str,
)
def test_a_web_server_that_fails_for_a_while_is_asked_again(web, local, tmp_path, fault):
    url, faults, _ = web
    copy_shards(local, tmp_path / "web" / "shards")
    faults.write_text(json.dumps({**fault, "times": 3}))
    copy_shards(f"{url}/shards", tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ({"status": 403}, ColabUtilsError, "refused .403"),
        ({"status": 503}, DriveLostError, "the server failed .503"),
        ({"status": 404}, ColabUtilsError, "which index.json lists"),
        ({"cut": True}, DriveLostError, "the server failed"),
    ],
    ids=str,
)
def test_a_web_server_that_keeps_failing_is_told(web, local, tmp_path, fault, kind, words):
    url, faults, _ = web
    copy_shards(local, tmp_path / "web" / "shards")
    faults.write_text(json.dumps({**fault, "times": 10**6}))
    with pytest.raises(kind, match=words) as caught:
        copy_shards(f"{url}/shards", tmp_path / "ssd")
    assert "space" not in str(caught.value)
    assert not (tmp_path / "ssd" / "index.json").exists()
    faults.unlink()
    copy_shards(f"{url}/shards", tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)


def test_a_web_server_that_goes_is_told(web, local, tmp_path):
    url, _, server = web
    copy_shards(local, tmp_path / "web" / "shards")
    server.kill()
    server.wait()
    with pytest.raises(DriveLostError, match="the server failed"):
        copy_shards(f"{url}/shards", tmp_path / "ssd")
    with pytest.raises(DriveLostError, match="the server failed"):
        open_place(f"{url}/shards/index.json").exists()


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ({"status": 503, "times": 8}, None, ""),
        ({"status": 429, "times": 8}, None, ""),
        ({"cut": True, "times": 3}, None, ""),
        ({"status": 403, "times": 10**6}, ColabUtilsError, "the server refused"),
        ({"status": 503, "times": 10**6}, DriveLostError, "the server failed"),
        ({"cut": True, "times": 10**6}, DriveLostError, "the server failed"),
    ],
    ids=str,
)
@pytest.mark.parametrize("web", [""], ids=["ranges"], indirect=True)
def test_an_s3_server_that_fails_is_asked_again_and_told(
    web, local, tmp_path, monkeypatch, fault, kind, words
):
    url, faults, _ = web
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_DEFAULT_REGION"):
        monkeypatch.setenv(name, "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    copy_shards(local, tmp_path / "web" / "bucket" / "shards")
    faults.write_text(json.dumps(fault))
    if kind is None:
        copy_shards(S3, tmp_path / "ssd", streams=2)
        assert snapshot(tmp_path / "ssd") == snapshot(local)
        return
    with pytest.raises(kind, match=words) as caught:
        copy_shards(S3, tmp_path / "ssd", streams=2)
    assert "space" not in str(caught.value)
    assert isinstance(caught.value, DriveLostError) == (kind is DriveLostError)


def test_nothing_is_written_to_a_web_server(web, local):
    url, _, _ = web
    with pytest.raises(ColabUtilsError, match="can only be read"):
        copy_shards(local, f"{url}/new")


def test_images_and_annotations_come_from_a_web_server(web, photos, local, tmp_path):
    url, _, _ = web
    folder = tmp_path / "web" / "my photos"
    folder.mkdir()
    for path in photos.images.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    (tmp_path / "web" / "a.json").write_bytes(photos.annotations.read_bytes())
    images = f"{url}/my photos"
    annotations = f"{url}/a.json?signature=secret"
    assert check_dataset(images, annotations) == check_dataset(photos.images, photos.annotations)
    write_shards(images, annotations, shards=tmp_path / "shards", workers=2, **SETTINGS)
    assert snapshot(tmp_path / "shards") == snapshot(local)
    dataset = CocoFolder(images, annotations)
    assert dataset[0][0].ndim == 3
    batches = make_loader(dataset, batch_size=4, device="cpu", workers=2)
    assert sum(len(targets) for _, targets in batches) == 30
