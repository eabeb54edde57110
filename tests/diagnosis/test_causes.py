"""Each cause of a slow loop is named with its share and its cure."""

import re
from types import SimpleNamespace

import numpy as np
import pytest

from colab_utils.diagnosis import causes
from colab_utils.diagnosis.causes import find_causes
from colab_utils.diagnosis.cures import CURES, Cause
from colab_utils.diagnosis.diagnose import refine_causes
from colab_utils.diagnosis.looks import OTHER_LOADER
from colab_utils.diagnosis.processes import OWN_THREADS, SampleTimes
from colab_utils.diagnosis.record import LoopRecord
from colab_utils.diagnosis.stages import Stage
from colab_utils.diagnosis.timing import CpuUse
from tests.diagnosis.test_memory_growth import MB, make_readings

_USUAL_USE = {"others_s": 0.0, "queued_s": 0.0}


def make_record(*, looks=None, places=None, inside=0, outside=0, times=None, **settings):
    """Two workers that take turns with nobody, in a loop of ten seconds.

    ``looks`` counts what workers were seen to wait for, ``places`` where the loop was in a phase,
    ``inside`` and ``outside`` the looks at a wait in which a busy worker loaded a sample, or did
    not. ``times`` are those of samples in workers.
    """
    record = LoopRecord([])
    record.looks.busy.update({"sample": inside, "collate": outside})
    record.looks.waits.update(looks or {})
    for phase, counts in (places or {}).items():
        for place, count in counts.items():
            kind, stack = ("", [place]) if ":" in place else (place, [])
            for _ in range(count):
                record.looks.add(phase, kind, stack)
    record.monitor.read_times = lambda: times or SampleTimes()
    use = [settings.pop(name, usual) for name, usual in _USUAL_USE.items()]
    usual = {"workers": 2, "use": CpuUse(*use)}
    for name, value in {**usual, **settings}.items():
        assert hasattr(record, name)
        setattr(record, name, value)
    return record


def find(waits=None, between=None, firsts=(0,), **settings):
    """The causes in a loop of 100 batches that takes ten seconds."""
    parts_s = np.zeros((100, 3))
    parts_s[:, 0] = 0.0 if waits is None else waits
    parts_s[:, 2] = 0.0 if between is None else between
    parts_s[:, 1] = (10 - parts_s.sum()) / 100
    is_first = np.isin(np.arange(100), firsts)
    return find_causes(parts_s, is_first, make_record(**settings))


def spread(value, *, every=1):
    return [value if number % every == every - 1 else 0.0 for number in range(100)]


# Four passes, whose first batches are late.
PASSES = {"waits": spread(1.0, every=25), "firsts": (24, 49, 74, 99)}
RARE = spread(1.0, every=25)
# What samples took in workers: to wait, to work for a part of the time, and others.
WAITED = SampleTimes(200, 14.0, 0.4)
HALF = SampleTimes(200, 14.0, 5.0)
SLEPT = SampleTimes(200, 6.0, 1.0)
BUSY = SampleTimes(200, 40.0, 5.0)
IDLE = SampleTimes(200, 0.1, 0.1)
FEW = SampleTimes(200, 2.2, 1.5)
AFTER = SampleTimes(300, 5.0, 1.0)
READING = {"read": 30, "": 2}
SLEEPING = {"sleep": 30}
RUNNING = {"": 30}
AT_SAMPLER = {"mine/sampler.py:7 __iter__": 9, "the workers": 2}
AT_COLLATE = {"collate": {"mine/data.py:3 collate": 20}}
AT_WORKERS = {"wait": {"the workers": 20}}


@pytest.fixture(autouse=True)
def two_cores(monkeypatch):
    monkeypatch.setattr(causes, "count_cores", lambda: 2)


# What was seen of a loop, of which each batch waits 50 ms where samples were seen, unless the row
# says otherwise; the causes and their shares, in order; words of the first one.
@pytest.mark.parametrize(
    ("loop", "expected", "words"),
    [
        ({"waits": spread(0.005), "between": spread(0.005)}, {}, ""),
        # Every run starts once, so one long wait is no cause.
        ({"waits": [3.0, *[0.0] * 99]}, {}, ""),
        (
            {"between": spread(0.06)},
            {"between": 0.6},
            r"busy for 60 ms .*optimizer.step",
        ),
        (
            {"between": spread(0.8, every=10)},
            {"periodic": 0.8},
            r"every 10 batches.* busy for 0.8 s",
        ),
        (
            {**PASSES, "restarts": True},
            {"restarts": 0.3},
            r"after the first waits 1 s .*3\)\. Workers start again.*persistent_workers=True",
        ),
        # Workers stay, so that cure is in place.
        (
            PASSES,
            {"starts": 0.3},
            r"waits 1 s for its first batch \(later passes: 3\)\. No batch is ready",
        ),
        # Workers start anew, but any batch takes as long to load as the first one.
        (
            {
                **PASSES,
                "restarts": True,
                "times": SampleTimes(400, 90.0, 10.0),
            },
            {"starts": 0.3},
            "No batch is ready",
        ),
        # Workers start anew, but that is not what takes the time.
        (
            {
                **PASSES,
                "restarts": True,
                "places": {"start": AT_SAMPLER},
            },
            {"main_process": 0.3},
            r"This process was seen at mine/sampler.py:7 __iter__ \(in 9 of 11 looks\)",
        ),
        (
            {
                "times": IDLE,
                "places": {"wait": AT_SAMPLER},
            },
            {"main_process": 0.5},
            r"before it takes a batch\. This process was seen at mine/sampler.py:7.*look at why",
        ),
        (
            {
                "times": IDLE,
                "places": {"wait": {"the hand-off": 9, "the workers": 2}},
            },
            {"hand-off": 0.41},
            r"busy receiving what workers send \(in 9 of 11",
        ),
        (
            {"times": IDLE},
            {"wait": 0.5},
            "Workers are mostly idle.*was not seen.*would not help",
        ),
        (
            {"times": WAITED},
            {"wait": 0.5},
            "takes 70.0 ms: 68.0 ms .*for a reason that was not seen",
        ),
        (
            {
                "times": WAITED,
                "looks": READING,
            },
            {"read": 0.5},
            "65.6 ms in reads of files.*Read many files at once",
        ),
        # A slowed folder sleeps in its reads. What sleeps elsewhere, as a locked database does
        # between its reads, is not said to read.
        (
            {
                "times": WAITED,
                "looks": SLEEPING,
                "is_slowed": True,
            },
            {"read": 0.5},
            "68.0 ms in reads of files",
        ),
        (
            {"times": WAITED, "looks": SLEEPING},
            {"sleep": 0.5},
            "68.0 ms asleep",
        ),
        # One process reads while it holds the lock.
        (
            {
                "times": WAITED,
                "looks": {"lock": 14, "read": 16},
            },
            {"lock": 0.5},
            "in reads of files, .* ms for a lock",
        ),
        # The process that holds the lock waits for another one, as at a queue.
        (
            {
                "times": WAITED,
                "looks": {"lock": 15, "other_process": 15},
            },
            {"other_process": 0.5},
            "for a lock that.*take turns: give each worker",
        ),
        # A thread of the sample's own works and waits for a core, and most looks show nothing else.
        (
            {
                "times": HALF,
                "looks": {"wait": 1, "": 29},
            },
            {"work": 0.5},
            "42.7 ms until a core is free, 25.0 ms of work",
        ),
        # No look saw a worker in collate_fn. Cheaper loading comes before the cores that it takes.
        (
            {"times": SampleTimes(200, 1.0, 1.0, other_cpu_s=5.0), "queued_s": 6.0},
            {"hand-off": 0.5, "contention": 0.6},
            r"25.0 ms of work after it \(collate_fn.*so it is the hand-off.*batches smaller",
        ),
        # The work after samples waits for a core, too. Looks saw it in collate_fn.
        (
            {
                "times": SampleTimes(200, 19.0, 4.0, other_cpu_s=6.0),
                "looks": RUNNING,
                "places": AT_COLLATE,
            },
            {"collate": 0.5},
            "75.0 ms until a core is free, 30.0 ms of work after it.*Make collate_fn cheaper",
        ),
        (
            {
                "waits": RARE,
                "times": SampleTimes(200, 6.0, 3.0),
                "seen": {24: (37,), 49: (36, 37), 74: (5,), 99: (37,), 100: (37,)},
            },
            {"slow_sample": 0.4},
            "3 batches waited 1 s each while sample 37 was loaded: 75% of all waits.*sample 37",
        ),
        # The slow sample takes most of the time, and few of the slow batches.
        (
            {
                "waits": [0.0, *[1.0] * 3, *[0.2] * 4, *[0.0] * 92],
                "seen": dict.fromkeys(range(4), (37,)),
            },
            {"slow_sample": 0.38},
            "79% of all waits",
        ),
        # Another wait takes most of the time.
        (
            {
                "waits": [0.0, *[0.2] * 3, 2.0, *[0.0] * 95],
                "times": SLEPT,
                "seen": dict.fromkeys(range(4), (7,)),
                "looks": SLEEPING,
            },
            {"sleep": 0.26},
            "asleep",
        ),
        # The samples are always in one batch, so nobody knows which is slow.
        (
            {
                "waits": RARE,
                "times": SLEPT,
                "seen": {24: (37, 38), 49: (37, 38)},
                "looks": SLEEPING,
            },
            {"sleep": 0.4},
            "asleep",
        ),
        (
            {"workers": 0},
            {"wait": 0.5},
            "loads the samples itself.*was not seen.*Use worker processes",
        ),
        (
            {
                "workers": 0,
                "looks": {"": 1, "read": 9},
            },
            {"read": 0.5},
            "loads the samples itself.*90.0% in reads of files.*Read many files at once",
        ),
        # The loader does not say that it has workers.
        (
            {
                "workers": 0,
                "looks": {"": 9, "read": 2},
                "places": AT_WORKERS,
            },
            {"work": 0.5},
            "^In 11 looks at samples.*Make a sample cheaper",
        ),
        # Contention has its share of the loop, not of the step.
        (
            {"queued_s": 2.5},
            {"contention": 0.25},
            r"torch\.set_num_threads\(1\)",
        ),
        # Where workers have threads of their own, these have the cores.
        (
            {
                "looks": RUNNING,
                "queued_s": 6.0,
                "places": {"sample": {OWN_THREADS: 20}},
            },
            {"contention": 0.6, "work": 0.5},
            r"If workers have threads of their own, use fewer",
        ),
        # Another loader has its share of the step, or of what follows it.
        (
            {
                "places": {"step": {OTHER_LOADER: 5, "train.py:7": 15}},
            },
            {"other_loader": 0.25},
            "Beside its own batches, the loop waits for another loader",
        ),
        (
            {
                "between": spread(0.06),
                "places": {"between": {OTHER_LOADER: 8, "main.py:3 train": 2}},
            },
            {"other_loader": 0.48},
            "",
        ),
        (
            {"memory": SimpleNamespace(readings=make_readings(2 * MB))},
            {"memory": 0.0},
            "if this goes on, memory is full at batch",
        ),
        (
            {
                "times": BUSY,
                "looks": RUNNING,
                "workers": 4,
                "queued_s": 6.0,
            },
            {"too_many_workers": 0.5},
            "4 workers share 2 cores.*num_workers=2",
        ),
        # Other programs take the cores: the samples wait for one, or the loop itself.
        (
            {
                "times": BUSY,
                "looks": RUNNING,
                "workers": 4,
                "others_s": 14.0,
            },
            {
                "other_programs": 0.5,
                "work": 0.5,
            },
            "other programs keep 1.4 of 2 cores busy",
        ),
        (
            {"queued_s": 7.0, "others_s": 14.0},
            {"other_programs": 0.7},
            "",
        ),
        # Workers are mostly idle, and no wait shows a sample, or most waits do.
        (
            {
                "waits": spread(0.02),
                "times": FEW,
                "looks": RUNNING,
                "places": AT_WORKERS,
                "inside": 2,
            },
            {"wait": 0.2},
            CURES["idle"],
        ),
        # Workers are busy after their samples, or in them, or one of them in one.
        (
            {
                "times": AFTER,
                "looks": RUNNING,
                "places": AT_WORKERS,
                "inside": 4,
                "outside": 15,
            },
            {"collate": 0.5},
            "",
        ),
        (
            {
                "times": AFTER,
                "looks": RUNNING,
                "places": AT_WORKERS,
                "inside": 15,
                "outside": 15,
            },
            {"work": 0.5},
            "",
        ),
    ],
)
def test_causes_stand_in_their_order_with_their_shares_and_cures(loop, expected, words):
    if "waits" not in loop and {"times", "looks", "workers"} & loop.keys():
        loop = {**loop, "waits": spread(0.05)}
    result = find(**loop)
    assert [cause.id for cause in result] == list(expected)
    # A first batch is no wait.
    assert [cause.share for cause in result] == pytest.approx(list(expected.values()), rel=0.02)
    assert not words or re.search(words, f"{result[0].why} {result[0].next}"), result


def test_the_work_of_workers_is_named_by_the_stage_with_the_most_cpu_time():
    work = Cause("work", 0.5, "why", "next")
    sample = Stage("sample", 2, 3, 20, mean_ms=20)
    assert refine_causes([work], [], waits=True) == [work]
    assert refine_causes([work], [sample], waits=True) == [work]
    read = Stage("read", 30, 40, 1, mean_ms=30)
    decode = Stage("decode", 9, 10, 9, mean_ms=9)
    (cause,) = refine_causes([work], [read, decode], waits=True)
    assert cause.id == "decode"
    assert cause.why.endswith("decode takes 9 ms of CPU time an image.")
