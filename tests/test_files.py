"""Files that are read: what comes, what is refused, and what stays open."""

from __future__ import annotations

import os
import stat
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store, parse_file, read_file
from tests.bad_reads import BadReads, cut


@pytest.mark.parametrize(
    "read",
    [read_file, lambda path: open_store(path).open("").pread(1, 0)],
)
def test_a_pipe_is_not_waited_for(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises((ColabUtilsError, OSError), match=r"is a device or a pipe|Illegal seek"):
        read(tmp_path / "pipe")


def test_a_socket_is_refused_before_it_is_opened(tmp_path):
    os.mknod(tmp_path / "socket", stat.S_IFSOCK | 0o600)
    with pytest.raises(ColabUtilsError, match="is a device or a pipe"):
        read_file(tmp_path / "socket")


def test_what_no_memory_holds_is_not_read(tmp_path):
    with open(tmp_path / "photo.jpg", "wb") as file:
        file.truncate(10**9 + 1)
    with pytest.raises(ColabUtilsError, match=r"The file .*photo.jpg has 1\.0 GB, and at most"):
        read_file(tmp_path / "photo.jpg")
    with pytest.raises(IsADirectoryError):
        read_file(tmp_path)


def test_a_closed_file_frees_its_descriptor(photo):
    before = len(os.listdir("/proc/self/fd"))
    for is_closed in [True, False] * 20:
        file = open_store(photo).open("")
        file.pread(1, 0)
        if is_closed:
            file.close()
            file.close()
    # A file that is forgotten is collected.
    assert len(os.listdir("/proc/self/fd")) <= before + 1


@pytest.mark.parametrize("times", [1, 4])
def test_a_file_of_which_too_few_bytes_came_is_read_again(photo, monkeypatch, times):
    reads = BadReads(monkeypatch, ".jpg", cut, times)
    assert read_file(photo) == photo.read_bytes()
    assert reads.times == 0


def test_too_few_bytes_are_never_taken_for_the_file(photo, monkeypatch):
    BadReads(monkeypatch, ".jpg", cut, 1000)
    with pytest.raises(DriveLostError, match=r"Only 500 of the 1,000 bytes of .*photo\.jpg came"):
        read_file(photo)
    # The system gives no size for this file.
    assert read_file("/proc/self/stat")


def test_what_is_refused_is_read_again_until_the_same_bytes_came_twice():
    contents = [b"a", b"b", b"b", b"5"]

    def read():
        return contents.pop(0)

    with pytest.raises(ValueError, match="'b'"):
        parse_file("a.txt", read, int)
    assert contents == [b"5"]
    contents[:] = [b"a", b"b", b"c", b"5"]
    assert parse_file("a.txt", read, int) == 5


def test_threads_share_an_open_file(tmp_path, monkeypatch):
    content = os.urandom(300_000)
    (tmp_path / "shard.tar").write_bytes(content)
    preadv = os.preadv

    def give_less(descriptor, buffers, offset):
        # A network file gives less than was asked for, and other threads run meanwhile.
        time.sleep(0)
        return preadv(descriptor, [buffers[0][:997]], offset)

    monkeypatch.setattr(os, "preadv", give_less)
    with open_store(tmp_path).open("shard.tar") as file, ThreadPoolExecutor(8) as pool:
        offsets = range(0, 290_000, 1_450)
        pieces = pool.map(lambda offset: file.pread(10_000, offset), offsets)
        assert list(pieces) == [content[offset : offset + 10_000] for offset in offsets]
        # All threads wanted to open it first.
        names = [
            os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")
        ]
        assert names.count(str(tmp_path / "shard.tar")) == 1
