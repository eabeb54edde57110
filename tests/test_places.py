"""Folders, and URLs that fsspec knows: what lies there, and what goes wrong there."""

import base64
import errno
import hashlib
import os
import pickle
from pathlib import Path

import pytest
from fsspec import filesystem

from colab_utils.drive import DriveLostError, Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.files import has_size, hash_bytes, hash_file, open_file, read_file, write_file
from colab_utils.places import (
    RefusedError,
    ServerLostError,
    UrlFile,
    UrlPath,
    guard_server,
    is_same_place,
    open_place,
    write_place,
)
from tests.faulty_server import FaultyFileSystem, fail_from, fail_times

CONTENT = bytes(range(256)) * 40


class AnswerError(Exception):
    """What a web server's package raises of an answer."""

    def __init__(self, status):
        super().__init__(f"{status} at https://host/file?signature=secret")
        self.status = status
        self.message = "said the server"


class NonRetryableError(Exception):
    """That of gcsfs."""


class NoCredentialsError(Exception):
    """As botocore calls it."""


class ClientError(Exception):
    """That of botocore for an answer of S3. s3fs raises an error of Python from it."""

    def __init__(self, status, code, message):
        super().__init__(f"An error occurred ({code}) when calling a method: {message}")
        self.response = {
            "Error": {"Code": code, "Message": message},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


def make_s3_error(status, code, message="said S3", number=errno.EIO):
    error = OSError(number, message)
    error.__cause__ = ClientError(status, code, message)
    return error


@pytest.fixture(autouse=True)
def empty_server(tmp_path):
    FaultyFileSystem.reset(tmp_path)
    yield
    FaultyFileSystem.reset("")


@pytest.fixture
def file():
    path = UrlPath("faulty://bucket/a/b.bin")
    path.write(CONTENT)
    FaultyFileSystem.calls.clear()
    return path


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("data/shards", Path("data/shards")),
        (Path("/data/shards"), Path("/data/shards")),
        ("file:///data/shards", Path("/data/shards")),
        ("local:///data/shards", Path("/data/shards")),
        ("memory://bucket/shards/", UrlPath("memory://bucket/shards")),
        # The module pathlib makes one slash of two.
        (Path("memory://bucket/shards"), UrlPath("memory://bucket/shards")),
        ("MEMORY://bucket/Shards", UrlPath("memory://bucket/Shards")),
        (UrlPath("memory://bucket"), UrlPath("memory://bucket")),
        ("https://host/photos/", UrlPath("https://host/photos")),
        # With a query, each slash counts.
        ("HTTPS://host/photos/?key=a/b?c/", UrlPath("https://host/photos/", "?key=a/b?c/")),
        ("12:30/a", Path("12:30/a")),
        ("C:/data", Path("C:/data")),
        ("FILE:/data/", Path("/data")),
        # A space comes with copying and pasting.
        (" memory://bucket/shards ", UrlPath("memory://bucket/shards")),
        ("memory://bucket", UrlPath("memory://bucket")),
        ("memory:/bucket/a%20b?c d", UrlPath("memory://bucket/a%20b?c d")),
        ("data/a b%20?c", Path("data/a b%20?c")),
    ],
)
def test_a_place_is_a_path_or_a_url(text, place):
    assert open_place(text) == place


def test_a_password_is_sent_and_not_shown():
    place = open_place("ftp://me:S3CRET@host/photos") / "a@b.jpg"
    assert str(place) == "ftp://host/photos/a@b.jpg"
    assert place.server == "ftp://me:S3CRET@host"
    # A plan of shards takes it to the workers.
    assert open_place(write_place(place)) == place


def test_a_folder_may_have_a_name_like_a_protocol(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = open_place("./s3:/shards")
    assert place == tmp_path / "s3:/shards"
    assert open_place(place) == place


@pytest.mark.parametrize(
    "path", [None, 5, b"data", "", " ", UrlPath], ids=lambda path: repr(path)[:9]
)
def test_what_is_no_path_is_told(path):
    with pytest.raises(ColabUtilsError, match="is not the path of a folder or file"):
        open_place(path)


@pytest.mark.parametrize(
    ("url", "cure"),
    [
        ("s3://bucket/x", "pip install s3fs"),
        ("gs://bucket/x", "pip install gcsfs"),
        ("abfs://bucket/x", "pip install adlfs"),
        # Where we know no package, the message has fsspec's own words.
        ("oci://bucket/x", "Install ocifs"),
        ("nonsense://bucket/x", "has a protocol that fsspec does not know"),
        ("simplecache::s3://bucket/x", "neither a URL nor a path. Write one URL"),
        # These would be folders on this machine, with names that nobody wants.
        ("s3:bucket/x", "neither a URL nor a path. Write one URL as s3://"),
        ("'memory://bucket/x'", "neither a URL nor a path"),
        ("file://data/x", "begins with the name of a machine. Write the path alone"),
    ],
)
def test_a_url_that_cannot_be_read_here_is_refused_at_once(url, cure):
    with pytest.raises(ColabUtilsError, match=cure):
        open_place(url)


def test_a_url_is_no_path_of_this_machine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    place = UrlPath("memory://bucket/shards")
    with pytest.raises(TypeError):
        Path(place)
    with pytest.raises(TypeError):
        os.listdir(place)
    assert list(tmp_path.iterdir()) == []


def test_names_are_put_together_and_taken_apart():
    folder = UrlPath("memory://bucket/shards")
    path = folder / "shard-000001.tar"
    assert str(path) == "memory://bucket/shards/shard-000001.tar"
    assert path.name == "shard-000001.tar"
    assert path.parent == folder
    assert path.with_suffix(".arrays").name == "shard-000001.arrays"
    assert pickle.loads(pickle.dumps(path)) == path


def test_names_at_a_web_server_are_quoted_and_a_signature_is_kept_and_not_shown():
    folder = UrlPath("https://host/photos", "?signature=secret")
    path = folder / "my photos/a#1.jpg"
    assert str(path) == "https://host/photos/my%20photos/a%231.jpg"
    assert path.query == "?signature=secret"


def test_two_places_are_compared():
    assert is_same_place(UrlPath("memory://a"), UrlPath("memory://a"))
    assert not is_same_place(UrlPath("memory://a"), UrlPath("memory://b"))
    assert not is_same_place(UrlPath("memory://a"), Path("a"))


def test_a_file_is_written_read_and_removed(file):
    assert file.read_bytes() == CONTENT
    assert file.read_range(3, 5) == CONTENT[3:8]
    assert file.is_file()
    assert file.exists()
    assert file.parent.is_dir()
    assert file.stat().st_size == len(CONTENT)
    assert has_size(file, len(CONTENT))
    assert not has_size(file, 1)
    assert hash_file(file) == (len(CONTENT), hash_bytes(CONTENT))
    assert read_file(file) == CONTENT
    assert file.parent.list_sizes() == {"b.bin": len(CONTENT)}
    assert [*file.parent.glob("*.bin")] == [file]
    assert [*file.parent.glob("*.txt")] == []
    file.unlink()
    assert not file.exists()
    assert not has_size(file, len(CONTENT))
    file.unlink(missing_ok=True)
    with pytest.raises(FileNotFoundError):
        file.unlink()


def test_what_is_not_there_is_not_found():
    path = UrlPath("faulty://bucket/nothing")
    assert not path.exists()
    assert path.list_sizes() == {}
    with pytest.raises(FileNotFoundError):
        path.read_bytes()
    with pytest.raises(FileNotFoundError):
        UrlFile(path).pread(1, 0)


@pytest.mark.parametrize("call", ["exists", "is_file", "is_dir", "list_sizes", "read_bytes"])
def test_a_server_that_fails_is_never_taken_for_an_empty_one(file, call):
    ask = getattr(file, call)
    FaultyFileSystem.fault = fail_from(0, TimeoutError("silence"), call="info")
    if call == "list_sizes":
        FaultyFileSystem.fault = fail_from(0, TimeoutError("silence"), call="ls")
    if call == "read_bytes":
        FaultyFileSystem.fault = fail_from(0, TimeoutError("silence"))
    with pytest.raises(ServerLostError, match=r"the server failed .TimeoutError: silence"):
        ask()


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"),
        TimeoutError(),
        OSError(errno.EBUSY, "Please reduce your request rate."),
        OSError(errno.EIO, "TooManyRequests"),
        AnswerError(429),
        AnswerError(503),
        AnswerError(500),
        RuntimeError("the connection was closed"),
        make_s3_error(503, "SlowDown"),
        make_s3_error(409, "OperationAborted"),
        # The bytes were damaged on the way.
        make_s3_error(400, "BadDigest", number=errno.EINVAL),
        make_s3_error(400, "RequestTimeout", number=errno.EINVAL),
    ],
    ids=repr,
)
def test_what_may_pass_is_tried_again(file, error):
    FaultyFileSystem.fault = fail_times(3, error)
    retries = Retries()
    assert read_file(file, retries) == CONTENT
    assert str(retries) == "the server failed 3 times and was tried again"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (PermissionError("The provided token has expired."), "token has expired"),
        (NoCredentialsError("Unable to locate credentials"), "Unable to locate credentials"),
        (AnswerError(401), "401 said the server"),
        (AnswerError(403), "403 said the server"),
        (OSError(errno.EINVAL, "InvalidBucketName"), "InvalidBucketName"),
        # So gcsfs tells of Google's 403, and of credentials that cannot be renewed.
        (OSError("Forbidden: b/bucket/o\nno access to the object"), "no access to the object"),
        (NonRetryableError("Got error while refreshing credentials."), "refreshing"),
        # s3fs does not know these codes.
        (make_s3_error(400, "ExpiredTokenException"), r"400 .*\(ExpiredTokenException\)"),
        (make_s3_error(403, "QuotaExceeded"), r"403 .*\(QuotaExceeded\)"),
        (make_s3_error(301, "PermanentRedirect"), r"301 .*\(PermanentRedirect\)"),
    ],
    ids=repr,
)
def test_what_the_server_refuses_is_told_at_once(file, error, reason):
    FaultyFileSystem.fault = fail_from(0, error)
    retries = Retries()
    with pytest.raises(ColabUtilsError, match=reason) as caught:
        read_file(file, retries)
    assert not isinstance(caught.value, DriveLostError)
    assert "credentials" in str(caught.value)
    assert "secret" not in str(caught.value)
    assert "space" not in str(caught.value)
    assert retries.count == 0


def test_the_reason_is_asked_for_where_an_answer_has_none(file):
    """S3 answers HEAD with a status alone."""

    def refuse(call, path):
        if call == "info":
            raise make_s3_error(400, "400", "Bad Request", errno.EINVAL)
        raise make_s3_error(400, "ExpiredToken", "The token has expired.", errno.EACCES)

    FaultyFileSystem.fault = refuse
    with pytest.raises(RefusedError, match=r"\(ExpiredToken\) .*: The token has expired\.\)"):
        file.stat()


def test_a_wrong_clock_is_told_with_its_cure(file):
    FaultyFileSystem.fault = fail_from(0, make_s3_error(403, "RequestTimeTooSkewed"))
    with pytest.raises(RefusedError, match=r"Set the clock of this machine\. Then run"):
        file.read_bytes()


def test_a_refused_server_is_opened_anew_also_by_the_parent_of_the_refused_process(file):
    """New credentials are found only so."""
    before = file._locate()[0]
    assert file._locate()[0] is before
    error = pickle.loads(pickle.dumps(RefusedError("refused")))
    assert str(error) == "refused"
    assert file._locate()[0] is not before


def test_a_status_is_told_once():
    """gcsfs writes it behind its message, too."""
    error = AnswerError(401)
    error.message = "Invalid Credentials, 401"
    message = r"\(401 Invalid Credentials\)"
    with pytest.raises(RefusedError, match=message), guard_server(UrlPath("gs://bucket/a")):
        raise error


def test_a_web_server_that_fails_is_not_a_missing_file():
    """fsspec says "not found" of it, and keeps the reason."""
    with pytest.raises(ServerLostError, match="503"), guard_server(UrlPath("https://host/a")):
        raise FileNotFoundError("a") from AnswerError(503)
    with pytest.raises(FileNotFoundError), guard_server(UrlPath("https://host/a")):
        raise FileNotFoundError("a") from AnswerError(404)


def test_a_file_is_read_in_pieces_and_each_is_tried_again(file):
    FaultyFileSystem.fault = fail_times(3, ConnectionResetError())
    content = bytearray(len(CONTENT))
    view = memoryview(content)
    with UrlFile(file, Retries(), block_bytes=1000) as pieces:
        for start in range(0, len(content), 7):
            assert pieces.readinto(view[start : start + 7], start) == len(view[start : start + 7])
        assert pieces.pread(10, len(CONTENT) - 3) == CONTENT[-3:]
        assert pieces.pread(10, len(CONTENT)) == b""
        assert pieces.pread(10, len(CONTENT) + 5) == b""
    assert content == CONTENT
    # A request brings a thousand bytes.
    assert FaultyFileSystem.calls["read"] <= 20


def test_the_end_of_a_file_that_ends_with_a_block_is_found(file):
    def refuse(call, path):
        # S3 refuses a part that begins after the end like this.
        if call == "read" and FaultyFileSystem.calls["read"] == 3:
            raise OSError(errno.EINVAL, "The requested range is not satisfiable")

    FaultyFileSystem.fault = refuse
    with UrlFile(file, block_bytes=len(CONTENT) // 2) as pieces:
        assert pieces.pread(len(CONTENT) + 1, 0) == CONTENT


def test_a_file_is_read_as_python_reads_files(file):
    with open_file(file) as opened:
        assert opened.read(10) == CONTENT[:10]
        assert opened.tell() == 10
        opened.seek(-4, 2)
        assert opened.read() == CONTENT[-4:]


def test_a_server_that_sends_whole_files_gives_the_right_parts(file):
    FaultyFileSystem.sends_whole_files = True
    place = UrlPath("faulty://whole/b.bin")
    place.write(CONTENT)
    assert place.read_range(5, 10) == CONTENT[5:15]
    assert not place.has_ranges
    with UrlFile(place) as pieces:
        assert pieces.pread(100, 2000) == CONTENT[2000:2100]
        assert pieces.pread(100, 2100) == CONTENT[2100:2200]
        # This read goes back.
        assert pieces.pread(100, 0) == CONTENT[:100]
        assert pieces.pread(100, len(CONTENT) - 10) == CONTENT[-10:]
        assert pieces.pread(100, len(CONTENT) + 10) == b""


def test_a_whole_file_in_place_of_its_last_part_is_seen(file):
    FaultyFileSystem.sends_whole_files = True
    place = UrlPath("faulty://whole-last/b.bin")
    place.write(CONTENT)
    # The part that is asked for is longer than the file.
    with UrlFile(place, block_bytes=10 * len(CONTENT)) as pieces:
        assert pieces.pread(100, 2000) == CONTENT[2000:2100]
        assert pieces.pread(100, len(CONTENT) - 10) == CONTENT[-10:]
    assert not place.has_ranges


def test_a_whole_file_of_unknown_size_gives_the_right_parts(file, monkeypatch):
    FaultyFileSystem.sends_whole_files = True
    place = UrlPath("faulty://whole-unknown/b.bin")
    place.write(CONTENT)
    info = FaultyFileSystem.info
    monkeypatch.setattr(FaultyFileSystem, "info", lambda *args: {**info(*args), "size": None})
    with UrlFile(place, block_bytes=10 * len(CONTENT)) as pieces:
        assert pieces.pread(100, 2000) == CONTENT[2000:2100]
        assert pieces.pread(100, len(CONTENT) - 10) == CONTENT[-10:]
        assert pieces.pread(100, 2000) == CONTENT[2000:2100]


def test_no_byte_lies_before_the_first_one(file):
    with UrlFile(file) as pieces:
        for offset, whence in ((-1, 0), (-1, 1), (-len(CONTENT) - 1, 2)):
            with pytest.raises(OSError, match="before the first"):
                pieces.seek(offset, whence)
        assert pieces.tell() == 0


def test_a_file_that_reads_back_differently_is_an_error(file, monkeypatch):
    pipe_file = FaultyFileSystem.pipe_file

    def cut(self, path, value, mode="overwrite", **kwargs):
        return pipe_file(self, path, value[:-1], mode=mode, **kwargs)

    monkeypatch.setattr(FaultyFileSystem, "pipe_file", cut)
    with pytest.raises(OSError, match="reads back differently"):
        write_file(file, b"other", b"content")


@pytest.mark.parametrize(
    "facts",
    [
        {"ETag": f'"{hashlib.md5(CONTENT).hexdigest()}"'},
        {"md5Hash": base64.b64encode(hashlib.md5(CONTENT).digest()).decode()},
    ],
    ids=["S3", "Google"],
)
def test_a_file_whose_checksum_the_server_tells_is_not_read_back(file, monkeypatch, facts):
    info = FaultyFileSystem.info
    monkeypatch.setattr(FaultyFileSystem, "info", lambda *args: {**info(*args), **facts})
    file.write(CONTENT)
    assert FaultyFileSystem.calls["read"] == 0
    # one that differs is read before it is called different
    other = CONTENT[::-1]
    assert not file.holds(other)
    assert FaultyFileSystem.calls["read"] == 1


def test_a_server_that_is_no_store_gets_a_file_under_a_name_of_its_own_first(file):
    names = []
    FaultyFileSystem.fault = lambda call, path: names.append(path) if call == "write" else None
    write_file(file, b"new")
    assert [name.endswith(".part") for name in names] == [True]
    assert file.read_bytes() == b"new"
    assert file.parent.list_sizes() == {"b.bin": 3}


def test_a_store_is_written_at_once():
    path = UrlPath("memory://bucket/c.bin")
    write_file(path, b"a", b"b")
    assert filesystem("memory").cat_file("/bucket/c.bin") == b"ab"


def test_a_web_server_is_only_read():
    with pytest.raises(ColabUtilsError, match="can only be read"):
        UrlPath("https://host/a").write(b"a")


def test_a_write_that_fails_leaves_the_old_file(file):
    FaultyFileSystem.fault = fail_from(0, TimeoutError("silence"), call="write")
    with pytest.raises(ServerLostError):
        write_file(file, b"new")
    assert file.read_bytes() == CONTENT
