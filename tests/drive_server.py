"""The process behind `tests.drive_mount`: a folder of this machine, served as a slow mount that
fails on command.

The faults lie in a JSON file that is read again whenever it changes, so a test can break the mount
while it is used.
"""

from __future__ import annotations

import errno
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

from colab_utils.slow_drive import DriveProfile

# More reads at once than any reader begins: the profile decides, and not the library.
_MOST_THREADS = 400


def checked(kind: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Raise what is to go wrong with a call of this kind, or call it with the path behind."""

    def check(call: Callable[..., Any]) -> Callable[..., Any]:
        # The library looks at the arguments of a call.
        @wraps(call)
        def run(drive: Drive, path: str, *arguments: Any) -> Any:
            drive.check(kind)
            return call(drive, drive.find(path), *arguments)

        return run

    return check


class Drive:
    """The calls of the file system; times and faults come first, then the folder behind it."""

    def __init__(self, backing: Path, profile: DriveProfile | None, faults_file: Path) -> None:
        self.backing = backing
        self.profile = profile
        self.faults_file = faults_file
        self._faults: dict[str, Any] = {}
        self._changed = 0
        # The files that are open and end in their middle.
        self._cut: set[int] = set()
        self._lock = threading.Lock()
        self._line = threading.Condition(self._lock)
        self._in_line = 0
        self._served = 0

    def check(self, kind: str) -> None:
        """Raise what is to go wrong now with a call of this kind."""
        with self._lock:
            changed = self.faults_file.stat().st_mtime_ns
            if changed != self._changed:
                self._faults = json.loads(self.faults_file.read_text())
                self._changed = changed
                # More files may be served at once than before.
                self._line.notify_all()
            if self._faults["lost"]:
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            if kind == "write" and self._faults["full"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            if self._faults.get(kind, 0) > 0:
                self._faults[kind] -= 1
                raise OSError(errno.EIO, "Input/output error")

    def find(self, path: str) -> str:
        return str(self.backing / path.lstrip("/"))

    def hides(self, path: str) -> bool:
        hidden = self._faults["hidden_name"]
        return bool(hidden) and hidden in path

    # The calls from here on only look at files and folders.

    @checked("call_errors")
    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        if self.hides(path):
            raise OSError(errno.ENOENT, "No such file or directory")
        status = os.lstat(path)
        return {name: getattr(status, name) for name in dir(status) if name.startswith("st_")}

    @checked()
    def readdir(self, path: str, fh: int) -> list[str]:
        names = [name for name in os.listdir(path) if not self.hides(name)]
        if len(names) > self._faults["most_entries"]:
            raise OSError(errno.EIO, "Input/output error")
        return [".", "..", *names]

    @checked()
    def readlink(self, path: str) -> str:
        return os.readlink(path)

    @checked()
    def statfs(self, path: str) -> dict[str, int]:
        status = os.statvfs(path)
        return {name: getattr(status, name) for name in dir(status) if name.startswith("f_")}

    # The calls from here on read.

    def wait_in_line(self, profile: DriveProfile) -> None:
        """Wait until a file is served, or refuse it, as Drive with so many streams does."""
        with self._line:
            most_reads = profile.most_reads
            if self._faults["served"]:
                most_reads = 2 * self._faults["served"]
            if most_reads is not None and self._in_line >= most_reads:
                raise OSError(errno.EIO, "Input/output error")
            self._in_line += 1
            while self._served >= (self._faults["served"] or profile.streams):
                self._line.wait()
            self._served += 1
        time.sleep(profile.open_s)
        with self._line:
            self._served -= 1
            self._in_line -= 1
            self._line.notify()

    @checked()
    def open(self, path: str, flags: int) -> int:
        descriptor = os.open(path, flags & ~os.O_APPEND & ~os.O_EXCL)
        if flags & (os.O_WRONLY | os.O_RDWR):
            return descriptor
        if self.profile:
            self.wait_in_line(self.profile)
        with self._lock:
            if self._faults["cut_opens"] > 0 and self._faults["cut_name"] in path:
                self._faults["cut_opens"] -= 1
                self._cut.add(descriptor)
        return descriptor

    @checked("errors")
    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        if self._faults["short_read"]:
            size = min(size, self._faults["short_read"])
        if fh in self._cut:
            size = max(0, min(size, os.fstat(fh).st_size // 2 - offset))
        data = os.pread(fh, size, offset)
        if self.profile:
            time.sleep(len(data) / self.profile.bytes_per_s)
        return data

    # The calls from here on write.

    @checked("write")
    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, mode)

    @checked("write")
    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        lost = min(self._faults["lost_bytes"], len(data))
        return os.pwrite(fh, data[: len(data) - lost] + bytes(lost), offset)

    @checked("write")
    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        os.truncate(path, length)
        return 0

    def release(self, path: str, fh: int) -> int:
        self._cut.discard(fh)
        os.close(fh)
        return 0

    @checked()
    def flush(self, path: str, fh: int) -> int:
        return 0

    @checked()
    def unlink(self, path: str) -> int:
        os.unlink(path)
        return 0

    @checked("write")
    def rename(self, path: str, new: str) -> int:
        os.rename(path, self.find(new))
        return 0

    @checked("write")
    def mkdir(self, path: str, mode: int) -> int:
        os.mkdir(path, mode)
        return 0

    @checked()
    def rmdir(self, path: str) -> int:
        os.rmdir(path)
        return 0

    def chmod(self, path: str, mode: int) -> int:
        return 0

    @checked()
    def utimens(self, path: str, times: Any = None) -> int:
        os.utime(path, times)
        return 0


def main() -> None:
    """Serve, as the JSON in the first argument says."""
    options = json.loads(sys.argv[1])
    # The import waits until now, so that pytest can look at this file where there is no libfuse.
    import mfusepy

    drive = type("Mounted", (Drive, mfusepy.Operations), {})(
        Path(options["backing"]),
        options["profile"] and DriveProfile(**options["profile"]),
        Path(options["faults"]),
    )
    mfusepy.FUSE(
        drive,
        options["folder"],
        foreground=True,
        subtype="drive",
        direct_io=options["direct"],
        nothreads=False,
        max_threads=_MOST_THREADS,
    )


if __name__ == "__main__":
    main()
