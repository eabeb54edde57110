"""Folders, and URLs that fsspec knows: what lies there, and what goes wrong there."""

import errno
import json
import os
import pickle
from contextlib import suppress
from datetime import datetime
from pathlib import Path

import pytest

from colab_utils import files
from colab_utils.drive import DriveLostError, RefusedError, ServerLostError
from colab_utils.errors import ColabUtilsError
from colab_utils.files import IMPATIENT, hash_bytes, open_store, read_file
from colab_utils.places import UrlPath, open_place
from colab_utils.urls import guard_server
from tests.faulty_server import FaultyFileSystem, fail_from, fail_times
from tests.file_server import FileServer

CONTENT = bytes(range(256)) * 40


class AnswerError(Exception):
    """What a web server's package raises of an answer."""

    def __init__(self, status):
        super().__init__(f"{status} at https://host/file?signature=secret")
        self.status = status


class NoCredentialsError(Exception):
    """As botocore calls it."""


class ClientError(Exception):
    """That of botocore for an answer of S3. s3fs raises an error of Python from it."""

    def __init__(self, status, code):
        super().__init__(f"An error occurred ({code}) when calling a method: said S3")
        self.response = {"ResponseMetadata": {"HTTPStatusCode": status}}


def make_s3_error(status, code):
    error = OSError(errno.EIO, "said S3")
    error.__cause__ = ClientError(status, code)
    return error


@pytest.fixture(autouse=True)
def empty_server(tmp_path):
    FaultyFileSystem.reset(tmp_path)
    yield
    FaultyFileSystem.reset("")


@pytest.fixture
def file():
    path = UrlPath("faulty://bucket/a/b.bin")
    open_store(path.parent).write("b.bin", CONTENT)
    FaultyFileSystem.calls.clear()
    return path


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data/shards", Path("data/shards")),
        ("file:///data/shards", Path("/data/shards")),
        ("memory://bucket/shards/", UrlPath("memory://bucket/shards")),
        # The module pathlib makes one slash of two.
        (Path("memory://bucket/shards"), UrlPath("memory://bucket/shards")),
        ("MEMORY://bucket/Shards", UrlPath("memory://bucket/Shards")),
        ("https://host/photos/", UrlPath("https://host/photos")),
        ("HTTPS://host/a.json?key=a/b?c", UrlPath("https://host/a.json?key=a/b?c")),
        ("C:/data", Path("C:/data")),
        ("FILE:/data/", Path("/data")),
        # A space comes with copying and pasting.
        (" memory://bucket/shards ", UrlPath("memory://bucket/shards")),
        ("memory:/bucket/a%20b?c d", UrlPath("memory://bucket/a%20b?c d")),
    ],
)
def test_a_place_is_a_path_or_a_url(text, place):
    assert open_place(text) == place


def test_a_password_is_sent_and_not_shown():
    place = open_place("ftp://me:S3CRET@host/photos") / "a@b.jpg"
    assert str(place) == "ftp://host/photos/a@b.jpg"
    assert place.server == "ftp://me:S3CRET@host"


@pytest.mark.parametrize("path", [None, b"data", " "], ids=repr)
def test_what_is_no_path_is_told(path):
    with pytest.raises(ColabUtilsError, match="is not the path of a folder or file"):
        open_place(path)


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("s3://bucket/x", "Install s3fs"),
        ("nonsense://bucket/x", "Protocol not known"),
        ("simplecache::s3://bucket/x", "is not a URL. Write it as s3://"),
    ],
)
def test_a_url_that_cannot_be_read_here_is_refused_at_once(url, cure):
    with pytest.raises(ColabUtilsError, match=cure):
        open_store(url).find_kind()


def test_names_are_put_together_and_taken_apart():
    folder = UrlPath("memory://bucket/shards")
    path = folder / "shard-000001.tar"
    assert (path.parent, path.name) == (folder, "shard-000001.tar")
    assert pickle.loads(pickle.dumps(path)) == path


def test_names_at_a_web_server_are_quoted():
    path = UrlPath("https://host/photos") / "my photos/a#1.jpg"
    assert str(path) == "https://host/photos/my%20photos/a%231.jpg"


class Kind:
    """One kind of place: a folder, a server of fsspec, or a web server; and its faults."""

    def __init__(self, name, tmp_path, monkeypatch, web):
        self.name = name
        self.patch = monkeypatch
        self.web = web
        self.folder = {
            "folder": tmp_path,
            "server": UrlPath("faulty://bucket"),
            "memory": UrlPath(f"memory://{tmp_path.name}/kind"),
            "web": UrlPath(web.url),
        }[name]
        self.store = open_store(self.folder)

    def put(self, name, content):
        """Write a file, which nobody can at a web server."""
        if self.name == "web":
            (self.web.folder / name).write_bytes(content)
        else:
            self.store.write(name, content[:9], memoryview(content)[9:])
        return self.folder / name

    def fail_reads(self, times):
        """Make the next reads fail as on a Drive that was lost, or at a server."""
        FaultyFileSystem.fault = fail_times(times, ConnectionResetError())
        self.web.faults.write_text(json.dumps({"status": 503, "times": times}))
        lost = OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        fail = fail_times(times, lost, call="open", name="shard-")

        def fail_and_open(path, flags):
            fail("open", str(path))
            return os.open(path, flags)

        if self.name == "folder":
            self.patch.setattr(files, "_open_at_once", fail_and_open)

    def cut_writes(self):
        """Make the last bytes of what is written go missing."""
        pipe_file = FaultyFileSystem.pipe_file

        def cut(self, path, value, **options):
            return pipe_file(self, path, value[:-1], **options)

        self.patch.setattr(FaultyFileSystem, "pipe_file", cut)
        self.patch.setattr(os, "fsync", lambda number: os.truncate(number, 4))

    def fail_writes(self):
        """Make every write fail."""

        def fail(*_):
            raise OSError(errno.EIO, "Input/output error")

        FaultyFileSystem.fault = fail_from(0, TimeoutError("silence"), call="write")
        self.patch.setattr(os, "fsync", fail)


@pytest.fixture
def kind(request, tmp_path, monkeypatch):
    """A kind of place by its name."""
    folder = tmp_path / "web"
    folder.mkdir()
    with FileServer(folder, tmp_path / "faults.json") as web:
        yield Kind(request.param, tmp_path, monkeypatch, web)


def of_kinds(*names):
    """Run a test with each of these kinds of places."""
    return pytest.mark.parametrize("kind", names, indirect=True)


every_kind = of_kinds("folder", "server", "web")
every_kind_to_write = of_kinds("folder", "server")
every_kind_with_memory = of_kinds("folder", "server", "memory")


@every_kind_with_memory
def test_a_store_gives_back_what_was_written(kind):
    store = kind.store
    store.make()
    kind.put("a.bin", CONTENT)
    assert store.list_names("*.bin") == ["a.bin"]
    assert store.list_names("*.txt") == []
    assert open_store(kind.folder / "nothing").list_names() == []
    assert (store.find_kind(), store.find_kind("a.bin")) == ("folder", "file")
    kind.put("a.bin", b"another content")
    assert store.read("a.bin") == b"another content"
    assert store.has_files([("a.bin", 15, "")])
    assert not store.has_files([("a.bin", 15, ""), ("b.bin", 3, "")])
    before = store.stamp("a.bin")
    store.touch("a.bin")
    assert store.stamp("a.bin").modified_s > before.modified_s
    store.move("a.bin", kind.folder / "b.bin")
    assert store.list_names("*.bin") == ["b.bin"]
    store.remove("b.bin", is_large=True)
    # What is gone needs no removing.
    store.remove("b.bin")
    assert store.find_kind("b.bin") == ""


def test_another_name_of_a_large_file_keeps_its_bytes(tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    os.link(tmp_path / "a.bin", tmp_path / "copy.bin")
    open_store(tmp_path).remove("a.bin", is_large=True)
    assert (tmp_path / "copy.bin").read_bytes() == CONTENT


@pytest.mark.parametrize("key", ["created", "mtime", "last_modified", "LastModified"])
def test_servers_tell_the_time_of_a_file_under_different_names(monkeypatch, key):
    store = open_store("memory://times")
    info = {"type": "file", "size": 1, key: datetime.fromtimestamp(5)}
    monkeypatch.setattr(type(store), "_find_info", lambda *_: info)
    assert store.stamp("a.bin").modified_s == 5


@every_kind_with_memory
def test_a_file_appears_when_it_is_complete(kind):
    kind.store.make()
    with kind.store.create("a.bin") as file:
        file.write(CONTENT)
        assert kind.store.find_kind("a.bin") == ""
    assert kind.store.read("a.bin") == CONTENT
    with suppress(InterruptedError), kind.store.create("b.bin") as file:
        file.write(CONTENT)
        raise InterruptedError
    assert kind.store.list_names("*b.bin*") == []


@every_kind
def test_a_store_gives_every_piece_of_a_file(kind):
    path = kind.put("shard-1.tar", CONTENT)
    store = pickle.loads(pickle.dumps(kind.store))
    assert store.find_kind("shard-1.tar") == "file"
    assert store.read("shard-1.tar") == read_file(path) == CONTENT
    # The place of a file counts as its name.
    assert store.read_listed(path) == CONTENT
    assert store.stamp("shard-1.tar").bytes == len(CONTENT)
    assert store.hash(path) == (len(CONTENT), hash_bytes(CONTENT))
    content = bytearray(len(CONTENT))
    view = memoryview(content)
    with store.open("shard-1.tar") as file:
        for start in range(0, len(content), 701):
            assert file.readinto(view[start : start + 701], start) == len(view[start : start + 701])
        assert file.pread(10, len(CONTENT) - 3) == CONTENT[-3:]
        for start in (0, 5):
            assert file.pread(10, len(CONTENT) + start) == b""
    assert content == CONTENT


@every_kind
def test_a_store_without_a_file_says_so(kind):
    assert kind.store.find_kind("nothing") == ""
    assert kind.store.stamp("nothing").bytes == -1
    for call in (kind.store.read, kind.store.read_listed, kind.store.hash):
        with pytest.raises(FileNotFoundError):
            call("nothing")


@every_kind
@pytest.mark.parametrize(
    "read",
    [
        lambda store: store.read("shard-1.tar"),
        lambda store: store.open("shard-1.tar").pread(99, 5),
    ],
    ids=["file", "piece"],
)
def test_a_store_that_fails_is_read_again_and_then_named(kind, read):
    kind.put("shard-1.tar", CONTENT)
    expected = read(kind.store)
    kind.fail_reads(3)
    assert read(kind.store) == expected
    assert kind.store.failures == 3
    kind.fail_reads(1000)
    with pytest.raises(DriveLostError, match=r"shard-1\.tar cannot be r.*[Rr]un the same again"):
        read(kind.store)


@every_kind
def test_a_store_without_patience_fails_at_once(kind):
    kind.put("shard-1.tar", CONTENT)
    store = open_store(kind.folder, IMPATIENT)
    kind.fail_reads(1)
    with pytest.raises(DriveLostError):
        store.read("shard-1.tar")
    assert (store.failures, store.read("shard-1.tar")) == (0, CONTENT)


@every_kind_to_write
def test_what_reads_back_differently_is_an_error(kind):
    kind.cut_writes()
    with pytest.raises((ServerLostError, OSError), match="reads back differently"):
        kind.put("a.bin", b"another content")


@every_kind_to_write
def test_a_write_that_fails_leaves_the_old_file_alone(kind):
    path = kind.put("a.bin", CONTENT)
    kind.fail_writes()
    with pytest.raises((ServerLostError, OSError), match=r"silence|Input"):
        kind.put("a.bin", b"another content")
    assert read_file(path) == CONTENT
    assert kind.store.list_names("*a.bin*") == ["a.bin"]


@pytest.mark.parametrize(
    ("request_name", "ask"),
    [
        ("info", lambda store: store.find_kind("b.bin")),
        ("info", lambda store: store.stamp("b.bin")),
        ("ls", lambda store: store.list_names()),
        ("info", lambda store: store.has_files([("b.bin", 1, "")])),
        ("read", lambda store: store.read("b.bin")),
    ],
)
def test_a_server_that_fails_is_never_taken_for_an_empty_one(file, request_name, ask):
    FaultyFileSystem.fault = fail_from(0, TimeoutError("silence"), call=request_name)
    with pytest.raises(ServerLostError, match=r"cannot be reached .TimeoutError: silence"):
        ask(open_store(file.parent))


@pytest.mark.parametrize(
    "error",
    [
        TimeoutError(),
        OSError(errno.EBUSY, "Please reduce your request rate."),
        AnswerError(429),
        AnswerError(500),
        RuntimeError("the connection was closed"),
        make_s3_error(409, "OperationAborted"),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(file, error):
    FaultyFileSystem.fault = fail_times(3, error)
    store = open_store(file.parent)
    assert store.read("b.bin") == CONTENT
    assert store.tell_failures() == "faulty://bucket/a failed 3 times and was tried again"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError("The provided token has expired."), "token has expired"),
        (NoCredentialsError("Unable to locate credentials"), "Unable to locate credentials"),
        (AnswerError(403), "403 at https://host/file[^?]"),
        # So gcsfs tells of Google's 403.
        (OSError("Forbidden: b/bucket/o\nno access to the object"), "no access to the object"),
        # s3fs does not know these codes.
        (make_s3_error(400, "ExpiredTokenException"), r"\(ExpiredTokenException\)"),
        (make_s3_error(301, "PermanentRedirect"), r"\(PermanentRedirect\)"),
    ],
    ids=repr,
)
def test_what_the_server_refuses_is_told_at_once(file, error, reason):
    FaultyFileSystem.fault = fail_from(0, error)
    store = open_store(file.parent)
    with pytest.raises(ColabUtilsError, match=reason) as caught:
        store.read("b.bin")
    assert not isinstance(caught.value, DriveLostError)
    assert "credentials" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert store.failures == 0


def test_a_refused_server_is_opened_anew(file):
    """New credentials are found only so."""
    before = file.system
    assert file.system is before
    FaultyFileSystem.fault = fail_from(0, PermissionError("expired"), call="info")
    with pytest.raises(RefusedError):
        open_store(file).stamp(file)
    assert file.system is not before


def test_a_web_server_that_fails_is_not_a_missing_file():
    """fsspec says "not found" of it, and keeps the reason."""
    with pytest.raises(ServerLostError, match="503"), guard_server(UrlPath("https://host/a")):
        raise FileNotFoundError("a") from AnswerError(503)
    with pytest.raises(FileNotFoundError), guard_server(UrlPath("https://host/a")):
        raise FileNotFoundError("a") from AnswerError(404)


def test_a_server_is_not_asked_for_bytes_after_the_end_of_a_file(file):
    """S3 refuses such a request."""
    with open_store(file).open("") as pieces:
        assert pieces.pread(len(CONTENT) + 1, 0) == CONTENT
        assert pieces.pread(1, len(CONTENT)) == b""
    assert FaultyFileSystem.calls["read"] == 1


def test_a_server_that_is_no_store_gets_a_file_under_a_name_of_its_own_first(file):
    names = []
    FaultyFileSystem.fault = lambda call, path: names.append(path) if call == "write" else None
    store = open_store(file.parent)
    store.write("b.bin", b"new")
    assert [name.endswith(".part") for name in names] == [True]
    assert store.read("b.bin") == b"new"
    assert store.list_names() == ["b.bin"]
