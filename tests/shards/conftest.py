"""What the tests of shards share: datasets, shards and a folder to write to."""

from __future__ import annotations

import shutil

import pytest

from colab_utils.course.sample_data import make_dataset
from colab_utils.shards.write import write_shards


@pytest.fixture
def dataset(tiny_dataset, tmp_path):
    """A copy of the tiny dataset that a test may spoil: its images and its JSON."""
    shutil.copytree(tiny_dataset.images, tmp_path / "images")
    shutil.copy(tiny_dataset.annotations, tmp_path / "annotations.json")
    return tmp_path / "images", tmp_path / "annotations.json"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shards"


@pytest.fixture(scope="session")
def photos(tmp_path_factory):
    """Thirty small pictures, which make eight shards of 0.05 MB: read them, never change them."""
    folder = tmp_path_factory.mktemp("photos")
    return make_dataset(folder, n=30, width=160, height=128, objects=(1, 4), workers=1)


@pytest.fixture(scope="module")
def sixty(tmp_path_factory):
    """Sixty small pictures, which make 15 shards of 0.05 MB. A module may slow them down."""
    folder = tmp_path_factory.mktemp("sixty")
    return make_dataset(folder, n=60, width=160, height=128, objects=(1, 4), workers=1)


@pytest.fixture(scope="session")
def local(photos, tmp_path_factory):
    """Their shards in a folder: read them, never change them."""
    folder = tmp_path_factory.mktemp("local") / "shards"
    write_shards(
        photos.images,
        photos.annotations,
        shards=folder,
        workers=1,
        shard_mb=0.05,
        storage="keep",
    )
    return folder
