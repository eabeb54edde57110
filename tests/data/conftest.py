from concurrent.futures import ThreadPoolExecutor

import pytest


@pytest.fixture
def no_fork(monkeypatch):
    """Images are looked at in a thread: to fork takes longer than a dozen of them."""
    monkeypatch.setattr("colab_utils.processes.fork_pool", _start_threads)


def _start_threads(workers, join, *shared):
    return ThreadPoolExecutor(workers, initializer=join, initargs=shared)
