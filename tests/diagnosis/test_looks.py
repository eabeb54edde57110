"""What a loop and its workers are at, seen from outside."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import queue
import re
import sys
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset

from colab_utils.diagnosis.looks import MODEL, OTHER_LOADER, SAMPLE, Looks, Places
from colab_utils.diagnosis.processes import WorkerMonitor, list_other_workers
from colab_utils.diagnosis.system_calls import classify_call, find_wait, measure_memory_part
from colab_utils.diagnosis.watch import watch
from colab_utils.errors import ColabUtilsError
from colab_utils.files import read_file
from colab_utils.reader import Reader

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning"),
    pytest.mark.skipif(
        sys.platform != "linux", reason="processes are looked at through Linux's /proc"
    ),
]


@pytest.mark.parametrize(
    ("call", "path", "kind"),
    [
        ("shared futex", "", "lock"),
        ("futex", "", "thread"),
        ("flock", "", "lock"),
        ("clock_nanosleep", "", "sleep"),
        ("pread64", "/data/1.jpg", "read"),
        ("openat", "/data/1.jpg", "read"),
        # The kernel waits here for a page of a mapped file.
        ("folio_wait_bit_common", "", "read"),
        ("read", "socket:[7]", "process"),
        ("recvfrom", "", "process"),
        ("wait4", "", "process"),
        ("", "", ""),
    ],
)
def test_a_system_call_says_what_is_waited_for(call, path, kind):
    assert classify_call(call, path) == kind


def _find_wait_of(act):
    """What a forked process is seen to wait for while it acts; "" is not waited for."""
    pid = os.fork()
    if not pid:
        act()
        os._exit(0)
    try:
        until_s = time.monotonic() + 10
        while not find_wait(pid, pid) and time.monotonic() < until_s:
            time.sleep(0.01)
        return Counter(find_wait(pid, pid) for _ in range(9)).most_common(1)[0][0]
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def test_a_process_is_seen_to_wait(tmp_path):
    path = tmp_path / "lock"
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert _find_wait_of(lambda: fcntl.flock(path.open(), fcntl.LOCK_EX)) == "lock"
    assert _find_wait_of(lambda: time.sleep(60)) == "sleep"
    assert _find_wait_of(lambda: fifo.read_bytes()) == "read"
    # Another process writes what comes out of a pipe, whether that has a name or not.
    named = os.open(fifo, os.O_RDWR)
    assert _find_wait_of(lambda: os.read(named, 1)) == "process"
    os.close(named)
    reader, writer = os.pipe()
    assert _find_wait_of(lambda: os.read(reader, 1)) == "process"
    os.close(reader)
    os.close(writer)


@pytest.mark.parametrize(("threads", "wait"), [(1, "read"), (2, "process")])
def test_a_thread_that_waits_for_another_one_waits_for_what_that_waits_for(threads, wait, tmp_path):
    reader, writer = os.pipe()
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    calls = {"read": fifo.read_bytes, "process": partial(os.read, reader, 1)}

    def read_in_a_pool():
        with ThreadPoolExecutor(threads) as pool:
            pool.submit(calls[wait]).result()

    assert _find_wait_of(read_in_a_pool) == wait
    os.close(reader)
    os.close(writer)


def test_a_lock_of_several_processes_is_told_from_one_of_threads():
    shared = multiprocessing.Lock()
    own = threading.Lock()
    with shared, own:
        assert _find_wait_of(shared.acquire) == "lock"
        assert _find_wait_of(own.acquire) == "thread"


def test_workers_that_are_not_forked_are_listed():
    for method in ("spawn", "forkserver"):
        process = multiprocessing.get_context(method).Process(target=time.sleep, args=(60,))
        process.start()
        try:
            until_s = time.monotonic() + 20
            while process.pid not in list_other_workers() and time.monotonic() < until_s:
                time.sleep(0.05)
            assert list_other_workers() == [process.pid]
        finally:
            process.kill()
            process.join()
    assert list_other_workers() == []


def test_a_start_of_a_spawned_worker_is_no_sample():
    process = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(60,))
    process.start()
    try:
        looks = Looks(WorkerMonitor(None))
        until_s = time.monotonic() + 20
        while not looks.waits and time.monotonic() < until_s:
            looks.take("wait", threading.current_thread(), starts=True)
            assert not looks.waits
            looks.take("wait", threading.current_thread())
        assert looks.waits.total() == 1
    finally:
        process.kill()
        process.join()


class _Uneven(Dataset):
    """The first sample opens something; sample 3 is slow each time."""

    is_open = False
    slow_s = 0.1

    def __len__(self):
        return 8

    def __getitem__(self, index):
        if not self.is_open:
            time.sleep(0.3)
            self.is_open = True
        time.sleep(self.slow_s if index == 3 else 0.001)
        return index


@pytest.mark.parametrize("work_s", [0.0, 0.5])
def test_workers_that_are_at_work_outside_of_samples_are_not_idle(work_s, capsys):
    def collate(samples):
        time.sleep(work_s)
        return samples

    def order():
        for number in range(5):
            time.sleep(0.5 - work_s)
            yield number

    loader = DataLoader(
        _Uneven(),
        sampler=order(),
        batch_size=1,
        collate_fn=collate,
        num_workers=1,
    )
    watched = watch(loader)
    list(watched)
    assert watched._record.looks.is_usual("collate") == (work_s > 0)
    assert (watched.summary().causes[0].id == "collate") == (work_s > 0)


def test_a_process_that_loads_samples_itself_says_what_they_wait_for(capsys):
    watched = watch(DataLoader(_Uneven(), batch_size=1, sampler=[3] * 20))
    list(watched)
    (cause,) = watched.summary().causes
    assert cause.id == "sleep"
    assert "This process loads the samples itself" in cause.why


def make_looks(**phases):
    """Looks that saw each line so often."""
    looks = Looks(WorkerMonitor(None))
    for phase, lines in phases.items():
        for line, count in lines.items():
            for _ in range(count):
                looks.places[phase].add("", line.split(" < "))
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
    looks.places[MODEL] = Places()
    assert looks.measure_preparation()[0] == 0


def test_a_place_is_evidence_where_half_of_five_looks_say_the_same():
    looks = make_looks(wait={"a.py:1 f": 3, "b.py:2 g": 2})
    assert looks.describe_line("wait") == " This process was seen at a.py:1 f (in 3 of 5 looks)."
    looks = make_looks(wait={"a.py:1 f": 3, "b.py:2 g": 2, "c.py:3 h": 2})
    assert looks.describe_line("wait") == looks.describe_line("step") == ""
    # At a start, fewer looks are enough if all of them show the same.
    looks = make_looks(start={"a.py:1 f": 3}, wait={"a.py:1 f": 4})
    assert "a.py:1 f (in 3 of 3 looks)" in looks.describe_line("start")
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


def test_a_loop_is_seen_in_a_sample_and_in_another_loader():
    dataset = _Looking()
    list(DataLoader(dataset))
    assert dataset.looks.places["wait"].kinds == {SAMPLE: 8}
    assert "test_looks.py" in dataset.looks.describe_line("sample")
    dataset.phase = "step"
    list(DataLoader(dataset))
    assert dataset.looks.find_place("step") == OTHER_LOADER
    assert re.search(
        "test_looks.py:.* `list.DataLoader.dataset..`", dataset.looks.describe_line("other")
    )
    assert dataset.looks.measure_place("step", OTHER_LOADER) == (1.0, "in 8 of 8 looks")
    assert dataset.looks.measure_place("step", SAMPLE) == (0.0, "in 0 of 8 looks")
    assert dataset.looks.measure_place("between", OTHER_LOADER) == (0.0, "")


def test_threads_that_wait_for_their_next_task_load_no_sample(tmp_path):
    (tmp_path / "file").write_bytes(b"1")
    dataset = _Looking()
    reader = Reader(read_file, place=tmp_path, streams=1)
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


def test_a_loop_that_waits_for_its_own_thread_is_at_no_line_to_make_cheaper(capsys):
    watched = watch(_Ahead())
    list(watched)
    (cause,) = watched.summary().causes
    assert cause.id == "sleep"
    assert "A thread of this process loads the samples" in cause.why
    assert re.search(r"test_looks.py:\d+ load_late ", cause.why)
    assert "worker processes" in cause.next


class _Around:
    """Takes the batches of a DataLoader in a thread."""

    def __init__(self, workers):
        self.loader = DataLoader(_Uneven(), sampler=[3] * 20, num_workers=workers)

    def __iter__(self):
        batches = queue.SimpleQueue()

        def fill():
            for batch in self.loader:
                batches.put(batch)
            batches.put(None)

        thread = threading.Thread(target=fill)
        thread.start()
        yield from iter(batches.get, None)
        thread.join()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_loader_in_a_thread_is_seen(workers, capsys):
    watched = watch(_Around(workers))
    list(watched)
    (cause,) = watched.summary().causes
    assert cause.id == "sleep"
    assert cause.why.startswith("A thread of this process takes batches from a DataLoader.")
    assert re.search(r"test_looks.py:\d+ __getitem__ `time.sleep", cause.why)
    assert ("Use worker processes" in cause.next) == (workers == 0)
    assert watched._record.monitor.read_times().samples == 20 * workers


class _Helped(_Uneven):
    """Loads each sample in a thread."""

    def __getitem__(self, index):
        with ThreadPoolExecutor(1) as pool:
            return pool.submit(load_late).result() or index


@pytest.mark.parametrize("workers", [0, 1])
def test_the_thread_of_a_sample_is_seen(workers, capsys):
    watched = watch(DataLoader(_Helped(), sampler=[3] * 40, num_workers=workers))
    list(watched)
    (cause,) = watched.summary().causes
    assert cause.id == "sleep"
    assert re.search(r"test_looks.py:\d+ load_late `", cause.why)
    assert ("This process loads the samples itself" in cause.why) == (workers == 0)


class _Locked(Dataset):
    def __init__(self):
        self.lock = multiprocessing.Lock()

    def __len__(self):
        return 100

    def __getitem__(self, index):
        with self.lock:
            until_s = time.thread_time() + 0.02
            while time.thread_time() < until_s:
                pass
        return index


@pytest.mark.clock
def test_workers_that_take_turns_at_a_lock_are_named(capsys):
    watched = watch(DataLoader(_Locked(), batch_size=2, num_workers=2))
    list(watched)
    # A machine may be busy with other work, too.
    cures = {cause.id: cause.next for cause in watched.summary().causes}
    assert "More workers would not help" in cures["lock"]


class _Stream(IterableDataset):
    def __iter__(self):
        for number in range(40):
            time.sleep(0.05)
            yield number


def test_a_worker_whose_samples_are_not_seen_is_looked_at(capsys):
    watched = watch(DataLoader(_Stream(), batch_size=2, num_workers=1))
    list(watched)
    (cause,) = watched.summary().causes
    assert cause.id == "sleep"
    assert "looks at samples" in cause.why


class _Batched(Dataset):
    def __len__(self):
        return 40

    def __getitems__(self, indices):
        time.sleep(0.01 * len(indices))
        return [torch.zeros(2)] * len(indices)


def test_samples_that_come_in_batches_are_counted(capsys):
    watched = watch(DataLoader(_Batched(), batch_size=4, num_workers=2))
    assert len(list(watched)) == 10
    times = watched._record.monitor.read_times()
    assert times.samples == 40
    assert times.wall_s == pytest.approx(0.4, rel=0.5)
    assert not any("not seen" in text for text in watched.summary().unseen)


def test_a_page_that_is_written_to_counts_as_ones_own():
    block = bytearray(os.urandom(1_000_000) * 40)
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        os.read(reader, 1)
        for place in range(0, len(block), 4096):
            block[place] = 1
        time.sleep(60)
    try:
        shared = measure_memory_part(pid)
        os.write(writer, b"1")
        until_s = time.monotonic() + 10
        while measure_memory_part(pid) < shared + 18e6 and time.monotonic() < until_s:
            time.sleep(0.01)
        assert measure_memory_part(pid) - shared == pytest.approx(20e6, rel=0.2)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        os.close(reader)
        os.close(writer)
    assert measure_memory_part(pid) == 0


class _Cached(list):
    """A dataset with an attribute that happens to be called like that of a Subset."""

    dataset = "photos of today"

    def __getitem__(self, index):
        return list.__getitem__(self, index)


def test_only_a_dataset_within_a_dataset_is_watched_in_its_place():
    photos = _Cached([1, 2])
    assert WorkerMonitor(Subset(photos, [1])).dataset is photos


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
    "dataset",
    [
        _Wrapper(Subset(_Uneven(), range(8))),
        # Wrappers around built-in types are watched, too.
        _Wrapper([*range(8)]),
        # A wrapper may load several samples for one.
        _Wrapper(_Wrapper(_Wrapper(_Uneven()))),
    ],
)
def test_the_work_of_a_wrapper_belongs_to_its_samples(dataset, capsys):
    watched = watch(DataLoader(dataset, num_workers=1))
    list(watched)
    times = watched._record.monitor.read_times()
    assert times.samples == 8
    assert times.wall_s > 0.8


def test_the_sample_of_a_wrapper_has_the_number_of_the_dataset_within(capsys):
    dataset = _Uneven()
    dataset.slow_s = 0.8
    loader = DataLoader(
        Subset(_Wrapper(dataset), [5, 3, 1, 7]), num_workers=1, persistent_workers=True
    )
    watched = watch(loader)
    for _ in range(3):
        list(watched)
    assert {3} <= {sample for samples in watched._record.seen.values() for sample in samples}
    cures = {cause.id: cause.next for cause in watched.summary().causes}
    assert "Look at sample 3" in cures["slow_sample"]


class _Sized(Dataset):
    """Takes an index and a size, as for training at several scales."""

    def __len__(self):
        return 8

    def __getitem__(self, key):
        time.sleep(0.3)
        return key[0]


def test_a_sample_without_a_number_is_a_sample(capsys):
    watched = watch(DataLoader(_Sized(), sampler=[(3, 32)] * 8, num_workers=1))
    list(watched)
    assert watched._record.looks.is_usual("sample")
    assert not watched._record.looks.is_usual("collate")


class _Blend(IterableDataset):
    """Loads the samples of a map-style dataset."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        for number in range(8):
            yield self.dataset[number]


def test_samples_within_an_iterable_dataset_are_not_all_of_its_work(capsys):
    watched = watch(DataLoader(_Blend(_Uneven()), num_workers=1))
    list(watched)
    assert watched._record.monitor.read_times().samples == 0


class _Asking(_Wrapper):
    """Asks another process before it loads a sample."""

    def __getitem__(self, index):
        if index == 3:
            reader, _writer = os.pipe()
            os.read(reader, 1)
        return self.dataset[index]


def test_a_wrapper_that_waits_for_another_process_is_not_idle():
    watched = watch(DataLoader(_Asking(_Uneven()), num_workers=1), timeout_s=1, on_stall="raise")
    with pytest.raises(ColabUtilsError, match=r"\(pid \d+\) waits in read\. "):
        list(watched)


def step_first(batch):
    """Step the optimizer before the passes of the batch, as for the gradients of the last one."""
    layer = torch.nn.Linear(1000, 250)
    optimizer = torch.optim.SGD(layer.parameters())
    optimizer.step()
    for _ in range(60):
        layer(batch).square().mean().backward()


def test_passes_that_follow_the_step_of_the_optimizer_are_a_step(capsys):
    watched = watch([torch.rand(100, 1000)] * 10_000)
    for batch in watched:
        step_first(batch)
        if watched._record.looks.places["between"].kinds.total() > 8:
            break
    summary = watched.summary()
    assert {part.name: round(part.share) for part in summary.parts}["step"] == 1
    # A machine may be busy with other work, too.
    assert "between" not in [cause.id for cause in summary.causes]
    assert "at the end of a batch" in summary.unseen[0]


def test_workers_are_listed_from_the_oldest_sample_on():
    monitor = WorkerMonitor(None)
    rows = monitor._rows
    for place, since_ns in ((1, 30), (2, 10), (5, 20)):
        rows[place]["pid"] = 100 + place
        rows[place]["sample"] = place
        rows[place]["since_ns"] = since_ns
    assert list(monitor.list_samples().items()) == [(102, 2), (105, 5), (101, 1)]


@pytest.mark.parametrize(
    ("file", "place"),
    [
        (torch.autograd.profiler.__file__, ""),
        ("mine/sampler.py", "the workers"),
    ],
)
def test_a_look_at_the_profiler_of_a_loader_says_nothing(file, place):
    over = threading.Event()
    waits = compile("over.wait()", file, "exec")
    thread = threading.Thread(target=exec, args=(waits, {"over": over}))
    thread.start()
    time.sleep(0.1)
    looks = Looks(WorkerMonitor(None))
    looks.take("wait", thread)
    over.set()
    thread.join()
    assert looks.places["wait"].kinds == {place: 1}
    assert looks.places["wait"].find_line() == ("", 0)
