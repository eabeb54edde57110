"""The clock of a loop: waits, steps and what lies between them, by the wall clock and by a GPU's
events.
"""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch

from colab_utils.loading.clock import LoopClock


@pytest.fixture
def time_goes(monkeypatch):
    """The moments that the clock is given, one after the other; a GPU gives none."""
    monkeypatch.setattr("torch.cuda.is_initialized", lambda: False)

    def go(*moments):
        left = iter(moments)
        monkeypatch.setattr("colab_utils.loading.clock.perf_counter", lambda: next(left))

    return go


def run_steps(clock, steps, images=1):
    for _ in range(steps):
        clock.ask()
        clock.receive(images=images)
        clock.end_step()


def test_waits_steps_and_what_lies_between_add_up_to_the_loop(time_goes):
    # The clock is made. Twice a batch is asked for, comes, and its step ends, the second one twice;
    # a third is asked for, there is none, and the clock stops.
    time_goes(10.0, 10.0, 13.0, 14.0, 14.5, 15.0, 16.0, 17.0, 17.25, 17.5)
    clock = LoopClock()
    # A step of no batch is ignored.
    clock.end_step()
    run_steps(clock, 2, images=3)
    # The last of several steps counts.
    clock.end_step()
    clock.ask()
    clock.stop()
    assert clock.parts_s.tolist() == [[3.0, 1.0, 0.5], [0.5, 2.0, 0.25]]
    assert (clock.images, clock.firsts, clock.ends_s) == (6, [0], 0.0)


def test_the_time_between_two_passes_is_kept_apart(time_goes):
    # The clock is made; a batch is asked for, comes, and the pass is left. The next is asked for
    # two seconds later, and comes.
    time_goes(0.0, 1.0, 2.0, 5.0, 7.0, 8.0, 9.0)
    clock = LoopClock()
    clock.ask()
    clock.receive()
    clock.stop()
    # A second stop adds nothing.
    clock.stop()
    clock.ask()
    clock.receive()
    # The wait for the batch at work counts, too.
    assert clock.read() == 2.0
    assert clock.parts_s.tolist() == [[1.0, 3.0, 0.0]]
    assert (clock.firsts, clock.ends_s) == ([0, 1], 2.0)


def test_after_the_last_batch_all_that_the_gpu_still_does_is_waited_for(monkeypatch):
    class FakeEvent:
        # The GPU works through its events in order.
        made: ClassVar[list] = []
        done = -1

        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.place = len(self.made)
            self.made.append(self)

        def query(self):
            return self.place <= self.done

        def elapsed_time(self, end):
            assert self.query()
            assert end.query()
            return 1000.0 * (end.place - self.place)

    for name, value in {
        "Event": FakeEvent,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "synchronize": lambda: setattr(FakeEvent, "done", len(FakeEvent.made) - 1),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    clock = LoopClock()
    run_steps(clock, 3)
    # Until then, nobody has waited for the GPU.
    assert FakeEvent.done == -1
    # The wait of the batch at work counts, too.
    assert clock.read() == 3.0
    clock.stop()
    assert clock.read() == 3.0
    assert clock.parts_s[:, 1].tolist() == [1.0, 1.0, 1.0]
