"""The machine that this runs on: its cores, its memory, its disk, and whether it is a Colab."""

import os
import platform
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
    """Cores this process may use: its affinity mask, cut to the container's CPU quota where there
    is one.

    Example:
        >>> count_cores() >= 1
        True
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _read_limit("cpu.max").partition(" ")
    return min(cores, max(1, round(int(quota) / int(period)))) if quota.isdigit() else cores


def find_free_memory() -> int:
    """Bytes of memory that can be had now without swapping, in this container if it has a limit of
    its own.

    Example:
        >>> find_free_memory() > 0
        True
    """
    free: int = psutil.virtual_memory().available
    limit = _read_limit("memory.max")
    if limit.isdigit():
        stat = dict(line.split() for line in _read_limit("memory.stat").splitlines())
        # the cache can be dropped
        free = min(
            free, int(limit) - int(_read_limit("memory.current")) + int(stat["inactive_file"])
        )
    return max(0, free)


def _read_limit(name: str) -> str:
    """A file of the container's limits; "" without cgroup v2."""
    path = Path("/sys/fs/cgroup", name)
    return path.read_text().strip() if path.is_file() else ""


def is_colab() -> bool:
    """Whether this runs on a hosted Colab virtual machine."""
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

    lines = Path("/proc/cpuinfo").read_text().splitlines() if sys.platform == "linux" else []
    cpu = next(
        (line.partition(": ")[2] for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    torchvision = metadata.version("torchvision")
    software = (
        f"Python {platform.python_version()}, torch {torch.__version__}, torchvision {torchvision}"
    )
    return Machine(cpu, count_cores(), psutil.virtual_memory().total, gpu, software)


def find_free_space(folder: Path) -> int:
    """Free bytes of the disk that a folder lies on, or will lie on once it is made."""
    path = folder.absolute()
    return shutil.disk_usage(next(place for place in (path, *path.parents) if place.exists())).free


def require_space(folder: Path, needed: float, cure: str) -> None:
    """Refuse what the disk of a folder cannot hold, before its first byte; ``cure``: what helps
    beside freeing some.
    """
    free = find_free_space(folder)
    if needed > free:
        found = f"found {format_bytes(free)}: free some, {cure}"
        raise ColabUtilsError(f"expected {format_bytes(needed)} of free disk for {folder}, {found}")
