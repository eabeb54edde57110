"""Short looks at a loop and its workers while the loop runs: the evidence for causes."""

import os
import re
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Sequence
from linecache import getline
from traceback import walk_stack

from colab_utils.diagnosis.processes import SERVES, Activity, WorkerMonitor
from colab_utils.diagnosis.system_calls import find_wait, read_call

# Fewer looks than this are no evidence. Otherwise, at least half of them must show the same. At the
# start of a pass, fewer looks are enough if all of them show the same.
_LEAST_LOOKS = 5
_LEAST_AT_START = 3
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
# run, so looks meet them much too often. Such a look is counted, but without a place.
_PROFILER = "/torch/autograd/profiler.py:"
# Transforms are modules, too, but no model.
_STEPS = re.compile(r"/torch/nn/modules/module\.py:|/loading/emulated_step\.py:")
_TRANSFORMS = "/torchvision/transforms/"
_LIBRARY = re.compile(
    r".*/(site|dist)-packages/|.*/lib/python3[.\d]*/|.*/(?=colab_utils/)|<frozen "
)
_NUMBER = re.compile(r":(\d+) ")
# A message shows at most this much of a line.
_SHOWN_CHARACTERS = 70
BACKWARD = "the backward pass"
MODEL = "the model"
OTHER_LOADER = "another loader"
HANDOFF = "the hand-off"
WORKERS = "the workers"
SAMPLE = "a sample"
THREAD = "a thread"
LOADER_THREAD = "a DataLoader in a thread"


class Places:
    """Where a thread was in the looks at one phase of a loop.

    Attributes:
        kinds: How many looks saw each special place, such as `WORKERS`; "" for any other place.
    """

    def __init__(self) -> None:
        self.kinds = Counter[str]()
        # How often each line of a function was seen, and how deep the function lies in the stack.
        self._lines = defaultdict[str, Counter[str]](Counter)
        self._depths = dict[str, int]()

    def add(self, kind: str, stack: Sequence[str] = ()) -> None:
        """Note a look. The innermost line of ``stack`` comes first."""
        self.kinds[kind] += 1
        functions = dict[str, str]()
        for depth, line in enumerate(reversed(stack)):
            function = _NUMBER.sub(" ", line)
            # The outermost call of a function that calls itself counts.
            if function not in functions:
                functions[function] = line
                self._depths[function] = depth
                self._lines[function][line] += 1

    def find_line(self) -> tuple[str, int]:
        """Return the innermost function that was in at least half of the looks, at its usual line,
        with the line of your own code that calls it; and the number of these looks. Return "" and 0
        if there is none.
        """
        total = self.kinds.total()
        # The thread that looks may add a line at any moment, so the loop goes over a copy.
        usual = [name for name in [*self._lines] if 2 * self._lines[name].total() >= total]
        if not usual:
            return "", 0
        usual.sort(key=self._depths.__getitem__)
        inner = usual[-1]
        own = [name for name in usual if not _LIBRARY.match(name)] or [inner]
        lines = [self._lines[name].most_common(1)[0][0] for name in (inner, own[-1])]
        text = " < ".join(dict.fromkeys(map(_shorten, lines)))
        return text + _read_code(lines[-1]), self._lines[inner].total()

    def count_before(self, model: "Places") -> int:
        """Return how many looks saw code that comes before the call of the model.

        ``model`` has the looks at the model. The innermost function that both have calls the model
        in one line, and does other things in the lines before.
        """
        both = model._lines.keys() & self._lines.keys()
        if not both:
            return 0
        caller = max(both, key=self._depths.__getitem__)
        first = min(map(_read_number, [*model._lines[caller]]))
        # In the line of the loop itself, the last batch is freed, which is no work on this one.
        return sum(
            count
            for line, count in [*self._lines[caller].items()]
            if _read_number(line) < first and not _read_code(line).startswith(" `for ")
        )


def find_own_line() -> tuple[str, int]:
    """Return the file and the line of the innermost code that runs now and is no library's."""
    # With its own frame among them, they would stay until garbage is collected.
    frames = [*walk_stack(sys._getframe(1))]
    own = [frame for frame in frames if not _LIBRARY.match(frame[0].f_code.co_filename)]
    frame, line = (own or frames)[0]
    return frame.f_code.co_filename, line


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
        places: where the loop was in each phase. "sample" and "collate" have the places of whoever
            loads samples, "other" the places where another loader is asked.

    Example:
        >>> looks = Looks(WorkerMonitor(None))
        >>> looks.take("step", threading.current_thread())
        >>> looks.waits.total()
        0
    """

    def __init__(self, monitor: WorkerMonitor) -> None:
        self._monitor = monitor
        self.waits = Counter[str]()
        self.places = defaultdict[str, Places](Places)
        # How many looks at waits saw a worker at a "sample", and at "collate".
        self._busy = Counter[str]()

    def take(self, phase: str, thread: threading.Thread, *, starts: bool = False) -> None:
        """Look once at the thread that runs the loop, and at the workers.

        ``phase`` is what the loop does now. ``starts`` says that workers may still be starting.
        """
        seen = self._monitor.read_stack(thread)
        kind = name_place(phase, seen)
        loading = thread
        waits = phase == "wait" or phase.endswith("start")
        if waits and kind in ("", WORKERS, SAMPLE):
            kind, loading, seen = self._look_at_helpers(thread, kind, seen)
        if _PROFILER in "".join(seen.stack):
            seen = Activity()
        if kind in (MODEL, BACKWARD):
            self.places[MODEL].add("", seen.stack)
        if kind == OTHER_LOADER:
            self.places["other"].add("", _leave_loader(seen.stack))
        self.places[phase].add(kind, () if kind else seen.stack)
        samples = self._monitor.list_samples()
        stacks = self._monitor.take_stacks()
        for part, kind_there, *stack in stacks:
            self.places[part].add(kind_there, stack)
        if phase == "wait":
            self._busy.update({part for part, *_ in stacks})
        is_own = loading is not thread or (kind == SAMPLE and not samples)
        if is_own and not _QUEUES.search("\n".join(seen.stack)):
            self.waits[find_wait(os.getpid(), loading.native_id or 0)] += 1
            self.places["sample"].add("", seen.stack)
        # A worker that is starting may be importing modules, which is not the loading of a sample.
        elif not starts or self._monitor.sees_samples:
            self.waits.update(self._monitor.list_waits(samples))

    def _look_at_helpers(
        self, thread: threading.Thread, kind: str, seen: Activity
    ) -> tuple[str, threading.Thread, Activity]:
        """Return the thread that loads what the loop waits for, if that is another thread of this
        process, and where it is; else return what is known of the loop's own thread.
        """
        result = kind, thread, seen
        if "futex" not in read_call(os.getpid(), thread.native_id or 0)[0]:
            return result
        for helper, activity in self._monitor.list_helpers(thread):
            if kind != SAMPLE and _LOADERS.search("\n".join(activity.stack)):
                return LOADER_THREAD, helper, activity
            if not SERVES.search(activity.stack[0]):
                # A sample may have threads of its own.
                result = kind if kind == SAMPLE else THREAD, helper, activity
        return result

    def is_usual(self, part: str) -> bool:
        """Return whether most looks at waits saw a worker at a "sample", or at "collate"."""
        return _measure(self._busy[part], self.places["wait"].kinds.total())[0] > 0.5

    def find_place(self, phase: str) -> str:
        """Return the special place where the loop was in at least half of the looks at a phase; ""
        if there is no such place.
        """
        for kind, _ in self.places[phase].kinds.most_common(1):
            if self.measure_place(phase, kind)[0] >= 0.5:
                return kind
        return ""

    def describe_line(self, phase: str, who: str = "This process") -> str:
        """Return a sentence that names the function in which the loop was during most of a phase.
        Return "" if it waited for a loader, received a batch, or loaded samples.
        """
        kind = self.find_place(phase)
        if kind in (BACKWARD, MODEL):
            return f" {who} was seen at {kind} ({self.measure_place(phase, kind)[1]})."
        if kind == OTHER_LOADER:
            return self.describe_line("other", "Another loader")
        line, count = self.places[phase].find_line()
        total = self.places[phase].kinds.total()
        is_start = phase == "start" and count == total
        if not line or total < (_LEAST_AT_START if is_start else _LEAST_LOOKS):
            return ""
        return f" {who} was seen at {line} (in {count} of {total} looks)."

    def measure_place(self, phase: str, kind: str) -> tuple[float, str]:
        """Return the share of the looks at a phase in which the loop was at a special place, and
        how many looks these were, in words. They are 0 and "" if there were too few looks.
        """
        kinds = self.places[phase].kinds
        return _measure(kinds[kind], kinds.total())

    def measure_preparation(self) -> tuple[float, str]:
        """Return the share of the looks at steps that saw code before the call of the model, and
        how many looks these were, in words.
        """
        steps = self.places["step"]
        return _measure(steps.count_before(self.places[MODEL]), steps.kinds.total())


def _measure(count: int, total: int) -> tuple[float, str]:
    if total < _LEAST_LOOKS:
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
    if _PROFILER in stack:
        return ""
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
        return BACKWARD
    if phase == "step" and _STEPS.search(stack) and _TRANSFORMS not in stack:
        return MODEL
    return ""
