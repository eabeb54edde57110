"""Checkpoints that survive: written whole or not at all, read back, the newest two kept, torn ones set aside."""

from __future__ import annotations

import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch

from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import write_file

__all__ = ["CheckpointFolder"]

FORMAT_VERSION = 1
_PATTERN = "checkpoint-" + "[0-9]" * 8 + ".pt"
_KEEP = 2


class CheckpointFolder:
    """The checkpoints of one training run: ``run/checkpoint-00000120.pt`` and so on, the newest two of them.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``).

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

    @property
    def newest(self) -> Path | None:
        """The newest checkpoint, if there is one."""
        return max(self.run.glob(_PATTERN), default=None)

    def prepare(self, *, anew: bool) -> None:
        """Make the folder, or raise before training if that cannot be; ``anew`` moves older ones to ``previous-1``."""
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if not os.access(self.run, os.W_OK):
                raise PermissionError("Permission denied")
            for leftover in self.run.glob(f".{_PATTERN}.*.part"):  # of a killed run: never whole, never read
                leftover.unlink()
            if anew and self.newest:
                target = _find_free_name(f"{self.run}/previous-")
                target.mkdir()
                for path in self.run.glob(_PATTERN):
                    os.replace(path, target / path.name)
        except OSError as error:
            raise ColabUtilsError(
                f"expected a folder for checkpoints, found that {self.run} cannot be written to "
                f"({error.strerror or error}). Choose another run folder."
            ) from None

    def save(self, state: Mapping[str, Any], *, step: int) -> Path:
        """Write one checkpoint and read it back; then the oldest of three goes.

        Raises:
            ColabUtilsError: The disk is full or the folder cannot be written; older checkpoints stay whole.
        """
        path, before = self.run / f"checkpoint-{step:08d}.pt", self.newest
        data = io.BytesIO()  # Drive wants files whole and in one go
        torch.save({**state, "format": FORMAT_VERSION, "step": step}, data)
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            write_file(path, data.getvalue())
            if _find_damage(path):
                path.unlink()
                raise OSError("what was written reads back differently")
        except OSError as error:
            raise ColabUtilsError(
                f"could not write checkpoint {path} ({error.strerror or error}); the last whole one is {before}. "
                "Free disk space or choose another run folder, then start again: training resumes."
            ) from error
        for old in sorted(self.run.glob(_PATTERN))[:-_KEEP]:
            with suppress(OSError):  # one file too many does no harm
                os.truncate(old, 0)  # Drive keeps what is deleted in its bin, on your quota
                old.unlink()
        return path

    def load_newest(self) -> dict[str, Any] | None:
        """The newest checkpoint that can be read, on the CPU; None when there is none.

        A newer one that is cut short or damaged is renamed to ``.torn-1`` and named in a warning.

        Raises:
            ColabUtilsError: The disk does not answer, or the file is of another program or a newer version.
        """
        while path := self.newest:
            try:
                with guard_drive(path):
                    damage = _find_damage(path)
                    state = None if damage else torch.load(path, map_location="cpu", weights_only=True)
            except (RuntimeError, EOFError, KeyError, pickle.UnpicklingError) as error:
                damage = str(error).splitlines()[0]
            if not damage:
                found = state.get("format") if isinstance(state, dict) else None
                if found == FORMAT_VERSION:
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
