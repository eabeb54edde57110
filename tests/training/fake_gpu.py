"""A GPU's memory that a CPU can have: every tensor that is made counts, and above the limit it runs out."""

from __future__ import annotations

from benchmarks.memory import CountedMemory


class FakeGpu(CountedMemory):
    """A gauge of `colab_utils.training.memory`. ``with`` it, everything that torch makes counts."""

    def measure_limit(self) -> int:
        return self.limit

    def measure_peak(self, call) -> int:
        self.reset_peak()
        with self:
            call()
        return self.peak
