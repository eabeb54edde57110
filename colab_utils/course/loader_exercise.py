"""The exercise "write your own loader", and its grader.

Each trial of a loader runs in a forked process. A loader that hangs is ended with its threads.
"""

import io
import random
from collections.abc import Callable
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import asdict, dataclass, replace
from tempfile import TemporaryDirectory
from threading import active_count
from time import perf_counter, sleep
from typing import Any

from colab_utils.course.sample_data import make_dataset
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.files import read_file
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.loader import make_loader
from colab_utils.loading.workers import start_worker
from colab_utils.processes import end_process
from colab_utils.show.report import make_table
from colab_utils.slow_drive import DRIVE_PROFILES, read_at_full_speed, slow_down

_BATCH_SIZE = 4
# A read takes this share of the time that it takes on the bad day.
_TIME_SCALE = 0.1
# A loader that hangs is ended after so many seconds.
_LIMIT_S = 12.0
# The slow file takes so many seconds, and so does the batch of the loop that stops early.
_PAUSE_S = 2.0
# The trials of a loader, and the number of files in each.
_SHORT = "a short epoch"
_BROKEN = "a broken file"
_STOP = "a loop that stops early"
_SLOW = "a slow file"
_SPEED = "a whole epoch"
_FILES = {_SHORT: 6, _BROKEN: 61, _STOP: 161, _SLOW: 61, _SPEED: 161}
# The order of the files. A trial takes the first of them.
_ORDER = random.Random(0).sample(range(161), 161)
# The index of the broken or slow file.
_BAD = _ORDER[0]


@dataclass(frozen=True)
class LoaderGrade:
    """What `grade_loader` saw of a loader."""

    checks: dict[str, str]
    """The trials, up to the first one that fails, each with a sentence that names the mistake. The
    sentence is empty if the loader passed.
    """
    times_as_fast: float | None = None
    """Files per second, divided by those of the plain loop. None if a trial failed."""

    def to_answer(self) -> dict[str, Any]:
        """Return the grade as an answer to keep, named `OWN_LOADER`, among those of
        `collect_answers`.
        """
        return asdict(self)

    def _repr_html_(self) -> str:
        rows = [
            {"trial": trial, "passed": not mistake, "mistake": mistake}
            for trial, mistake in self.checks.items()
        ]
        return make_table(rows).to_html()


def grade_loader(loader: Callable[..., Any]) -> LoaderGrade | None:
    """Try a loader on few, slow and broken files, and time it.

    The reads wait as on the bad day, a tenth as long. The first trial that fails is the last one.
    The plain loop takes the mean wait for each file. `make_loader` is timed just before your
    loader. It takes about 10 seconds.

    Args:
        loader: Your ``my_loader(read, order, batch_size)``. For the indices in ``order``, it yields
            lists of what ``read(index)`` returned, in any order.

    Returns:
        The trials; None if the loader returns None, because the exercise is untouched.

    Raises:
        ColabUtilsError: The loader is not a function, or this is not Linux.
    """
    if not callable(loader):
        raise ColabUtilsError("A loader must be a function. Pass my_loader, and do not call it.")
    bad = DRIVE_PROFILES["bad"]
    read_s = bad.open_s * _TIME_SCALE
    files = _FILES[_SPEED]
    checks = dict[str, str]()
    with read_at_full_speed(), TemporaryDirectory() as folder:
        data = make_dataset(folder, n=files, width=32, height=32)
        # Two workers have 48 streams together.
        dataset = CocoFolder(data.images, data.annotations, streams=24)
        slow_down(folder, replace(bad, open_s=read_s))
        with closing(make_loader(dataset, batch_size=_BATCH_SIZE, workers=2)) as ours:
            began_s = perf_counter()
            list(ours)
            best_s = perf_counter() - began_s
        due_s = min(files * read_s / 10, best_s / 0.7)
        # Other programs slow a loader down by chance, so its speed has three rounds.
        for trial in (*_FILES, _SPEED, _SPEED):
            seconds, mistake = _run(loader, trial, dataset, due_s)
            if mistake is None:
                return None
            checks[trial] = mistake
            if bool(mistake) != (trial == _SPEED):
                break
    return LoaderGrade(checks, None if mistake else files * read_s / seconds)


def _run(*setting: Any) -> Any:
    """Run `_try_loader` in a process of its own, and return what it sends."""
    process, connection = start_worker(_try_loader, *setting)
    try:
        with suppress(EOFError):
            if connection.poll(_LIMIT_S):
                return connection.recv()
    finally:
        end_process(process)
    return _LIMIT_S, "It hung, or it ended its own process."


def _try_loader(
    sender: Any, loader: Callable[..., Any], trial: str, dataset: CocoFolder, due_s: float
) -> None:
    """Let the loader read. Send the seconds that it took, and a sentence about its mistake: "" if
    it made none, None if it is untouched.
    """
    output = io.StringIO()
    began_s = perf_counter()
    with redirect_stdout(output), redirect_stderr(output):
        try:
            mistake = _consume(loader, trial, dataset)
        except BaseException as error:
            print(error)
            mistake = f"It raised {describe_error(error)}."
            if trial == _BROKEN and "is broken" in mistake:
                mistake = ""
    seconds = perf_counter() - began_s
    # Threads may take a moment to end.
    sleep(0.5)
    threads = active_count() - 1
    if trial == _BROKEN and not mistake and str(_BAD) not in output.getvalue():
        mistake = "You swallowed the error of the broken file. Pass it on, or name the file."
    elif threads and not mistake:
        mistake = f"{threads} threads ran on. End them in a finally."
    elif trial == _SPEED and not mistake and seconds > due_s:
        mistake = (
            f"It took {seconds:.2g} s. Take {due_s:.2g} s, which is a tenth of the plain loop's "
            "time, or what make_loader takes at 0.7 of its rate. Begin a read whenever one ends."
        )
    sender.send((seconds, mistake))


def _consume(loader: Callable[..., Any], trial: str, dataset: CocoFolder) -> str | None:
    """Take batches from the loader, and return what is wrong with them."""
    files = _FILES[trial]
    order = _ORDER[:files]
    asked = list[int]()
    samples = list[Any]()
    batches = 0
    early = files

    def read(index: int) -> bytes:
        nonlocal early
        asked.append(index)
        if index not in order:
            raise IndexError("read got an index that is not in order")
        if index == _BAD and trial == _BROKEN:
            raise OSError(f"file {index} is broken")
        if index == _BAD and trial == _SLOW:
            sleep(_PAUSE_S)
            early = len(samples)
        return read_file(dataset.find_path(index))

    # The end of this function closes what the loader returns.
    source = loader(read, order[:], _BATCH_SIZE)
    if source is None:
        return None
    for batch in source:
        batches += 1
        samples += batch
        if trial == _STOP:
            sleep(_PAUSE_S)
            break
    unread = len(asked) - len(samples)
    different = len({sample for sample in samples if isinstance(sample, bytes)})
    is_whole = trial in (_SHORT, _SPEED)
    mistakes = (
        (unread > 100, f"You asked for all at once: {unread} files lay in memory."),
        (
            early < 0.8 * files,
            f"You waited for a slow file when {early} had come. Reads only wait: let many wait at "
            "once, and hand over what is ready.",
        ),
        (
            different < max(len(samples), files * is_whole),
            f"Of {files} files, {different} came, in {len(samples)} samples. Yield what read "
            "returned. Did you drop the last batch, or did zip take an index?",
        ),
        (
            trial != _BROKEN and batches != -(-len(samples) // _BATCH_SIZE),
            f"{batches} batches came. Only the last one may be smaller.",
        ),
    )
    return next((sentence for is_seen, sentence in mistakes if is_seen), "")
