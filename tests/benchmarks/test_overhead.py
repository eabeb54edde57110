"""What `watch` costs, on epochs of a few batches."""

import json

from benchmarks import overhead


def test_the_cost_of_watch_is_measured(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.setattr(overhead, "WORKERS", (0,))
    path = tmp_path / "overhead.json"
    settings = ["--pairs", "2", "--batches", "4", "--step-ms", "1"]
    assert overhead.main(["--json", str(path), *settings]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [row["workers"] for row in rows] == [0, 0]
    for row in rows:
        for way in ("bare", "watched"):
            assert row[way]["wall_s"] > row[way]["outside_s"] > 0
    assert "counted" in capsys.readouterr().out
