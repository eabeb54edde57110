"""Read files in background threads before they are needed, many at once.

A thread that waits for a slow folder uses no processor core, so there may be many more threads than
cores.
"""

import queue
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Generator, Hashable, Iterable
from concurrent.futures import Future, wait
from itertools import islice
from time import perf_counter
from typing import Any

from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.files import Store
from colab_utils.processes import pop_done, start_thread
from colab_utils.streams import (
    MOST_STREAMS,
    StreamTuner,
    guess_streams,
    remember_streams,
    require_streams,
)

AHEAD_BYTES = 64_000_000
"""Most bytes that a reader holds in files that are being read or were not taken yet.

A single file may be larger. Content that is not ``bytes`` or ``bytearray`` does not count.
"""
AHEAD_IMAGES = 256
"""A worker of `make_loader` is told of this many images in advance. Its reader decides how many of
their files to read at once."""

# Files that `read_all` asks for, per stream. Files are taken in order, so a slow file holds up
# those behind it. With 16 files for each stream, the other streams run out of files only if one
# file takes more than about 16 times as long as the others.
_FILES_A_STREAM = 16
# A read may hang for ever. It is given up if its file has not come so many seconds after it was
# needed. The repetitions of a read that fails take 81 seconds.
_GIVE_UP_S = 300.0


class Reading(Future[Any]):
    """One file that was asked for: see `Reader.ask`. To get its content, call `take`.

    Attributes:
        name: the name of the file, as it was asked for.
    """

    def __init__(self, reader: "Reader", name: Any) -> None:
        super().__init__()
        self.name = name
        self._reader = reader

    def take(self) -> Any:
        """Return the content of the file. If it is not read yet, wait for it.

        Afterwards the content no longer counts towards `AHEAD_BYTES` of the reader.

        Raises:
            DriveLostError: Drive failed, and went on failing for 81 seconds.
            UnavailableError: the file did not come within 300 seconds.
            Exception: what ``read`` raised.
        """
        self._reader._hurry(self)
        try:
            if not wait([self], _GIVE_UP_S).done:
                raise UnavailableError(
                    f"A file of {self._reader._store.place} did not come within {_GIVE_UP_S:.0f} "
                    "seconds. Mount that folder again, or restart the session. Then run the same "
                    "again: what is done is safe."
                )
            return self.result()
        finally:
            self._reader._drop([self])


class Reader:
    """Read files in background threads, many at once, in the order in which they are asked for.

    The threads start when files are asked for. They are daemon threads, so the program can end even
    if a read never does. A reader does not work in a forked process, because threads
    are not forked: make a new reader there.

    Args:
        read: takes a name and returns the content of the file, as ``read_file`` does. Several
            threads call it at the same time.
        store: the files. The best number of streams for its mount or its server is kept for the
            session, and the next reader starts with it. With ``streams="auto"``, each call of the
            store that is tried again makes the reader read fewer files at once.
        streams: how many files are read at once, 1 to 256. By default, ``"auto"``, the best number
            is measured while files are read: see `StreamTuner`.
        most_streams: the largest number that "auto" may choose.

    Attributes:
        tuner: the `StreamTuner` that holds the number of streams. A number that you gave stays as
            it is.
        read_bytes: bytes of all files that were read.

    Raises:
        ColabUtilsError: ``streams`` is out of range.

    Example:
        >>> from colab_utils.files import open_store
        >>> reader = Reader(str.upper, open_store("."), streams=4)
        >>> readings = reader.ask(["a", "b", "c"])
        >>> [reading.take() for reading in readings]
        ['A', 'B', 'C']
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        store: Store,
        *,
        streams: int | str = "auto",
        most_streams: int = MOST_STREAMS,
    ) -> None:
        self._is_auto = require_streams(streams) == "auto"
        most_streams = min(MOST_STREAMS, most_streams)
        first = min(most_streams, guess_streams(store.place)) if self._is_auto else int(streams)
        self.tuner = StreamTuner(first, most_streams)
        self._read = read
        self._store = store
        # A reader before this one may have left its own function there.
        store.on_failure = self._refuse if self._is_auto else None
        self._lock = threading.Lock()
        # The readings that no stream has begun yet, in order. It serves as an ordered set.
        self._waiting: OrderedDict[Reading, None] = OrderedDict()
        self._tasks: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._ahead: dict[Hashable, deque[Reading]] = {}
        self._threads = 0
        self._busy = 0
        # Readings in flight.
        self._active: set[Reading] = set()
        # The bytes of each reading that has ended and was not taken yet.
        self._held: dict[Reading, int] = {}
        self._held_bytes = 0
        self._files = 0
        self.read_bytes = 0
        self._remembered = self.tuner.streams

    def ask(self, names: Iterable[Hashable]) -> list[Reading]:
        """Return a reading for each name without waiting. Files are read in the order of the names.

        Raises:
            ColabUtilsError: the system starts no thread.
        """
        readings = [Reading(self, name) for name in names]
        with self._lock:
            self._waiting.update(dict.fromkeys(readings))
            self._start_more()
        return readings

    def read_all(self, names: Iterable[Hashable]) -> Generator[Reading, None, None]:
        """Yield a reading for each name in order, while the next files are read.

        ``names`` may be a generator. Names are taken from it only shortly before their files are
        read.
        """
        source = iter(names)
        pending: deque[Reading] = deque()
        try:
            while True:
                wanted = max(1, _FILES_A_STREAM * self.tuner.streams - len(pending))
                pending.extend(self.ask(islice(source, wanted)))
                if not pending:
                    return
                yield pending.popleft()
        finally:
            self._drop(pending)

    def read_as_done(
        self, names: Iterable[Hashable], *, patience_s: float
    ) -> Generator[list[Any], None, None]:
        """Yield the contents that came, in any order, several times a second, until all have come.

        Close this generator. If reads are under way then, because of an error or Ctrl-C, the
        store's waits end, and these reads are waited for, for ``patience_s`` at most.
        """
        pending: set[Future[Any]] = set(self.ask(names))
        try:
            while pending:
                yield [reading.result() for reading in pop_done(pending)]
        finally:
            if pending:
                self._store.stop.set()
                wait(pending, patience_s)

    def prefetch(self, names: Iterable[Hashable]) -> None:
        """Begin to read files for later calls of `take`.

        A name that occurs twice is read twice, for two calls.
        """
        for reading in self.ask(names):
            self._ahead.setdefault(reading.name, deque()).append(reading)

    def is_ahead(self, name: Hashable) -> bool:
        """Return whether `prefetch` was called for a file that was not taken yet."""
        return name in self._ahead

    def take(self, name: Hashable) -> Any:
        """Return the content of a file.

        If `prefetch` was called for it, wait for that read. If not, read it now, in this thread.

        Raises:
            DriveLostError: Drive failed, and went on failing for 81 seconds.
            Exception: what ``read`` raised.
        """
        readings = self._ahead.pop(name, None)
        if readings is None:
            return self._read(name)
        reading = readings.popleft()
        if readings:
            self._ahead[name] = readings
        return reading.take()

    def forget(self, names: Iterable[Hashable] | None = None) -> None:
        """Give up these files, which `prefetch` began to read, or all. Other names are ignored."""
        given_up = list(self._ahead) if names is None else names
        self._drop([reading for name in given_up for reading in self._ahead.pop(name, ())])

    def end(self) -> None:
        """Close this reader in one of its threads. A finalizer calls this, so it takes no lock."""
        self._tasks.put(None)

    def close(self) -> None:
        """Give up all files, and end the threads. A thread that is reading ends after its read. A
        closed reader reads no more.
        """
        with self._lock:
            self._waiting.clear()
            self._active.clear()
            # Each thread ends the next one.
            self._tasks.put(None)

    def _start_more(self) -> None:
        """Start reads while streams and memory are free. The caller holds the lock."""
        while self._waiting and self._may_start():
            self._start(self._waiting.popitem(last=False)[0])

    def _may_start(self) -> bool:
        if len(self._active) >= self.tuner.streams:
            return False
        mean_bytes = self.read_bytes / self._files if self._files else 0
        ahead_bytes = self._held_bytes + mean_bytes * (len(self._active) + 1)
        return ahead_bytes <= AHEAD_BYTES or not (self._active or self._held)

    def _start(self, reading: Reading) -> None:
        # A dropped reading may keep its thread busy, even for ever. That thread still counts as
        # busy, so the next reading gets a new thread.
        if self._threads <= self._busy:
            self._start_thread()
        self._busy += 1
        self._active.add(reading)
        self._tasks.put(reading)

    def _start_thread(self) -> None:
        """Start one more thread. If the system refuses, those started so far do all the work."""
        try:
            start_thread(self._serve, f"read-{self._threads + 1}")
        except ColabUtilsError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _serve(self) -> None:
        """Run in each thread: read the files of the queue, until the reader is closed."""
        while (reading := self._tasks.get()) is not None:
            try:
                content = self._read(reading.name)
            except BaseException as error:
                self._finish(reading, 0)
                reading.set_exception(error)
            else:
                count = len(content) if isinstance(content, bytes | bytearray) else 0
                self._finish(reading, count)
                reading.set_result(content)
        self.close()

    def _refuse(self) -> None:
        with self._lock:
            self.tuner.refuse()

    def _finish(self, reading: Reading, count: int) -> None:
        """Count the bytes of a file that was read, and start the next ones."""
        with self._lock:
            self._busy -= 1
            if reading in self._active:
                self._active.remove(reading)
                self._held[reading] = count
                self._held_bytes += count
                self._files += 1
                self.read_bytes += count
                if self._is_auto:
                    self._tune()
                self._start_more()

    def _tune(self) -> None:
        """Let the tuner count a file that was read. The caller holds the lock."""
        is_busy = bool(self._waiting) and len(self._active) + 1 >= self.tuner.streams
        if is_busy:
            self.tuner.count(perf_counter())
        else:
            self.tuner.pause()
        best = self.tuner.best
        if best and best != self._remembered:
            self._remembered = best
            remember_streams(self._store.place, best)

    def _hurry(self, reading: Reading) -> None:
        """Start a reading at once, beyond all limits, because `take` waits for it."""
        with self._lock:
            if reading in self._waiting:
                del self._waiting[reading]
                self._start(reading)

    def _drop(self, readings: Iterable[Reading]) -> None:
        """Give up readings. Those in flight go on, but no longer count towards the limits.

        All are given up before another read starts. If they were given up one at a time, each would
        make room for the next one to start.
        """
        with self._lock:
            for reading in readings:
                self._waiting.pop(reading, None)
                self._active.discard(reading)
                self._held_bytes -= self._held.pop(reading, 0)
            self._start_more()
