"""The benchmark of many files: its dataset is one, and both tasks run in another process."""

import json

import pytest

from benchmarks import many_files
from colab_utils.data.checks import check_dataset


@pytest.fixture
def repeated(tiny_dataset, tmp_path):
    folder = tmp_path / "data"
    many_files.repeat_images(tiny_dataset.images, tiny_dataset.annotations, folder, 40)
    return folder


def test_the_repeated_dataset_has_no_problem(repeated):
    report = check_dataset(repeated / "images", repeated / "annotations.json")
    assert report.images == 40
    assert len(list((repeated / "images").iterdir())) == 40
    ids = [item["id"] for item in json.loads((repeated / "annotations.json").read_text())["images"]]
    assert len(set(ids)) == 40


def test_a_task_that_fails_is_told(repeated):
    assert many_files.time_task(many_files.NEW, "check_dataset", "none", repeated) > 0
    with pytest.raises(RuntimeError, match="Drive profile"):
        many_files.time_task(many_files.NEW, "check_dataset", "no such profile", repeated)


def test_the_table_divides_the_old_seconds_by_the_new():
    times = {
        ("check_dataset", "old"): [8.0],
        ("check_dataset", "new"): [2.0],
        ("write_shards", "old"): [9.0, 8.0, 7.0],
        ("write_shards", "new"): [1.0],
    }
    rows = many_files.tabulate_times(times).splitlines()
    assert rows[1].endswith("4.0")
    assert rows[2].endswith("8.0")
    assert "8.0 [7.0-9.0]" in rows[2]
