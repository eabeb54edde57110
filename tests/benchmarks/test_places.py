"""The benchmark of buckets: its table says what was measured."""

from benchmarks import places


def test_the_table_has_medians_and_their_ratio_to_the_best_of_fsspec():
    seconds = {
        "fsspec get": [4.0, 2.0, 8.0],
        "fsspec cat_file": [5.0, 5.0, 5.0],
        "copy_shards": [1.0, 2.0, 2.0],
    }
    rows = places.tabulate(seconds, seconds, 400_000_000).splitlines()
    assert rows[1].split()[-4:] == ["100.0", "50.0-200.0", "1.00", "4.00"]
    assert rows[3].split()[-4:] == ["200.0", "200.0-400.0", "2.00", "2.00"]
