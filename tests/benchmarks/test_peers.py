"""Other libraries as strategies: the record they carry, and each where it is installed."""

import gc

import pytest
import torch

from benchmarks.peers import pack_record, unpack_record
from colab_utils.comparison.compare import compare
from colab_utils.loading.dataset import ShardDataset

MODULES = {"webdataset": "webdataset", "litdata": "litdata", "mosaicml-streaming": "streaming", "tf_data": "tensorflow"}


def test_a_record_is_the_sample(tiny_shards):
    dataset = ShardDataset(tiny_shards)
    for index in range(len(dataset)):
        image, target = dataset[index]
        found_image, found = unpack_record(pack_record(dataset, index))
        assert torch.equal(found_image, image)
        assert found["image_id"] == target["image_id"]
        for name in ("boxes", "labels", "area", "masks", "iscrowd"):
            assert torch.equal(found[name], target[name]), name


@pytest.fixture(autouse=True)
def no_workers_left():
    """Some libraries' loaders end their workers when Python collects them, and not before."""
    yield
    gc.collect()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", list(MODULES))
def test_each_library_gives_the_same_samples(tiny_dataset, tmp_path, name):
    pytest.importorskip(MODULES[name])
    found = compare(
        tiny_dataset.images, tiny_dataset.annotations, folder=tmp_path, strategies=[name], drive_profile="none",
        step_ms=2, batch_size=2, batches=2, repeats=1, workers=1, timeline_s=0.1, forecast_s=0,
    )  # fmt: skip
    (row,) = found.strategies
    assert row.comparable, row.difference
    assert row.images_per_second > 0
