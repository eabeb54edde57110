"""Shards at ``hf://``, on a stand-in for the Hugging Face Hub: `make test-formats` runs this."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from tests.hub_server import HubServer
from tests.snapshots import snapshot

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("huggingface_hub") is None,
    reason="no huggingface_hub: make test-formats installs it",
)
URL = "hf://datasets/me/data"


@pytest.fixture
def hub(tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    with HubServer(folder, tmp_path / "none") as server:
        yield server


def run(hub, *arguments):
    """Run a command in a process of its own, since huggingface_hub reads its address once."""
    return subprocess.run(
        [sys.executable, "-m", "colab_utils", *map(str, arguments)],
        env={**os.environ, **hub.environment},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_shards_are_written_there_verified_and_copied(hub, photos, local, tmp_path):
    shutil.copytree(photos.images, hub.folder / "photos")
    shutil.copy(photos.annotations, hub.folder / "photos.json")
    source = ["--images", f"{URL}/photos", "--annotations", f"{URL}/photos.json"]
    options = ["--shards", f"{URL}/shards", "--shard-mb", 0.05, "--storage", "keep"]
    done = run(hub, "preprocess", *source, *options)
    assert done.returncode == 0, done.stderr
    assert snapshot(hub.folder / "shards") == snapshot(local)
    done = run(hub, "verify", "--shards", f"{URL}/shards")
    assert done.returncode == 0, done.stderr
    assert "all complete" in done.stdout
    # Requests that fail are made again.
    hub.failures = 3
    done = run(hub, "copy", "--shards", f"{URL}/shards", "--to", tmp_path / "ssd")
    assert done.returncode == 0, done.stderr
    assert hub.failures == 0
    assert snapshot(tmp_path / "ssd") == snapshot(local)


@pytest.mark.parametrize("url", [f"{URL}/none", "hf://datasets/you/none/shards"])
def test_what_is_not_there_is_said_in_one_line(hub, url):
    done = run(hub, "verify", "--shards", url)
    assert done.returncode == 2
    assert f"There are no shards in {url}" in done.stderr
    assert done.stderr.count("\n") == 1
