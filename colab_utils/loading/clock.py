"""The clock of a training loop: how long each batch was waited for, how long its step took, and all between steps."""

from __future__ import annotations

from array import array
from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["LoopClock"]

_CHECKED = 63  # every 16th batch, of four times each: whether CUDA is used


class LoopClock:
    """Notes when each batch is asked for, when it comes, when its step ends, and when the loop is left.

    Where this process uses CUDA, events on its stream are noted beside the wall clock: a wait is then the time in which
    the GPU had nothing to do, and a step ends when the GPU has done it. The clock itself never waits for the GPU.

    Attributes:
        firsts: the numbers of the batches that began a pass over the data.
        ends_s: seconds between two passes, in sum.
        images: that came.
        began_s: when the clock was made, by `time.perf_counter`.

    Example:
        >>> clock = LoopClock()
        >>> for _ in range(2):
        ...     asked_s = clock.ask()
        ...     clock.receive(images=4)
        ...     clock.end_step()
        >>> clock.stop()
        >>> clock.images, clock.waits_s.shape, list(clock.firsts)
        (8, (2,), [0])
    """

    def __init__(self) -> None:
        # of each batch: when it was asked for, came, its step ended, and it was left; noted in few lines, for each of
        # them costs microseconds where a step has filled the processor's caches
        self._times = array("d")
        self.firsts, self.ends_s, self.images = array("q"), 0.0, 0
        self.began_s = self._asked_s = self._came_s = self._ended_s = self._left_s = perf_counter()
        self._is_first, self._is_at_work, self._is_on_gpu = True, False, False
        self._events: list[Any] = []  # of the batch at work, on CUDA's stream
        self._pending: deque[list[Any]] = deque()  # of batches that a GPU may still be at

    @property
    def count(self) -> int:
        """Batches that came and are over: the number of the one that is asked for, or at work."""
        return len(self._times) // 4

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return perf_counter() - self.began_s

    @property
    def waits_s(self) -> NDArray[np.float64]:
        """Seconds until each batch came, float64 [batches that are over]."""
        return self._subtract(1)

    @property
    def steps_s(self) -> NDArray[np.float64]:
        """Seconds from there until its step ended, float64 [batches that are over]."""
        return self._subtract(2)

    @property
    def between_s(self) -> NDArray[np.float64]:
        """Seconds from there until the next batch was asked for, or the loop was left; float64 [batches]."""
        return self._subtract(3)

    def ask(self) -> float:
        """The next batch is asked for; gives the time, by `time.perf_counter`."""
        now_s = perf_counter()
        if self._is_first or not len(self._times) & _CHECKED:
            self._is_on_gpu = torch.cuda.is_initialized()
        events = [_record_event()] if self._is_on_gpu else []
        if self._is_at_work:
            self._leave(now_s, events)
        self._asked_s, self._events = now_s, events
        return now_s

    def receive(self, images: int = 0) -> None:
        """The batch came, with so many images."""
        self._came_s, self._ended_s, self._is_at_work = perf_counter(), 0.0, True
        self.images += images
        if self._events:
            self._events.append(_record_event())
        if self._is_first:
            self.firsts.append(self.count)
            self.ends_s += self._asked_s - self._left_s if len(self.firsts) > 1 else 0.0
            self._is_first = False

    def end_step(self) -> None:
        """The step ended; where it is said several times for a batch, the last time counts."""
        if self._is_at_work:
            self._ended_s = perf_counter()
            if self._events:
                self._events[2:] = [_record_event()]

    def stop(self) -> None:
        """The pass is over, or was left."""
        if not self._is_first:
            self._left_s = self._asked_s  # it was asked for a batch, and there was none
            if self._is_at_work:
                self._left_s = perf_counter()
                self._leave(self._left_s, [_record_event()] if self._events else [])
            self._is_first = True

    def read(self) -> float:
        """Take in all batches that are over, and give the seconds of all waits so far; a GPU is waited for."""
        at_work = self._events[:2] if self._is_at_work else []
        for event in [*(events[-1] for events in self._pending), *at_work[1:]][-1:]:
            event.synchronize()
        self._settle()
        late_s = at_work[0].elapsed_time(at_work[1]) / 1000 if at_work else 0.0
        if self._is_at_work and not at_work:
            late_s = self._came_s - self._asked_s
        return float(self.waits_s.sum()) + late_s

    def _leave(self, now_s: float, events: list[Any]) -> None:
        """The batch at work ends here."""
        self._times.extend((self._asked_s, self._came_s, self._ended_s or now_s, now_s))
        self._is_at_work = False
        if self._events:
            self._pending.append([*self._events, *events])
            self._settle()

    def _settle(self) -> None:
        """Replace times of the wall clock by those of the stream, where the GPU has done its work."""
        while self._pending and self._pending[0][-1].query():
            row, events = 4 * (self.count - len(self._pending)), self._pending.popleft()
            parts_s = [first.elapsed_time(then) / 1000 for first, then in pairwise(events)]
            for part, seconds in enumerate([*parts_s, 0.0][:3], row):
                self._times[part + 1] = self._times[part] + seconds

    def _subtract(self, part: int) -> NDArray[np.float64]:
        """How long this part of each batch took that is over."""
        times = np.array(self._times[: 4 * (self.count - len(self._pending))]).reshape(-1, 4)
        return times[:, part] - times[:, part - 1]


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
