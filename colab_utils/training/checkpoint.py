"""Checkpoints that survive: whole or not at all, proven, the newest two kept, waiting here while Drive is lost."""

from __future__ import annotations

import io
import os
import pickle
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from typing import Any

import torch

from colab_utils.drive import DriveLostError, Retries, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import write_file
from colab_utils.shards.format import hash_bytes

__all__ = ["CheckpointFolder"]

FORMAT_VERSION = 1
_PATTERN = "checkpoint-" + "[0-9]" * 8 + ".pt"
_BEST = "best-" + "[0-9]" * 8 + ".pt"
_KEEP = 2


class CheckpointFolder:
    """The checkpoints of one training run: ``run/checkpoint-00000120.pt`` and so on, the newest two of them.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``). While Drive does not
    answer they wait on this machine's disk, in ``waiting``; the next one that Drive takes replaces them.

    Args:
        run: The folder, on any disk. On Google Drive each checkpoint is written once, whole.

    Example:
        >>> import tempfile
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"weight": torch.ones(2)}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.load_newest()["weight"]
        tensor([1., 1.])
    """

    def __init__(self, run: str | Path) -> None:
        self.run = Path(run)
        name = hash_bytes(os.fsencode(self.run.absolute()))
        self.waiting = Path(tempfile.gettempdir()) / "colab_utils-checkpoints" / name

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint that can be seen now, if there is one."""
        with suppress(DriveLostError):
            return self._find_newest()
        return max(_list_checkpoints(self.waiting), default=None)

    def _find_newest(self) -> Path | None:
        with guard_drive(self.run):
            every = [*_list_checkpoints(self.waiting), *_list_checkpoints(self.run)]
        return max(every, key=lambda path: path.name, default=None)

    def prepare(self, *, anew: bool) -> None:
        """Make the folder, or raise before training if that cannot be; ``anew`` moves older ones to ``previous-1``."""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if not os.access(self.run, os.W_OK):
                raise PermissionError("Permission denied")
            for pattern in (_PATTERN, _BEST):
                for leftover in self.run.glob(f".{pattern}.*.part"):  # of a killed run: never whole, never read
                    leftover.unlink()
            if anew and (self.newest or _list_checkpoints(self.run, _BEST)):
                target = _find_free_name(f"{self.run}/previous-")
                target.mkdir()
                for path in (
                    *_list_checkpoints(self.waiting),
                    *_list_checkpoints(self.run),
                    *_list_checkpoints(self.run, _BEST),
                ):
                    shutil.move(path, target / path.name)
        except OSError as error:
            raise ColabUtilsError(
                f"expected a folder for checkpoints, found that {self.run} cannot be written to "
                f"({error.strerror or error}). Choose another run folder."
            ) from None

    def save(self, state: Mapping[str, Any], *, step: int, patiently: bool = False) -> Path:
        """Write one checkpoint, proven by reading it back; then the oldest of three goes.

        Where Drive does not answer, the checkpoint waits on this machine, with a warning; ``patiently`` tries Drive
        again for 81 seconds first, for the last one of a run.

        Raises:
            ColabUtilsError: The disk is full or the folder cannot be written; older checkpoints stay whole.
        """
        path, before = self.run / f"checkpoint-{step:08d}.pt", self.newest
        data = _pack(state, step)
        try:
            self._write(path, data, patiently=patiently)
        except DriveLostError:
            path = self.waiting / path.name
            self._write(path, data)
            cure = "run the same command on this machine when Drive is back" if patiently else "training goes on"
            text = f"Drive does not answer: checkpoint {path.name} waits in {self.waiting} until it does; {cure}"
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
        except OSError as error:
            raise _explain_full(path, error, before) from error
        return path

    def save_best(self, state: Mapping[str, Any], *, step: int) -> Path | None:
        """Write the weights that judged best as ``best-STEP.pt``, in place of earlier ones; None if Drive is away.

        Raises:
            ColabUtilsError: The disk is full or the folder cannot be written; the earlier best stays whole.
        """
        path = self.run / f"best-{step:08d}.pt"
        try:
            with guard_drive(path):
                write_file(path, _pack(state, step))
        except DriveLostError:
            warnings.warn(f"Drive does not answer: {path.name} is not kept", ColabUtilsWarning, stacklevel=2)
            return None
        except OSError as error:
            raise _explain_full(path, error, self.newest) from error
        with suppress(OSError):  # one file too many does no harm: the later one is taken
            for old in set(_list_checkpoints(self.run, _BEST)) - {path}:
                _delete(old)
        return path

    def load_best(self) -> dict[str, Any] | None:
        """The weights that judged best, on the CPU, with their ``path``; None when there are none that can be read."""
        with guard_drive(self.run):
            for path in reversed(_list_checkpoints(self.run, _BEST)):
                if not _find_damage(path):
                    return {**torch.load(path, map_location="cpu", weights_only=True), "path": str(path)}
        return None

    def _write(self, path: Path, data: bytes | memoryview, *, patiently: bool = False) -> None:
        def write() -> None:
            with guard_drive(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data)

        Retries().run(write) if patiently else write()
        old = _list_checkpoints(path.parent)[:-_KEEP]
        for one in old if path.parent == self.waiting else [*old, *_list_checkpoints(self.waiting)]:
            with suppress(OSError):  # one file too many does no harm
                _delete(one)

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, on the CPU; None when there is none.

        A newer one that is cut short or damaged is renamed to ``.torn-1`` and named in a warning. One that waited on
        this machine is sent to Drive.

        Raises:
            ColabUtilsError: The disk does not answer, or the file is of another program or a newer version.
        """
        retries = Retries()
        while path := retries.run(self._find_newest):
            try:
                with guard_drive(path):
                    damage = _find_damage(path)
                    state = None if damage else torch.load(path, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
                damage = str(error).splitlines()[0]
            if not damage:
                found = state.get("format") if isinstance(state, dict) else None
                if found == FORMAT_VERSION:
                    if path.parent == self.waiting:
                        self._write(self.run / path.name, path.read_bytes(), patiently=True)
                    return state
                raise ColabUtilsError(
                    f"expected a checkpoint of colab_utils in format {FORMAT_VERSION}, found {found} in {path}. "
                    "Update colab_utils, or choose another run folder."
                )
            torn = _find_free_name(f"{path}.torn-")
            os.replace(path, torn)
            warnings.warn(
                f"checkpoint {path} is torn ({damage}); it was renamed to {torn.name} "
                "and training goes on from the one before it.",
                ColabUtilsWarning,
                stacklevel=3,
            )
        return None


def _pack(state: Mapping[str, Any], step: int) -> memoryview:
    data = io.BytesIO()  # Drive wants files whole and in one go
    torch.save({**state, "format": FORMAT_VERSION, "step": step}, data)
    return data.getbuffer()


def _delete(path: Path) -> None:
    os.truncate(path, 0)  # Drive keeps what is deleted in its bin, on your quota
    path.unlink()


def _explain_full(path: Path, error: OSError, whole: Path | None) -> ColabUtilsError:
    return ColabUtilsError(
        f"could not write checkpoint {path} ({error.strerror or error}); the last whole one is {whole}. "
        "Free disk space or choose another run folder, then start again: training resumes."
    )


def _list_checkpoints(folder: Path, pattern: str = _PATTERN) -> list[Path]:
    """In the order of their steps; a Drive that is lost is an error, and never an empty folder."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if fnmatch(name, pattern))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _find_damage(path: Path) -> str | None:
    # torch.load does not look at the checksums that torch.save wrote: the file is a zip, so ask zipfile.
    try:
        with zipfile.ZipFile(path) as archive:
            member = archive.testzip()
    except (zipfile.BadZipFile, EOFError, NotImplementedError):
        return f"{path.stat().st_size} bytes, cut short"
    return f"its part {member} is damaged" if member else None


def _find_free_name(prefix: str) -> Path:
    return next(path for number in count(1) if not (path := Path(f"{prefix}{number}")).exists())
