"""The grader of own loaders: each mistake of beginners has a sentence. That the solution passes
is tested with the cells of notebook 01.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from threading import Thread

import pytest

from colab_utils.course import loader_exercise
from colab_utils.course.loader_exercise import grade_loader
from colab_utils.errors import ColabUtilsError
from colab_utils.processes import map_ahead
from colab_utils.slow_drive import find_profile

THREADS = 48


@pytest.fixture
def hurry(monkeypatch):
    """Shorter reads and pauses, for what does not depend on time."""
    for name, value in (("_TIME_SCALE", 0.02), ("_LIMIT_S", 4.0), ("_PAUSE_S", 0.8)):
        monkeypatch.setattr(loader_exercise, name, value)


def cut(samples, batch_size):
    """Cut samples into batches. Only the last one may be smaller."""
    samples = iter(samples)
    return iter(lambda: list(islice(samples, batch_size)), [])


def take_ready(read, order, most_reads=THREADS, take=islice):
    """Yield what is ready, and begin a read for each that has ended."""
    indices = iter(order)
    with ThreadPoolExecutor(min(most_reads, THREADS)) as pool:
        waiting = {pool.submit(read, index) for index in take(indices, most_reads)}
        while waiting:
            done, waiting = wait(waiting, return_when=FIRST_COMPLETED)
            for index in take(indices, most_reads - len(waiting)):
                waiting.add(pool.submit(read, index))
            for task in done:
                yield task.result()


def solve(read, order, batch_size, most_reads=THREADS, take=islice):
    yield from cut(take_ready(read, order, most_reads, take), batch_size)


def wait_in_order(read, order, batch_size):
    with ThreadPoolExecutor(THREADS) as pool:
        yield from cut(map_ahead(pool, read, order, ahead=THREADS), batch_size)


def drop_the_last_batch(read, order, batch_size):
    for batch in solve(read, order, batch_size):
        if len(batch) == batch_size:
            yield batch


def take_by_zip(indices, count):
    return [index for index, _ in zip(indices, range(count), strict=False)]


def fill_the_last_batch(read, order, batch_size):
    for batch in solve(read, order, batch_size):
        yield (batch * batch_size)[:batch_size]


def hand_over_in_threes(read, order, batch_size):
    yield from cut(take_ready(read, order), batch_size - 1)


def leave_a_thread(read, order, batch_size):
    Thread(target=time.sleep, args=(60,), daemon=True).start()
    yield from solve(read, order, batch_size)


def forgive(read, say):
    """Return a ``read`` that returns None for a broken file, and calls ``say`` with its index."""

    def try_to_read(index):
        try:
            return read(index)
        except OSError:
            say(index)

    return try_to_read


def swallow_errors(read, order, batch_size):
    samples = take_ready(forgive(read, str), order)
    yield from cut(filter(None, samples), batch_size)


def hand_over_none(read, order, batch_size):
    yield from solve(forgive(read, print), order, batch_size)


def read_the_first_files(read, order, batch_size):
    yield from solve(read, range(len(order)), batch_size)


def raise_another_error(read, order, batch_size):
    yield from swallow_errors(read, order, batch_size)
    if len(order) == 61:
        raise KeyError(order[0])


@pytest.mark.parametrize(
    ("loader", "trial", "sentence"),
    [
        (partial(solve, most_reads=5), "a whole epoch", "Begin a read whenever one ends"),
        (wait_in_order, "a slow file", "You waited for a slow file when 0 had come"),
        (
            partial(solve, most_reads=1000),
            "a loop that stops early",
            "You asked for all at once",
        ),
        (drop_the_last_batch, "a short epoch", "Did you drop the last batch"),
        (fill_the_last_batch, "a short epoch", "Of 6 files, 6 came, in 8 samples"),
        (partial(solve, take=take_by_zip), "a whole epoch", "did zip take an index"),
        (hand_over_in_threes, "a slow file", "Only the last one may be smaller"),
        (leave_a_thread, "a short epoch", "threads ran on"),
        (swallow_errors, "a broken file", "You swallowed the error of the broken file"),
        (read_the_first_files, "a short epoch", "is not in order"),
        (raise_another_error, "a broken file", "It raised KeyError: 98"),
        (hand_over_none, "a broken file", "Yield what read returned"),
    ],
)
def test_each_mistake_of_beginners_has_a_sentence(hurry, loader, trial, sentence):
    grade = grade_loader(loader)
    # The first trial that fails is the last one.
    assert [name for name, mistake in grade.checks.items() if mistake] == [trial]
    assert sentence in grade.checks[trial]
    assert grade.to_answer()["times_as_fast"] is None


def leave_out_and_say_so(read, order, batch_size):
    for batch in hand_over_none(read, order, batch_size):
        yield [*filter(None, batch)]


def test_a_loader_may_leave_the_broken_file_out_if_it_says_so(hurry):
    assert grade_loader(leave_out_and_say_so).checks["a broken file"] == ""


def test_an_untouched_exercise_says_nothing():
    def my_loader(read, order, batch_size): ...

    assert grade_loader(my_loader) is None
    assert find_profile("anywhere") is None


def raise_an_error(read, order, batch_size):
    yield [read(order["first"])]


def end_the_process(read, order, batch_size):
    os._exit(1)


def yield_futures(read, order, batch_size):
    with ThreadPoolExecutor(1) as pool:
        yield from cut((pool.submit(read, index) for index in order), batch_size)


def never_yield(read, order, batch_size):
    time.sleep(60)


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        (raise_an_error, "It raised TypeError: list indices must be integers"),
        (end_the_process, "or it ended its own process."),
        (yield_futures, "Yield what read returned."),
        (never_yield, "It hung"),
    ],
)
def test_what_stops_a_loader_is_a_sentence(hurry, capfd, loader, sentence):
    grade = grade_loader(loader)
    assert sentence in grade.checks["a short epoch"]
    assert sentence in grade._repr_html_()
    assert "Traceback" not in "".join(capfd.readouterr())
    assert multiprocessing.active_children() == []


def test_a_loader_that_is_called_is_refused():
    with pytest.raises(ColabUtilsError, match="must be a function"):
        grade_loader(solve(None, [], 4))
