"""The Drive doctor: what reading a folder costs, cold and warm, and which cure comes first. It never writes there."""

from __future__ import annotations

import os
import random
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from colab_utils.drive import DRIVE_PROFILES, DriveFile, DriveProfile, get_profile
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import count_cores, format_bytes, format_seconds
from colab_utils.shards.format import INDEX_NAME, ShardIndex, read_index

__all__ = ["DriveHealth", "examine_drive"]

_IMAGES, _LARGE = (".jpg", ".jpeg", ".png", ".bmp", ".webp", ".tif", ".tiff", ".npy"), (".zip", ".tar", ".json")
# bytes after which no further file is started (eight may be under way); of one file; read at once; of an opening
_MOST_BYTES, _FILE_BYTES, _PIECE_BYTES, _FIRST_BYTES = 130_000_000, 8_000_000, 1 << 19, 4096
# a mount fetches files that are not long in one go: what is left after their first bytes comes from its memory
_LONG_BYTES, _SAMPLED_FILES, _FULL_ENTRIES = 1_000_000, 200, 6_000


_LOG_WORDS, _GONE = ("QUOTA_EXCEEDED", "QueryManager timed out"), ("Transport endpoint is not connected", "no answer")


_FULL_WORDS = ("Input/output error", "cut off", "list_files", *_LOG_WORDS)


_Read = tuple[str, int, float, int, float]  # path, size, seconds to the first bytes; bytes after those, their seconds


@dataclass(frozen=True)
class DriveHealth:
    """What `examine_drive` found; None stands for what could not be measured.

    ``kind`` is "Google Drive", "slowed folder" or "other disk". An epoch reads ``files`` and ``bytes`` (files times the
    sample's mean where no index gives them), out of shards where ``sharded``. These and the ``entries`` of
    ``fullest_folder`` are lower bounds unless ``complete``. ``open_ms_median`` and ``open_ms_p95``: milliseconds to a
    file's first bytes, of ``sampled_files`` read for the first time. ``cold_mb_per_s`` and ``warm_mb_per_s`` (1e6
    bytes): one stream, read for the first and for the second time. Several reads at once came ``workers_gain`` times as
    fast as one. Seconds of reading: ``epoch_s`` in a session's first epoch, ``later_epoch_s`` in later ones, of which
    Drive's cache may hold the files. ``free_bytes`` are those of the disk where that cache lies, ``drive_log_bytes``
    what was read of Drive's log, ``read_bytes`` of the folder.
    """

    folder: str
    kind: str
    epochs: int
    files: int = 0
    bytes: int = 0
    sharded: bool = False
    complete: bool = False
    sampled_files: int = 0
    open_ms_median: float | None = None
    open_ms_p95: float | None = None
    cold_mb_per_s: float | None = None
    warm_mb_per_s: float | None = None
    workers_gain: float | None = None
    epoch_s: float | None = None
    later_epoch_s: float | None = None
    copy_s: float | None = None
    fullest_folder: str = ""
    entries: int = 0
    free_bytes: int | None = None
    drive_log_bytes: int | None = None
    read_bytes: int = 0
    troubles: tuple[str, ...] = ()

    @property
    def cures(self) -> tuple[str, ...]:
        """What to do, the first thing first; costs are of reading alone, over ``epochs``.

        Sources, all googlecolab/colabtools: few big files (#751, #3084), the cache that keeps a copy too (#1915), the
        quota (#1607, #1428), trouble from about 6,000 files in a folder on (#1076, #510), none above 500,000 (#2865).
        """
        if self.kind == "other disk":
            return ("Drive is not what you wait for: this folder is not on it. Ask diagnose what is.",)
        cures, found, free = [], " ".join(self.troubles), self.free_bytes
        if any(word in found for word in _GONE):
            cures.append("Mount Drive again (drive.mount with force_remount=True), or restart; then run this again.")
        if self.epoch_s is not None and self.later_epoch_s is not None and self.copy_s is not None:
            cures.append(self._weigh(self.epoch_s, self.later_epoch_s, self.copy_s))
        if free is not None and 2 * self.bytes > free:
            room = f"with Drive's cache it takes {format_bytes(2 * self.bytes)}, {format_bytes(free)} are free"
            cures.append(f"Free some disk, or copy a part (limit_gb={free // 2e8 / 10:g}): {room}.")
        if self.entries >= _FULL_ENTRIES or any(word in found for word in _FULL_WORDS):
            cures.append(f"Make fewer, larger files of those in {self.fullest_folder}: {_FULL_ENTRIES:,} make trouble.")
        return tuple(cures)

    def _weigh(self, first_s: float, later_s: float, copy_s: float) -> str:
        """Whether shards, or a copy of those there are, win over the epochs: one sentence with both costs."""
        now_s, once_s = first_s + (self.epochs - 1) * later_s, copy_s + (0 if self.sharded else first_s)
        first, later, now, once, copy = map(format_seconds, (first_s, later_s, now_s, once_s, copy_s))
        if now_s < 1.1 * once_s:
            more = "" if self.sharded else f"; each new session costs {first} again, or {copy} with shards"
            return f"Leave the files where they are: {self.epochs} epochs take {now}, a copy for them {once}{more}."
        start = "Copy the shards, which read from here" if self.sharded else "Make shards and copy those: loose files"
        often = "every epoch" if later_s > first_s / 2 else f"in a session's first epoch and {later} in later ones"
        speed = f"{self.cold_mb_per_s:.0f} MB/s" if self.cold_mb_per_s else "the 65 MB/s that others measured"
        last = "" if self.sharded else f", after one last pass of {first} that makes the shards"
        cost = f"cost you {first} {often}, or {copy} once a session ({format_bytes(self.bytes)} at {speed}){last}"
        return f"{start} {cost}. Over {self.epochs} epochs: {now}, or {once}."

    def __str__(self) -> str:
        bound, speed = "" if self.complete else "at least ", "no file could be read"
        if self.open_ms_median is not None:
            speed = f"{self.open_ms_median:.3g} ms a file (p95 {self.open_ms_p95:.3g}, {self.sampled_files} read)"
        for name, rate in (("cold", self.cold_mb_per_s), ("warm", self.warm_mb_per_s)):
            speed += f", {rate:.0f} MB/s {name}" if rate else ""
        times = [format_seconds(time_s) for time_s in (self.epoch_s, self.later_epoch_s) if time_s is not None]
        size = f"{bound}{self.files:,} files, {format_bytes(self.bytes)}: {', later '.join(times) or 'not measured'}"
        parts = [f"{self.kind} at {self.folder}: {speed}", f"  an epoch reads {size}"]
        parts += [f"  fullest folder: {bound}{self.entries:,} entries", *(f"  trouble: {met}" for met in self.troubles)]
        parts += [f"{number}. {cure}" for number, cure in enumerate(self.cures, 1)]
        missing = [figure.name.replace("_", " ") for figure in fields(self) if getattr(self, figure.name) is None]
        return "\n".join([*parts, f"not measured: {', '.join([*missing, 'decoding', 'writing shards', 'the step'])}"])


def examine_drive(
    folder: str | Path, *, images: Any = None, profile: str | DriveProfile | None = None,
    seconds: float = 20, epochs: int = 10,
) -> DriveHealth:  # fmt: skip
    """Measure what reading a folder costs, and say what to do about it; it writes nothing and reads 200 MB at most.

    Files are picked by chance, so that a second examination meets others, which Drive has not cached yet. All that
    asks the mount runs in threads that are left behind where it does not answer: the examination ends in time and says
    so. An epoch takes files times latency plus bytes over speed, divided by what several reads at once gain.

    Args:
        folder: on Google Drive, on another mount, or on this machine.
        images: what an epoch reads: a folder below ``folder``, a list of files (relative to it), a `CocoFolder` or a
            `ShardDataset`. Default: the shards in ``folder`` if an index lies there, else the images below it.
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
    place, speed = os.path.abspath(Path(folder).expanduser()), get_profile(profile) or getattr(images, "profile", None)
    visit = _Visit(seconds, speed)
    kind = _find_kind(next(iter(visit.run(0.1, os.path.realpath, [place])), place))
    visit.profile = None if kind == "Google Drive" else speed
    kind = kind if visit.profile is None else "slowed folder"
    complete = visit.run(0.3, visit.list_files, [place]) == [True]
    paths, size = visit.find_epoch(images, place)
    if not (paths and visit.counts) and visit.met.keys() <= {"No such file or directory", "Not a directory"}:
        found = ", ".join(visit.met) or ("none" if images is None else f"none of {images!r:.60}")
        raise ColabUtilsError(f"expected files in {place}, found {found}: mount Drive first, or name another folder")
    disk = visit.run(0.35, shutil.disk_usage, [place if kind == "slowed folder" else str(Path.home())])
    free, log = disk[0].free if disk else None, Path("~/.config/Google/DriveFS/Logs/drive_fs.txt").expanduser()
    figures = visit.measure(paths, size, free, mounted=kind == "Google Drive")
    text = log.read_text(errors="replace") if kind == "Google Drive" and log.is_file() else ""
    troubles = [f"{at[0]}{f' and {len(at) - 1:,} more' * (len(at) > 1)}: {why}" for why, at in dict(visit.met).items()]
    troubles += [f"Drive's log says {word} {text.count(word):,} times" for word in _LOG_WORDS if word in text]
    fullest, entries = max(dict(visit.counts).items(), key=lambda item: item[1], default=(place, 0))
    return DriveHealth(
        place, kind, epochs, len(paths), sharded=size is not None, complete=complete, fullest_folder=fullest,
        entries=entries, free_bytes=free, drive_log_bytes=len(text) or None, troubles=tuple(troubles), **figures,
    )  # fmt: skip


class _Visit:
    """One examination under way: its clock, what it has seen so far, and where it met what trouble."""

    def __init__(self, seconds: float, profile: DriveProfile | None) -> None:
        self.began, self.seconds, self.profile, self.until, self.read_bytes = perf_counter(), seconds, profile, 0.0, 0
        self.files, self.counts, self.met = list[str](), dict[str, int](), defaultdict[str, list[str]](list)

    def run(self, share: float, call: Callable[[str], Any], paths: Sequence[str], lanes: int = 1) -> list[Any]:
        """Call with each path until this share of the time is over, in threads; one that hangs is left behind."""
        found, doing, todo = list[Any](), dict[int, str](), iter(paths)
        until = self.until = self.began + share * self.seconds

        def work(lane: int) -> None:
            while perf_counter() < until and self.read_bytes < share * _MOST_BYTES and (path := next(todo, None)):
                doing[lane] = path
                try:
                    found.append(call(path))
                except (OSError, ValueError, ColabUtilsError) as error:
                    if isinstance(cause := error.__cause__ or error, OSError):
                        self.met[str(cause.strerror)].append(path)

        threads = [threading.Thread(target=work, args=(lane,), daemon=True) for lane in range(lanes)]
        for thread in threads:
            thread.start()
        for lane, thread in enumerate(threads):
            thread.join(max(0.0, until + min(4.0, self.seconds / 8) - perf_counter()))  # under way is not lost
            if thread.is_alive() and lane in doing:
                self.met[f"no answer ({call.__name__})"].append(doing[lane])
        return found.copy()

    def list_files(self, root: str) -> bool:
        """Count the entries of each folder below one, and gather the files; whether all could be listed."""
        for folder, folders, files in os.walk(root, onerror=lambda e: self.met[str(e.strerror)].append(e.filename)):
            self.counts[folder] = len(folders) + len(files)
            self.files += [os.path.join(folder, name) for name in files]
            if perf_counter() > self.until:
                raise OSError(0, "it takes long to list, and was cut off")
        return not self.met

    def read_start(self, path: str) -> _Read:
        """Read the start of a file."""
        began = perf_counter()
        with DriveFile(path, self.profile) as file:
            first = got = piece = len(file.pread(_FIRST_BYTES, 0))
            opened = perf_counter()
            while piece and got < min(file.size, _FILE_BYTES) and perf_counter() < self.until:
                got += (piece := len(file.pread(_PIECE_BYTES, got)))
            self.read_bytes += got
            return path, file.size, opened - began, got - first, perf_counter() - opened

    def find_epoch(self, images: Any, place: str) -> tuple[list[str], int | None]:
        """The files that an epoch reads, and their bytes where an index of shards gives them."""
        index, names = getattr(images, "index", None), images
        if images is None and os.path.join(place, INDEX_NAME) in self.files:
            index = next(iter(self.run(0.35, read_index, [place])), None)
        names = [name for name, _, _ in index.files()] if isinstance(index, ShardIndex) else names
        names = [images.coco.file_name(i) for i in range(len(images))] if hasattr(images, "coco") else names
        if isinstance(names, Sequence) and not isinstance(names, str):
            root = getattr(images, "folder", place)
            return [os.path.join(root, str(name)) for name in names], getattr(index, "bytes", None)
        root = os.path.join(os.path.abspath(place if images is None else str(images)), "")
        found = [path for path in self.files if path.startswith(root)]
        return [path for path in found if path.lower().endswith(_IMAGES)] or found, None

    def measure(self, paths: list[str], size: int | None, free: int | None, *, mounted: bool) -> dict[str, Any]:
        """The figures of a `DriveHealth` that need files to be read."""
        picked, lanes = random.sample(paths, min(_SAMPLED_FILES, len(paths))), max(2, min(8, count_cores()))
        split = len(picked) if len(picked) < 8 else len(picked) // 2
        alone = self.run(0.55, self.read_start, picked[:split])
        large = self.run(0.6, self.read_start, [path for path in {*self.files} - {*paths} if path.endswith(_LARGE)][:3])
        together = self.run(0.8, self.read_start, picked[split:], lanes)
        if not (cold := alone or together):
            return {}
        again = self.run(1, self.read_start, [path for path, *_ in cold])
        opens_ms, shards = [open_s * 1000 for _, _, open_s, *_ in cold], len(paths) if size else 0
        size = size or round(len(paths) * np.mean([length for _, length, *_ in alone + together]))
        gain = min(max(lanes * _fit(alone)[0] / _fit(together)[0], 1.0), float(lanes)) if alone and together else None
        first_s, later_s = (float(np.dot(_fit(r), (len(paths), size))) / (gain or 1) for r in (cold, again or cold))
        if mounted and first_s < 2 * later_s and again and _fit(cold)[0] < 0.005:
            self.met["first reads were as fast as second ones, Drive's cache may hold all"].append(cold[0][0])
        both = ([read for read in reads if read[3] >= _LONG_BYTES or not mounted] for reads in (alone + large, again))
        (_, cold_s), (_, warm_s) = map(_fit, both)
        return {
            "bytes": size, "sampled_files": len(alone) + len(together), "workers_gain": gain, "epoch_s": first_s,
            "open_ms_median": float(np.median(opens_ms)), "open_ms_p95": float(np.percentile(opens_ms, 95)),
            "cold_mb_per_s": 1e-6 / cold_s if cold_s else None, "warm_mb_per_s": 1e-6 / warm_s if warm_s else None,
            "later_epoch_s": later_s if size < (free or 0) else first_s, "read_bytes": self.read_bytes,
            "copy_s": size * (cold_s or 1 / DRIVE_PROFILES["typical"].bytes_per_s) + shards * _fit(cold)[0],
        }  # fmt: skip


def _fit(reads: list[_Read]) -> tuple[float, float]:
    """Mean seconds to open a file, and seconds for each byte after its first ones; 0 where none came."""
    opens, count = [read[2] for read in reads], sum(read[3] for read in reads)
    return float(np.mean(opens or [0])), sum(read[4] for read in reads) / count if count else 0.0


def _find_kind(path: str) -> str:
    """Whether a path lies on Google Drive, by the table of mounts, which asks none of them.

    Source: ``flush_and_unmount`` in google/colab/drive.py knows Drive by its type there.
    """
    table = Path("/proc/self/mounts")
    mounts = [line.split()[1:3] for line in table.read_text().splitlines()] if table.exists() else []
    _, system = max(((len(at), system) for at, system in mounts if Path(path).is_relative_to(at)), default=(0, ""))
    return "Google Drive" if system == "fuse.drive" else "other disk"
