"""The lock of a folder's one writer, and the leftovers of those that were killed."""

from __future__ import annotations

import errno
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.files import Store, open_store
from colab_utils.machine import find_host
from colab_utils.shards import lock as module
from colab_utils.shards.lock import hold_folder, remove_leftovers


def test_leftovers_of_dead_processes_go_and_nothing_else(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "pass"])
    process.wait()
    dead = f"{find_host()}-{process.pid}-1.part"
    alive = f"{find_host()}-{os.getppid()}-1.part"
    # The process of another machine has a number that none here has.
    elsewhere = "0123abcd4026531836-999999999-1.part"
    ours = ["shard-000001.tar", "index.json", "train-index.json", "begun.txt", "best-00000030.pt"]
    gone = [f".{name}.{dead}" for name in ours]
    kept = [
        f".shard-000001.arrays.{alive}",
        f".shard-000002.tar.{elsewhere}",
        ".checkpoint-00000030.pt.12-12.part",
        ".my-notes.12.part",
        f"shard-000001.tar.{dead}",
        ".shard-000001.tar.part",
    ]
    for name in gone + kept:
        (tmp_path / name).touch()
    # What another machine writes is left for an hour.
    abandoned = tmp_path / f".shard-000003.tar.{elsewhere}"
    abandoned.touch()
    os.utime(abandoned, (time.time() - 3700,) * 2)
    remove_leftovers(open_store(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(kept)


WRITE_IN_PART = """
import multiprocessing, os, sys, time
from pathlib import Path
from colab_utils.files import name_temporary
from colab_utils.shards.lock import hold_folder
def work():
    print(os.getpid(), flush=True)
    time.sleep(60)
with hold_folder(Path(sys.argv[1])):
    name_temporary(Path(sys.argv[1], "checkpoint-00000001.pt")).touch()
    multiprocessing.get_context("fork").Process(target=work).start()
    time.sleep(60)
"""


def assert_refused(folder, words=""):
    """Another process or machine writes there; return what is said."""
    with (
        pytest.raises(ColabUtilsError, match=f"Another writer is at work in .*{words}") as error,
        hold_folder(folder),
    ):
        pass
    return str(error.value)


def write_lock(folder, name="here", host=None):
    """The lock of a process that ended on this machine, or is on another one."""
    folder.mkdir(exist_ok=True)
    (folder / "writer.txt").write_text(
        f"process 1 on {name} ({host or f'{find_host()} {os.getuid()}'})"
    )


def contend(barrier, folder, rounds, results):
    """Ask for the lock at the same moment as other processes, and keep it until all have asked,
    round after round.
    """
    for n in range(rounds):
        barrier.wait(60)
        try:
            with hold_folder(folder / str(n)):
                barrier.wait(60)
                results.put((n, ""))
        except ColabUtilsError as error:
            barrier.wait(60)
            results.put((n, str(error)))


def test_one_of_several_processes_gets_the_lock(tmp_path):
    rounds = 30
    count = 3
    context = multiprocessing.get_context("fork")
    for n in range(0, rounds, 2):
        # The lock of a killed process.
        write_lock(tmp_path / str(n))
    barrier = context.Barrier(count)
    results = context.Queue()
    arguments = (barrier, tmp_path, rounds, results)
    processes = [context.Process(target=contend, args=arguments) for _ in range(count)]
    for process in processes:
        process.start()
    outcomes = [results.get(timeout=60) for _ in range(count * rounds)]
    for process in processes:
        process.join()
    for n in range(rounds):
        refused = [error for number, error in outcomes if number == n and error]
        assert len(refused) == count - 1
        assert all(re.fullmatch("Another writer is at work in .*", error) for error in refused)
        assert not (tmp_path / str(n) / "writer.txt").exists()


def test_the_lock_of_another_machine_counts_for_a_while(tmp_path):
    write_lock(tmp_path, "colab-2", "boot 0")
    assert_refused(tmp_path, r"\('process 1 on colab-2")
    assert (tmp_path / "writer.txt").exists()
    # The writer has given no sign of life for too long.
    os.utime(tmp_path / "writer.txt", (time.time() - 101,) * 2)
    with hold_folder(tmp_path):
        assert os.uname().nodename in (tmp_path / "writer.txt").read_text()
    assert not list(tmp_path.iterdir())


def test_a_writer_gives_signs_of_life(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_TOUCH_S", 0.01)
    with hold_folder(tmp_path):
        os.utime(tmp_path / "writer.txt", (0, 0))
        deadline = time.monotonic() + 60
        while not (tmp_path / "writer.txt").stat().st_mtime:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_a_touch_under_way_leaves_no_mark(tmp_path, monkeypatch):
    begun = threading.Event()

    def touch_late(store, name):
        begun.set()
        time.sleep(0.2)
        store.write(name, b"late")

    monkeypatch.setattr(module, "_TOUCH_S", 0.01)
    monkeypatch.setattr(Store, "touch", touch_late)
    with hold_folder(tmp_path):
        assert begun.wait(20)
    time.sleep(0.3)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"\xff\x1b[31m\n" * 9])
def test_a_lock_without_content_is_somebodys(tmp_path, content):
    (tmp_path / "writer.txt").write_bytes(content)
    message = assert_refused(tmp_path)
    assert message.isprintable()
    assert len(message) < 900
    os.utime(tmp_path / "writer.txt", (0, 0))
    with hold_folder(tmp_path):
        pass


def test_a_killed_writer_is_gone_though_nobody_waited_for_it_and_its_worker_lives(tmp_path):
    """As the workers of a preprocess do, until they notice."""
    command = [sys.executable, "-c", WRITE_IN_PART, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        worker = int(process.stdout.readline())
        process.kill()
        # The process stays in the table of processes.
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert (tmp_path / "writer.txt").exists()
        with hold_folder(tmp_path):
            pass
        os.kill(worker, signal.SIGKILL)


def test_a_mark_that_this_process_could_not_take_away_is_none(tmp_path, monkeypatch):
    """Drive was gone when the block ended; a notebook's process lives on."""

    def refuse(self, **options):
        raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")

    with hold_folder(tmp_path):
        monkeypatch.setattr(Path, "unlink", refuse)
    monkeypatch.undo()
    assert (tmp_path / "writer.txt").exists()
    with hold_folder(tmp_path):
        pass
    assert not list(tmp_path.iterdir())
