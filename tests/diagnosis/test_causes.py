"""Each cause of a slow loop is named with its share and its cure."""

import re
from collections import Counter

import numpy as np
import pytest

from colab_utils.diagnosis import causes, waits
from colab_utils.diagnosis.causes import find_causes, refine_causes
from colab_utils.diagnosis.cures import CURES, Cause
from colab_utils.diagnosis.looks import OTHER_LOADER
from colab_utils.diagnosis.memory_growth import Growth
from colab_utils.diagnosis.processes import SampleTimes
from colab_utils.diagnosis.stages import Stage
from colab_utils.diagnosis.summary import LoopRecord
from colab_utils.diagnosis.timing import CpuUse

_USUAL_USE = {"cpu_s": 5.0, "others_s": 0.0, "queued_s": 0.0}


def make_record(*, looks=None, places=None, inside=0, outside=0, threads=10, **settings):
    """Two workers that take turns with nobody, in a loop of ten seconds.

    ``looks`` counts what workers were seen to wait for, ``places`` where the loop was in a phase,
    ``inside`` and ``outside`` the looks at a wait in which a busy worker loaded a sample, or did
    not, ``threads`` those that ten running workers had to run.
    """
    record = LoopRecord([])
    record.looks._workers_at[True] = inside
    record.looks._workers_at[False] = outside
    # In ten looks, a worker had so many threads to run.
    record.looks._extra_threads = threads - 20
    record.looks.waits.update(looks or {})
    for phase, counts in (places or {}).items():
        record.looks._places[phase] = Counter(counts)
    use = [settings.pop(name, usual) for name, usual in _USUAL_USE.items()]
    usual = {"workers": 2, "use": CpuUse(*use)}
    for name, value in {**usual, **settings}.items():
        assert hasattr(record, name)
        setattr(record, name, value)
    return record


def find(waits=None, between=None, firsts=(0,), **settings):
    """The causes in a loop of 100 batches that takes ten seconds."""
    waits = np.full(100, 0.0) if waits is None else np.array(waits, float)
    between = np.zeros(100) if between is None else np.array(between, float)
    return find_causes(
        waits, between, np.isin(np.arange(100), firsts), 10.0, make_record(**settings)
    )


def spread(value, *, every=1):
    return [value if number % every == every - 1 else 0.0 for number in range(100)]


def test_a_loop_that_never_waits_has_no_cause():
    assert find(waits=spread(0.005), between=spread(0.005)) == []
    # Every run starts once, so one long wait is no cause.
    assert find(waits=[3.0, *[0.0] * 99]) == []


@pytest.mark.parametrize(
    ("loop", "id", "words"),
    [
        ({"between": spread(0.06)}, "between", r"busy for 60 ms .*optimizer.step"),
        (
            {"between": spread(0.8, every=10)},
            "periodic",
            r"every 10 batches.* busy for 0.8 s",
        ),
        (
            {
                "waits": spread(1.0, every=25),
                "firsts": (24, 49, 74, 99),
                "restarts": True,
                "share": 0.3,
            },
            "restarts",
            r"after the first waits 1 s .*3\)\. Workers start again.*persistent_workers=True",
        ),
        # Workers stay, so that cure is in place.
        (
            {"waits": spread(1.0, every=25), "firsts": (24, 49, 74, 99), "share": 0.3},
            "starts",
            r"waits 1 s for its first batch \(later passes: 3\)\. No batch is ready",
        ),
        # Workers start anew, but any batch takes as long to load as the first one.
        (
            {
                "waits": spread(1.0, every=25),
                "firsts": (24, 49, 74, 99),
                "restarts": True,
                "times": SampleTimes(400, 90.0, 10.0),
                "share": 0.3,
            },
            "starts",
            r"A worker takes 0.9 s to load any batch\. No batch is ready",
        ),
        # Workers start anew, and then open a file, which takes longer than to load a batch.
        (
            {
                "waits": spread(1.0, every=25),
                "firsts": (24, 49, 74, 99),
                "restarts": True,
                "times": SampleTimes(400, 20.0, 10.0),
                "share": 0.3,
            },
            "restarts",
            r"later passes: 3\)\. Workers start again",
        ),
        # Workers start anew, but that is not what takes the time.
        (
            {
                "waits": spread(1.0, every=25),
                "firsts": (24, 49, 74, 99),
                "restarts": True,
                "places": {"start": {"mine/sampler.py:7 __iter__": 9, "the workers": 2}},
                "share": 0.3,
            },
            "main_process",
            r"This process was seen at mine/sampler.py:7 __iter__ \(in 9 of 11 looks\)",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 0.1, 0.1, worker_cpu_s=0.1),
                "places": {"wait": {"mine/sampler.py:7 __iter__": 9, "the workers": 2}},
            },
            "main_process",
            r"before it takes a batch\. This process was seen at mine/sampler.py:7.*look at why",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 0.1, 0.1, worker_cpu_s=0.1),
                "places": {"wait": {"the hand-off": 9, "the workers": 2}},
                "share": 0.41,
            },
            "hand-off",
            r"busy receiving what workers send \(in 9 of 11",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 0.1, 0.1, worker_cpu_s=0.1)},
            "wait",
            r"Workers are mostly idle.*was not seen.*would not help",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 0.4)},
            "wait",
            r"takes 70 ms: 68 ms for a reason that was not seen",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 200 * 300_000),
                "looks": {"read": 30, "": 2},
            },
            "read",
            r"65.6 ms in reads of files. A sample reads 300.0 kB at 4.4 MB/s: most of the wait",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 200 * 4_000_000),
                "looks": {"read": 30, "": 2},
            },
            "read",
            r"A sample reads 4.0 MB at 58.8 MB/s: the bandwidth is the limit. .*Shrink",
        ),
        # A slowed folder sleeps in its reads. What sleeps elsewhere, as a locked database does
        # between its reads, is not said to read.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 200 * 2_000),
                "looks": {"sleep": 30},
                "is_slowed": True,
            },
            "read",
            r"68 ms in reads of files. A sample reads 2.0 kB",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 200 * 2_000),
                "looks": {"sleep": 30},
            },
            "sleep",
            r"68 ms asleep",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 5.0),
                "looks": {"lock": 30, "": 20},
            },
            "lock",
            r"42 ms for a lock that other processes hold, 25 ms of work.*would not help",
        ),
        # One process reads while it holds the lock.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4),
                "looks": {"lock": 14, "read": 16},
            },
            "lock",
            r"in reads of files, .* ms for a lock",
        ),
        # The process that holds the lock waits for another one, as at a queue.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4),
                "looks": {"lock": 15, "process": 15},
            },
            "other_process",
            r"for a lock that.*take turns at one queue or connection",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 5.0, 200 * 6_000_000),
                "looks": {"process": 30, "": 20},
            },
            "other_process",
            r"42 ms for another process or the network",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 5.0),
                "looks": {"thread": 30, "": 20},
            },
            "wait",
            r"42 ms for another thread of the process, or a lock of its threads",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 14.0, 13.0), "cpu_s": 14.0},
            "work",
            r"65 ms of work.*1.4 of 2 cores are busy.*offline",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 4.0),
                "looks": {"": 30},
            },
            "work",
            r"50 ms until a core is free",
        ),
        (
            {"waits": spread(0.05), "times": SampleTimes(200, 1.0, 1.0, worker_cpu_s=6.0)},
            "collate",
            r"25 ms of work after it \(collate_fn",
        ),
        # The work after samples waits for a core, too.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 19.0, 4.0, worker_cpu_s=10.0),
                "looks": {"": 30},
            },
            "collate",
            r"75 ms until a core is free, 30 ms of work after it.*Make collate_fn cheaper",
        ),
        # A thread of the sample's own works and waits for a core, and no look shows anything else.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 5.0),
                "looks": {"thread": 1, "": 29},
                "cpu_s": 19.0,
            },
            "work",
            r"42.7 ms until a core is free, 25 ms of work",
        ),
        # Samples are not seen, and this process receives a batch in some of the looks.
        (
            {
                "waits": spread(0.05),
                "looks": {"": 30},
                "places": {"wait": {"the hand-off": 3, "the workers": 2}},
            },
            "work",
            r"In 30 looks at samples: 100% of work",
        ),
        # With workers by spawn the samples are not seen, but what they wait for is.
        (
            {"waits": spread(0.05), "looks": {"read": 30, "": 10}},
            "read",
            r"In 40 looks at samples: 75% in reads of files, 25% of work",
        ),
        (
            {"waits": spread(0.05), "looks": {"": 2}},
            "wait",
            r"What samples wait for was not seen",
        ),
        # The step waits for another loader.
        (
            {"places": {"step": {"another loader": 8, "main.py:3 train": 2}}, "share": 0.8},
            "other_loader",
            r"Beside its own batches, the loop waits for another loader \(in 8 of 10 looks\)",
        ),
        # Other children of this process, such as the evaluation, are busy, too.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 14.0, 0.4, 200 * 300_000, worker_cpu_s=0.5),
                "looks": {"read": 30},
                "cpu_s": 30.0,
            },
            "read",
            r"68 ms in reads",
        ),
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 40.0, 8.0),
                "looks": {"": 30},
                "workers": 16,
            },
            "too_many_workers",
            r"16 workers share 2 cores.*num_workers=2",
        ),
        (
            {
                "waits": spread(1.0, every=25),
                "times": SampleTimes(200, 6.0, 3.0),
                "seen": {24: (37,), 49: (36, 37), 74: (5,), 99: (37,), 100: (37,)},
            },
            "slow_sample",
            r"3 batches waited 1 s each while sample 37 was loaded: 75% of all waits.*sample 37",
        ),
        # The samples are always in one batch, so nobody knows which is slow.
        (
            {
                "waits": spread(1.0, every=25),
                "times": SampleTimes(200, 6.0, 1.0),
                "seen": {24: (37, 38), 49: (37, 38)},
                "looks": {"sleep": 30},
            },
            "sleep",
            r"asleep",
        ),
        # The sample came with the first two batches, so only one of them is a late one.
        (
            {
                "waits": spread(1.0, every=25),
                "firsts": (0, 23),
                "times": SampleTimes(200, 6.0, 1.0),
                "seen": {23: (37,), 24: (37,)},
                "looks": {"sleep": 30},
            },
            "sleep",
            r"asleep",
        ),
        # Whichever sample came first opened the file, so it was slow once.
        (
            {
                "waits": spread(1.0, every=25),
                "times": SampleTimes(200, 6.0, 1.0),
                "seen": {24: (37,), 49: (8,), 74: (5,), 99: (2,)},
                "looks": {"sleep": 30},
            },
            "sleep",
            r"asleep",
        ),
        # The sample was seen twice, in a loop that waits for something else.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(201, 0.7, 0.2, 0, 6.0),
                "seen": {24: (37,), 49: (37,)},
            },
            "collate",
            r"of work after it \(collate_fn",
        ),
        (
            {
                "waits": spread(0.05),
                "workers": 0,
                "places": {"wait": {"mine/sampler.py:7 __iter__": 9, "a sample": 2}},
            },
            "main_process",
            r"at mine/sampler.py:7",
        ),
        (
            {"waits": spread(0.05), "workers": 0},
            "wait",
            r"loads the samples itself.*was not seen.*Use worker processes",
        ),
        (
            {"waits": spread(0.05), "workers": 0, "looks": {"": 9, "read": 2}},
            "work",
            r"loads the samples itself.*81.8% of work.*Use worker processes",
        ),
        (
            {"waits": spread(0.05), "workers": 0, "looks": {"": 1, "read": 9}},
            "read",
            r"loads the samples itself.*90% in reads of files.*Read many files at once",
        ),
        (
            {"waits": spread(0.05), "workers": 0, "looks": {"": 1, "sleep": 9}},
            "sleep",
            r"loads the samples itself.*90% asleep.*Use worker processes",
        ),
        # The loader does not say that it has workers.
        (
            {
                "waits": spread(0.05),
                "workers": 0,
                "looks": {"": 9, "read": 2},
                "places": {"wait": {"the workers": 9}},
            },
            "work",
            r"^In 11 looks at samples.*Make a sample cheaper",
        ),
    ],
)
def test_each_cause_is_named_with_its_cure(loop, id, words, monkeypatch):
    monkeypatch.setattr(causes, "count_cores", lambda: 2)
    monkeypatch.setattr(waits, "count_cores", lambda: 2)
    loop = dict(loop)
    share = loop.pop("share", None) or sum(loop.get("waits") or loop["between"]) / 10
    (cause,) = find(**loop)
    assert cause.id == id
    # A first batch is no wait.
    assert cause.share == pytest.approx(share, rel=0.02)
    assert re.search(words, f"{cause.why} {cause.next}"), cause


def test_two_causes_stand_in_the_order_of_their_shares():
    times = SampleTimes(200, 14.0, 0.4, 200 * 300_000)
    result = find(between=spread(0.06), waits=spread(0.02), times=times, looks={"read": 30})
    assert [cause.id for cause in result] == ["between", "read"]


def test_contention_has_its_share_of_the_loop_not_of_the_step():
    (cause,) = find(queued_s=2.5)
    assert (cause.id, cause.share) == ("contention", 0.25)
    assert find(queued_s=1.5) == []


def test_cheaper_loading_comes_before_the_cores_that_it_takes():
    loop = {"waits": spread(0.02), "looks": {"": 30}, "queued_s": 5.0}
    first, second = find(**loop)
    assert (first.id, second.id) == ("work", "contention")
    assert second.next == "Make loading cheaper, or do its work once, offline."
    # Each worker has three threads to run.
    first, second = find(**loop, threads=30)
    assert (first.id, second.id) == ("contention", "work")
    assert "torch.set_num_threads(1)" in first.next


def test_another_loader_has_its_share_of_the_step():
    (cause,) = find(places={"step": {OTHER_LOADER: 5, "train.py:7": 15}})
    assert (cause.id, cause.share) == ("other_loader", 0.25)
    assert "(in 5 of 20 looks)" in cause.why
    assert find(places={"step": {OTHER_LOADER: 1, "train.py:7": 19}}) == []


def test_memory_that_grows_is_named_beside_a_fine_loop():
    (cause,) = find(growth=Growth(2.5, 4000, {"this process": 2.5}))
    assert cause.id == "memory"
    assert "if this goes on, memory is full at batch 4,000" in cause.why


def test_too_many_workers_wait_for_cores_and_for_nothing_else(monkeypatch):
    monkeypatch.setattr(causes, "count_cores", lambda: 2)
    times = SampleTimes(200, 40.0, 5.0)
    (cause,) = find(waits=spread(0.05), times=times, looks={"lock": 30}, workers=4)
    assert cause.id == "lock"
    (cause,) = find(waits=spread(0.05), times=times, looks={"process": 20, "": 20}, workers=4)
    assert cause.id == "other_process"
    (cause,) = find(waits=spread(0.05), times=times, looks={"": 30}, workers=4, queued_s=6.0)
    assert cause.id == "too_many_workers"


@pytest.mark.parametrize(
    ("loop", "share"),
    [
        # The samples wait for a core.
        (
            {
                "waits": spread(0.05),
                "times": SampleTimes(200, 40.0, 5.0),
                "looks": {"": 30},
            },
            0.5,
        ),
        # The loop itself waits for a core.
        ({"queued_s": 7.0}, 0.7),
    ],
)
def test_other_programs_that_take_the_cores_come_first(loop, share, monkeypatch):
    monkeypatch.setattr(causes, "count_cores", lambda: 2)
    first, *_ = find(**loop, others_s=14.0, workers=4)
    assert (first.id, first.share) == ("other_programs", pytest.approx(share, rel=0.02))
    assert "other programs keep 1.4 of 2 cores busy" in first.why
    # They take too little to be the cause.
    assert "other_programs" not in [cause.id for cause in find(**loop, others_s=6.0)]


def test_another_loader_that_is_waited_for_after_a_step_is_named():
    looks = {"between": {"another loader": 8, "main.py:3 train": 2}}
    (cause,) = find(between=spread(0.06), places=looks)
    assert (cause.id, cause.share) == ("other_loader", pytest.approx(0.48))


def test_what_follows_a_step_is_named_before_another_loader_that_takes_a_small_part_of_it():
    looks = {"between": {"another loader": 3, "main.py:3 evaluate": 7}}
    first, second = find(between=spread(0.8, every=10), places=looks)
    assert (first.id, first.share) == ("periodic", pytest.approx(0.56))
    assert (second.id, second.share) == ("other_loader", pytest.approx(0.24))


def test_a_wait_that_was_not_seen_is_no_cause_beside_a_lack_of_cores(monkeypatch):
    monkeypatch.setattr(causes, "count_cores", lambda: 2)
    loop = {"waits": spread(0.05), "times": SampleTimes(200, 0.1, 0.1, worker_cpu_s=0.1)}
    assert [cause.id for cause in find(**loop)] == ["wait"]
    busy = {"others_s": 15.0, "queued_s": 6.0}
    assert [cause.id for cause in find(**loop, **busy)] == ["other_programs"]


def test_starts_of_workers_come_before_other_programs_that_slow_them_down(monkeypatch):
    monkeypatch.setattr(causes, "count_cores", lambda: 2)
    first, *others = find(
        waits=spread(1.0, every=25),
        firsts=(0, 24, 49, 74, 99),
        restarts=True,
        times=SampleTimes(200, 40.0, 5.0),
        looks={"": 30},
        others_s=14.0,
    )
    assert (first.id, first.share) == ("restarts", pytest.approx(0.4))
    assert others == []


def test_samples_are_no_cause_where_workers_are_mostly_idle_and_no_wait_shows_a_sample():
    loop = {
        "waits": spread(0.02),
        "times": SampleTimes(200, 2.2, 1.5),
        "looks": {"": 20},
        "places": {"wait": {"the workers": 8}},
    }
    (cause,) = find(**loop, inside=2)
    assert (cause.id, cause.next) == ("wait", CURES["idle"])
    # A few samples are slow, and the loop waits for each of them.
    (cause,) = find(**loop, inside=7)
    assert cause.id == "work"


def test_workers_that_are_busy_after_their_samples_are_not_said_to_load_samples():
    loop = {
        "waits": spread(0.05),
        "times": SampleTimes(300, 5.0, 1.0),
        "looks": {"": 20},
        "places": {"wait": {"the workers": 20}},
    }
    (cause,) = find(**loop, inside=4, outside=15)
    assert cause.id == "collate"
    (cause,) = find(**loop, inside=15, outside=4)
    assert cause.id == "work"
    # One worker collates while another one loads samples.
    (cause,) = find(**loop, inside=15, outside=15)
    assert cause.id == "work"


def test_of_a_sample_that_could_not_be_timed_no_other_stage_is_the_cause():
    work = Cause("work", 0.5, "why", "next")
    handoff = Stage("hand-off", 2, 3, 2, mean_ms=2.5)
    assert refine_causes([work], [], waits=True) == [work]
    sample = Stage("sample", 2, 3, 20, mean_ms=20)
    assert refine_causes([work], [sample, handoff], waits=True) == [work]
    collate = Cause("collate", 0.5, "why", "next")
    (cause,) = refine_causes([collate], [sample, handoff], waits=True)
    assert cause.id == "hand-off"


def test_a_stage_that_only_waits_is_not_the_work_of_workers():
    work = Cause("work", 0.5, "why", "next")
    read = Stage("read", 30, 40, 1, mean_ms=30)
    decode = Stage("decode", 9, 10, 9, mean_ms=9)
    (cause,) = refine_causes([work], [read, decode], waits=True)
    assert cause.id == "decode"
    assert cause.why.endswith("decode takes 9 of 10 ms of CPU time an image.")
