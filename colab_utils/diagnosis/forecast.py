"""What a change would bring: the pipeline simulated with its cores shared out, from what each part costs."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import islice
from statistics import median
from time import perf_counter

import numpy as np

__all__ = ["Costs", "choose_workers", "draw_times", "forecast_rate", "measure_crowding", "slow_down"]

_BATCHES = 240
_WARMUP = 40  # the queue fills, and the first batches come late
_ROUNDING_S = 1e-12
_CROWDED_NUMBERS = 150_000


@dataclass(frozen=True)
class Costs:
    """What one image costs, seconds: a worker's waiting (``io_s``: for Drive, for a disk) and its CPU time on a quiet
    machine; the step's wall and CPU time; what the training process spends itself on fetching (``serial_s``, 0 without
    workers). ``cv``: spread of a batch's loading time, standard deviation / mean.
    """

    io_s: float
    cpu_s: float
    step_s: float = 0.0
    step_cpu_s: float = 0.0
    serial_s: float = 0.0
    cv: float = 0.0
    batch_size: int = 4


def forecast_rate(
    costs: Costs, *, workers: int, cores: float, prefetch: int = 2, crowding: float = 1.0, seed: int = 0
) -> float:
    """Images per second of a ``DataLoader`` with these costs, by simulation.

    Batches go by the rule of ``simulate``. Beyond it, cores are shared: whoever computes gets an equal part of
    ``cores``, the step as much of it as it uses, and those who wait need none. With all cores busy, everything that
    computes takes ``crowding`` times as long (two hyper-threads share one core). Method: processor sharing, event by
    event.

    Example:
        >>> costs = Costs(io_s=0.050, cpu_s=0.010, step_s=0.025, step_cpu_s=0.020)
        >>> rates = [forecast_rate(costs, workers=w, cores=2) for w in (0, 1, 2, 4)]
        >>> [round(rate / 2) * 2 for rate in rates]
        [12, 16, 34, 40]
    """
    size, lanes, share = costs.batch_size, max(1, workers), prefetch if workers else 1
    last = _BATCHES + lanes * share  # the queue stays full to the end
    factors = list(islice(draw_times(1.0, costs.cv, seed, stream=0), last))
    busy_share = min(1.0, costs.step_cpu_s / costs.step_s) if costs.step_s else 0.0
    # what each worker still has to do, part after part; the last one is the training process
    todo: list[deque[_Part]] = [deque() for _ in range(workers + 1)]
    queues: list[deque[int]] = [deque() for _ in range(lanes)]  # batches asked of each worker, not yet begun
    begun: list[int | None] = [None] * lanes
    asked, owner, done = [0] * lanes, [0] * last, [False] * last
    sent = taken = turn = 0
    now_s = began_s = 0.0

    def load(batch: int) -> list[_Part]:
        factor = size * factors[batch]
        return [_Part("wait", costs.io_s * factor), _Part("compute", costs.cpu_s * factor)]

    while taken < _BATCHES:
        while sent < taken + lanes * share:  # round the workers, but for those that have their share
            while asked[turn] >= share:
                turn = (turn + 1) % lanes
            queues[turn].append(sent)
            owner[sent] = turn
            asked[turn] += 1
            sent, turn = sent + 1, (turn + 1) % lanes
        for lane in range(workers):
            if not todo[lane]:
                if (ended := begun[lane]) is not None:
                    done[ended] = True
                begun[lane] = queues[lane].popleft() if queues[lane] else None
                if (batch := begun[lane]) is not None:
                    todo[lane].extend(load(batch))
        if not todo[-1] and (done[taken] or not workers):
            began_s = now_s if taken == _WARMUP else began_s
            loaded = [_Part("compute", size * costs.serial_s)] if workers else load(taken)
            todo[-1].extend([*loaded, _Part("step", size * costs.step_s)])
            asked[owner[taken]] -= 1
            taken += 1
            continue
        rates = _share_cores([parts[0].kind if parts else "idle" for parts in todo], busy_share, cores, crowding)
        active = [(parts, rate) for parts, rate in zip(todo, rates, strict=True) if parts]
        passed_s = min(parts[0].left_s / rate for parts, rate in active)
        now_s += passed_s
        for parts, rate in active:
            parts[0].left_s -= passed_s * rate
            if parts[0].left_s < _ROUNDING_S:
                parts.popleft()
    return size * (_BATCHES - _WARMUP) / max(now_s - began_s, _ROUNDING_S)


def choose_workers(costs: Costs, *, workers: int, cores: float, crowding: float = 1.0) -> int:
    """The fewest workers, more than now, that come within 5 % of the best forecast."""
    more = [count for count in (1, 2, 4, 8) if count > workers] or [workers * 2]
    rates = {count: forecast_rate(costs, workers=count, cores=cores, crowding=crowding) for count in more}
    return min(count for count, rate in rates.items() if rate >= 0.95 * max(rates.values()))


def draw_times(mean_s: float, cv: float, seed: int, *, stream: int) -> Iterator[float]:
    """Endless lognormal times with this mean and coefficient of variation.

    Example:
        >>> next(draw_times(0.5, 0.0, 0, stream=0))
        0.5
    """
    variance = math.log1p(cv * cv)  # of the logarithm
    generator = np.random.default_rng([seed, stream])
    while True:
        yield from (mean_s * generator.lognormal(-variance / 2, math.sqrt(variance), 256)).tolist()


@cache
def measure_crowding(cores: int) -> float:
    """How many times as long work takes while all cores are busy as alone, 1 or more; half a second, once.

    Example:
        >>> measure_crowding(1)
        1.0
    """
    if cores < 2:
        return 1.0
    numbers = np.random.default_rng(0).integers(0, 1 << 30, _CROWDED_NUMBERS)

    def time_sort(_: int) -> float:
        began_s = perf_counter()
        np.sort(numbers, kind="stable")  # without Python's lock
        return perf_counter() - began_s

    with ThreadPoolExecutor(cores) as pool:
        ratios = []
        for _ in range(5):
            alone_s = min(time_sort(0) for _ in range(2))
            ratios.append(median(pool.map(time_sort, range(2 * cores))) / alone_s)
    return max(1.0, median(ratios))


def slow_down(busy: float, cores: float, crowding: float) -> float:
    """How many times as long work takes beside others that keep so many cores ``busy`` with it.

    Example:
        >>> slow_down(1, 2, 1.5), slow_down(2, 2, 1.5)
        (1.0, 1.5)
    """
    return 1 + (crowding - 1) * max(0.0, min(busy, cores) - 1) / (cores - 1) if cores > 1 else 1.0


@dataclass
class _Part:
    kind: str
    left_s: float


def _share_cores(kinds: list[str], busy_share: float, cores: float, crowding: float) -> list[float]:
    """How fast each of them gets on: 1 is as fast as alone."""
    computing, stepping = kinds.count("compute"), "step" in kinds and busy_share > 0
    wanted = computing + busy_share * stepping
    compute = step = 1.0
    if wanted > cores:
        fair = cores / (computing + stepping)
        if stepping and busy_share <= fair:
            compute = (cores - busy_share) / computing
        else:
            compute, step = fair, fair / busy_share if stepping else 1.0
    rates = {"compute": compute / slow_down(wanted, cores, crowding), "step": step, "wait": 1.0, "idle": 1.0}
    return [rates[kind] for kind in kinds]
