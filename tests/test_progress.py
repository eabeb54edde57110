"""Progress bars: one at a time, and in spite of processes that are killed."""

from __future__ import annotations

import multiprocessing
import os
import signal

import pytest

from colab_utils import progress
from colab_utils.progress import show_progress


def test_one_progress_bar_at_a_time(monkeypatch, capsys):
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    with show_progress("outer", total=2) as outer:
        # In notebooks an inner bar would leave a stale line.
        with show_progress("inner", total=3) as inner:
            inner.update(3)
            assert inner.disable
        outer.update(2)
    with show_progress("next", total=1) as after:
        after.update(1)
    shown = capsys.readouterr().err
    assert "outer: 100%" in shown
    assert "next: 100%" in shown
    assert "inner" not in shown


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_while_it_draws_stops_no_later_bar(monkeypatch):
    monkeypatch.setattr(progress, "is_watched", lambda: True)
    with show_progress("first", total=1) as bar:

        def draw():
            bar.get_lock().acquire()
            os.kill(os.getpid(), signal.SIGKILL)

        process = multiprocessing.get_context("fork").Process(target=draw)
        process.start()
        process.join()
        bar.update(1)
    with show_progress("second", total=1) as later:
        later.update(1)
    assert process.exitcode == -signal.SIGKILL
