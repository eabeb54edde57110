"""The clock of a training loop: how long each batch was waited for, how long its step took, and all
between steps.
"""

from array import array
from collections import deque
from itertools import pairwise
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray


class LoopClock:
    """Notes when each batch is asked for, when it comes, when its step ends, and when the loop is
    left.

    Where this process uses CUDA, events on its stream are noted beside the wall clock: a wait is
    then the time in which the GPU had nothing to do, and a step ends when the GPU has done it. The
    clock itself never waits for the GPU.

    Attributes:
        images: that came.
        began_s: when the clock was made, by `time.perf_counter`.
        firsts: the numbers of the batches that began a pass over the data.
        ends_s: seconds between two passes, in sum.

    Example:
        >>> clock = LoopClock()
        >>> for _ in range(2):
        ...     asked_s = clock.ask()
        ...     clock.receive(images=4)
        ...     clock.end_step()
        >>> clock.stop()
        >>> clock.images, clock.parts_s.shape, clock.firsts
        (8, (2, 3), [0])
    """

    def __init__(self) -> None:
        self.began_s = perf_counter()
        self.images = 0
        self.firsts = list[int]()
        self.ends_s = 0.0
        # of the batch at hand: asked for, came, and its step ended
        self._moments: list[_Moment] = []
        # of batches that are over, which a GPU may still be at
        self._pending: deque[list[_Moment]] = deque()
        self._parts = array("d")  # of those before them: wait, step and rest, seconds
        self._left: _Moment | None = None  # when the last pass was over

    @property
    def count(self) -> int:
        """Batches that came and are over: the number of the one that is asked for, or at work."""
        return len(self._parts) // 3 + len(self._pending)

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return perf_counter() - self.began_s

    @property
    def parts_s(self) -> NDArray[np.float64]:
        """Of each batch that is over, seconds, float64 [batches, 3]: until it came, until its step
        ended, and until the next one was asked for, or the loop was left.
        """
        return np.array(self._parts).reshape(-1, 3)

    def ask(self) -> float:
        """The next batch is asked for; gives the time, by `time.perf_counter`."""
        now = _note_moment()
        self._end_batch(now)
        self._moments = [now]
        return now.wall_s

    def receive(self, images: int = 0) -> None:
        """The batch came, with so many images."""
        self._moments.append(_note_moment())
        self.images += images
        if self._left or not self.firsts:  # of a pass
            self.firsts.append(self.count)
            self.ends_s += self._moments[0].wall_s - self._left.wall_s if self._left else 0.0
            self._left = None

    def end_step(self) -> None:
        """The step ended; where it is said several times for a batch, the last time counts."""
        if len(self._moments) > 1:
            self._moments[2:] = [_note_moment()]

    def stop(self) -> None:
        """The pass is over, or was left."""
        if not self._moments:
            return
        # where it was asked for a batch, and there was none, it was over then
        left = _note_moment() if len(self._moments) > 1 else self._moments[0]
        self._end_batch(left)
        if self.firsts:
            self._left = self._left or left

    def read(self) -> float:
        """Take in all batches that are over, and give the seconds of all waits so far; a GPU is
        waited for.
        """
        at_work = self._moments[:2] if len(self._moments) > 1 else []
        newest = None
        if at_work:
            newest = at_work[-1]
        elif self._pending:
            newest = self._pending[-1][-1]
        if newest is not None and newest.event:
            newest.event.synchronize()
        self._settle()
        return float(self.parts_s[:, 0].sum()) + sum(_measure(at_work))

    def _end_batch(self, left: "_Moment") -> None:
        if len(self._moments) > 1:
            self._pending.append([*self._moments, left])
            self._settle()
        self._moments = []

    def _settle(self) -> None:
        """Work out the parts of the batches that a GPU is done with."""
        while self._pending:
            moments = self._pending[0]
            event = moments[-1].event
            if event is not None and not event.query():
                return
            parts_s = _measure(moments)
            if len(parts_s) == 2:  # no step ended: all that followed is the step
                parts_s.append(0.0)
            self._parts.extend(parts_s)
            self._pending.popleft()


class _Moment(NamedTuple):
    wall_s: float
    # on the stream, where this process uses CUDA; else None
    event: Any


def _note_moment() -> _Moment:
    event = None
    if torch.cuda.is_initialized():
        event = torch.cuda.Event(enable_timing=True)
        event.record()
    return _Moment(perf_counter(), event)


def _measure(moments: list[_Moment]) -> list[float]:
    """Seconds between each moment and the next one: those of the stream where it was noted at
    both.
    """
    return [
        first.event.elapsed_time(then.event) / 1000
        if first.event and then.event
        else then.wall_s - first.wall_s
        for first, then in pairwise(moments)
    ]
