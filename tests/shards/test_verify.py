"""Verifying shards: each damage is named, and a lost Drive is none."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading

import pytest

from colab_utils.drive import DriveLostError
from colab_utils.files import Store
from colab_utils.shards.index import read_index
from colab_utils.shards.verify import verify_shards


@pytest.fixture
def shards(tiny_shards, tmp_path):
    return shutil.copytree(tiny_shards, tmp_path / "shards")


def test_whole_shards_are_complete(tiny_shards):
    report = verify_shards(tiny_shards)
    assert report.bad == ()
    assert (report.images, report.shards) == (12, len(read_index(tiny_shards).shards))
    assert "all complete" in str(report)


def flip(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


# The tar is damaged first, then the arrays.
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "cut short"),
        (lambda path: path.unlink(), "is missing"),
        (lambda path: path.unlink() or path.symlink_to("/dev/zero"), "cut short or changed"),
        (
            lambda path: path.unlink() or path.symlink_to(path.name),
            "cannot be read",
        ),
        (flip, "cut short or changed"),
    ],
)
def test_each_damage_is_named(shards, which, damage, message):
    shard = read_index(shards).shards[1]
    name = (shard.name, shard.arrays_name)[which]
    damage(shards / name)
    report = verify_shards(shards)
    assert [bad.shard for bad in report.bad] == [shard.name]
    assert message in report.bad[0].reason
    assert name in report.bad[0].reason
    assert "1 bad" in str(report)


def test_a_shard_that_was_read_badly_once_is_no_bad_one(shards, monkeypatch):
    wrong = iter([(0, "")])
    read = Store.hash
    monkeypatch.setattr(Store, "hash", lambda *place: next(wrong, None) or read(*place))
    assert verify_shards(shards).bad == ()


@pytest.mark.parametrize("number", [errno.ENOTCONN, errno.EACCES])
def test_a_lost_drive_stops_and_a_locked_file_is_named(shards, monkeypatch, number):
    def fail(*_, **__):
        raise OSError(number, "no")

    monkeypatch.setattr(os, "preadv", fail)
    if number == errno.ENOTCONN:
        with pytest.raises(DriveLostError):
            verify_shards(shards)
    else:
        assert "cannot be read" in verify_shards(shards).bad[0].reason


def test_ctrl_c_waits_for_no_read_that_hangs(shards, monkeypatch):
    over = threading.Event()
    ended = []

    def hash_for_ever(*_):
        over.wait(60)
        ended.append(True)

    monkeypatch.setattr(Store, "hash", hash_for_ever)
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        verify_shards(shards)
    assert not ended
    over.set()
