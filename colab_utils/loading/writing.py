"""The writing of shards from loose files in the background, while training reads the same files."""

import multiprocessing
import os
import warnings
import weakref
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from multiprocessing.connection import Connection
from typing import Any

from colab_utils.drive import explain_write, is_on_drive
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, describe_error
from colab_utils.files import open_store
from colab_utils.loading.workers import start_worker
from colab_utils.places import Place, identify_place
from colab_utils.processes import (
    JobProgress,
    end_process,
    explain_lost_process,
    explain_shared_memory,
)
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import ShardIndex, ShardInfo, write_index
from colab_utils.shards.jobs import ShardRun, find_shard, name_shard, write_in_turn
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.write import begin_folder, check_bad, join_index, write_all

# The lowest priority: training goes before.
_PRIORITY = 19
# Seconds to wait for the process after it was stopped. A read of Drive may hang for longer.
_STOP_S = 3.0
# The writings of this process, by its number and the folder of the shards.
_writings: "weakref.WeakValueDictionary[tuple[int, str], Writing]" = weakref.WeakValueDictionary()
UNSENT = "The shards are not sent to Drive in this session. Training goes on."


def warn(error: ColabUtilsError, consequence: str, stacklevel: int = 3) -> None:
    """Warn of an error that training does not end for."""
    warnings.warn(f"{error} {consequence}", ColabUtilsWarning, stacklevel=stacklevel)


@dataclass
class ShardWriter:
    """What a background process writes and sends; see `Writing`."""

    run: ShardRun
    """The shards, with a complete recipe (see `plan_recipe`) and the cache."""
    drive: Place | None
    """Folder that each finished shard is sent to; None if no more shards are sent."""
    order: list[int]
    """Numbers of the shards, in the order in which they are written."""
    streams: int | str
    _failure: ColabUtilsError | None = None

    def begin(self) -> None:
        """Check that the folders take files. If the one on Drive does not, a warning says why.

        Raises:
            ColabUtilsError: another process writes there, or the disk is too small.
        """
        with hold_folder(self.run.folder), explain_write(self.run.folder):
            begin_folder(self.run)
        if self.drive is not None:
            try:
                with hold_folder(self.drive):
                    return
            except ColabUtilsError as error:
                self.drive = None
                warn(error, UNSENT, stacklevel=5)

    def serve(self, connection: Connection, stop: Any) -> None:
        """Write shards in a process of its own, until ``stop`` is set.

        In the end, the connection gets the error that ended the work, or None.
        """
        os.nice(_PRIORITY)
        if self.run.cache is not None:
            self.run.cache.gives_way = True
        error: ColabUtilsError | None = None
        try:
            self._write(JobProgress(stop=stop))
        except ColabUtilsError as failure:
            error = failure
        except Exception as failure:
            error = ColabUtilsError(f"The writing of shards failed: {describe_error(failure)}")
        connection.send(error)

    def _write(self, progress: JobProgress) -> None:
        """Write and send all shards.

        Raises:
            ColabUtilsError: shards cannot be written or sent, or the work was stopped.
        """
        run = self.run
        with ExitStack() as stack:
            stack.enter_context(hold_folder(run.folder))
            self._try_on_drive(lambda drive: stack.enter_context(hold_folder(drive)))
            index = write_all(run, partial(self._write_once, progress))
            write_index(run.folder, index)
            self._try_on_drive(lambda drive: write_index(drive, index))
        if self._failure is not None:
            raise self._failure

    def _write_once(self, progress: JobProgress) -> list[ShardIndex]:
        """Write and send all shards that are not finished; return an index of each shard."""
        run = self.run
        done: list[ShardIndex] = []
        is_patient = is_on_drive(run.images)
        numbers = map(partial(self._fetch, progress.stop), self.order)
        for index in write_in_turn(run, numbers, progress, streams=self.streams):
            done.append(index)
            check_bad(run, join_index(run, done), is_patient=is_patient)
            if index.images:
                self._try_on_drive(partial(self._send, progress.stop, index.shards[0]))
        return done

    def _fetch(self, stop: Any, number: int) -> int:
        """Copy a shard from Drive if an earlier session finished it; return its number."""
        name = name_shard(number)
        if self.drive is not None and not open_store(self.run.folder).find_kind(name):
            # A shard that cannot be copied is written anew.
            with suppress(ColabUtilsError, OSError):
                index = find_shard(open_store(self.drive, stop), name, self.run)
                if index is not None:
                    fetching = Copying(self.drive, self.run.folder, stop=stop, overwrite=True)
                    fetching.copy_shard(*index.shards)
        return number

    def _send(self, stop: Any, shard: ShardInfo, drive: Place) -> None:
        Copying(self.run.folder, drive, stop=stop, overwrite=True).copy_shard(shard)

    def _try_on_drive(self, call: Callable[[Place], object]) -> None:
        """Call a function that writes into the folder on Drive. After an error, nothing more is
        sent, but shards are still written.
        """
        if self.drive is None:
            return
        try:
            with explain_write(self.drive):
                call(self.drive)
        except ColabUtilsError as error:
            self._failure = error
            self.drive = None


class Writing:
    """A process of low priority that writes shards, and sends them to Drive.

    The shards are the same as `write_shards` makes. Files that training has read come from the
    cache. Others are read, and kept there, while training does not read. If the writing is
    interrupted, a new one goes on after the last finished shard. If the shards cannot be sent, they
    are still written.

    An earlier writing of this process into the same folder is stopped: a notebook's cell that runs
    again opens its dataset anew, while the dataset before still lives.

    Raises:
        ColabUtilsError: another process writes there, or the disk is too small.
    """

    def __init__(self, writer: ShardWriter) -> None:
        key = (os.getpid(), identify_place(writer.run.folder))
        earlier = _writings.get(key)
        if earlier is not None:
            earlier.stop()
        writer.begin()
        with explain_shared_memory():
            stop = multiprocessing.get_context("fork").Event()
            self._process, self._connection = start_worker(writer.serve, stop)
        _writings[key] = self
        self._owner = os.getpid()
        self._finalizer = weakref.finalize(self, _end, self._owner, stop, self._process)

    @cached_property
    def _error(self) -> ColabUtilsError | None:
        """Return the error that ended the process; None if it has done its work."""
        with suppress(EOFError, OSError):
            error: ColabUtilsError | None = self._connection.recv()
            return error
        return explain_lost_process()

    def stop(self) -> None:
        """End at the next image. Finished shards stay, and a new writing continues after them."""
        if self._process.is_alive():
            self._error = ColabUtilsError(
                "The writing of shards was stopped. Run the same again: it continues."
            )
        self._finalizer()

    def wait(self) -> None:
        """Wait until all shards are written and sent.

        Raises:
            ColabUtilsError: the shards cannot be written or sent, or the writing was stopped.
        """
        self._process.join()
        if self._error is not None:
            raise self._error

    def find_error(self) -> ColabUtilsError | None:
        """Return the error that ended the writing; None if there is none so far, and in forks."""
        if os.getpid() != self._owner or self._process.is_alive():
            return None
        return self._error


def _end(owner: int, stop: Any, process: Any) -> None:
    """End the process of a `Writing`. Nothing is done in a fork of the process that owns it."""
    if os.getpid() == owner:
        stop.set()
        process.join(_STOP_S)
        end_process(process)
