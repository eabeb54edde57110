"""Copying shards: what arrives, what is not copied twice, what stays behind when it goes wrong."""

from __future__ import annotations

import errno
import json
import os
import random
import re
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

from colab_utils import files
from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.files import DriveFile, hash_bytes
from colab_utils.machine import find_host
from colab_utils.shards import copy as module
from colab_utils.shards.copy import copy_shards
from colab_utils.shards.index import INDEX_NAME, ShardIndex, ShardInfo, read_index, write_index
from colab_utils.shards.lock import WRITER_NAME
from colab_utils.slow_drive import slow_down

RECIPE = {
    "storage": "keep",
    "min_size": 800,
    "max_size": 1333,
    "shard_mb": 1,
    "images_per_shard": 2,
}


def hash_file(path):
    """The size and the checksum of a file."""
    content = path.read_bytes()
    return len(content), hash_bytes(content)


def open_as(monkeypatch, kind):
    """Open each file that is copied or compared as one of this kind."""
    monkeypatch.setattr(files, "DriveFile", kind)


def make_source(folder, *, shards=4, seed=0, tar_bytes=3000, arrays_bytes=1000):
    """A folder of shards as the index sees it; a copy does not look inside the files."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    infos = []
    for i in range(shards):
        tar = folder / f"shard-{i:06d}.tar"
        arrays = folder / f"shard-{i:06d}.arrays"
        tar.write_bytes(rng.randbytes(tar_bytes + i))
        arrays.write_bytes(rng.randbytes(arrays_bytes))
        infos.append(
            ShardInfo(
                name=tar.name,
                images=2,
                annotations=5,
                bytes=tar_bytes + i,
                xxh3_64=hash_file(tar)[1],
                arrays_name=arrays.name,
                arrays_bytes=arrays_bytes,
                arrays_xxh3_64=hash_file(arrays)[1],
                tables_xxh3_64="0" * 16,
            )
        )
    index = ShardIndex(
        f"dataset-{seed}",
        RECIPE,
        ({"id": 1, "name": "leaf"},),
        tuple(infos),
    )
    write_index(folder, index)
    return folder


@pytest.fixture
def source(tmp_path):
    return make_source(tmp_path / "drive")


@pytest.fixture
def opened(monkeypatch):
    """How often each file of the source was opened."""
    counts = Counter()

    class CountingFile(DriveFile):
        def __init__(self, path, *options):
            if Path(path).parent.name == "drive":
                counts[Path(path).name] += 1
            super().__init__(path, *options)

    open_as(monkeypatch, CountingFile)
    return counts


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def assert_same(source, target):
    assert names(source) == names(target)
    for name in names(source):
        assert (source / name).read_bytes() == (target / name).read_bytes(), name


def test_files_larger_than_a_piece_arrive(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    source = make_source(tmp_path / "drive")
    copy_shards(source, tmp_path / "ssd")
    assert_same(source, tmp_path / "ssd")


def test_a_second_copy_opens_nothing_in_the_source(source, tmp_path, opened):
    copy_shards(source, tmp_path / "ssd")
    opened.clear()
    report = copy_shards(source, tmp_path / "ssd")
    assert not opened
    assert (report.shards, report.bytes, report.skipped_shards) == (4, 0, 4)


@pytest.mark.parametrize("damage", ["deleted", "truncated", "flipped"])
def test_only_what_is_damaged_is_copied_again(source, tmp_path, opened, damage):
    target = tmp_path / "ssd"
    copy_shards(source, target)
    opened.clear()
    victim = target / "shard-000002.tar"
    if damage == "deleted":
        victim.unlink()
    elif damage == "truncated":
        victim.write_bytes(victim.read_bytes()[:1000])
    else:
        content = bytearray(victim.read_bytes())
        content[-1] ^= 1
        victim.write_bytes(content)
    report = copy_shards(source, target)
    assert_same(source, target)
    assert set(opened) == {"shard-000002.tar"}
    assert report.skipped_shards == 3


def test_a_slowed_folder_slows_every_stream(source, tmp_path, monkeypatch):
    seen = []

    class SpyingFile(DriveFile):
        def __init__(self, path, retries=None):
            super().__init__(path, retries)
            seen.append(self.profile)
            self.profile = None

    open_as(monkeypatch, SpyingFile)
    slow_down(source, "bad")
    copy_shards(source, tmp_path / "ssd")
    assert {profile.name for profile in seen} == {"bad"}
    with pytest.raises(ColabUtilsError, match="'slug'"):
        slow_down(source, "slug")


@pytest.mark.parametrize("which", ["source", "target"])
def test_an_edited_index_does_not_survive_a_copy(source, tmp_path, which):
    target = tmp_path / "ssd"
    copy_shards(source, target)
    path = (source if which == "source" else target) / INDEX_NAME
    index = json.loads(path.read_text())
    index["categories"][0].update(name="root")
    path.write_text(json.dumps(index))
    before = path.read_bytes()
    with pytest.raises(ColabUtilsError, match=re.escape(str(path.parent))):
        copy_shards(source, target)
    assert path.read_bytes() == before
    # Deleting the file is the cure that the message names.
    if which == "target":
        path.unlink()
        copy_shards(source, target)
        assert_same(source, target)


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

    class FlakyFile(DriveFile):
        def readinto(self, buffer, offset):
            count = super().readinto(buffer, offset)
            if count and self.path.name in bad:
                bad.remove(self.path.name)
                buffer[:count] = b"?" * count
            return count

    open_as(monkeypatch, FlakyFile)
    copy_shards(source, tmp_path / "ssd")
    assert bad == []
    assert_same(source, tmp_path / "ssd")


def test_a_file_that_never_ends_is_not_copied(source, tmp_path):
    (source / "shard-000003.arrays").unlink()
    (source / "shard-000003.arrays").symlink_to("/dev/zero")
    with pytest.raises(
        ColabUtilsError, match=r"shard-000003\.arrays.*damaged: its checksum was wrong twice"
    ):
        copy_shards(source, tmp_path / "ssd")


def test_a_shard_that_is_missing_in_the_source_is_named(source, tmp_path):
    (source / "shard-000003.arrays").unlink()
    with pytest.raises(ColabUtilsError, match=r"shard-000003\.arrays.*No such file.*verify"):
        copy_shards(source, tmp_path / "ssd")
    assert INDEX_NAME not in names(tmp_path / "ssd")


def test_a_drive_that_vanishes_leaves_complete_files(source, tmp_path, monkeypatch):
    class VanishingFile(DriveFile):
        def readinto(self, buffer, offset):
            if self.path.name >= "shard-000002":
                monkeypatch.setattr(
                    os, "preadv", lambda *_: (_ for _ in ()).throw(OSError(errno.ENOTCONN, "gone"))
                )
            return super().readinto(buffer, offset)

    with monkeypatch.context() as patch:
        open_as(patch, VanishingFile)
        with pytest.raises(
            DriveLostError,
            match=r"disconnected.*force_remount.*run the same again: what is done is safe",
        ):
            copy_shards(source, tmp_path / "ssd", streams=1)
        left = names(tmp_path / "ssd")
        assert left == [
            "shard-000000.arrays",
            "shard-000000.tar",
            "shard-000001.arrays",
            "shard-000001.tar",
        ]
    monkeypatch.undo()
    assert copy_shards(source, tmp_path / "ssd").skipped_shards == 2
    assert_same(source, tmp_path / "ssd")


def test_a_full_disk_leaves_no_half_copy(source, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ColabUtilsError, match=r"failed: No space left.*it continues there"):
        copy_shards(source, tmp_path / "ssd")
    assert names(tmp_path / "ssd") == []


def test_other_shards_in_the_target_are_left_alone(source, tmp_path):
    other = make_source(tmp_path / "other", seed=1)
    before = {name: (other / name).read_bytes() for name in names(other)}
    with pytest.raises(ColabUtilsError, match=r"holds other shards\. Name another folder"):
        copy_shards(source, other)
    write_index(other, replace(read_index(source), recipe={**RECIPE, "max_size": 640}))
    before[INDEX_NAME] = (other / INDEX_NAME).read_bytes()
    # The dataset is the same, stored in another size.
    with pytest.raises(ColabUtilsError, match=r"holds other shards"):
        copy_shards(source, other)
    (other / INDEX_NAME).unlink()
    with pytest.raises(
        ColabUtilsError,
        match=r"holds another shard-\d+\.(tar|arrays)\. Name another folder, or delete",
    ):
        copy_shards(source, other)
    for name in before.keys() - {INDEX_NAME}:
        assert (other / name).read_bytes() == before[name]
    assert INDEX_NAME not in names(other)


def test_a_preprocess_in_the_target_is_left_alone(source, tmp_path):
    (tmp_path / "ssd").mkdir()
    (tmp_path / "ssd" / WRITER_NAME).write_text("{}")
    with pytest.raises(ColabUtilsError, match=r"A preprocess is writing into"):
        copy_shards(source, tmp_path / "ssd")


def test_mistakes_are_named(source, tmp_path):
    with pytest.raises(ColabUtilsError, match=r"There is no folder of shards at"):
        copy_shards(tmp_path / "nowhere", tmp_path / "ssd")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ColabUtilsError, match=r"There is no index\.json in "):
        copy_shards(tmp_path / "empty", tmp_path / "ssd")
    (tmp_path / "link").symlink_to(source)
    with pytest.raises(ColabUtilsError, match=r"source and target at once"):
        copy_shards(source, tmp_path / "link")
    (tmp_path / "file").touch()
    with pytest.raises(ColabUtilsError, match=r"File exists"):
        copy_shards(source, tmp_path / "file")
    assert not (tmp_path / "ssd").exists()


@pytest.fixture
def running(tmp_path):
    """A copy in another process, stopped by a signal once one file has arrived and another is under
    way.
    """
    source = make_source(tmp_path / "drive", tar_bytes=200_000)

    def stop(number):
        script = (
            "import sys\n"
            "from colab_utils.shards import copy\n"
            "from colab_utils.slow_drive import DriveProfile, slow_down\n"
            "copy._PIECE_BYTES = 2000\n"
            "slow_down(sys.argv[1], DriveProfile('test', 0.001, 4e5, ''))\n"
            "copy.copy_shards(*sys.argv[1:], streams=2)"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", script, str(source), str(tmp_path / "ssd")],
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
    left = names(target)
    assert left
    assert INDEX_NAME not in left
    assert not [name for name in left if name.endswith(".part")]
    for name in left:
        assert (target / name).read_bytes() == (source / name).read_bytes()
    copy_shards(source, target)
    assert_same(source, target)


def test_after_a_kill_the_next_copy_sweeps_and_continues(running):
    source, target = running(signal.SIGKILL)
    assert list(target.glob(".*.part"))
    # A copy that still runs elsewhere owns this file.
    alive = target / f".shard-000000.tar.{find_host()}-{os.getppid()}-1.part"
    alive.touch()
    copy_shards(source, target)
    alive.unlink()
    assert_same(source, target)


@pytest.mark.parametrize("streams", [1, 16, "auto"])
def test_every_number_of_streams_makes_the_same_files(source, tmp_path, opened, streams):
    report = copy_shards(source, tmp_path / "ssd", streams=streams)
    assert_same(source, tmp_path / "ssd")
    assert (report.shards, report.skipped_shards) == (4, 0)
    assert report.bytes == read_index(source).bytes
    assert str(report).startswith("4 shards in place: 16.0 kB copied in")
    assert set(opened.values()) == {1}


def test_files_are_read_at_once(source, tmp_path, monkeypatch):
    """The first read of each tar waits until the other tars are being read, too."""
    barrier = threading.Barrier(4)

    class WaitingFile(DriveFile):
        def readinto(self, buffer, offset):
            if self.path.suffix == ".tar" and not offset:
                barrier.wait(20)
            return super().readinto(buffer, offset)

    open_as(monkeypatch, WaitingFile)
    copy_shards(source, tmp_path / "ssd", streams=8)
    assert_same(source, tmp_path / "ssd")


def test_few_large_files_are_under_way_at_once(source, tmp_path, monkeypatch):
    """Drive's cache keeps a second copy of each of them."""
    monkeypatch.setattr(module, "_UNDER_WAY_BYTES", 20_000)
    limits = []

    class NotedReader(module.Reader):
        def __init__(self, read, **options):
            limits.append(options["most_streams"])
            super().__init__(read, **options)

    monkeypatch.setattr(module, "Reader", NotedReader)
    copy_shards(source, tmp_path / "ssd")
    copy_shards(make_source(tmp_path / "large", tar_bytes=9000), tmp_path / "other")
    assert limits == [6, 4]


@pytest.mark.parametrize("size", [0, 1400, 4000])
def test_a_source_of_another_size_is_named(source, tmp_path, monkeypatch, size):
    """It is empty, ends within a piece or between two, or is longer than what was written."""
    monkeypatch.setattr(module, "_PIECE_BYTES", 700)
    content = (source / "shard-000001.tar").read_bytes()
    (source / "shard-000001.tar").write_bytes((content + content)[:size])
    with pytest.raises(
        ColabUtilsError,
        match=r"shard-000001\.tar.* is damaged: its checksum was wrong twice.*delete",
    ):
        copy_shards(source, tmp_path / "ssd")
    assert not {INDEX_NAME, "shard-000001.tar"} & set(names(tmp_path / "ssd"))
    assert not [name for name in names(tmp_path / "ssd") if name.endswith(".part")]


def test_a_drive_that_refuses_some_reads_gives_every_file(source, tmp_path, monkeypatch):
    """Each file fails once; the reader is told, and the copy goes on."""
    failed = set()
    monkeypatch.setattr("colab_utils.drive.RETRY_WAITS_S", (0.01, 0.01, 0.01, 0.01))
    monkeypatch.setattr("colab_utils.drive.is_on_drive", lambda path: True)
    preadv = os.preadv

    def refuse(descriptor, *rest):
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        if name not in failed:
            failed.add(name)
            raise OSError(errno.EIO, "Input/output error")
        return preadv(descriptor, *rest)

    monkeypatch.setattr(os, "preadv", refuse)
    copy_shards(source, tmp_path / "ssd")
    monkeypatch.undo()
    assert len(failed) == 8
    assert_same(source, tmp_path / "ssd")


def test_a_read_error_of_the_source_is_not_told_as_one_of_the_target(source, tmp_path, monkeypatch):
    class BrokenFile(DriveFile):
        def readinto(self, buffer, offset):
            raise OSError(errno.EIO, "Input/output error")

    open_as(monkeypatch, BrokenFile)
    message = rf"shard-00000.*cannot be read in {re.escape(str(source))}: Input/output error"
    with pytest.raises(ColabUtilsError, match=message):
        copy_shards(source, tmp_path / "ssd")


@pytest.mark.parametrize("streams", [0, 10_000, "many"])
def test_streams_out_of_range_are_refused(source, tmp_path, streams):
    with pytest.raises(ColabUtilsError, match="streams"):
        copy_shards(source, tmp_path / "ssd", streams=streams)
    assert not (tmp_path / "ssd").exists()
