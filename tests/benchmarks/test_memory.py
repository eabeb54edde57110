"""What a step holds, counted for a tiny model."""

from benchmarks.memory import PACKED, PARTS, TORCHVISION, measure_step, tabulate_runs
from benchmarks.step import make_model, prepare_batches
from tests.tiny_model import TINY_MODEL


def test_a_step_in_two_parts_holds_less(tiny_dataset, one_thread):
    model = make_model(TINY_MODEL, num_classes=7, min_size=64)
    batch = prepare_batches(tiny_dataset, batch_size=2)[0]
    ways = (TORCHVISION, PACKED, PARTS)
    rows = [
        {"objects": 7, "way": way, **measure_step(model, batch, "cpu", way=way)} for way in ways
    ]
    assert rows[2]["parts"] == 2
    assert 0 < rows[2]["peak_mb"] < rows[1]["peak_mb"]
    ratio = rows[2]["peak_mb"] / rows[0]["peak_mb"]
    assert f"{ratio:.2f}" in tabulate_runs(rows)
