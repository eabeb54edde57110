"""The benchmark of checkpoints: it counts those that were written, and takes the difference within
a repeat.
"""

from benchmarks.checkpoints import MODELS, tabulate_runs, time_run
from colab_utils.shards.write import write_shards


def test_checkpoints_are_written_and_counted(tiny_dataset, tmp_path, one_thread):
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=tmp_path / "shards", workers=1
    )
    found = time_run(MODELS[1], "every step", tmp_path, tmp_path, 1)
    assert found["checkpoints"] == 2
    assert found["bytes"] > 10e6
    assert found["seconds"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["shards"]


def test_the_table_takes_differences_within_a_repeat():
    rows = [
        {"model": "m", "way": way, "seconds": seconds, "checkpoints": checkpoints, "bytes": 2e6}
        for drift in (0, 5)
        for way, seconds, checkpoints in (
            ("last alone", 3 + drift, 1),
            ("every step", 6 + drift, 7),
        )
    ]
    assert "0.50 [0.50-0.50]" in tabulate_runs(rows)
    assert "0.83%" in tabulate_runs(rows)
    assert "5.00%" in tabulate_runs(rows)
    assert tabulate_runs([]) == "nothing was measured"
