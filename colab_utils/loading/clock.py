"""The clock of a training loop: how long each batch was waited for, how long its step took, and all between steps; and
a step that takes a given time.
"""

from __future__ import annotations

import zlib
from array import array
from collections import deque
from itertools import pairwise
from time import perf_counter, sleep, thread_time
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError

__all__ = ["EmulatedStep", "LoopClock"]

_CHECKED = 15  # every 16th batch: whether CUDA is used
_BUSY = 0.9  # of a core: what a training process takes to launch kernels
_BLOCK = bytes(32_768)  # a few microseconds of work that releases Python's lock, as launching kernels does


class LoopClock:
    """Notes when each batch is asked for, when it comes, when its step ends, and when the loop is left.

    Where this process uses CUDA, events on its stream are noted beside the wall clock: a wait is then the time in which
    the GPU had nothing to do, and a step ends when the GPU has done it. The clock itself never waits for the GPU.

    Attributes:
        images: that came.
        began_s: when the clock was made, by `time.perf_counter`.

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
        # of each batch: when it was asked for, came, and its step ended, or 0. Little is done for each of them: a line
        # of Python costs microseconds where a step has filled the processor's caches
        self._times = array("d")
        self._lefts: list[tuple[int, float]] = []  # the last batch of each pass that is over, and when it was left
        self.began_s, self.images = perf_counter(), 0
        self._is_at_work, self._is_on_gpu = False, False
        self._events: list[Any] = []  # of the batch at work, on CUDA's stream
        self._pending: deque[list[Any]] = deque()  # of batches that a GPU may still be at
        self._gpu_parts = array("d")  # wait, step and rest of the batches before them, seconds
        self._gpu_rows = array("q")

    @property
    def count(self) -> int:
        """Batches that came and are over: the number of the one that is asked for, or at work."""
        return len(self._times) // 3 - self._is_at_work

    @property
    def seconds(self) -> float:
        """Since the clock was made."""
        return perf_counter() - self.began_s

    @property
    def firsts(self) -> list[int]:
        """The numbers of the batches that began a pass over the data."""
        came = len(self._times) // 3
        return [row for row in (0, *(row + 1 for row, _ in self._lefts)) if row < came]

    @property
    def ends_s(self) -> float:
        """Seconds between two passes, in sum."""
        came = len(self._times) // 3
        return sum(self._times[3 * row + 3] - left_s for row, left_s in self._lefts if row + 1 < came)

    @property
    def parts_s(self) -> NDArray[np.float64]:
        """Of each batch that is over, seconds, float64 [batches, 3]: until it came, until its step ended, and until the
        next one was asked for, or the loop was left.
        """
        count = self.count - len(self._pending)
        asked, came, ended = (np.array(self._times[part::3])[:count] for part in range(3))
        left = np.array(self._times[3::3])[:count]
        left = np.append(left, np.zeros(count - len(left)))
        for row, left_s in self._lefts:
            if row < count:
                left[row] = left_s
        ended = np.where(ended > 0, ended, left)
        parts = np.stack((came - asked, ended - came, left - ended), axis=1)
        settled = np.array(self._gpu_parts).reshape(-1, 3)
        parts[np.array(self._gpu_rows)[: len(settled)].astype(int)] = settled
        return parts

    def ask(self) -> float:
        """The next batch is asked for; gives the time, by `time.perf_counter`."""
        now_s = perf_counter()
        if self._is_on_gpu or not len(self._times) & _CHECKED:
            self._ask_gpu()
        self._times.append(now_s)
        self._is_at_work = False
        return now_s

    def receive(self, images: int = 0) -> None:
        """The batch came, with so many images."""
        self._times.extend((perf_counter(), 0.0))
        self._is_at_work = True
        self.images += images
        if self._events:
            self._events.append(_record_event())

    def end_step(self) -> None:
        """The step ended; where it is said several times for a batch, the last time counts."""
        if self._is_at_work:
            self._times[-1] = perf_counter()
            if self._events:
                self._events[2:] = [_record_event()]

    def stop(self) -> None:
        """The pass is over, or was left."""
        if self._is_at_work:
            left_s = perf_counter()
            self._leave_gpu(_record_event() if self._events else None)
        elif len(self._times) % 3:
            left_s = self._times.pop()  # it was asked for a batch, and there was none
        else:
            return
        self._is_at_work = False
        row = self.count - 1
        if row >= 0 and (not self._lefts or self._lefts[-1][0] < row):
            self._lefts.append((row, left_s))

    def read(self) -> float:
        """Take in all batches that are over, and give the seconds of all waits so far; a GPU is waited for."""
        at_work = self._events[:2] if self._is_at_work else []
        for event in [*(events[-1] for events in self._pending), *at_work[1:]][-1:]:
            event.synchronize()
        self._settle()
        late_s = at_work[0].elapsed_time(at_work[1]) / 1000 if at_work else 0.0
        if self._is_at_work and not at_work:
            late_s = self._times[-2] - self._times[-3]
        return float(self.parts_s[:, 0].sum()) + late_s

    def _ask_gpu(self) -> None:
        self._is_on_gpu = torch.cuda.is_initialized()
        event = _record_event() if self._is_on_gpu else None
        self._leave_gpu(event)
        self._events = [event] if event else []

    def _leave_gpu(self, event: Any) -> None:
        """The batch at work ends with this event."""
        if self._is_at_work and self._events:
            self._gpu_rows.append(self.count)
            self._pending.append([*self._events, event])
            self._settle()

    def _settle(self) -> None:
        """Take over the times of the stream where the GPU has done its work."""
        while self._pending and self._pending[0][-1].query():
            parts_s = [first.elapsed_time(then) / 1000 for first, then in pairwise(self._pending.popleft())]
            self._gpu_parts.extend([*parts_s, 0.0][:3])


def _record_event() -> Any:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


class EmulatedStep:
    """A placeholder step for a machine without a GPU; label its figures *emulated*.

    It uses ``busy`` of a core for ``step_ms`` milliseconds (both more than 0), and longer where others take the core
    away: a step that only sleeps flatters every loader. Raises ColabUtilsError for a step that takes no time.

    Example:
        >>> step = EmulatedStep(5)
        >>> step([], [])
        >>> print(step)
        emulated 5 ms
    """

    emulated = True

    def __init__(self, step_ms: float, busy: float = _BUSY) -> None:
        if not 0 < step_ms < float("inf"):
            raise ColabUtilsError(f"expected step_ms over 0, found {step_ms!r}: give milliseconds, like 100")
        self.step_ms, self.busy = float(step_ms), busy

    def __call__(self, images: Any, targets: Any = None) -> None:
        """Spend the time of one step; takes ``(images, targets)`` or one packed batch, and looks at neither."""
        length_s = self.step_ms / 1000
        began_s, cpu_began_s = perf_counter(), thread_time()
        while (cpu_s := thread_time() - cpu_began_s) < self.busy * length_s:  # work and rest alternate in 2 ms slices
            slice_end_s = cpu_began_s + min(cpu_s + 0.002, self.busy * length_s)
            while thread_time() < slice_end_s:
                zlib.crc32(_BLOCK)
            rest_s = min((thread_time() - cpu_began_s) / self.busy, length_s) - (perf_counter() - began_s)
            sleep(max(0.0, rest_s))

    def __str__(self) -> str:
        return f"emulated {self.step_ms:g} ms"
