"""What every module needs of the machine."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.machine import (
    count_oom_kills,
    find_group_cores,
    find_group_memory,
    require_linux,
)

NO_LIMIT_V1 = 9223372036854771712


def test_another_system_than_linux_is_told_so(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(
        ColabUtilsError,
        match=r"Only Linux can share memory, and this system is win32\. Use Colab, a Linux machine",
    ):
        require_linux("share memory")


def make_files(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def make_group(root, place, version, *, memory="", used=0, cache=0, quota=""):
    """Make the files that the kernel shows of a control group: limits of memory and of cores."""
    folder = root / "sys/fs/cgroup"
    if version == 2:
        files = {
            "memory.max": memory or "max",
            "memory.current": used,
            "memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 7",
            "cpu.max": f"{quota or 'max'} 100000",
        }
        make_files(folder / place, files)
        return
    memory_files = {
        "memory.limit_in_bytes": memory or NO_LIMIT_V1,
        "memory.usage_in_bytes": used,
        "memory.stat": f"cache 5\ninactive_file 3\ntotal_inactive_file {cache}\ntotal_rss 7",
    }
    make_files(folder / "memory" / place, memory_files)
    cpu_files = {"cpu.cfs_quota_us": quota or -1, "cpu.cfs_period_us": 100000}
    make_files(folder / "cpu" / place, cpu_files)


def join_groups(root, *lines):
    make_files(root, {"proc/self/cgroup": "\n".join(lines)})


V1_LINES = ("9:name=systemd:/", "5:cpu,cpuacct:{place}", "4:memory:{place}", "3:pids:/other")


def test_without_control_groups_there_is_no_limit(tmp_path):
    assert find_group_memory(tmp_path) == math.inf
    assert find_group_cores(tmp_path) == math.inf


def test_the_limits_of_a_container_of_version_2(tmp_path):
    join_groups(tmp_path, "0::/")
    make_group(tmp_path, "", 2, memory=1000, used=300, cache=100, quota=150000)
    assert find_group_memory(tmp_path) == 800
    assert find_group_cores(tmp_path) == 1.5


@pytest.mark.parametrize("tightest", ["slurm", "slurm/job", "slurm/job/step 0"])
def test_the_tightest_group_of_version_2_counts(tmp_path, tightest):
    join_groups(tmp_path, "0::/slurm/job/step 0")
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    for place in ("slurm", "slurm/job", "slurm/job/step 0"):
        if place == tightest:
            make_group(tmp_path, place, 2, memory=1000, used=300, quota=200000)
        else:
            make_group(tmp_path, place, 2, memory=5000, used=400, quota=800000)
    make_group(tmp_path, "slurm/other", 2, memory=1, quota=1)
    assert find_group_memory(tmp_path) == 700
    assert find_group_cores(tmp_path) == 2


def test_groups_of_version_2_without_limits(tmp_path):
    join_groups(tmp_path, "0::/user.slice/session.scope")
    make_group(tmp_path, "user.slice", 2, used=5)
    make_group(tmp_path, "user.slice/session.scope", 2, used=5)
    assert find_group_memory(tmp_path) == math.inf
    assert find_group_cores(tmp_path) == math.inf


@pytest.mark.parametrize("limited", ["jobs", "jobs/7"])
def test_the_limits_of_version_1(tmp_path, limited):
    join_groups(tmp_path, *(line.format(place="/jobs/7") for line in V1_LINES))
    for place in ("", "jobs", "jobs/7"):
        make_group(tmp_path, place, 1)
    make_group(tmp_path, limited, 1, memory=2000, used=500, cache=50, quota=50000)
    make_group(tmp_path, "other", 1, memory=1, quota=1)
    assert find_group_memory(tmp_path) == 1550
    assert find_group_cores(tmp_path) == 0.5


def test_version_1_within_a_container_that_sees_its_own_group_as_the_top(tmp_path):
    join_groups(tmp_path, *(line.format(place="/docker/0123abc") for line in V1_LINES))
    make_group(tmp_path, "", 1, memory=2000, used=500, quota=300000)
    assert find_group_memory(tmp_path) == 1500
    assert find_group_cores(tmp_path) == 3


def test_a_machine_with_both_versions(tmp_path):
    join_groups(tmp_path, *(line.format(place="/jobs") for line in V1_LINES), "0::/scope")
    make_group(tmp_path, "jobs", 1, memory=2000, used=500, quota=300000)
    make_files(tmp_path, {"sys/fs/cgroup/unified/scope/cgroup.procs": "1"})
    assert find_group_memory(tmp_path) == 1500
    assert find_group_cores(tmp_path) == 3


@contextmanager
def limit_memory(limit):
    """Make a real control group in a limited one; yields its list of processes."""
    version = 1 if Path("/sys/fs/cgroup/memory").is_dir() else 2
    tree = Path("/sys/fs/cgroup", "memory" if version == 1 else "")
    outer = tree / f"colab_utils-{os.getpid()}"
    try:
        (outer / "inner").mkdir(parents=True)
        name = "memory.limit_in_bytes" if version == 1 else "memory.max"
        (outer / name).write_text(str(limit))
    except OSError as error:
        for folder in (outer / "inner", outer):
            if folder.is_dir():
                folder.rmdir()
        pytest.skip(f"no control group can be made here: {error}")
    try:
        yield outer / "inner/cgroup.procs"
    finally:
        (outer / "inner").rmdir()
        outer.rmdir()


def test_a_real_limit_of_an_outer_group_is_seen():
    code = """
import sys
from pathlib import Path
from colab_utils.machine import find_free_memory
Path(sys.argv[1]).write_text("0")
print(find_free_memory())
"""
    with limit_memory(500_000_000) as members:
        done = subprocess.run(
            [sys.executable, "-c", code, str(members)], capture_output=True, text=True, timeout=60
        )
    assert done.returncode == 0, done.stderr
    assert 300_000_000 < int(done.stdout) <= 500_000_000


EVENTS = "low 0\nhigh 3\nmax 40\noom 5\noom_kill 2\noom_group_kill 0"
CONTROL = "oom_kill_disable 0\nunder_oom 0\noom_kill 2"


@pytest.mark.parametrize(
    ("groups", "files"),
    [
        (
            ["0::/job"],
            {
                "sys/fs/cgroup/job/memory.events": EVENTS,
                "sys/fs/cgroup/memory.events": "oom_kill 9",
            },
        ),
        (
            ["4:memory:/job"],
            {"sys/fs/cgroup/memory/job/memory.oom_control": CONTROL},
        ),
        # The container does not see its own group.
        (
            ["0::/docker/0123abc"],
            {"sys/fs/cgroup/memory.events": EVENTS},
        ),
        # Without control groups, what the whole machine counts is read.
        (["9:name=systemd:/"], {"proc/vmstat": "pgfault 7\noom_kill 2"}),
        (["0::/"], {"proc/vmstat": "oom_kill 2"}),
    ],
)
def test_kills_for_want_of_memory_are_counted(tmp_path, groups, files):
    assert count_oom_kills(tmp_path) == 0
    join_groups(tmp_path, *groups)
    make_files(tmp_path, files)
    make_files(tmp_path, {"proc/vmstat": files.get("proc/vmstat", "oom_kill 9")})
    assert count_oom_kills(tmp_path) == 2
