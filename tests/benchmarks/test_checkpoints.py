"""The benchmark of checkpoints: it counts those that were written, and takes the difference."""

from benchmarks.checkpoints import MODELS, tabulate_runs, time_run
from colab_utils.shards.write import write_shards


def test_checkpoints_are_written_and_counted(tiny_dataset, tmp_path, one_thread):
    shards = tmp_path / "shards"
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=shards, workers=1)
    every = time_run(MODELS[1], "every step", tmp_path, tmp_path, 1)
    assert every["checkpoints"] == 2
    assert every["bytes"] > 10e6
    assert every["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    last = {**every, "seconds": every["seconds"] - 3, "checkpoints": 1}
    rows = [
        {"model": "m", "way": "last alone", **last},
        {"model": "m", "way": "every step", **every},
    ]
    assert "3.00 [3.00-3.00]" in tabulate_runs(rows)
