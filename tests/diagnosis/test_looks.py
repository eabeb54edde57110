"""What a loop and its workers are at, seen from outside."""

from __future__ import annotations

import fcntl
import gc
import multiprocessing
import os
import re
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from colab_utils.diagnosis.looks import MODEL, OTHER_LOADER, SAMPLE, Looks, find_own_line
from colab_utils.diagnosis.processes import WorkerMonitor
from colab_utils.diagnosis.system_calls import find_wait
from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store, read_file
from colab_utils.reader import Reader
from tests.diagnosis.loops import Samples, watch_pass


def _find_wait_of(act):
    """What a forked process is seen to wait for while it acts; "" is not waited for."""
    pid = os.fork()
    if not pid:
        act()
        os._exit(0)
    try:
        # On its way to where it waits, a process of a busy machine is seen elsewhere for a while.
        until_s = time.monotonic() + 10
        wait = ""
        while not wait and time.monotonic() < until_s:
            waits = Counter(_find_wait_later(pid) for _ in range(9))
            wait = waits.most_common(1)[0][0]
        return wait
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _find_wait_later(pid):
    time.sleep(0.01)
    return find_wait(pid, pid)


def _act_in_a_pool(threads, act):
    with ThreadPoolExecutor(threads) as pool:
        pool.submit(act).result()


def test_a_process_is_seen_to_wait(tmp_path):
    path = tmp_path / "lock"
    reader, writer = os.pipe()
    other_fifo = tmp_path / "other"
    os.mkfifo(other_fifo)
    shared = multiprocessing.Lock()
    own = threading.Lock()
    read_pipe = partial(os.read, reader, 1)
    with path.open("w") as file, shared, own:
        fcntl.flock(file, fcntl.LOCK_EX)
        for wait, act in (
            ("lock", lambda: fcntl.flock(path.open(), fcntl.LOCK_EX)),
            ("sleep", partial(time.sleep, 60)),
            ("read", other_fifo.read_bytes),
            ("other_process", read_pipe),
            # A lock of several processes is told from one of threads.
            ("lock", shared.acquire),
            ("wait", own.acquire),
            # A thread that waits for another one waits for what that one waits for.
            ("read", partial(_act_in_a_pool, 1, other_fifo.read_bytes)),
            ("other_process", partial(_act_in_a_pool, 2, read_pipe)),
        ):
            assert _find_wait_of(act) == wait, act
    for number in (reader, writer):
        os.close(number)


def test_workers_that_are_not_forked_are_listed_and_their_start_is_no_sample():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        looks = Looks(WorkerMonitor(None))
        until_s = time.monotonic() + 20
        while not looks.waits and time.monotonic() < until_s:
            looks.take("start", threading.current_thread())
            assert not looks.waits
            looks.take("wait", threading.current_thread())
        assert looks.waits.total() == 1
    finally:
        process.kill()
        process.join()


def test_workers_that_are_at_work_outside_of_samples_are_not_idle():
    def collate(samples):
        time.sleep(0.5)
        return samples

    watched = watch_pass(Samples(5), collate_fn=collate, num_workers=1)
    assert watched._record.looks.is_usual("collate")
    assert watched.summary().causes[0].id == "collate"


def make_looks(**phases):
    """Looks that saw each line so often."""
    looks = Looks(WorkerMonitor(None))
    for phase, lines in phases.items():
        for line, count in lines.items():
            for _ in range(count):
                looks.add(phase, "", line.split(" < "))
    return looks


def test_the_innermost_function_of_most_looks_is_named_with_the_code_that_calls_it(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("import json\n\nfor line in file:\n    json.loads(line)\n")
    outer = f"/usr/lib/python3.12/json/__init__.py:3 loads < {script}:4 <module>"
    looks = make_looks(
        step={
            f"/usr/lib/python3.12/json/decoder.py:7 parse < {outer}": 3,
            f"/usr/lib/python3.12/json/decoder.py:9 parse < {outer}": 2,
            f"{script}:3 <module>": 4,
        }
    )
    assert looks.describe_line("step", "A worker") == (
        f" A worker was seen at json/decoder.py:7 parse < {tmp_path.name}/train.py:4 <module>"
        " `json.loads(line)` (in 5 of 9 looks)."
    )


def test_what_comes_before_the_model_is_told_from_the_rest_of_a_step(tmp_path):
    script = tmp_path / "loop.py"
    script.write_text("for batch in loader:\n    crop(batch)\n    model(batch)\n")
    freeing = make_looks(
        step={f"{script}:1 <module>": 5, f"{script}:2 <module>": 1},
        **{MODEL: {f"net.py:5 forward < {script}:3 <module>": 1}},
    )
    assert freeing.measure_preparation() == (1 / 6, "in 1 of 6 looks")
    looks = make_looks(
        step={
            "a.py:9 resize < train.py:3 train < main.py:1 <module>": 6,
            "train.py:3 train < main.py:1 <module>": 2,
            "train.py:7 train < main.py:1 <module>": 4,
            "main.py:1 <module>": 1,
        },
        **{MODEL: {"net.py:5 forward < train.py:4 train < main.py:1 <module>": 5}},
    )
    assert looks.measure_preparation() == (8 / 13, "in 8 of 13 looks")


def test_a_place_is_evidence_where_half_of_five_looks_say_the_same():
    looks = make_looks(wait={"a.py:1 f": 3, "b.py:2 g": 2})
    assert looks.describe_line("wait") == " This process was seen at a.py:1 f (in 3 of 5 looks)."
    looks.add("wait", "", ["c.py:3 h"])
    looks.add("wait", "", ["c.py:3 h"])
    assert looks.describe_line("wait") == ""


class _Looking(Dataset):
    """Looks at its own thread from within a sample."""

    def __init__(self):
        self.phase = "wait"
        self.looks = Looks(WorkerMonitor(self))

    def __len__(self):
        return 8

    def __getitem__(self, index):
        looked = threading.Thread(
            target=self.looks.take, args=(self.phase, threading.current_thread())
        )
        looked.start()
        looked.join()
        return index


def test_a_line_of_a_library_is_named_where_no_other_line_runs():
    code = compile("\nline = find()", "/site-packages/mine.py", "exec")
    lines = {"find": find_own_line}
    thread = threading.Thread(target=exec, args=(code, lines))
    thread.start()
    thread.join()
    assert lines["line"] == "/site-packages/mine.py:2"


def test_a_loop_is_seen_in_a_sample_and_in_another_loader():
    dataset = _Looking()
    list(DataLoader(dataset))
    assert dataset.looks.count_kinds("wait") == {SAMPLE: 8}
    assert "test_looks.py" in dataset.looks.describe_line("sample")
    dataset.phase = "step"
    list(DataLoader(dataset))
    assert dataset.looks.find_place("step") == OTHER_LOADER
    assert re.search(
        "test_looks.py:.* `list.DataLoader.dataset..`", dataset.looks.describe_line("other")
    )
    assert dataset.looks.measure_place("step", OTHER_LOADER) == (1.0, "in 8 of 8 looks")


def test_threads_that_wait_for_their_next_task_load_no_sample(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    dataset = _Looking()
    reader = Reader(read_file, open_store(tmp_path), streams=1)
    assert [reading.take() for reading in reader.read_all([tmp_path / "file"])] == [b"1"]
    with ThreadPoolExecutor(1) as pool:
        pool.submit(int).result()
        list(DataLoader(dataset))
    reader.close()
    assert "test_looks.py" in dataset.looks.describe_line("sample")


def load_late():
    time.sleep(0.06)


class _Ahead:
    """Takes batches ahead in a thread, as many programs do."""

    def __iter__(self):
        with ThreadPoolExecutor(1) as pool:
            for _ in range(40):
                yield pool.submit(load_late).result()


class _Stream(IterableDataset):
    def __iter__(self):
        for number in range(40):
            time.sleep(0.05)
            yield number


HELPED = Samples(40, act=lambda _: _act_in_a_pool(1, load_late))


@pytest.mark.parametrize(
    ("loader", "why", "has_workers"),
    [
        (DataLoader(Samples(20, 0.1)), "This process loads the samples itself", False),
        # No line of the loop itself is to be made cheaper.
        (
            _Ahead(),
            r"A thread of this process loads the samples.*test_\w+.py:\d+ load_late ",
            False,
        ),
        (DataLoader(HELPED, num_workers=1), r"^A sample takes .* load_late `", True),
        # Samples of a stream are not seen.
        (DataLoader(_Stream(), 2, num_workers=1), r"^In \d+ looks at samples", True),
    ],
)
def test_who_loads_and_sleeps_is_named(loader, why, has_workers):
    (cause,) = watch_pass(loader).summary().causes
    assert cause.id == "sleep"
    assert re.search(why, cause.why), cause.why
    assert ("worker processes" in cause.next) != has_workers


class _Batched(Dataset):
    # This name happens to be that of a Subset's attribute.
    dataset = "photos of today"

    def __len__(self):
        return 40

    def __getitems__(self, indices):
        time.sleep(0.01 * len(indices))
        return [torch.zeros(2)] * len(indices)


class _Wrapper(Dataset):
    """Works on each sample of the dataset within it, as transforms of one split do."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __len__(self):
        return 8

    def __getitem__(self, index):
        sample = self.dataset[index]
        time.sleep(0.1)
        return sample


@pytest.mark.parametrize(
    ("dataset", "samples", "least_s"),
    [
        (_Batched(), 40, 0.4),
        (_Wrapper(Subset(Samples(8), range(8))), 8, 0.8),
        # Wrappers around built-in types are watched, too, and so are those around wrappers.
        (_Wrapper(_Wrapper([*range(8)])), 8, 1.6),
    ],
)
def test_samples_are_counted_with_the_work_of_their_wrappers(dataset, samples, least_s):
    watched = watch_pass(dataset, batch_size=4, num_workers=1)
    times = watched._record.monitor.read_times()
    assert times.samples == samples
    assert least_s <= times.wall_s < least_s + 1


def test_the_sample_of_a_wrapper_has_the_number_of_the_dataset_within():
    dataset = Samples(8, act=lambda index: time.sleep(0.8 * (index == 3)))
    samples = Subset(_Wrapper(dataset), [5, 3, 1, 7])
    watched = watch(DataLoader(samples, num_workers=1, persistent_workers=True))
    for _ in range(3):
        list(watched)
    assert {3} <= {sample for samples in watched._record.seen.values() for sample in samples}
    cures = {cause.id: cause.next for cause in watched.summary().causes}
    assert "Look at sample 3" in cures["slow_sample"]


def test_a_sample_without_a_number_is_a_sample():
    # It has an index and a size, as for training at several scales.
    watched = watch_pass(Samples(8, 0.3), sampler=[(3, 32)] * 8, num_workers=1, batch_size=1)
    assert watched._record.looks.is_usual("sample")
    assert not watched._record.looks.is_usual("collate")


def _ask(index):
    if index == 3:
        reader, _writer = os.pipe()
        os.read(reader, 1)


def test_a_sample_that_waits_for_another_process_is_not_idle():
    loader = DataLoader(_Wrapper(Samples(8, act=_ask)), num_workers=1)
    with pytest.raises(ColabUtilsError, match=r"\(pid \d+\) waits in read, at sample 3\. "):
        list(watch(loader, timeout_s=1, on_stall="raise"))


def test_a_look_at_other_threads_keeps_nothing():
    monitor = WorkerMonitor(None)
    alive = weakref.ref(monitor)
    gc.disable()
    try:
        list(monitor.list_helpers(threading.main_thread()))
        del monitor
        assert alive() is None
    finally:
        gc.enable()
