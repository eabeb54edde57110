"""What ``google.colab.drive`` asks of a mount point, for both stand-ins; the order is that of the
real ``drive.py``.
"""

from __future__ import annotations

import os

__all__ = ["check_mountpoint"]


def check_mountpoint(mountpoint: str) -> None:
    """Refuse a place where Drive cannot be mounted, in the real module's words."""
    if os.path.islink(mountpoint):
        raise ValueError("Mountpoint must not be a symlink")
    if os.path.isdir(mountpoint) and os.listdir(mountpoint):
        raise ValueError("Mountpoint must not already contain files")
    if not os.path.isdir(mountpoint) and os.path.exists(mountpoint):
        raise ValueError("Mountpoint must either be a directory or not exist")
    if "/" in os.path.normpath(mountpoint) and not os.path.exists(
        os.path.dirname(os.path.normpath(mountpoint))
    ):
        raise ValueError("Mountpoint must be in a directory that exists")
