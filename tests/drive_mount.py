"""A mounted Google Drive to test on: as slow as people measured it, and failing on command
(FUSE).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from colab_utils.slow_drive import DriveProfile, get_profile

__all__ = ["DriveMount", "Faults", "can_mount", "mount_drive", "mount_or_skip"]

SERVER = Path(__file__).with_name("drive_server.py")


@dataclass
class Faults:
    """What goes wrong. ``errors`` of the next reads fail with EIO; while ``lost``, every call fails
    with ENOTCONN; while ``full``, writing fails with ENOSPC; a folder of more than ``most_entries``
    cannot be listed; reads return ``short_read`` bytes at most; of what is written, the last
    ``lost_bytes`` of every piece are stored as zeros; the next ``cut_opens`` files that are opened
    to be read and have ``cut_name`` in their names end in their middle, while their size stays what
    it is; the next ``call_errors`` looks at a file or a folder fail with EIO; files that have
    ``hidden_name`` in their paths do not show; if ``served`` is not 0, so many files are served at
    once and more than twice as many are refused, whatever the profile says.
    """

    errors: int = 0
    lost: bool = False
    full: bool = False
    most_entries: int = 1_000_000
    short_read: int = 0
    lost_bytes: int = 0
    cut_opens: int = 0
    cut_name: str = ""
    call_errors: int = 0
    hidden_name: str = ""
    served: int = 0


def can_mount() -> str:
    """Why no file system can be mounted here; "" if one can."""
    if not os.path.exists("/dev/fuse") or not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "no /dev/fuse that may be opened"
    if shutil.which("fusermount3") is None:
        return "no fusermount3, of the package fuse3"
    try:
        import mfusepy  # noqa: F401
    except (ImportError, OSError) as error:
        return f"no libfuse or mfusepy ({error})"
    return ""


class DriveMount:
    """A mount under way: its folder, and the faults that can be set while it is used."""

    def __init__(self, folder: Path, faults_file: Path) -> None:
        self.folder = folder
        self._faults_file = faults_file

    def fail(self, **faults: Any) -> None:
        """Exchange the faults; without arguments there are none."""
        temporary = self._faults_file.with_suffix(".new")
        temporary.write_text(json.dumps(asdict(Faults(**faults))))
        os.replace(temporary, self._faults_file)


@contextmanager
def mount_drive(
    backing: Path,
    folder: Path,
    *,
    profile: str | DriveProfile = "none",
    direct: bool = False,
) -> Iterator[DriveMount]:
    """Mount ``backing`` on ``folder``, in a process of its own, for as long as the block lasts; its
    type is Drive's.

    ``direct``: the kernel keeps nothing, so that a short read reaches the reader, and files cannot
    be mapped.
    """
    speed = get_profile(profile)
    # Later libfuse leaves the working directory, so a relative path would lead elsewhere.
    backing = backing.absolute()
    folder = folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    faults = folder.parent / f"{folder.name}.faults.json"
    mount = DriveMount(folder, faults)
    mount.fail()
    options = {
        "backing": str(backing),
        "folder": str(folder),
        "faults": str(faults),
        "profile": speed and asdict(speed),
        "direct": direct,
    }
    process = subprocess.Popen(
        [sys.executable, SERVER, json.dumps(options)],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + 20
        while not os.path.ismount(folder):
            if process.poll() is not None or time.monotonic() > deadline:
                # Reading the last words of a process that still runs would never end.
                process.kill()
                raise RuntimeError(
                    f"the mount did not come: {process.stderr.read() if process.stderr else ''}"
                )
            time.sleep(0.02)
        yield mount
    finally:
        mount.fail()
        subprocess.run(["fusermount3", "-u", "-z", folder], capture_output=True, check=False)
        process.terminate()
        process.communicate()


@contextmanager
def mount_or_skip(backing: Path, folder: Path, **options: Any) -> Iterator[DriveMount]:
    """`mount_drive`; where nothing can be mounted, the test is skipped and says why."""
    if reason := can_mount():
        pytest.skip(f"no mounted Drive to test on: {reason}")
    with ExitStack() as mounts:
        try:
            mounted = mounts.enter_context(mount_drive(backing, folder, **options))
        except RuntimeError as error:
            # A machine that has all it takes may still forbid it.
            pytest.skip(str(error))
        yield mounted
