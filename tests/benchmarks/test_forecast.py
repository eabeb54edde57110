"""A forecast beside what was then measured, on a dozen tiny images."""

import json

import pytest

from benchmarks.command import run_to_end
from benchmarks.forecast import Case, count_best_first, run_case, tabulate_errors


@pytest.mark.filterwarnings("ignore")
def test_forecasts_stand_beside_what_was_measured(tiny_dataset, one_thread):
    case = Case("builtin", "typical", 0, 1)
    rows = run_case(case, tiny_dataset.images, tiny_dataset.annotations, seconds=0.3)
    assert rows
    for row in rows:
        assert row["error"] == pytest.approx(row["forecast"] / row["measured"] - 1)
    assert "all" in tabulate_errors(rows)
    assert count_best_first(rows)[1] == 1


def test_what_is_known_is_kept_from_the_first_row_on(tmp_path):
    path = tmp_path / "rows.json"
    run_to_end([{"case": 3}], path, len, known=[{"case": 1}])
    assert json.loads(path.read_text())["rows"] == [{"case": 1}, {"case": 3}]
