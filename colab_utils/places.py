"""Places where data lies: folders, and URLs that fsspec knows, such as buckets and web servers.

fsspec reads and writes the files at URLs, and finds your credentials; its documentation says how to
set them. This module adds errors that say what to do. A file that it writes appears only when the
file is complete.
"""

import errno
import hashlib
import io
import os
import re
import sys
import threading
from base64 import b64decode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from fnmatch import fnmatch
from functools import lru_cache, partial
from pathlib import Path, PurePosixPath
from secrets import token_hex
from time import time
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote, unquote

from colab_utils.drive import DriveLostError, Retries, require_mounted
from colab_utils.errors import ColabUtilsError, UnavailableError, escape, hide_login

# A scheme has at least two letters, because "C:/" is a drive of Windows.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):(/+)(.*)", re.IGNORECASE | re.DOTALL)
_LOCAL = ("file", "local")
WEB = ("http", "https")
"""Protocols of web servers. A web server sends a file if you know its name. It does not list a
folder, and it cannot be written to.
"""
# Protocols of object stores. In such a store, a file appears only when it is complete.
_STORES = (
    "s3",
    "s3a",
    "gs",
    "gcs",
    "az",
    "abfs",
    "abfss",
    "oss",
    "oci",
    "tos",
    "hf",
    "memory",
)
_PACKAGES = {
    "s3": "s3fs",
    "s3a": "s3fs",
    "gs": "gcsfs",
    "gcs": "gcsfs",
    "az": "adlfs",
    "abfs": "adlfs",
    "abfss": "adlfs",
    "adl": "adlfs",
    "hf": "huggingface_hub",
    "http": "aiohttp",
    "https": "aiohttp",
    "sftp": "paramiko",
    "ssh": "paramiko",
    "smb": "smbprotocol",
    "webdav": "webdav4",
}
# Lasting errors: the same request would fail again.
_LASTING_KINDS = (PermissionError, NotImplementedError, ImportError, TypeError, ValueError)
_LASTING_NUMBERS = (errno.EINVAL, errno.ENOSYS, errno.ENOSPC)
_LASTING_NAMES = re.compile(
    r"Auth|Certificate|Config|Credential|NonRetryable|Profile|Refresh|Region|Token|Validation"
)
# HTTP statuses below 500 after which the same request may succeed later.
_PASSING_STATUS = (408, 409, 425, 429)
# S3 gives these reasons with other statuses, such as 400. The same request may succeed later.
_PASSING_REASON = re.compile(r"RequestTimeout|BadDigest|IncompleteBody|SHA256Mismatch|Throttl")
# So botocore tells of an answer of S3 that has a status alone.
_NO_REASON = re.compile(r"An error occurred \((400|401|403)\)")
# So S3 and Google refuse a request that another time was written on.
_WRONG_CLOCK = re.compile(r"RequestTimeTooSkewed|iat and exp")
_SILENT_S = 60.0
# A gap of at most so many bytes is read and dropped, which is faster than another request.
_SKIPPED_BYTES = 4_000_000
# s3fs sends large files in parts of so many bytes.
_SENT_BYTES = 50 << 20
_Result = TypeVar("_Result")
# Servers that have sent a whole file in answer to a request for a part of it.
_WITHOUT_RANGES: set[str] = set()


class ServerLostError(DriveLostError):
    """A server did not answer, or answered with a failure. What was finished before is safe."""

    place = "the server"


class RefusedError(UnavailableError):
    """A server refused a request, and would refuse it again. Look at address and credentials.

    It says nothing about the file, which may be sound. The next call opens the server anew, and
    thus finds new credentials. This also holds for the process that gets the error of its worker.
    """

    def __init__(self, *message: object) -> None:
        super().__init__(*message)
        _open_system.cache_clear()


class UrlStatus(NamedTuple):
    """Size and time of a file on a server, named as in ``os.stat``."""

    st_size: int
    """Bytes."""
    st_mtime: float
    """When the file was written, in seconds since 1970; the time now if the server does not say."""


@dataclass(frozen=True, order=True)
class UrlPath:
    """A file or a folder at a URL, with methods like those of `pathlib.Path`.

    A `UrlPath` is not an ``os.PathLike``, so that no function takes it for a path on this machine.

    Args:
        url: the URL, without a query. It may hold a password, which is never printed.
        query: the part of a web address from "?" on, such as a signature. It is sent with every
            request, and never printed.

    Example:
        >>> folder = UrlPath("s3://bucket/shards")
        >>> print(folder / "index.json")
        s3://bucket/shards/index.json
        >>> (folder / "index.json").parent == folder
        True
    """

    url: str
    query: str = ""

    def __str__(self) -> str:
        return hide_login(self.url)

    def __truediv__(self, name: str | Path) -> "UrlPath":
        text = PurePosixPath(name).as_posix()
        if self.protocol in WEB:
            text = quote(text)
        return replace(self, url=f"{self.url.rstrip('/')}/{text}")

    @property
    def protocol(self) -> str:
        """Return the protocol of the URL, such as ``s3``."""
        return self.url.partition(":")[0].lower()

    @property
    def name(self) -> str:
        """Return the last part of the path: the name of the file or folder."""
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> "UrlPath":
        """Return the folder that holds this file or folder."""
        return replace(self, url=self.url.rstrip("/").rpartition("/")[0])

    def with_suffix(self, suffix: str) -> "UrlPath":
        """Return the path with another suffix, such as ".json"."""
        return self.parent / PurePosixPath(self.name).with_suffix(suffix).name

    def absolute(self) -> "UrlPath":
        """Return this path: a URL is always absolute."""
        return self

    def stat(self) -> UrlStatus:
        """Return size and time of a file.

        Raises:
            FileNotFoundError: it is not there.
        """
        info = self._find_info()
        changed_s = time()
        for key in ("created", "modified", "mtime", "LastModified"):
            if isinstance(info.get(key), datetime):
                changed_s = info[key].timestamp()
        return UrlStatus(info.get("size") or 0, changed_s)

    def exists(self) -> bool:
        """Return whether there is a file, or a folder with files.

        Raises:
            ServerLostError: the server does not answer.
        """
        with suppress(FileNotFoundError, NotADirectoryError):
            self._find_info()
            return True
        return False

    def is_file(self) -> bool:
        """Return whether there is a file."""
        with suppress(FileNotFoundError, NotADirectoryError):
            return bool(self._find_info()["type"] == "file")
        return False

    def is_dir(self) -> bool:
        """Return whether there is a folder with files."""
        return self.exists() and not self.is_file()

    def read_bytes(self) -> bytes:
        """Return the content of a file.

        Raises:
            FileNotFoundError: it is not there.
        """
        with guard_server(self):
            system, path = self._locate()
            return bytes(system.cat_file(path))

    def read_range(self, start: int, count: int) -> bytes:
        """Return ``count`` bytes of a file, beginning with byte ``start``.

        Fewer bytes are returned at the end of the file, and none behind the end.
        """
        with guard_server(self):
            system, path = self._locate()
            content = bytes(system.cat_file(path, start=start, end=start + count))
        if len(content) <= count:
            return content
        _WITHOUT_RANGES.add(self.server)
        return content[start : start + count]

    @property
    def server(self) -> str:
        """Return the URL without its path: the protocol, and the server or bucket."""
        return "/".join(self.url.split("/")[:3])

    @property
    def has_ranges(self) -> bool:
        """Return False if the server has sent a whole file in answer to a request for a part."""
        return self.server not in _WITHOUT_RANGES

    def open_stream(self, start: int = 0) -> Any:
        """Open a file to read it in order. Return fsspec's file object, which has ``tell``.

        The stream begins at byte ``start`` only if the file is on a web server that sends parts of
        files. Every other stream begins at the first byte.
        """
        with guard_server(self):
            system, path = self._locate()
            if self.protocol not in WEB:
                return system.open(path, "rb", block_size=0)
            headers = {"Range": f"bytes={start}-", "Accept-Encoding": "identity"}
            # Without a size, fsspec would ask for it by a request that some servers refuse.
            stream = system.open(path, "rb", block_size=0, size=1, headers=headers)
        if stream.r.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            stream.loc = start
            _WITHOUT_RANGES.discard(self.server)
        else:
            _WITHOUT_RANGES.add(self.server)
        return stream

    def write(self, *parts: bytes | memoryview) -> None:
        """Write a file. The file appears under its name only when it is complete.

        The content is then compared with the MD5 that the server gives. If the server gives none,
        the file is read back.

        Raises:
            RefusedError: there is no such bucket or folder, or the server refuses.
            ServerLostError: the server does not answer.
            ColabUtilsError: the URL is that of a web server, which can only be read.
            OSError: with ``EIO``, if the file reads back differently.
        """
        if self.protocol in WEB:
            raise ColabUtilsError(
                f"{self} lies on a web server, which can only be read. Name a folder or a bucket "
                "to write to."
            )
        content = b"".join(parts)
        try:
            with guard_server(self):
                self._send(content)
        except FileNotFoundError as error:
            raise RefusedError(
                f"{self} cannot be written: its bucket or folder is not there. Look at the "
                "address, or make the bucket."
            ) from error
        if not self.holds(content):
            raise OSError(errno.EIO, "what was written reads back differently")

    def _send(self, content: bytes) -> None:
        system, path = self._locate()
        if self.protocol in _STORES:
            system.pipe_file(path, content)
            return
        temporary = f"{path}.{token_hex(4)}.part"
        system.pipe_file(temporary, content)
        system.mv(temporary, path)

    def holds(self, content: bytes) -> bool:
        """Return whether a file has this content: by the server's MD5, or else by reading it."""
        try:
            info = self._find_info()
        except FileNotFoundError:
            return False
        if info.get("size") != len(content):
            return False
        tag = str(info.get("ETag", "")).strip('"')
        if "md5Hash" in info:
            # Google gives the MD5 under another name, and in base64.
            tag = b64decode(info["md5Hash"]).hex()
        # If the store encrypts, or if the file was sent in parts of another size, its tag says
        # nothing about the content. The file is then read.
        return tag == _make_tag(content, "-" in tag) or self.read_bytes() == content

    def replace(self, target: "UrlPath") -> None:
        """Move a file to ``target``. A file at ``target`` is replaced."""
        with guard_server(self):
            system, path = self._locate()
            system.mv(path, target._locate()[1])

    def touch(self) -> None:
        """Set the time of a file to now, or make an empty file."""
        self.write(self.read_bytes() if self.exists() else b"")

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        # Some servers raise no error for a missing file, so look for the file first.
        if not self.exists():
            if missing_ok:
                return
            raise FileNotFoundError(errno.ENOENT, "No such file", str(self))
        with guard_server(self):
            system, path = self._locate()
            system.rm_file(path)

    def mkdir(self, parents: bool = True, exist_ok: bool = True) -> None:
        """Make a folder, if the server has folders. A bucket is never made."""
        if self.protocol not in (*_STORES, *WEB):
            with guard_server(self):
                system, path = self._locate()
                system.makedirs(path, exist_ok=exist_ok)

    def rmdir(self) -> None:
        """Do nothing: a store has no empty folders."""

    def remove_all(self) -> None:
        """Remove all files of a folder."""
        with suppress(FileNotFoundError), guard_server(self):
            system, path = self._locate()
            system.rm(path, recursive=True)

    def list_sizes(self) -> dict[str, int]:
        """List a folder once; return the size in bytes of each file, by its name."""
        entries = self._list().items()
        return {name: info.get("size") or 0 for name, info in entries if info["type"] == "file"}

    def glob(self, pattern: str) -> "Iterator[UrlPath]":
        """Yield the files and folders in this folder whose names match the pattern."""
        for name in self._list():
            if fnmatch(name, pattern):
                yield self / name

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's information on each file in a folder; none if there is no folder."""
        with suppress(FileNotFoundError, NotADirectoryError), guard_server(self):
            system, path = self._locate()
            system.invalidate_cache()
            return {PurePosixPath(info["name"]).name: info for info in system.ls(path, detail=True)}
        return {}

    def _find_info(self) -> dict[str, Any]:
        with guard_server(self):
            system, path = self._locate()
            system.invalidate_cache()
            return dict(system.info(path))

    def find_refusal(self, error: Exception) -> Exception:
        """Return an error that says why the server refused: the given one, or that of a read.

        The answer of S3 to a question for a file's size has no reason, but its answer to a read has
        one.
        """
        if _NO_REASON.match(str(error)):
            system, path = self._locate()
            try:
                system.cat_file(path, start=0, end=1)
            except Exception as refusal:
                return _find_cause(refusal)
        return error

    def _locate(self) -> tuple[Any, str]:
        """Return fsspec's file system of the server, and the path of this file in it."""
        system = _open_system(self.server, os.getpid())
        return system, system._strip_protocol(self.url) + self.query


Place = Path | UrlPath
PlaceLike = str | Place
"""A place, or the text of its path or URL."""


def _make_tag(content: bytes, is_in_parts: bool) -> str:
    """Return the ETag that S3 computes for a file.

    A file that was sent in parts has another ETag than a file that was sent as a whole.
    """
    if not is_in_parts:
        return hashlib.md5(content, usedforsecurity=False).hexdigest()
    view = memoryview(content)
    total = hashlib.md5(usedforsecurity=False)
    starts = range(0, len(view), _SENT_BYTES)
    for start in starts:
        part = view[start : start + _SENT_BYTES]
        total.update(hashlib.md5(part, usedforsecurity=False).digest())
    return f"{total.hexdigest()}-{len(starts)}"


@lru_cache
def _open_system(server: str, process: int) -> Any:
    """Open fsspec's file system of a server.

    The number of the process is a key of the cache, because a forked process cannot use the file
    system that its parent opened.
    """
    from fsspec.core import url_to_fs

    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    protocol = server.partition(":")[0]
    if protocol in WEB:
        from aiohttp import ClientTimeout

        # A large file may take long, so the total time has no limit. Only the time without any data
        # is limited.
        silence = ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)
        # The environment may name a proxy.
        options["client_kwargs"] = {"timeout": silence, "trust_env": True}
    return url_to_fs(server, **options)[0]


def open_place(path: "str | os.PathLike[str] | UrlPath") -> Place:
    """Return a path on this machine as a `Path`, and a URL as a `UrlPath`.

    Raises:
        ColabUtilsError: fsspec does not know the protocol, a package for it is missing, this is
            neither a path nor a single URL, or it is a path on Google Drive, which is not mounted.

    Example:
        >>> open_place("data/shards"), open_place("file:///data/shards")
        (PosixPath('data/shards'), PosixPath('/data/shards'))
        >>> print(open_place("memory://shards/"))
        memory://shards
    """
    if isinstance(path, UrlPath):
        return path
    if not isinstance(path, str | os.PathLike) or not str(path).strip():
        raise ColabUtilsError(
            f"{path!r:.100} is not the path of a folder or file. Pass its path, or its URL."
        )
    text = os.fspath(path)
    # A space around a URL comes with copying and pasting.
    match = _URL.fullmatch(text.strip())
    if match is None:
        return _open_local(text)
    protocol = match[1].lower()
    rest = match[3].rstrip("/")
    if protocol in _LOCAL:
        if match[2] == "//":
            raise ColabUtilsError(
                f"{text} begins with the name of a machine. Write the path alone, or {protocol}:"
                "///folder."
            )
        return _take_path("/" + rest)
    query = ""
    if protocol in WEB and "?" in rest:
        # An address with a query is that of one file, and each of its slashes counts.
        rest, _, query = match[3].partition("?")
        query = "?" + query
    _require_protocol(f"{protocol}://{rest}", protocol)
    return UrlPath(f"{protocol}://{rest}", query)


def _open_local(text: str) -> Path:
    if "://" in text or text.partition(":")[0].lower() in _PACKAGES:
        raise ColabUtilsError(
            f"{text!r} is neither a URL nor a path. Write one URL as s3://bucket/folder, or put ./ "
            "before the name of a folder."
        )
    path = _take_path(text)
    # Without its "./", the path of a folder named "s3:" looks like a URL.
    return path.absolute() if _URL.fullmatch(str(path)) else path


def require_local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or file on this machine, and refuse a URL.

    Without this check, a URL would become a local folder with a name such as ``gs:``.

    Raises:
        ColabUtilsError: The path is a URL, or it is on Google Drive, which is not mounted.

    Example:
        >>> require_local_path("data/12:30/a.json")
        PosixPath('data/12:30/a.json')
        >>> require_local_path("gs://bucket/shards")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: The URL gs://bucket/shards is not a folder or file ...
    """
    # `Path` shortens "//" to "/", so a text with one slash after the scheme counts as a URL, too.
    if _URL.match(str(path)):
        raise ColabUtilsError(
            f"The URL {path} is not a folder or file on this machine. Mount it (for example with "
            "gcsfuse or rclone) and pass the mounted folder, or copy it to a folder first."
        )
    return _take_path(path)


def _take_path(path: str | os.PathLike[str]) -> Path:
    """Return a path with its "~" expanded, and refuse one on a Drive that is not mounted."""
    taken = Path(os.path.expanduser(path))
    require_mounted(taken)
    return taken


def write_place(place: Place) -> str:
    """Return the text from which `open_place` makes the same place on any machine.

    A URL has its password here, so the text is not for people.

    Example:
        >>> write_place(UrlPath("ftp://me:secret@host/photos"))
        'ftp://me:secret@host/photos'
    """
    return place.url if isinstance(place, UrlPath) else str(place.absolute())


def name_below(path: Place, folder: Place) -> str:
    """Return the path of a file relative to a folder that holds it, with slashes.

    Example:
        >>> name_below(UrlPath("s3://bucket/a/b.jpg"), UrlPath("s3://bucket"))
        'a/b.jpg'
    """
    name = str(path).removeprefix(str(folder)).strip("/")
    is_quoted = isinstance(path, UrlPath) and path.protocol in WEB
    return unquote(name) if is_quoted else name


def is_same_place(first: Place, second: Place) -> bool:
    """Return whether two paths lead to the same folder, or are the same URL.

    Example:
        >>> is_same_place(Path("shards"), Path("shards/."))
        True
    """
    if isinstance(first, UrlPath) or isinstance(second, UrlPath):
        return first == second
    return os.path.realpath(first) == os.path.realpath(second)


def _require_protocol(url: str, protocol: str) -> None:
    """Refuse a URL if fsspec does not know its protocol, or lacks the package for it."""
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except ImportError as error:
        package = _PACKAGES.get(protocol)
        cure = f"Run: pip install {package}" if package else error
        raise ColabUtilsError(f"{url} needs a package that is not installed. {cure}") from None
    except ValueError:
        raise ColabUtilsError(
            f"{url} has a protocol that fsspec does not know. Look at its name, or copy the data "
            "to a folder."
        ) from None


@contextmanager
def guard_server(path: UrlPath) -> Iterator[None]:
    """Replace errors of fsspec and its packages by errors that say what to do.

    Raises:
        FileNotFoundError: there is no such file, folder or bucket.
        IsADirectoryError: it is a folder.
        ServerLostError: the server did not answer, or failed. The same request may succeed later.
        RefusedError: the server refused, and would refuse the same request again.
    """
    try:
        yield
    except ColabUtilsError:
        raise
    except Exception as error:
        cause = _find_cause(error)
        if isinstance(cause, FileNotFoundError | NotADirectoryError | IsADirectoryError):
            number = errno.EISDIR if isinstance(cause, IsADirectoryError) else errno.ENOENT
            # The text of fsspec is the address, which may hold a signature.
            raise OSError(number, os.strerror(number), str(path)) from None
        cause = path.find_refusal(cause)
        refusal = _explain_refusal(path, cause)
        refusal.reason = _describe_cause(cause)
        # The library's own error is not shown: its text may hold the address with a signature.
        raise refusal from None


def _explain_refusal(path: UrlPath, cause: Exception) -> UnavailableError:
    """Return an error that says what to do about a server that failed or refused."""
    reason = _describe_cause(cause)
    if not _is_lasting(cause):
        return ServerLostError(
            f"{path} cannot be reached: the server failed ({reason}). Run the same again later: "
            "what is done is safe."
        )
    cure = "Look at the address, and at your credentials and rights there; they may have expired"
    if _WRONG_CLOCK.search(reason):
        cure = "Set the clock of this machine"
    return RefusedError(
        f"{path} cannot be reached: the server refused ({reason}). {cure}. Then run the same "
        "again: what is done is safe."
    )


def _find_cause(error: Exception) -> Exception:
    """Return the real cause of an error of fsspec.

    fsspec raises FileNotFoundError for every failure of a web server, also if the file is there.
    For an answer of S3, it raises an error of Python, whose cause has the status and the code.
    """
    cause = error.__cause__
    if not isinstance(cause, Exception):
        return error
    if not isinstance(error, FileNotFoundError):
        return cause if _is_answer(cause) else error
    status = _find_status(cause)
    is_silence = isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError)
    is_failure = status or type(cause).__module__.startswith("aiohttp")
    return cause if (is_silence or is_failure) and status not in (404, 410) else error


def find_reason(error: BaseException) -> str:
    """Return the reason that the server or its package gave for an error, in one short line."""
    return getattr(error, "reason", "") or _describe_cause(error)


def _describe_cause(error: BaseException) -> str:
    """Return an error in one line, without its address where a server answered."""
    status = _find_status(error)
    text = f"{type(error).__name__}: {error}"
    if status:
        # gcsfs writes the status behind its message, too.
        text = f"{status} {getattr(error, 'message', error)}".removesuffix(f", {status}")
    if type(error.__cause__).__name__ == "RefreshError":
        # So Google refuses a new token.
        text += f": {error.__cause__}"
    return escape(" ".join(text.split()))[:200]


def _is_answer(error: Any) -> bool:
    """Return whether an error is that of botocore for an answer of S3."""
    return isinstance(getattr(error, "response", None), dict)


def _find_status(error: Any) -> int:
    """Return the HTTP status of an error; 0 if it has none."""
    if _is_answer(error):
        return int(error.response["ResponseMetadata"]["HTTPStatusCode"])
    for name in ("status", "code"):
        value = getattr(error, name, None)
        if isinstance(value, int):
            return value
    return 0


def _is_lasting(error: Exception) -> bool:
    """Return whether the same request would fail again."""
    status = _find_status(error)
    if status:
        is_passing = status in _PASSING_STATUS or _PASSING_REASON.search(str(error))
        return 300 <= status < 500 and not is_passing
    if isinstance(error, _LASTING_KINDS):
        return True
    # The error of gcsfs for a refused request has no status and no number.
    if getattr(error, "errno", None) in _LASTING_NUMBERS or str(error).startswith("Forbidden"):
        return True
    return bool(_LASTING_NAMES.search(type(error).__name__))


class UrlFile(io.RawIOBase):
    """A file at a URL, read in pieces. Threads may share it.

    Args:
        path: the file.
        retries: how often a failed read is tried again. By default the first error is raised.
        block_bytes: the smallest request, in bytes. If you read less, the rest is kept for the next
            read.

    Example:
        >>> from fsspec import filesystem
        >>> filesystem("memory").pipe_file("/letters.txt", b"abcdef")
        >>> with UrlFile(UrlPath("memory://letters.txt")) as file:
        ...     file.pread(3, 2)
        b'cde'
    """

    def __init__(
        self, path: UrlPath, retries: Retries | None = None, *, block_bytes: int = 0
    ) -> None:
        self.path = path
        self._retries = retries
        self._block_bytes = block_bytes
        # Start and content of the last request. One tuple holds both, so that another thread never
        # sees the start of one request with the content of another.
        self._block = (0, b"")
        self._size: int | None = None
        self._place = 0
        self._lock = threading.Lock()
        self._is_streamed = False
        self._stream: Any = None

    def start_stream(self) -> None:
        """Request the file from a web server. The next reads take their bytes from the answer, as
        long as each begins where the one before ended, or a little later in the file.

        After this call, `find_size` and ``path.has_ranges`` are known. If the request fails, it is
        not tried again.
        """
        self._stream = self.path.open_stream()
        self._size = int(self._stream.r.headers.get("Content-Length", 0))
        self._is_streamed = True

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True

    def tell(self) -> int:
        """Return the byte at which the next `readinto` without an offset begins."""
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to a byte, as in `io.IOBase.seek`; return its offset from the start of the file."""
        place = offset
        if whence == os.SEEK_CUR:
            place += self._place
        if whence == os.SEEK_END:
            place += self.find_size()
        if place < 0:
            raise OSError("no byte lies before the first one")
        self._place = place
        return place

    def pread(self, n: int, offset: int) -> bytes:
        """Read ``n`` bytes from ``offset``; fewer only at the end of the file."""
        content = bytearray(n)
        return bytes(memoryview(content)[: self.readinto(content, offset)])

    def readinto(self, buffer: Any, offset: int | None = None) -> int:
        """Fill a writable buffer with bytes of the file, and return the number of bytes read.

        Reading begins at ``offset``, or by default at the byte that `tell` returns. The number is
        smaller than the buffer only at the end of the file.
        """
        view = memoryview(buffer).cast("B")
        start = self._place if offset is None else offset
        count = 0
        while count < len(view):
            piece = self._take(start + count, len(view) - count)
            if not piece:
                break
            view[count : count + len(piece)] = piece
            count += len(piece)
        if offset is None:
            self._place = start + count
        return count

    def find_size(self) -> int:
        """Return the size of the file in bytes; 0 if the server does not say."""
        if self._size is None:
            self._size = self._run(self.path.stat).st_size
        return self._size

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        self._close_stream()
        super().close()

    def _run(self, call: Callable[[], _Result]) -> _Result:
        return self._retries.run(call) if self._retries else call()

    def _take(self, start: int, count: int) -> memoryview:
        """Return 1 to ``count`` bytes that begin at ``start``; none at the end of the file."""
        block_start, block = self._block
        inside = start - block_start
        if not 0 <= inside < len(block):
            # A request never goes beyond the end of the file. If a server sends the whole file in
            # place of a part, its answer is thus longer than requested, which `read_range` notices.
            left = (self.find_size() or sys.maxsize) - start
            wanted = min(max(count, self._block_bytes), left)
            block = self._run(partial(self._fetch, start, wanted)) if wanted > 0 else b""
            inside = 0
            self._block = (start, block)
        return memoryview(block)[inside : inside + count]

    def _fetch(self, start: int, count: int) -> bytes:
        # If the size is not known, an answer may be the whole file or its last part, and nothing
        # shows which. Such a file is read as a stream.
        if self._is_streamed or not (self._size and self.path.has_ranges):
            with self._lock:
                return self._read_stream(start, count)
        return self.path.read_range(start, count)

    def _read_stream(self, start: int, count: int) -> bytes:
        """Read bytes from the answer to the last request, if they lie close ahead in it.

        If they do not, the file is requested again: from ``start``, or as a whole if the server
        sends no parts of files.
        """
        gap = -1 if self._stream is None else start - self._stream.tell()
        if gap < 0 or (gap > _SKIPPED_BYTES and self.path.has_ranges):
            self._close_stream()
            self._stream = self.path.open_stream(start)
        stream = self._stream
        try:
            with guard_server(self.path):
                while stream.tell() < start:
                    if not stream.read(min(start - stream.tell(), _SKIPPED_BYTES)):
                        break
                content = bytes(stream.read(count))
                if self._size and not content:
                    raise ConnectionError("the answer ended before the file")
        except ColabUtilsError:
            # The next call opens another stream.
            self._close_stream()
            raise
        return content

    def _close_stream(self) -> None:
        with suppress(Exception):
            self._stream.close()
        self._stream = None
