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
from time import process_time
from typing import Any

import numpy as np

from colab_utils.drive import explain_write
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, describe_error
from colab_utils.files import open_store
from colab_utils.loading.workers import start_worker
from colab_utils.places import Place, identify_place
from colab_utils.processes import (
    end_process,
    explain_lost_process,
    explain_shared_memory,
    share_array,
)
from colab_utils.running import JobProgress
from colab_utils.shards.copy import Copying
from colab_utils.shards.index import ShardIndex, ShardInfo, write_index
from colab_utils.shards.jobs import ShardRun, find_shard, name_shard, write_in_turn
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.write import begin_folder, check_bad, join_index

# The lowest priority: training goes before.
_PRIORITY = 19
# Seconds to wait for the process after it was stopped. A read of Drive may hang for longer.
_STOP_S = 3.0
# The writings of this process, by its number and the folder of the shards.
_writings: "weakref.WeakValueDictionary[tuple[int, str], Writing]" = weakref.WeakValueDictionary()
# Places of the numbers that both processes share.
_WRITTEN, _SENT, _CPU_S = range(3)
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
    is_written: bool
    """Whether all shards are in the folder of the run, so that they are only sent."""

    def __post_init__(self) -> None:
        # Memory that both processes share: shards written, shards sent, and the CPU time.
        self.done = share_array(np.float64, 3)
        self._failure: ColabUtilsError | None = None

    def serve(self, connection: Connection, stop: Any) -> None:
        """Write shards in a process of its own, and say how that began and how it ended.

        Args:
            connection: gets the error for which ``drive`` takes no shards, or None, when the
                folders are locked; and in the end the error that ended the work, or None.
            stop: event that ends the work.
        """
        os.nice(_PRIORITY)
        if self.run.cache is not None:
            self.run.cache.gives_way = True
        self._progress = JobProgress(stop=stop)
        error: ColabUtilsError | None = None
        try:
            self._write(connection)
        except ColabUtilsError as failure:
            error = failure
        except Exception as failure:
            error = ColabUtilsError(f"The writing of shards failed: {describe_error(failure)}")
        connection.send([None, error])

    def _write(self, connection: Connection) -> None:
        """Write and send all shards.

        Raises:
            ColabUtilsError: shards cannot be written or sent, or the work was stopped.
        """
        run = self.run
        with ExitStack() as stack:
            stack.enter_context(hold_folder(run.folder))
            if not self.is_written:
                with explain_write(run.folder):
                    begin_folder(run)
            self._try_on_drive(lambda drive: stack.enter_context(hold_folder(drive)))
            connection.send([self._failure, None])
            self._failure = None
            index = join_index(run, self._write_shards())
            write_index(run.folder, index)
            self._try_on_drive(lambda drive: write_index(drive, index))
        if self._failure is not None:
            raise self._failure

    def _write_shards(self) -> list[ShardIndex]:
        """Write and send all shards that are not finished; return an index of each shard."""
        done: list[ShardIndex] = []
        run = self.run
        numbers = map(self._fetch, self.order)
        for index in write_in_turn(run, numbers, self._progress, streams=self.streams):
            done.append(index)
            self.done[[_WRITTEN, _CPU_S]] = len(done), process_time()
            check_bad(run, done)
            if index.images:
                self._try_on_drive(partial(self._send, index.shards[0]))
        return done

    def _fetch(self, number: int) -> int:
        """Copy a shard from Drive if an earlier session finished it; return its number."""
        name = name_shard(number)
        if self.drive is not None and not open_store(self.run.folder).find_kind(name):
            stop = self._progress.stop
            # A shard that cannot be copied is written anew.
            with suppress(ColabUtilsError, OSError):
                index = find_shard(open_store(self.drive, stop), name, self.run)
                if index is not None:
                    fetching = Copying(self.drive, self.run.folder, stop=stop, overwrite=True)
                    fetching.copy_shard(*index.shards)
        return number

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

    def _send(self, shard: ShardInfo, drive: Place) -> None:
        sending = Copying(self.run.folder, drive, stop=self._progress.stop, overwrite=True)
        sending.copy_shard(shard)
        self.done[_SENT] += 1


class Writing:
    """A process of low priority that writes shards, and sends them to Drive.

    The shards are the same as `write_shards` makes. Files that training has read come from the
    cache. Others are read, and kept there, while training does not read. If the writing is
    interrupted, a new one goes on after the last finished shard. If the shards cannot be sent, they
    are still written.

    An earlier writing of this process into the same folder is stopped: a notebook's cell that runs
    again opens its dataset anew, while the dataset before still lives.

    If the folder on Drive takes no shards, a warning says why.

    Raises:
        ColabUtilsError: another process writes there, or the disk is too small.
    """

    def __init__(self, writer: ShardWriter) -> None:
        self._done = writer.done
        self._shards = len(writer.order)
        key = (os.getpid(), identify_place(writer.run.folder))
        earlier = _writings.get(key)
        if earlier is not None:
            earlier.stop()
        with explain_shared_memory():
            stop = multiprocessing.get_context("fork").Event()
            self._process, self._connection = start_worker(writer.serve, stop)
        _writings[key] = self
        self._finalizer = weakref.finalize(self, _end, os.getpid(), stop, self._process)
        refusal, error = self._receive()
        if error is not None:
            raise error
        if refusal is not None:
            warn(refusal, UNSENT, stacklevel=5)

    def _receive(self) -> list[ColabUtilsError | None]:
        """Return what the process says: why Drive takes no shards, and why it has ended early."""
        with suppress(EOFError, OSError):
            messages: list[ColabUtilsError | None] = self._connection.recv()
            return messages
        return [None, explain_lost_process()]

    @cached_property
    def _error(self) -> ColabUtilsError | None:
        """Return the error that ended the process; None if it has done its work."""
        return self._receive()[1]

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
        """Return the error that ended the writing; None if there is none so far."""
        return None if self._process.is_alive() else self._error

    def __str__(self) -> str:
        written, sent, cpu_s = self._done.tolist()
        return (
            f"{written:.0f} of {self._shards} shards written, {sent:.0f} sent to Drive; the "
            f"writing took {cpu_s:.1f} s of CPU time, at the lowest priority"
        )


def _end(owner: int, stop: Any, process: Any) -> None:
    """End the process of a `Writing`. Nothing is done in a fork of the process that owns it."""
    if os.getpid() == owner:
        stop.set()
        process.join(_STOP_S)
        end_process(process)
