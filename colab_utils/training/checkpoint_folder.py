"""The checkpoints of a run: complete or absent, the newest two kept, waiting on this machine while
Drive is lost.
"""

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, get_args

from colab_utils.drive import DriveLostError, Retries, explain_write, find_mount, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.files import hash_bytes, write_file
from colab_utils.machine import COLAB_ROOT
from colab_utils.require import require_local_path
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


class CheckpointFolder:
    """The checkpoints of one training run: the newest two, ``run/checkpoint-00000120.pt`` and so
    on, and the best one.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``). Each
    file ends with a checksum, as the comment of the zip that ``torch.save`` writes: what was
    changed since is never trained on. While Drive does not answer, checkpoints wait on this
    machine's disk, in ``waiting``; the next one that Drive takes replaces them. Who writes
    checkpoints holds the folder meanwhile: see `hold_folder`.

    Args:
        run: The folder, on any disk. On Google Drive each checkpoint is written once, from its
            first byte to its last.

    Example:
        >>> import tempfile
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"losses": [1.5, 0.5]}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.read()["losses"]
        [1.5, 0.5]
    """

    def __init__(self, run: str | Path) -> None:
        self.run = require_local_path(run)
        name = hash_bytes(str(self.run.absolute()).encode(errors="surrogatepass"))
        self.waiting = Path(tempfile.gettempdir()) / "colab_utils-checkpoints" / name

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that can be seen now, if there is one."""
        with suppress(DriveLostError):
            return next(reversed(self._list()), None)
        return next(reversed(_list_files(self.waiting, "newest")), None)

    def prepare(self, *, anew: bool) -> None:
        """Make the folder; ``anew`` moves older checkpoints to ``previous-1`` and so on.

        Raises:
            ColabUtilsError: The folder cannot be made or written to.
        """
        with explain_write(self.run):
            self.run.mkdir(parents=True, exist_ok=True)
            if not os.access(self.run, os.W_OK):
                raise PermissionError("Permission denied")
            if anew:
                target = _find_free_name(f"{self.run}/previous-")
                for path in [*self._list("newest"), *self._list("best")]:
                    target.mkdir(exist_ok=True)
                    shutil.move(path, target / path.name)

    def save(
        self,
        state: Mapping[str, Any],
        *,
        step: int,
        which: Which = "newest",
        is_last: bool = False,
    ) -> Path:
        """Write one checkpoint; then the oldest of three goes, or the one that was best before.

        Where Drive does not answer, the checkpoint waits on this machine, with a warning:
        `send_waiting` sends it, or the next one that Drive takes replaces it. Of the last one of a
        run the warning does not say that training goes on.

        Raises:
            ColabUtilsError: The disk is full or the folder cannot be written; older checkpoints
                stay as they are.
        """
        path = self.run / f"{_PREFIXES[which]}-{step:08d}.pt"
        parts = pack_state({**state, "step": step})
        try:
            self._write(path, which, *parts)
        except DriveLostError:
            path = self.waiting / path.name
            self._write(path, which, *parts)
            outlook = "Drive is tried again now" if is_last else "training goes on"
            text = (
                f"Drive does not answer: checkpoint {path.name} waits in {self.waiting} until "
                f"it does; {outlook}"
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
        return path

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

    def _send(self, waiting: Path, which: Which, content: bytes) -> Path:
        """Write a checkpoint that waits into the run's folder, and return its path there."""
        path = self.run / waiting.name
        try:
            self._write(path, which, content, patiently=True)
        except DriveLostError as error:
            mount = find_mount(self.run) or COLAB_ROOT / "drive"
            raise DriveLostError(
                f"Drive does not answer: checkpoint {path.name} is not in {self.run}, and lies in "
                f"{self.waiting} of this machine alone. Remount Drive with drive.mount('{mount}', "
                "force_remount=True), then run the same command on this machine, which sends it; "
                "or keep a copy of that folder elsewhere."
            ) from error
        return path

    def read(self, which: Which = "newest", *, repair: bool = False) -> dict[str, Any] | None:
        """The newest or the best checkpoint that is complete, on the CPU, with its ``path``; None
        without one.

        No file is changed, because another process may be training in the folder. That process
        passes ``repair``: a file that is cut short or fails its checksum is renamed to ``.torn-1``,
        one that waited here is sent to Drive. A file is torn only when the same wrong bytes came
        twice.

        Raises:
            ColabUtilsError: The file cannot be loaded, is no checkpoint of this version, or was
                changed by another program, or the disk does not answer, or all checkpoints of the
                run are torn; no file is changed then.
        """
        torn: list[Path] = []
        for path in reversed(Retries().run(lambda: self._list(which))):
            try:
                content = read_sealed(path)
            except TornError:
                torn.append(path)
                continue
            state = load_content(path, content)
            _set_aside(torn, repair=repair)
            if repair and path.parent == self.waiting:
                # It is known by the folder's path, which may be that of a run that was deleted.
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

    def _list(self, which: Which = "newest") -> list[Path]:
        """In the order of their steps."""
        with explain_read(self.run), guard_drive(self.run):
            paths = [*_list_files(self.waiting, which), *_list_files(self.run, which)]
        return sorted(paths, key=lambda path: path.name)

    def _write(
        self, path: Path, which: Which, *parts: bytes | memoryview, patiently: bool = False
    ) -> None:
        def write() -> None:
            with guard_drive(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, *parts)

        try:
            if patiently:
                Retries().run(write)
            else:
                write()
        except OSError as error:
            raise ColabUtilsError(
                f"expected to write the checkpoint {path}, found: {error.strerror or error}. The "
                f"newest complete one is {self.newest}. Free disk space or choose another run "
                "folder, then start again: training resumes."
            ) from error
        # One file too many does no harm.
        with suppress(OSError):
            self._remove_others(path, which)

    def _remove_others(self, path: Path, which: Which) -> None:
        """Remove the checkpoints that the one that was just written replaces."""
        others = [other for other in _list_files(path.parent, which) if other != path]
        old = others[: len(others) - _OTHERS_KEPT[which]]
        if path.parent != self.waiting:
            old += _list_files(self.waiting, which)
        for file in old:
            # Drive keeps what is deleted in its bin, on the user's quota.
            os.truncate(file, 0)
            file.unlink()


def _set_aside(torn: Iterable[Path], *, repair: bool) -> None:
    """Warn of torn checkpoints, and with ``repair`` rename them."""
    for path in torn:
        text = f"{path} {TORN}: the one before it is taken"
        if repair:
            aside = _find_free_name(f"{path}.torn-")
            # The folder may be one that is only read.
            with suppress(OSError):
                os.replace(path, aside)
                text += f", and this one was renamed to {aside.name}"
        warnings.warn(text, ColabUtilsWarning, stacklevel=4)


def _list_files(folder: Path, which: Which) -> list[Path]:
    """In the order of their steps; a Drive that is lost is an error, and never an empty folder."""
    try:
        names = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    name_of_a_checkpoint = re.compile(rf"{_PREFIXES[which]}-[0-9]{{8}}\.pt")
    return sorted(folder / name for name in names if name_of_a_checkpoint.fullmatch(name))


def _find_free_name(prefix: str) -> Path:
    number = 1
    while os.path.exists(f"{prefix}{number}"):
        number += 1
    return Path(f"{prefix}{number}")
