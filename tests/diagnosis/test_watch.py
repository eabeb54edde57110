"""The watch: what it says of each kind of stall, that it ends a wait, and that nothing stays."""

import gc
import multiprocessing
import os
import resource
import signal
import sys
import threading
import time
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    Sampler,
    Subset,
)

from colab_utils.diagnosis import passes
from colab_utils.diagnosis.watch import WatchedLoader, watch
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.loader import make_loader
from tests.diagnosis.loops import Samples, collate

pytestmark = [
    pytest.mark.filterwarnings("ignore::colab_utils.errors.ColabUtilsWarning"),
    pytest.mark.timeout(40),
]
# Something happens at the sample of this index.
BAD = 3
TIMEOUT_S = 0.5


class _Photos(Dataset):
    """Files with a number in each; at sample ``BAD`` something happens first."""

    def __init__(self, folder, n=8, act=None):
        self.paths = [folder / f"{index}.txt" for index in range(n)]
        self.act = act
        for index, path in enumerate(self.paths):
            path.write_text(str(index))

    def __len__(self):
        return len(self.paths)

    def find_path(self, index):
        return self.paths[index]

    def __getitem__(self, index):
        if index == BAD and self.act:
            self.act()
        number = int(self.paths[index].read_text())
        return torch.zeros((3, 8, 8), dtype=torch.uint8), {
            "boxes": torch.tensor([[0.0, 0.0, 4.0, 4.0]]),
            "labels": torch.tensor([1]),
            "masks": torch.ones((1, 8, 8), dtype=torch.uint8),
            "image_id": number,
            "area": torch.tensor([16.0]),
            "iscrowd": torch.tensor([0]),
        }


_KINDS = {
    "torch": partial(DataLoader, num_workers=2, collate_fn=collate),
    "torch alone": partial(DataLoader, collate_fn=collate),
    "processes": partial(make_loader, workers=2, shuffle=False),
    "alone": partial(make_loader, workers=0, shuffle=False),
}


def _list_ids(watched):
    return [int(target["image_id"]) for _, targets in watched for target in targets]


def _kill_self():
    # Meanwhile, other threads of this worker go on to later batches.
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


def _exit():
    # Where this process does not wait for a batch, torch's own error comes.
    time.sleep(0.5)
    sys.exit(3)


def _end_workers():
    """A loader that failed may let go of its workers late."""
    # The handler of torch raises wherever this process is when a worker ends, and an exit code that
    # is taken at that moment would be lost.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        process.kill()
        process.join()
    signal.signal(signal.SIGCHLD, handler)


def _burn_until(path):
    while not path.exists():
        sum(range(1000))


@pytest.fixture(autouse=True)
def _leaves_nothing(few_objects):
    """No process or thread stays."""

    def list_all():
        gc.collect()
        threads = {
            thread.name for thread in threading.enumerate() if "QueueFeeder" not in thread.name
        }
        return multiprocessing.active_children(), threads

    before = list_all()
    yield
    deadline = time.monotonic() + 10
    while list_all() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert list_all() == before


@pytest.mark.clock
@pytest.mark.parametrize("kind", _KINDS)
def test_only_slow_is_told_from_a_read_that_hangs_and_both_are_said(tmp_path, kind):
    flag = tmp_path / "flag"
    dataset = _Photos(tmp_path, act=partial(_burn_until, flag))
    # The opening of this file waits for somebody who writes to it.
    fifo = dataset.paths[BAD]
    fifo.unlink()
    os.mkfifo(fifo)
    watched = watch(_KINDS[kind](dataset, batch_size=2), timeout_s=TIMEOUT_S)

    def release():
        for times, act in enumerate((flag.touch, lambda: fifo.write_text(str(BAD))), 1):
            while len(watched.stalls) < times:
                time.sleep(0.01)
            act()

    thread = threading.Thread(target=release, daemon=True)
    thread.start()
    with pytest.warns(
        ColabUtilsWarning, match=rf"waits in a read \(openat of {fifo}\), at sample {BAD}"
    ):
        assert _list_ids(watched) == list(range(8))
    thread.join()
    slow, read = watched.stalls
    assert (slow.verdict, slow.seen.sample, read.verdict) == ("slow", BAD, "read")
    is_alone = kind.endswith("alone")
    assert is_alone == any(line.endswith(" __getitem__") for line in read.seen.stack)
    assert is_alone == (read.job.worker is None)
    # A busy machine may add seconds to the 1 s that it should take.
    assert TIMEOUT_S <= slow.waited_s < TIMEOUT_S + 5


def _watch_sleeper():
    sleeper = (time.sleep(4 * TIMEOUT_S) for _ in range(1))
    return watch(sleeper, timeout_s=TIMEOUT_S, on_stall="raise")


def test_raise_in_another_thread_waits_for_the_loader():
    watched = _watch_sleeper()
    with (
        pytest.warns(ColabUtilsWarning, match="waits in clock_nanosleep"),
        ThreadPoolExecutor(1) as pool,
    ):
        error = pool.submit(list, watched).exception()
    assert isinstance(error, ColabUtilsError)
    assert [str(error)] == [str(stall) for stall in watched.stalls]


class _Stream(IterableDataset):
    def __iter__(self):
        yield 0
        time.sleep(60)


class _Stuck(Sampler):
    def __iter__(self):
        time.sleep(60)
        yield 0


def _catch_all():
    with suppress(Exception):
        time.sleep(30)
    yield


@pytest.mark.parametrize(
    ("make", "words"),
    [
        # A stream stops in a worker.
        (partial(DataLoader, _Stream(), num_workers=1), r"worker 0 .*waits in clock_nanosleep"),
        # A sampler that hangs is no fault of the workers.
        (
            partial(DataLoader, range(8), sampler=_Stuck(), num_workers=1),
            r"this process waits in clock_nanosleep, in test_watch.py:\d+ __iter__",
        ),
        # The loader catches all errors.
        (_catch_all, "this process waits in clock_nanosleep"),
    ],
)
def test_raise_ends_any_wait(make, words):
    pressed = []
    before = signal.signal(signal.SIGINT, lambda *_: pressed.append(1))
    watched = watch(make(), timeout_s=TIMEOUT_S, on_stall="raise")
    try:
        with pytest.raises(ColabUtilsError, match=words) as caught:
            list(watched)
    finally:
        signal.signal(signal.SIGINT, before)
    assert signal.getsignal(passes.INTERRUPT) == signal.SIG_DFL
    assert "at sample" not in str(caught.value)
    assert len(watched.stalls) == 1
    # It is no Ctrl-C, and shows nothing of how the wait was ended.
    assert not pressed
    assert caught.value.__context__ is None
    _end_workers()


@pytest.mark.parametrize(
    ("kind", "act", "words"),
    [
        ("torch", _kill_self, r"killed by signal: Killed\).*too little memory: use fewer workers"),
        ("processes", _kill_self, "killed by signal: Killed"),
        ("torch", _exit, r"exit code 3\).*load with workers=0"),
    ],
)
def test_a_worker_that_ends_is_an_error_with_the_verdict(tmp_path, kind, act, words):
    watched = watch(
        _KINDS[kind](
            Subset(_Photos(tmp_path, act=act), [0, 1, 2, 4, BAD]),
            batch_size=2,
        )
    )
    with pytest.raises(ColabUtilsError, match=rf"worker \d \(pid \d+\) ended \({words}") as caught:
        _list_ids(watched)
    message = str(caught.value)
    # The message names the sample of the dataset and not 4, its index in the Subset.
    assert f"at sample {BAD} ({tmp_path / str(BAD)}.txt)" in message
    assert "\n" not in message
    assert watched.stalls[0].verdict == "dead"
    _end_workers()


@pytest.mark.clock
def test_a_lock_held_across_fork(tmp_path):
    lock = threading.Lock()

    def take():
        with lock:
            pass

    watched = watch(
        _KINDS["processes"](_Photos(tmp_path, act=take), batch_size=2),
        timeout_s=TIMEOUT_S,
        on_stall="raise",
    )
    # The workers are forked while the lock is held.
    words = f"waits for a lock, at sample {BAD} .*start threads after the workers"
    with lock, pytest.raises(ColabUtilsError, match=words):
        _list_ids(watched)


def _limit_files(_worker):
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))


def test_a_batch_that_finds_no_shared_memory():
    """A limit on files stands for a full /dev/shm: torch prints an error, drops the batch, and
    waits for ever.
    """
    loader = DataLoader(
        torch.zeros(6, 1 << 20), num_workers=1, collate_fn=list, worker_init_fn=_limit_files
    )
    watched = watch(loader, timeout_s=TIMEOUT_S, on_stall="raise")
    with pytest.raises(
        ColabUtilsError,
        match=r"worker 0 .*is idle, but its batch never arrived.*If /dev/shm is full",
    ):
        list(watched)
    _end_workers()


@pytest.mark.parametrize("kind", _KINDS)
def test_a_healthy_loader_is_left_alone(tmp_path, kind):
    watched = watch(_KINDS[kind](_Photos(tmp_path), batch_size=2), timeout_s=20)
    assert _list_ids(watched) == _list_ids(watched) == list(range(8))
    assert watched.stalls == []
    assert len(watched) == 4
    # Only workers wrap the method.
    assert not hasattr(_Photos.__getitem__, "__wrapped__")


def _break(index):
    raise KeyError("no such photo")


@pytest.mark.parametrize("workers", [0, 1])
def test_the_loaders_own_errors_come_through_and_name_the_sample(workers):
    loader = DataLoader(Subset(Samples(act=_break), [2, 1]), 2, num_workers=workers)
    with pytest.raises(KeyError, match="no such photo") as caught:
        list(watch(loader, timeout_s=20))
    if workers:
        assert str(caught.value).startswith("Sample 2 failed. Caught KeyError")
    else:
        assert "Sample 2 of the dataset raised this error." in caught.value.__notes__
    _end_workers()


def _end(index):
    if index == BAD:
        next(iter(()))


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_that_ends_the_pass_is_named(workers):
    watched = watch(DataLoader(Samples(4, act=_end), num_workers=workers))
    with pytest.warns(
        ColabUtilsWarning, match=f"after 3 of 4 batches: sample {BAD} raised StopIteration"
    ):
        assert len(list(watched)) == 3


class _Short(Sampler):
    def __len__(self):
        return 4

    def __iter__(self):
        return iter([0, 1])


class _Resumed(_Short):
    """A loader that goes on where it stood."""

    def state_dict(self):
        return {}


def test_only_a_pass_that_ends_too_early_is_reported():
    with pytest.warns(ColabUtilsWarning, match="after 2 of 4 batches: no error came"):
        list(watch(DataLoader(range(4), sampler=_Short())))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(watch(_Resumed())) == [0, 1]


def _clone(samples):
    return [sample.clone() for sample in samples]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_files_that_are_used_up_are_named():
    loader = DataLoader(torch.zeros(240, 2), 30, num_workers=1, collate_fn=_clone)
    watched = watch(loader, timeout_s=2, on_stall="raise")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 40, before[1]))
    kept = []
    try:
        with pytest.raises(ColabUtilsError, match="ulimit -n"):
            kept.extend(watched)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    _end_workers()


def test_a_worker_that_ended_between_two_passes_is_named(tmp_path):
    loader = DataLoader(
        _Photos(tmp_path), batch_size=2, num_workers=1, collate_fn=collate, persistent_workers=True
    )
    watched = watch(loader)
    _list_ids(watched)
    # Without its handler, torch does not notice the end at once.
    handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
    try:
        with pytest.raises(ColabUtilsError, match=r"worker 0 .* ended .killed by signal: Killed"):
            _list_ids(watched)
    finally:
        signal.signal(signal.SIGCHLD, handler)


@pytest.mark.parametrize(
    ("loader", "arguments", "message"),
    [
        ([1], {"timeout_s": 0}, "expected timeout_s over 0, found 0"),
        ([1], {"on_stall": "skip"}, "on_stall must be one of report, raise; it is 'skip'"),
        (5, {}, "The int cannot be iterated over"),
        ("images/train", {}, "The str cannot be iterated over"),
    ],
)
def test_arguments_that_cannot_be_are_refused(loader, arguments, message):
    with pytest.raises(ColabUtilsError, match=message):
        watch(loader, **arguments)


class _Pixels:
    """Stands for a large array."""


def test_what_is_looked_at_is_freed_with_its_call():
    decoded = []

    def decode(_):
        pixels = _Pixels()
        decoded.append(weakref.ref(pixels))
        time.sleep(0.4)

    gc.collect()
    gc.disable()
    try:
        assert len(list(WatchedLoader(DataLoader(Samples(3, act=decode)), 1, "raise"))) == 3
        assert [pixels() for pixels in decoded] == [None] * 3
    finally:
        gc.enable()
