"""Two epochs beside a step, while shards are copied, on a dozen tiny images."""

from benchmarks.arrival import run_once, tabulate_runs
from colab_utils.shards.write import write_shards


def test_two_epochs_while_shards_are_copied(tiny_dataset, tmp_path):
    shards = tmp_path / "shards"
    write_shards(tiny_dataset.images, tiny_dataset.annotations, shards=shards, workers=1)
    way = "train while it is copied"
    row = run_once(way, tiny_dataset, shards, "fast", 1)
    assert 0 < row["first batch"] < row["first epoch"]
    assert row["second epoch"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]
    assert way in tabulate_runs([{"profile": "fast", "way": way, **row}])
