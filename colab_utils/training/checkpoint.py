"""The checkpoints of a run: complete or absent, the newest two kept, waiting on this machine while Drive is lost."""

from __future__ import annotations

import errno
import io
import os
import shutil
import tempfile
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from itertools import count
from pathlib import Path
from pickle import UnpicklingError
from time import perf_counter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from colab_utils.drive import DriveLostError, Retries, guard_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.runtime import write_file
from colab_utils.shards.format import hash_bytes

__all__ = ["CheckpointFolder", "CheckpointWriter", "copy_to_cpu", "explain_state", "load_weights"]

Which = Literal["newest", "best"]
"""The newest checkpoint of a run, or the one with the highest average precision."""

_FORMAT_VERSION = 1
_PATTERNS = {"newest": f"checkpoint-{'[0-9]' * 8}.pt", "best": f"best-{'[0-9]' * 8}.pt"}
_OTHERS_KEPT = {"newest": 1, "best": 0}
_PAUSES_S = (60.0, 10.0)  # the least between two checkpoints; the latter at the end of an epoch


class CheckpointFolder:
    """The checkpoints of one training run: the newest two, ``run/checkpoint-00000120.pt`` and so on, and the best one.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``). While Drive does not
    answer, checkpoints wait on this machine's disk, in ``waiting``; the next one that Drive takes replaces them.

    Args:
        run: The folder, on any disk. On Google Drive each checkpoint is written once, from its first byte to its last.

    Example:
        >>> import tempfile
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"weight": torch.ones(2)}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.read()["weight"]
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
            return next(reversed(self._list()), None)
        return next(reversed(_list_files(self.waiting, "newest")), None)

    def prepare(self, *, anew: bool) -> None:
        """Make the folder; ``anew`` moves older checkpoints to ``previous-1`` and so on.

        Raises:
            ColabUtilsError: The folder cannot be made or written to.
        """
        try:
            self.run.mkdir(parents=True, exist_ok=True)
            if not os.access(self.run, os.W_OK):
                raise PermissionError("Permission denied")
            for pattern in _PATTERNS.values():
                for leftover in self.run.glob(f".{pattern}.*.part"):  # of a killed run: never complete, never read
                    leftover.unlink()
            target = _find_free_name(f"{self.run}/previous-")
            for path in [*self._list("newest"), *self._list("best")] if anew else ():
                target.mkdir(exist_ok=True)
                shutil.move(path, target / path.name)
        except OSError as error:
            raise ColabUtilsError(
                f"expected a folder for checkpoints, found that {self.run} cannot be written to "
                f"({error.strerror or error}). Choose another run folder."
            ) from None

    def save(self, state: Mapping[str, Any], *, step: int, which: Which = "newest", patiently: bool = False) -> Path:
        """Write one checkpoint and read it back; then the oldest of three goes, or the one that was best before.

        Where Drive does not answer, the checkpoint waits on this machine, with a warning; ``patiently`` tries Drive
        again for 81 seconds first, for the last one of a run.

        Raises:
            ColabUtilsError: The disk is full or the folder cannot be written; older checkpoints stay as they are.
        """
        path = self.run / f"{_PATTERNS[which].partition('-')[0]}-{step:08d}.pt"
        data = io.BytesIO()  # Drive wants a file from its first byte to its last, written once
        torch.save({**state, "format": _FORMAT_VERSION, "step": step}, data)
        try:
            self._write(path, data.getbuffer(), which, patiently=patiently)
        except DriveLostError:
            path = self.waiting / path.name
            self._write(path, data.getbuffer(), which)
            cure = "run the same command on this machine when Drive is back" if patiently else "training goes on"
            text = f"Drive does not answer: checkpoint {path.name} waits in {self.waiting} until it does; {cure}"
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
        return path

    def read(self, which: Which = "newest", *, repair: bool = False) -> dict[str, Any] | None:
        """The newest or the best checkpoint that is complete, on the CPU, with its ``path``; None without one.

        No file is changed, because another process may be training in the folder. That process passes ``repair``: a
        file that is cut short or fails its checksums is renamed to ``.torn-1`` and so on, one that waited here is sent
        to Drive.

        Raises:
            ColabUtilsError: The file cannot be loaded, or the disk does not answer; no file is changed then.
        """
        for path in reversed(Retries().run(lambda: self._list(which))):
            damage = _find_damage(path)
            if not damage:
                state = _load(path)
                if repair and path.parent == self.waiting:
                    data, path = path.read_bytes(), self.run / path.name
                    self._write(path, data, which, patiently=True)
                return {**state, "path": str(path)}
            text = f"{path} is torn ({damage}): the one before it is taken"
            if repair:
                text += f", and this one was renamed to {self._set_aside(path)}"
            warnings.warn(text, ColabUtilsWarning, stacklevel=3)
        return None

    def set_aside(self, which: Which) -> list[str]:
        """Rename what cannot be read to ``.torn-1`` and so on, which nothing replaces later; returns the new names."""
        return [self._set_aside(path) for path in self._list(which)]

    @staticmethod
    def _set_aside(path: Path) -> str:
        os.replace(path, aside := _find_free_name(f"{path}.torn-"))
        return aside.name

    def _list(self, which: Which = "newest") -> list[Path]:
        """In the order of their steps."""
        with guard_drive(self.run):
            paths = [*_list_files(self.waiting, which), *_list_files(self.run, which)]
        return sorted(paths, key=lambda path: path.name)

    def _write(self, path: Path, data: bytes | memoryview, which: Which, *, patiently: bool = False) -> None:
        def write() -> None:
            with guard_drive(path):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_file(path, data)

        try:
            Retries().run(write) if patiently else write()
        except OSError as error:
            raise ColabUtilsError(
                f"expected to write the checkpoint {path}, found: {error.strerror or error}. The newest complete one "
                f"is {self.newest}. Free disk space or choose another run folder, then start again: training resumes."
            ) from error
        with suppress(OSError):  # one file too many does no harm
            others = [other for other in _list_files(path.parent, which) if other != path]
            old = others[: len(others) - _OTHERS_KEPT[which]]
            for one in old if path.parent == self.waiting else [*old, *_list_files(self.waiting, which)]:
                os.truncate(one, 0)  # Drive keeps what is deleted in its bin, on your quota
                one.unlink()


class CheckpointWriter:
    """Writes checkpoints in a thread while training goes on, and tells when the next one is due.

    Args:
        folder: Where they are written.
        every_steps: Steps from one checkpoint to the next. Default: one a minute, and at the end of an epoch.

    Example:
        >>> import tempfile
        >>> writer = CheckpointWriter(CheckpointFolder(tempfile.mkdtemp()))
        >>> writer.submit({"weight": torch.ones(2)}, step=3)
        >>> writer.close()
    """

    def __init__(self, folder: CheckpointFolder, every_steps: int | None = None) -> None:
        self._folder, self._every_steps, self._saved_s = folder, every_steps, perf_counter()
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._job: Future[Path] | None = None

    def is_due(self, step: int, *, epoch_ended: bool) -> bool:
        """Whether a checkpoint is due after this step; never while the last one is being written.

        Raises:
            ColabUtilsError: The last one could not be written: said now, and not with the next one.
        """
        if self._job and not self._job.done():
            return False
        self.finish()
        if self._every_steps:
            return step % self._every_steps == 0
        return perf_counter() - self._saved_s >= _PAUSES_S[epoch_ended]

    def submit(self, state: Mapping[str, Any], *, step: int, patiently: bool = False) -> None:
        """Copy a state to this machine's memory, and write it in the thread."""
        self.finish()
        self._job = self._thread.submit(self._folder.save, copy_to_cpu(dict(state)), step=step, patiently=patiently)
        self._saved_s = perf_counter()

    def finish(self) -> None:
        """Wait until everything is written.

        Raises:
            ColabUtilsError: It could not be written.
        """
        job, self._job = self._job, None
        if job:
            job.result()

    def close(self) -> None:
        """End the thread, after the write in progress."""
        self._thread.shutdown()


def copy_to_cpu(value: Any) -> Any:
    """A copy that training no longer changes, in the usual order of memory, as code that reads weights expects it.

    Example:
        >>> copy_to_cpu({"steps": [1], "weight": torch.zeros(1)})
        {'steps': [1], 'weight': tensor([0.])}
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: copy_to_cpu(part) for key, part in value.items()}
    return type(value)(map(copy_to_cpu, value)) if isinstance(value, list | tuple) else value


def _load(path: Path) -> dict[str, Any]:
    """The content of a file whose checksums are right: whatever fails now is no reason to rename it."""
    try:
        with guard_drive(path):
            state = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, DriveLostError):
        raise
    except Exception as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        if isinstance(error, UnpicklingError):
            reason = "it holds what no checkpoint holds, of which nothing was run."
        raise ColabUtilsError(
            f"expected to load {path}, found an error, though the file is complete: {reason} "
            "Free memory and start again; or move this file away: the one before it is loaded then."
        ) from error
    found = state.get("format") if isinstance(state, dict) else None
    if type(found) is not int or found != _FORMAT_VERSION:
        raise ColabUtilsError(
            f"expected a checkpoint of colab_utils in format {_FORMAT_VERSION}, found {found!s:.20} in {path}. "
            "Update colab_utils, or choose another run folder."
        )
    if type(state.get("step")) is not int or f"{state['step']:08d}" != path.stem.rpartition("-")[2]:
        raise ColabUtilsError(
            f"expected the checkpoint of the step that its name tells in {path}, found that of another step. Move "
            "this file away: the one before it is loaded then."
        )
    return dict(state)


@contextmanager
def explain_state(path: str) -> Iterator[None]:
    """Turn what fails where a checkpoint is used, because somebody changed it, into one line with its cure.

    Example:
        >>> with explain_state("run/checkpoint-00000120.pt"):
        ...     {}["plan"]
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a checkpoint as training writes it in run/checkpoint-00000120.pt...
    """
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        found = (str(error).splitlines() or [""])[0]
        raise ColabUtilsError(
            f"expected a checkpoint as training writes it in {path}, found another ({type(error).__name__}: "
            f"{found:.200}). Move this file away: the one before it is loaded then."
        ) from error


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load weights, which must be numbers, of the types and shapes that the module has.

    Raises:
        AttributeError, LookupError, RuntimeError, TypeError, ValueError: They are not.
    """
    for name, own in module.state_dict().items():
        found = weights[name]
        if (found.dtype, found.shape) != (own.dtype, own.shape):
            raise ValueError(f"{name} as {found.dtype} {list(found.shape)}")
        if not torch.isfinite(found).all():
            raise ValueError(f"{name} with values that are no numbers")
    module.load_state_dict(weights)


def _find_damage(path: Path) -> str | None:
    """What is wrong with a file's structure or checksums, which torch.load does not look at; None where it is right."""
    try:
        with guard_drive(path), zipfile.ZipFile(path) as archive:
            parts, size = archive.infolist(), path.stat().st_size
            # a part that unpacks to more than the file could take hours, and all memory
            if any(part.compress_type for part in parts) or sum(part.file_size for part in parts) > size:
                return "parts larger than the file"
            if not any(part.filename.endswith("/data.pkl") for part in parts):
                return "no checkpoint"
            member = archive.testzip()
    except (DriveLostError, MemoryError):
        raise
    except Exception as error:  # a damaged zip fails in many ways
        if isinstance(error, OSError) and error.errno != errno.EINVAL:  # that of a place before the file's start
            raise
        return f"{path.stat().st_size} bytes, cut short"
    return f"its part {member} is damaged" if member else None


def _list_files(folder: Path, which: Which) -> list[Path]:
    """In the order of their steps; a Drive that is lost is an error, and never an empty folder."""
    try:
        return sorted(folder / name for name in os.listdir(folder) if fnmatch(name, _PATTERNS[which]))
    except (FileNotFoundError, NotADirectoryError):
        return []


def _find_free_name(prefix: str) -> Path:
    return next(path for number in count(1) if not (path := Path(f"{prefix}{number}")).exists())
