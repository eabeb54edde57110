"""How long training waits for its batches, and how many images a second it trains."""

from __future__ import annotations

from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

__all__ = ["Pace", "StepMeter"]


@dataclass(frozen=True)
class Pace:
    """Some steps: images trained, seconds waited for batches, seconds in the steps themselves."""

    images: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0

    def __add__(self, other: Pace) -> Pace:
        return Pace(self.images + other.images, self.wait_s + other.wait_s, self.step_s + other.step_s)

    @property
    def images_per_second(self) -> float:
        """Images trained in a second, waiting included; 0 before the first step."""
        return self.images / (self.wait_s + self.step_s) if self.images else 0.0

    @property
    def wait_share(self) -> float:
        """Wait / (wait + step), 0 to 1: near 0 the device is always busy."""
        return self.wait_s / (self.wait_s + self.step_s) if self.images else 0.0


class StepMeter:
    """Three marks a step: before the wait, when the batch is there, when the step is done.

    On a GPU the marks are CUDA events: the wait is the time in which the GPU had nothing to do, and nothing
    is synchronised until ``collect``.

    Example:
        >>> meter = StepMeter(torch.device("cpu"))
        >>> for _ in range(3):
        ...     meter.mark()
        >>> meter.collect(images=2).images
        2
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []  # CUDA events, or seconds

    def mark(self) -> None:
        """Note the time: on a GPU, the one at which it gets here."""
        self._marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else perf_counter())
        if self._cuda:
            self._marks[-1].record()

    def collect(self, *, images: int) -> Pace:
        """The pace of the steps since the last call, in which so many images were trained."""
        times, self._marks = self._marks, []
        if self._cuda:
            times[-1].synchronize()
            times = [times[0].elapsed_time(mark) / 1000 for mark in times]
        started, ready, done = (sum(times[k::3]) for k in range(3))
        return Pace(images, ready - started, done - ready)
