"""Where the time of a whole run went: waits, steps and what lies between, what caused the waiting, what to do next."""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np
from torch import distributed

from colab_utils.diagnosis.causes import Cause, Facts, find_causes
from colab_utils.diagnosis.resources import ResourceLog, Resources, summarise_readings
from colab_utils.diagnosis.stacks import SampleTimes
from colab_utils.diagnosis.timing import count_workers, find_error, measure_tree_cpu
from colab_utils.loading.clock import LoopClock
from colab_utils.runtime import format_seconds, is_notebook, write_file

__all__ = ["LOOKS", "LoopRecord", "Part", "SlowBatch", "Summary"]

_WORST = 10  # batches
_SHOWN_S = 10.0  # of the steps
_KEPT = 1000  # batches whose samples are kept
LOOKS = {"delay_s": 30.0, "interval_s": 1.0, "share": 0.001}  # at memory, during a whole run


@dataclass(frozen=True)
class Part:
    """One part of every batch: its wait, its step, or what follows until the next batch is asked for."""

    name: str
    share: float
    """Of the whole loop, 0 to 1."""
    median_ms: float
    p95_ms: float


@dataclass(frozen=True)
class SlowBatch:
    """One of the batches that took longest."""

    number: int
    """Counted from 0 over all passes."""
    wait_s: float
    step_s: float
    between_s: float
    """After its step."""
    samples: tuple[int, ...]
    """Indices of samples that were being loaded while it was waited for, as far as they were seen."""


@dataclass(frozen=True)
class Summary:
    """Where the time of a loop went. Times are those of the wall clock, on a GPU those of its stream."""

    verdict: str
    """One line."""
    causes: tuple[Cause, ...]
    """The largest share first; empty where the loop is fine."""
    parts: tuple[Part, ...]
    """*wait*, *step* and *between steps*; the first batch of each pass is not among the waits."""
    seconds: float
    """Of all passes and what lay between them."""
    start_s: float
    """Until the first batch of each pass came, in sum."""
    ends_s: float
    """Between two passes, in sum: evaluation, and the like."""
    batches: int
    passes: int
    images: int
    error: float
    """Standard error of the mean time of a batch, as a share of it."""
    spans_s: tuple[tuple[float, float], ...]
    """When each step of the first ten seconds began and ended, since its first batch was asked for."""
    worst: tuple[SlowBatch, ...]
    """The ten batches that took longest, the longest first."""
    worker_cpu: float
    """Cores that all workers kept busy, in the mean."""
    resources: Resources | None
    stalls: tuple[str, ...]
    unseen: tuple[str, ...]
    rank: int | None
    """Of this process, where several train together."""

    @property
    def wait_share(self) -> float:
        """Waiting of the whole loop, the first batches included, 0 to 1."""
        return self.parts[0].share + self.start_s / max(self.seconds, 1e-9)

    @property
    def images_per_second(self) -> float:
        """Over the whole loop, ends of passes left out."""
        return self.images / max(self.seconds - self.ends_s, 1e-9)

    def __str__(self) -> str:
        most = max(self.parts, key=lambda part: part.share)
        who = "" if self.rank is None else f"Rank {self.rank}: "
        lines = [f"{who}{self.verdict}", f"{'':14}{'share':>6}{'median':>10}{'p95':>10}"]
        for part in self.parts:
            arrow = "  <--" if part is most else ""
            lines.append(f"{part.name:14}{part.share:6.0%}{part.median_ms:7.1f} ms{part.p95_ms:7.1f} ms{arrow}")
        ends = f"; between passes {format_seconds(self.ends_s)}" if self.passes > 1 else ""
        lines.append(
            f"first batches {format_seconds(self.start_s)} of {format_seconds(self.seconds)}{ends}; "
            f"{self.batches:,} batches, {self.images_per_second:,.1f} images/s"
        )
        return "\n".join([*lines, *map(str, self.causes), *self.unseen])

    def save(self, path: str | Path) -> None:
        """Write all fields as JSON, with ``images_per_second`` and ``wait_share``."""
        content = asdict(self) | {"images_per_second": self.images_per_second, "wait_share": self.wait_share}
        write_file(Path(path), (json.dumps(content, indent=1) + "\n").encode())


class LoopRecord:
    """All that is noted while a watched loop runs.

    Args:
        loader: that is watched.
        looks: how often to look at memory, as `ResourceLog` takes it.
    """

    def __init__(self, loader: Any, looks: Mapping[str, float]) -> None:
        self.clock, self._loader = LoopClock(), loader
        self.resources = ResourceLog(**looks)
        self._seen: dict[int, tuple[int, ...]] = {}
        self._cpu_s = self._main_cpu_s = self._passes_s = 0.0
        self._waited_s = self._waited_cpu_s = 0.0  # of the waits whose CPU time was looked at
        self._printed = 0
        self._told: list[str] | None = None

    @contextmanager
    def measure_pass(self) -> Iterator[LoopClock]:
        """Around a pass: see where steps end, and count CPU time."""
        thread, began_s, main_s, all_s = threading.get_ident(), perf_counter(), thread_time(), measure_tree_cpu()

        def end_step(*_: Any) -> None:
            if threading.get_ident() == thread:
                self.clock.end_step()

        handle = None
        with suppress(ImportError):  # without this hook, a step ends with the loop's body
            from torch.optim.optimizer import register_optimizer_step_post_hook

            handle = register_optimizer_step_post_hook(end_step)
        try:
            yield self.clock
        finally:
            self.clock.stop()
            if handle is not None:
                handle.remove()
            self._passes_s += perf_counter() - began_s
            self._main_cpu_s += thread_time() - main_s
            self._cpu_s += measure_tree_cpu() - all_s

    def add_wait(self, wall_s: float, cpu_s: float) -> None:
        """A wait whose CPU time was looked at."""
        self._waited_s += wall_s
        self._waited_cpu_s += cpu_s

    def note_samples(self, samples: Sequence[int]) -> None:
        """These are being loaded while a batch is waited for."""
        if samples and len(self._seen) < _KEPT:
            self._seen[self.clock.count] = tuple(dict.fromkeys((*self._seen.get(self.clock.count, ()), *samples)))[-16:]

    def summarise(self, times: SampleTimes, stalls: Sequence[Any]) -> Summary | None:
        """The summary so far; None before the first batch is over."""
        unseen = []
        if not self.clock.between_s.any():
            unseen.append("No optimizer of torch stepped: the step is all that the loop does with a batch.")
        if count_workers(self._loader) and not times.samples:
            unseen.append("Samples in the workers were not seen: they are no items of a forked worker's dataset.")
        resources = summarise_readings(self.resources.readings) if self.resources.readings else None
        facts = Facts(
            count_workers(self._loader), bool(getattr(self._loader, "persistent_workers", True)), self._cpu_s,
            self._main_cpu_s, self._waited_cpu_s / max(self._waited_s, 1e-9), self._passes_s, times, dict(self._seen),
            resources, tuple(stalls), tuple(unseen),
        )  # fmt: skip
        return summarise_loop(self.clock, facts)

    def print_summary(self, summary: Summary | None, *, only_news: bool) -> None:
        """Print a summary if the loop has come further since the last one; ``only_news`` if it has other causes."""
        if summary is None or summary.batches == self._printed:
            return
        causes = [cause.id for cause in summary.causes]
        if not only_news or causes != self._told:
            self._printed, self._told = summary.batches, causes
            (sys.stdout if is_notebook() else sys.stderr).write(f"{summary}\n")  # at once: other processes write, too


def summarise_loop(clock: LoopClock, facts: Facts) -> Summary | None:
    """What a clock and the facts beside it say; None before the first batch is over."""
    clock.read()
    waits, steps, between = (np.array(values) for values in (clock.waits_s, clock.steps_s, clock.between_s))
    if not len(waits):
        return None
    is_first = np.isin(np.arange(len(waits)), clock.firsts)
    later = waits[~is_first] if (~is_first).any() else np.zeros(1)
    whole = float(waits.sum() + steps.sum() + between.sum()) + clock.ends_s
    parts = tuple(
        Part(name, float(values.sum()) / max(whole, 1e-9), *(1000 * np.percentile(values, (50, 95))).tolist())
        for name, values in (("wait", later), ("step", steps), ("between steps", between))
    )
    start_s, each_s = float(waits[is_first].sum()), np.where(is_first, 0, waits) + steps + between
    order = np.argsort(-each_s)[:_WORST].tolist()
    worst = tuple(SlowBatch(n, waits[n], steps[n], between[n], facts.seen.get(n, ())) for n in order)
    causes = find_causes(waits, between, is_first, whole - clock.ends_s, facts)
    came_s = np.cumsum(waits + steps + between) - steps - between
    spans_s = [(s, s + step) for s, step in zip(came_s.tolist(), steps.tolist(), strict=True) if s < _SHOWN_S]
    return Summary(
        _describe(causes, parts, start_s / max(whole, 1e-9)), tuple(causes), parts, whole, start_s, clock.ends_s,
        len(waits), int(is_first.sum()), clock.images, find_error(each_s), tuple(spans_s), worst,
        max(0.0, facts.cpu_s - facts.main_cpu_s) / max(facts.passes_s, 1e-9), facts.resources,
        tuple(map(str, facts.stalls)), facts.unseen, _find_rank(),
    )  # fmt: skip


def _find_rank() -> int | None:
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ["RANK"]) if int(os.environ.get("WORLD_SIZE", 1)) > 1 else None


def _describe(causes: Sequence[Cause], parts: Sequence[Part], start: float) -> str:
    shares = {part.name: part.share for part in parts}
    told = f"wait {shares['wait'] + start:.0%}, step {shares['step']:.0%}, between steps {shares['between steps']:.0%}"
    if not causes and shares["step"] < max(start, shares["wait"], shares["between steps"]):
        return f"Too few batches for a verdict: {told}."
    if not causes:
        return f"The step is the limit: {told}. Your loader is fine: a faster step is all that helps."
    return f"{causes[0].why} ({told})"
