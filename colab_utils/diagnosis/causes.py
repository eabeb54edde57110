"""Why a loop takes longer than its steps: each cause with its share, its evidence, and what to do
next.
"""

from dataclasses import replace

import numpy as np

from colab_utils.diagnosis.cures import Cause, make_cause
from colab_utils.diagnosis.looks import OTHER_LOADER
from colab_utils.diagnosis.processes import OWN_THREADS
from colab_utils.diagnosis.waits import (
    Array,
    LoopFacts,
    explain_starts,
    explain_waits,
    find_rare,
    waits_for_cores,
    weigh_evidence,
)
from colab_utils.machine import count_cores

# A cause is listed if it has at least this share of the loop's time, and if the loop took at least
# this many seconds.
_LEAST_SHARE = 0.1
_LEAST_S = 0.5
# A machine is busy if other programs take this share of its cores' time. On a busy machine, these
# programs are a cause if the loop has no core for this share of its time.
_HALF = 0.5
# On any other machine, the loop's own processes are a cause if the loop has no core for this share.
_LEAST_LOST = 0.2
# Another loader, or work before the model, is a cause if it has this share of the loop's time. A
# look needs Python's lock, which a loader often releases, so looks meet it too often.
_LEAST_OTHER = 0.2
# What such a cause says, and the phase whose line it names.
_SEEN = {
    "other_loader": ("Beside its own batches, the loop waits for another loader ({}).", "other"),
    "prepare": (
        "This process works on each batch before it calls the model ({} at the step).",
        "step",
    ),
}
_OVERLAPS = "This share overlaps with the others."
# Ids of the causes in which the loop waits because workers compute.
_LOADING = {"work", "collate", "hand-off"}


def find_causes(
    waits: Array, between: Array, is_first: Array, loop_s: float, facts: LoopFacts
) -> list[Cause]:
    """Find the causes that cost a tenth of the loop's time or more, the largest first. Stalls and
    growing memory are listed whatever they cost.

    Args:
        waits: Seconds that the loop waited for each batch, float64 [batches].
        between: Seconds from the end of each step to the next request, float64 [batches].
        is_first: Whether each batch is the first one of a pass, bool [batches].
        loop_s: Seconds of the whole loop, without the time between passes.
        facts: What else was seen.
    """
    between_share = float(between.sum()) / loop_s
    step_share = 1 - float(waits.sum()) / loop_s - between_share
    looks = facts.looks
    causes = _explain_seen(
        "other_loader", looks.measure_place("between", OTHER_LOADER), between_share, facts
    )
    rest = between_share - sum(cause.share for cause in causes)
    if rest >= between_share / 2:
        causes.append(_explain_between(between, rest, facts))
    causes += _explain_seen(
        "other_loader", looks.measure_place("step", OTHER_LOADER), step_share, facts
    )
    causes += _explain_seen("prepare", looks.measure_preparation(), step_share, facts)
    is_start = is_first if facts.workers else np.arange(len(waits)) == 0
    late = np.where(is_start, 0.0, waits)
    lack = _explain_cores(waits, late, loop_s, facts)
    if lack is not None:
        causes.append(lack)
    if lack is None or lack.id != "too_many_workers":
        wait = explain_waits(late, loop_s, facts)
        # A lack of cores may be the reason for a wait whose reason was not seen.
        if lack is None or wait.id != "wait":
            causes.append(wait)
        # The first start is no cause, because every run has one.
        if is_start.sum() > 1:
            causes.append(explain_starts(waits[is_start][1:], len(waits), loop_s, facts))
    causes = [cause for cause in causes if cause.share >= _LEAST_SHARE and loop_s >= _LEAST_S]
    # Cheaper loading also cures "contention", and a cause in loading says what to make cheaper. So
    # "contention" is named last, unless threads that workers started themselves take the cores.
    is_loading = not _LOADING.isdisjoint(cause.id for cause in causes)
    comes_last = is_loading and looks.find_place("sample") != OWN_THREADS
    causes.sort(key=lambda cause: (comes_last and cause.id == "contention", -cause.share))
    if lack in causes and sum(cause.share for cause in causes) > 1:
        causes[causes.index(lack)] = replace(lack, why=f"{lack.why} {_OVERLAPS}")
    for stall in facts.stalls:
        causes.append(Cause("hang", 0.0, stall.why, stall.cure))
    if facts.growth:
        causes.append(Cause("memory", 0.0, str(facts.growth), facts.growth.cure))
    return causes


def _explain_between(between: Array, share: float, facts: LoopFacts) -> Cause:
    """Explain how long this process is busy after each step, or after some steps, and where."""
    rare = find_rare(between)
    id = "between"
    why = (
        f"After the step of a batch this process is busy for {1000 * between.mean():.3g} ms before "
        "it asks for the next one."
    )
    if len(rare) > 1:
        id = "periodic"
        why = (
            f"About every {len(between) / len(rare):.0f} batches, this process is busy for "
            f"{between[rare].mean():.2g} s after the step."
        )
    return make_cause(id, share, why + facts.looks.describe_line("between"))


def _explain_seen(id: str, seen: tuple[float, str], share: float, facts: LoopFacts) -> list[Cause]:
    """Explain a phase with this share of the loop by what was seen in a part of its looks."""
    part, looks = seen
    share *= part
    if share < _LEAST_OTHER:
        return []
    text, place = _SEEN[id]
    return [make_cause(id, share, text.format(looks) + facts.looks.describe_line(place))]


def _explain_cores(waits: Array, late: Array, loop_s: float, facts: LoopFacts) -> Cause | None:
    """Explain that the loop or its workers lack a core, because other programs, too many workers or
    the loop's own threads keep all cores busy. ``late`` are the waits without those for the first
    batches of passes.
    """
    cores = count_cores()
    is_late = waits_for_cores(weigh_evidence(facts))
    share = facts.use.queued_s / loop_s
    if _has_busy_machine(loop_s, facts):
        others = facts.use.others_s / loop_s
        if share < _HALF and not is_late:
            return None
        why = (
            f"This machine is busy with other work: other programs keep {others:.1f} of {cores} "
            "cores busy, and the loop waits for a core."
        )
        if is_late:
            share = max(share, float(late.sum()) / loop_s)
        return make_cause("other_programs", share, why)
    if is_late and facts.workers > cores:
        why = f"{facts.workers} workers share {cores} cores, and wait for one another."
        # Workers wait most of all at the start of a pass, when all of them load their first
        # batches at the same time. The first start is no cause, because every run has one.
        return make_cause("too_many_workers", float(waits[1:].sum()) / loop_s, why, cores=cores)
    if share < _LEAST_LOST:
        return None
    why = (
        f"For {share:.0%} of its time, the loop is ready to run but has no core: its own workers "
        "and threads have all cores."
    )
    return make_cause("contention", share, why)


def _has_busy_machine(loop_s: float, facts: LoopFacts) -> bool:
    """Return whether other programs had at least half of the cores' time.

    ``others_s`` is 0 if cores were idle for a tenth of the time or more.
    """
    return facts.use.others_s >= _HALF * count_cores() * loop_s


def find_lost_share(loop_s: float, facts: LoopFacts) -> float:
    """Return the share of a loop's time in which the loop had no core, because its own processes
    had all cores. Return 0 if other programs had the cores.
    """
    if _has_busy_machine(loop_s, facts):
        return 0.0
    return min(1.0, facts.use.queued_s / loop_s)
