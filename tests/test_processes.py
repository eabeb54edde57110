"""Pools, threads and their futures, and what is said where the system starts no more of them."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
from concurrent.futures import Future

import psutil
import pytest

from colab_utils import processes
from colab_utils.processes import (
    ThreadPool,
    defer_interrupt,
    pop_done,
)
from tests.snapshots import snapshot

# Folders of packages, for a process of its own.
PATHS = os.pathsep.join(filter(None, sys.path))
CHECK = ["check"]
PREPROCESS = ["preprocess", "--shards", "new", "--workers", "2"]


def count_held(futures):
    held = 0
    for future in futures:
        if future._condition.acquire(blocking=False):
            future._condition.release()
        else:
            held += 1
    return held


def pop_for_ever(futures, timer):
    timer.start()
    while True:
        pop_done(futures)


def test_ctrl_c_leaves_no_lock_of_a_future_held(monkeypatch):
    """It comes at any moment of the wait, and after the wait it is told."""
    monkeypatch.setattr(processes, "_WAIT_S", 0.0)
    futures = {Future() for _ in range(256)}
    handler = signal.getsignal(signal.SIGINT)
    chance = random.Random(0)
    for _ in range(100):
        timer = threading.Timer(chance.uniform(0, 0.005), os.kill, (os.getpid(), signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            pop_for_ever(futures, timer)
        timer.join()
        # A thread may take its own lock twice.
        with ThreadPool(1) as pool:
            assert pool.submit(count_held, futures).result(timeout=30) == 0
    assert signal.getsignal(signal.SIGINT) is handler
    assert len(futures) == 256


def interrupt_and_fail():
    with defer_interrupt():
        signal.raise_signal(signal.SIGINT)
        raise OSError(5, "Input/output error")


def test_ctrl_c_counts_if_the_block_raises_an_error():
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt) as interrupt:
        interrupt_and_fail()
    assert isinstance(interrupt.value.__context__, OSError)
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.fixture
def user():
    """A user of our own without processes, as no limit of them binds root."""
    if os.getuid() != 0 or not shutil.which("setpriv"):
        pytest.skip("only root can run a command as a user who may start few processes")
    return 40_000 + os.getpid() % 20_000


def run_limited(command, folder, kind, value, user=None):
    """Run a command with few processes, as another user who can read what root can."""
    prefix = []
    if user is not None:
        powers = "-all,+dac_override"
        options = f"--inh-caps={powers} --ambient-caps={powers} --bounding-set={powers}"
        prefix = ["setpriv", f"--reuid={user}", *options.split()]
    # The libraries' own threads would take what is left.
    threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    return subprocess.run(
        [*prefix, sys.executable, "-m", "colab_utils", *command],
        cwd=folder,
        env={**os.environ, **threads, "PYTHONPATH": PATHS},
        preexec_fn=lambda: resource.setrlimit(kind, (value, value)),
        capture_output=True,
        text=True,
        timeout=60,
    )


def assert_refused(done, words):
    """The command says in one line which limit is reached.

    Its notes do not count, and what Matplotlib says, which finds no folder of this user.
    """
    [line] = [
        line
        for line in done.stderr.splitlines()
        if not line.startswith("note: ") and "matplotlib" not in line.lower()
    ]
    assert line.startswith("error: A limit of the system is reached: ")
    assert words in line
    assert done.returncode == 2


@pytest.fixture
def data(tiny_dataset):
    return ["--images", str(tiny_dataset.images), "--annotations", str(tiny_dataset.annotations)]


# With two, the second process of a pool cannot be forked; with the others, a thread of it.
@pytest.mark.parametrize(
    ("command", "value"),
    [(CHECK, 2), (CHECK, 4), (PREPROCESS, 1), (PREPROCESS, 4)],
)
def test_too_few_processes_are_said_in_one_line(command, value, user, data, tmp_path):
    done = run_limited([*command, *data], tmp_path, resource.RLIMIT_NPROC, value, user)
    assert_refused(done, "`ulimit -u`")
    users = [process.info["uids"] for process in psutil.process_iter(["uids"])]
    assert user not in [uids.real for uids in users if uids]
    assert not (tmp_path / "new").exists()


def test_a_copy_goes_on_with_the_threads_that_it_gets(user, tiny_shards, tmp_path):
    command = ["copy", "--shards", str(tiny_shards), "--to", str(tmp_path / "copy")]
    done = run_limited(command, tmp_path, resource.RLIMIT_NPROC, 3, user)
    assert done.returncode == 0, done.stderr
    assert snapshot(tmp_path / "copy") == snapshot(tiny_shards)


@pytest.mark.parametrize("command", [CHECK, PREPROCESS])
def test_too_few_open_files_are_said_in_one_line(command, data, tmp_path):
    done = run_limited([*command, *data], tmp_path, resource.RLIMIT_NOFILE, 6)
    assert_refused(done, "Too many open files. Raise the limit of open files (`ulimit -n 4096`")


def test_workers_end_when_their_parent_is_killed():
    code = """
import os, time
from colab_utils.processes import fork_pool
pool = fork_pool(3)
print(*[process.pid for process in pool._processes.values()], flush=True)
pool.submit(time.sleep, 600)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": PATHS},
    )
    with parent:
        workers = [psutil.Process(int(word)) for word in parent.stdout.readline().split()]
        assert len(workers) == 3
        assert all(worker.is_running() for worker in workers)
        parent.kill()
    _, alive = psutil.wait_procs(workers, timeout=30)
    # Nobody may have waited for a worker that has ended.
    assert [worker for worker in alive if worker.status() != psutil.STATUS_ZOMBIE] == []


def test_a_worker_whose_parent_died_before_it_looked_ends(monkeypatch):
    class Dead:
        def __init__(self):
            self.sentinel, self.other = os.pipe()

        def is_alive(self):
            return False

    monkeypatch.setattr(processes.multiprocessing, "parent_process", Dead)
    pid = os.fork()
    if pid == 0:
        processes.end_with_parent()
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
