"""The exercise "write your own loader", and its grader.

Each trial of a loader runs in a forked process. A loader that hangs is ended with its threads.
"""

import gc
import io
import multiprocessing
import random
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, field, replace
from itertools import chain
from tempfile import TemporaryDirectory
from threading import active_count
from time import perf_counter, sleep
from typing import Any

from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import read_file
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.loader import make_loader
from colab_utils.processes import end_process, end_with_parent, quiet_fork
from colab_utils.show.report import make_table
from colab_utils.slow_drive import DRIVE_PROFILES, read_at_full_speed, slow_down

LEAST_TIMES = 10
"""How many times as fast as the plain loop a loader must be."""
LEAST_SHARE = 0.7
"""Share of the rate of `make_loader` that a loader must reach."""

_FILES = 161
_BATCH_SIZE = 4
_MOST_UNREAD = 100
_ROUNDS = 3
# A read takes this share of the time that it takes on the bad day.
_TIME_SCALE = 0.1
# A loader that hangs is ended after so many seconds.
_LIMIT_S = 12.0
# Others come before the slow file until no file was asked for in so many seconds.
_STILL_S = 1.0
_MESSAGE = "is broken"
# The trials of a loader, and the number of files in each.
_SHORT = "a short epoch"
_BROKEN = "a broken file"
_STOP = "a loop that stops early"
_SLOW = "a slow file"
_SPEED = "a whole epoch"
_TRIALS = {_SHORT: 6, _BROKEN: 61, _STOP: _FILES, _SLOW: 61, _SPEED: _FILES}


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
    """The checks, up to the first trial that fails."""
    times_as_fast: float | None = None
    """Files per second, divided by those of the plain loop. None if a check failed."""

    def to_answer(self) -> dict[str, Any]:
        """Return the grade as an answer to keep, named `OWN_LOADER`, among those of
        `collect_answers`.
        """
        return asdict(self)

    def _repr_html_(self) -> str:
        return make_table(asdict(self)["checks"]).to_html()


@dataclass
class _Trial:
    """What a loader is asked to do, and what it did."""

    name: str
    order: list[int]
    """The files to read. In two trials, the first one is broken or slow."""
    dataset: CocoFolder
    asked: list[int] = field(default_factory=list)
    batches: list[list[bytes | None]] = field(default_factory=list)
    """What was handed over; None for what ``read`` did not return."""
    is_untouched: bool = False
    error: str = ""
    output: str = ""
    """What the loader printed."""
    early: int = 0
    """Files that were handed over before the slow file came."""
    seconds: float = _LIMIT_S
    threads: int = 0
    """Threads that ran on after the loop."""

    def watch(self, loader: Callable[..., Any], sender: Any) -> None:
        """Let the loader read, and send this trial with what it did."""
        # Otherwise the garbage collector would free objects of the parent process.
        gc.freeze()
        end_with_parent()
        output = io.StringIO()
        with redirect_stdout(output), redirect_stderr(output):
            try:
                self._consume(loader)
            except BaseException as error:
                self.error = f"It raised {describe_error(error)}."
        self.output = output.getvalue()
        # Threads may take a moment to end.
        sleep(0.5)
        self.threads = active_count() - 1
        sender.send(self)

    def _read(self, index: int) -> bytes:
        self.asked.append(index)
        if index == self.order[0]:
            if self.name == _BROKEN:
                raise OSError(f"file {index} {_MESSAGE}")
            if self.name == _SLOW:
                self._wait_for_stillness()
                self.early = sum(map(len, self.batches))
        return read_file(self.dataset.find_path(index))

    def _consume(self, loader: Callable[..., Any]) -> None:
        began_s = perf_counter()
        # The end of this function closes what the loader returns.
        batches = loader(self._read, [*self.order], _BATCH_SIZE)
        self.is_untouched = batches is None
        for batch in batches or ():
            self.batches.append([each if isinstance(each, bytes) else None for each in batch])
            self.seconds = perf_counter() - began_s
            if self.name == _STOP:
                self._wait_for_stillness()
                break

    def _wait_for_stillness(self) -> None:
        before = 0
        while before < len(self.asked):
            before = len(self.asked)
            sleep(_STILL_S)

    def judge(self, plain: float, best: float) -> list[LoaderCheck]:
        """Return the checks of this trial. The rates of the plain loop and of `make_loader` are in
        files a second.
        """
        if self.error and _MESSAGE not in self.error:
            return [LoaderCheck(self.name, passed=False, seen=self.error)]
        samples = list(chain.from_iterable(self.batches))
        different = len({*samples})
        unread = len(self.asked) - len(samples)
        rate = len(samples) / self.seconds
        epoch = (
            (
                "each file once",
                different == len(samples) == len(self.order),
                f"Of {len(self.order)} files, {different} came, in {len(samples)} samples. "
                "Yield what read returned. Did you drop the last batch, or did zip take an index?",
            ),
            (
                "whole batches",
                len(self.batches) == -(-len(samples) // _BATCH_SIZE),
                f"{len(self.batches)} batches came. Only the last one may be smaller.",
            ),
        )
        table = {
            _SHORT: epoch,
            _BROKEN: (
                (
                    _BROKEN,
                    str(self.order[0]) in self.output + self.error and None not in samples,
                    "You swallowed the error of the broken file. Pass it on, or name the file.",
                ),
            ),
            _STOP: (
                (
                    f"at most {_MOST_UNREAD} files in memory",
                    unread <= _MOST_UNREAD,
                    f"You asked for all at once: {unread} lay unread.",
                ),
                (
                    "no thread runs on",
                    not self.threads,
                    f"{self.threads} threads ran on. End them in a finally.",
                ),
            ),
            _SLOW: (
                (
                    _SLOW,
                    self.early >= 0.8 * len(self.order),
                    f"You waited for a slow file when {self.early} had come. Reads only wait: let "
                    "many wait at once, and hand over what is ready.",
                ),
            ),
            _SPEED: (
                *epoch,
                (
                    f"{LEAST_TIMES} times the plain loop",
                    rate >= LEAST_TIMES * plain,
                    f"It is {rate / plain:.3g} times as fast. Begin a read whenever one ends.",
                ),
                (
                    f"{LEAST_SHARE} of make_loader",
                    rate >= LEAST_SHARE * best,
                    f"It has {rate / best:.3g} of its rate. Begin a read whenever one ends.",
                ),
            ),
        }
        return [
            LoaderCheck(check, passed, "" if passed else mistake)
            for check, passed, mistake in table[self.name]
        ]


def grade_loader(loader: Callable[..., Any]) -> LoaderGrade | None:
    """Try a loader on few, slow and broken files, and time it.

    The reads wait as on the bad day, a tenth as long. The first trial that fails is the last one.
    The plain loop takes the mean wait for each file. `make_loader` is timed just before your
    loader. It takes about 10 seconds.

    Args:
        loader: Your ``my_loader(read, order, batch_size)``. For the indices in ``order``, it yields
            lists of what ``read(index)`` returned, in any order.

    Returns:
        The checks; None if the loader returns None, because the exercise is untouched.

    Raises:
        ColabUtilsError: The loader is not a function, or this is not Linux.
    """
    if not callable(loader):
        raise ColabUtilsError("A loader must be a function. Pass my_loader, and do not call it.")
    bad = DRIVE_PROFILES["bad"]
    read_s = bad.open_s * _TIME_SCALE
    order = random.Random(0).sample(range(_FILES), _FILES)
    checks = dict[str, LoaderCheck]()
    with read_at_full_speed(), TemporaryDirectory() as folder:
        data = make_dataset(folder, n=_FILES, width=32, height=32, objects=(1, 1), workers=1)
        # Two workers have 48 streams together.
        dataset = CocoFolder(data.images, data.annotations, streams=24)
        slow_down(folder, replace(bad, open_s=read_s))
        with closing(make_loader(dataset, batch_size=_BATCH_SIZE, workers=2)) as ours:
            began_s = perf_counter()
            list(ours)
            best = _FILES / (perf_counter() - began_s)
        for name, count in _TRIALS.items():
            # Other programs slow a loader down by chance, so its speed has three rounds.
            for _ in range(_ROUNDS if name == _SPEED else 1):
                trial = _run(_Trial(name, order[:count], dataset), loader)
                if trial.is_untouched:
                    return None
                checks |= {check.check: check for check in trial.judge(1 / read_s, best)}
                if all(check.passed for check in checks.values()):
                    break
            else:
                return LoaderGrade(tuple(checks.values()))
    return LoaderGrade(tuple(checks.values()), read_s * _FILES / trial.seconds)


def _run(trial: _Trial, loader: Callable[..., Any]) -> _Trial:
    """Run a trial in a process of its own, and return it with what the loader did."""
    receiver, sender = multiprocessing.Pipe(duplex=False)
    context = multiprocessing.get_context("fork")
    process = context.Process(target=trial.watch, args=(loader, sender))
    with quiet_fork():
        process.start()
    sender.close()
    try:
        with suppress(EOFError):
            if receiver.poll(_LIMIT_S):
                return receiver.recv()
    finally:
        end_process(process)
    return replace(trial, error="It hung, or it ended its own process.")
