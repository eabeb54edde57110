"""What training waits for: measure the headspace, time each stage, and forecast each fix."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves
from torch.utils.data import DataLoader

from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.diagnosis.cures import Cause, make_cause
from colab_utils.diagnosis.fixes import TIMEOUT_S, Fix, Situation, find_fixes
from colab_utils.diagnosis.stages import Stage, time_stages
from colab_utils.diagnosis.timing import BatchTimes, count_warmup, count_workers, time_batches
from colab_utils.diagnosis.watch import WatchedLoader, take_watched
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.loader import Loader
from colab_utils.loading.samples import CocoSamples
from colab_utils.machine import find_free_memory
from colab_utils.progress import show_progress
from colab_utils.require import require_number

_CACHED_BATCHES = 4
# Copies of batches may take this share of the free memory.
_CACHED_SHARE = 0.1
# The loop as it is, the step alone and the stages of loading are timed for these shares of the
# ``seconds`` of a diagnosis.
_LOOP_SHARE = 0.25
_STEP_SHARE = 0.06
_STAGES_SHARE = 0.25
# Below this headspace, faster loading can win less than 10 %.
_FINE_HEADSPACE = 1.1
# Ids of the causes that are no matter of the loader's speed.
_OUTSIDE = {"hang", "memory", "other_programs", "other_loader"}


@dataclass(frozen=True)
class Diagnosis:
    """Result of `diagnose`. Its fields are the keys of the command's JSON, except that ``stages``
    is called ``layers`` there.
    """

    verdict: str
    """A few sentences with their numbers."""
    headspace: float
    """Images per second if loading took no time, divided by those now."""
    images_per_second: float
    """Rate of your loop as it is now."""
    stall_share: float
    """Wait / (wait + step), 0 to 1."""
    stages: tuple[Stage, ...]
    """Stages of loading an image, then *wait* and *step*. The CPU time of *wait* is that of all
    loading.
    """
    fixes: tuple[Fix, ...]
    """What would help, forecast by a model, the best first. Fixes that are equally good are sorted
    by what they cost you. Empty if the loader is fine.
    """
    confidence: str
    """How sure the rate is: a text that begins with "high", "medium" or "low"."""
    step: str
    """Kind of the step: "real", "none", or "emulated ..."."""
    causes: tuple[Cause, ...] = ()
    """Why training waits, the largest share first. If the loader is fine, only what is no matter of
    its speed.
    """

    def __str__(self) -> str:
        parts = [f"  {part}" for part in (*self.stages, *self.fixes)]
        return "\n".join([self.verdict, *map(str, self.causes), *parts])


def diagnose(
    loader: Iterable[Any],
    step: Callable[..., Any] | None = None,
    *,
    seconds: float = 10,
    verify: bool = False,
    restore: Sequence[Any] = (),
) -> Diagnosis:
    """Find what training waits for, how much could be won at most, and what would win it.

    First, it times your loader with your step. If your loop would be less than 1.1 times as fast
    without any wait, your loader is fine. Next, it times your step on copies of a few batches in
    memory. It also times each stage of loading alone, in a worker process. The stages are *read*,
    *decode* and *masks* for a `CocoFolder` or a `ShardDataset`, or *sample* for any other map-style
    dataset, then *collate*. Files are read eight at once, then 64. If faster loading can win
    something, the model of `simulate` forecasts every fix from these times, and says what each
    forecast may be off by. The best fix is tried for 20 batches, with an emulated step that is as
    long as your step on the copies, and keeps a core as busy. If the trial differs from the
    forecast by more than a quarter, the confidence is lower, and the next two fixes are tried, too.
    Shards are tried with a few of the images. The method is headspace analysis
    (facebookresearch/spdl, optimization guide).

    **Your step really trains.** It runs on the loader's batches, then many times on the few copies.
    Pass ``restore=(model, optimizer)`` to put both back to their earlier state. All random
    generators (Python, numpy, torch, CUDA) and the order of a `Loader` are always put back.

    Args:
        loader: A ``DataLoader``, a `Loader`, or anything else that yields batches and can be
            iterated over again.
        step: Your training step, called as ``step(images, targets)``, or an `EmulatedStep`. With
            None, the loader is timed alone; ``headspace`` is then 1 and says nothing.
        seconds: About how long to measure, without the trial of a fix, which takes about half as
            long. If batches are slow, both may take longer.
        verify: Whether to try all fixes, with your own step.
        restore: What your step changes: a model, its optimizer, a scheduler; anything that has
            ``state_dict`` and ``load_state_dict``.

    Raises:
        ColabUtilsError: the loader is an iterator, yields nothing, fails, or gives no batch for a
            minute (the message says which worker waits where); the step fails; or a part of
            ``restore`` has no ``state_dict`` and ``load_state_dict``.

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
    """Put back, at the end of a block, what batches and steps changed: all random generators, the
    order of a `Loader`, and the parts in ``restore``.

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
    parts = list(restore)
    if isinstance(loader, Loader):
        parts.append(loader)
    with ExitStack() as states:
        states.callback(random.setstate, random.getstate())
        states.callback(np.random.set_state, np.random.get_state())
        for generator in generators:
            if isinstance(generator, torch.Generator):
                states.callback(generator.set_state, generator.get_state())
        for part in parts:
            states.callback(part.load_state_dict, copy.deepcopy(part.state_dict()))
        yield


def _keep_batch(kept: dict[int, Any], number: int, batch: Any) -> None:
    """Copy the first, second, fourth, eighth, ... batch. Keep the last four copies, or fewer if
    memory is short. These are few copies, and they come from all parts of the run.
    """
    if (number + 1) & number:
        return
    # A batch may be an object with tensors in its fields, as a packed batch is.
    values = tree_leaves((batch, getattr(batch, "__dict__", None)))
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    room = _CACHED_SHARE * find_free_memory()
    if tensors and tensors[0].is_cuda:
        room = _CACHED_SHARE * torch.cuda.mem_get_info(tensors[0].device)[0]
    limit = min(_CACHED_BATCHES, int(room / max(1, sum(tensor.nbytes for tensor in tensors))))
    while kept and len(kept) >= limit:
        del kept[min(kept)]
    # A loader may reuse the memory of its batch.
    kept[number] = copy.deepcopy(batch)


def _diagnose(loader: Any, step: Any, seconds: float, verify: bool) -> Diagnosis:
    if isinstance(getattr(loader, "dataset", None), CocoSamples):
        # Workers that start later share this import, as they do where a model was built before.
        # Without it, each of them would import torchvision for itself, which takes a second.
        load_jpeg_decoder()
    kept: dict[int, Any] = {}
    watched = WatchedLoader(loader, TIMEOUT_S, "raise")

    def on_batch(number: int, batch: Any) -> None:
        bar.update()
        _keep_batch(kept, number, batch)

    with show_progress("diagnose: your loop", unit="batch") as bar:
        loop = time_batches(
            watched,
            step,
            batches=500,
            warmup=count_warmup(loader),
            max_s=_LOOP_SHARE * seconds,
            # Workers that wait for files deliver in rounds, and a single round says little.
            least=2 * max(1, count_workers(loader)),
            on_batch=on_batch,
        )
    summary = watched.summary()
    cached = loop
    slower = 1.0
    ceiling = inf
    if step is not None:
        cached = time_batches(
            [*kept.values()], step, batches=100, warmup=1, max_s=_STEP_SHARE * seconds
        )
        slower = _find_slowdown(loop, cached, summary.lost_share)
        ceiling = slower * loop.images / sum(loop.step_s)
    kept.clear()
    now = Situation(
        loader=loader,
        step=step,
        loop=loop,
        cached=cached,
        timed=time_stages(loader, images=loop.batch_size, seconds=_STAGES_SHARE * seconds),
        seconds=seconds,
        verify=verify,
        ceiling=ceiling,
        slower=slower,
        restart_s=_find_restart(watched._record),
    )
    loading = [*now.timed.stages.values()]
    headspace = ceiling / loop.images_per_second
    waits = headspace >= _FINE_HEADSPACE
    fixes = find_fixes(now) if waits and isinstance(loader, Loader | DataLoader) else []
    causes = refine_causes(summary.causes, loading, waits=waits)
    verdict = [describe_verdict(now, fixes)]
    for cause in causes:
        if cause.id in ("memory", "other_programs"):
            verdict.append(f"{cause.why} {cause.next}")
    if now.timed.unseen:
        verdict.append(f"The stages of a sample could not be timed: {now.timed.unseen}")
    return Diagnosis(
        verdict=" ".join(verdict),
        headspace=1.0 if step is None else headspace,
        images_per_second=loop.images_per_second,
        stall_share=loop.wait_share,
        stages=(*loading, *_list_loop_stages(loop, step)),
        fixes=tuple(fixes),
        confidence=_describe_confidence(loop, fixes),
        step=_name_step(step),
        causes=tuple(causes),
    )


def refine_causes(causes: Sequence[Cause], stages: Sequence[Stage], *, waits: bool) -> list[Cause]:
    """Keep the causes that count, and replace the cause "work" by the stage of one of our datasets
    with the most CPU time.

    Args:
        causes: Causes that `find_causes` returned.
        stages: Stages of loading, timed alone.
        waits: Whether faster loading can win something. If not, only stalls, growing memory,
            other programs and other loaders are kept.
    """
    kept = []
    for cause in causes:
        # A diagnosis itself copies batches after steps, so what follows a step is no cause.
        if cause.id not in _OUTSIDE and (not waits or cause.id in ("between", "periodic")):
            continue
        largest = max(stages, key=lambda stage: stage.cpu_ms, default=None)
        # The stage "sample" is the whole loading, so its name would say less than the cause does.
        if cause.id == "work" and largest and largest.name != "sample":
            part = f"{largest.name} takes {largest.cpu_ms:.3g} ms of CPU time an image."
            cause = make_cause(largest.name, cause.share, f"{cause.why} {part}")
        kept.append(cause)
    return kept


def _find_slowdown(now: BatchTimes, cached: BatchTimes, lost_share: float) -> float:
    """Return the factor by which steps take longer because loading keeps the cores busy.

    Steps beside a loader are slower for other reasons, too: a GPU prepares itself for each new
    image size, so the first batches of a run take twice as long. No fix of a loader changes that.

    Args:
        now: Times of the loop.
        cached: Times of the step on copies of batches in memory, without a loader.
        lost_share: Share of its time in which the loop had no core, because loading had all cores.
            Some of this time may lie in waits. So the steps are taken to lose at most the
            difference between their time beside the loader and their time without a loader.
    """
    step_s = sum(now.step_s)
    alone_s = np.mean(cached.step_s) * len(now.step_s)
    lost_s = min(lost_share * now.batch_s.sum(), max(0.0, step_s - alone_s))
    return float(step_s / (step_s - lost_s))


def _find_restart(record: Any) -> float:
    """Return the mean wait for the first batch of a pass, if each pass starts workers again; else
    0. The first pass does not count.
    """
    waits_s = record.clock.parts_s[record.clock.firsts[1:], 0]
    return float(waits_s.mean()) if record.restarts and len(waits_s) else 0.0


def _name_step(step: Any) -> str:
    """Return the name of a step in a diagnosis."""
    if step is None:
        return "none"
    return str(step) if getattr(step, "emulated", False) else "real"


def _list_loop_stages(loop: BatchTimes, step: Any) -> list[Stage]:
    """Return *wait* and *step* as stages. The CPU time of *wait* is that of all loading."""
    parts = {"wait": (loop.wait_s, max(0.0, loop.cpu_s - loop.step_cpu_s))}
    if step is not None:
        parts["step"] = (loop.step_s, loop.step_cpu_s)
    count = len(loop.wait_s)
    return [
        Stage.from_calls(name, [(s, cpu_s / count) for s in wall_s], loop.images / count)
        for name, (wall_s, cpu_s) in parts.items()
    ]


def describe_verdict(now: Situation, fixes: Sequence[Fix]) -> str:
    """Return the verdict: a few short sentences with numbers, and how sure these are. The fixes are
    sorted, the best first.
    """
    rate = now.loop.images_per_second
    headspace = now.ceiling / rate
    sure = f"(confidence {_describe_confidence(now.loop, fixes)})"
    part = ""
    if now.timed.stages:
        largest = max(now.timed.stages.values(), key=lambda stage: stage.mean_ms)
        part = (
            f" In loading, the largest stage is {largest.name}: {largest.mean_ms:.1f} ms an image."
        )
    if now.step is None:
        return (
            f"The loader alone gives {rate:.1f} images/s {sure}.{part} Without a step, it is "
            "not known whether training waits for the loader: pass your step, or an EmulatedStep."
        )
    rates = (
        f"{rate:.1f} images/s now, {now.ceiling:.1f} if loading took no time, headspace "
        f"{headspace:.2f}, {_name_step(now.step)} step {sure}"
    )
    if headspace < _FINE_HEADSPACE:
        return f"Your loader is fine, stop here: {rates}."
    verdict = f"Training waits {now.loop.wait_share:.0%} of its time: {rates}."
    # A step that lacks cores does not wait for a batch, but it costs time all the same.
    if now.slower > 1.2:
        verdict += (
            f" It lacks CPU: beside the loader, the step takes {now.slower:.1f} times as long as "
            "alone."
        )
    verdict += part
    if fixes and fixes[0].is_gain:
        best = fixes[0]
        basis = f"forecast, give or take {best.error:.0%}"
        if best.measured_images_per_second is not None:
            basis = f"measured; the forecast was {best.forecast_images_per_second:.1f}"
        verdict += f" Best fix: {best.name}, {best.images_per_second:.1f} images/s ({basis})."
    return verdict


def _describe_confidence(now: BatchTimes, fixes: Sequence[Fix]) -> str:
    """Say how sure the rate is. A trial that does not confirm its forecast lowers it."""
    count = len(now.batch_s)
    error = now.error
    level = 1
    # So many batches, and an error of so much, are one level more.
    for batches, share in ((8, 0.15), (20, 0.05)):
        level += count >= batches and error < share
    text = f"{count} batches, the mean batch time has an error of {error:.0%}"
    for fix in fixes:
        if fix.measured_images_per_second is not None and not fix.is_confirmed:
            level -= 1
            text += (
                f"; {fix.name}: {fix.measured_images_per_second:.1f} images/s in a trial, "
                f"{fix.forecast_images_per_second:.1f} by the model"
            )
            break
    return f"{('low', 'low', 'medium', 'high')[level]}: {text}"
