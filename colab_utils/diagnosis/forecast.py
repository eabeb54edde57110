"""What a change would bring: the resource that runs out first sets the images per second."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Costs", "choose_workers", "forecast_rate"]


@dataclass(frozen=True)
class Costs:
    """What one image costs, seconds: one worker's time, and the CPU time of loading over all processes; the step's wall
    and CPU time, and what the training process spends itself on fetching (``serial_s``, 0 without workers).
    """

    load_s: float
    cpu_s: float
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    serial_s: float = 0.0


def forecast_rate(costs: Costs, *, workers: int, cores: float) -> float:
    """Images per second that no pipeline with these costs passes: the operational (asymptotic) bound.

    It is ``min(1 / step, workers / load, cores / CPU)``, and ``1 / (load + step)`` without workers; variance and
    start-up take something off. Source: Denning and Buzen, "The operational analysis of queueing network models"
    (1978).

    Example:
        >>> costs = Costs(load_s=0.060, cpu_s=0.010, step_s=0.025, step_cpu_s=0.020)
        >>> [round(forecast_rate(costs, workers=w, cores=2)) for w in (0, 1, 2, 4)]
        [12, 17, 33, 40]
    """
    train_s = max(costs.step_s + costs.serial_s, 1e-9)
    if workers == 0:
        return 1 / (costs.load_s + train_s)
    return min(1 / train_s, workers / max(costs.load_s, 1e-9), cores / max(costs.cpu_s + costs.step_cpu_s, 1e-9))


def choose_workers(costs: Costs, *, workers: int, cores: float) -> int:
    """The fewest workers, more than now, that come within 5 % of the best forecast."""
    more = [count for count in (1, 2, 4, 8) if count > workers] or [workers * 2]
    rates = {count: forecast_rate(costs, workers=count, cores=cores) for count in more}
    return min(count for count, rate in rates.items() if rate >= 0.95 * max(rates.values()))
