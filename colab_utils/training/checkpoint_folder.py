"""The checkpoints of a run. Each one is complete or absent, and the newest two are kept.

While Drive is lost, new checkpoints wait on this machine.
"""

import errno
import math
import os
import re
import shutil
import stat
import tempfile
import warnings
from collections.abc import Iterable, Iterator
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
    PlaceLike,
    RefusedError,
    UrlPath,
    open_place,
)
from colab_utils.training.checkpoint import (
    TORN,
    State,
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
# A file of this name in the run's folder holds random bytes. If the folder is deleted and made
# anew, the file holds other bytes.
_IDENTITY_NAME = "run-id"
# Error numbers of a full disk, a used-up quota, and a disk that became read-only.
_TAKES_NO_MORE = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)


class NotTakenError(DriveLostError):
    """The disk of a run is full, or its server refuses. Checkpoints wait on this machine, as for a
    lost Drive, and nothing is tried again.
    """

    may_pass = False


class CheckpointFolder:
    """The checkpoints of one training run: the newest two, ``run/checkpoint-00000120.pt`` and so
    on, and the best one.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``).
    ``torch.save`` writes each file as a zip. A checksum is added at its end, as the zip's comment,
    so that a file that was changed later is not loaded.

    While Drive or a server does not answer, or is full, checkpoints wait on this machine's disk, in
    ``waiting``. The next checkpoint that reaches ``run`` replaces them. ``run/run-id`` holds random
    bytes that identify the run. A later run at the same place has other bytes, so it does not use
    the waiting checkpoints of this run. A process that writes checkpoints must hold the folder: see
    `hold_folder`.

    Args:
        run: The folder, on any disk, or a URL that fsspec knows, such as ``s3://bucket/run``.

    Example:
        >>> import tempfile
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"losses": [1.5, 0.5]}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.read()["losses"]
        [1.5, 0.5]
    """

    def __init__(self, run: PlaceLike) -> None:
        self.run = open_place(run)
        self._identity = b""

    @property
    def waiting(self) -> Path:
        """Return the folder on this machine in which checkpoints of this run wait. Only this user
        can read it or write into it.

        Raises:
            ColabUtilsError: Another user could read it or write into it.
        """
        place = str(self.run.absolute()).encode(errors="surrogatepass")
        return _find_own_folder() / hash_bytes(place, self._identify())

    def _identify(self) -> bytes:
        """Return the identity that `prepare` gave this run, or b"" if it has none yet."""
        if not self._identity:
            with suppress(FileNotFoundError, NotADirectoryError, DriveLostError):
                self._identity = read_whole(self.run / _IDENTITY_NAME)
        return self._identity

    @property
    def newest(self) -> Place | None:
        """Return the newest checkpoint, or None. If Drive is lost, search this machine alone."""
        with suppress(DriveLostError, RefusedError):
            return next(reversed(self._list()), None)
        return next(reversed(_list_files(self.waiting, "newest")), None)

    def warn_if_begun(self) -> None:
        """Warn that a run without a checkpoint was begun before: Drive may not show its files."""
        if self._identify():
            warnings.warn(
                f"The run in {self.run} has begun before, and no checkpoint shows: it starts again "
                "at step 0. If it had checkpoints, stop it now, and start it again when Drive "
                "shows them",
                ColabUtilsWarning,
                stacklevel=3,
            )

    def prepare(self, *, anew: bool) -> None:
        """Make the folder and give it an identity. With ``anew``, move older checkpoints to a new
        folder in it: ``previous-1``, or ``previous-2`` if that exists already, and so on.

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
        state: State,
        *,
        step: int,
        which: Which = "newest",
        is_last: bool = False,
    ) -> Place:
        """Write one checkpoint, then remove those that it replaces, and return its path.

        If Drive does not answer, the checkpoint waits on this machine, and a warning says so.
        `send_waiting` sends it later, unless a newer checkpoint has reached Drive by then.

        Args:
            state: What is saved.
            step: Steps that are done.
            which: ``"newest"`` also keeps the checkpoint before this one; ``"best"`` keeps only
                this one.
            is_last: Whether this is the last checkpoint of the run. If so, the warning does not say
                that training goes on.

        Raises:
            ColabUtilsError: This machine's disk is full, or the folder cannot be written. Older
                checkpoints stay as they are.
        """
        path: Place = self.run / f"{_PREFIXES[which]}-{step:08d}.pt"
        parts = pack_state({**state, "step": step})
        try:
            self._write(path, which, *parts)
        except DriveLostError as error:
            waiting = self.waiting / path.name
            try:
                self._write(waiting, which, *parts)
            except NotTakenError as full:
                raise self._refuse_write(path, full.__cause__) from full
            outlook = (
                "Another try is made at the end"
                if is_last
                else "It is sent later; training goes on"
            )
            text = (
                f"{self._name_trouble(error)}: checkpoint {path.name} waits in {waiting.parent}. "
                f"{outlook}"
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
            path = waiting
        return path

    def _name_trouble(self, error: DriveLostError) -> str:
        if isinstance(error, NotTakenError) or isinstance(self.run, UrlPath):
            return f"{self.run} takes no checkpoint now ({error.reason})"
        return "Drive does not answer"

    def send_waiting(self) -> None:
        """Send the checkpoints that wait on this machine to the run's folder. If Drive fails, try
        again for 81 seconds.

        Raises:
            DriveLostError: Drive did not take a checkpoint. The message says where it lies, and
                what to do.
            ColabUtilsError: The folder cannot be written, or a waiting file is damaged.
        """
        for which in get_args(Which):
            waiting = _list_files(self.waiting, which)
            if waiting:
                # Only the newest one is sent. The older ones are removed when it has arrived.
                self._send(waiting[-1], which, read_sealed(waiting[-1]))

    def _send(self, waiting: Place, which: Which, content: bytes) -> Place:
        """Write a waiting checkpoint into the run's folder, and return its path there."""
        path = self.run / waiting.name
        try:
            self._write(path, which, content, patiently=True)
        except DriveLostError as error:
            mount = find_mount(self.run) or COLAB_ROOT / "drive"
            cure = f"Remount Drive with drive.mount('{mount}', force_remount=True)"
            if isinstance(self.run, UrlPath):
                cure = "Look at the server and your credentials"
            elif isinstance(error, NotTakenError):
                cure = "Free space there"
            raise DriveLostError(
                f"{self._name_trouble(error)}: checkpoint {path.name} is not in {self.run}. It "
                f"lies only in {waiting.parent} of this machine. {cure}, then run the same command "
                "on this machine: it sends the checkpoint. Or copy that folder to another place."
            ) from error
        return path

    def read(self, which: Which = "newest", *, repair: bool = False) -> State | None:
        """Read the newest or the best complete checkpoint to the CPU.

        A file is torn if it is cut short or fails its checksum, and a second read gives the same
        bytes. A torn file is skipped with a warning.

        Args:
            which: ``"newest"`` or ``"best"``.
            repair: Rename torn files, so that their names end in ``.torn-1`` and so on. If the
                checkpoint waits on this machine, send it to Drive. By default no file is changed,
                because another process may be training in the folder.

        Returns:
            The state, with the ``path`` of its file; None if there is no checkpoint.

        Raises:
            ColabUtilsError: The disk does not answer; the file cannot be loaded, is of another
                version, or was changed by another program; or all checkpoints of the run are torn.
                In these cases no file is changed.
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
                # A user who deleted the run's checkpoints, but not its folder, does not expect that
                # one still waits here.
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
                f"In the run {self.run} every checkpoint {TORN}: {names}. Train with "
                "resume='never' to move them to a folder of their own and to begin anew, or choose "
                "another run folder."
            )
        _set_aside(torn, repair=repair)
        return None

    def _list(self, which: Which = "newest") -> list[Place]:
        """Return the checkpoints in the run's folder and on this machine, sorted by step."""
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
        # If an old file cannot be removed, it does no harm.
        with suppress(OSError, ColabUtilsError):
            self._remove_others(path, which)

    def _refuse_write(self, path: Place, error: Any) -> ColabUtilsError:
        return ColabUtilsError(
            f"The checkpoint {path} cannot be written: {error.strerror or error}. The newest "
            f"complete one is {self.newest}. Free disk space or choose another run folder, then "
            "start again: training resumes."
        )

    def _remove_others(self, path: Place, which: Which) -> None:
        """Remove the checkpoints that the new one at ``path`` replaces."""
        others = [other for other in _list_files(path.parent, which) if other != path]
        old = others[: len(others) - _OTHERS_KEPT[which]]
        if path.parent != self.waiting:
            old += _list_files(self.waiting, which)
        for file in old:
            if isinstance(file, Path):
                # Drive moves deleted files to its bin, where they still count for the user's
                # quota. An empty file takes none of it.
                os.truncate(file, 0)
            file.unlink()


@contextmanager
def _guard_disk() -> Iterator[None]:
    """Raise `NotTakenError` if the block finds no room to write, or if a server refuses. With free
    space or renewed credentials, a later checkpoint may be taken.
    """
    try:
        yield
    except (RefusedError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in _TAKES_NO_MORE:
            raise
        lost = NotTakenError(str(error))
        lost.reason = getattr(error, "strerror", "") or getattr(error, "reason", "")
        raise lost from error


def _find_own_folder() -> Path:
    """Return the folder in which checkpoints of all runs wait. No other user can write there."""
    folder = Path(tempfile.gettempdir(), f"colab_utils-checkpoints-{os.getuid()}")
    with suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    facts = folder.lstat()
    is_own = stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.getuid()
    if not is_own or facts.st_mode & 0o077:
        raise ColabUtilsError(
            f"{folder} must be a folder that only you can use: checkpoints wait in it while Drive "
            "does not answer. Remove it, or set TMPDIR to a folder that only you may write to."
        )
    return folder


def _set_aside(torn: Iterable[Place], *, repair: bool) -> None:
    """Warn of torn checkpoints. With ``repair``, rename them, too."""
    for path in torn:
        text = f"{path} {TORN}: it is skipped, and an older one is used if there is one"
        if repair:
            # The folder may be read-only.
            with suppress(OSError, ColabUtilsError):
                aside = _find_free_name(path.parent, f"{path.name}.torn-")
                _move(path, aside)
                text += f". The torn file was renamed to {aside.name}"
        warnings.warn(text, ColabUtilsWarning, stacklevel=4)


def _list_files(folder: Place, which: Which) -> list[Place]:
    """Return the checkpoints in a folder, sorted by step. If Drive is lost, raise an error: a lost
    Drive must not look like an empty folder.
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
    """Move a checkpoint, also from this machine to a server."""
    if isinstance(path, UrlPath) and isinstance(target, UrlPath):
        path.replace(target)
    elif isinstance(path, Path) and isinstance(target, Path):
        shutil.move(path, target)
    else:
        write_file(target, read_whole(path, most_bytes=math.inf))
        path.unlink()
