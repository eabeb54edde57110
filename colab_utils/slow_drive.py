"""An imitation of a slow Google Drive: files in a slowed folder are read no faster than a profile
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
from typing import Any, TextIO

import xxhash

from colab_utils.drive import DriveLostError
from colab_utils.places import require_local_path
from colab_utils.require import require_choice

# The number of this user. Windows has none.
USER = os.getuid() if hasattr(os, "getuid") else 0
# The environment variable with the slowed folders, as JSON. Child processes inherit it.
_SLOWED = "COLAB_UTILS_SLOWED"
# A file with the time when the link to Drive is free again. All processes of this user on this
# machine share one link. Only Linux has this folder.
_LINK = f"/dev/shm/colab_utils-drive-reads-{USER}"


@dataclass(frozen=True)
class DriveProfile:
    """The speed of cold reads, which are the reads that Drive's cache does not answer.

    A slowed folder has no cache, so a second read of a file is as slow as the first.
    """

    name: str
    """One word, which reports show."""
    open_s: float
    """Mean seconds from a request to its first byte. A read that continues where the last read of
    the file ended does not take this time.
    """
    bytes_per_s: float
    """Bytes per second after the first byte, for all streams together."""
    source: str
    """Where the figures come from."""
    tail: float = 0.0
    """Sigma of the log-normal distribution of the times to the first byte. With 0.8, one request
    in 20 takes 2.7 times the mean or longer.
    """
    streams: int = 128
    """Number of reads that Drive serves at the same time. Other reads wait. 128 is an assumption,
    because nobody has published the number.
    """
    most_reads: int | None = None
    """Largest number of reads in flight. One more read is refused with errno 5. None means no
    limit, which is an assumption.
    """

    def draw_open_s(self, path: str | Path, offset: int = 0) -> float:
        """Return the seconds from a request to the first byte, for a read at ``offset``.

        They depend only on this profile, the names of the file and its folder, and the offset.

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
    """Slow down all reads of files in ``folder`` to the speed of a profile, from now on.

    ``None`` restores full speed. The profile holds for this process and for the processes that it
    starts later. If one such folder lies in another, the profile of the inner one counts.

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
    """Read every folder at full speed within the block, as if Drive's cache answered.

    If you slow a folder down within the block, it is slow until the block ends. After the block,
    the folders that were slow before it are slow again.

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
    """Return the profile of the slowed folder that holds a path; None if it is read at full speed.

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
    """Return the profile with this name. A profile of your own is returned as it is.

    ``None`` and ``"none"`` mean full speed, for which ``None`` is returned.

    Raises:
        ColabUtilsError: No profile has this name. The message lists the names.

    Example:
        >>> print(get_profile("typical"))
        typical: 59 ms per file, 65 MB/s
    """
    if name is None or isinstance(name, DriveProfile):
        return name
    require_choice("Drive profile", name, (*DRIVE_PROFILES, "none"))
    return DRIVE_PROFILES.get(name)


def wait_as_drive(
    profile: DriveProfile | None, path: Any, place: int | None, count: int, started: float
) -> None:
    """Sleep until a Drive with this profile would have answered a read that was just made.

    All processes of this user share one Drive. It serves ``streams`` reads at the same time, and
    its link sends the bytes of one read after the other.

    Args:
        profile: The speed of Drive. With None, the function does not sleep.
        path: The file that was read.
        place: Offset of the read in the file; None if it continues where the last read ended.
        count: Number of bytes that were read.
        started: Time when the read began, from ``time.perf_counter``, whose clock all processes
            share.

    Raises:
        DriveLostError: More reads are in flight than the profile allows.
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
                "(errno 5). Read fewer files at the same time."
            )
        if len(in_flight) >= profile.streams:
            # This read is served when one of the reads before it is done.
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
    """Open and lock the file that all processes share.

    The file holds the time when the link is free, then the time when each read in flight ends.
    """
    import fcntl

    with open(_LINK, "a+") as link:
        fcntl.flock(link, fcntl.LOCK_EX)
        link.seek(0)
        try:
            yield link
        finally:
            # Closing the file is not enough. A process that was forked in the meantime has the file
            # open, too, and would keep the lock.
            fcntl.flock(link, fcntl.LOCK_UN)
