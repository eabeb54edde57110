"""The exercise "write your own loader", and its grader.

Each trial of a loader runs in a forked process. A loader that hangs is ended with its threads.
"""

import gc
import io
import multiprocessing
import random
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing, redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from statistics import median
from tempfile import TemporaryDirectory
from threading import active_count
from time import perf_counter, sleep
from typing import Any, NamedTuple

import numpy as np

from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import read_file
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.loader import make_loader
from colab_utils.machine import require_linux
from colab_utils.processes import end_process, end_with_parent, quiet_fork
from colab_utils.progress import show_progress
from colab_utils.show.table import make_table
from colab_utils.slow_drive import DRIVE_PROFILES, slow_down

MOST_UNREAD = 100
"""Files that a loader may have asked for and not handed over yet."""
LEAST_TIMES = 10
"""How many times as fast as the plain loop a loader must be."""
LEAST_SHARE = 0.7
"""Share of the rate of `make_loader` that a loader must reach."""

_FILES = 160
_BATCH_SIZE = 4
_ROUNDS = 3
# A read takes this share of the time that it takes on the bad day.
_TIME_SCALE = 0.1
# A slow loader is stopped after so many seconds, and one that hangs is ended.
_ROUND_S = 5.0
_LIMIT_S = 12.0
# The slow file comes when nothing else has happened for so many seconds.
_STILL_S = 1.0
# Seconds that threads may take to end after the loop.
_ENDING_S = 2.0

_MESSAGE = "file {} is broken"
_SHORT = "a short epoch"
_ONCE = "each file once"
_WHOLE = "whole batches"
_SLOW = "a slow file"
_BROKEN = "a broken file"
_MEMORY = f"at most {MOST_UNREAD} files in memory"
_THREADS = "no thread runs on"
_TIMES = f"{LEAST_TIMES} times the plain loop"
_SHARE = f"{LEAST_SHARE} of make_loader"
_CHECKS = (_SHORT, _ONCE, _WHOLE, _SLOW, _BROKEN, _MEMORY, _THREADS, _TIMES, _SHARE)


@dataclass(frozen=True)
class LoaderCheck:
    """Something that a loader must do."""

    check: str
    passed: bool
    seen: str
    """A sentence about what was seen. If the check failed, it names the mistake."""


@dataclass(frozen=True)
class LoaderGrade:
    """What `grade_loader` saw of a loader."""

    checks: tuple[LoaderCheck, ...]
    times_as_fast: float = 0.0
    """Files per second, divided by those of the plain loop."""

    def to_answer(self) -> dict[str, Any]:
        """Return the grade as an answer to keep, named `OWN_LOADER`, among those of
        `collect_answers`. It has a speed only if all checks are passed.
        """
        answer = asdict(self)
        if not all(check.passed for check in self.checks):
            answer["times_as_fast"] = None
        return answer

    def _repr_html_(self) -> str:
        return make_table(asdict(self)["checks"]).to_html()

    def __str__(self) -> str:
        return str(make_table(asdict(self)["checks"]))

    __repr__ = __str__


class _Sample(NamedTuple):
    """What ``read`` returns of a file."""

    number: int
    content: bytes


@dataclass
class _Trial:
    """What a loader is asked to do, and what it did."""

    checks: tuple[str, ...]
    """What fails if the loader raises an error or hangs."""
    order: Sequence[int]
    slow: int = -1
    """The file that comes when all else stands still. -1 is no file."""
    broken: int = -1
    """The file that cannot be read."""
    stops: bool = False
    """Whether the loop stops after its first batch and a pause."""
    batches: list[list[int | None]] = field(default_factory=list)
    """The numbers of the files in each batch; None for what ``read`` did not return."""
    events: list[tuple[int, int]] = field(default_factory=list)
    """What each event adds to the reads in flight, and to the files that are not handed over."""
    error: str = ""
    is_untouched: bool = False
    lost: int = 0
    """Files that never came, if the loader came to its end without an error."""
    names_broken: bool = False
    """Whether the error of the broken file came through, or a message named the file."""
    seconds: float = _LIMIT_S
    overtaking: int = 0
    """Files that were handed over before the slow file came."""
    threads: int = 0
    """Threads that ran on after the loop."""

    def find_peaks(self) -> list[int]:
        """Return the most reads in flight, and the most files that were not handed over."""
        peaks: list[int] = np.cumsum([(0, 0), *self.events], axis=0).max(axis=0).tolist()
        return peaks

    def explain(self, mistake: str) -> str:
        """Return a sentence for a loader that is slow: a mistake, unless it has no threads."""
        if self.find_peaks()[0] > 1:
            return mistake
        return "You read one file at a time. Reads only wait: let many threads wait at once."

    def watch(self, loader: Callable[..., Any], dataset: CocoFolder, sender: Any) -> None:
        """Let the loader read, and send this trial with what it did."""
        # Otherwise the garbage collector would free objects of the parent process.
        gc.freeze()
        end_with_parent()
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            warnings.simplefilter("always")
            try:
                self._consume(loader, dataset)
            except BaseException as error:
                traceback.print_exc()
                if _MESSAGE.format(self.broken) not in output.getvalue():
                    self.error = f"It raised {describe_error(error)}."
        self.names_broken = str(self.broken) in output.getvalue()
        sender.send(self)

    def _consume(self, loader: Callable[..., Any], dataset: CocoFolder) -> None:
        def read(index: int) -> _Sample:
            self.events.append((1, 1))
            try:
                if index == self.broken:
                    raise OSError(_MESSAGE.format(index))
                if index == self.slow:
                    self._wait_for_stillness()
                    self.overtaking = sum(map(len, self.batches))
                return _Sample(index, read_file(dataset.find_path(index)))
            finally:
                self.events.append((-1, 0))

        began_s = perf_counter()
        batches = loader(read, list(self.order), _BATCH_SIZE)
        self.is_untouched = batches is None
        for batch in batches or ():
            self.batches.append([getattr(sample, "number", None) for sample in batch])
            self.events.append((0, -len(batch)))
            self.seconds = perf_counter() - began_s
            if self.stops:
                self._wait_for_stillness()
            if self.stops or self.seconds > _ROUND_S:
                break
        else:
            self.lost = len(self.order) - sum(map(len, self.batches)) - (self.broken >= 0)
        # A list has nothing to close.
        if hasattr(batches, "close"):
            batches.close()
        until_s = perf_counter() + _ENDING_S
        while active_count() > 1 and perf_counter() < until_s:
            sleep(0.01)
        self.threads = active_count() - 1

    def _wait_for_stillness(self) -> None:
        before = 0
        while before < len(self.events):
            before = len(self.events)
            sleep(_STILL_S)

    def find_faults(self) -> dict[str, str]:
        """Return a sentence for each check that fails."""
        if self.error:
            return dict.fromkeys(self.checks, self.error)
        numbers = list(chain.from_iterable(self.batches))
        sizes = list(map(len, self.batches))
        # Only the last batch may have another size, of at least one file.
        odd = {*sizes[:-1]} - {_BATCH_SIZE} | {*sizes[-1:]}.difference(range(1, _BATCH_SIZE + 1))
        is_last_batch = self.lost == len(self.order) % _BATCH_SIZE
        is_blocked = self.slow >= 0 and self.overtaking < len(self.order) / 2
        unread = self.find_peaks()[1]
        suspects = (
            (_ONCE, None in numbers, "A batch holds something that read did not return."),
            (_ONCE, len(set(numbers)) < len(numbers), "A file came twice. Read each index once."),
            (
                _ONCE,
                self.lost and not is_last_batch,
                f"You lost {self.lost} files. Did zip take an index that nobody read?",
            ),
            (
                _WHOLE,
                self.lost and is_last_batch,
                "You dropped the last batch. It may be smaller.",
            ),
            (_WHOLE, odd, f"Batches of {odd} files came. Only the last may be smaller."),
            (
                _SLOW,
                is_blocked and not self.overtaking,
                self.explain(
                    "You waited for the first file of the window. Hand over what is ready."
                ),
            ),
            (_SLOW, is_blocked, f"You waited for a slow file when {self.overtaking} had come."),
            (
                _BROKEN,
                self.broken >= 0 and not self.names_broken,
                "You swallowed the error of the broken file. Pass it on, or name the file.",
            ),
            (_MEMORY, unread > MOST_UNREAD, f"You asked for all at once: {unread} lay unread."),
            (_THREADS, self.threads, f"{self.threads} threads ran on. End them in a finally."),
        )
        return {check: sentence for check, fails, sentence in reversed(suspects) if fails}


def grade_loader(loader: Callable[..., Any]) -> LoaderGrade | None:
    """Try a loader on few, slow and broken files, and time it.

    The reads wait as on the bad day, a tenth as long. The plain loop, your loader and `make_loader`
    read the same files in turns, and the medians of the rounds count. It takes about 20 seconds.

    Args:
        loader: Your ``my_loader(read, order, batch_size)``. For the indices in ``order``, it yields
            lists of what ``read(index)`` returned, in any order.

    Returns:
        The checks; None if the loader returns None, because the exercise is untouched.

    Raises:
        ColabUtilsError: The loader is not a function, or this is not Linux.
    """
    require_linux("end a loader that hangs")
    if not callable(loader):
        raise ColabUtilsError(
            f"A loader must be a function; it is a {type(loader).__name__}. Pass my_loader itself, "
            "and do not call it."
        )
    bad = DRIVE_PROFILES["bad"]
    # The table says all that is to be said; of an untouched exercise, nothing.
    bar = show_progress("trying your loader", total=_ROUNDS + 4)
    bar.leave = False
    with bar, TemporaryDirectory() as folder:
        # With this seed, the slowest read takes five times as long as the mean.
        data = make_dataset(
            folder, n=_FILES, width=32, height=32, objects=(1, 1), seed=1, workers=1
        )
        slow_down(folder, replace(bad, name="exercise", open_s=bad.open_s * _TIME_SCALE))
        try:
            # Two workers have 48 streams together.
            return _grade(loader, CocoFolder(data.images, data.annotations, streams=24), bar)
        finally:
            slow_down(folder, None)


def _grade(loader: Callable[..., Any], dataset: CocoFolder, bar: Any) -> LoaderGrade | None:
    order = random.Random(0).sample(range(_FILES), _FILES)
    trials = [
        _Trial((_SHORT,), order[:6]),
        _Trial((_SLOW,), order[:60], slow=order[0]),
        _Trial((_BROKEN,), order[:61], broken=max(order[:61])),
        _Trial((_MEMORY, _THREADS), order, stops=True),
        *[_Trial((_TIMES, _SHARE), order)] * _ROUNDS,
    ]
    faults = dict[str, str]()
    # How many times as fast as the plain loop the loader is, and as `make_loader`, in each round.
    ratios = list[tuple[float, float]]()
    for plan in trials:
        trial = _run(plan, loader, dataset)
        bar.update()
        if trial.is_untouched:
            return None
        faults = trial.find_faults() | faults
        if _SHORT in faults:
            return LoaderGrade((LoaderCheck(_SHORT, passed=False, seen=faults[_SHORT]),))
        if _TIMES in plan.checks:
            paths = map(dataset.find_path, order[len(ratios) :: _ROUNDS])
            own = sum(map(len, trial.batches)) / trial.seconds
            # A loader's second pass would profit from the first one.
            with closing(make_loader(dataset, batch_size=_BATCH_SIZE, workers=2)) as ours:
                best = _BATCH_SIZE * _measure_rate(ours)
            ratios.append((own / _measure_rate(map(read_file, paths)), own / best))
            if trial.error or trial.seconds > _ROUND_S:
                break
    times, share = map(median, zip(*ratios, strict=True))
    seen = {_TIMES: f"It is {times:.3g} times as fast.", _SHARE: f"It has {share:.3g} of its rate."}
    for check, is_slow in ((_TIMES, times < LEAST_TIMES), (_SHARE, share < LEAST_SHARE)):
        if is_slow:
            idle = trial.explain("Reads ran dry. Begin another one whenever one ends.")
            faults.setdefault(check, f"{seen[check]} {idle}")
    seen |= faults
    checks = [LoaderCheck(name, name not in faults, seen.get(name, "")) for name in _CHECKS]
    return LoaderGrade(tuple(checks), times)


def _run(trial: _Trial, loader: Callable[..., Any], dataset: CocoFolder) -> _Trial:
    """Run a trial in a process of its own, and return it with what the loader did."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=trial.watch, args=(loader, dataset, sender))
    with quiet_fork():
        process.start()
    sender.close()
    error = "It ended its own process."
    try:
        if receiver.poll(_LIMIT_S):
            return receiver.recv()
        error = "It hung: it waits for what never comes."
    except EOFError:
        pass
    finally:
        end_process(process)
    return replace(trial, error=error)


def _measure_rate(items: Iterable[Any]) -> float:
    """Return how many of the items come in a second."""
    began_s = perf_counter()
    count = sum(1 for _ in items)
    return count / (perf_counter() - began_s)
