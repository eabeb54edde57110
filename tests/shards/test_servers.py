"""Shards at an S3 server and at web servers, each in a process of its own: `make test-engines`
installs what they need.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from colab_utils.data.checks import check_dataset
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.places import UrlPath, open_place
from colab_utils.sample_data import make_dataset
from colab_utils.shards import copy as copying
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import read_index
from colab_utils.shards.verify import verify_shards
from colab_utils.shards.write import write_shards
from colab_utils.training.checkpoint_folder import CheckpointFolder

pytest.importorskip("s3fs", reason="make test-engines")
pytest.importorskip("moto", reason="make test-engines")

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = {"shard_mb": 0.05, "storage": "keep"}
S3 = "s3://bucket/shards"


def start(command):
    """Start a server and return it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def wait_for_port(port):
    until_s = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert time.monotonic() < until_s, "the server did not come"
            time.sleep(0.05)
        else:
            return


def find_free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def s3(monkeypatch):
    """An S3 server with an empty bucket, in a process of its own."""
    port = find_free_port()
    code = (
        "import signal\n"
        "from moto.server import ThreadedMotoServer\n"
        f"ThreadedMotoServer(ip_address='127.0.0.1', port={port}).start()\n"
        "signal.pause()"
    )
    server = start(["-c", code])
    wait_for_port(port)
    for name, value in {
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
    }.items():
        monkeypatch.setenv(name, value)
    forget_servers()
    import s3fs

    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
    yield server
    server.kill()
    server.wait()
    forget_servers()


def forget_servers():
    """Another server has the same address in the next test."""
    from colab_utils import places

    places._open_system.cache_clear()
    places._WITHOUT_RANGES.clear()


@pytest.fixture(params=["", "--no-ranges"], ids=["ranges", "no ranges"])
def web(request, tmp_path):
    """A web server of the folder ``web``: its address, and the file of its faults."""
    (tmp_path / "web").mkdir()
    options = [option for option in [request.param] if option]
    faults = tmp_path / "faults.json"
    server = start(["-m", "tests.file_server", tmp_path / "web", faults, *options])
    port = int(server.stdout.readline())
    forget_servers()
    yield f"http://127.0.0.1:{port}", faults, server
    server.kill()
    server.wait()
    forget_servers()


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


def test_shards_are_written_verified_and_copied_at_s3(s3, photos, local, tmp_path, monkeypatch):
    monkeypatch.setattr(copying, "PART_BYTES", 10_000)
    report = write_shards(photos.images, photos.annotations, shards=S3, workers=2, **SETTINGS)
    assert report.images == 30
    again = write_shards(photos.images, photos.annotations, shards=S3, workers=2, **SETTINGS)
    assert again.shards == report.shards
    assert verify_shards(S3).bad == ()
    copy_shards(S3, tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd") == snapshot(local)
    copy_shards(local, "s3://bucket/sent")
    assert verify_shards("s3://bucket/sent").bad == ()
    assert copy_shards(local, "s3://bucket/sent").bytes == 0
    names = open_place("s3://bucket/sent").list_sizes()
    assert names == {name: len(content) for name, content in snapshot(local).items()}


def test_shards_arrive_from_s3(s3, local, tmp_path):
    copy_shards(local, S3)
    dataset = ArrivingShards(S3, tmp_path / "ssd")
    dataset.wait()
    assert snapshot(tmp_path / "ssd") == snapshot(local)
    batches = make_loader(ShardDataset(S3), batch_size=4, device="cpu", workers=2)
    assert sum(len(targets) for _, targets in batches) == 30


def test_a_large_file_is_sent_in_parts_and_not_read_back(s3, monkeypatch):
    path = UrlPath("s3://bucket/large")
    content = os.urandom(120_000_000)
    with monkeypatch.context() as patch:
        patch.setattr(UrlPath, "read_bytes", None)
        path.write(content)
        assert path.holds(content)
        assert not path.holds(content[:-1])
    other = bytearray(content)
    other[-1] ^= 1
    assert not path.holds(bytes(other))


def test_checkpoints_lie_at_s3(s3):
    folder = CheckpointFolder("s3://bucket/run")
    folder.prepare(anew=False)
    for step in (1, 2, 3):
        folder.save({"losses": [step]}, step=step)
    assert CheckpointFolder("s3://bucket/run").read()["losses"] == [3]
    CheckpointFolder("s3://bucket/run").prepare(anew=True)
    assert CheckpointFolder("s3://bucket/run").read() is None
    assert len(open_place("s3://bucket/run/previous-1").list_sizes()) == 2


@pytest.mark.parametrize(
    "url", ["s3://nothing/shards", "s3://bucket/nothing"], ids=["no bucket", "no folder"]
)
def test_an_s3_place_that_is_not_there_is_told(s3, photos, tmp_path, url):
    for call in (
        lambda: read_index(url),
        lambda: verify_shards(url),
        lambda: copy_shards(url, tmp_path / "ssd"),
        lambda: ArrivingShards(url, tmp_path / "ssd"),
        lambda: CocoFolder(url, photos.annotations),
        lambda: check_dataset(url, photos.annotations),
        lambda: check_dataset(photos.images, f"{url}/a.json"),
    ):
        with pytest.raises(ColabUtilsError, match=url) as caught:
            call()
        assert not isinstance(caught.value, DriveLostError)


def test_a_bucket_is_never_made(s3, photos, local):
    for call in (
        lambda: write_shards(photos.images, photos.annotations, shards="s3://typo/x", **SETTINGS),
        lambda: copy_shards(local, "s3://typo/x"),
        lambda: CheckpointFolder("s3://typo/x").prepare(anew=False),
    ):
        with pytest.raises(ColabUtilsError, match="its bucket or folder is not there"):
            call()
    assert not open_place("s3://typo").exists()


def test_an_s3_server_that_goes_is_told(s3, local, tmp_path):
    copy_shards(local, S3)
    s3.kill()
    s3.wait()
    with pytest.raises(DriveLostError, match=r"the server failed .*Connect"):
        copy_shards(S3, tmp_path / "ssd")


def test_credentials_that_are_missing_are_told(s3, local, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    forget_servers()
    with pytest.raises(ColabUtilsError, match=r"NoCredentials.*Look at .*credentials") as caught:
        copy_shards(local, S3)
    assert not isinstance(caught.value, DriveLostError)


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
