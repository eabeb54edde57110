"""The clock of a training loop: how long each batch was waited for, how long its step took, and all between steps."""

from __future__ import annotations

from array import array
from collections import deque
from time import perf_counter
from typing import Any, NamedTuple

import torch

__all__ = ["LoopClock"]


class LoopClock:
    """Notes when each batch is asked for, when it comes, when its step ends, and when the loop is left.

    Where this process uses CUDA, events on its stream are noted beside the wall clock: a wait is then the time in which
    the GPU had nothing to do, and a step ends when the GPU has done it. The clock itself never waits for the GPU.

    Attributes:
        waits_s: seconds until each batch came.
        steps_s: seconds from there until its step ended.
        between_s: seconds from there until the next batch was asked for, or the loop was left.
        firsts: the numbers of the batches that began a pass over the data.
        ends_s: seconds between two passes, in sum.
        images: that came.
        began_s: when the clock was made, by `time.perf_counter`.

    Example:
        >>> clock = LoopClock()
        >>> for _ in range(2):
        ...     clock.ask()
        ...     clock.receive(images=4)
        ...     clock.end_step()
        >>> clock.stop()
        >>> clock.images, len(clock.waits_s), list(clock.firsts)
        (8, 2, [0])
    """

    def __init__(self) -> None:
        self.waits_s, self.steps_s, self.between_s = array("d"), array("d"), array("d")
        self.firsts, self.ends_s, self.images = array("q"), 0.0, 0
        self.began_s = self._left_s = perf_counter()
        self._is_first = True
        self._marks: list[_Mark] = []  # of the batch at work: asked for, came, step ended
        self._pending: deque[list[_Mark]] = deque()  # batches that a GPU may still be at

    @property
    def count(self) -> int:
        """Batches that came and are over: the number of the one that is asked for, or at work."""
        return len(self.waits_s) + len(self._pending)

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return perf_counter() - self.began_s

    def ask(self) -> None:
        """The next batch is asked for."""
        now = _Mark.make()
        self._close(now)
        self._marks = [now]

    def receive(self, images: int = 0) -> None:
        """The batch came, with so many images."""
        self._marks.append(_Mark.make())
        self.images += images
        if self._is_first:
            self.firsts.append(self.count)
            self.ends_s += self._marks[0].time_s - self._left_s if len(self.firsts) > 1 else 0.0
            self._is_first = False

    def end_step(self) -> None:
        """The step ended; where it is said several times for a batch, the last time counts."""
        if len(self._marks) > 1:
            self._marks[2:] = [_Mark.make()]

    def stop(self) -> None:
        """The pass is over, or was left."""
        if self._is_first:
            return
        now = _Mark.make()
        self._left_s = now.time_s if self._marks[1:] else self._marks[0].time_s  # asked for, and there was none
        self._close(now)
        self._marks, self._is_first = [], True

    def read(self) -> float:
        """Take in all batches that are over, and give the seconds of all waits so far; a GPU is waited for."""
        last = [*(marks[-1] for marks in self._pending), *self._marks[:2]][-1:]
        for mark in last:
            mark.wait()
        self._settle()
        return sum(self.waits_s) + (self._marks[0].measure(self._marks[1]) if self._marks[1:] else 0.0)

    def _close(self, now: _Mark) -> None:
        """The batch at work ends here."""
        if self._marks[1:]:
            self._pending.append([*self._marks, now])
            self._settle()

    def _settle(self) -> None:
        while self._pending and self._pending[0][-1].is_over():
            asked, came, *ended, left = self._pending.popleft()
            self.waits_s.append(asked.measure(came))
            self.steps_s.append(came.measure(ended[0] if ended else left))
            self.between_s.append(ended[0].measure(left) if ended else 0.0)


class _Mark(NamedTuple):
    """A moment, by the wall clock and, where CUDA is used, on its stream."""

    time_s: float
    event: Any

    @staticmethod
    def make() -> _Mark:
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Mark(perf_counter(), event)

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def is_over(self) -> bool:
        return self.event is None or self.event.query()

    def measure(self, later: _Mark) -> float:
        if self.event is None or later.event is None:
            return later.time_s - self.time_s
        return float(self.event.elapsed_time(later.event)) / 1000
