"""The machine that runs this code: its cores, memory and disks, and whether it is on Colab."""

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
"""Colab's own folder. Google Drive is mounted in its subfolder ``drive``."""

# The folder that holds ``proc`` and ``sys``.
_ROOT = Path("/")


def count_cores() -> int:
    """Return the number of cores that this process may use.

    It is the number of cores in the affinity mask, or the container's CPU quota if that is smaller.

    Example:
        >>> count_cores() >= 1
        True
    """
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    return max(1, round(min(cores, find_group_cores())))


def find_free_memory() -> int:
    """Return the bytes of memory that are available without swapping, within a container's limit.

    Example:
        >>> find_free_memory() > 0
        True
    """
    return max(0, int(min(psutil.virtual_memory().available, find_group_memory())))


def find_host() -> str:
    """Return an identifier of this machine, which changes when the machine is started again.

    The host name does not identify a machine, because many machines of Colab have the same one. Two
    containers on one machine have different identifiers, because each counts its own processes.

    Example:
        >>> len(find_host()) >= 8
        True
    """
    host = Path("/proc/sys/kernel/random/boot_id").read_text()[:8]
    # Some sandboxes do not have this link.
    with suppress(OSError):
        host += os.readlink("/proc/self/ns/pid")[5:-1]
    return host


def find_group_cores() -> float:
    """Return the smallest CPU quota of this process's control groups, in cores.

    Without a quota, it is infinity.
    """
    limits = [text.split() for text in _read_groups("cpu.max")]
    return min((int(quota) / int(period) for quota, period in limits), default=math.inf)


def find_group_memory() -> float:
    """Return the bytes of memory that this process's control groups leave to it.

    It is the smallest number of free bytes in any of the groups. Without a limit, it is infinity.
    """
    free = math.inf
    for text in _read_groups("memory.max", "memory.current", "memory.stat"):
        limit, used, stat = text.split(maxsplit=2)
        # The kernel can drop the cache, so it counts as free.
        cache = re.findall(r"inactive_file (\d+)", stat)[0]
        free = min(free, int(limit) - int(used) + int(cache))
    return free


def count_oom_kills() -> int:
    """Return the number of processes that the kernel killed because memory ran out.

    They are counted in the control group of a container. Without one, the number is that of the
    whole machine since it was started.
    """
    for path in (_ROOT / "sys/fs/cgroup/memory.events", _ROOT / "proc/vmstat"):
        # The file may be missing, or not be readable.
        with suppress(OSError):
            count = re.search(r"^oom_kill (\d+)", path.read_text(), re.M)
            if count:
                return int(count[1])
    return 0


def _read_groups(*names: str) -> list[str]:
    """Return the joined text of these files for each control group that limits this process.

    The groups are those of version 2, from the innermost on. In a container, the inner folders may
    not be visible. The top folder of the tree is then the container's own group.
    """
    table = _ROOT / "proc/self/cgroup"
    group = re.search("^0::/(.*)$", table.read_text() if table.is_file() else "", re.M)
    tree = _ROOT / "sys/fs/cgroup"
    inner = tree / group[1] if group else tree
    texts: list[str] = []
    for folder in (inner, *inner.parents):
        paths = [folder / name for name in names if folder.is_relative_to(tree)]
        text = "".join(path.read_text() for path in paths if path.is_file())
        # Without a limit, the text begins with "max".
        if text[:1].isdigit():
            texts.append(text)
    return texts


def is_colab() -> bool:
    """Return whether this runs on a hosted Colab virtual machine."""
    return "google.colab" in sys.modules or Path("/var/colab/hostname").exists()


def require_linux(work: str) -> None:
    """Raise an error on any other system than Linux, because only Linux can do ``work``.

    Raises:
        ColabUtilsError: This system is not Linux.

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
    """The machine on which a measurement was made."""

    cpu: str
    """Name of the processor."""
    cores: int
    """Number of cores that this process may use."""
    ram_bytes: int
    """Memory of the whole machine."""
    gpu: str | None
    """Name of the GPU; None without a GPU."""
    software: str
    """Versions of Python, torch and torchvision."""

    def __str__(self) -> str:
        return (
            f"{self.cores} cores ({self.cpu}), {format_bytes(self.ram_bytes)} RAM, "
            f"{self.gpu or 'no GPU'}, {self.software}"
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
    return Machine(
        cpu=cpu,
        cores=count_cores(),
        ram_bytes=psutil.virtual_memory().total,
        gpu=gpu,
        software=(
            f"Python {platform.python_version()}, torch {torch.__version__}, "
            f"torchvision {metadata.version('torchvision')}"
        ),
    )


def find_free_space(folder: Path) -> int:
    """Return the free bytes of the disk that a folder lies on, or will lie on once it is made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def require_space(folder: Path, needed: float, cure: str) -> None:
    """Refuse to write into a folder if its disk has too little free space.

    Args:
        folder: Folder to be written to. It need not exist yet.
        needed: Bytes to be written.
        cure: What the user can do beside freeing space. It ends the message.

    Raises:
        ColabUtilsError: Fewer than ``needed`` bytes are free.
    """
    free = find_free_space(folder)
    if needed > free:
        raise ColabUtilsError(
            f"{folder} needs {format_bytes(needed)} of free disk, and {format_bytes(free)} are "
            f"free. Free some space, {cure}."
        )
