"""The machine that this runs on: its cores, its memory, its disk, and whether it is a Colab."""

import math
import os
import platform
import re
import shutil
import sys
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import psutil

from colab_utils.errors import ColabUtilsError
from colab_utils.units import format_bytes

COLAB_ROOT = Path("/content")
"""Colab's own folder; Google Drive is mounted at ``drive`` in it."""


def count_cores() -> int:
    """Return the cores that this process may use.

    This is its affinity mask, cut to the container's CPU quota where there is one.

    Example:
        >>> count_cores() >= 1
        True
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, round(min(cores, find_group_cores())))


def find_free_memory() -> int:
    """Return the bytes of memory that can be had now without swapping, within a container's limit.

    Example:
        >>> find_free_memory() > 0
        True
    """
    return max(0, int(min(psutil.virtual_memory().available, find_group_memory())))


def find_host() -> str:
    """Return what tells this machine, since it was started, from every other that writes.

    Colab gives many machines one name. A container on the same machine counts as another one, as
    its processes have numbers of their own.

    Example:
        >>> len(find_host()) >= 8
        True
    """
    host = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    # Some sandboxes have no such link.
    with suppress(OSError):
        host += os.readlink("/proc/self/ns/pid")[5:-1]
    return host


def find_group_cores(root: Path = Path("/")) -> float:
    """Return the cores of the tightest CPU quota of this process's control groups, or infinity.

    Args:
        root: Folder that holds ``proc`` and ``sys``.
    """
    cores = math.inf
    for text in _read_groups(root, "cpu", "cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us"):
        quota, period = text.split()
        cores = min(cores, int(quota) / int(period))
    return cores


def find_group_memory(root: Path = Path("/")) -> float:
    """Return the bytes that the tightest of this process's control groups leaves, or infinity.

    Args:
        root: Folder that holds ``proc`` and ``sys``.
    """
    free = math.inf
    for text in _read_groups(
        root,
        "memory",
        "memory.max",
        "memory.limit_in_bytes",
        "memory.current",
        "memory.usage_in_bytes",
        "memory.stat",
    ):
        limit, used, stat = text.split(maxsplit=2)
        # The cache can be dropped. Version 1 counts a group's own first, then that of all in it.
        cache = re.findall(r"inactive_file (\d+)", stat)[-1]
        free = min(free, int(limit) - int(used) + int(cache))
    return free


def count_oom_kills(root: Path = Path("/")) -> int:
    """Return how many processes were killed for want of memory: of this process's control group,
    else of the machine, since it was started.

    Args:
        root: Folder that holds ``proc`` and ``sys``.
    """
    paths: list[Path] = []
    for folder in _list_groups(root, "memory"):
        paths += [folder / "memory.events", folder / "memory.oom_control"]
    for path in (*paths, root / "proc/vmstat"):
        # It may not be there, or not be readable.
        with suppress(OSError):
            count = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
            if count:
                return int(count[1])
    return 0


def _list_groups(root: Path, controller: str) -> list[Path]:
    """Return the folders of the control groups that hold this process: its own, then those around
    it.

    Version 1 has a tree of groups for each controller, version 2 has one for all, and a machine may
    have both. Within a container the inner folders may not be seen: its own group is then the top
    of the tree.
    """
    folders: list[Path] = []
    table = root / "proc/self/cgroup"
    lines = table.read_text().splitlines() if table.is_file() else []
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for tree in [controller] if controllers else ["", "unified"]:
            folder = root / "sys/fs/cgroup" / tree / group.strip("/")
            folders += [folder, *folder.parents]
    return folders


def _read_groups(root: Path, controller: str, *names: str) -> list[str]:
    """Return the text of these files, of each control group that limits this process."""
    texts: list[str] = []
    for folder in _list_groups(root, controller):
        paths = [folder / name for name in names]
        text = "".join(path.read_text() for path in paths if path.is_file())
        # "max" and -1 are no limit.
        if text[:1].isdigit():
            texts.append(text)
    return texts


def is_colab() -> bool:
    """Return whether this runs on a hosted Colab virtual machine."""
    return "google.colab" in sys.modules or Path("/var/colab/hostname").exists()


def require_linux(work: str) -> None:
    """Refuse what only Linux can do.

    Raises:
        ColabUtilsError: this is another system.

    Example:
        >>> require_linux("start workers")
    """
    if sys.platform != "linux":
        raise ColabUtilsError(
            f"Only Linux can {work}, and this system is {sys.platform}. Use Colab, a Linux machine "
            "or WSL 2."
        )


@dataclass(frozen=True)
class Machine:
    """The machine that a measurement was made on; sizes in bytes, None for what it lacks."""

    cpu: str
    """The processor's name."""
    cores: int
    """Those that this process may use."""
    ram_bytes: int
    gpu: str | None
    """Its name."""
    software: str
    """Versions of Python, torch and torchvision."""

    def __str__(self) -> str:
        memory = format_bytes(self.ram_bytes)
        return (
            f"{self.cores} cores ({self.cpu}), {memory} RAM, {self.gpu or 'no GPU'}, "
            f"{self.software}"
        )


def describe_machine() -> Machine:
    """Describe this machine.

    Example:
        >>> describe_machine().cores == count_cores()
        True
    """
    import torch

    cpu = platform.machine()
    if sys.platform == "linux":
        model = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        if model:
            cpu = model[1]
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    torchvision = metadata.version("torchvision")
    return Machine(
        cpu=cpu,
        cores=count_cores(),
        ram_bytes=psutil.virtual_memory().total,
        gpu=gpu,
        software=(
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"torchvision {torchvision}"
        ),
    )


def find_free_space(folder: Path) -> int:
    """Return the free bytes of the disk that a folder lies on, or will lie on once it is made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(folder: Path, needed: float, cure: str) -> None:
    """Refuse what the disk of a folder cannot hold, before its first byte.

    ``cure`` says what helps beside freeing some.

    Raises:
        ColabUtilsError: less than ``needed`` bytes are free.
    """
    free = find_free_space(folder)
    if needed > free:
        raise ColabUtilsError(
            f"{folder} needs {format_bytes(needed)} of free disk, and {format_bytes(free)} are "
            f"free. Free some, {cure}."
        )
