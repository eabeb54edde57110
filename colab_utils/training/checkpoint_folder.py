"""The checkpoints of a run: complete or absent, the newest two kept, waiting on this machine while
Drive is lost.
"""

import errno
import math
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from secrets import token_bytes
from typing import Any, Literal, get_args

from colab_utils.drive import DriveLostError, Retries, explain_write, find_mount, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes, read_whole, write_file
from colab_utils.machine import COLAB_ROOT
from colab_utils.places import (
    Place,
    RefusedError,
    ServerLostError,
    UrlPath,
    find_reason,
    open_place,
)
from colab_utils.training.checkpoint import (
    TORN,
    TornError,
    explain_read,
    load_content,
    pack_state,
    read_sealed,
)

Which = Literal["newest", "best"]
"""The newest checkpoint of a run, or the one with the highest average precision."""
_PREFIXES = {"newest": "checkpoint", "best": "best"}
_OTHERS_KEPT = {"newest": 1, "best": 0}
# A random word in the folder of a run: one that is made anew at the same place has another.
_IDENTITY_NAME = "run-id"
# A disk that is full, a quota that is used up, and a disk that became read-only.
_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class FullDiskError(DriveLostError):
    """The disk of a run takes no more files: what is written waits elsewhere, as for a lost
    Drive.
    """


class CheckpointFolder:
    """The checkpoints of one training run: the newest two, ``run/checkpoint-00000120.pt`` and so
    on, and the best one.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``). Each
    file ends with a checksum, as the comment of the zip that ``torch.save`` writes: what was
    changed since is never trained on. While Drive or a server does not answer, or takes no more,
    checkpoints wait on this machine's disk, in ``waiting``; the next one that it takes replaces
    them. They belong to this run alone, which a random word in ``run/run-id`` tells from another
    one at the same place. Who writes checkpoints holds the folder meanwhile: see `hold_folder`.

    Args:
        run: The folder, on any disk, or a URL that fsspec knows, such as ``s3://bucket/run``. On
            Google Drive each checkpoint is written once, from its first byte to its last.

    Example:
        >>> import tempfile
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"losses": [1.5, 0.5]}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.read()["losses"]
        [1.5, 0.5]
    """

    def __init__(self, run: str | Place) -> None:
        self.run = open_place(run)
        self._identity = b""

    @property
    def waiting(self) -> Path:
        """Return the folder in which checkpoints of this run wait on this machine. It belongs to
        the user alone.

        Raises:
            ColabUtilsError: Somebody else could write there.
        """
        place = str(self.run.absolute()).encode(errors="surrogatepass")
        return _find_own_folder() / hash_bytes(place, self._identify())

    def _identify(self) -> bytes:
        """Return the identity of this run, which `prepare` gives it; empty before."""
        if not self._identity:
            with suppress(FileNotFoundError, NotADirectoryError, DriveLostError):
                self._identity = read_whole(self.run / _IDENTITY_NAME)
        return self._identity

    @property
    def newest(self) -> Place | None:
        """Return the newest checkpoint that can be seen now, if there is one."""
        with suppress(DriveLostError, RefusedError):
            return next(reversed(self._list()), None)
        return next(reversed(_list_files(self.waiting, "newest")), None)

    def prepare(self, *, anew: bool) -> None:
        """Make the folder, with an identity; ``anew`` moves older checkpoints to ``previous-1`` and
        so on.

        Raises:
            ColabUtilsError: The folder cannot be made or written to.
        """
        with explain_write(self.run):
            self.run.mkdir(parents=True, exist_ok=True)
            if isinstance(self.run, Path) and not os.access(self.run, os.W_OK):
                raise PermissionError("Permission denied")
            if not self._identify():
                self._identity = token_bytes(16)
                write_file(self.run / _IDENTITY_NAME, self._identity)
            if anew:
                target = _find_free_name(self.run, "previous-")
                for path in [*self._list("newest"), *self._list("best")]:
                    target.mkdir(exist_ok=True)
                    _move(path, target / path.name)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        which: Which = "newest",
        is_last: bool = False,
    ) -> Place:
        """Write one checkpoint; then the oldest of three goes, or the one that was best before.

        Where Drive does not answer, the checkpoint waits on this machine, with a warning:
        `send_waiting` sends it, or the next one that Drive takes replaces it. Of the last one of a
        run the warning does not say that training goes on.

        Raises:
            ColabUtilsError: The disk is full or the folder cannot be written; older checkpoints
                stay as they are.
        """
        path: Place = self.run / f"{_PREFIXES[which]}-{step:08d}.pt"
        parts = pack_state({**state, "step": step})
        try:
            self._write(path, which, *parts)
        except DriveLostError as error:
            waiting = self.waiting / path.name
            try:
                self._write(waiting, which, *parts)
            except FullDiskError as full:
                raise self._refuse_write(path, full.__cause__) from full
            outlook = "it is tried again now" if is_last else "training goes on"
            text = (
                f"{self._name_trouble(error)}: checkpoint {path.name} waits in {waiting.parent} "
                f"until it does; {outlook}"
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
            path = waiting
        return path

    def _name_trouble(self, error: DriveLostError) -> str:
        if isinstance(error, FullDiskError):
            return f"{self.run} takes no more files ({error})"
        if isinstance(self.run, UrlPath):
            return f"{self.run} takes no checkpoint now ({find_reason(error)})"
        return "Drive does not answer"

    def send_waiting(self) -> None:
        """Send to the run's folder what waits on this machine; try for 81 seconds where Drive
        fails.

        Raises:
            DriveLostError: Drive did not take it. The message says where it lies, and what to do.
            ColabUtilsError: The folder cannot be written, or a waiting file is damaged.
        """
        for which in get_args(Which):
            waiting = _list_files(self.waiting, which)
            if waiting:
                # Once the newest has arrived, the older ones that wait go.
                self._send(waiting[-1], which, read_sealed(waiting[-1]))

    def _send(self, waiting: Place, which: Which, content: bytes) -> Place:
        """Write a checkpoint that waits into the run's folder, and return its path there."""
        path = self.run / waiting.name
        try:
            self._write(path, which, content, patiently=True)
        except DriveLostError as error:
            mount = find_mount(self.run) or COLAB_ROOT / "drive"
            cure = f"Remount Drive with drive.mount('{mount}', force_remount=True)"
            if isinstance(error, FullDiskError):
                cure = "Free space there"
            elif isinstance(self.run, UrlPath):
                cure = "Look at the server and your credentials"
            raise DriveLostError(
                f"{self._name_trouble(error)}: checkpoint {path.name} is not in {self.run}, and "
                f"lies in {waiting.parent} of this machine alone. {cure}, then run the same "
                "command on this machine, which sends it; or keep a copy of that folder elsewhere."
            ) from error
        return path

    def read(self, which: Which = "newest", *, repair: bool = False) -> dict[str, Any] | None:
        """Read the newest or the best checkpoint that is complete, to the CPU, and add its
        ``path``. Returns None where there is none.

        No file is changed, because another process may be training in the folder. That process
        passes ``repair``: a file that is cut short or fails its checksum is renamed to ``.torn-1``,
        one that waited here is sent to Drive. A file is torn only when the same wrong bytes came
        twice.

        Raises:
            ColabUtilsError: The file cannot be loaded, is no checkpoint of this version, or was
                changed by another program, or the disk does not answer, or all checkpoints of the
                run are torn; no file is changed then.
        """
        torn: list[Place] = []
        for path in reversed(Retries().run(lambda: self._list(which))):
            try:
                content = read_sealed(path)
            except TornError:
                torn.append(path)
                continue
            state = load_content(path, content)
            _set_aside(torn, repair=repair)
            if repair and path.parent == self.waiting:
                # The user may have deleted the checkpoints of the run, and not its folder.
                text = (
                    f"{path.name} waited in {self.waiting} of this machine, and is sent now. "
                    "If you deleted its run, pass resume='never' to begin anew"
                )
                warnings.warn(text, ColabUtilsWarning, stacklevel=3)
                path = self._send(path, which, content)
            return {**state, "path": str(path)}
        if torn and which == "newest":
            names = ", ".join(path.name for path in torn)
            raise ColabUtilsError(
                f"Of the run in {self.run} no checkpoint is complete: {names} {TORN}. Train with "
                "resume='never' to move what is there to a folder of its own and to begin anew, or "
                "choose another run folder."
            )
        _set_aside(torn, repair=repair)
        return None

    def _list(self, which: Which = "newest") -> list[Place]:
        """Return the checkpoints of Drive and of this machine in the order of their steps."""
        with explain_read(self.run), guard_drive(self.run):
            paths = [*_list_files(self.waiting, which), *_list_files(self.run, which)]
        return sorted(paths, key=lambda path: path.name)

    def _write(
        self, path: Place, which: Which, *parts: bytes | memoryview, patiently: bool = False
    ) -> None:
        def write() -> None:
            with guard_drive(path), _guard_disk():
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, *parts)

        try:
            if patiently:
                Retries().run(write)
            else:
                write()
        except OSError as error:
            raise self._refuse_write(path, error) from error
        # One file too many does no harm.
        with suppress(OSError, ColabUtilsError):
            self._remove_others(path, which)

    def _refuse_write(self, path: Place, error: Any) -> ColabUtilsError:
        return ColabUtilsError(
            f"The checkpoint {path} cannot be written: {error.strerror or error}. The newest "
            f"complete one is {self.newest}. Free disk space or choose another run folder, then "
            "start again: training resumes."
        )

    def _remove_others(self, path: Place, which: Which) -> None:
        """Remove the checkpoints that the one that was just written replaces."""
        others = [other for other in _list_files(path.parent, which) if other != path]
        old = others[: len(others) - _OTHERS_KEPT[which]]
        if path.parent != self.waiting:
            old += _list_files(self.waiting, which)
        for file in old:
            if isinstance(file, Path):
                # Drive keeps what is deleted in its bin, on the user's quota.
                os.truncate(file, 0)
            file.unlink()


@contextmanager
def _guard_disk() -> Iterator[None]:
    """Raise a `FullDiskError` where the block cannot write for want of room, and a
    `ServerLostError` where a server refuses: credentials that expired may come again.
    """
    try:
        yield
    except RefusedError as error:
        raise ServerLostError(str(error)) from error
    except OSError as error:
        if error.errno not in _TAKES_NO_MORE:
            raise
        raise FullDiskError(error.strerror) from error


def _find_own_folder() -> Path:
    """Return the folder in which checkpoints wait; nobody but this user can write there."""
    folder = Path(tempfile.gettempdir(), f"colab_utils-checkpoints-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    if not is_own or facts.st_mode & 0o077:
        raise ColabUtilsError(
            f"{folder}, where checkpoints wait while Drive does not answer, is no folder of yours "
            "alone. Remove it, or set TMPDIR to a folder that only you may write to."
        )
    return folder


def _set_aside(torn: Iterable[Place], *, repair: bool) -> None:
    """Warn of torn checkpoints, and with ``repair`` rename them."""
    for path in torn:
        text = f"{path} {TORN}: the one before it is taken"
        if repair:
            # The folder may be one that is only read.
            with suppress(OSError, ColabUtilsError):
                aside = _find_free_name(path.parent, f"{path.name}.torn-")
                _move(path, aside)
                text += f", and this one was renamed to {aside.name}"
        warnings.warn(text, ColabUtilsWarning, stacklevel=4)


def _list_files(folder: Place, which: Which) -> list[Place]:
    """Return the checkpoints in the order of their steps. A Drive that is lost is an error, and
    never an empty folder.
    """
    try:
        names = [*folder.list_sizes()] if isinstance(folder, UrlPath) else os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    name_of_a_checkpoint = re.compile(rf"{_PREFIXES[which]}-[0-9]{{8}}\.pt")
    return [folder / name for name in sorted(names) if name_of_a_checkpoint.fullmatch(name)]


def _find_free_name(folder: Place, prefix: str) -> Place:
    number = 1
    while (folder / f"{prefix}{number}").exists():
        number += 1
    return folder / f"{prefix}{number}"


def _move(path: Place, target: Place) -> None:
    """Move a checkpoint; one that waits here goes to a server."""
    if isinstance(path, UrlPath) and isinstance(target, UrlPath):
        path.replace(target)
    elif isinstance(path, Path) and isinstance(target, Path):
        shutil.move(path, target)
    else:
        write_file(target, read_whole(path, most_bytes=math.inf))
        path.unlink()
