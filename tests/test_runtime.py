"""What every module needs of the machine."""

from __future__ import annotations

from colab_utils import runtime


def test_one_progress_bar_at_a_time(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "is_watched", lambda: True)
    with runtime.show_progress("outer", total=2) as outer:
        with runtime.show_progress("inner", total=3) as inner:  # in notebooks it would leave a stale line
            inner.update(3)
            assert inner.disable
        outer.update(2)
    with runtime.show_progress("next", total=1) as after:
        after.update(1)
    shown = capsys.readouterr().err
    assert "outer: 100%" in shown
    assert "next: 100%" in shown
    assert "inner" not in shown
