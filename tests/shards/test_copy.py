"""Copying shards: what arrives, what is not copied twice, what stays behind when it goes wrong."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, namedtuple
from dataclasses import replace
from pathlib import Path

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.files import PieceFile, hash_bytes
from colab_utils.machine import find_host
from colab_utils.shards import copy as module
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import INDEX_NAME, ShardIndex, ShardInfo, read_index, write_index
from tests.snapshots import snapshot


def make_source(folder, *, shards=4, seed=0, tar_bytes=3000, arrays_bytes=1000):
    """A folder of shards as the index sees it; a copy does not look inside the files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    infos = []
    for i in range(shards):
        tar = folder / f"shard-{i:06d}.tar"
        arrays = folder / f"shard-{i:06d}.arrays"
        contents = (rng.randbytes(tar_bytes + i), rng.randbytes(arrays_bytes))
        tar.write_bytes(contents[0])
        arrays.write_bytes(contents[1])
        checksums = [hash_bytes(content) for content in contents]
        of_tar = (tar.name, 2, 5, tar_bytes + i, checksums[0])
        infos.append(ShardInfo(*of_tar, arrays.name, arrays_bytes, checksums[1], "0" * 16))
    categories = ({"id": 1, "name": "leaf"},)
    write_index(folder, ShardIndex(f"data {seed}", {"storage": "keep"}, categories, tuple(infos)))
    return folder


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "drive")


@pytest.fixture
def opened(monkeypatch):
    """How often each file of the source was opened."""
    counts = Counter()

    class CountingFile(PieceFile):
        def __init__(self, path, *options):
            if Path(path).parent.name == "drive":
                counts[Path(path).name] += 1
            super().__init__(path, *options)

    monkeypatch.setattr("colab_utils.files.PieceFile", CountingFile)
    return counts


@pytest.mark.parametrize("streams", [1, "auto"])
def test_a_copy_has_the_same_files_and_a_second_one_opens_nothing(
    source, tmp_path, monkeypatch, opened, streams
):
    # The files are larger than a piece.
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    report = copy_shards(source, tmp_path / "ssd", streams=streams)
    assert snapshot(tmp_path / "ssd") == snapshot(source)
    assert (report.shards, report.skipped_shards) == (4, 0)
    assert report.bytes == read_index(source).bytes
    assert str(report).startswith("4 shards in place: 16.0 kB copied in")
    assert set(opened.values()) == {1}
    opened.clear()
    report = copy_shards(source, tmp_path / "ssd", streams=streams)
    assert not opened
    assert (report.shards, report.bytes, report.skipped_shards) == (4, 0, 4)


def test_only_what_is_damaged_is_copied_again(source, tmp_path, opened):
    target = tmp_path / "ssd"
    copy_shards(source, target)
    opened.clear()
    (target / "shard-000001.arrays").unlink()
    content = bytearray((target / "shard-000002.tar").read_bytes())
    content[-1] ^= 1
    (target / "shard-000002.tar").write_bytes(content)
    report = copy_shards(source, target)
    assert snapshot(target) == snapshot(source)
    assert opened.keys() == {"shard-000001.arrays", "shard-000002.tar"}
    assert report.skipped_shards == 2


def test_too_little_disk_is_told_before_the_first_byte(source, tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    # A copy of 16,006 bytes and 2 % more does not fit.
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(10**6, 0, 16_100))
    with pytest.raises(
        ColabUtilsError,
        match=r"16\.3 kB of free disk, and 16\.1 kB are free.*without --ssd",
    ):
        copy_shards(source, tmp_path / "ssd")
    assert not (tmp_path / "ssd").exists()
    # What is there already needs no room.
    (tmp_path / "ssd").mkdir()
    for name in ("shard-000000.tar", "shard-000001.tar"):
        shutil.copy(source / name, tmp_path / "ssd")
    copy_shards(source, tmp_path / "ssd")


def test_a_read_that_was_wrong_once_is_repaired(source, tmp_path, monkeypatch):
    bad = ["shard-000001.tar"]

    class FlakyFile(PieceFile):
        def readinto(self, buffer, offset):
            count = super().readinto(buffer, offset)
            if count and self.path.name in bad:
                bad.remove(self.path.name)
                buffer[:count] = b"?" * count
            return count

    monkeypatch.setattr("colab_utils.files.PieceFile", FlakyFile)
    copy_shards(source, tmp_path / "ssd")
    assert bad == []
    assert snapshot(tmp_path / "ssd") == snapshot(source)


WRONG = r"damaged: its checksum was wrong twice.*delete"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda path: path.unlink(), r"No such file.*verify"),
        # It ends between two pieces, or is longer than what was written.
        (lambda path: os.truncate(path, 700), WRONG),
        (lambda path: path.write_bytes(2 * path.read_bytes()), WRONG),
        (lambda path: path.unlink() or path.symlink_to("/dev/zero"), WRONG),
    ],
)
def test_a_bad_file_of_the_source_is_named(source, tmp_path, monkeypatch, spoil, message):
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    good = snapshot(source)
    spoil(source / "shard-000003.arrays")
    with pytest.raises(ColabUtilsError, match=rf"shard-000003\.arrays.*{message}"):
        copy_shards(source, tmp_path / "ssd")
    assert snapshot(tmp_path / "ssd").keys() <= good.keys() - {INDEX_NAME, "shard-000003.arrays"}


def test_other_shards_in_the_target_are_left_alone(source, tmp_path):
    other = make_source(tmp_path / "other", seed=1)
    before = snapshot(other)
    del before[INDEX_NAME]
    with pytest.raises(ColabUtilsError, match=r"holds other shards\. Name another folder"):
        copy_shards(source, other)
    write_index(other, replace(read_index(source), recipe={"storage": "shrink"}))
    # The dataset is the same, stored in another size.
    with pytest.raises(ColabUtilsError, match=r"holds other shards"):
        copy_shards(source, other)
    (other / INDEX_NAME).unlink()
    with pytest.raises(
        ColabUtilsError,
        match=r"holds another shard-\d+\.(tar|arrays)\. Name another folder, or delete",
    ):
        copy_shards(source, other)
    assert snapshot(other) == before


SLOW_COPY = """
import sys
from colab_utils.shards import copy
from colab_utils.slow_drive import DriveProfile, slow_down
copy._PIECE_BYTES = 2000
slow_down(sys.argv[1], DriveProfile("test", 0.001, 4e5, ""))
copy.copy_shards(*sys.argv[1:], streams=2)
"""


@pytest.fixture
def running(tmp_path):
    """A copy in another process, stopped by a signal once one file has arrived and another is under
    way.
    """
    source = make_source(tmp_path / "drive", tar_bytes=200_000)

    def stop(number):
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW_COPY, str(source), str(tmp_path / "ssd")],
            env={**os.environ, "PYTHONPATH": str(Path(module.__file__).parents[2])},
            stderr=subprocess.PIPE,
        )
        deadline = time.monotonic() + 60
        while not (list(tmp_path.glob("ssd/*.arrays")) and list(tmp_path.glob("ssd/.*.part"))):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(number)
        process.communicate(timeout=60)
        assert process.returncode != 0
        return source, tmp_path / "ssd"

    return stop


def test_ctrl_c_leaves_finished_files_and_no_index(running):
    source, target = running(signal.SIGINT)
    left = snapshot(target)
    assert left
    assert INDEX_NAME not in left
    assert left.items() <= snapshot(source).items()
    copy_shards(source, target)
    assert snapshot(target) == snapshot(source)


def test_after_a_kill_the_next_copy_sweeps_and_continues(running):
    source, target = running(signal.SIGKILL)
    assert list(target.glob(".*.part"))
    # A copy that still runs elsewhere owns this file.
    alive = target / f".shard-000000.tar.{find_host()}-{os.getppid()}-1.part"
    alive.touch()
    copy_shards(source, target)
    alive.unlink()
    assert snapshot(target) == snapshot(source)


def test_files_are_read_at_once(source, tmp_path, monkeypatch):
    """The first read of each tar waits until the other tars are being read, too."""
    barrier = threading.Barrier(4)

    class WaitingFile(PieceFile):
        def readinto(self, buffer, offset):
            if self.path.suffix == ".tar" and not offset:
                barrier.wait(20)
            return super().readinto(buffer, offset)

    monkeypatch.setattr("colab_utils.files.PieceFile", WaitingFile)
    copy_shards(source, tmp_path / "ssd", streams=8)
    assert snapshot(tmp_path / "ssd") == snapshot(source)


def test_an_edited_index_does_not_survive_a_copy(source, tmp_path):
    target = tmp_path / "ssd"
    copy_shards(source, target)
    edited = json.dumps({**json.loads((target / INDEX_NAME).read_text()), "categories": []})
    (target / INDEX_NAME).write_text(edited)
    with pytest.raises(ColabUtilsError, match=f"{target}.* changed since"):
        copy_shards(source, target)
    assert (target / INDEX_NAME).read_text() == edited
    # Deleting the file is the cure that the message names.
    (target / INDEX_NAME).unlink()
    copy_shards(source, target)
    assert snapshot(target) == snapshot(source)
