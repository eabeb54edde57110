"""What every module needs of the machine."""

from __future__ import annotations

import multiprocessing
import os
import signal
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from colab_utils import runtime
from colab_utils.errors import ColabUtilsError


def test_another_system_than_linux_is_told_so(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(
        ColabUtilsError,
        match="expected Linux to share memory, found win32: use Colab, a Linux machine",
    ):
        runtime.require_linux("share memory")


def test_one_progress_bar_at_a_time(monkeypatch, capsys):
    monkeypatch.setattr(runtime, "is_watched", lambda: True)
    with runtime.show_progress("outer", total=2) as outer:
        # in notebooks it would leave a stale line
        with runtime.show_progress("inner", total=3) as inner:
            inner.update(3)
            assert inner.disable
        outer.update(2)
    with runtime.show_progress("next", total=1) as after:
        after.update(1)
    shown = capsys.readouterr().err
    assert "outer: 100%" in shown
    assert "next: 100%" in shown
    assert "inner" not in shown


@pytest.mark.timeout(60)
def test_a_process_that_is_killed_while_it_draws_stops_no_later_bar(monkeypatch):
    monkeypatch.setattr(runtime, "is_watched", lambda: True)
    with runtime.show_progress("first", total=1) as bar:

        def draw():
            bar.get_lock().acquire()
            os.kill(os.getpid(), signal.SIGKILL)

        process = multiprocessing.get_context("fork").Process(target=draw)
        process.start()
        process.join()
        bar.update(1)
    with runtime.show_progress("second", total=1) as later:
        later.update(1)
    assert process.exitcode == -signal.SIGKILL


def test_futures_are_asked_without_their_lock():
    future = Future()
    # Ctrl-C while this thread has it would leave it held
    with ThreadPoolExecutor(1) as pool, future._condition:
        assert pool.submit(runtime.pop_done, {future}).result(timeout=30) == set()
