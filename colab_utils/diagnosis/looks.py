"""Short looks at a loop and its workers while the loop runs: the evidence for causes."""

import os
import re
import threading
from collections import Counter, defaultdict

from colab_utils.diagnosis.processes import NO_SAMPLE, WorkerMonitor
from colab_utils.diagnosis.system_calls import count_runnable, find_wait

# Fewer looks than this are no evidence. Otherwise, at least half of them must show the same. At the
# start of a pass, fewer looks are enough if all of them show the same.
_LEAST_LOOKS = 5
_LEAST_AT_START = 3
# A worker usually has up to this many threads that can run: one loads samples, one sends batches.
_MANY_THREADS = 2
_LOADERS = re.compile(r"/torch/utils/data/dataloader\.py:|/colab_utils/loading/loader\.py:")
# Files whose code runs while a process waits for its workers, and while it receives a batch.
_QUEUES = re.compile(r"/multiprocessing/|/queue\.py:|/colab_utils/loading/prefetcher\.py:")
_TAKES_IN = re.compile("/multiprocessing/reduction|/torch/multiprocessing/")
# The code of this file only waits: for a thread, or for a result that a thread will have.
_THREADS = "/threading.py:"
# In this file, a DataLoader without workers calls the dataset and collate_fn.
_FETCH = "/torch/utils/data/_utils/fetch.py:"
# A DataLoader calls torch's profiler before and after each batch. These calls let other threads
# run, so looks meet them much too often. Such a look is counted, but without a place.
_PROFILER = "/torch/autograd/profiler.py:"
BACKWARD = "the backward pass"
OTHER_LOADER = "another loader"
HANDOFF = "the hand-off"
WORKERS = "the workers"
SAMPLE = "a sample"


class Looks:
    """Counts of what was seen in all looks.

    Attributes:
        waits: how often each cause of a wait was seen while a sample was loaded, by a worker or by
            this process. `find_wait` names the causes.

    Example:
        >>> looks = Looks(WorkerMonitor(None))
        >>> looks.take("step", threading.current_thread())
        >>> looks.waits.total()
        0
    """

    def __init__(self, monitor: WorkerMonitor) -> None:
        self._monitor = monitor
        self.waits = Counter[str]()
        self._places = defaultdict[str, Counter[str]](Counter)
        # Looks at a wait in which a busy worker loaded a sample (True), or did not (False).
        self._workers_at = Counter[bool]()
        # Each look at a worker that could run adds the number of its threads that could run, minus
        # two.
        self._extra_threads = 0

    def take(self, phase: str, thread: threading.Thread, *, starts: bool = False) -> None:
        """Look once at the thread that runs the loop, and at the workers.

        ``phase`` is what the loop does now. ``starts`` says that workers may still be starting.
        """
        place = self.look_at_loop(phase, thread)
        self._places[phase][place] += 1
        samples = self._monitor.list_samples()
        # To see whether a worker that is at no sample is busy takes long. It matters in waits only.
        busy = [
            pid
            for pid, sample in samples.items()
            if sample != NO_SAMPLE or (phase == "wait" and not self._monitor.is_idle(pid))
        ]
        if busy:
            # Each look counts the threads of only one worker. The workers are listed from the one
            # with the oldest sample on, and each look at a phase takes the next place in the list.
            count = count_runnable(busy[self._places[phase].total() % len(busy)])
            if count:
                self._extra_threads += count - _MANY_THREADS
        if phase == "wait":
            self._workers_at.update({samples[pid] != NO_SAMPLE for pid in busy})
        if place == SAMPLE and not samples:
            self.waits[find_wait(os.getpid(), thread.native_id or 0)] += 1
            return
        # A worker that is starting may be importing modules, which is not the loading of a sample.
        if not starts or self._monitor.sees_samples:
            self.waits.update(self._monitor.list_waits(samples))

    @property
    def has_threads(self) -> bool:
        """Return whether a worker that could run had more than two threads to run, on average."""
        return self._extra_threads > 0

    def is_usual(self, *, in_sample: bool) -> bool:
        """Return whether most looks at a wait saw a busy worker that loaded a sample. With
        ``in_sample=False``, return whether most of them saw a busy worker that loaded none.
        """
        count = self._places["wait"].total()
        return count >= _LEAST_LOOKS and 2 * self._workers_at[in_sample] > count

    def find_place(self, phase: str) -> tuple[str, str]:
        """Return the place where the loop was in at least half of the looks at a phase, and how
        many looks these were, in words. Both are "" if there is no such place.
        """
        for place, _ in self._places[phase].most_common(1):
            share, looks = self.measure_place(phase, place)
            if share >= 0.5:
                return place, looks
        return "", ""

    def describe_line(self, phase: str) -> str:
        """Return a sentence that names the line of code at which the loop was during most of a
        phase. Return "" if it waited for a loader, received a batch, or loaded samples.
        """
        place, looks = self.find_place(phase)
        if place in ("", OTHER_LOADER, HANDOFF, WORKERS, SAMPLE):
            return ""
        return f" This process was seen at {place} ({looks})."

    def measure_place(self, phase: str, place: str) -> tuple[float, str]:
        """Return the share of the looks at a phase in which the loop was at a place, and how many
        looks these were, in words. They are 0 and "" if there were too few looks.
        """
        places = self._places[phase]
        count = places[place]
        total = places.total()
        is_start = phase == "start" and count == total
        if total < (_LEAST_AT_START if is_start else _LEAST_LOOKS):
            return 0.0, ""
        return count / total, f"in {count} of {total} looks"

    def look_at_loop(self, phase: str, thread: threading.Thread) -> str:
        """Return the innermost line of Python that a thread runs, or a name such as `WORKERS`; ""
        if that says nothing.
        """
        activity = self._monitor.read_stack(thread)
        stack = "\n".join(activity.stack)
        if _PROFILER in stack:
            return ""
        if phase in ("step", "between") and _LOADERS.search(stack):
            return OTHER_LOADER
        if _QUEUES.search(stack):
            # Unpickling is written in C, so the innermost line of Python is the call of it.
            takes_in = "/multiprocessing/queues.py:" in activity.stack[0] or _TAKES_IN.search(stack)
            return HANDOFF if takes_in else WORKERS
        if activity.sample is not None or _FETCH in stack:
            return SAMPLE
        line = "".join(activity.stack[:1])
        # A loop that waits for another thread, which takes its batches ahead, waits for a loader.
        if _THREADS in line:
            return WORKERS
        # The backward pass is written in C++, so the innermost line of Python is the call of it.
        if line.endswith(" _engine_run_backward"):
            return BACKWARD
        return "/".join(line.split("/")[-2:]) or "its own program"
