"""Files of a slow folder that are kept on this machine's disk."""

import multiprocessing
import pickle
import resource
import shutil
import threading
import time
from unittest.mock import Mock

import pytest

from colab_utils import file_cache
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.file_cache import FileCache
from colab_utils.processes import quiet_fork


class SlowFile:
    """A file whose reads take a while, and are counted among all processes."""

    def __init__(self, content=b"pixels", seconds=0.2):
        self.content = content
        self.seconds = seconds
        self.reads = multiprocessing.get_context("fork").Value("i", 0)

    def __call__(self):
        with self.reads.get_lock():
            self.reads.value += 1
        time.sleep(self.seconds)
        return self.content


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_a_file_that_several_want_at_once_is_read_once(tmp_path, kind):
    cache = FileCache(tmp_path)
    file = SlowFile()
    start = threading.Thread if kind == "threads" else multiprocessing.get_context("fork").Process
    others = [start(target=cache.read, args=("a.jpg", file)) for _ in range(4)]
    with quiet_fork():
        for other in others:
            other.start()
    assert cache.read("a.jpg", file) == b"pixels"
    for other in others:
        other.join()
    assert file.reads.value == 1
    assert pickle.loads(pickle.dumps(cache)).read("a.jpg", file) == b"pixels"
    assert file.reads.value == 1


@pytest.mark.parametrize("damage", [lambda data: data[:5], lambda data: b"?" + data[1:]])
def test_a_damaged_file_is_read_anew(tmp_path, damage):
    cache = FileCache(tmp_path)
    cache.read("a.jpg", lambda: b"right")
    path = next(path for path in tmp_path.iterdir() if not path.suffix)
    path.write_bytes(damage(path.read_bytes()))
    assert cache.read("a.jpg", lambda: b"anew") == b"anew"
    assert cache.read("a.jpg", lambda: b"again") == b"anew"


def test_on_a_full_disk_no_more_is_kept_and_one_warning_says_so(tmp_path, monkeypatch):
    free = 2000
    monkeypatch.setattr(file_cache, "find_free_space", lambda folder: free)
    cache = FileCache(tmp_path)
    cache.reserve_bytes = 1000
    cache.read("first", lambda: bytes(500))
    with pytest.warns(ColabUtilsWarning, match="too full to keep more files") as caught:
        contents = [cache.read(name, lambda: bytes(1500)) for name in ("second", "third")]
    assert contents == [bytes(1500)] * 2
    assert len(caught) == 1
    assert cache.read("first", bytes) == bytes(500)
    assert cache.read("second", lambda: b"read again") == b"read again"


def test_a_file_that_fits_in_part_is_not_kept_and_one_warning_says_so(tmp_path):
    cache = FileCache(tmp_path)

    def read():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        with pytest.warns(ColabUtilsWarning, match="too full to keep more files"):
            assert cache.read("a", lambda: bytes(5000)) == bytes(5000)

    process = multiprocessing.get_context("fork").Process(target=read)
    process.start()
    process.join()
    assert process.exitcode == 0
    # This process shares with that one that no more is kept, and does not warn again.
    assert cache.read("a", lambda: b"read again") == b"read again"


def test_a_disk_that_refuses_files_does_not_stop_a_read(tmp_path, monkeypatch):
    cache = FileCache(tmp_path)
    monkeypatch.setattr("fcntl.flock", Mock(side_effect=OSError))
    assert cache.read("b.jpg", bytes) == b""
    shutil.rmtree(tmp_path)
    assert cache.read("a.jpg", lambda: b"pixels") == b"pixels"


def test_a_read_that_hangs_elsewhere_is_not_waited_for_for_ever(tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "_OTHER_S", 0.1)
    cache = FileCache(tmp_path)
    release = threading.Event()
    began = threading.Event()

    def hang():
        began.set()
        release.wait(20)
        return b"late"

    other = threading.Thread(target=cache.read, args=("a.jpg", hang))
    other.start()
    assert began.wait(20)
    assert cache.read("a.jpg", lambda: b"own") == b"own"
    release.set()
    other.join()
    assert cache.read("a.jpg", lambda: b"again") == b"late"


def test_a_reader_that_gives_way_waits_while_others_read(tmp_path, monkeypatch):
    monkeypatch.setattr(file_cache, "_GIVE_WAY_S", 20.0)
    monkeypatch.setattr(file_cache, "_QUIET_S", 5.0)
    trainer = FileCache(tmp_path)
    writer = pickle.loads(pickle.dumps(trainer))
    # A fork would share this memory.
    writer._read_s = trainer._read_s
    writer.gives_way = True
    # Nobody has read yet.
    assert writer.read("first", lambda: b"1") == b"1"
    trainer.read("second", lambda: b"2")
    began = threading.Event()
    thread = threading.Thread(target=writer.read, args=("third", lambda: began.set() or b"3"))
    thread.start()
    # A file that is kept is read at once.
    assert writer.read("second", bytes) == b"2"
    assert not began.wait(0.2)
    trainer._read_s[0] -= 5.0
    assert began.wait(20)
    thread.join()


def test_the_folder_is_one_of_this_machine(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ColabUtilsError, match=r"Writing into .* failed"):
        FileCache(tmp_path / "file")
    with pytest.raises(ColabUtilsError, match="s3://bucket"):
        FileCache("s3://bucket/cache")
