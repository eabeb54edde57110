"""The process behind `tests.drive_mount`: a folder of this machine, served as a slow mount that
fails on command.

The faults lie in a JSON file that is read again whenever it changes, so a test can break the mount
while it is used.
"""

from __future__ import annotations

import argparse
import errno
import json
import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colab_utils.slow_drive import DriveProfile, get_profile

# More reads at once than any reader begins: the profile decides, and not the library.
_MOST_THREADS = 400
# A stream goes on for so long while nobody reads it, into the buffers of its connection.
BUFFERED_S = 0.01


class _Stream:
    """Bytes that come at a rate, however many ask for them."""

    def __init__(self, bytes_per_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._last_s = time.perf_counter()

    def plan(self, count: int) -> float:
        """When so many more bytes are there, by `time.perf_counter`."""
        self._last_s = (
            max(self._last_s, time.perf_counter() - BUFFERED_S) + count / self.bytes_per_s
        )
        return self._last_s


@dataclass
class _Open:
    """A file that is open: its descriptor, and the stream that it is read from."""

    descriptor: int
    cached: bool
    stream: _Stream | None = None
    read_bytes: int = 0
    written: bool = False
    is_cut: bool = False


class Drive:
    """The calls of the file system; times and faults come first, then the folder behind it."""

    def __init__(
        self,
        backing: Path,
        profile: DriveProfile | None,
        faults_file: Path,
        total_bytes_per_s: float,
    ) -> None:
        self.backing = backing
        self.profile = profile
        self.faults_file = faults_file
        self._faults: dict[str, Any] = {}
        self._changed = 0
        self._files: dict[int, _Open] = {}
        self._cached: set[str] = set()
        self._ours: set[str] = set()
        self._lock = threading.Lock()
        self._line = threading.Condition(self._lock)
        self._in_line = 0
        self._served = 0
        self._pipe = _Stream(total_bytes_per_s) if total_bytes_per_s else None

    def check(self, *, writes: bool = False, reads: bool = False, looks: bool = False) -> None:
        """Raise what is to go wrong now."""
        with self._lock:
            changed = self.faults_file.stat().st_mtime_ns
            if changed != self._changed:
                self._faults = json.loads(self.faults_file.read_text())
                self._changed = changed
                # More files may be served at once than before.
                self._line.notify_all()
            if self._faults["lost"]:
                raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
            if writes and self._faults["full"]:
                raise OSError(errno.ENOSPC, "No space left on device")
            for is_meant, name in ((looks, "call_errors"), (reads, "errors")):
                if is_meant and self._faults[name] > 0:
                    self._faults[name] -= 1
                    raise OSError(errno.EIO, "Input/output error")

    def find(self, path: str) -> str:
        return str(self.backing / path.lstrip("/"))

    def hides(self, path: str) -> bool:
        """Whether another machine wrote this so lately that it does not show yet, or it is to be
        hidden.
        """
        hidden = self._faults["hidden_name"]
        if hidden and hidden in path:
            return True
        late_s = self._faults["late_s"]
        return (
            bool(late_s)
            and path not in self._ours
            and time.time() - os.lstat(self.find(path)).st_mtime < late_s
        )

    # The calls from here on only look at files and folders.

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self.check(looks=True)
        if self.hides(path):
            raise OSError(errno.ENOENT, "No such file or directory")
        status = os.lstat(self.find(path))
        names = ["mode", "nlink", "uid", "gid", "size", "atime", "mtime", "ctime", "ino"]
        return {f"st_{name}": getattr(status, f"st_{name}") for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        self.check()
        names = [
            name for name in os.listdir(self.find(path)) if not self.hides(os.path.join(path, name))
        ]
        if len(names) > self._faults["most_entries"]:
            raise OSError(errno.EIO, "Input/output error")
        return [".", "..", *names]

    def readlink(self, path: str) -> str:
        self.check()
        return os.readlink(self.find(path))

    def statfs(self, path: str) -> dict[str, int]:
        self.check()
        status = os.statvfs(self.backing)
        names = [
            "bsize",
            "frsize",
            "blocks",
            "bfree",
            "bavail",
            "files",
            "ffree",
            "favail",
            "namemax",
        ]
        return {f"f_{name}": getattr(status, f"f_{name}") for name in names}

    # The calls from here on read.

    def wait_in_line(self, profile: DriveProfile) -> None:
        """Wait until a cold file is served, or refuse it, as Drive with so many streams does."""
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

    def open(self, path: str, flags: int) -> int:
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR))
        self.check(writes=writes)
        descriptor = os.open(
            self.find(path),
            flags & ~os.O_APPEND & ~os.O_EXCL,
        )
        cached = path in self._cached
        if self.profile and not cached and not writes:
            self.wait_in_line(self.profile)
        stream = _Stream(self.profile.bytes_per_s) if self.profile and not cached else None
        file = _Open(descriptor, cached, stream, written=writes)
        with self._lock:
            if self._faults["cut_opens"] > 0 and self._faults["cut_name"] in path and not writes:
                self._faults["cut_opens"] -= 1
                file.is_cut = True
        self._files[descriptor] = file
        return descriptor

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self.check(reads=True)
        file = self._files[fh]
        if self._faults["short_read"]:
            size = min(size, self._faults["short_read"])
        if file.is_cut:
            size = max(0, min(size, os.fstat(fh).st_size // 2 - offset))
        data = os.pread(fh, size, offset)
        if file.stream:
            # So many bytes take their time in this stream, and in the pipe that all streams share.
            with self._lock:
                ready_s = max(
                    stream.plan(len(data)) for stream in (file.stream, self._pipe) if stream
                )
                file.read_bytes += len(data)
            time.sleep(max(0.0, ready_s - time.perf_counter()))
        return data

    # The calls from here on write.

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        self.check(writes=True)
        descriptor = os.open(
            self.find(path),
            os.O_RDWR | os.O_CREAT | os.O_TRUNC,
            mode,
        )
        self._files[descriptor] = _Open(descriptor, cached=True, written=True)
        self._ours.add(path)
        return descriptor

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self.check(writes=True)
        lost = min(self._faults["lost_bytes"], len(data))
        return os.pwrite(fh, data[: len(data) - lost] + bytes(lost), offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        self.check(writes=True)
        os.truncate(fh if fh is not None else self.find(path), length)
        return 0

    def release(self, path: str, fh: int) -> int:
        file = self._files.pop(fh)
        if file.read_bytes >= os.fstat(fh).st_size > 0 or file.written:
            self._cached.add(path)
        os.close(fh)
        return 0

    def flush(self, path: str, fh: int) -> int:
        self.check()
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self.check()
        return 0

    def unlink(self, path: str) -> int:
        self.check()
        os.unlink(self.find(path))
        self._cached.discard(path)
        return 0

    def rename(self, old: str, new: str) -> int:
        self.check(writes=True)
        os.rename(self.find(old), self.find(new))
        for paths in (self._cached, self._ours):
            if old in paths:
                paths.discard(old)
                paths.add(new)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        self.check(writes=True)
        os.mkdir(self.find(path), mode)
        return 0

    def rmdir(self, path: str) -> int:
        self.check()
        os.rmdir(self.find(path))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        return 0

    def utimens(self, path: str, times: Any = None) -> int:
        self.check()
        os.utime(self.find(path), times)
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backing", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--profile", default="none", help="a name, or a profile as JSON")
    parser.add_argument(
        "--total-bytes-per-s", type=float, default=0.0, help="of all streams together; 0: no limit"
    )
    parser.add_argument("--faults", type=Path, required=True)
    parser.add_argument("--direct", action="store_true", help="nothing is kept by the kernel")
    options = parser.parse_args()
    text = options.profile
    profile = DriveProfile(**json.loads(text)) if text.startswith("{") else get_profile(text)
    # The import waits until now, so that pytest can look at this file where there is no libfuse.
    import mfusepy

    drive = type("Mounted", (Drive, mfusepy.Operations), {})(
        options.backing.absolute(),
        profile,
        options.faults,
        options.total_bytes_per_s,
    )
    folder = str(options.folder)
    direct = options.direct
    mfusepy.FUSE(
        drive,
        folder,
        foreground=True,
        subtype="drive",
        direct_io=direct,
        nothreads=False,
        max_threads=_MOST_THREADS,
    )


if __name__ == "__main__":
    main()
