"""The benchmark of lighter models: what is smaller is smaller, and what is pruned stays pruned
while it trains.
"""

import pytest
import torch

from benchmarks import models
from benchmarks.models import LIGHT_MODEL, PRUNED, SMALL_HEADS, measure_model, tabulate_runs
from colab_utils.shards.write import write_shards
from colab_utils.training.evaluate import AveragePrecision


@pytest.fixture
def work(tiny_dataset, tmp_path):
    for part in ("train", "val"):
        write_shards(
            tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path / part, workers=1
        )
    return tmp_path


def test_models_are_trained_evaluated_and_timed(work, monkeypatch, one_thread):
    monkeypatch.setattr(models, "TIMED", 1)
    measured = AveragePrecision(0.3, 0.2, 0.6, 0.5, 12)
    monkeypatch.setattr(models, "evaluate", lambda model, dataset, device: measured)
    pruned = []
    real = models.prune_weights

    def note(model):
        real(model)
        pruned.append(model)

    monkeypatch.setattr(models, "prune_weights", note)
    rows = [
        {
            "model": name,
            "seed": "0",
            **measure_model(name, work, steps=2, seed=0, min_size=64, device="cpu"),
        }
        for name in (LIGHT_MODEL, SMALL_HEADS, PRUNED)
    ]
    light, small, half = rows
    # In the pruned model every weight has a mask, too.
    assert small["weights_mb"] < light["weights_mb"] < half["weights_mb"]
    assert small["kept_mb"] < light["kept_mb"]
    assert {(row["box_ap"], row["mask_ap"]) for row in rows} == {(0.3, 0.2)}
    weights = torch.cat(
        [layer.weight.flatten() for layer in pruned[0].modules() if hasattr(layer, "weight_mask")]
    )
    assert (weights == 0).float().mean() == pytest.approx(0.5, abs=0.01)
    assert "not trained" in tabulate_runs(
        [{key: row[key] for key in row if "ap" not in key} for row in rows]
    )
