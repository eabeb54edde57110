"""Google Drive: the folder COLAB_DRIVE stands for it. The order of the checks is that of the real
``drive.py``.
"""

import os
import subprocess

from google.colab import _message
from mountpoint import check_mountpoint

__all__ = ["flush_and_unmount", "mount"]


def mount(mountpoint, force_remount=False, timeout_ms=120000, readonly=False):
    """Mount Drive, after asking for permission."""
    if not os.path.exists("/var/colab/hostname"):
        raise NotImplementedError(
            "Mounting drive is unsupported in this environment. Use PyDrive2 instead."
        )
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    _message.blocking_request(
        "request_auth", request={"authType": "dfs_ephemeral"}, timeout_sec=int(timeout_ms / 1000)
    )
    mountpoint = os.path.expanduser(mountpoint)
    if not force_remount and os.path.isdir(os.path.join(mountpoint, "MyDrive")):
        print(
            f"Drive already mounted at {mountpoint}; to attempt to forcibly remount, call "
            f'drive.mount("{mountpoint}", force_remount=True).'
        )
        return
    subprocess.run(["umount", mountpoint], capture_output=True)
    check_mountpoint(mountpoint)
    if os.environ["COLAB_ANSWER"] == "timeout":
        raise ValueError(
            "mount failed: timeout during initial read of root folder; for more info: "
            "https://research.google.com/colaboratory/faq.html#drive-timeout"
        )
    os.makedirs(mountpoint, exist_ok=True)
    for name in ("MyDrive", "Shareddrives", ".shortcut-targets-by-id"):
        os.makedirs(os.path.join(os.environ["COLAB_DRIVE"], name), exist_ok=True)
    options = ["-o", "ro,bind"] if readonly else ["--bind"]
    subprocess.run(
        ["mount", *options, os.environ["COLAB_DRIVE"], mountpoint],
        check=True,
    )
    print(f"Mounted at {mountpoint}")


def flush_and_unmount(timeout_ms=24 * 60 * 60 * 1000):
    """Unmount Drive; what was written is there."""
    with open("/proc/self/mountinfo", encoding="utf-8") as mounts:
        mounted = os.environ["COLAB_DRIVE"] in mounts.read()
    if not mounted:
        print("Drive not mounted, so nothing to flush and unmount.")
        return
    if subprocess.run(["umount", "/content/drive"], capture_output=True).returncode:
        raise ValueError("flush_and_unmount failed")
