"""What the tests of shards share: a dataset that may be spoiled, and a folder to write to."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture
def dataset(tiny_dataset, tmp_path):
    """A copy of the tiny dataset that a test may spoil: its images and its JSON."""
    shutil.copytree(tiny_dataset.images, tmp_path / "images")
    shutil.copy(tiny_dataset.annotations, tmp_path / "annotations.json")
    return tmp_path / "images", tmp_path / "annotations.json"


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "shards"
