"""What every module needs of the machine."""

from __future__ import annotations

import math

import pytest

from colab_utils import machine
from colab_utils.errors import ColabUtilsError
from colab_utils.machine import (
    count_oom_kills,
    find_group_cores,
    find_group_memory,
    require_linux,
)


def test_another_system_than_linux_is_told_so(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(
        ColabUtilsError,
        match=r"Only Linux can share memory, and this system is win32\. Use Colab, a Linux machine",
    ):
        require_linux("share memory")


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "_ROOT", tmp_path)
    return tmp_path


def make_files(root, files):
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def make_group(root, place, *, memory="", used=0, cache=0, quota=""):
    """Make the files that the kernel shows of a control group: limits of memory and of cores."""
    files = {
        "memory.max": memory or "max",
        "memory.current": used,
        "memory.stat": f"anon 1\ninactive_file {cache}\nactive_file 7",
        "cpu.max": f"{quota or 'max'} 100000",
    }
    make_files(root / "sys/fs/cgroup" / place, files)


def join_groups(root, *lines):
    make_files(root, {"proc/self/cgroup": "\n".join(lines)})


@pytest.mark.parametrize("groups", [[], ["user.slice", "user.slice/session.scope"]])
def test_without_limits_of_control_groups_there_is_none(root, groups):
    for place in groups:
        join_groups(root, f"0::/{place}")
        make_group(root, place, used=5)
    assert find_group_memory() == math.inf
    assert find_group_cores() == math.inf


# The top group is a container's own.
@pytest.mark.parametrize("tightest", ["", "slurm", "slurm/job/step 0"])
def test_the_tightest_group_counts(root, tightest):
    join_groups(root, "0::/slurm/job/step 0")
    for place in ("", "slurm", "slurm/job", "slurm/job/step 0"):
        make_group(root, place, memory=5000, used=400, quota=800000)
    make_group(root, tightest, memory=1000, used=300, cache=100, quota=150000)
    make_group(root, "slurm/other", memory=1, quota=1)
    assert find_group_memory() == 800
    assert find_group_cores() == 1.5


@pytest.mark.parametrize(("text", "kills"), [("pgfault 7\noom_kill 2", 2), ("pgfault 7", 0)])
def test_kills_for_want_of_memory_are_counted(root, text, kills):
    assert count_oom_kills() == 0
    make_files(root, {"proc/vmstat": text})
    assert count_oom_kills() == kills
