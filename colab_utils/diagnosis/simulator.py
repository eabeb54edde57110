"""How a DataLoader with workers behaves in time: an exact simulation that needs no data and no GPU."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple

import numpy as np

from colab_utils.errors import ColabUtilsError

_ROUNDING_S = 1e-9
_MAX_BATCHES = 1_000_000  # more would keep you waiting for minutes and tell nothing new


class Trace(NamedTuple):
    """What one worker, or the step, did: span ``k`` handled ``batch[k]`` (int64 [K], from 0) from ``start_s[k]`` to
    ``end_s[k]`` (float64 [K], seconds; cut at the end of the simulation).
    """

    batch: np.ndarray
    start_s: np.ndarray
    end_s: np.ndarray


@dataclass(frozen=True, eq=False)
class Simulation:
    """What `simulate` found: ``batches`` whose step ended within ``seconds``, and when everything happened.

    ``utilisation`` is the share of the time in which the step ran (0 to 1); ``loads`` has one `Trace` for each worker
    (one, the training process itself, without workers); ``steps`` is the step's own. At most ``workers * prefetch``
    batches are on their way at a time.
    """

    workers: int
    seconds: float
    batches: int
    utilisation: float
    loads: tuple[Trace, ...]
    steps: Trace
    prefetch: int = 2

    @property
    def stall_share(self) -> float:
        """Share of the time in which the step waited for its batch, 0 to 1."""
        return 1.0 - self.utilisation

    def __str__(self) -> str:
        done = f"{self.batches} batches in {self.seconds:g} s with {self.workers} workers"
        return f"{done}: the step worked {self.utilisation:.0%} of the time and waited {self.stall_share:.0%}"


def simulate(
    *, workers: int, load_s: float, step_s: float, load_cv: float = 0.0, step_cv: float = 0.0, prefetch: int = 2,
    seconds: float = 30, seed: int = 0,
) -> Simulation:  # fmt: skip
    """Simulate a PyTorch DataLoader that feeds a training step, second by second.

    It follows the rule of ``torch.utils.data.DataLoader``: each worker loads its batches one after the other, the
    loader asks for one more whenever the step takes one. With W workers and P = ``prefetch``, batch i is loaded, taken
    and trained on by ``start_i = max(done_(i-W), taken_(i-WP))``, ``done_i = start_i + load_i`` and
    ``taken_i = max(done_i, taken_(i-1) + step_(i-1))``.

    Args:
        workers: worker processes; 0 loads in the training process, so loading and training alternate.
        load_s: mean seconds in which one worker loads one batch.
        step_s: mean seconds of one training step.
        load_cv: spread of the loading times, standard deviation / mean of a lognormal; 0 means all equal.
        step_cv: the same for the step.
        prefetch: batches asked for ahead of time for each worker (the DataLoader's ``prefetch_factor``).
        seconds: how much time to simulate.
        seed: of the random times: the same seed draws the same times for every number of workers.

    Raises:
        ColabUtilsError: an argument that no loader could have.

    Patrick Park's setting (jpatrickpark.com/post/loader_sim, seven loaders, a step of 100 ms, 30 s) reports 98, 295
    and 275 batches for loads of 2 s, 350 ms and 700 ms; equal times give 98, 296 and 293 here, ``load_cv=0.22`` 275.

    Example:
        >>> print(simulate(workers=0, load_s=0.3, step_s=0.1, seconds=10))
        25 batches in 10 s with 0 workers: the step worked 25% of the time and waited 75%
    """
    _check(**locals())
    lanes, ahead = max(1, workers), max(1, workers * prefetch)  # without workers the training process itself loads
    loading = _draw_times(load_s, load_cv, seed, stream=0)
    training = _draw_times(step_s, step_cv, seed, stream=1)
    loads, steps = list[tuple[int, float, float]](), list[tuple[int, float, float]]()
    for batch in count():
        asked_s = steps[batch - ahead][1 if workers else 2] if batch >= ahead else 0.0
        if asked_s > seconds - _ROUNDING_S:
            break
        start_s = max(loads[batch - lanes][2] if batch >= lanes else 0.0, asked_s)
        loads.append((batch, start_s, start_s + next(loading)))
        taken_s = max(loads[-1][2], steps[-1][2] if steps else 0.0)
        steps.append((batch, taken_s, taken_s + next(training)))
    trace = _make_trace(steps, seconds)
    batches = sum(end_s <= seconds + _ROUNDING_S for _, _, end_s in steps)
    utilisation = float((trace.end_s - trace.start_s).sum() / seconds)
    traces = tuple(_make_trace(loads[lane::lanes], seconds) for lane in range(lanes))
    return Simulation(workers, float(seconds), batches, utilisation, traces, trace, prefetch)


def _draw_times(mean_s: float, cv: float, seed: int, *, stream: int) -> Iterator[float]:
    """Endless lognormal times with this mean and coefficient of variation."""
    variance = math.log1p(cv * cv)  # of the logarithm
    generator = np.random.default_rng([seed, stream])
    while True:
        yield from (mean_s * generator.lognormal(-variance / 2, math.sqrt(variance), 256)).tolist()


def _check(*, seconds: float, **values: float) -> None:
    for name, value in {"seconds": seconds, **values}.items():
        kind, least = "of" if name not in ("workers", "prefetch") else "as a whole number of", int(name == "prefetch")
        if not least <= value < math.inf or (kind != "of" and not isinstance(value, int | np.integer)):
            raise ColabUtilsError(f"expected {name} {kind} {least} or more, found {value!r}: choose another")
    slowest_s = max(values["load_s"] / max(1, values["workers"]), values["step_s"])
    if not 0 < seconds <= slowest_s * _MAX_BATCHES:
        found = f"found {seconds} s with one each {slowest_s} s: give load_s or step_s more than 0, or fewer seconds"
        raise ColabUtilsError(f"expected 1 to {_MAX_BATCHES:,} batches, {found}")


def _make_trace(spans: list[tuple[int, float, float]], seconds: float) -> Trace:
    """The spans that began within the simulated time, cut at its end."""
    begun = np.array([span for span in spans if span[1] < seconds - _ROUNDING_S], dtype=np.float64).reshape(-1, 3)
    return Trace(begun[:, 0].astype(np.int64), begun[:, 1], np.minimum(begun[:, 2], seconds))
