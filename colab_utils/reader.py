"""Read files ahead of those who need them, many at once: a read that waits needs no core."""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Hashable, Iterable, Iterator
from concurrent.futures import Future
from time import perf_counter
from typing import Any

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.places import Place
from colab_utils.processes import start_thread
from colab_utils.streams import (
    StreamTrial,
    StreamTuner,
    guess_streams,
    remember_streams,
    require_streams,
)

AHEAD_BYTES = 64_000_000
"""Bytes that a reader holds of files that nobody has taken yet."""

# Files that are asked for, for each stream: while the one that is needed next takes 16 times as
# long as others, these keep coming.
_FILES_A_STREAM = 16


class Reading:
    """One file that was asked for: see `Reader.ask`.

    Attributes:
        content: of the file, once it was read; `take` waits for it and frees its memory.
    """

    def __init__(self, reader: "Reader", name: Any) -> None:
        self.name = name
        self._reader = reader
        self.content: Future[Any] = Future()

    def take(self) -> Any:
        """Return what was read; wait for it where it has not come yet.

        Raises:
            DriveLostError: Drive failed, and went on failing for 81 seconds.
            Exception: what ``read`` raised.
        """
        self._reader._hurry(self)
        try:
            return self.content.result()
        finally:
            self._reader._release(self)


class Reader:
    """Keep many reads in flight for the files that come next, in the order in which they are asked.

    Its threads start with the first file that is asked for, and are daemons: a read that never
    ends keeps no program from ending. A forked process makes a reader of its own.

    Args:
        read: gives a file's content by its name, such as ``read_file``; threads call it.
        place: a folder that the files lie in; what was found for its mount, or its server, is
            kept for the session.
        streams: reads at the same time, up to 256. "auto" measures: see `StreamTuner`.
        retries: those of ``read``, if it has any: they tell where Drive refuses, so that less is
            read at once.
        most_bytes: bytes that may wait to be taken; one file may always be in flight.

    Attributes:
        tuner: what was found about the number of streams; None where you gave one.

    Raises:
        ColabUtilsError: ``streams`` is out of range.

    Example:
        >>> reader = Reader(str.upper, place=".", streams=4)
        >>> readings = reader.ask(["a", "b", "c"])
        >>> [reading.take() for reading in readings]
        ['A', 'B', 'C']
    """

    def __init__(
        self,
        read: Callable[[Any], Any],
        *,
        place: str | Place,
        streams: int | str = "auto",
        retries: Retries | None = None,
        most_bytes: int = AHEAD_BYTES,
    ) -> None:
        self.tuner: StreamTuner | None = None
        if require_streams(streams) == "auto":
            self.tuner = StreamTuner(guess_streams(place))
        else:
            self._streams = int(streams)
        self._read = read
        self._place = place
        if retries is not None:
            retries.on_failure = self._refuse
        self._most_bytes = most_bytes
        self._lock = threading.Lock()
        self._waiting: deque[Reading] = deque()
        self._tasks: queue.SimpleQueue[Reading | None] = queue.SimpleQueue()
        self._ahead: dict[Hashable, deque[Reading]] = {}
        self._threads = 0
        self._busy = 0
        # Readings in flight, and the bytes of those that came and were not taken.
        self._active: set[Reading] = set()
        self._held: dict[Reading, int] = {}
        self._held_bytes = 0
        self._files = 0
        self._all_bytes = 0
        self._remembered = self.streams

    @property
    def streams(self) -> int:
        """Return how many files are read at once now."""
        return self.tuner.streams if self.tuner else self._streams

    @property
    def best(self) -> StreamTrial | None:
        """Return the number of streams that was found, with its files a second; None before."""
        return self.tuner.best if self.tuner else None

    def ask(self, names: Iterable[Hashable]) -> list[Reading]:
        """Begin to read files, in this order, as soon as a stream is free."""
        readings = [Reading(self, name) for name in names]
        with self._lock:
            self._waiting.extend(readings)
            self._start_more()
        return readings

    def read_all(self, names: Iterable[Hashable]) -> Generator[Reading, None, None]:
        """Yield a reading of each name in order, while those that come next are read.

        Names are drawn as they are needed: they may be more than memory holds.
        """
        source = iter(names)
        pending: deque[Reading] = deque()
        try:
            while True:
                pending.extend(self.ask(self._draw(source, len(pending))))
                if not pending:
                    return
                yield pending.popleft()
        finally:
            self._drop(pending)

    def prefetch(self, names: Iterable[Hashable]) -> None:
        """Begin to read files for later calls of `take`, once for each time that they are named."""
        for reading in self.ask(names):
            self._ahead.setdefault(reading.name, deque()).append(reading)

    def is_ahead(self, name: Hashable) -> bool:
        """Return whether `prefetch` began to read a file that nobody took yet."""
        return name in self._ahead

    def take(self, name: Hashable) -> Any:
        """Return a file's content: as `prefetch` began to read it, or read now, in this thread.

        Raises:
            DriveLostError: Drive failed, and went on failing for 81 seconds.
            Exception: what ``read`` raised.
        """
        if not self.is_ahead(name):
            return self._read(name)
        return self._pop_ahead(name).take()

    def forget(self, names: Iterable[Hashable]) -> None:
        """Give up what `prefetch` began to read of these files."""
        dropped = []
        for name in names:
            while self.is_ahead(name):
                dropped.append(self._pop_ahead(name))
        self._drop(dropped)

    def forget_all(self) -> None:
        """Give up all that `prefetch` began to read and nobody took."""
        self.forget(list(self._ahead))

    def _pop_ahead(self, name: Hashable) -> Reading:
        readings = self._ahead[name]
        reading = readings.popleft()
        if not readings:
            del self._ahead[name]
        return reading

    def close(self) -> None:
        """Let go of all files, and end the threads that wait; reads in flight end by themselves."""
        with self._lock:
            self._waiting.clear()
            self._held.clear()
            self._held_bytes = 0
            self._active.clear()
            for _ in range(self._threads):
                self._tasks.put(None)
            self._threads = 0

    def _draw(self, source: Iterator[Hashable], pending: int) -> Iterator[Hashable]:
        """Yield names until some files for each stream are asked for."""
        for _ in range(max(1, _FILES_A_STREAM * self.streams - pending)):
            try:
                yield next(source)
            except StopIteration:
                return

    def _start_more(self) -> None:
        """Start reads while streams and memory are free; the lock is held."""
        while self._waiting and self._may_start():
            self._start(self._waiting.popleft())

    def _may_start(self) -> bool:
        if len(self._active) >= self.streams:
            return False
        mean_bytes = self._all_bytes / self._files if self._files else 0
        ahead_bytes = self._held_bytes + mean_bytes * (len(self._active) + 1)
        return ahead_bytes <= self._most_bytes or not (self._active or self._held)

    def _start(self, reading: Reading) -> None:
        self._active.add(reading)
        # A thread whose reading was dropped may be busy for ever: it is counted, not waited for.
        self._busy += 1
        if self._threads < self._busy:
            self._start_thread()
        self._tasks.put(reading)

    def _start_thread(self) -> None:
        """Start one more thread; where the system gives none, those that there are do the work."""
        try:
            start_thread(self._serve, f"read-{self._threads + 1}")
        except ColabUtilsError:
            if not self._threads:
                raise
        else:
            self._threads += 1

    def _serve(self) -> None:
        """Read what is asked for, until the reader is closed."""
        while True:
            reading = self._tasks.get()
            if reading is None:
                return
            content = None
            error: BaseException | None = None
            try:
                content = self._read(reading.name)
            except BaseException as failure:
                error = failure
            self._finish(reading, content, error)

    def _refuse(self) -> None:
        with self._lock:
            if self.tuner is not None:
                self.tuner.refuse()

    def _finish(self, reading: Reading, content: Any, error: BaseException | None) -> None:
        count = len(content) if isinstance(content, bytes | bytearray) else 0
        with self._lock:
            self._busy -= 1
            if reading in self._active:
                self._active.remove(reading)
                self._held[reading] = count
                self._held_bytes += count
                self._files += 1
                self._all_bytes += count
                self._tune()
                self._start_more()
        if error is None:
            reading.content.set_result(content)
        else:
            reading.content.set_exception(error)

    def _tune(self) -> None:
        """Tell the tuner of a file that came; the lock is held."""
        if self.tuner is None:
            return
        is_busy = bool(self._waiting) and len(self._active) + 1 >= self.tuner.streams
        if is_busy:
            self.tuner.count(perf_counter())
        else:
            self.tuner.pause()
        best = self.tuner.best
        if best is not None and best.streams != self._remembered:
            self._remembered = best.streams
            remember_streams(self._place, best.streams)

    def _hurry(self, reading: Reading) -> None:
        """Start a reading now that somebody waits for it, whatever the limits are."""
        with self._lock:
            if reading in self._waiting:
                self._waiting.remove(reading)
                self._start(reading)

    def _release(self, reading: Reading) -> None:
        with self._lock:
            self._held_bytes -= self._held.pop(reading, 0)
            self._start_more()

    def _drop(self, readings: Iterable[Reading]) -> None:
        """Forget readings, all before another one starts: else each would make room for the next.

        Reads in flight go on, and count no more.
        """
        dropped = set(readings)
        with self._lock:
            self._waiting = deque(reading for reading in self._waiting if reading not in dropped)
            self._active -= dropped
            for reading in dropped:
                self._held_bytes -= self._held.pop(reading, 0)
            self._start_more()
