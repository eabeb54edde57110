"""The checkpoints of a run. Each one is complete or absent, and the newest two are kept.

A checkpoint ends with a seal, which holds a checksum of all bytes before it. While Drive is lost,
new checkpoints wait on this machine. They are written in a thread while training goes on.
"""

import io
import os
import tempfile
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from functools import partial
from itertools import chain, count, filterfalse
from pathlib import Path
from time import perf_counter
from typing import Any, Literal, get_args

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from colab_utils.drive import DriveLostError, explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, UnavailableError, describe_error
from colab_utils.files import IMPATIENT, Store, hash_bytes, open_store, parse_file
from colab_utils.places import Place, PlaceLike, open_place
from colab_utils.processes import start_thread

State = Mapping[str, Any]
"""What a checkpoint holds."""
Which = Literal["newest", "best"]
"""The newest checkpoint of a run, or the one with the highest average precision."""
_PREFIXES = {"newest": "checkpoint", "best": "best"}
_OTHERS_KEPT = {"newest": 1, "best": 0}
# A seal begins with this text, where the number is the version of the format. The checksum follows.
_SEAL = b"colab_utils 2 "
_MOST_BYTES = 1e10
# Seconds from one checkpoint until the next is due.
_PAUSE_S = 60.0
# A write may hang for ever. After so many seconds, checkpoints wait on this machine.
_HUNG_S = 300.0


class TornError(ColabUtilsError):
    """A checkpoint is not as it was written. It gave the same wrong bytes twice."""


class CheckpointFolder:
    """The checkpoints of one training run: the newest two, ``run/checkpoint-00000120.pt`` and so
    on, and the best one.

    Only tensors and plain types are stored, and loading runs no code (``weights_only=True``).

    While ``run`` takes no checkpoint, because Drive or a server does not answer or a disk is full,
    checkpoints wait on this machine's disk, in ``waiting``. The next checkpoint that reaches
    ``run`` replaces them. If a write hangs for five minutes, nothing more is written to ``run``. A
    process that writes checkpoints must hold the folder: see
    `hold_folder`. `submit` writes in a thread, while training goes on.

    Args:
        run: The folder, on any disk, or a URL that fsspec knows, such as ``s3://bucket/run``.

    Attributes:
        paths: The file of each kind, "newest" and "best", that was read or written last.
        slowest_s: Seconds of the checkpoint that took longest to write in the thread.

    Example:
        >>> folder = CheckpointFolder(tempfile.mkdtemp())
        >>> folder.save({"losses": [1.5, 0.5]}, step=120).name
        'checkpoint-00000120.pt'
        >>> folder.read()["losses"]
        [1.5, 0.5]
    """

    def __init__(self, run: PlaceLike) -> None:
        self.run = open_place(run)
        place = str(self.run.absolute()).encode(errors="surrogatepass")
        # The folder in which checkpoints of all runs wait.
        own = Path(tempfile.gettempdir(), f"colab_utils-checkpoints-{os.getuid()}")
        own.mkdir(mode=0o700, exist_ok=True)
        self.waiting = own / hash_bytes(place)
        self.paths: dict[Which, Place] = {}
        self.slowest_s = 0.0
        self._saved_s = perf_counter()
        # The checkpoint that is being written: the call of `save`, and when it is done.
        self._job: Any = None
        self._is_hung = False
        self._torn: set[Place] = set()

    def prepare(self, *, anew: bool) -> None:
        """Make the folder. With ``anew``, older checkpoints are set aside.

        Raises:
            ColabUtilsError: The folder cannot be made or written to.
        """
        with explain_write(self.run):
            own = open_store(self.run)
            own.make()
            # A folder that takes no file is refused now, and not after the first minute.
            own.write("begun.txt", b"This run has begun.\n")
            own.remove("begun.txt")
        if anew:
            self.set_aside("newest", "best")

    def set_aside(self, *kinds: Which) -> None:
        """Move checkpoints to a new folder beside them, ``previous-1`` or the next free number.

        Raises:
            ColabUtilsError: The folder cannot be written to.
        """
        with explain_write(self.run):
            for store in map(open_store, (self.run, self.waiting)):
                names = map("previous-{}".format, count(1))
                target = store.locate(next(filterfalse(store.find_kind, names)))
                for path in chain.from_iterable(_list_files(store, which) for which in kinds):
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
        name = f"{_PREFIXES[which]}-{step:08d}.pt"
        # The content is made in memory, because a file on Drive must be written once, from its
        # first byte to its last.
        data = io.BytesIO()
        torch.save({**state, "step": step}, data)
        parts = (data.getbuffer(), _make_seal(data.getbuffer()))
        try:
            # Training goes on, so nothing is waited for.
            self._write(self.run / name, which, *parts, stop=IMPATIENT)
        except (OSError, UnavailableError) as error:
            with explain_write(self.waiting):
                self._write(self.waiting / name, which, *parts)
            text = (
                f"{describe_error(error)} So checkpoint {name} waits in {self.waiting}. Another "
                "try is made later, and at the end of the run"
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
        return self.paths[which]

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
                    raise DriveLostError(
                        f"{describe_error(error)} So checkpoint {path.name} is not in {self.run}. "
                        f"It lies only in {self.waiting} of this machine. Mount Drive again, free "
                        "space there, or renew your credentials. Then run the same command on "
                        "this machine: it sends the checkpoint. Or copy that folder to another "
                        "place."
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
        torn = None
        try:
            files = [
                path
                for folder in (self.run, self.waiting)
                for path in _list_files(open_store(folder), which)
            ]
            for path in sorted(files, key=lambda path: path.name, reverse=True):
                try:
                    content = _read_sealed(path)
                except TornError as error:
                    warnings.warn(str(error), ColabUtilsWarning, stacklevel=2)
                    torn = error
                    self._torn.add(path)
                    continue
                state = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
                self.paths[which] = path
                return {**state, "path": str(path)}
        # A path that cannot be the name of a file raises a ValueError.
        except (OSError, ValueError) as error:
            raise ColabUtilsError(
                f"Checkpoints cannot be read in {self.run}: {error}. Make them readable, move them "
                "away, or choose another run folder."
            ) from error
        # Training goes on without its best weights.
        if torn and which == "newest":
            raise torn
        return None

    def _write(
        self, path: Place, which: Which, *parts: bytes | memoryview, stop: Any = None
    ) -> None:
        is_sent = path.parent != self.waiting
        if is_sent and self._is_hung:
            raise UnavailableError(f"{self.run} has not answered for {_HUNG_S:.0f} seconds.")
        store = open_store(path.parent, stop)
        store.make()
        store.write(path, *parts)
        if is_sent and self._is_hung:
            # This write hung, and has ended after all. It may be older than what waits.
            return
        self.paths[which] = path
        self._torn.discard(path)
        # The new checkpoint replaces others. If one of these cannot be removed, it does no harm.
        with suppress(OSError, ColabUtilsError):
            # The run cannot go on from a torn one, so that one replaces none. A best one of a later
            # step was measured before the run was killed and went on from an earlier step.
            others = [
                other
                for other in _list_files(store, which)
                if other not in {path, *self._torn} and (which == "best" or other.name < path.name)
            ]
            old = others[: len(others) - _OTHERS_KEPT[which]]
            if is_sent:
                old += _list_files(open_store(self.waiting), which)
            for file in old:
                open_store(file.parent, IMPATIENT).remove(file, is_large=True)

    def is_due(self, step: int, every_steps: int = 0) -> bool:
        """Return whether a checkpoint is due after this step: after so many steps, or a minute
        after the last one. While the last checkpoint is being written, the answer is False.

        Raises:
            ColabUtilsError: The last checkpoint could not be written.
        """
        if self._job and not self._job[1].done() and perf_counter() < self._saved_s + _HUNG_S:
            return False
        self.finish()
        if every_steps:
            return step % every_steps == 0
        return perf_counter() - self._saved_s >= _PAUSE_S

    def submit(self, state: State, *, step: int, which: Which = "newest") -> None:
        """Copy a state to this machine's memory, and write it in the thread, after the last one."""
        self.finish()
        self._saved_s = perf_counter()
        copy_tensor = partial(Tensor.to, device="cpu", copy=True)
        copy = tree_map_only(Tensor, copy_tensor, dict(state))
        job = (partial(self.save, copy, step=step, which=which), Future[None]())
        # A thread whose write hangs must not keep the program from ending.
        start_thread(partial(self._save_and_time, *job), "checkpoint")
        self._job = job

    def _save_and_time(self, save: Callable[[], Place], done: Future[None]) -> None:
        try:
            save()
            self.slowest_s = max(self.slowest_s, perf_counter() - self._saved_s)
        except BaseException as error:
            done.set_exception(error)
        else:
            done.set_result(None)

    def finish(self) -> None:
        """Wait until the last checkpoint is written. If the write hangs, the checkpoint is written
        on this machine.

        Raises:
            ColabUtilsError: It could not be written.
        """
        if self._job is None:
            return
        save, done = self._job
        wait([done], max(0.0, self._saved_s + _HUNG_S - perf_counter()))
        # If Ctrl-C ends this wait, the next call waits again.
        self._job = None
        if done.done():
            done.result()
        else:
            self._is_hung = True
            save()


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
            f"{path} is torn (cut short or damaged), or another program or version wrote it. An "
            "older checkpoint is used if there is one. Move this file away, or begin anew with "
            "resume='never', which keeps it."
        )

    read = partial(open_store(path).read, path, most_bytes=_MOST_BYTES, at_full_speed=True)
    return parse_file(path, read, check_seal)


def _list_files(store: Store, which: Which) -> list[Place]:
    """Return the checkpoints in a folder, sorted by step."""
    names = store.list_names(f"{_PREFIXES[which]}-{8 * '[0-9]'}.pt")
    return [store.locate(name) for name in names]
