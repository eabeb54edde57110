"""Where things lie: the slow folder (Google Drive or a stand-in) and the fast one (this machine's SSD)."""

from __future__ import annotations

import errno
import os
import warnings
from dataclasses import dataclass
from pathlib import Path

from colab_utils.drive import DriveProfile, get_profile, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import is_colab

__all__ = ["Workspace"]

COLAB_ROOT = Path("/content")
"""Colab's own folder; Google Drive is mounted at ``drive`` in it."""


@dataclass(frozen=True)
class Workspace:
    """Two folders, ``drive`` (slow, lasts) and ``ssd`` (fast, may be lost), and what lies where in them.

    ``profile`` is the speed at which ``drive`` is read: ``None`` for a real Google Drive and for full speed.
    ``note`` says in one line how it was chosen. Use `Workspace.open` to make one.
    """

    drive: Path
    ssd: Path
    profile: DriveProfile | None = None
    note: str = ""

    @classmethod
    def open(
        cls,
        drive: str | Path | None = None,
        *,
        ssd: str | Path | None = None,
        profile: str | DriveProfile | None = "typical",
        use_google_drive: bool = True,
        timeout_s: float = 120,
    ) -> Workspace:
        """Make the two folders; on Colab, mount Google Drive first (it asks you to sign in).

        When the sign-in is declined, times out or fails, a slowed folder on this machine stands in for
        Drive; ``note`` and a `ColabUtilsWarning` say so. Outside Colab a slowed folder is used at once.

        Args:
            drive: the slow folder, used as given. Default: ``colab_utils`` in your Google Drive, else
                ``/content/slow_drive``; outside Colab ``./runs/drive``.
            ssd: the fast folder. Default: ``/content/colab_utils``; outside Colab ``./runs/ssd``.
            profile: how slow the slowed folder is: a name in `DRIVE_PROFILES`, a profile, or ``"none"``.
                A mounted Google Drive has its own speed and ignores this.
            use_google_drive: ``False`` does not mount, and takes the slowed folder also on Colab.
            timeout_s: how long to wait for the sign-in, in seconds.

        Raises:
            ColabUtilsError: a folder cannot be made, the profile has no such name, or ``drive`` lies in a
                Google Drive that cannot be mounted.

        Example:
            >>> import tempfile
            >>> folder = Path(tempfile.mkdtemp())
            >>> workspace = Workspace.open(folder / "drive", ssd=folder / "ssd", profile="none")
            >>> workspace.shards_on_ssd == folder / "ssd" / "shards"
            True
        """
        speed = get_profile(profile)
        on_colab = is_colab()
        slow, note = _choose_drive(drive, timeout_s if use_google_drive else None)
        fast = _to_path(ssd or (COLAB_ROOT / "colab_utils" if on_colab else "runs/ssd"))
        if fast == slow or _is_in_mount(fast):
            where = "the drive folder" if fast == slow else "Google Drive"
            raise ColabUtilsError(f"expected ssd on this machine's own disk, found {fast}, {where}: name another one")
        _make_folder(slow, parents=drive is None)
        _make_folder(fast, parents=ssd is None)
        return cls(slow, fast, None if _is_in_mount(slow) else speed, note)

    @property
    def dataset(self) -> Path:
        """The COCO dataset on Drive."""
        return self.drive / "dataset"

    @property
    def shards_on_drive(self) -> Path:
        """The shards on Drive."""
        return self.drive / "shards"

    @property
    def shards_on_ssd(self) -> Path:
        """The copy of the shards on this machine."""
        return self.ssd / "shards"

    @property
    def runs(self) -> Path:
        """Checkpoints and reports; on Drive, because they must outlast the machine."""
        return self.drive / "runs"

    def __str__(self) -> str:
        if self.profile is not None:
            speed = f"slowed folder, {self.profile}"
        else:
            speed = "Google Drive" if _is_in_mount(self.drive) else "full speed"
        return f"Drive: {self.drive} ({speed})\nSSD: {self.ssd}" + (f"\nNote: {self.note}" if self.note else "")


def _choose_drive(drive: str | Path | None, timeout_s: float | None) -> tuple[Path, str]:
    """The slow folder, and one line on why it is that; ``timeout_s=None`` forbids mounting."""
    chosen = None if drive is None else _to_path(drive)
    if chosen is not None and not _is_in_mount(chosen):
        return chosen, f"{chosen} stands in for Google Drive"
    if not is_colab():
        chosen = _to_path("runs/drive")
        return chosen, f"{chosen} stands in for Google Drive, which is mounted only on Colab"
    if chosen is None and timeout_s is None:
        chosen = COLAB_ROOT / "slow_drive"
        return chosen, f"{chosen} stands in for Google Drive, as you asked"
    failure = _mount_google_drive(timeout_s)
    if not failure:
        return chosen or _find_my_drive() / "colab_utils", "Google Drive is mounted: what you put there lasts"
    if chosen is not None:
        raise ColabUtilsError(
            f"expected {chosen} in Google Drive, found Drive not mounted ({failure}): open the workspace "
            f"again and sign in, or choose a folder outside {COLAB_ROOT / 'drive'}"
        )
    chosen = COLAB_ROOT / "slow_drive"
    note = f"Google Drive is not mounted ({failure}): {chosen} stands in for it, and is lost with this machine"
    warnings.warn(note, ColabUtilsWarning, stacklevel=3)
    return chosen, note


def _mount_google_drive(timeout_s: float | None) -> str:
    """Mount Google Drive where it is not; the answer says what went wrong, empty when it is there."""
    if os.path.isdir(_find_my_drive()):
        return ""
    if timeout_s is None:
        return "use_google_drive is False"
    mount_point = COLAB_ROOT / "drive"
    try:
        from google.colab import drive as google_drive

        # A mount that died still stands in the mount table: only a forced one replaces it.
        google_drive.mount(str(mount_point), force_remount=_is_dead(mount_point), timeout_ms=round(timeout_s * 1000))
    except Exception as error:  # Colab's message errors have no public base class
        detail = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {detail}" if detail else type(error).__name__
    return "" if os.path.isdir(_find_my_drive()) else f"no MyDrive appeared in {mount_point}"


def _find_my_drive() -> Path:
    new, old = COLAB_ROOT / "drive" / "MyDrive", COLAB_ROOT / "drive" / "My Drive"
    return old if os.path.isdir(old) and not os.path.isdir(new) else new


def _is_dead(mount_point: Path) -> bool:
    try:
        os.stat(mount_point)
    except OSError as error:
        return error.errno in (errno.ENOTCONN, errno.EIO)
    return False


def _is_in_mount(folder: Path) -> bool:
    return is_colab() and folder.is_relative_to(COLAB_ROOT / "drive")


def _to_path(path: str | Path) -> Path:
    return Path(os.path.abspath(Path(path).expanduser()))


def _make_folder(folder: Path, *, parents: bool) -> None:
    """Make a folder; the parents of one that you named are not made, so that a slip of the pen is noticed."""
    try:
        with guard_drive(folder):
            folder.mkdir(parents=parents, exist_ok=True)
    except FileNotFoundError:
        raise ColabUtilsError(
            f"expected the folder {folder.parent}, found nothing there: make it first, or correct the path"
        ) from None
    except (FileExistsError, NotADirectoryError):
        raise ColabUtilsError(f"expected a folder at {folder}, found a file in its place: name another one") from None
    except OSError as error:
        raise ColabUtilsError(
            f"expected to make the folder {folder}, found: {error.strerror}. Choose a folder that you may write to"
        ) from error
