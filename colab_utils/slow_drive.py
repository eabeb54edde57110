"""A slow Drive without a Drive: what lies below a slowed folder is read no faster than a profile
allows.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from time import perf_counter, sleep
from typing import TextIO

import xxhash

from colab_utils.drive import DriveLostError
from colab_utils.require import require_choice, require_local_path

# The slowed folders as JSON, where child processes find them.
_SLOWED = "COLAB_UTILS_SLOWED"
# A file that says when the link to Drive is free again: all that this user runs on this machine
# shares one link.
_LINK_FOLDER = "/dev/shm" if os.path.isdir("/dev/shm") else "/tmp"
_USER = os.getuid() if hasattr(os, "getuid") else 0
_LINK = f"{_LINK_FOLDER}/colab_utils-drive-reads-{_USER}"


@dataclass(frozen=True)
class DriveProfile:
    """How slow a cold read is: one that Drive's cache does not answer. A second read of a file
    waits as long.
    """

    name: str
    """One word, shown in reports."""
    open_s: float
    """Mean seconds to reach a place in a file."""
    bytes_per_s: float
    """Bytes a second from there on, of all streams together."""
    source: str
    """Where the two figures come from."""
    tail: float = 0.0
    """How much openings differ: the sigma of their log-normal distribution; 0.8 makes one of 20
    take 2.7 means.
    """
    streams: int = 128
    """Reads that are served at once; the others wait in line. 128 is assumed: nobody has published
    what Drive serves.
    """
    most_reads: int | None = None
    """Reads in flight, above which one more is refused with errno 5; None refuses none: assumed."""

    def draw_open_s(self, path: str | Path, offset: int = 0) -> float:
        """Return the seconds to reach this place in a file.

        They are always the same for a folder's name, a file's name and an offset.

        Example:
            >>> slow = DRIVE_PROFILES["bad"]
            >>> slow.draw_open_s("images/1.jpg") == slow.draw_open_s("elsewhere/images/1.jpg")
            True
        """
        place = "/".join(Path(path).parts[-2:])
        share = (xxhash.xxh32_intdigest(os.fsencode(f"{place} {offset}")) + 0.5) / 2**32
        return self.open_s * math.exp(self.tail * NormalDist().inv_cdf(share) - self.tail**2 / 2)

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.open_s * 1000:.0f} ms per file, {self.bytes_per_s / 1e6:.0f} MB/s"
        )


DRIVE_PROFILES = {
    "fast": DriveProfile(
        "fast", 0.015, 130e6, "130 MB/s: the best reported (newbe.dev). 15 ms per file: assumed"
    ),
    "typical": DriveProfile(
        "typical", 0.059, 65e6, "59 ms: GrinkoL/skillbox_thesis_project. 65 MB/s: newbe.dev"
    ),
    "bad": DriveProfile(
        "bad", 0.606, 65e6, "1.65 images/s: googlecolab/colabtools#3651. Tail: assumed", tail=0.8
    ),
}


def slow_down(folder: str | Path, profile: str | DriveProfile | None) -> None:
    """Read all that lies below ``folder`` at the speed of a profile from now on.

    ``None`` reads it at full speed. This holds for this process and for those that it starts from
    now on. Of a folder in another the inner one counts.

    Example:
        >>> slow_down("no/such/folder", "typical")
        >>> print(find_profile("no/such/folder/images/1.jpg"))
        typical: 59 ms per file, 65 MB/s
        >>> slow_down("no/such/folder", None)
    """
    speed = get_profile(profile)
    table = json.loads(os.environ.get(_SLOWED) or "{}")
    if speed is None and not table:
        return
    table[os.path.realpath(require_local_path(folder))] = None if speed is None else asdict(speed)
    os.environ[_SLOWED] = json.dumps(table)


@contextmanager
def read_at_full_speed() -> Iterator[None]:
    """Slow no folder while the block runs: for what the real Drive's cache would answer.

    A folder that is slowed within the block is slow until its end. Then those from before are slow
    again.

    Example:
        >>> with read_at_full_speed():
        ...     find_profile("anywhere") is None
        True
    """
    table = os.environ.get(_SLOWED, "")
    os.environ[_SLOWED] = ""
    try:
        yield
    finally:
        os.environ[_SLOWED] = table


def find_profile(path: object) -> DriveProfile | None:
    """Return the profile of the slowed folder that a path lies in, and None where it is read at
    full speed.

    Example:
        >>> find_profile("no/such/folder") is None
        True
    """
    text = os.environ.get(_SLOWED)
    if not text or not isinstance(path, str | os.PathLike):
        return None
    table = json.loads(text)
    place = Path(os.path.realpath(path))
    for folder in (place, *place.parents):
        if str(folder) in table:
            fields = table[str(folder)]
            return None if fields is None else DriveProfile(**fields)
    return None


def get_profile(name: str | DriveProfile | None) -> DriveProfile | None:
    """Return the profile of that name: ``None`` or ``"none"`` mean full speed, your own profile is
    passed through.

    Raises:
        ColabUtilsError: no profile has that name; the message lists the names.

    Example:
        >>> print(get_profile("typical"))
        typical: 59 ms per file, 65 MB/s
    """
    if name is None or isinstance(name, DriveProfile):
        return name
    require_choice("Drive profile", name, (*DRIVE_PROFILES, "none"))
    return DRIVE_PROFILES.get(name)


def wait_as_drive(
    profile: DriveProfile | None, path: str | Path, place: int | None, count: int, started: float
) -> None:
    """Sleep until a Drive of this speed would have given ``count`` bytes, asked for at ``started``.

    All processes of this user share one Drive: it serves ``streams`` reads at once, and its link
    sends in turn.

    Args:
        profile: how slow Drive is; None waits for nothing.
        path: the file.
        place: where in the file the read had to begin; None goes on where the last one ended.
        count: bytes that were read.
        started: when the read was asked for, by ``perf_counter``, which all processes share.

    Raises:
        DriveLostError: more reads are in flight than the profile allows.
    """
    if profile is None or not count:
        return
    opens_s = 0.0 if place is None else profile.draw_open_s(path, place)
    with _hold_link() as link:
        sent_s, *ends = [float(word) for word in link.read().split()] or [0.0]
        in_flight = sorted(end for end in ends if end > started)
        if profile.most_reads is not None and len(in_flight) >= profile.most_reads:
            raise DriveLostError(
                f"Drive refuses to read {path}: it answers {profile.most_reads} reads at once "
                "(errno 5). Read fewer files at once."
            )
        if len(in_flight) >= profile.streams:
            # It is served when one of those before it is done.
            begin_s = in_flight[-profile.streams]
        else:
            begin_s = started
        sent_s = max(sent_s, begin_s) + count / profile.bytes_per_s
        end_s = max(begin_s + opens_s + count / profile.bytes_per_s, sent_s)
        link.seek(0)
        link.truncate()
        link.write(" ".join(map(str, (sent_s, *in_flight, end_s))))
        link.flush()
    rest_s = end_s - perf_counter()
    if rest_s > 0:
        sleep(rest_s)


@contextmanager
def _hold_link() -> Iterator[TextIO]:
    """Open the file that all processes share, for one of them at a time.

    It holds when the link is free, and when each read in flight ends.
    """
    import fcntl

    with open(_LINK, "a+") as link:
        fcntl.flock(link, fcntl.LOCK_EX)
        link.seek(0)
        try:
            yield link
        finally:
            # Closing is not enough: a process that was forked meanwhile has it open, too.
            fcntl.flock(link, fcntl.LOCK_UN)


"""The machine that this runs on, and what every module needs: progress bars, process pools, safe
writing of files.
"""
