"""The clock of a training loop.

It measures how long the loop waits for each batch, how long each step takes, and the time between
a step and the next request.
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
    """A clock that notes when each batch is requested, when it arrives, when its step ends, and
    when a pass over the data ends.

    If this process uses CUDA, the clock also records events on the current stream. A wait is then
    the time in which the GPU had no work, and a step ends when the GPU has finished it. The clock
    waits for the GPU only in `read`.

    Attributes:
        images: Images received.
        began_s: Time at which the clock was made, from `time.perf_counter`.
        firsts: Numbers of the batches that began a pass over the data.
        ends_s: Seconds between the end of a pass and the start of the next one, in total.

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
        # The current batch: when it was requested, when it arrived, and when its step ended.
        self._moments: list[_Moment] = []
        # These batches are over for the loop, but not measured: the GPU may not have finished them.
        self._pending: deque[list[_Moment]] = deque()
        # All earlier batches: the seconds of wait, step and rest, one batch after the other.
        self._parts = array("d")
        # The moment when the last pass ended, or None during a pass.
        self._left: _Moment | None = None

    @property
    def count(self) -> int:
        """Return how many batches are over. The current batch has this number, from 0."""
        return len(self._parts) // 3 + len(self._pending)

    @property
    def seconds(self) -> float:
        """Return the seconds since the clock was made."""
        return perf_counter() - self.began_s

    @property
    def parts_s(self) -> NDArray[np.float64]:
        """Return the seconds of wait, step and rest of each measured batch, float64 [batches, 3].

        The rest lasts from the end of the step to the next request, or to the end of the pass.
        """
        return np.array(self._parts).reshape(-1, 3)

    def ask(self) -> float:
        """Note that the loop requests a batch, and return the time from `time.perf_counter`."""
        now = self._note_moment()
        self._end_batch(now)
        self._moments = [now]
        return now.wall_s

    def receive(self, images: int = 0) -> None:
        """Note that the batch has arrived, with this many images."""
        self._moments.append(self._note_moment())
        self.images += images
        # If this batch is the first of a pass, the time between the passes ended when the batch
        # was requested.
        if self._left or not self.firsts:
            self.firsts.append(self.count)
            self.ends_s += self._moments[0].wall_s - self._left.wall_s if self._left else 0.0
            self._left = None

    def end_step(self) -> None:
        """Note that the step has ended. If a batch gets several calls, the last one counts."""
        if len(self._moments) > 1:
            self._moments[2:] = [self._note_moment()]

    def stop(self, *, is_left: bool = False) -> None:
        """Note that the pass has ended, or that the loop has left it. With ``is_left``, it has left
        it earlier, so the step of the last batch is not known.
        """
        if not self._moments:
            return
        if is_left:
            del self._moments[2:]
        # If the last request returned no batch, the pass ended at that request.
        is_open = len(self._moments) > 1 and not is_left
        left = self._note_moment() if is_open else self._moments[-1]
        self._end_batch(left)
        if self.firsts:
            self._left = self._left or left

    def read(self) -> float:
        """Wait for the GPU, measure all batches that are over, and return the seconds of all waits
        so far.
        """
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        self._settle()
        # The batch at work has waited, too.
        return float(self.parts_s[:, 0].sum()) + sum(_measure(self._moments[:2]))

    def _note_moment(self) -> "_Moment":
        event = None
        if torch.cuda.is_initialized():
            event = torch.cuda.Event(enable_timing=True)
            event.record()
        return _Moment(perf_counter(), event)

    def _end_batch(self, left: "_Moment") -> None:
        if len(self._moments) > 1:
            self._pending.append([*self._moments, left])
            self._settle()
        self._moments = []

    def _settle(self) -> None:
        """Measure the batches that the GPU has finished."""
        while self._pending:
            moments = self._pending[0]
            event = moments[-1].event
            if event is not None and not event.query():
                return
            # If the end of the step was not noted, all the time after the arrival is the step.
            parts_s = [*_measure(moments), 0.0]
            self._parts.extend(parts_s[:3])
            self._pending.popleft()


class _Moment(NamedTuple):
    wall_s: float
    event: Any
    """The CUDA event on the current stream; None if this process does not use CUDA."""


def _measure(moments: list[_Moment]) -> list[float]:
    """Return the seconds between each moment and the next one.

    If both moments have CUDA events, these give the seconds. Otherwise, the wall clock does.
    """
    return [
        first.event.elapsed_time(then.event) / 1000
        if first.event and then.event
        else then.wall_s - first.wall_s
        for first, then in pairwise(moments)
    ]
