"""The slowed folder: which files it slows, and how long it asks to wait."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from multiprocessing import get_context
from time import perf_counter
from types import SimpleNamespace

import numpy as np
import pytest

from colab_utils import files, slow_drive
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store, read_file
from colab_utils.slow_drive import (
    DRIVE_PROFILES,
    DriveProfile,
    find_profile,
    read_at_full_speed,
    slow_down,
)

SLOW = DriveProfile("slow", open_s=10.0, bytes_per_s=100.0, source="a test")


@pytest.fixture
def clock(monkeypatch, tmp_path):
    """A clock that only sleeping and the real reads move; ``clock.slept`` lists the waits in
    seconds.
    """

    clock = SimpleNamespace(now=0.0, slept=[])

    def sleep(seconds):
        clock.slept.append(seconds)
        clock.now += seconds

    monkeypatch.setattr(slow_drive, "sleep", sleep)
    for module in (files, slow_drive):
        monkeypatch.setattr(module, "perf_counter", lambda: clock.now)
    # The link holds times of this clock, so the real one stays untouched.
    monkeypatch.setattr(slow_drive, "_LINK", str(tmp_path / "link"))
    return clock


def test_read_file_waits_for_opening_and_for_every_byte(photo, clock, tmp_path):
    slow_down(tmp_path, SLOW)
    assert read_file(photo) == photo.read_bytes()
    assert clock.slept == [pytest.approx(10.0 + 1000 / 100)]


def test_the_time_of_the_real_read_is_part_of_the_wait(photo, clock, monkeypatch, tmp_path):
    slow_down(tmp_path, SLOW)

    def slow_preadv(descriptor, buffers, offset):
        clock.now += 3.0
        return len(buffers[0])

    with open_store(photo).open("") as file:
        file.pread(100, 0)
        clock.slept.clear()
        monkeypatch.setattr(os, "preadv", slow_preadv)
        file.pread(400, 100)
        # The profile asks for 4 s, of which 3 s were spent.
        assert clock.slept == [pytest.approx(1.0)]
        clock.slept.clear()
        file.pread(100, 500)
        # The real read was slower than the profile.
        assert clock.slept == []


def test_contiguous_reads_pay_the_opening_once_and_jumps_pay_it_again(photo, clock, tmp_path):
    slow_down(tmp_path, SLOW)
    with open_store(photo).open("") as file:
        # The reads contain one jump, back to 200.
        for offset in (300, 400, 500, 200, 300):
            file.pread(100, offset)
    assert clock.slept == pytest.approx([11, 1, 1, 11, 1])


def test_the_inner_folder_counts_and_links_are_followed(tmp_path):
    slow_down(tmp_path, "bad")
    slow_down(tmp_path / "ssd", None)
    slow_down(tmp_path / "ssd" / "unpacked", SLOW)
    (tmp_path.parent / "link").symlink_to(tmp_path)
    result = [find_profile(tmp_path / name) for name in ("a", "ssd/a", "ssd/unpacked/b/c")]
    assert result == [DRIVE_PROFILES["bad"], None, SLOW]
    assert find_profile(tmp_path.parent / "link" / "a") == DRIVE_PROFILES["bad"]
    with read_at_full_speed():
        assert find_profile(tmp_path / "a") is None
    assert find_profile(tmp_path / "a") == DRIVE_PROFILES["bad"]
    with pytest.raises(ColabUtilsError, match=r"fast, typical, bad, none.*'slowish'"):
        slow_down(tmp_path, "slowish")


def test_all_streams_of_all_processes_have_one_link(photo, tmp_path):
    """Each would take 0.1 s alone; no slower limit is asserted, because the machine may be busy."""
    slow_down(tmp_path, DriveProfile("narrow", 0.0, 10_000, "a test"))
    started = perf_counter()
    with ProcessPoolExecutor(4, get_context("fork")) as workers:
        for content in workers.map(read_file, [photo] * 4):
            assert content == photo.read_bytes()
    assert perf_counter() - started >= 0.4


def test_a_bad_day_has_a_heavy_tail_that_is_the_same_for_everybody():
    bad = DRIVE_PROFILES["bad"]
    drawn = np.array([bad.draw_open_s(f"images/{number:012d}.jpg") for number in range(20_000)])
    assert drawn.mean() == pytest.approx(bad.open_s, rel=0.05)
    assert 2.2 < np.percentile(drawn, 95) / drawn.mean() < 3.0
    assert bad.draw_open_s("images/1.jpg") == bad.draw_open_s("/another/place/images/1.jpg")
    assert bad.draw_open_s("images/1.jpg") != bad.draw_open_s("images/1.jpg", 512)


def test_reads_above_the_streams_wait_in_line(photo, tmp_path):
    profile = DriveProfile("narrow", open_s=0.1, bytes_per_s=1e9, source="a test", streams=2)
    slow_down(tmp_path, profile)
    started = perf_counter()
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(read_file, [photo] * 6))
    # Three rounds of two: no machine is so fast that it waits less.
    assert perf_counter() - started >= 0.29


def test_reads_above_the_most_are_refused(photo, tmp_path):
    profile = DriveProfile("strict", open_s=0.2, bytes_per_s=1e9, source="a test", most_reads=2)
    slow_down(tmp_path, profile)
    with ThreadPoolExecutor(4) as pool:
        refused = [pool.submit(read_file, photo) for _ in range(4)]
        errors = [reading.exception() for reading in refused]
    assert sum(isinstance(error, DriveLostError) for error in errors) == 2
