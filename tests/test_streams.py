"""The number of reads at once: it finds what a folder serves, by measuring alone."""

import heapq
import math
import random
import tempfile

import pytest

from colab_utils.drive import find_mount
from colab_utils.slow_drive import slow_down
from colab_utils.streams import (
    MOST_STREAMS,
    StreamTuner,
    guess_streams,
    is_remote,
    remember_streams,
)

LATENCY_S = 0.5


class Server:
    """A folder that serves so many reads at once; the clock is simulated, the latency has a tail.

    Reads beyond the limit wait in line; with ``refuses`` they are refused, and asked for again
    after a second, as by `Store.run`.
    """

    def __init__(self, tuner, *, refuses=False, seed=0):
        self.tuner = tuner
        self.refuses = refuses
        self.now_s = 0.0
        self.refused = 0
        self._random = random.Random(seed)
        self._in_flight = []

    def run(self, limit, seconds):
        """Serve for some seconds; return the files a second of the last third."""
        end_s = self.now_s + seconds
        files = 0
        while self.now_s < end_s:
            while len(self._in_flight) < self.tuner.streams:
                self._ask(limit)
            self.now_s, is_answer = heapq.heappop(self._in_flight)
            if is_answer:
                self.tuner.count(self.now_s)
                files += self.now_s > end_s - seconds / 3
        return files / (seconds / 3)

    def _ask(self, limit):
        # Those that wait to be asked for again are with the reader, and not with the server.
        ends = sorted(end for end, is_answer in self._in_flight if is_answer)
        if self.refuses and len(ends) >= limit:
            self.refused += 1
            self.tuner.refuse()
            heapq.heappush(self._in_flight, (self.now_s + 1.0, False))
            return
        begin_s = self.now_s if len(ends) < limit else ends[-limit]
        tail = math.exp(0.8 * self._random.gauss(0, 1) - 0.32)
        heapq.heappush(self._in_flight, (begin_s + LATENCY_S * tail, True))


@pytest.mark.parametrize("refuses", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_it_follows_a_limit_that_changes(seed, refuses):
    server = Server(StreamTuner(8), seed=seed, refuses=refuses)
    for limit in (8, 64, 16):
        # Of the last ten seconds, which are not the same in each run.
        rate = server.run(limit, 30)
        assert rate >= 0.8 * limit / LATENCY_S


@pytest.mark.parametrize("limit", [8, 12, 32, 50, 128])
def test_it_stays_below_what_is_refused(limit):
    server = Server(StreamTuner(8), refuses=True)
    rate = server.run(limit, 90)
    # The number is doubled, so it may stay below a limit between two of its steps.
    assert rate >= 0.6 * limit / LATENCY_S
    # Only a few reads of each try that was too wide.
    assert server.refused < 0.03 * 90 * rate


def test_a_folder_that_gains_nothing_keeps_few_streams():
    server = Server(StreamTuner(2))
    server.run(2, 60)
    assert server.tuner.best <= 8


@pytest.mark.parametrize("most_streams", [24, 256])
def test_it_never_passes_the_most(most_streams):
    tuner = StreamTuner(2, most_streams)
    server = Server(tuner)
    server.run(10_000, 60)
    assert tuner.streams == most_streams
    assert tuner.files_per_s == pytest.approx(most_streams / LATENCY_S, rel=0.2)


def test_refusals_of_one_burst_halve_it_once_and_those_without_end_leave_one_stream():
    tuner = StreamTuner(32)
    for _ in range(32):
        tuner.refuse()
    assert tuner.streams == 16
    for _ in range(1000):
        tuner.refuse()
    assert tuner.streams == 1


def test_time_without_demand_is_not_counted():
    tuner = StreamTuner(2)
    for second in range(200):
        tuner.count(second * 100.0)
        tuner.count(second * 100.0 + 0.1)
        tuner.pause()
    assert tuner.files_per_s == pytest.approx(10)


@pytest.fixture(autouse=True)
def own_notes(tmp_path, monkeypatch):
    """The numbers that are kept are those of this test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_a_number_is_kept_for_its_folder(tmp_path):
    remember_streams(tmp_path, 40)
    assert guess_streams(tmp_path) == 40
    assert guess_streams(tmp_path / "another") == 2


@pytest.mark.parametrize("text", ["", "many", "-3", "9999"])
def test_a_spoiled_note_gives_a_number_in_range(tmp_path, text):
    remember_streams(tmp_path, text)
    assert 1 <= guess_streams(tmp_path) <= MOST_STREAMS


def test_a_slowed_folder_is_remote(tmp_path):
    assert find_mount(tmp_path) is None
    assert not is_remote(tmp_path)
    slow_down(tmp_path, "typical")
    assert is_remote(tmp_path / "images")
    assert guess_streams(tmp_path) == 16
