"""Why a loop takes longer than its steps: each cause with its share, its evidence, and what to do
next.
"""

import numpy as np

from colab_utils.diagnosis.cures import Cause, make_cause
from colab_utils.diagnosis.looks import OTHER_LOADER
from colab_utils.diagnosis.memory_growth import find_growth
from colab_utils.diagnosis.processes import OWN_THREADS
from colab_utils.diagnosis.record import LoopRecord
from colab_utils.diagnosis.waits import (
    Array,
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
# Ids of the causes in which the loop waits because workers compute.
_LOADING = {"work", "collate", "hand-off"}


def find_causes(parts_s: Array, is_first: Array, record: LoopRecord) -> list[Cause]:
    """Find the causes that cost a tenth of the loop's time or more, the largest first. Stalls and
    growing memory are listed whatever they cost.

    Args:
        parts_s: Wait, step, and time between steps of each batch, seconds, float64 [batches, 3].
        is_first: Whether each batch is the first one of a pass, bool [batches].
        record: What else was seen.
    """
    waits = parts_s[:, 0]
    loop_s = float(parts_s.sum())
    causes = _explain_own(parts_s, record)
    is_start = is_first if record.workers else np.arange(len(waits)) == 0
    late = np.where(is_start, 0.0, waits)
    lack = _explain_cores(waits, late, loop_s, record)
    if lack is not None:
        causes.append(lack)
    if lack is None or lack.id != "too_many_workers":
        wait = explain_waits(late, loop_s, record)
        # A lack of cores may be the reason for a wait whose reason was not seen.
        if lack is None or wait.id != "wait":
            causes.append(wait)
        # The first start is no cause, because every run has one.
        if is_start.sum() > 1:
            causes.append(_explain_starts(waits[is_start][1:], len(waits), loop_s, record))
    causes = [cause for cause in causes if cause.share >= _LEAST_SHARE and loop_s >= _LEAST_S]
    # Cheaper loading also cures "contention", and a cause in loading says what to make cheaper. So
    # "contention" is named last, unless threads that workers started themselves take the cores.
    is_loading = not _LOADING.isdisjoint(cause.id for cause in causes)
    comes_last = is_loading and record.looks.find_place("sample") != OWN_THREADS
    causes.sort(key=lambda cause: (comes_last and cause.id == "contention", -cause.share))
    causes += [Cause("hang", 0.0, stall.why, stall.cure) for stall in record.stalls]
    return [*causes, *filter(None, [find_growth(record.memory.readings)])]


def _explain_own(parts_s: Array, record: LoopRecord) -> list[Cause]:
    """Explain what the loop does beside waiting and training: it waits for another loader, works on
    a batch before it calls the model, or is busy after a step.
    """
    looks = record.looks
    _, step, between = (parts_s.sum(axis=0) / parts_s.sum()).tolist()
    after, _ = looks.measure_place("between", OTHER_LOADER)
    beside, _ = looks.measure_place("step", OTHER_LOADER)
    part, seen = looks.measure_preparation()
    why = "Beside its own batches, the loop waits for another loader."
    line = looks.describe_line("other", "Another loader")
    other = make_cause("other_loader", after * between + beside * step, why + line)
    why = f"This process works on each batch before it calls the model ({seen} at the step)."
    prepare = make_cause("prepare", part * step, why + looks.describe_line("step"))
    causes = [cause for cause in (other, prepare) if cause.share >= _LEAST_OTHER]
    if after <= _HALF:
        causes.append(_explain_between(parts_s[:, 2], (1 - after) * between, record))
    return causes


def _explain_between(between: Array, share: float, record: LoopRecord) -> Cause:
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
    return make_cause(id, share, why + record.looks.describe_line("between"))


def _explain_starts(starts: Array, batches: int, loop_s: float, record: LoopRecord) -> Cause:
    """Explain why the first batch of each later pass is late: this process is busy with other code,
    workers start again, or any batch takes about as long to load. ``batches`` were loaded in all.
    """
    share = float(starts.sum()) / loop_s
    # A loop that ends by itself may leave one pass like this.
    if record.left_at_once > max(1, len(starts) / 2):
        why = (
            f"The loop left {record.left_at_once} passes after one batch, and waited "
            f"{starts.mean():.2g} s for each."
        )
        return make_cause("restarts", share, why, cure="iterator")
    why = (
        f"Each pass after the first waits {starts.mean():.2g} s for its first batch (later "
        f"passes: {len(starts)})."
    )
    line = record.looks.describe_line("start")
    id = "starts"
    if line:
        id = "main_process"
    elif record.restarts and 2 * record.monitor.read_times().wall_s <= batches * starts.mean():
        id = "restarts"
    return make_cause(id, share, why + line)


def _explain_cores(waits: Array, late: Array, loop_s: float, record: LoopRecord) -> Cause | None:
    """Explain that the loop or its workers lack a core, because other programs, too many workers or
    the loop's own threads keep all cores busy. ``late`` are the waits without those for the first
    batches of passes.
    """
    cores = count_cores()
    is_late = waits_for_cores(weigh_evidence(record))
    share = record.use.queued_s / loop_s
    if _has_busy_machine(loop_s, record):
        if is_late:
            share = max(share, float(late.sum()) / loop_s)
        elif share < _HALF:
            return None
        why = (
            "This machine is busy with other work: other programs keep "
            f"{record.use.others_s / loop_s:.1f} of {cores} cores busy, and the loop waits for a "
            "core. This share overlaps with the others."
        )
        return make_cause("other_programs", share, why)
    if is_late and record.workers > cores:
        why = f"{record.workers} workers share {cores} cores, and wait for one another."
        # Workers wait most of all at the start of a pass, when all of them load their first
        # batches at the same time. The first start is no cause, because every run has one.
        return make_cause("too_many_workers", float(waits[1:].sum()) / loop_s, why, cores=cores)
    if share < _LEAST_LOST:
        return None
    why = (
        f"For {share:.0%} of its time, the loop is ready to run but has no core: its own workers "
        "and threads have all cores. This share overlaps with the others."
    )
    return make_cause("contention", share, why)


def _has_busy_machine(loop_s: float, record: LoopRecord) -> bool:
    """Return whether other programs had at least half of the cores' time.

    ``others_s`` is 0 if cores were idle for a tenth of the time or more.
    """
    return record.use.others_s >= _HALF * count_cores() * loop_s


def find_lost_share(loop_s: float, record: LoopRecord) -> float:
    """Return the share of a loop's time in which the loop had no core, because its own processes
    had all cores. Return 0 if other programs had the cores.
    """
    if _has_busy_machine(loop_s, record):
        return 0.0
    return min(1.0, record.use.queued_s / loop_s)
