"""What the tests of loading share."""

from __future__ import annotations

import pytest

from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader


@pytest.fixture
def make(request):
    """``make_loader`` of small packed batches, that ends its workers with the test."""

    def build(dataset, **options):
        small = {"batch_size": 2, "workers": 0, "deliver": "packed"}
        loader = make_loader(dataset, **{**small, **options})
        request.addfinalizer(loader.close)
        return loader

    return build


@pytest.fixture
def ssd(tmp_path):
    return tmp_path / "ssd"


@pytest.fixture
def dataset(tiny_shards):
    """The tiny dataset, from shards."""
    return ShardDataset(tiny_shards)


@pytest.fixture
def loose(tiny_dataset):
    """The tiny dataset, from loose files."""
    return CocoFolder(tiny_dataset.images, tiny_dataset.annotations)
