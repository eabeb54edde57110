"""The checkpoints of a run. Each one is complete or absent, and the newest two are kept.

A checkpoint ends with a seal, which holds a checksum of all bytes before it. While Drive is lost,
new checkpoints wait on this machine. They are written in a thread while training goes on.
"""

import io
import os
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, filterfalse
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from colab_utils.drive import DriveLostError, RefusedError, explain_write, find_mount
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError
from colab_utils.files import Store, hash_bytes, open_store, parse_file
from colab_utils.machine import COLAB_ROOT
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.processes import ThreadPool

State = Mapping[str, Any]
"""What a checkpoint holds."""
Which = Literal["newest", "best"]
"""The newest checkpoint of a run, or the one with the highest average precision."""
_PREFIXES = {"newest": "checkpoint", "best": "best"}
# This file shows that a run has begun, also while Drive does not list its checkpoints.
_BEGUN = "begun.txt"
_OTHERS_KEPT = {"newest": 1, "best": 0}
# A seal begins with this text, where the number is the version of the format. The checksum follows.
_SEAL = b"colab_utils 2 "
_MOST_BYTES = 1e10
_TORN = "is torn (cut short or damaged), or another program or version wrote it"
# Seconds from one checkpoint until the next is due. The first number is for the middle of an epoch,
# the second for its end.
_PAUSES_S = (60.0, 10.0)


class TornError(ColabUtilsError):
    """A checkpoint is not as it was written. It gave the same wrong bytes twice."""


class CheckpointFolder:
    """The checkpoints of one training run: the newest two, ``run/checkpoint-00000120.pt`` and so
    on, and the best one.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``).

    While ``run`` takes no checkpoint, because Drive or a server does not answer or a disk is full,
    checkpoints wait on this machine's disk, in ``waiting``. The next checkpoint that reaches
    ``run`` replaces them. A process that writes checkpoints must hold the folder: see
    `hold_folder`.

    Args:
        run: The folder, on any disk, or a URL that fsspec knows, such as ``s3://bucket/run``.

    Example:
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"losses": [1.5, 0.5]}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.read()["losses"]
        [1.5, 0.5]
    """

    def __init__(self, run: PlaceLike) -> None:
        self.run = open_place(run)
        self._store = open_store(self.run)
        place = str(self.run.absolute()).encode(errors="surrogatepass")
        self.waiting = _find_own_folder() / hash_bytes(place)

    @property
    def newest(self) -> Place | None:
        """Return the newest checkpoint, or None. If Drive is lost, search this machine alone."""
        try:
            paths = self._list(is_patient=False)
        except (DriveLostError, RefusedError):
            paths = _list_files(open_store(self.waiting), "newest")
        return paths[-1] if paths else None

    def read_to_resume(self) -> State | None:
        """Read the newest checkpoint as `read` does.

        A warning is given if the run has begun before and no checkpoint shows, because Drive's list
        of a folder may be out of date.

        Raises:
            ColabUtilsError: As `read` does; or the checkpoint holds a model and no optimiser.
        """
        state = self.read()
        if state is not None and "optimizer" not in state:
            raise ColabUtilsError(
                f"{state['path']} holds a model alone, as best-*.pt does, so no run can go on from "
                "it. Move this file away: the previous checkpoint is loaded then."
            )
        with _explain_read(self.run):
            has_begun = self._store.find_kind(_BEGUN)
        if state is None and has_begun:
            text = (
                f"The run in {self.run} has begun before, and no checkpoint shows: it starts again "
                "at step 0. If it had checkpoints, stop it now, and start it again when Drive "
                "shows them"
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=3)
        return state

    def prepare(self, *, anew: bool) -> None:
        """Make the folder. With ``anew``, move older checkpoints to a new folder beside them:
        ``previous-1``, or ``previous-2`` if that exists already, and so on.

        Raises:
            ColabUtilsError: The folder cannot be made or written to.
        """
        with explain_write(self.run):
            self._store.make()
            if not self._store.find_kind(_BEGUN):
                self._store.write(_BEGUN, b"This run has begun.\n")
            stores = (self._store, open_store(self.waiting)) if anew else ()
            for store in stores:
                names = map("previous-{}".format, count(1))
                target = store.locate(next(filterfalse(store.find_kind, names)))
                for path in [*_list_files(store, "newest"), *_list_files(store, "best")]:
                    open_store(target).make()
                    store.move(path, target / path.name)

    def save(self, state: State, *, step: int, which: Which = "newest") -> Place:
        """Write one checkpoint, then remove those that it replaces, and return its path.

        If the run's folder does not take it, the checkpoint waits on this machine, and a warning
        says so. `send_waiting` sends it later, unless a newer checkpoint has arrived by then.

        Args:
            state: What is saved.
            step: Steps that are done.
            which: ``"newest"`` also keeps the checkpoint before this one; ``"best"`` keeps only
                this one.

        Raises:
            ColabUtilsError: This machine's disk does not take the checkpoint either. Older ones
                stay as they are.
        """
        path: Place = self.run / f"{_PREFIXES[which]}-{step:08d}.pt"
        parts = pack_state({**state, "step": step})
        try:
            # Training goes on, so nothing is waited for.
            self._write(path, which, *parts, is_patient=False)
        except (OSError, UnavailableError) as error:
            waiting = self.waiting / path.name
            try:
                self._write(waiting, which, *parts)
            except OSError as full:
                raise ColabUtilsError(
                    f"The checkpoint {path} cannot be written: {full.strerror or full}. The newest "
                    f"complete one is {self.newest}. Free disk space or choose another run folder, "
                    "then start again: training resumes."
                ) from error
            text = (
                f"{_name_trouble(error)}: checkpoint {path.name} waits in {waiting.parent}. "
                "Another try is made later, and at the end of the run"
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
            path = waiting
        return path

    def send_waiting(self) -> None:
        """Send the checkpoints that wait on this machine to the run's folder. If Drive fails, try
        again for 81 seconds.

        Raises:
            DriveLostError: The folder did not take a checkpoint. The message says where it lies,
                and what to do.
            ColabUtilsError: A waiting file is damaged.
        """
        for which in get_args(Which):
            # Only the newest one is sent. The older ones are removed when it has arrived.
            for path in _list_files(open_store(self.waiting), which)[-1:]:
                content = _read_sealed(path)
                try:
                    self._write(self.run / path.name, which, content)
                except (OSError, UnavailableError) as error:
                    mount = find_mount(self.run) or COLAB_ROOT / "drive"
                    raise DriveLostError(
                        f"{_name_trouble(error)}: checkpoint {path.name} is not in {self.run}. It "
                        f"lies only in {self.waiting} of this machine. Remount Drive with "
                        f"drive.mount('{mount}', force_remount=True), free space there, or renew "
                        "your credentials. Then run the same command on this machine: it sends the "
                        "checkpoint. Or copy that folder to another place."
                    ) from error

    def read(self, which: Which = "newest") -> State | None:
        """Read the newest or the best complete checkpoint to the CPU. No file is changed.

        A file is torn if it is cut short or fails its checksum, and a second read gives the same
        bytes. A torn file is skipped with a warning.

        Args:
            which: ``"newest"`` or ``"best"``.

        Returns:
            The state, with the ``path`` of its file; None if there is no checkpoint.

        Raises:
            ColabUtilsError: The disk does not answer, or all checkpoints of the run are torn.
        """
        torn: list[str] = []
        warned: list[str] = []
        state = None
        for path in reversed(self._list(which)):
            try:
                content = _read_sealed(path)
            except TornError:
                torn.append(path.name)
                warned.append(
                    f"{path} {_TORN}: it is skipped, and an older one is used if there is one"
                )
                continue
            state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
            state["path"] = str(path)
            if path.parent == self.waiting:
                # A user who deleted the run does not expect that a checkpoint still waits here.
                warned.append(
                    f"{path.name} waits in {self.waiting} of this machine. If you deleted its run, "
                    "pass resume='never' to begin anew"
                )
            break
        if torn and state is None and which == "newest":
            raise ColabUtilsError(
                f"In the run {self.run} every checkpoint {_TORN}: {', '.join(torn)}. Train with "
                "resume='never' to move them to a folder of their own and to begin anew, choose "
                "another run folder, or update colab_utils."
            )
        for text in warned:
            warnings.warn(text, ColabUtilsWarning, stacklevel=3)
        return state

    def _list(self, which: Which = "newest", is_patient: bool = True) -> list[Place]:
        """Return the checkpoints in the run's folder and on this machine, sorted by step."""
        with _explain_read(self.run):
            paths = _list_files(open_store(self.waiting), which)
            paths += _list_files(open_store(self.run, is_patient=is_patient), which)
        return sorted(paths, key=lambda path: path.name)

    def _write(
        self, path: Place, which: Which, *parts: bytes | memoryview, is_patient: bool = True
    ) -> None:
        store = open_store(path.parent, is_patient=is_patient)
        store.make()
        store.write(path, *parts)
        # The new checkpoint replaces others. If one of these cannot be removed, it does no harm.
        with suppress(OSError, ColabUtilsError):
            others = [other for other in _list_files(store, which) if other != path]
            old = others[: len(others) - _OTHERS_KEPT[which]]
            if path.parent != self.waiting:
                old += _list_files(open_store(self.waiting), which)
            for file in old:
                open_store(file.parent, is_patient=False).remove(file, is_large=True)


class CheckpointWriter:
    """Writes checkpoints in a thread while training goes on, and decides when the next one is due.

    Args:
        folder: Where the checkpoints are written.
        every_steps: Steps from one checkpoint to the next. Default: one checkpoint a minute, and
            one at the end of an epoch if ten seconds have passed since the last.

    Example:
        >>> writer = CheckpointWriter(CheckpointFolder(tempfile.mkdtemp()))
        >>> writer.submit({"weight": torch.ones(2)}, step=3)
        >>> writer.close()
    """

    def __init__(self, folder: CheckpointFolder, every_steps: int | None = None) -> None:
        self._folder = folder
        self._every_steps = every_steps
        self._saved_s = perf_counter()
        # Seconds of the checkpoint that took longest.
        self.slowest_s = 0.0
        self._thread = ThreadPool(1, "checkpoint")
        self._jobs: list[Future[None]] = []

    def is_due(self, step: int, *, epoch_ended: bool) -> bool:
        """Return whether a checkpoint is due after this step. While the last checkpoint is being
        written, the answer is False.

        Raises:
            ColabUtilsError: The last checkpoint could not be written.
        """
        if not all(job.done() for job in self._jobs):
            return False
        self.finish()
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return perf_counter() - self._saved_s >= _PAUSES_S[epoch_ended]

    def submit(self, state: State, *, step: int, which: Which = "newest") -> None:
        """Copy a state to this machine's memory, and write it in the thread.

        The copies of tensors are contiguous, because code that reads weights expects it.
        """
        self._saved_s = perf_counter()
        copy_tensor = partial(
            Tensor.to, device="cpu", copy=True, memory_format=torch.contiguous_format
        )
        copy = tree_map_only(Tensor, copy_tensor, dict(state))
        self._jobs.append(self._thread.submit(self._save, copy, self._saved_s, step, which))

    def _save(self, state: State, began_s: float, step: int, which: Which) -> None:
        self._folder.save(state, step=step, which=which)
        self.slowest_s = max(self.slowest_s, perf_counter() - began_s)

    def finish(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            ColabUtilsError: One of them could not be written.
        """
        while self._jobs:
            self._jobs.pop(0).result()

    def close(self) -> None:
        """End the thread, after the write in progress."""
        self._thread.shutdown()


def pack_state(state: State) -> tuple[memoryview, bytes]:
    """Return the content of a file that holds a state, and the seal to write after it.

    Example:
        >>> content, seal = pack_state({"step": 120})
        >>> bytes(content[:2]), seal[:14]
        (b'PK', b'colab_utils 2 ')
    """
    # The content is made in memory, because a file on Drive must be written once, from its first
    # byte to its last.
    data = io.BytesIO()
    torch.save(state, data)
    content = data.getbuffer()
    # The content is a zip, and the seal becomes its comment. The two bytes before the comment hold
    # the length of the comment.
    content[-2:] = len(_make_seal(b"")).to_bytes(2, "little")
    return content, _make_seal(content)


def _make_seal(content: bytes | memoryview) -> bytes:
    return _SEAL + hash_bytes(content).encode()


def _read_sealed(path: Place) -> bytes:
    """Return the content of a checkpoint, with its seal.

    Raises:
        TornError: It is not as it was written.
        DriveLostError: Drive does not answer, or gives other bytes at each try.
    """

    def check_seal(content: bytes) -> bytes:
        if content.endswith(_make_seal(memoryview(content)[: -len(_make_seal(b""))])):
            return content
        raise TornError(
            f"{path} {_TORN}. Move it away, and run the same command again: the previous "
            "checkpoint is used then."
        )

    read = partial(open_store(path).read, path, most_bytes=_MOST_BYTES, at_full_speed=True)
    with _explain_read(path):
        return parse_file(path, read, check_seal)


@contextmanager
def _explain_read(path: Place) -> Iterator[None]:
    """Say what to do if the block cannot read a checkpoint or its folder."""
    try:
        yield
    # A path that cannot be the name of a file raises a ValueError.
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ColabUtilsError(
            f"Checkpoints cannot be read in {path}: {reason}. Make it readable, move it away, or "
            "choose another run folder."
        ) from error


def _find_own_folder() -> Path:
    """Return the folder in which checkpoints of all runs wait."""
    folder = Path(tempfile.gettempdir(), f"colab_utils-checkpoints-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    return folder


def _name_trouble(error: Any) -> str:
    """Return why a checkpoint was not taken."""
    reason = getattr(error, "strerror", None) or getattr(error, "reason", None)
    return str(reason or "Drive does not answer")


def _list_files(store: Store, which: Which) -> list[Place]:
    """Return the checkpoints in a folder, sorted by step."""
    names = store.list_names(f"{_PREFIXES[which]}-{8 * '[0-9]'}.pt")
    return [store.locate(name) for name in names]
