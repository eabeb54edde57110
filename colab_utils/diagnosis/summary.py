"""Where the time of a run went: to waits, to steps and between steps; and what caused the waits."""

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from colab_utils.diagnosis.causes import find_causes, find_lost_share
from colab_utils.diagnosis.cures import Cause
from colab_utils.diagnosis.looks import Looks
from colab_utils.diagnosis.record import LoopRecord
from colab_utils.diagnosis.waits import Array
from colab_utils.loading.devices import find_ranks
from colab_utils.progress import is_notebook
from colab_utils.units import format_seconds

# If a loop has at least this many batches for each step of the optimizer, it accumulates gradients.
_ACCUMULATES = 1.5


@dataclass(frozen=True)
class Part:
    """One part of the time of all batches: their waits, their steps, or the time between a step and
    the request for the next batch.
    """

    name: str
    share: float
    """Share of the time of the whole loop, 0 to 1."""
    median_ms: float
    p95_ms: float


@dataclass(frozen=True)
class Summary:
    """Where the time of a loop went. Times are wall time, or times of the GPU's stream if the loop
    uses a GPU.
    """

    verdict: str
    """What limits the loop, in one line. If several processes train together, it begins with the
    rank of this one.
    """
    causes: tuple[Cause, ...]
    """Why the loop takes longer than its steps, the largest share first. Empty if it does not."""
    parts: tuple[Part, ...]
    """*wait*, *step* and *between steps*. The waits do not include the first batch of a pass. If
    much of the step comes before the model is called, this is a part of its own, *before the model*
    (estimated from looks at the loop).
    """
    seconds: float
    """Time of all passes, and of what lay between them."""
    start_s: float
    """Time until the first batch of a pass came, in total over all passes."""
    ends_s: float
    """Time between passes, in total: evaluation, for example."""
    batches: int
    passes: int
    images: int
    unseen: tuple[str, ...]
    """Sentences that say what could not be seen of the loop."""
    lost_share: float
    """Share of the loop's time in which the loop had no core, because its own processes used all
    cores, 0 to 1.
    """
    loader: str
    """The dataset and the settings of the loader, and the line of code that iterates over it."""

    @property
    def wait_share(self) -> float:
        """Share of the loop's time spent waiting, including the first batches of passes, 0 to 1."""
        return self.parts[0].share + self.start_s / self.seconds

    @property
    def loop_s(self) -> float:
        """Return the seconds of all passes, without the time between them."""
        return self.seconds - self.ends_s

    @property
    def images_per_second(self) -> float:
        """Return the rate over the whole loop, without the time between passes."""
        return self.images / max(self.loop_s, 1e-9)

    @property
    def growth(self) -> Cause | None:
        """Return the cause that says how memory grows; None if it does not."""
        return next((cause for cause in self.causes if cause.id == "memory"), None)

    def __str__(self) -> str:
        largest = max(self.parts, key=lambda part: part.share)
        lines = [self.verdict, "                 share    median       p95"]
        for part in self.parts:
            arrow = "  <--" if part is largest else ""
            lines.append(
                f"{part.name:16}{part.share:6.0%}{part.median_ms:7.1f} ms{part.p95_ms:7.1f} "
                f"ms{arrow}"
            )
        ends = f"; between passes {format_seconds(self.ends_s)}" if self.passes > 1 else ""
        lines.append(
            f"first batches {format_seconds(self.start_s)} of {format_seconds(self.seconds)}{ends}"
            f"; {self.batches:,} batches, {self.images_per_second:,.1f} images/s"
        )
        lines += [*map(str, self.causes), *self.unseen]
        return "\n".join(lines)


def summarise(record: LoopRecord) -> Summary | None:
    """Return the summary of a loop so far, or None before the first batch is over."""
    clock = record.clock
    clock.read()
    parts_s = clock.parts_s
    if not len(parts_s):
        return None
    looks = record.looks
    unseen = _list_unseen(parts_s, record)
    parts_s = split_micro_batches(parts_s)
    is_first = np.isin(np.arange(len(parts_s)), clock.firsts)
    loop_s = float(parts_s.sum())
    whole_s = max(loop_s + clock.ends_s, 1e-9)
    causes = find_causes(parts_s, is_first, record)
    is_prepared = "prepare" in [cause.id for cause in causes]
    before = looks.measure_preparation()[0] if is_prepared else 0.0
    parts = _list_parts(parts_s, is_first, before, whole_s)
    start_s = float(parts_s[is_first, 0].sum())
    ranks = find_ranks()
    who = f"Rank {ranks.rank}: " if ranks.count > 1 else ""
    return Summary(
        verdict=who + _describe(causes, parts, start_s / whole_s, looks),
        causes=tuple(causes),
        parts=parts,
        seconds=whole_s,
        start_s=start_s,
        ends_s=clock.ends_s,
        batches=len(parts_s),
        passes=int(is_first.sum()),
        images=clock.images,
        unseen=unseen,
        lost_share=find_lost_share(loop_s, record),
        # The folders of the file are left out.
        loader=re.sub("/.*/", "", record.loader),
    )


def _list_unseen(parts_s: Array, record: LoopRecord) -> tuple[str, ...]:
    """Return sentences that say what could not be seen of the loop. ``parts_s`` is as in
    `split_micro_batches`.
    """
    unseen = []
    steps = np.count_nonzero(parts_s[:, 2])
    # What follows a pass is not seen: the loop may step there.
    if steps == 0 and record.left_at_once <= 1:
        unseen.append(
            "No optimizer of torch stepped at the end of a batch: all that the loop does with a "
            "batch counts as its step."
        )
    if steps and len(parts_s) >= _ACCUMULATES * steps:
        unseen.append(
            f"The optimizer steps every {len(parts_s) / steps:.0f} batches. The end of the "
            "backward pass is estimated for the other batches."
        )
    if record.workers and not record.monitor.read_times().samples:
        unseen.append(
            "Samples in the workers were not seen: this needs forked workers, and a loader that "
            "shows a dataset with indices."
        )
    return tuple(unseen)


def print_summary(record: LoopRecord, *, only_news: bool) -> None:
    """Print a summary, unless no batch has come since the last summary. With ``only_news``, print a
    later summary only if its causes differ from those of the last one.
    """
    summary = summarise(record)
    batches, known = record.printed
    if summary is None or summary.batches == batches:
        return
    ids = [cause.id for cause in summary.causes]
    if not (only_news and batches and ids == known):
        record.printed = summary.batches, ids
        # Other processes may print, too: a single write keeps these lines together.
        (sys.stdout if is_notebook() else sys.stderr).write(f"{summary}\n")


def split_micro_batches(parts_s: Array) -> Array:
    """Estimate where the step ends for batches after which the optimizer does not step.

    The forward and backward passes of such a batch take about as long as those of other batches.
    So its step is taken to be as long as the median step of the other batches. The rest of its step
    counts as time between steps, up to the median time between steps of the other batches.

    Args:
        parts_s: Wait, step, and time between steps of each batch, seconds, float64 [batches, 3].

    Example:
        >>> parts_s = np.array([[0, 0.7, 0], [0, 0.1, 0.6], [0, 0.1, 0], [0, 9, 0]])
        >>> split_micro_batches(parts_s).round(1).tolist()
        [[0.0, 0.1, 0.6], [0.0, 0.1, 0.6], [0.0, 0.1, 0.0], [0.0, 8.4, 0.6]]
    """
    is_stepped = parts_s[:, 2] > 0
    if not is_stepped.any():
        return parts_s
    _, step_s, between_s = np.median(parts_s[is_stepped], axis=0)
    later_s = np.where(is_stepped, 0, np.clip(parts_s[:, 1] - step_s, 0, between_s))
    return parts_s + np.outer(later_s, (0, -1, 1))


def _list_parts(parts_s: Array, is_first: Array, before: float, whole_s: float) -> tuple[Part, ...]:
    """Return the parts of a summary. ``before`` is the share of the steps that comes before the
    model is called.
    """
    waits, steps, between = parts_s.T
    named = {
        "wait": waits[~is_first],
        "before the model": before * steps,
        "step": (1 - before) * steps,
        "between steps": between,
    }
    if not before:
        del named["before the model"]
    parts = []
    for name, seconds in named.items():
        median_ms, p95_ms = 1000 * np.percentile(seconds if len(seconds) else [0.0], (50, 95))
        parts.append(Part(name, seconds.sum() / whole_s, median_ms, p95_ms))
    return tuple(parts)


def _describe(causes: Sequence[Cause], parts: Sequence[Part], start: float, looks: Looks) -> str:
    wait, *rest = parts
    names = [f"{part.name} {part.share:.0%}" for part in rest]
    shares = ", ".join([f"wait {wait.share + start:.0%}", *names])
    if causes:
        return f"{causes[0].why} ({shares})"
    step, between = rest
    if step.share < max(start, wait.share, between.share):
        return f"Too few batches for a verdict: {shares}."
    return (
        f"The step is the limit: {shares}. Your loader is fine: a faster step is all that helps."
        f"{looks.describe_line('step')}"
    )
