"""How a DataLoader with workers behaves in time: an exact simulation that needs no data and no GPU."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from colab_utils.errors import ColabUtilsError

if TYPE_CHECKING:
    from colab_utils.diagnosis.diagnose import Diagnosis

__all__ = ["Advice", "MeasuredTimes", "Simulation", "Trace", "find_cures", "read_times", "simulate"]

_NOT_LOADING = ("wait", "step", "pin", "transfer")  # stages that no worker spends its time on
_OF_IMAGES = ("read", "decode", "masks", "sample", "transform")  # stages timed image by image
_Z95 = 1.6449  # standard deviations from the median to the 95th percentile
_FINE = 0.05  # a step that waits less than this needs no cure
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
    _check(
        workers=workers, prefetch=prefetch, load_s=load_s, step_s=step_s, load_cv=load_cv, step_cv=step_cv,
        seconds=seconds,
    )  # fmt: skip
    lanes, ahead = max(1, workers), max(1, workers * prefetch)  # without workers the training process itself loads
    loading = _draw_times(load_s, load_cv, seed, stream=0)
    training = _draw_times(step_s, step_cv, seed, stream=1)
    loads: list[tuple[int, float, float]] = []
    steps: list[tuple[int, float, float]] = []
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


@dataclass(frozen=True, eq=False)
class Advice:
    """What `find_cures` found: the settings simulated for long, and single changes that would end the waiting."""

    simulation: Simulation
    cures: tuple[str, ...]

    def __str__(self) -> str:
        waits = f"The step waits {self.simulation.stall_share:.0%} of the time"
        if not self.cures:
            return f"{waits}: it is the limit itself, and loading faster would win next to nothing."
        first = ", ".join(self.cures[:-1])
        return f"{waits}; {first}{' or ' if first else ''}{self.cures[-1]} would end it."


def find_cures(*, max_workers: int = 8, **settings: Any) -> Advice:
    """Find what would end the step's waiting (to less than 5 %): more workers, or another single change.

    Each change is simulated, as long as it takes for neither the start nor chance to matter. Each extra worker is
    assumed to have its own core.

    Args:
        max_workers: the most workers that are tried.
        settings: those of `simulate` but ``seconds``; a prefetch of up to 8 is tried.

    Raises:
        ColabUtilsError: an argument that no loader could have.

    Example:
        >>> print(find_cures(workers=2, load_s=0.4, step_s=0.1))
        The step waits 50% of the time; 4 workers or loading a batch in 0.2 s would end it.
    """
    settings = {"prefetch": 2, **settings}
    workers, load_s, step_s = (settings[name] for name in ("workers", "load_s", "step_s"))

    def try_change(**change: Any) -> Simulation:
        tried = settings | change
        pace_s = max(tried["step_s"], tried["load_s"] / max(1, tried["workers"]))
        return simulate(**tried, seconds=max(500 * pace_s, 100 * tried["load_s"]))

    def find_least(name: str, values: range) -> int:
        return next((value for value in values if try_change(**{name: value}).stall_share < _FINE), 0)

    run, cures = try_change(), []
    if run.stall_share < _FINE:
        return Advice(run, ())
    if more := find_least("workers", range(workers + 1, max_workers + 1)):
        cures.append(f"{more} worker{'s'[: more != 1]}")
    # they load enough: only the spread makes the step wait
    if load_s < workers * step_s and (deeper := find_least("prefetch", range(settings["prefetch"] + 1, 9))):
        cures.append(f"a prefetch of {deeper}")
    fine_s, slow_s = 0.0, min(load_s, max(1, workers) * step_s)  # slower than that, no step is fed
    for _ in range(10):
        middle_s = (fine_s + slow_s) / 2
        ends_it = try_change(load_s=middle_s).stall_share < _FINE
        fine_s, slow_s = (middle_s, slow_s) if ends_it else (fine_s, middle_s)
    return Advice(run, (*cures, f"loading a batch in {fine_s:.2g} s"))


@dataclass(frozen=True)
class MeasuredTimes:
    """What `read_times` found: mean seconds of one batch, in one worker and in the step, and their spread.

    The fields are arguments of `simulate`: ``simulate(workers=2, **vars(times))``.
    """

    load_s: float
    load_cv: float
    step_s: float
    step_cv: float

    def __str__(self) -> str:
        load = f"one worker loads a batch in {self.load_s:.3g} s (spread {self.load_cv:.0%})"
        return f"{load}, the step takes {self.step_s:.3g} s (spread {self.step_cv:.0%})"


def read_times(diagnosis: Diagnosis, batch_size: int) -> MeasuredTimes:
    """The times of your own batches, as `simulate` takes them, from what `diagnose` measured.

    Means, for the mean decides how many batches get done. The spread (standard deviation / mean) is taken from median
    and 95th percentile, 1.64 standard deviations apart in a normal distribution; that of a batch is smaller than that
    of its images by the square root of their number. Layers are timed alone: workers that share cores take longer.

    Args:
        diagnosis: of a loader with a step.
        batch_size: images in a batch.

    Raises:
        ColabUtilsError: it was diagnosed without a step, or none of the stages is of loading.

    Example:
        >>> from types import SimpleNamespace as Stage
        >>> stages = [Stage(name="read", median_ms=60, mean_ms=75, p95_ms=120), Stage(name="step", median_ms=25,
        ...           mean_ms=25, p95_ms=26)]
        >>> print(read_times(Stage(stages=stages), batch_size=4))
        one worker loads a batch in 0.3 s (spread 24%), the step takes 0.1 s (spread 2%)
    """
    stages = {stage.name: stage for stage in diagnosis.stages}
    loading = [name for name in stages if name not in _NOT_LOADING]
    if "step" not in stages or not loading or batch_size < 1:
        raise ColabUtilsError(
            f"expected a batch_size of 1 or more, stages of loading and a step, found {batch_size!r} and "
            f"{', '.join(stages)}. Call diagnose(loader, step) with a DataLoader, or give simulate your own load_s."
        )
    spread_s = {name: (stage.p95_ms - stage.median_ms) / 1000 / _Z95 for name, stage in stages.items()}
    load_s = max(sum(stages[name].mean_ms for name in loading) / 1000, _ROUNDING_S)
    step_s = stages["step"].mean_ms / 1000
    load_spread_s = math.hypot(*(spread_s[name] for name in loading if name in _OF_IMAGES))
    return MeasuredTimes(
        load_s=batch_size * load_s, load_cv=load_spread_s / load_s / math.sqrt(batch_size),
        step_s=batch_size * step_s, step_cv=spread_s["step"] / max(step_s, _ROUNDING_S),
    )  # fmt: skip


def _draw_times(mean_s: float, cv: float, seed: int, *, stream: int) -> Iterator[float]:
    """Endless lognormal times with this mean and coefficient of variation."""
    variance = math.log1p(cv * cv)  # of the logarithm
    generator = np.random.default_rng([seed, stream])
    while True:
        yield from (mean_s * generator.lognormal(-variance / 2, math.sqrt(variance), 256)).tolist()


def _check(*, seconds: float, **values: float) -> None:
    for name, value in {"seconds": seconds, **values}.items():
        whole, least = name in ("workers", "prefetch"), int(name == "prefetch")
        if not least <= value < math.inf or (whole and not isinstance(value, int | np.integer)):
            raise ColabUtilsError(f"expected {name} to be a{' whole' * whole} number, {least} or more; found {value!r}")
    slowest_s = max(values["load_s"] / max(1, values["workers"]), values["step_s"])
    if not 0 < seconds <= slowest_s * _MAX_BATCHES:
        found = f"found {seconds} s with one each {slowest_s} s: give load_s or step_s more than 0, or fewer seconds"
        raise ColabUtilsError(f"expected 1 to {_MAX_BATCHES:,} batches, {found}")


def _make_trace(spans: list[tuple[int, float, float]], seconds: float) -> Trace:
    """The spans that began within the simulated time, cut at its end."""
    begun = np.array([span for span in spans if span[1] < seconds - _ROUNDING_S], dtype=np.float64).reshape(-1, 3)
    return Trace(begun[:, 0].astype(np.int64), begun[:, 1], np.minimum(begun[:, 2], seconds))
