"""Parts of shards by Dask, by Ray and by a shell, with the lines of docs/SCALE.md: `make
test-engines` installs both engines.
"""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from colab_utils.shards.write import write_shards
from colab_utils.slow_drive import slow_down
from tests.snapshots import snapshot

ROOT = Path(__file__).resolve().parents[2]
# The engines run in processes of their own, which do not use up the cores of a machine.
SETTINGS = {"shard_mb": 0.05, "storage": "keep", "streams": 1}


@pytest.fixture(scope="module")
def expected(sixty, tmp_path_factory):
    """The files of a run on this machine alone."""
    folder = tmp_path_factory.mktemp("local") / "shards"
    write_shards(sixty.images, sixty.annotations, shards=folder, workers=2, **SETTINGS)
    return snapshot(folder)


def read_example(first_line):
    """Return the lines of an example in docs/SCALE.md that begins so."""
    text = (ROOT / "docs" / "SCALE.md").read_text()
    (code,) = re.findall(rf"```\w*\n({re.escape(first_line)}.*?)```", text, re.S)
    return code


def run_example(first_line, sixty, folder, **names):
    """Run an example with folders and addresses of this test in place of its own."""
    code = read_example(first_line)
    names |= {
        '"photos"': repr(str(sixty.images)),
        '"photos.json"': repr(str(sixty.annotations)),
        ': "shards"': f": {str(folder)!r}",
        "workers=1": f"workers=1, **{SETTINGS!r}",
    }
    for name, value in names.items():
        assert code.count(name) == 1
        code = code.replace(name, value)
    exec(code, {})


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


@pytest.fixture
def dask(monkeypatch):
    """Two workers, each a process of its own below a nanny, which starts another one at need."""
    distributed = pytest.importorskip("distributed")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    with distributed.LocalCluster(
        n_workers=2, threads_per_worker=2, dashboard_address=None, protocol="tcp"
    ) as cluster:
        yield cluster
        # That of the example.
        distributed.default_client().close()


def test_a_killed_worker_of_dask_is_not_seen(sixty, expected, dask, tmp_path):
    # So slow that a worker can be killed in the middle.
    slow_down(sixty.images, "typical")
    folder = tmp_path / "shards"
    names = {"tcp://scheduler:8786": dask.scheduler_address}
    with after_two_shards(folder, lambda: os.kill(dask.workers[0].pid, 9)):
        run_example("from dask.distributed import Client", sixty, folder, **names)
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
def ray_of_slow_photos(sixty):
    """Two workers of Ray, which read the pictures slowly."""
    ray = pytest.importorskip("ray")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", str(ROOT))
        slow_down(sixty.images, "typical")
        start_ray(ray)
        yield ray
        ray.shutdown()


def test_ray_writes_the_same_bytes(sixty, expected, ray_of_slow_photos, tmp_path):
    run_example("import ray", sixty, tmp_path / "shards")
    assert snapshot(tmp_path / "shards") == expected


# Runs the wrapped command for each task of the array, as Slurm does on as many machines.
SBATCH = """#!/bin/bash
tasks=${1#--array=1-}
for task in $(seq $tasks); do SLURM_ARRAY_TASK_ID=$task bash -c "$3" & jobs+=" $!"; done
for job in $jobs; do wait $job || exit 1; done
"""


def test_a_shell_writes_the_same_bytes(sixty, tmp_path, monkeypatch):
    folder = tmp_path / "shards"
    (tmp_path / "sbatch").write_text(SBATCH)
    (tmp_path / "sbatch").chmod(0o755)
    (tmp_path / "python").write_text(f'#!/bin/bash\nexec {sys.executable} "$@"\n')
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = read_example("sbatch").replace("16", "3")
    code = code.replace("--images DIR", f"--images {sixty.images}")
    code = code.replace("--annotations FILE", f"--annotations {sixty.annotations}")
    code = code.replace("--shards DIR", f"--shards {folder} --storage shrink")
    subprocess.run(["bash", "-ec", code], check=True, cwd=tmp_path)
    write_shards(sixty.images, sixty.annotations, shards=tmp_path / "alone")
    assert snapshot(folder) == snapshot(tmp_path / "alone")
