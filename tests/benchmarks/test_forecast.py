"""A forecast beside what was then measured, on a dozen tiny images."""

import pytest

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
