"""Training from shards beside training on batches that lie ready."""

import pytest

from benchmarks.feeding import WAYS, tabulate_runs, time_way
from benchmarks.step import make_model
from colab_utils.shards.write import write_shards
from tests.tiny_model import TINY_MODEL


@pytest.mark.parametrize("way", WAYS)
def test_both_ways_train(way, tiny_dataset, tmp_path, one_thread):
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path, workers=1)
    model = make_model(TINY_MODEL, num_classes=100, min_size=64)
    found = time_way(way, model, tmp_path, device="cpu", batch_size=1, batches=1)
    assert found["images_per_second"] > 0


def test_the_table_compares_within_a_repeat():
    rows = [
        {"data": "kept", "way": way, "images_per_second": rate * drift}
        for drift in (1, 2)
        for way, rate in zip(WAYS, (10, 9.9), strict=True)
    ]
    assert "0.99 [0.99-0.99]" in tabulate_runs(rows)
