"""Shards that a process in the background writes from loose files, and sends to Drive."""

import atexit
import json
import multiprocessing
import os
import re
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from secrets import token_hex
from time import time
from typing import Any

import psutil

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import has_size, write_file
from colab_utils.loading.arrival import STATUS_NAME, ArrivedShards, group_windows
from colab_utils.machine import count_cores
from colab_utils.processes import ThreadPool, fork_process, pop_done
from colab_utils.shards.copy import COPY_STREAMS, Copying
from colab_utils.shards.index import ShardIndex, ShardInfo, write_index
from colab_utils.shards.jobs import read_shard_index
from colab_utils.shards.lock import hold_folder
from colab_utils.shards.write import ShardRun, begin_run, find_finished, write_run

_LOWEST_PRIORITY = 19
# So long a process may take to end by itself: longer than an image takes.
_END_S = 5.0


class Writing:
    """The writing of shards in a process of the lowest priority, while they are trained on.

    It writes into ``run.folder`` what `write_shards` writes, in a random order. Each finished shard
    is sent to ``run.drive``, where there is one; the index comes there last. The process ends with
    this one, and with `stop`; the next one continues there.

    Attributes:
        run: with its complete recipe.

    Raises:
        ColabUtilsError: another process writes there, the disk is too small, or a folder holds
            other data.
    """

    def __init__(self, run: ShardRun) -> None:
        self._owner = os.getpid()
        self._arrived = ArrivedShards(run.folder, token_hex(8))
        receiver, sender = multiprocessing.Pipe(duplex=False)
        job = _WritingJob(run, self._arrived.key, sender)
        self._stop = job.stop
        self._process = fork_process(job.work, "writing")
        sender.close()
        # Else this process would wait at its end until all is written.
        atexit.register(self.stop)
        try:
            self.run = replace(run, recipe=_receive_recipe(receiver))
        except BaseException:
            self.stop()
            raise
        self._order = self.run.plan_order()

    @property
    def key(self) -> str:
        """Return the mark of this writing in the file that tells what has arrived."""
        return self._arrived.key

    @property
    def is_complete(self) -> bool:
        """Return whether all shards are on this machine's disk."""
        return len(self._list_arrived()) == len(self._order)

    def _list_arrived(self) -> list[int]:
        self._arrived.look()
        return [number for number in self._order if self._arrived.knows(number)]

    def plan_windows(self, epoch: int) -> list[list[int]]:
        """Return the shards in the order in which they are written, in windows that are trained on
        one after another.
        """
        return group_windows(self._order)

    def wait_for(self, shards: Collection[int], windows: list[list[int]]) -> Iterator[None]:
        """Give None again and again until the shards of a batch are there.

        Raises:
            ColabUtilsError: they cannot be written.
        """
        while not self._arrived.has(shards):
            yield None

    def wait(self) -> None:
        """Wait until all shards are written, and sent to Drive.

        Raises:
            ColabUtilsError: some could not be written, or sent.
        """
        self._process.join()
        self._arrived.has(self._order)
        problem = self._arrived.look().get("drive_error")
        if problem:
            raise ColabUtilsError(problem)

    def stop(self) -> None:
        """End the writing at its next image; what is finished stays."""
        if os.getpid() != self._owner:
            return
        atexit.unregister(self.stop)
        self._stop.set()
        self._process.join(_END_S)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def measure_cores(self) -> float:
        """Return how many cores the writing has taken so far, on average; 0 once it has ended."""
        cpu_s = 0.0
        began_s = time()
        with suppress(psutil.Error):
            process = psutil.Process(self._process.pid)
            began_s = process.create_time()
            for each in [process, *process.children(recursive=True)]:
                times = each.cpu_times()
                # Those of processes that have ended are with their parent's.
                cpu_s += times.user + times.system + times.children_user + times.children_system
        return cpu_s / max(time() - began_s, 1e-3)

    def __str__(self) -> str:
        status = self._arrived.look()
        text = f"{len(self._list_arrived())} of {len(self._order)} shards written"
        if self.run.drive is not None:
            text += f", {status.get('sent', 'all')} of them on Drive"
            if status.get("drive_error"):
                text += f" ({status['drive_error']})"
        if self._process.is_alive():
            text += (
                f"; the writing takes {self.measure_cores():.1f} of {count_cores()} cores, those "
                "that nothing else needs"
            )
        return text


def _receive_recipe(receiver: Any) -> dict[str, Any]:
    """Return the complete recipe once the writing has begun.

    Raises:
        ColabUtilsError: it could not begin.
    """
    try:
        answer = receiver.recv()
    except EOFError:
        answer = "expected to write shards in the background, found that the process was ended"
    if isinstance(answer, str):
        raise ColabUtilsError(answer)
    recipe: dict[str, Any] = answer
    return recipe


class _WritingJob:
    """What the process in the background does."""

    def __init__(self, run: ShardRun, key: str, sender: Any) -> None:
        self.stop = multiprocessing.get_context("fork").Event()
        self._run = run
        self._key = key
        self._sender = sender
        self._arrived: dict[int, Future[None] | None] = {}
        self._shards = 0
        self._sent = set[str]()
        self._error = ""
        self._drive_error = ""
        self._retries = Retries(self.stop)

    def work(self) -> None:
        os.nice(_LOWEST_PRIORITY)
        try:
            with ExitStack() as stack:
                self._write(stack)
        except Exception as error:
            self._error = (
                f"{describe_error(error)}; {len(self._arrived)} of {self._shards} shards in "
                f"{self._run.folder} are safe, and the same call continues there"
            )
            if not self._shards:
                self._sender.send(describe_error(error))
                return
            self._write_status()

    def _write(self, stack: ExitStack) -> None:
        index = find_finished(self._run)
        if self._run.drive is not None:
            stack.enter_context(hold_folder(self._run.drive))
        stack.enter_context(hold_folder(self._run.folder))
        if index is None:
            self._run = begin_run(self._run)
        else:
            self._run = replace(self._run, recipe=index.recipe)
        self._copying = Copying(
            self._run.folder, self._run.drive or Path(), self._retries, overwrite=True
        )
        self._pool = stack.enter_context(ThreadPool(COPY_STREAMS, thread_name_prefix="sending"))
        # After an error the threads end at their next piece.
        stack.callback(self.stop.set)
        self._shards = len(self._run.list_shards())
        self._write_status()
        self._sender.send(self._run.recipe)
        if index is None:
            index = write_run(self._run, self._report)
        self._add(index.shards)
        # A shard without a usable image has no files.
        for number in range(self._shards):
            self._arrived.setdefault(number, None)
        self._write_status()
        try:
            self._finish_sending(index)
        except Exception as error:
            self._drive_error = (
                f"{describe_error(error)}; all shards are safe in {self._run.folder}, and the same "
                "call sends the others to Drive"
            )
            self._write_status()
        else:
            (self._run.folder / STATUS_NAME).unlink(missing_ok=True)

    def _report(self, done: list[ShardIndex], _: int) -> None:
        self._check_stop()
        if len(done) > len(self._arrived):
            self._add(part.shards[0] for part in done)
            self._write_status()

    def _check_stop(self) -> None:
        if self.stop.is_set():
            raise ColabUtilsError("expected all shards, found that the writing was stopped")

    def _add(self, shards: Iterable[ShardInfo]) -> None:
        """Note that shards are finished, and send them to Drive."""
        for shard in shards:
            number = int(re.sub(r"\D", "", shard.name))
            if number in self._arrived:
                continue
            self._arrived[number] = None
            if self._run.drive is not None and shard.images:
                self._arrived[number] = self._pool.submit(self._send, self._run.drive, shard)

    def _send(self, drive: Path, shard: ShardInfo) -> None:
        if not self._retries.run(lambda: _holds_shard(drive, shard)):
            for name, size, checksum in shard.files():
                self._copying.copy_file(name, size, checksum)
        self._sent.add(shard.name)

    def _finish_sending(self, index: ShardIndex) -> None:
        """Wait until all shards are on Drive; write their index there."""
        if self._run.drive is None:
            return
        pending = {sending for sending in self._arrived.values() if sending is not None}
        while pending:
            self._check_stop()
            done = pop_done(pending)
            for sending in done:
                sending.result()
            if done:
                self._write_status()
        self._retries.write(self._run.drive, write_index, self._run.drive, index)

    def _write_status(self) -> None:
        status = {
            "key": self._key,
            "rolls": False,
            "pid": os.getpid(),
            "arrived": list(self._arrived),
            "sent": len(self._sent),
            "error": self._error,
            "drive_error": self._drive_error,
        }
        write_file(self._run.folder / STATUS_NAME, json.dumps(status).encode())


def _holds_shard(drive: Path, shard: ShardInfo) -> bool:
    """Return whether Drive has a shard, as an earlier session sent it."""
    there = read_shard_index(drive / shard.arrays_name)
    if there is None or there.shards != (shard,):
        return False
    return has_size(drive / shard.name, shard.bytes)
