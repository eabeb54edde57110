"""What the worker processes of a loader do: their sample, their system call, and its file.

The system call and the file of a worker are read without its help, so this also works if it hangs.
Forked workers note their samples themselves. On systems other than Linux, most of this is unknown.
"""

import multiprocessing
import operator
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from inspect import ismethod
from time import monotonic_ns, process_time
from traceback import walk_stack, walk_tb
from types import FrameType
from typing import Any, NamedTuple

import numpy as np

from colab_utils.diagnosis.system_calls import read_call, read_ending
from colab_utils.processes import share_array, start_thread

# There are rows for the notes of this many workers.
_ROWS = 128
_HERE = os.path.dirname(__file__)
# Methods of a dataset that load samples.
_METHODS = ("__getitem__", "__getitems__", "read_packed", "read_into")
# A thread whose innermost line is in these files waits for somebody else.
SERVES = re.compile(
    "/threading.py:|/queue.py:|/selectors.py:|/multiprocessing/|/pin_memory.py:|"
    # Threads of a pool, and those of a reader, wait here for their next task.
    "/concurrent/futures/thread.py:[0-9]+ _worker|/colab_utils/reader.py:[0-9]+ _serve"
)
# A worker looks at its own stack so often.
_PAUSE_S = 0.25
# The place of a look that saw two or more busy threads of Python in a worker.
OWN_THREADS = "several threads of a worker"
# In place of the number of a sample: the worker is at no sample, or at one whose number is not
# known.
NO_SAMPLE = -1
_UNNUMBERED = -2
BLAMES = "Sample {} of the dataset raised this error."
"""A worker notes this on an error of its dataset. torch sends the text to this process."""
_BLAMED = re.compile(BLAMES.format(r"(\d+)"))
# The notes of one worker.
_ROW = np.dtype(
    [
        ("pid", np.int64),
        # This is the sample that the worker is at, or `NO_SAMPLE`, and when it began that sample.
        ("sample", np.int64),
        ("since_ns", np.int64),
        # This is the CPU time of the worker when its last sample ended.
        ("cpu_s", np.float64),
        # These are the fields of `SampleTimes`.
        ("sums", np.float64, 4),
        # These are the lines of Python at which the worker was when it last looked.
        ("stack", "S2048"),
    ]
)


class Activity(NamedTuple):
    """What a process does."""

    stack: tuple[str, ...] = ()
    """Lines of Python, the innermost first. Empty for another process."""
    call: str = ""
    """Name of the system call that it is in; "" if it is in none."""
    path: str = ""
    """The file of that call; "" if the call has none."""
    sample: int | None = None
    """Index of the sample that it loads; None if that is not known."""


class SampleTimes(NamedTuple):
    """Times of samples that forked workers of a watched loader loaded, summed over the workers."""

    samples: float = 0
    """Number of samples."""
    wall_s: float = 0.0
    """Seconds that all samples took, in total."""
    cpu_s: float = 0.0
    """CPU seconds of the workers' processes while they loaded samples."""
    other_cpu_s: float = 0.0
    """CPU seconds of the workers' processes between samples."""


# The monitors of watched loaders, by the thread that now waits for the loader. The workers that the
# thread forks then note their samples there.
waiting: dict[int, "WorkerMonitor"] = {}


class WorkerMonitor:
    """Notes of the forked workers of a loader, in memory that this process shares with them.

    A worker wraps the methods that load samples, in the class of the dataset. In this process, the
    class does not change.

    Attributes:
        dataset: The innermost dataset. Numbers of samples are its indices.
    """

    def __init__(self, dataset: Any) -> None:
        self.follow(dataset)
        self._rows = share_array(_ROW, _ROWS)
        self._rows["sample"] = NO_SAMPLE

    def follow(self, dataset: Any) -> None:
        """Note the samples of this dataset from now on."""
        # A Subset, or a wrapper like it, holds another dataset. The wrapper may work on samples,
        # too, so the methods of both are wrapped.
        self._datasets = [dataset]
        while ismethod(getattr(getattr(dataset, "dataset", None), "__getitem__", None)):
            dataset = dataset.dataset
            self._datasets.append(dataset)
        self.dataset = dataset

    def enter(self) -> None:
        """Note the samples of this process, which is a worker, from now on."""
        row: Any = self._rows[os.getpid() % _ROWS]
        row["sample"] = NO_SAMPLE
        row["pid"] = os.getpid()
        row["cpu_s"] = process_time()
        start_thread(partial(self._note_stacks, row, threading.current_thread()), "watch")
        for kind in {*map(type, self._datasets)}:
            for name in _METHODS:
                if hasattr(kind, name):
                    setattr(kind, name, self._wrap(getattr(kind, name), row))

    def _note_stacks(self, row: Any, thread: threading.Thread) -> None:
        """Note again and again where the worker is. A wait for an event is no sleep to `find_wait`,
        which looks at all threads.
        """
        pause = threading.Event()
        while not pause.wait(_PAUSE_S):
            busy = [self.read_stack(thread).stack]
            is_outside = row["sample"] == NO_SAMPLE
            waits = SERVES.search("".join(busy[0][:1]))
            if waits and not is_outside:
                # The worker waits for threads of its own.
                stacks = [seen.stack for _, seen in self.list_helpers(thread)]
                busy = [stack for stack in stacks if not SERVES.search(stack[0])] or busy
            part = "collate" if is_outside and row["sums"][0] else "sample"
            kind = OWN_THREADS if len(busy) > 1 else ""
            # A worker that is at no sample may be waiting for work.
            is_idle = waits and is_outside
            row["stack"] = b"" if is_idle else "\n".join((part, kind, *busy[0])).encode()

    def take_stacks(self) -> list[list[str]]:
        """Return where busy workers were since the last call: "sample" or "collate"; `OWN_THREADS`
        or ""; and the lines of Python, the innermost first.
        """
        stacks = [
            stack.decode(errors="replace").split("\n") for stack in self._rows["stack"] if stack
        ]
        self._rows["stack"] = b""
        return stacks

    def _wrap(self, method: Callable[..., Any], row: Any) -> Callable[..., Any]:
        """Return a method that does the same, and notes the sample that it loads in the row of this
        worker.
        """

        @wraps(method)
        def load_sample(dataset: Any, index: Any, *rest: Any) -> Any:
            sample = _read_index(index) if dataset is self.dataset else _UNNUMBERED
            count = len(index) if method.__name__ == "__getitems__" else 1
            with _mark_sample(row, sample, max(1, count)):
                return method(dataset, index, *rest)

        return load_sample

    def list_samples(self) -> dict[int, int]:
        """Return a dict from the pid of each worker to the sample that it is at, or to `NO_SAMPLE`.
        The sample that was begun first comes first.

        Where samples are not seen, a worker is at one with an unknown number unless it waits for
        work.
        """
        rows = self._rows[["since_ns", "pid", "sample"]][self._rows["pid"] > 0]
        samples = {pid: sample for _, pid, sample in sorted(rows.tolist())}
        if samples and self.sees_samples:
            return samples
        # A worker that waits for work polls a pipe.
        return {
            pid: NO_SAMPLE if read_call(pid, pid)[0] == "poll" else _UNNUMBERED
            for pid in [*samples] or _list_other_workers()
        }

    def read_times(self) -> SampleTimes:
        """Return the times of all samples so far."""
        return SampleTimes(*self._rows["sums"].sum(axis=0).tolist())

    @property
    def sees_samples(self) -> bool:
        """Return whether any sample was seen."""
        return bool(self._rows["sums"][:, 0].any() or (self._rows["sample"] != NO_SAMPLE).any())

    def forget_ended(self) -> None:
        """Forget the workers that have ended."""
        for row in self._rows:
            if row["pid"] and read_ending(int(row["pid"])):
                row["pid"] = 0

    def inspect(self, pid: int, thread: threading.Thread) -> Activity:
        """Return what a worker does in its main thread. If ``pid`` is that of this process, return
        what another thread of it does.
        """
        if pid == os.getpid():
            seen = self.read_stack(thread)
            task = thread.native_id or 0
        else:
            sample = self.list_samples().get(pid, NO_SAMPLE)
            seen = Activity(sample=sample if sample >= 0 else None)
            task = pid
        call, path = read_call(pid, task)
        return seen._replace(call=call, path=path)

    def is_idle(self, pid: int) -> bool:
        """Return whether a worker is at no sample, and waits for work."""
        row = self._rows[pid % _ROWS]
        # Samples of an iterable dataset are not seen. So a worker of which no sample was seen may
        # be at work.
        if row["sample"] != NO_SAMPLE or not row["sums"][0]:
            return False
        call, path = read_call(pid, pid)
        return call in ("poll", "read") and not path.startswith("/")

    def read_stack(self, thread: threading.Thread) -> Activity:
        """Return what another thread of this process does, as far as Python knows.

        Its sample is the index that was passed to a method of the dataset that loads samples. If
        one of these methods called another, it is the index of the outermost call.
        """
        frame = sys._current_frames().get(thread.ident or 0)
        return self._read_frames(walk_stack(frame) if frame else ())

    def list_helpers(self, thread: threading.Thread) -> Iterator[tuple[threading.Thread, Activity]]:
        """Yield the other threads of this process that run code in Python, and what they do. A
        thread that sends tensors to other processes is left out.
        """
        # A thread that reads its own stack would keep it until garbage is collected.
        for helper in {*threading.enumerate()} - {thread, threading.current_thread()}:
            activity = self.read_stack(helper)
            lines = "".join(activity.stack)
            if lines and "/multiprocessing/resource_sharer" not in lines:
                yield helper, activity

    def find_failed(self, error: BaseException) -> int | None:
        """Return the sample at which a loader raised an error; None if it is not known."""
        blamed = _BLAMED.search(str(error))
        if blamed:
            return int(blamed[1])
        return self._read_frames(reversed([*walk_tb(error.__traceback__)])).sample

    def _read_frames(self, frames: Iterable[tuple[FrameType, int]]) -> Activity:
        lines = []
        sample = None
        for frame, line in frames:
            code = frame.f_code
            # Our own frame called the loader. Neither this frame nor those outside of it say what
            # the thread does now.
            if code.co_filename.startswith(_HERE):
                break
            lines.append(f"{code.co_filename}:{line} {code.co_name}")
            if code.co_name in _METHODS and code.co_argcount > 1:
                # A method may have deleted its parameter.
                dataset = frame.f_locals.get(code.co_varnames[0])
                index = _read_index(frame.f_locals.get(code.co_varnames[1]))
                if dataset is self.dataset and index >= 0:
                    sample = index
        return Activity(tuple(lines), sample=sample)


def _read_index(index: Any) -> int:
    """Return the index of a sample, or the first one of a list of indices. Return `_UNNUMBERED` for
    anything else, such as an array of several indices.
    """
    if isinstance(index, list) and index:
        index = index[0]
    try:
        return operator.index(index)
    except TypeError:
        return _UNNUMBERED


def _list_other_workers() -> list[int]:
    """Return the pids of children that multiprocessing started in another way than by a fork."""
    children = [*vars(multiprocessing.process)["_children"]]
    return [child.pid for child in children if child._popen.method != "fork"]


@contextmanager
def _mark_sample(row: Any, sample: int, count: int) -> Iterator[None]:
    """Note the sample that this worker loads while a block runs, then note how long it took. If
    ``count`` samples are loaded at once, ``sample`` is the first.
    """
    # A method that loads samples may call another such method, even in other threads, for example
    # that of a dataset within a dataset. Only the time of the outermost call counts, but an inner
    # one knows which sample it loads.
    if row["sample"] != NO_SAMPLE:
        if sample >= 0:
            row["sample"] = sample
        yield
        return
    cpu_began_s = process_time()
    row["since_ns"] = monotonic_ns()
    row["sample"] = sample
    try:
        yield
    except Exception as error:
        number = row["sample"]
        # The first of several samples is not blamed for the others.
        if number >= 0 and (count == 1 or number != sample):
            error.add_note(BLAMES.format(number))
        raise
    finally:
        # A worker that calls sys.exit() ends at this sample.
        if not isinstance(sys.exception(), SystemExit):
            row["sample"] = NO_SAMPLE
        ended_cpu_s = process_time()
        row["sums"] += (
            count,
            (monotonic_ns() - row["since_ns"]) / 1e9,
            ended_cpu_s - cpu_began_s,
            cpu_began_s - row["cpu_s"],
        )
        row["cpu_s"] = ended_cpu_s


def _enter_child() -> None:
    """Make a forked worker note its samples."""
    monitor = waiting.get(threading.get_ident())
    # A process that the worker forks is no worker.
    waiting.clear()
    # A worker must work even if it cannot note its samples.
    with suppress(Exception):
        if monitor is not None:
            monitor.enter()


os.register_at_fork(after_in_child=_enter_child)
