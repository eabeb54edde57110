"""The heartbeat of processes that train together: it shows each process which others are lost."""

import math
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from time import monotonic
from typing import NoReturn, cast

from torch import distributed

from colab_utils.loading.ranks import Ranks

# Seconds between two beats, and seconds without a beat after which a process counts as lost.
# Training then ends within a minute after the last beat. What is left of that minute is the time to
# save the last checkpoint.
_BEAT_S = 5.0
_SILENCE_S = 40.0
# A process writes this in place of a beat when its training has ended.
_FAREWELL = "ended"


@contextmanager
def watch_ranks(ranks: Ranks, on_silence: Callable[[str], object]) -> Iterator["Heartbeat"]:
    """Call ``on_silence`` in a thread if a process sends no beat for 40 seconds.

    If a cable is cut, connections seem open. Without a heartbeat, all processes would wait for the
    next gradients until torch's timeout of half an hour. Each process writes its beats into the
    store of ``torchrun``, and reads those of the others. A thread writes them, so that a process
    beats even while it copies shards or evaluates. A process that leaves without an error is not
    lost.

    Args:
        ranks: The processes that train together.
        on_silence: Called with a sentence that names the lost processes and their machines. To
            replace it later, set ``on_silence`` of the heartbeat that the block gets.
    """
    store = _open_store(ranks)
    heartbeat = Heartbeat(ranks, store, on_silence)
    if store is None:
        yield heartbeat
        return
    threads = [
        threading.Thread(target=heartbeat.beat, daemon=True),
        threading.Thread(target=heartbeat.watch, daemon=True),
    ]
    for thread in threads:
        thread.start()
    has_ended_well = False
    try:
        yield heartbeat
        has_ended_well = True
    finally:
        heartbeat.stopped.set()
        # If a thread is inside torch when Python ends, the process is aborted.
        for thread in threads:
            thread.join()
        if has_ended_well:
            # The store may be gone, because its process has ended already.
            with suppress(RuntimeError):
                store.set(_name_key(ranks.rank), _FAREWELL)


def _open_store(ranks: Ranks) -> distributed.TCPStore | None:
    """Return a client of the store of ``torchrun``, or None if some process cannot reach it.

    A process group that the user made may have no such store.
    """
    store = None
    if ranks.count > 1 and {"MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        # The process group's own client cannot be used: it may be waiting for something else.
        with suppress(RuntimeError, ValueError):
            store = distributed.TCPStore(
                os.environ["MASTER_ADDR"],
                int(os.environ["MASTER_PORT"]),
                is_master=False,
                timeout=timedelta(seconds=_BEAT_S),
            )
    return store if all(ranks.gather(store is not None)) else None


class Heartbeat:
    """The beats of all processes, as this process has read them.

    Attributes:
        on_silence: Called with a sentence that names the lost processes and their machines.
        stopped: Set when training is over, or when a process is lost.
    """

    def __init__(
        self,
        ranks: Ranks,
        store: distributed.TCPStore | None,
        on_silence: Callable[[str], object],
    ) -> None:
        self._ranks = ranks
        self._store = cast(distributed.TCPStore, store)
        self.on_silence = on_silence
        self.stopped = threading.Event()
        self._heard_s = [monotonic()] * ranks.count
        self._hosts = ranks.gather(socket.gethostname())

    def beat(self) -> None:
        """Write the beats of this process and read those of all, until training is over."""
        last = [b""] * self._ranks.count
        number = 0
        while not self.stopped.wait(_BEAT_S):
            number += 1
            try:
                self._store.set(_name_key(self._ranks.rank), str(number))
                for rank in range(self._ranks.count):
                    value = self._store.get(_name_key(rank))
                    if value != last[rank]:
                        last[rank] = value
                        self._heard_s[rank] = (
                            math.inf if value == _FAREWELL.encode() else monotonic()
                        )
            # The store or its machine is gone. All processes then seem lost after a while.
            except RuntimeError:
                continue

    def watch(self) -> None:
        """Look for processes that have fallen silent, until training is over."""
        looked_s = monotonic()
        while not self.stopped.wait(_BEAT_S):
            now_s = monotonic()
            if now_s - looked_s > _SILENCE_S / 2:
                # This process itself was stopped for a while, and could not read beats.
                self._heard_s = [max(now_s, heard_s) for heard_s in self._heard_s]
            looked_s = now_s
            silent = [
                rank for rank, heard_s in enumerate(self._heard_s) if now_s - heard_s > _SILENCE_S
            ]
            if silent:
                self.stopped.set()
                self.on_silence(self._describe(silent))

    def _describe(self, silent: list[int]) -> str:
        """Return the sentence that names the lost processes."""
        if self._ranks.rank in silent:
            store = os.environ["MASTER_ADDR"]
            return f"The machine of torchrun's store, {store}, was not heard for {_SILENCE_S:.0f} s"
        lost = ", ".join(f"rank {rank} on {self._hosts[rank]}" for rank in silent)
        return f"No sign of life came from {lost} for {_SILENCE_S:.0f} s"


def end_process(text: str, outlook: str) -> NoReturn:
    """End this process at once, because another one is lost. The main thread waits for that one."""
    print(
        f"error: {text}. Look at that machine and its network, and start all processes again: "
        f"{outlook}.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(1)


def _name_key(rank: int) -> str:
    return f"colab_utils/heartbeat/{rank}"
