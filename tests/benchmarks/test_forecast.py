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


def test_the_best_fix_is_counted_where_its_forecast_was_the_highest():
    def make_rows(step_ms, *rates):
        case = {"data": "kept", "profile": "bad", "workers": 1, "step_ms": step_ms}
        return [{**case, "forecast": forecast, "measured": rate} for forecast, rate in rates]

    right = make_rows(20, (5.0, 6.0), (4.0, 3.0))
    near = make_rows(100, (5.0, 5.8), (4.0, 6.0))
    wrong = make_rows(400, (5.0, 4.0), (4.0, 6.0))
    assert count_best_first([*right, *near, *wrong]) == (2, 3)
