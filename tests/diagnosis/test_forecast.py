"""The forecast: bounds, shared cores, variance, and what real loaders then do."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from colab_utils.diagnosis.fixes import Costs, choose_workers, forecast_rate, measure_contention
from colab_utils.diagnosis.simulator import simulate
from colab_utils.diagnosis.timing import time_batches

pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")


def bound_rate(costs, *, workers, cores):
    """Images per second that no pipeline with these costs passes: Denning and Buzen, "The operational analysis of
    queueing network models" (1978).
    """
    load_s = costs.io_s + costs.cpu_s
    if workers == 0:
        return 1 / (load_s + costs.step_s)
    cpu_s = costs.cpu_s + costs.serial_s + costs.step_cpu_s
    return min(1 / max(costs.step_s + costs.serial_s, 1e-9), workers / load_s, cores / cpu_s)


CASES = [
    (Costs(io_s=0.060, cpu_s=0.001), 2, 2, 2 / 0.061),  # waiting for Drive: the workers are the limit
    (Costs(io_s=0.060, cpu_s=0.001), 0, 2, 1 / 0.061),  # the training process loads itself
    (Costs(io_s=0.0, cpu_s=0.001, step_s=0.1), 2, 2, 10),  # the step is the limit
    (Costs(io_s=0.0, cpu_s=0.001, step_s=0.1, serial_s=0.1), 2, 2, 5),  # the training process is
    (Costs(io_s=0.0, cpu_s=0.020, step_s=0.01, step_cpu_s=0.01), 8, 1.5, 50),  # the cores are
    (Costs(io_s=0.0, cpu_s=0.1, step_s=0.1), 0, 2, 5),  # no workers: loading and training alternate
]


@pytest.mark.parametrize(("costs", "workers", "cores", "rate"), CASES)
def test_what_runs_out_first_sets_the_rate(costs, workers, cores, rate):
    assert bound_rate(costs, workers=workers, cores=cores) == pytest.approx(rate)
    assert forecast_rate(costs, workers=workers, cores=cores) == pytest.approx(rate, rel=0.03)


@pytest.mark.parametrize("workers", [0, 1, 2, 4])
@pytest.mark.parametrize("cv", [0.0, 0.5])
def test_with_cores_for_all_it_is_the_simulator(workers, cv):
    costs = Costs(io_s=0.010, cpu_s=0.0, step_s=0.005, cv=cv)
    rates = [forecast_rate(costs, workers=workers, cores=99, seed=seed) for seed in range(8)]
    settings = {"workers": workers, "load_s": 0.040, "step_s": 0.020, "load_cv": cv, "seconds": 300}
    assert sum(rates) / 8 == pytest.approx(4 * simulate(**settings).batches_per_second, rel=0.04)


def test_variance_costs_most_in_balance():
    even, uneven = (Costs(io_s=0.02, cpu_s=0.0, step_s=0.01, cv=cv) for cv in (0.0, 0.5))
    lost = forecast_rate(uneven, workers=2, cores=2) / forecast_rate(even, workers=2, cores=2)
    assert lost == pytest.approx(0.886, abs=0.04)  # the table in test_simulator.py
    assert forecast_rate(uneven, workers=2, cores=2, prefetch=8) > forecast_rate(uneven, workers=2, cores=2)


def test_two_threads_of_one_core_are_not_two_cores():
    costs = Costs(io_s=0.0, cpu_s=0.02)
    alone, both = (forecast_rate(costs, workers=2, cores=2, crowding=crowding) for crowding in (1.0, 1.5))
    assert alone == pytest.approx(100, rel=0.02)
    assert both == pytest.approx(100 / 1.5, rel=0.02)
    assert forecast_rate(costs, workers=1, cores=2, crowding=1.5) == pytest.approx(50, rel=0.02)
    waits = Costs(io_s=0.02, cpu_s=0.0)
    assert forecast_rate(waits, workers=2, cores=2, crowding=1.5) == pytest.approx(100, rel=0.02)


def test_a_step_that_lacks_cpu_is_slowed():
    costs = Costs(io_s=0.0, cpu_s=0.05, step_s=0.02, step_cpu_s=0.018)
    assert forecast_rate(costs, workers=2, cores=2) == pytest.approx(2 / (0.05 + 0.018), rel=0.06)


def test_nothing_passes_the_bound():
    for io_ms in (0, 5, 50):
        for cpu_ms in (1, 10):
            costs = Costs(io_ms / 1000, cpu_ms / 1000, step_s=0.01, step_cpu_s=0.009, serial_s=0.001, cv=0.3)
            for workers in (0, 1, 2, 4):
                rate = forecast_rate(costs, workers=workers, cores=2, crowding=1.2)
                assert 0 < rate <= 1.05 * bound_rate(costs, workers=workers, cores=2)


def test_workers_are_chosen_for_the_limit():
    waiting = Costs(io_s=0.08, cpu_s=0.001, step_s=0.02)
    assert choose_workers(waiting, workers=1, cores=2) == 4
    busy = Costs(io_s=0.0, cpu_s=0.02, step_s=0.001)
    assert choose_workers(busy, workers=2, cores=2) == 4  # more win nothing: the next count up


def test_crowding_is_a_ratio():
    assert measure_contention(1) == 1
    assert 1 <= measure_contention(2) < 4


class Sleepy(Dataset):
    def __len__(self):
        return 400

    def __getitem__(self, index):
        time.sleep(0.02)
        return torch.zeros(3, 4, 4), index


def _time_images(step, **settings):
    return 1 / time_batches(DataLoader(Sleepy(), batch_size=4, **settings), step, batches=20).images_per_second


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_real_loader_that_waits(workers):
    ratios = []
    for _ in range(4):  # on a busy machine one quiet run of four is enough
        # what loading and a step really take here: a machine wakes up late, and gets going late
        load_s = _time_images(lambda *batch: None)
        step_s = _time_images(lambda *batch: time.sleep(0.02)) - load_s
        forecast = forecast_rate(Costs(io_s=load_s, cpu_s=0.0, step_s=step_s), workers=workers, cores=2)
        ratios.append(forecast * _time_images(lambda *batch: time.sleep(0.02), num_workers=workers))
        if abs(ratios[-1] - 1) < 0.1:
            break
    assert ratios[-1] == pytest.approx(1, abs=0.1), ratios
