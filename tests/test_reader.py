"""The reader: many files in flight, given in order, within limits."""

import threading
import time
from contextlib import ExitStack, closing

import pytest

from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.files import open_store
from colab_utils.reader import Reader


class Gate:
    """Reads names as their own content, when they are let through."""

    def __init__(self):
        self.names = []
        self._open = threading.Event()
        self.let_through = self._open.set

    def read(self, name):
        self.names.append(name)
        assert self._open.wait(10)
        return name


@pytest.fixture
def store(tmp_path):
    return open_store(tmp_path)


@pytest.fixture
def open_reader(store):
    """Open readers, which are closed at the end."""
    with ExitStack() as readers:

        def begin(read, **options):
            return readers.enter_context(closing(Reader(read, store, **options)))

        yield begin


@pytest.fixture
def gate():
    gate = Gate()
    yield gate
    gate.let_through()


def wait_until(condition):
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it never came true")


def test_no_more_than_the_streams_are_in_flight(gate, open_reader):
    reader = open_reader(gate.read, streams=5)
    readings = reader.ask(range(30))
    wait_until(lambda: len(gate.names) == 5)
    time.sleep(0.1)
    assert gate.names == list(range(5))
    gate.let_through()
    assert [reading.take() for reading in readings] == list(range(30))


def test_it_holds_no_more_bytes_than_it_may(open_reader, monkeypatch):
    monkeypatch.setattr("colab_utils.reader.AHEAD_BYTES", 10_000)
    begun = []

    def read(name):
        begun.append(name)
        return bytes(1000)

    reader = open_reader(read, streams=1)
    readings = reader.ask(range(50))
    wait_until(lambda: len(begun) == 10)
    time.sleep(0.1)
    assert len(begun) == 10
    assert [len(reading.take()) for reading in readings] == [1000] * 50


@pytest.mark.parametrize(("most_bytes", "step"), [(10, 1), (2000, -1)])
def test_a_large_file_and_one_that_is_needed_early_do_not_wait_for_ever(
    open_reader, monkeypatch, most_bytes, step
):
    monkeypatch.setattr("colab_utils.reader.AHEAD_BYTES", most_bytes)
    reader = open_reader(lambda name: bytes(1000), streams=1)
    readings = reader.ask(range(20))
    assert [len(reading.take()) for reading in readings[::step]] == [1000] * 20


def make_hanging_reader(open_reader):
    """A reader with one stream, whose file 0 hangs until the event is set; returns both."""
    release = threading.Event()

    def read(name):
        if name == 0:
            release.wait(10)
        return name

    return open_reader(read, streams=1), release


def test_a_read_that_hangs_stops_no_other_once_it_is_forgotten(open_reader):
    reader, release = make_hanging_reader(open_reader)
    reader.prefetch(range(4))
    reader.forget([0])
    assert [reader.take(name) for name in (1, 2, 3)] == [1, 2, 3]
    release.set()


def test_a_file_that_never_comes_is_given_up(open_reader, monkeypatch):
    monkeypatch.setattr("colab_utils.reader._GIVE_UP_S", 0.2)
    reader, release = make_hanging_reader(open_reader)
    first, second = reader.ask(range(2))
    with pytest.raises(UnavailableError, match=r"did not come within 0 seconds\. Mount"):
        first.take()
    # Its stream is free for the next file.
    assert second.take() == 1
    release.set()


def test_an_error_is_raised_where_the_file_is_taken(open_reader):
    def read(name):
        if name == 1:
            raise FileNotFoundError(name)
        return name

    reader = open_reader(read, streams=2)
    first, second, third = reader.ask(range(3))
    assert first.take() == 0
    with pytest.raises(FileNotFoundError):
        second.take()
    assert third.take() == 2


def test_names_are_drawn_as_they_are_needed(open_reader):
    names = iter(range(1000))
    readings = open_reader(str, streams=4).read_all(names)
    assert next(readings).take() == "0"
    assert next(names) <= 16 * 4
    readings.close()


def test_a_slow_file_keeps_no_stream_from_its_work(open_reader):
    """While the first file does not come, the other streams read ten files each."""
    slow = threading.Event()
    names = []

    def read(name):
        names.append(name)
        if name == 0:
            slow.wait(10)

    reader = open_reader(read, streams=4)
    readings = reader.read_all(range(1000))
    first = next(readings)
    wait_until(lambda: len(names) >= 40)
    slow.set()
    first.take()
    readings.close()


@pytest.mark.parametrize("is_prefetched", [False, True])
def test_what_is_given_up_starts_no_other_read(gate, open_reader, is_prefetched):
    reader = open_reader(gate.read, streams=4)
    readings = reader.read_all(range(1000))
    if is_prefetched:
        reader.prefetch(range(100))
    else:
        next(readings)
    wait_until(lambda: len(gate.names) == 4)
    readings.close()
    reader.forget()
    time.sleep(0.1)
    assert len(gate.names) == 4
    # The streams are free, and what is asked for is read beside what hangs.
    again = reader.ask([2000])
    wait_until(lambda: 2000 in gate.names)
    gate.let_through()
    assert again[0].take() == 2000


@pytest.mark.parametrize("streams", [0, 10_000, 2.5, "many"])
def test_a_number_of_streams_out_of_range_is_refused(open_reader, streams):
    with pytest.raises(ColabUtilsError, match=r'expected streams .a number or "auto"'):
        open_reader(str, streams=streams)
