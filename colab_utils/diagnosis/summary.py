"""Where the time of a whole run went: waits, steps and what lies between, what caused the waiting,
what to do next.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import distributed
from torch.optim.optimizer import register_optimizer_step_post_hook

from colab_utils.diagnosis.memory_growth import Growth, MemoryLog, find_growth
from colab_utils.diagnosis.processes import SampleTimes, WorkerMonitor
from colab_utils.diagnosis.timing import Stage, count_workers, find_error, measure_tree_cpu
from colab_utils.loading.clock import LoopClock
from colab_utils.require import require_local_path
from colab_utils.runtime import count_cores, format_bytes, format_seconds, is_notebook, write_file

_Array = NDArray[Any]
_WORST = 10  # batches
_SHOWN_S = 10.0  # of the steps
_KEPT = 1000  # batches whose samples are kept
_LEAST_SHARE, _LEAST_S = 0.1, 0.5  # of the loop, and of all of it: less is not worth a cure
_RARE = 0.25  # of the batches
_HOLDS = 0.6  # of what a part of the loop takes, by rare batches
_TIMES_SLOWER = 8  # than the mean of the others: a slow sample
_LEAST_SLOW_S = 0.05
_SENDS_MB_PER_S = 20  # a third of what Drive gives where it is reached (`drive.DRIVE_PROFILES`)
_ALL_CORES = 0.85  # of the cores are busy
_SLOWER = 1.3  # times, for a step beside a loader
_STAGES = {  # what takes most: the cause, and what to do
    "read": (
        "read",
        "Store the data on the local disk, in few large files: preprocess, then copy.",
    ),
    "sample": (
        "work",
        "Decode, resize and parse once, offline. Use more workers where cores are free.",
    ),
    "decode": (
        "decode",
        "Shrink images once, offline (preprocess), to the size that training needs.",
    ),
    "masks": (
        "masks",
        "Load shards with make_loader: masks stay packed until the device has them.",
    ),
    "transform": (
        "transform",
        "Make transforms cheaper, run them on the device, or do what is not random offline.",
    ),
    "collate": (
        "collate",
        "Make collate_fn cheaper: stack tensors, and do all else in the dataset.",
    ),
    "hand-off": (
        "hand-off",
        "Make batches smaller: uint8 images, packed masks; or use make_loader's own buffers.",
    ),
    "collate and hand-off": ("hand-off", "Make batches smaller: uint8 images, packed masks."),
}


@dataclass(frozen=True)
class Cause:
    """Why the loop takes longer than its steps, and what to do."""

    id: str
    share: float
    """Of the loop's time, 0 to 1."""
    why: str
    next: str

    def __str__(self) -> str:
        return f"{self.share:.0%} {self.id}\n  why:  {self.why}\n  next: {self.next}"


@dataclass(frozen=True)
class Part:
    """One part of every batch: its wait, its step, or what follows until the next batch is asked
    for.
    """

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
    """Indices of samples that were being loaded while it was waited for, as far as they were
    seen.
    """


@dataclass(frozen=True)
class Summary:
    """Where the time of a loop went. Times are those of the wall clock, on a GPU those of its
    stream.
    """

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
    """When each step of the first ten seconds began and ended, since its first batch was
    asked for.
    """
    worst: tuple[SlowBatch, ...]
    """The ten batches that took longest, the longest first."""
    growth: Growth | None
    """Of memory."""
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
            lines.append(
                f"{part.name:14}{part.share:6.0%}{part.median_ms:7.1f} ms{part.p95_ms:7.1f} "
                f"ms{arrow}"
            )
        ends = f"; between passes {format_seconds(self.ends_s)}" if self.passes > 1 else ""
        starts = (
            f"first batches {format_seconds(self.start_s)} of {format_seconds(self.seconds)}{ends}"
        )
        lines.append(f"{starts}; {self.batches:,} batches, {self.images_per_second:,.1f} images/s")
        return "\n".join([*lines, *map(str, self.causes), *self.unseen])

    def save(self, path: str | Path) -> None:
        """Write all fields as JSON, with ``images_per_second`` and ``wait_share``."""
        content = asdict(self) | {
            "images_per_second": self.images_per_second,
            "wait_share": self.wait_share,
        }
        write_file(require_local_path(path), (json.dumps(content, indent=1) + "\n").encode())


class LoopRecord:
    """All that is noted while a watched loop runs.

    Args:
        loader: that is watched.

    Attributes:
        workers: worker processes of the loader.
        cpu_s: CPU time of this process and its children in them.
        times: of samples in workers.
        seen: batch to the samples that were loaded while it was waited for.
        memory: of this process and its children.
        growth: of it.
        stalls: every `Stall`.
    """

    def __init__(self, loader: Any) -> None:
        self.clock, self.monitor = LoopClock(), WorkerMonitor(getattr(loader, "dataset", None))
        self.memory, self.workers = MemoryLog(), count_workers(loader)
        self.cpu_s, self.times = 0.0, SampleTimes()
        self.growth: Growth | None = None
        self.seen, self.stalls = dict[int, tuple[int, ...]](), list[Any]()
        self._printed: Summary | None = None

    @contextmanager
    def measure_pass(self) -> Iterator[LoopClock]:
        """Around a pass: see where steps end, and count CPU time."""
        cpu_began_s = measure_tree_cpu()
        handle = register_optimizer_step_post_hook(lambda *_: self.clock.end_step())
        try:
            yield self.clock
        finally:
            self.clock.stop()
            handle.remove()
            self.cpu_s += measure_tree_cpu() - cpu_began_s

    def note_samples(self, samples: Sequence[int]) -> None:
        """These are being loaded while a batch is waited for."""
        seen, number = self.seen, self.clock.count
        if samples and len(seen) < _KEPT:
            seen[number] = tuple(dict.fromkeys((*seen.get(number, ()), *samples)))[-16:]

    def summarise(self) -> Summary | None:
        """The summary so far; None before the first batch is over."""
        self.times, self.growth, clock = (
            self.monitor.read_times(),
            find_growth(self.memory.readings),
            self.clock,
        )
        clock.read()
        waits, steps, between = clock.parts_s.T
        if not len(waits):
            return None
        is_first = np.isin(np.arange(len(waits)), clock.firsts)
        later = waits[~is_first] if (~is_first).any() else np.zeros(1)
        whole = float(waits.sum() + steps.sum() + between.sum()) + clock.ends_s
        parts = tuple(
            Part(
                name,
                float(values.sum()) / max(whole, 1e-9),
                *(1000 * np.percentile(values, (50, 95))).tolist(),
            )
            for name, values in (("wait", later), ("step", steps), ("between steps", between))
        )
        start_s, each_s = (
            float(waits[is_first].sum()),
            np.where(is_first, 0, waits) + steps + between,
        )
        order = np.argsort(-each_s)[:_WORST].tolist()
        worst = tuple(
            SlowBatch(n, waits[n], steps[n], between[n], self.seen.get(n, ())) for n in order
        )
        causes = find_causes(waits, between, is_first, whole - clock.ends_s, self)
        unseen = []
        if not between.any():
            unseen.append(
                "No optimizer of torch stepped: the step is all that the loop does with a batch."
            )
        if self.workers and not self.times.samples:
            unseen.append(
                "Samples in the workers were not seen: they are no items of a forked worker's "
                "dataset."
            )
        came_s = np.cumsum(waits + steps + between) - steps - between
        spans_s = [
            (s, s + step)
            for s, step in zip(came_s.tolist(), steps.tolist(), strict=True)
            if s < _SHOWN_S
        ]
        rank = (
            distributed.get_rank()
            if distributed.is_available() and distributed.is_initialized()
            else None
        )
        return Summary(
            _describe(causes, parts, start_s / max(whole, 1e-9)),
            tuple(causes),
            parts,
            whole,
            start_s,
            clock.ends_s,
            len(waits),
            int(is_first.sum()),
            clock.images,
            find_error(each_s),
            tuple(spans_s),
            worst,
            self.growth,
            tuple(unseen),
            rank,
        )

    def print_summary(self, *, only_news: bool) -> None:
        """Print a summary if the loop has come further since the last one; ``only_news`` if it has
        other causes.
        """
        summary, last = self.summarise(), self._printed
        if summary is None or (last and summary.batches == last.batches):
            return
        if (
            not only_news
            or not last
            or [cause.id for cause in summary.causes] != [cause.id for cause in last.causes]
        ):
            self._printed = summary
            # at once: other processes write, too
            (sys.stdout if is_notebook() else sys.stderr).write(f"{summary}\n")


def _describe(causes: Sequence[Cause], parts: Sequence[Part], start: float) -> str:
    shares = {part.name: part.share for part in parts}
    told = (
        f"wait {shares['wait'] + start:.0%}, step {shares['step']:.0%}, between steps "
        f"{shares['between steps']:.0%}"
    )
    if not causes and shares["step"] < max(start, shares["wait"], shares["between steps"]):
        return f"Too few batches for a verdict: {told}."
    if not causes:
        return (
            f"The step is the limit: {told}. Your loader is fine: a faster step is all that helps."
        )
    return f"{causes[0].why} ({told})"


def find_causes(
    waits: _Array, between: _Array, is_first: _Array, loop_s: float, record: LoopRecord
) -> list[Cause]:
    """What costs a tenth of the loop or more, the most first; and growing memory, whatever it
    costs.

    Args:
        waits: seconds of each batch.
        between: seconds after each step.
        is_first: whether a batch began a pass.
        loop_s: seconds of the whole loop without what lay between the passes.
        record: what else was seen.
    """
    found = [_explain_between(between, loop_s)]
    if crowded := _explain_crowd(waits, loop_s, record):
        found.append(crowded)
    else:
        found.append(_explain_waits(np.where(is_first, 0.0, waits), loop_s, record))
        if is_first.sum() > 1:  # every run starts once
            found.append(_explain_starts(waits[is_first], loop_s))
    worth = [cause for cause in found if cause.share >= _LEAST_SHARE and loop_s >= _LEAST_S]
    causes = sorted(worth, key=lambda cause: -cause.share)
    causes += [
        Cause("hang", 0.0, str(stall).removesuffix(stall.cure).strip(), stall.cure)
        for stall in record.stalls
    ]
    if record.growth:
        cure = "Keep no lists of Python objects in the dataset, and no losses with their graphs."
        causes.append(Cause("memory", 0.0, str(record.growth), cure))
    return causes


def refine_causes(
    causes: Sequence[Cause],
    stages: Sequence[Stage],
    *,
    slower: float,
    step_share: float,
    waits: bool,
) -> list[Cause]:
    """Name the stage of loading that takes most, and contention where a step takes ``slower`` times
    as long as alone.

    Args:
        causes: of `find_causes`.
        stages: of loading, timed alone.
        slower: 1 where the step is as fast beside the loader as without it.
        step_share: of the loop's time.
        waits: whether loading has something to win; else only what will end the run is left.
    """
    if not waits:
        return [cause for cause in causes if cause.id in ("hang", "memory")]
    largest = max(stages, key=lambda stage: stage.mean_ms, default=None)
    found, works = [], False
    for cause in causes:
        if cause.id in ("between", "periodic"):  # a diagnosis copies batches there
            continue
        if largest and cause.id in ("work", "collate") and largest.name in _STAGES:
            waits_for_data = largest.name == "sample" and largest.cpu_ms < largest.mean_ms / 2
            id, cure = _STAGES["read" if waits_for_data else largest.name]
            whole_ms = sum(stage.mean_ms for stage in stages)
            why = (
                f"{cause.why} {largest.name} takes {largest.mean_ms:.3g} of {whole_ms:.3g} ms "
                "an image."
            )
            cause, works = Cause(id, cause.share, why, cure), True
        found.append(cause)
    if slower > _SLOWER:
        why = f"Beside the loader the step takes {slower:.1f} times as long as alone."
        cure = "Use fewer workers, torch.set_num_threads(1) in each, or make loading cheaper."
        found.append(Cause("contention", (1 - 1 / slower) * step_share, why, cure))
    # loading that takes the cores from the step is cured by cheaper loading: it comes first
    return sorted(found, key=lambda cause: (works and cause.id == "contention", -cause.share))


def _find_rare(seconds: _Array) -> NDArray[np.int64]:
    """The few batches that hold most of it; none where many share it."""
    large = np.flatnonzero(seconds > max(5 * float(np.median(seconds)), _LEAST_SLOW_S))
    holds = seconds[large].sum() >= _HOLDS * seconds.sum()
    return large if 0 < len(large) <= _RARE * len(seconds) and holds else large[:0]


def _explain_between(between: _Array, loop_s: float) -> Cause:
    share, rare = float(between.sum()) / loop_s, _find_rare(between)
    if len(rare) > 1:
        every, each_s = len(between) / len(rare), float(between[rare].mean())
        why = f"About every {every:.0f} batches this process is busy {each_s:.2g} s after the step."
        cure = (
            "If it writes checkpoints, write them in a thread or less often; if it evaluates, "
            "evaluate less often."
        )
        return Cause("periodic", share, why, cure)
    why = (
        f"After each step this process is busy for {1000 * between.mean():.3g} ms before it "
        "asks for a batch."
    )
    cure = (
        "Look at what follows optimizer.step(): log or read losses (.item()) less often, or "
        "move it to a thread."
    )
    return Cause("between", share, why, cure)


def _explain_starts(starts: _Array, loop_s: float) -> Cause:
    """The first batch of each pass came so late."""
    why = f"Each of the {len(starts)} passes waits {starts.mean():.2g} s for its first batch."
    cure = (
        "Where workers start anew, make the loader once, with persistent_workers=True; else "
        "make passes longer."
    )
    return Cause("restarts", float(starts.sum()) / loop_s, why, cure)


def _explain_crowd(waits: _Array, loop_s: float, record: LoopRecord) -> Cause | None:
    """More workers than cores, which wait for one another, at the start of a pass most of all."""
    cores, times = count_cores(), record.times
    is_busy = record.cpu_s >= _ALL_CORES * cores * loop_s
    if record.workers <= cores or not (is_busy or times.queued_s >= times.cpu_s):
        return None
    why = f"{record.workers} workers share {cores} cores, and wait for one another."
    cure = (
        f"Use fewer workers: num_workers={cores}. Make a sample cheaper: more workers only "
        "take turns."
    )
    return Cause("too_many_workers", float(waits[1:].sum()) / loop_s, why, cure)


def _explain_waits(waits: _Array, loop_s: float, record: LoopRecord) -> Cause:
    """Why batches come late: a slow sample, no workers, what happens to whole batches, reads, or
    work.
    """
    share, times, cores = float(waits.sum()) / loop_s, record.times, count_cores()
    if slow := _explain_slow_sample(waits, share, record):
        return slow
    if not (record.workers or times.samples):
        why = "This process loads the samples itself, between its steps."
        return Cause(
            "work",
            share,
            why,
            "Use worker processes (num_workers): they load while this process trains.",
        )
    outside_s, data_s = (
        times.worker_cpu_s - times.cpu_s,
        times.wall_s - times.cpu_s - times.queued_s,
    )
    if outside_s > max(times.cpu_s, data_s):
        part = outside_s / times.worker_cpu_s
        why = (
            f"Workers spend {part:.0%} of their CPU time outside of samples: in collate_fn, or "
            "on the way here."
        )
        cure = "Make collate_fn cheaper, and batches smaller: diagnose(loader, step) times both."
        return Cause("collate", share, why, cure)
    wall_ms, cpu_ms, queued_ms, data_ms = (
        1000 * seconds / max(times.samples, 1)
        for seconds in (times.wall_s, times.cpu_s, times.queued_s, data_s)
    )
    if data_ms > max(cpu_ms, queued_ms):
        why = f"A sample takes {wall_ms:.3g} ms, and waits {data_ms:.3g} ms of it for its data"
        return _explain_reads(share, why, 1000 * data_ms, times.bytes_read / times.samples)
    why, busy, cure = "Workers deliver too slowly.", record.cpu_s / loop_s, "Use more workers"
    if times.samples:
        why = (
            f"A sample takes {wall_ms:.3g} ms: {cpu_ms:.3g} ms of work, {queued_ms:.3g} ms "
            "until a core is free."
        )
    if queued_ms > cpu_ms or busy > _ALL_CORES * cores:
        cure = "Make the work cheaper, or do it once, offline: more workers would not help"
    why = f"{why} {busy:.1f} of {cores} cores are busy."
    return Cause(
        "work", share, why, f"{cure}; diagnose(loader, step) says which stage takes the time."
    )


def _explain_reads(share: float, why: str, data_us: float, size: float) -> Cause:
    """Whether the first byte of a file is late, or all of them: a disk that sends gives
    `_SENDS_MB_PER_S` at least.
    """
    cure = "Store the data on the local disk, in few large files; until then use more workers."
    if size / data_us > _SENDS_MB_PER_S:
        why = f"{why}: {format_bytes(size)}, at {size / data_us:.2g} MB/s. It is the bandwidth"
        cure = f"{_STAGES['decode'][1]} Store them on the local disk."
    elif size > 0:
        why = f"{why}: only {format_bytes(size)}, so mostly for the first byte of each file"
    return Cause("read", share, f"{why}.", cure)


def _explain_slow_sample(waits: _Array, share: float, record: LoopRecord) -> Cause | None:
    """The slowest sample, where a few samples hold much of the time of all, and of the waits."""
    times = record.times
    # of these and slower ones
    count, slow_s = np.cumsum(np.array(times.spread).reshape(-1, 2)[::-1], axis=0)[::-1].T
    least_s = np.ldexp(0.5e-9, np.arange(len(count)))
    rest_s = (times.wall_s - slow_s) / np.maximum(times.samples - count, 1)
    fits = (count > 0) & (count <= _RARE * times.samples) & (least_s > _TIMES_SLOWER * rest_s)
    fits &= (least_s > _LEAST_SLOW_S) & (
        slow_s > (1 - _HOLDS) * max(times.wall_s, float(waits.sum()))
    )
    rare = [number for number in _find_rare(waits).tolist() if record.seen.get(number)]
    if fits.any():
        found = fits.argmax()
        seconds, index = times.slowest
        slow = f"{count[found]:,.0f} of {times.samples:,.0f}"
        told = (
            f"loads as slow ({slow}) hold {slow_s[found] / times.wall_s:.0%} of the time of "
            "all samples"
        )
    elif rare and not times.samples:  # loaded in this process
        worst = max(rare, key=lambda number: waits[number])
        seconds, index = waits[worst], record.seen[worst][0]
        told = f"{len(rare)} of {len(waits)} batches are so slow"
    else:
        return None
    cure = f"Look at sample {index}: make it smaller, store it on the local disk, or leave it out."
    return Cause("slow_sample", share, f"Sample {index} takes {seconds:.2g} s: {told}.", cure)
