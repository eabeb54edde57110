"""Google Drive: the folder COLAB_DRIVE stands for it. The order of the checks is that of the real
``drive.py``.
"""

import os
import subprocess

from mountpoint import check_mountpoint

__all__ = ["mount"]


class MessageError(Exception):
    """The browser answered with an error."""


def mount(mountpoint, force_remount=False, timeout_ms=120000):
    """Mount Drive, after asking for permission."""
    if not os.path.exists("/var/colab/hostname"):
        raise NotImplementedError(
            "Mounting drive is unsupported in this environment. Use PyDrive2 instead."
        )
    if " " in mountpoint:
        raise ValueError("Mountpoint must not contain a space.")
    with open(os.environ["COLAB_ASKED"], "a", encoding="utf-8") as asked:
        asked.write("?")
    if os.environ["COLAB_ANSWER"] == "declined":
        raise MessageError("Error: credential propagation was unsuccessful")
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
    subprocess.run(["mount", "--bind", os.environ["COLAB_DRIVE"], mountpoint], check=True)
    print(f"Mounted at {mountpoint}")
