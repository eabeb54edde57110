"""The emulated step: its time, its CPU time, and what it refuses."""

import time

import pytest
import torch

from colab_utils.loading.emulated_step import EmulatedStep


@pytest.mark.clock
def test_takes_its_time_and_its_cpu():
    step = EmulatedStep(40)
    wall = time.perf_counter()
    cpu = time.thread_time()
    step([torch.zeros(3, 4, 4)], [{}])
    wall = time.perf_counter() - wall
    cpu = time.thread_time() - cpu
    assert step.emulated
    assert step.step_ms == 40
    assert wall >= 0.0399
    assert 0.9 * 0.040 <= cpu < wall
