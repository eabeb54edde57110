"""The machine that this runs on: its cores, its memory, its disk, and whether it is a Colab."""

import os
import platform
import re
import shutil
import sys
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
    quota, _, period = _read_limit("cpu.max").partition(" ")
    if quota.isdigit():
        cores = min(cores, max(1, round(int(quota) / int(period))))
    return cores


def find_free_memory() -> int:
    """Return the bytes of memory that can be had now without swapping, within a container's limit.

    Example:
        >>> find_free_memory() > 0
        True
    """
    free: int = psutil.virtual_memory().available
    limit = _read_limit("memory.max")
    if limit.isdigit():
        stat = dict(line.split() for line in _read_limit("memory.stat").splitlines())
        # The cache can be dropped.
        used = int(_read_limit("memory.current")) - int(stat["inactive_file"])
        free = min(free, int(limit) - used)
    return max(0, free)


def _read_limit(name: str) -> str:
    """Return a file of the container's limits; "" without cgroup v2."""
    path = Path("/sys/fs/cgroup", name)
    return path.read_text().strip() if path.is_file() else ""


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
            f"expected Linux to {work}, found {sys.platform}: use Colab, a Linux machine or WSL 2"
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
            f"expected {format_bytes(needed)} of free disk for {folder}, "
            f"found {format_bytes(free)}: free some, {cure}"
        )
