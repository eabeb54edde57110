"""What `watch` costs, on epochs of a few batches; and what other tools say, read from their
output.
"""

import json

from benchmarks import overhead
from benchmarks.causes.peers import read_gpuprof, read_traceml


def test_the_cost_of_watch_is_measured(tmp_path, monkeypatch, capsys, one_thread):
    monkeypatch.setattr(overhead, "WORKERS", (0,))
    path = tmp_path / "overhead.json"
    assert (
        overhead.main(["--json", str(path), "--pairs", "2", "--batches", "4", "--step-ms", "1"])
        == 0
    )
    rows = json.loads(path.read_text())["rows"]
    assert [row["workers"] for row in rows] == [0, 0]
    for row in rows:
        for way in ("bare", "watched"):
            assert row[way]["wall_s"] > row[way]["outside_s"] > 0
    assert "counted" in capsys.readouterr().out


def test_verdict_and_advice_of_other_tools():
    printed = (
        "|  Verdict: INPUT-BOUND  (CRITICAL)   |\n|  Why: it waits.  |\n|  Next: Increase "
        "workers.   |\n"
    )
    assert read_traceml(printed) == ("INPUT-BOUND  (CRITICAL)", "Increase workers.")
    assert read_traceml("") == ("", "")
    printed = "  [HIGH]  the loader is slow\n          Use more workers,\n          or fewer.\n"
    assert read_gpuprof(printed) == ("the loader is slow", "Use more workers, or fewer.")
    assert read_gpuprof("") == ("", "")
