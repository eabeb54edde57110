"""Shards by Dask and by Ray, with processes of their own that are killed: `make test-engines`
installs both.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import slow_down
from tests.snapshots import snapshot

SHARD_MB = 0.05
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Sixty small pictures, which make 15 shards."""
    folder = tmp_path_factory.mktemp("photos")
    return make_dataset(folder, n=60, width=160, height=128, objects=(1, 4), workers=1)


@pytest.fixture(scope="module")
def expected(photos, tmp_path_factory):
    """The files of a run on this machine alone."""
    folder = tmp_path_factory.mktemp("local") / "shards"
    write(photos, folder, workers=2)
    return snapshot(folder)


@pytest.fixture
def slow_photos(photos):
    """The same pictures, so slow that a worker can be killed in the middle."""
    slow_down(photos.images, "typical")
    return photos


def write(photos, folder, **options):
    settings = {"shard_mb": SHARD_MB, "storage": "keep", **options}
    return write_shards(photos.images, photos.annotations, shards=folder, **settings)


def wait_for(condition, seconds=60):
    until_s = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until_s, "it did not come"
        time.sleep(0.02)


@contextlib.contextmanager
def after_two_shards(folder, act):
    """Act in the middle of the run that the block starts."""

    def wait_and_act():
        wait_for(lambda: len(list(folder.glob("shard-*.tar"))) >= 2)
        act()

    with ThreadPoolExecutor(1) as pool:
        acting = pool.submit(wait_and_act)
        yield
        acting.result()


class Dask:
    """A scheduler and two workers, each a process of its own."""

    def __init__(self, folder):
        self.file = folder / "scheduler.json"
        self.processes = []
        self.start("dask_scheduler", "--port", "0", "--scheduler-file", str(self.file))
        wait_for(self.file.exists)
        for _ in range(2):
            self.start_worker()

    def start(self, module, *words):
        command = [sys.executable, "-m", f"distributed.cli.{module}", *words, "--no-dashboard"]
        process = subprocess.Popen(
            command,
            cwd=self.file.parent,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stderr=subprocess.DEVNULL,
        )
        self.processes.append(process)

    def start_worker(self):
        self.start(
            "dask_worker", "--scheduler-file", str(self.file), "--nthreads", "1", "--no-nanny"
        )

    def connect(self):
        from distributed import Client

        client = Client(scheduler_file=str(self.file), timeout=60)
        client.wait_for_workers(2, timeout=60)
        return client

    def close(self):
        for process in self.processes:
            process.kill()
            process.wait()


@pytest.fixture
def dask(tmp_path):
    pytest.importorskip("distributed")
    cluster = Dask(tmp_path)
    yield cluster
    cluster.close()


@pytest.fixture
def dask_of_slow_photos(slow_photos, dask):
    return dask


def test_dask_writes_the_same_bytes(photos, expected, dask, tmp_path):
    with dask.connect() as client:
        write(photos, tmp_path / "shards", executor=client.get_executor(), workers=2)
    assert snapshot(tmp_path / "shards") == expected


def test_a_killed_worker_of_dask_is_not_seen(photos, expected, dask_of_slow_photos, tmp_path):
    folder = tmp_path / "shards"
    scheduler, first, second = dask_of_slow_photos.processes

    with dask_of_slow_photos.connect() as client, after_two_shards(folder, first.kill):
        write(photos, folder, executor=client.get_executor(), workers=2, streams=1)
    assert scheduler.poll() is None
    assert second.poll() is None
    assert snapshot(folder) == expected


def test_all_workers_lost_name_the_shard_and_the_same_call_continues(
    photos, expected, dask, tmp_path
):
    """Each worker that takes one of the shards is killed, as by the system for its memory."""
    folder = tmp_path / "shards"
    with dask.connect() as client:
        for _ in range(4):
            dask.start_worker()
        client.wait_for_workers(6)
        client.run(spoil_shard, "shard-000007.tar")
        with pytest.raises(ColabUtilsError, match="shard-000007 was not written") as error:
            write(photos, folder, executor=client.get_executor(retries=0), workers=6, retries=0)
    assert "KilledWorker" in str(error.value)
    assert "it continues" in str(error.value)
    write(photos, folder, workers=2)
    assert snapshot(folder) == expected


def spoil_shard(name):
    """Make this process one that ends when it writes a file of this name."""
    replace = os.replace

    def die(source, target):
        if Path(target).name == name:
            os.kill(os.getpid(), signal.SIGKILL)
        replace(source, target)

    os.replace = die


def test_no_old_error_comes_again_from_dask(photos, expected, dask_of_slow_photos, tmp_path):
    """By default it keeps the outcome of equal calls. Nothing is written after an error, either."""
    folder = tmp_path / "shards"
    blocked = folder / "shard-000012.tar"
    with dask_of_slow_photos.connect() as client:
        executor = client.get_executor()
        with after_two_shards(folder, blocked.mkdir):
            with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
                write(photos, folder, executor=executor, workers=2, streams=1)
            assert not (folder / "writer.txt").exists()
            before = sorted(snapshot(folder))
        time.sleep(4)
        assert sorted(snapshot(folder)) == before
        blocked.rmdir()
        write(photos, folder, executor=executor, workers=2)
    assert snapshot(folder) == expected


def test_a_killed_scheduler_of_dask_is_told(photos, expected, dask_of_slow_photos, tmp_path):
    folder = tmp_path / "shards"
    scheduler = dask_of_slow_photos.processes[0]
    client = dask_of_slow_photos.connect()
    with (
        after_two_shards(folder, scheduler.kill),
        pytest.raises(ColabUtilsError, match=r"shard-\d+ was not written") as error,
    ):
        write(photos, folder, executor=client.get_executor(), workers=2, streams=1)
    client.close(timeout=1)
    assert "it continues" in str(error.value)
    assert not (folder / "writer.txt").exists()
    write(photos, folder, workers=2)
    assert snapshot(folder) == expected


def start_ray(ray, tries=4):
    """Start Ray, which gives up on a busy machine: its own processes have 15 seconds to come."""
    for left in reversed(range(tries)):
        try:
            ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
            return
        except Exception:
            ray.shutdown()
            if not left:
                raise


@pytest.fixture(scope="module")
def ray_executor(photos):
    """The executor of the README, on a Ray of two workers, which read the pictures slowly."""
    ray = pytest.importorskip("ray")
    code = re.findall(r"```python\n(import ray\n.*?)```", (ROOT / "README.md").read_text(), re.S)
    names = {}
    exec(code[0].partition("ray.init()")[0], names)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        slow_down(photos.images, "typical")
        start_ray(ray)
        yield names["RayExecutor"]()
        ray.shutdown()


def test_ray_writes_the_same_bytes(photos, expected, ray_executor, tmp_path):
    write(photos, tmp_path / "shards", executor=ray_executor, workers=2)
    assert snapshot(tmp_path / "shards") == expected


def test_a_killed_worker_of_ray_is_tried_again(photos, expected, ray_executor, tmp_path):
    folder = tmp_path / "shards"

    def kill():
        workers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ray::run" in "".join(process.cmdline())
        ]
        assert workers
        workers[0].kill()

    with after_two_shards(folder, kill):
        write(photos, folder, executor=ray_executor, workers=2, streams=1)
    assert snapshot(folder) == expected


def test_an_error_within_ray_is_ours(photos, expected, ray_executor, tmp_path):
    folder = tmp_path / "shards"
    blocked = folder / "shard-000012.tar"
    with (
        after_two_shards(folder, blocked.mkdir),
        pytest.raises(ColabUtilsError, match=r"^Writing into .* failed"),
    ):
        write(photos, folder, executor=ray_executor, workers=2, streams=1)
    blocked.rmdir()
    write(photos, folder, executor=ray_executor, workers=2)
    assert snapshot(folder) == expected
