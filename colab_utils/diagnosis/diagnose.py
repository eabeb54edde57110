"""What training waits for: headspace first, then each stage of loading alone, then what would cure
it.
"""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from math import inf
from time import perf_counter
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from colab_utils.diagnosis.causes import refine_causes
from colab_utils.diagnosis.changes import Change
from colab_utils.diagnosis.cures import Cause
from colab_utils.diagnosis.fixes import TIMEOUT_S, Fix, Situation, find_fixes, time_loop
from colab_utils.diagnosis.memory_growth import MemoryLog
from colab_utils.diagnosis.stages import Stage, find_tensors, time_stages
from colab_utils.diagnosis.timing import BatchTimes, time_batches
from colab_utils.diagnosis.watch import WatchedLoader, take_watched
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.loader import Loader
from colab_utils.machine import find_free_memory
from colab_utils.require import require_number

_CACHED_BATCHES = 4
# Copies of batches may take this share of the free memory.
_CACHED_SHARE = 0.1
# Images that the fixes for the data are forecast on, and measured on.
_SAMPLED = 16
_VERIFIED = 64
# Under this headspace, nothing that speeds up loading can win 10 %.
_FINE_HEADSPACE = 1.1

# Of a step's time, without a core. More could not be told from all of it.
_MOST_LOST = 0.9


@dataclass(frozen=True)
class Diagnosis:
    """What `diagnose` found; its fields are the keys of the command's JSON, where ``stages`` is
    called ``layers``.
    """

    verdict: str
    """A few sentences with their numbers."""
    headspace: float
    """Images per second on cached batches divided by those now."""
    images_per_second: float
    """Now."""
    stall_share: float
    """Wait / (wait + step), 0 to 1."""
    stages: tuple[Stage, ...]
    """Of loading an image, then *wait* (its CPU time is that of all loading) and *step*."""
    fixes: tuple[Fix, ...]
    """What would help, forecast by trials: the best first, and of equally good ones that which
    costs you least; empty where the loader is fine."""
    confidence: str
    """It begins with high, medium or low."""
    batches: int
    """How many were timed."""
    step: str
    """real, none, or emulated ..."""
    error: float = 0.0
    """Standard error of the mean time of a batch, as a share of it."""
    change: Change | None = None
    """Beside an earlier one."""
    causes: tuple[Cause, ...] = ()
    """Why training waits, the largest share first; empty where the loader is fine."""

    def __str__(self) -> str:
        parts: list[Any] = [*self.stages, *self.fixes]
        if self.change is not None:
            parts.append(self.change)
        lines = [self.verdict, *map(str, self.causes)]
        lines += [f"  {part}" for part in parts]
        return "\n".join(lines)


def diagnose(
    loader: Iterable[Any],
    step: Callable[..., Any] | None = None,
    *,
    seconds: float = 20,
    verify: bool = False,
    restore: Sequence[Any] = (),
) -> Diagnosis:
    """Find what training waits for, how much could be won at most, and what would win it.

    It times your loader with your step, then the step on copies of a few batches in memory: less
    than 1.1 times as fast, and your loader is fine. It times each stage alone, in a worker process
    of its own: *read*, *decode* and *masks* of a `CocoFolder` or a `ShardDataset`, *sample* and
    *transform* of any other map-style dataset, *collate*; and how batches are handed over. Where
    there is something to win, it tries each fix for a few seconds, on a sample of the images where
    the fix changes these, beside an emulated step that takes as long and as much of a core as
    yours. Method: headspace analysis (facebookresearch/spdl, optimization guide).

    **Your step really trains.** It runs on the loader's batches, then many times on the few copies.
    Pass ``restore=(model, optimizer)``, and both are put back to where they stood. The states of
    all random generators (Python, numpy, torch, CUDA) and the order of a `Loader` are put back in
    any case.

    Args:
        loader: a ``DataLoader``, a `Loader`, or anything iterable again and again over batches.
        step: your training step, called as ``step(images, targets)``, or an `EmulatedStep`; None
            times the loader alone: then ``headspace`` is 1 and says nothing.
        seconds: about how long to measure. Each fix, where there is something to win, takes 0.3 of
            it, half of that untimed, until the memory of each process has grown (up to three times
            0.3 with a slow loader); and ``verify`` 0.5 of it more. Without ``verify``, no fix is
            tried any more after twelve times these seconds.
        verify: also measure the fixes for longer with your own step, those for the data on a sample
            of the images.
        restore: what your step changes: a model, its optimizer, a scheduler; anything with
            ``state_dict`` and ``load_state_dict``.

    Raises:
        ColabUtilsError: the loader yields nothing, raises, gives no batch for a minute (the message
            says which worker waits where), or is an iterator; or the step fails.

    Example:
        >>> from colab_utils.loading.emulated_step import EmulatedStep
        >>> batches = [(["first image"], [{}]), (["second image"], [{}])]
        >>> found = diagnose(batches, EmulatedStep(5), seconds=0.5)
        >>> found.step, [stage.name for stage in found.stages]
        ('emulated 5 ms', ['wait', 'step'])
    """
    if isinstance(loader, Iterator | str) or not hasattr(loader, "__iter__"):
        kind = "An iterator" if isinstance(loader, Iterator) else repr(loader)
        raise ColabUtilsError(f"{kind} cannot start again. Pass the DataLoader itself.")
    require_number("seconds", seconds, above=0)
    loader = take_watched(loader)
    with put_back(loader, restore):
        return _diagnose(loader, step, seconds, verify)


@contextmanager
def put_back(loader: Any, restore: Sequence[Any]) -> Iterator[None]:
    """Put back what measured batches and steps change: all random states, the loader's order, and
    these parts.

    Raises:
        ColabUtilsError: a part has no ``state_dict`` and ``load_state_dict``.

    Example:
        >>> before = random.getstate()
        >>> with put_back(None, restore=()):
        ...     _ = random.random()
        >>> random.getstate() == before
        True
    """
    for part in restore:
        if not (hasattr(part, "state_dict") and hasattr(part, "load_state_dict")):
            raise ColabUtilsError(
                f"restore takes a model and an optimizer, and not a {type(part).__name__}. Leave "
                "it out."
            )
    generators: list[Any] = [torch.default_generator, *torch.cuda.default_generators]
    for owner in (getattr(loader, "sampler", None), loader):
        generators.append(getattr(owner, "generator", None))
    states: list[tuple[Callable[[Any], Any], Any]] = [
        (random.setstate, random.getstate()),
        (np.random.set_state, np.random.get_state()),
    ]
    for generator in generators:
        if isinstance(generator, torch.Generator):
            states.append((generator.set_state, generator.get_state()))
    parts = list(restore)
    if isinstance(loader, Loader):
        parts.append(loader)
    for part in parts:
        states.append((part.load_state_dict, copy.deepcopy(part.state_dict())))
    try:
        yield
    finally:
        for put, state in states:
            put(state)


def _keep_batch(kept: dict[int, Any], memory: MemoryLog, number: int, batch: Any) -> None:
    """Copy batches 1, 2, 4, 8, ... and keep the last four, or fewer where memory is short: early
    ones come while the step still warms up.
    """
    if (number + 1) & number:
        return
    tensors = find_tensors(batch)
    room = _CACHED_SHARE * find_free_memory()
    if tensors and tensors[0].is_cuda:
        room = _CACHED_SHARE * torch.cuda.mem_get_info(tensors[0].device)[0]
    limit = min(_CACHED_BATCHES, int(room / max(1, sum(tensor.nbytes for tensor in tensors))))
    while kept and len(kept) >= limit:
        del kept[min(kept)]
    # A loader may use the memory of its batch again.
    kept[number] = copy.deepcopy(batch)
    kept_bytes = sum(tensor.nbytes for tensor in find_tensors([*kept.values()]) if tensor.is_cpu)
    memory.known_bytes = max(memory.known_bytes, kept_bytes)


def _diagnose(loader: Any, step: Any, seconds: float, verify: bool) -> Diagnosis:
    began_s = perf_counter()
    kept: dict[int, Any] = {}
    watched = WatchedLoader(loader, TIMEOUT_S, "raise")
    now = time_loop(
        watched,
        step,
        seconds,
        0.5,
        on_batch=partial(_keep_batch, kept, watched._record.memory),
    )
    summary = watched.summary()
    cached = now
    slower = 1.0
    ceiling = now.images_per_second
    if step is not None:
        cached = time_batches(
            [*kept.values()], step, batches=len(now.wait_s), warmup=1, max_s=0.15 * seconds
        )
        slower = _find_slowdown(now, summary.lost_share)
        ceiling = slower * now.images / sum(now.step_s)
    loading_stages = time_stages(
        loader, kept[max(kept)], images=now.batch_size, seconds=0.25 * seconds
    )
    kept.clear()

    loading = [*loading_stages.stages.values()]
    waits = step is None or ceiling >= _FINE_HEADSPACE * now.images_per_second
    fixes = []
    if waits and isinstance(loader, Loader | DataLoader):
        indices = loading_stages.indices[: _VERIFIED if verify else _SAMPLED]
        fixes = find_fixes(
            Situation(
                loader,
                step,
                now,
                cached,
                indices,
                seconds,
                verify,
                began_s,
                ceiling if step is not None else inf,
            )
        )
    causes = refine_causes(
        summary.causes,
        [] if loading_stages.unseen else loading,
        waits=waits,
    )
    verdict = [describe_verdict(now, ceiling, slower, loading, fixes, _name_step(step))]
    for cause in causes:
        if cause.id in ("memory", "other_programs"):
            verdict.append(f"{cause.why} {cause.next}")
    if loading_stages.unseen:
        verdict.append(f"The stages of a sample could not be timed: {loading_stages.unseen}")
    return Diagnosis(
        " ".join(verdict),
        ceiling / now.images_per_second,
        now.images_per_second,
        now.wait_share,
        (*loading, *_list_loop_stages(now, step)),
        tuple(fixes),
        _describe_confidence(now),
        len(now.wait_s),
        _name_step(step),
        now.error,
        causes=tuple(causes),
    )


def _find_slowdown(now: BatchTimes, lost_share: float) -> float:
    """Return how many times as long the steps take beside the loader, for want of a core.

    A step is slower beside its loader for other reasons, too: a GPU prepares itself for each new
    size of image, so that the first batches of a run take twice as long. No loader cures that.

    Args:
        now: Of the loop.
        lost_share: Of its time, in which it could have run, and loading had the cores.
    """
    step_s = sum(now.step_s)
    lost_s = min(lost_share * float(now.batch_s.sum()), _MOST_LOST * step_s)
    return step_s / (step_s - lost_s)


def _name_step(step: Any) -> str:
    """Return what a diagnosis calls its step."""
    if step is None:
        return "none"
    return str(step) if getattr(step, "emulated", False) else "real"


def _list_loop_stages(now: BatchTimes, step: Any) -> list[Stage]:
    """Return what an image waits, with the CPU time of all loading, and what its step takes."""
    image_ms = 1000 / now.batch_size
    stages = [Stage.from_calls("wait", np.multiply(now.wait_s, image_ms), now.cpu_ms_per_image)]
    if step is not None:
        cpu_ms = now.step_cpu_s / now.images * 1000
        stages.append(Stage.from_calls("step", np.multiply(now.step_s, image_ms), cpu_ms))
    return stages


def describe_verdict(
    now: BatchTimes,
    ceiling: float,
    slower: float,
    stages: Sequence[Stage],
    fixes: Sequence[Fix],
    step: str,
) -> str:
    """Return the verdict: a few short sentences with their numbers, and how sure it is.

    ``ceiling`` is the rate on cached batches, images per second; beside the loader the same step
    takes ``slower`` times as long. ``stages`` are those of loading.
    """
    rate = now.images_per_second
    headspace = ceiling / rate
    sure = f"(confidence {_describe_confidence(now)})"
    part = ""
    if stages:
        largest = max(stages, key=lambda stage: stage.mean_ms)
        part = (
            f" In loading, the largest stage is {largest.name}: {largest.mean_ms:.1f} ms an image."
        )
    if step == "none":
        return (
            f"The loader alone gives {rate:.1f} images/s {sure}.{part} Without a step nothing says "
            "whether training waits for it: pass your step, or an EmulatedStep."
        )
    rates = (
        f"{rate:.1f} images/s now, {ceiling:.1f} with cached batches, headspace {headspace:.2f}, "
        f"{step} step {sure}"
    )
    if headspace < _FINE_HEADSPACE:
        return f"Your loader is fine, stop here: {rates}."
    verdict = f"Training waits {now.wait_share:.0%} of its time: {rates}."
    # Loading that takes the cores which the step itself needs is no waiting, and costs the same.
    if slower > 1.2:
        verdict += (
            f" It lacks CPU: beside the loader the step itself takes {slower:.1f} times as long."
        )
    verdict += part
    if fixes and fixes[0].images_per_second > 1.05 * rate:
        best = fixes[0]
        basis = "measured" if best.measured_images_per_second else "forecast"
        verdict += f" Best fix: {best.name}, {best.images_per_second:.1f} images/s ({basis})."
    return verdict


def _describe_confidence(now: BatchTimes) -> str:
    count = len(now.batch_s)
    error = now.error
    level = "low"
    if count >= 20 and error < 0.05:
        level = "high"
    elif count >= 8 and error < 0.15:
        level = "medium"
    return f"{level}: {count} batches, the mean batch time is sure to {error:.0%}"
