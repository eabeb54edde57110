"""The benchmark of Dask: sound data, and a table of what was measured."""

import pytest

from benchmarks import engines
from colab_utils.data.coco import read_coco
from colab_utils.errors import ColabUtilsError


def test_shards_of_repeated_images_are_written_by_this_machine(tiny_dataset, tmp_path):
    data = tmp_path / "data"
    image_bytes = 2.5 * sum(path.stat().st_size for path in tiny_dataset.images.iterdir())
    engines.repeat_images(tiny_dataset.images, tiny_dataset.annotations, data, image_bytes)
    count = len(read_coco(data / "annotations.json"))
    assert 2 * tiny_dataset.n < count < 3 * tiny_dataset.n
    rows = [
        {
            "way": engines.LOCAL,
            "repeat": 0,
            **engines.measure_way(engines.LOCAL, data, tmp_path, settings),
        }
        for settings in ({"shard_mb": 0.02}, {"shard_mb": 0.02})
    ]
    assert rows[0]["files"] == rows[1]["files"]
    assert rows[0]["full_shards"] > 0
    assert rows[0]["cpu_s"] > 0
    assert "full shards" in engines.tabulate_runs(rows)


def make_row(way, cpu_s, idle_cpu_s, files, repeat=0):
    return {
        "way": way,
        "repeat": repeat,
        "cpu_s": cpu_s,
        "start_cpu_s": 1.0,
        "idle_cpu_s": idle_cpu_s,
        "full_shards": 4,
        "files": files,
    }


def test_the_table_has_the_ratio_of_each_repeat():
    files = {"shard-000000.tar": (10, "ab")}
    rows = [
        make_row(engines.LOCAL, 9.0, 0.0, files),
        make_row(engines.DASK, 10.0, 1.0, files),
        make_row(engines.DASK_SLOW_CLOCKS, 9.0, 0.0, files),
        make_row(engines.LOCAL, 8.0, 0.0, files, repeat=1),
        make_row(engines.DASK, 10.0, 2.0, files, repeat=1),
        make_row(engines.LOCAL, 9.5, 0.0, files, repeat=2),
        make_row(engines.DASK, 10.0, 0.5, files, repeat=2),
    ]
    text = engines.tabulate_runs(rows)
    assert "of dask.distributed: 0.900 [0.800-0.950]" in text
    assert "idle cluster takes: 1.000 [1.000-1.000]" in text
    assert "of dask.distributed, slow clocks: 1.000 [1.000-1.000]" in text


def test_other_bytes_are_an_error_and_no_figure():
    rows = [
        make_row(engines.LOCAL, 9.0, 0.0, {"shard-000000.tar": (10, "ab")}),
        make_row(engines.DASK, 9.0, 0.0, {"shard-000000.tar": (10, "cd")}),
    ]
    with pytest.raises(ColabUtilsError, match="wrote other bytes"):
        engines.tabulate_runs(rows)
