"""An image evaluated by torchvision's references and by ours."""

import pytest

from benchmarks.evaluating import WAYS, check_results, measure_way, tabulate_runs
from benchmarks.step import make_model
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.shards.write import write_shards
from tests.tiny_model import TINY_MODEL


def test_the_ways_are_compared_and_measured(tiny_dataset, tmp_path, one_thread):
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path, workers=1)
    dataset = ShardDataset(tmp_path, contiguous_labels=True)
    model = make_model(TINY_MODEL, num_classes=dataset.num_classes, min_size=64).eval()
    model.roi_heads.score_thresh = 1.0
    with pytest.raises(ColabUtilsError, match="found 0 of 0 the same"):
        check_results(model, dataset, "cpu")
    model.roi_heads.score_thresh = 0.0
    check_results(model, dataset, "cpu")
    rows = [
        {"data": "kept", "way": way, **measure_way(way, model, dataset, device="cpu", images=1)}
        for way in WAYS
    ]
    assert all(row["image_ms"] >= row["own_ms"] > 0 for row in rows)
    assert all(row["peak_mb"] > 0 for row in rows)
    assert "in the training process" in tabulate_runs(rows)
