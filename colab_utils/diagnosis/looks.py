"""Short looks at a loop and its workers while the loop runs: the evidence for causes."""

import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from linecache import getline
from traceback import walk_stack

from colab_utils.diagnosis.processes import NO_SAMPLE, SERVES, Activity, WorkerMonitor
from colab_utils.diagnosis.system_calls import find_wait, read_call

LEAST_LOOKS = 5
"""Fewer looks than this are no evidence."""
# This share of all looks must show the same.
_USUAL = 0.5
_LOADERS = re.compile(r"/torch/utils/data/dataloader\.py:|/colab_utils/loading/loader\.py:")
_IN_LOADERS = re.compile(f"/torch/utils/data/|{_LOADERS.pattern}")
# Files whose code runs while a process waits for its workers, and while it receives a batch.
_QUEUES = re.compile(r"/multiprocessing/|/queue\.py:|/colab_utils/loading/prefetcher\.py:")
_TAKES_IN = re.compile("/multiprocessing/reduction|/torch/multiprocessing/")
# The code of this file only waits: for a thread, or for a result that a thread will have.
_THREADS = "/threading.py:"
# In this file, a DataLoader without workers calls the dataset and collate_fn.
_FETCH = "/torch/utils/data/_utils/fetch.py:"
# A DataLoader calls torch's profiler before and after each batch. These calls let other threads
# run, so looks meet them much too often. Such a look does not count.
_PROFILER = "/torch/autograd/profiler.py:"
# Transforms are modules, too, but no model.
_STEPS = re.compile(r"/torch/nn/modules/module\.py:|/loading/emulated_step\.py:")
_TRANSFORMS = "/torchvision/transforms/"
_LIBRARY = re.compile(
    r".*/(site|dist)-packages/|.*/lib/python3[.\d]*/|.*/(?=colab_utils/)|<frozen "
)
_PACKAGE = __file__.removesuffix("diagnosis/looks.py")
_NUMBER = re.compile(r":(\d+) ")
# A message shows at most this much of a line.
_SHOWN_CHARACTERS = 70
MODEL = "the model or its backward pass"
OTHER_LOADER = "another loader"
HANDOFF = "the hand-off"
WORKERS = "the workers"
SAMPLE = "a sample"
THREAD = "a thread"
# A special place or "", and a stack.
_Place = tuple[str, tuple[str, ...]]


def find_own_line() -> str:
    """Return the file and the line of the innermost code that runs now and is no library's. If
    there is none, the code of other libraries counts.
    """
    lines = [f"{frame.f_code.co_filename}:{line}" for frame, line in walk_stack(sys._getframe())]
    others = [line for line in lines if not line.startswith(_PACKAGE)]
    return min(others, key=lambda line: bool(_LIBRARY.match(line)))


def _shorten(line: str) -> str:
    """Return a line without the folders above its library, or above the last folder."""
    if _LIBRARY.match(line):
        return _LIBRARY.sub("", line)
    return "/".join(line.split("/")[-2:])


def _read_number(line: str) -> int:
    number = _NUMBER.search(line)
    return int(number[1]) if number else 0


def _read_code(line: str) -> str:
    """Return the code of a line in quotes; "" if it cannot be read."""
    code = getline(_NUMBER.split(line)[0], _read_number(line)).strip()
    return f" `{code[:_SHOWN_CHARACTERS]}`" if code else ""


class Looks:
    """Counts of what was seen in all looks.

    Attributes:
        waits: how often each cause of a wait was seen while a sample was loaded, by a worker or by
            this process. `find_wait` names the causes.
        busy: how many looks at waits saw a worker at a "sample", and at "collate".
        places: how often each special place, such as `WORKERS`, or else each stack, was seen in
            each phase of the loop. "sample" and "collate" have the places of whoever loads samples,
            "other" the places where another loader is asked.

    Example:
        >>> looks = Looks(WorkerMonitor(None))
        >>> looks.take("step", threading.current_thread())
        >>> looks.waits.total()
        0
    """

    def __init__(self, monitor: WorkerMonitor) -> None:
        self._monitor = monitor
        self.waits = Counter[str]()
        self.busy = Counter[str]()
        self.places = defaultdict[str, Counter[_Place]](Counter)

    def add(self, phase: str, kind: str, stack: Sequence[str] = ()) -> None:
        """Note a look: a special place or "", and the lines of code, the innermost first."""
        self.places[phase][kind, tuple(stack)] += 1

    def take(self, phase: str, thread: threading.Thread) -> None:
        """Look once at the thread that runs the loop, and at the workers. ``phase`` is what the
        loop does now.
        """
        seen = self._monitor.read_stack(thread)
        if _PROFILER in "".join(seen.stack):
            return
        kind = name_place(phase, seen)
        loading = thread
        starts = phase.endswith("start")
        if (starts or phase == "wait") and kind in ("", WORKERS, SAMPLE):
            kind, loading, seen = self._look_at_helpers(thread, kind, seen)
        if kind == MODEL:
            self.add(MODEL, "", seen.stack)
        if kind == OTHER_LOADER:
            self.add("other", "", _leave_loader(seen.stack))
        self.add(phase, kind, () if kind else seen.stack)
        samples = self._monitor.list_samples()
        stacks = self._monitor.take_stacks()
        for part, kind_there, *stack in stacks:
            self.add(part, kind_there, stack)
        # A look counts a part once, however many workers are in it.
        if phase == "wait":
            self.busy.update({part for part, *_ in stacks})
        is_own = loading is not thread or (kind == SAMPLE and not samples)
        if is_own and not _QUEUES.search("\n".join(seen.stack)):
            self.waits[find_wait(os.getpid(), loading.native_id or 0)] += 1
            self.add("sample", "", seen.stack)
        # A worker that is starting may be importing modules, which is not the loading of a sample.
        elif not starts or self._monitor.sees_samples:
            at_work = [pid for pid, sample in samples.items() if sample != NO_SAMPLE]
            self.waits.update(find_wait(pid, pid) for pid in at_work)

    def _look_at_helpers(
        self, thread: threading.Thread, kind: str, seen: Activity
    ) -> tuple[str, threading.Thread, Activity]:
        """Return the thread that loads what the loop waits for, if that is another thread of this
        process, and where it is; else return what is known of the loop's own thread.
        """
        if "futex" in read_call(os.getpid(), thread.native_id or 0)[0]:
            for helper, activity in self._monitor.list_helpers(thread):
                if not SERVES.search(activity.stack[0]):
                    # A sample may have threads of its own.
                    return kind if kind == SAMPLE else THREAD, helper, activity
        return kind, thread, seen

    def count_kinds(self, phase: str) -> Counter[str]:
        """Return how often each special place was seen in a phase, and "" for any other place."""
        kinds = Counter[str]()
        # The thread that looks may add a place at any moment.
        for (kind, _), count in [*self.places[phase].items()]:
            kinds[kind] += count
        return kinds

    def is_usual(self, part: str) -> bool:
        """Return whether most looks at waits saw a worker at a "sample", or at "collate"."""
        return _measure(self.busy[part], self.places["wait"].total())[0] > _USUAL

    def find_place(self, phase: str) -> str:
        """Return the special place where the loop was in at least half of the looks at a phase; ""
        if there is no such place.
        """
        kinds = self.count_kinds(phase)
        usual = [kind for kind in kinds if self.measure_place(phase, kind)[0] >= _USUAL]
        return max(usual, default="")

    def describe_line(self, phase: str, who: str = "This process") -> str:
        """Return a sentence that names the function in which the loop was during most of a phase.
        Return "" if it waited for a loader, received a batch, or loaded samples.
        """
        kind = self.find_place(phase)
        if kind == MODEL:
            return f" {who} was seen at {kind} ({self.measure_place(phase, kind)[1]})."
        if kind == OTHER_LOADER:
            return self.describe_line("other", "Another loader")
        total = self.places[phase].total()
        usual = [
            (lines.most_common(1)[0][0], _measure(lines.total(), total)[1])
            for lines in self._list_functions(phase).values()
            if _measure(lines.total(), total)[0] >= _USUAL
        ]
        if not usual:
            return ""
        inner, seen = usual[-1]
        own = [line for line, _ in usual if not _LIBRARY.match(line)]
        caller = own[-1] if own else inner
        text = " < ".join(dict.fromkeys(map(_shorten, (inner, caller))))
        return f" {who} was seen at {text}{_read_code(caller)} ({seen})."

    def _list_functions(self, phase: str) -> dict[str, Counter[str]]:
        """Return how often each line of each function was seen in a phase. A function comes after
        those that call it. If it calls itself, its outermost call counts.
        """
        functions = dict[str, Counter[str]]()
        for (_, stack), count in self.places[phase].most_common():
            # Of two lines with the same key, the last one stays.
            for function, line in reversed(
                {_NUMBER.sub(" ", line): line for line in stack}.items()
            ):
                functions.setdefault(function, Counter())[line] += count
        return functions

    def measure_place(self, phase: str, kind: str) -> tuple[float, str]:
        """Return the share of the looks at a phase in which the loop was at a special place, and
        how many looks these were, in words. They are 0 and "" if there were too few looks.
        """
        return _measure(self.count_kinds(phase)[kind], self.places[phase].total())

    def measure_preparation(self) -> tuple[float, str]:
        """Return the share of the looks at steps that saw code before the call of the model, and
        how many looks these were, in words.

        The innermost function from which the model is called calls it in one line, and does other
        things in the lines before.
        """
        step = self._list_functions("step")
        model = self._list_functions(MODEL)
        both = [function for function in step if function in model]
        if not both:
            return 0.0, ""
        first = min(map(_read_number, model[both[-1]]))
        # In the line of the loop itself, the last batch is freed, which is no work on this one.
        count = sum(
            count
            for line, count in step[both[-1]].items()
            if _read_number(line) < first and not _read_code(line).startswith(" `for ")
        )
        return _measure(count, self.places["step"].total())


def _measure(count: int, total: int) -> tuple[float, str]:
    if total < LEAST_LOOKS:
        return 0.0, ""
    return count / total, f"in {count} of {total} looks"


def _leave_loader(stack: Sequence[str]) -> Sequence[str]:
    """Return the part of a stack that asks a loader for a batch."""
    inside = [place for place, line in enumerate(stack, 1) if _IN_LOADERS.search(line)]
    return stack[max(inside, default=0) :]


def name_place(phase: str, seen: Activity) -> str:
    """Return the special place at which the loop is, such as `WORKERS`; "" if only the lines of its
    code say where it is.
    """
    stack = "\n".join(seen.stack)
    innermost = "".join(seen.stack[:1])
    if phase in ("step", "between") and _LOADERS.search(stack):
        return OTHER_LOADER
    if _QUEUES.search(stack):
        # Unpickling is written in C, so the innermost line of Python is the call of it.
        takes_in = "/multiprocessing/queues.py:" in innermost or _TAKES_IN.search(stack)
        return HANDOFF if takes_in else WORKERS
    if seen.sample is not None or _FETCH in stack:
        return SAMPLE
    # A loop that waits for another thread, which takes its batches ahead, waits for a loader.
    if _THREADS in innermost:
        return WORKERS
    # The backward pass is written in C++, so the innermost line of Python is the call of it.
    if innermost.endswith(" _engine_run_backward"):
        return MODEL
    if phase == "step" and _STEPS.search(stack) and _TRANSFORMS not in stack:
        return MODEL
    return ""
