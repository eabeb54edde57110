"""The number of files to read at the same time, which is found by measuring."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

import xxhash

from colab_utils.drive import find_mount, find_mounts
from colab_utils.places import Place, find_server, identify_place
from colab_utils.require import require_count
from colab_utils.slow_drive import USER, find_profile

MOST_STREAMS = 256
"""Largest number of reads at the same time."""

# A local disk answers without delay, so more reads than these would only wait for each other.
_LOCAL_STREAMS = 2
# The first number of streams for a folder behind a network.
_REMOTE_STREAMS = 16
# If the name of a file system begins with one of these, its files come over a network.
_REMOTE_KINDS = ("nfs", "cifs", "smb", "9p", "fuse.", "lustre", "ceph", "gpfs", "beegfs")
# A larger number of streams is kept if files come faster by at least this factor.
_GAIN = 1.1
# One measurement is a window: it counts this many files for each stream, and at least
# `_LEAST_FILES` in all. The first file of each stream is not counted.
_FILES_A_STREAM = 2
_LEAST_FILES = 16
# After a trial that was not faster, this many windows pass before another trial is considered.
_PATIENCE = 3


class StreamTuner:
    """Choose the number of files to read at the same time, while files are read.

    The number is doubled as long as this makes files come faster by at least a tenth. If it does
    not, the tuner returns to the last good number, and tries a larger one later. If the folder
    refuses a read during a trial, the tuner returns to the last good number, too. If the folder
    refuses a read at another time, the number is halved. The method is TCP's slow start (RFC 5681),
    with files per second in place of acknowledgements.

    Args:
        streams: First number of files to read at the same time.
        most_streams: Largest number.

    Attributes:
        streams: Current number of files to read at the same time.
        files_per_s: Speed with the number that was kept; 0 before the first window has ended.

    Example:
        >>> tuner = StreamTuner(2)
        >>> for tenths in range(1000):
        ...     tuner.count(tenths / 10)
        >>> tuner.best, round(tuner.files_per_s)
        (2, 10)
    """

    def __init__(self, streams: int, most_streams: int = MOST_STREAMS) -> None:
        self.streams = streams
        self._most_streams = most_streams
        self.files_per_s = 0.0
        self._accepted = streams
        self._patience = 0
        self._ignored = 0
        self._is_trial = False
        self._last_s: float | None = None
        self._restart()

    @property
    def best(self) -> int | None:
        """Return the number of streams that was kept; None before the first window has ended.

        All later trials of a larger number were refused, or were faster by less than a tenth.
        """
        return self._accepted if self.files_per_s else None

    def count(self, now_s: float) -> None:
        """Count a file that came at ``now_s`` while every stream was busy."""
        self._ignored -= 1
        self._files += 1
        if self._last_s is not None and self._files > self.streams:
            self._counted += 1
            self._busy_s += now_s - self._last_s
        self._last_s = now_s
        if self._counted >= max(_LEAST_FILES, _FILES_A_STREAM * self.streams):
            self._end_window(self._counted / max(self._busy_s, 1e-6))

    def pause(self) -> None:
        """Stop the clock until the next file, because not all streams are busy."""
        self._last_s = None

    def refuse(self) -> None:
        """Use fewer streams, because the folder refused a read.

        Other reads in flight may be refused, too. Their refusals change nothing.
        """
        if self._ignored > 0:
            self._ignored -= 1
            return
        self._ignored = self.streams
        if not self._is_trial:
            self._accepted = max(1, self.streams // 2)
        self._give_up()
        self._restart()

    def _restart(self) -> None:
        """Begin a window: its counts, and the time when its last file came."""
        self._files = 0
        self._counted = 0
        self._busy_s = 0.0
        self._last_s = None

    def _end_window(self, rate: float) -> None:
        """Choose the next number of streams from the files per second of the window that ended."""
        if self._is_trial and rate < _GAIN * self.files_per_s:
            self._give_up()
        else:
            self._accepted = self.streams
            self.files_per_s = rate
            self._patience -= 1
            if self._patience < 0:
                self.streams = min(self._most_streams, 2 * self.streams)
                self._is_trial = self.streams > self._accepted
        self._restart()

    def _give_up(self) -> None:
        """Return to the number that was kept, for some windows."""
        self.streams = self._accepted
        self._is_trial = False
        self._patience = _PATIENCE


def require_streams(streams: int | str) -> int | str:
    """Return a number of streams, or "auto", and refuse any other value.

    Raises:
        ColabUtilsError: The value is neither a number from 1 to 256 nor "auto".

    Example:
        >>> require_streams("auto"), require_streams(32)
        ('auto', 32)
    """
    if streams == "auto":
        return streams
    return require_count('streams (a number or "auto")', streams, maximum=MOST_STREAMS)


def guess_streams(place: str | Place) -> int:
    """Return the number of streams with which to begin to read a folder.

    It is the number that `remember_streams` stored last for the same mount. Without one, it is 16
    for a folder behind a network, and 2 for a local disk.

    Example:
        >>> guess_streams("/proc")
        2
    """
    with suppress(OSError, ValueError):
        return min(MOST_STREAMS, max(1, int(_find_note(place).read_text(encoding="ascii"))))
    return _REMOTE_STREAMS if is_remote(place) else _LOCAL_STREAMS


def remember_streams(place: str | Place, streams: int) -> None:
    """Store a number of streams for the mount of a folder. `guess_streams` returns it."""
    # If the file cannot be written, the next reader begins with the default number.
    with suppress(OSError):
        _find_note(place).write_text(str(streams), encoding="ascii")


def is_remote(place: str | Place) -> bool:
    """Return whether files come over a network: from Drive, NFS, a URL, or a slowed folder.

    Example:
        >>> is_remote("/proc")
        False
    """
    if find_server(place) or find_profile(place) is not None:
        return True
    return any(kind.startswith(_REMOTE_KINDS) for _, _, kind in find_mounts(place))


def _find_note(place: str | Place) -> Path:
    """Return the file that holds the number of streams for the mount of a path."""
    key = find_server(place)
    if not key:
        key = f"{find_mount(place) or identify_place(place)} {find_profile(place)}"
    name = f"colab_utils-streams-{USER}-{xxhash.xxh3_64_hexdigest(os.fsencode(key))}"
    return Path(tempfile.gettempdir()) / name
