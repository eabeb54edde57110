"""The benchmark of copying: both ways give the same files, and the table says what was measured."""

from benchmarks import copying
from colab_utils.shards.index import read_index


def test_both_ways_give_the_same_files(tmp_path):
    source = copying.make_shards(tmp_path / "drive", count=2, tar_bytes=3000)
    for name, copy in copying.WAYS.items():
        copy(source, tmp_path / name)
        for path in source.iterdir():
            assert (tmp_path / name / path.name).read_bytes() == path.read_bytes()
    assert read_index(tmp_path / "copy_shards").bytes == 2 * (3000 + copying.ARRAYS_BYTES)


def test_the_table_compares_each_way_with_one_stream():
    rates = {
        ("bad", 3, "one stream"): [2e6, 3e6, 4e6],
        ("bad", 3, "copy_shards"): [6e6],
    }
    rows = copying.tabulate_rates(rates).splitlines()
    assert rows[1].split("  ")[-1].strip() == "1.00"
    assert "3.0 [2.0-4.0]" in rows[1]
    assert rows[2].split("  ")[-1].strip() == "2.00"


def test_the_command_prints_a_table(capsys, monkeypatch):
    monkeypatch.setattr(copying, "SIZES", {3: 1})
    monkeypatch.setattr(copying, "PROFILES", ("typical",))
    assert copying.main(["--repeats", "1", "--scale", "0.001"]) == 0
    assert "times one stream" in capsys.readouterr().out
