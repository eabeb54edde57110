"""The Drive doctor: what reading a folder costs, cold and warm, and which cure comes first. It never writes there."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from colab_utils.drive import DRIVE_PROFILES, DriveFile, DriveProfile, get_profile, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import format_bytes, format_seconds
from colab_utils.shards.format import INDEX_NAME, ShardIndex, read_index

__all__ = ["DriveHealth", "examine_drive"]

_IMAGES = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".npy")
# bytes after which no further file is started; of one file; read at once; of an opening
_MOST_BYTES, _FILE_BYTES, _PIECE_BYTES, _FIRST_BYTES = 130_000_000, 8_000_000, 1 << 19, 4096
# a mount fetches files that are not long in one go: what is left after their first bytes comes from its memory
_LONG_BYTES, _SAMPLED_FILES, _FULL_ENTRIES = 1_000_000, 100, 6_000
_GONE = ("Transport endpoint is not connected", "no answer")
_FULL = ("Input/output error", "cut off", "list_files")


class _Read(NamedTuple):
    """One file that was read; ``rest`` is what comes after its first bytes."""

    path: str
    size: int
    open_s: float
    rest_bytes: int
    rest_s: float


@dataclass(frozen=True)
class DriveHealth:
    """What `examine_drive` found; None stands for what could not be measured."""

    folder: str
    kind: str
    """"Google Drive", "slowed folder" or "other disk"."""
    epochs: int
    files: int = 0
    """That an epoch reads."""
    bytes: int = 0
    """Files times the sample's mean where no index gives them."""
    sharded: bool = False
    open_ms_median: float | None = None
    """Milliseconds to a file's first bytes, of files read for the first time."""
    open_ms_p95: float | None = None
    cold_mb_per_s: float | None = None
    """One stream, read for the first time, in 1e6 bytes."""
    epoch_s: float | None = None
    """Seconds of reading in a session's first epoch, one file after the other."""
    later_epoch_s: float | None = None
    """In later ones, of which Drive's cache may hold the files."""
    copy_s: float | None = None
    fullest_folder: str = ""
    entries: int = 0
    """Of ``fullest_folder``."""
    free_bytes: int | None = None
    """Of the disk where Drive's cache lies."""
    troubles: tuple[str, ...] = ()

    @property
    def cures(self) -> tuple[str, ...]:
        """What to do, the first thing first; costs are of reading alone, over ``epochs``.

        Sources, all googlecolab/colabtools: few big files (#751, #3084), the cache that keeps a copy too (#1915), the
        quota (#1607, #1428), trouble from about 6,000 files in a folder on (#1076, #510), none above 500,000 (#2865).
        """
        if self.kind == "other disk":
            return ("This folder is not on Drive, so Drive is not what you wait for. Ask diagnose what is.",)
        cures, found = [], " ".join(self.troubles)
        if any(word in found for word in _GONE):
            cures.append("Mount Drive again (drive.mount with force_remount=True), or restart; then run this again.")
        if self.epoch_s is not None and self.later_epoch_s is not None and self.copy_s is not None:
            cures.append(self._weigh(self.epoch_s, self.later_epoch_s, self.copy_s))
        if self.free_bytes is not None and 2 * self.bytes > self.free_bytes:
            room = f"with Drive's cache it takes {format_bytes(2 * self.bytes)} of {format_bytes(self.free_bytes)}"
            cures.append(f"Free some disk, or copy a part (limit_gb={self.free_bytes // 2e8 / 10:g}): {room}.")
        if self.entries >= _FULL_ENTRIES or any(word in found for word in _FULL):
            cures.append(f"Make fewer, larger files of those in {self.fullest_folder}: {_FULL_ENTRIES:,} make trouble.")
        return tuple(cures)

    def _weigh(self, first_s: float, later_s: float, copy_s: float) -> str:
        """Whether shards, or a copy of those there are, win over the epochs: one sentence with both costs."""
        now_s, once_s = first_s + (self.epochs - 1) * later_s, copy_s + (0 if self.sharded else first_s)
        now, once, copy = map(format_seconds, (now_s, once_s, copy_s))
        if now_s < 1.1 * once_s:
            return f"Leave the files where they are: {self.epochs} epochs read for {now}, a copy costs {once}."
        last = "" if self.sharded else f", {copy} of it in each session"
        start = "Copy the shards" if self.sharded else "Make shards and copy those"
        return f"{start}: {self.epochs} epochs read from here for {now}, a copy costs {once}{last}."

    def __str__(self) -> str:
        speed, reads = "no file could be read", f"an epoch reads {self.files:,} files, {format_bytes(self.bytes)}"
        if self.open_ms_median is not None and self.epoch_s is not None and self.later_epoch_s is not None:
            speed = f"{self.open_ms_median:.3g} ms a file (p95 {self.open_ms_p95:.3g})"
            speed += f", {self.cold_mb_per_s:.0f} MB/s" if self.cold_mb_per_s else ""
            reads += f": {format_seconds(self.epoch_s)}, later {format_seconds(self.later_epoch_s)}"
        cures = [f"{number}. {cure}" for number, cure in enumerate(self.cures, 1)]
        return "\n  ".join([f"{self.kind} at {self.folder}: {speed}", reads, *self.troubles, *cures])


def examine_drive(
    folder: str | Path, *, images: Any = None, profile: str | DriveProfile | None = None,
    seconds: float = 20, epochs: int = 10,
) -> DriveHealth:  # fmt: skip
    """Measure what reading a folder costs, and say what to do about it; it writes nothing and reads 140 MB at most.

    Files are picked at random, so that a second examination meets others, which Drive has not cached yet. All that
    asks the mount runs in threads that are left behind where it does not answer: the examination ends in time and says
    so. An epoch takes files times latency plus bytes over speed: one file is read after the other.

    Args:
        folder: on Google Drive, on another mount, or on this machine.
        images: what an epoch reads: a `CocoFolder`, a `ShardDataset`, or a list of files (relative to ``folder``).
            Default: the shards in ``folder`` if an index lies there, else the images below it.
        profile: the speed of a slowed folder (see `colab_utils.drive`). Default: that of ``images``, else none. A
            mounted Google Drive has its own.
        seconds: to end after, 1 or more; whatever the mount does, it takes at most 5 more. What takes over an eighth
            of it (at most 4 s) counts as no answer.
        epochs: over which the cures are weighed.

    Raises:
        ColabUtilsError: no such folder, a file in its place, nothing to read in it, or an argument out of range. What
            a mount refuses is no error: it stands in ``troubles``.

    Example:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = Path(folder, "photo.jpg").write_bytes(bytes(50_000))
        ...     health = examine_drive(folder, profile="typical", seconds=2)
        >>> health.kind, health.files, round(health.open_ms_median, -1)
        ('slowed folder', 1, 60.0)
    """
    if not (1 <= seconds <= 3600 and epochs >= 1):
        raise ColabUtilsError(f"expected 1 to 3600 seconds, and epochs of 1 or more, found {seconds!r} and {epochs!r}")
    place = os.path.abspath(Path(folder).expanduser())
    visit = _Visit(seconds, get_profile(profile, place) or getattr(images, "profile", None))
    mounted = visit.run(0.1, is_on_drive, [place]) == [True]
    visit.profile = None if mounted else visit.profile
    kind = "Google Drive" if mounted else "slowed folder" if visit.profile else "other disk"
    visit.run(0.3, visit.list_files, [place])
    paths, size = visit.find_epoch(images, place)
    if not (paths and visit.counts) and visit.met.keys() <= {"No such file or directory", "Not a directory"}:
        found = ", ".join(visit.met) or ("none" if images is None else f"none of {images!r:.60}")
        raise ColabUtilsError(f"expected files in {place}, found {found}: mount Drive first, or name another folder")
    disk = visit.run(0.35, shutil.disk_usage, [place if kind == "slowed folder" else str(Path.home())])
    free = disk[0].free if disk else None
    figures = visit.measure(paths, size, free, mounted=mounted)
    fullest, entries = max(dict(visit.counts).items(), key=lambda item: item[1], default=(place, 0))
    met = dict(visit.met).items()
    troubles = tuple(f"{at[0]}{f' and {len(at) - 1:,} more' * (len(at) > 1)}: {why}" for why, at in met)
    return DriveHealth(
        place, kind, epochs, len(paths), sharded=size is not None, fullest_folder=fullest, entries=entries,
        free_bytes=free, troubles=troubles, **figures,
    )  # fmt: skip


class _Visit:
    """One examination under way: its clock, what it has seen so far, and where it met what trouble."""

    def __init__(self, seconds: float, profile: DriveProfile | None) -> None:
        self.began, self.seconds, self.profile, self.until, self.read_bytes = perf_counter(), seconds, profile, 0.0, 0
        self.files, self.counts, self.met = list[str](), dict[str, int](), defaultdict[str, list[str]](list)

    def run(self, share: float, call: Callable[[str], Any], paths: Sequence[str]) -> list[Any]:
        """Call with each path until this share of the time is over, in a thread; one that hangs is left behind."""
        found, doing = list[Any](), list[str]()
        until = self.until = self.began + share * self.seconds

        def work() -> None:
            for path in paths:
                if perf_counter() > until or self.read_bytes > share * _MOST_BYTES:
                    return
                doing[:] = [path]
                try:
                    found.append(call(path))
                except (OSError, ValueError, ColabUtilsError) as error:
                    if isinstance(cause := error.__cause__ or error, OSError):
                        self.met[str(cause.strerror)].append(path)

        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        worker.join(max(0.0, until + min(4.0, self.seconds / 8) - perf_counter()))  # under way is not lost
        if worker.is_alive() and doing:
            self.met[f"no answer ({call.__name__})"] += doing
        return found.copy()

    def list_files(self, root: str) -> None:
        """Count the entries of each folder below one, and gather the files."""
        for folder, folders, files in os.walk(root, onerror=lambda e: self.met[str(e.strerror)].append(e.filename)):
            self.counts[folder] = len(folders) + len(files)
            self.files += [os.path.join(folder, name) for name in files]
            if perf_counter() > self.until:
                raise OSError(0, "it takes long to list, and was cut off")

    def read_start(self, path: str) -> _Read:
        """Read the start of a file."""
        began = perf_counter()
        with DriveFile(path, self.profile) as file:
            first = got = piece = len(file.pread(_FIRST_BYTES, 0))
            opened = perf_counter()
            while piece and got < min(file.size, _FILE_BYTES) and perf_counter() < self.until:
                got += (piece := len(file.pread(_PIECE_BYTES, got)))
            self.read_bytes += got
            return _Read(path, file.size, opened - began, got - first, perf_counter() - opened)

    def find_epoch(self, images: Any, place: str) -> tuple[list[str], int | None]:
        """The files that an epoch reads, and their bytes where an index of shards gives them."""
        index = getattr(images, "index", None)
        if images is None and os.path.join(place, INDEX_NAME) in self.files:
            index = next(iter(self.run(0.35, read_index, [place])), None)
        if isinstance(index, ShardIndex):
            root = getattr(images, "folder", place)
            return [os.path.join(root, name) for name, _, _ in index.files()], index.bytes
        if hasattr(images, "coco"):
            return [str(images.find_path(number)) for number in range(len(images))], None
        if images is None:
            return [path for path in self.files if path.lower().endswith(_IMAGES)] or self.files, None
        return [os.path.join(place, name) for name in images] if isinstance(images, list) else [], None

    def measure(self, paths: list[str], size: int | None, free: int | None, *, mounted: bool) -> dict[str, Any]:
        """The figures of a `DriveHealth` that need files to be read."""
        picked = random.Random().sample(paths, min(_SAMPLED_FILES, len(paths)))
        cold = self.run(0.5, self.read_start, picked) or self.run(0.75, self.read_start, picked[:0:-1])
        if not cold:
            return {}
        again = self.run(1, self.read_start, [read.path for read in cold]) or cold
        shards = len(paths) if size else 0
        size = size or round(len(paths) * np.mean([read.size for read in cold]))
        first_s, later_s = (float(np.dot(_fit(reads), (len(paths), size))) for reads in (cold, again))
        if mounted and again is not cold and first_s < 2 * later_s and _fit(cold)[0] < 0.005:
            self.met["first reads were as fast as second ones, Drive's cache may hold all"].append(cold[0].path)
        _, byte_s = _fit([read for read in cold if read.rest_bytes >= _LONG_BYTES or not mounted])
        opens_ms = [read.open_s * 1000 for read in cold]
        return {
            "bytes": size, "epoch_s": first_s,
            "open_ms_median": float(np.median(opens_ms)), "open_ms_p95": float(np.percentile(opens_ms, 95)),
            "cold_mb_per_s": 1e-6 / byte_s if byte_s else None,
            "later_epoch_s": later_s if size < (free or 0) else first_s,
            "copy_s": size * (byte_s or 1 / DRIVE_PROFILES["typical"].bytes_per_s) + shards * _fit(cold)[0],
        }  # fmt: skip


def _fit(reads: list[_Read]) -> tuple[float, float]:
    """Mean seconds to open a file, and seconds for each byte after its first ones; 0 where none came."""
    count = sum(read.rest_bytes for read in reads)
    return float(np.mean([read.open_s for read in reads] or [0])), sum(read.rest_s for read in reads) / (count or 1)
