"""Pools and their futures."""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from colab_utils.processes import pop_done


def test_futures_are_asked_without_their_lock():
    future = Future()
    # Ctrl-C while this thread has it would leave it held
    with ThreadPoolExecutor(1) as pool, future._condition:
        assert pool.submit(pop_done, {future}).result(timeout=30) == set()
