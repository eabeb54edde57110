"""Places where data lies: folders, and URLs that fsspec knows, such as buckets and web servers.

fsspec reads and writes the files at URLs, and finds your credentials; its documentation says how to
set them. This module adds errors that say what to do. A file that it writes appears only when the
file is complete.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache
from pathlib import Path, PurePosixPath
from secrets import token_hex
from time import time
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

from colab_utils.drive import DriveLostError, require_mounted
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
# HTTP statuses below 500 after which the same request may succeed later.
_PASSING_STATUS = (408, 409, 425, 429)
_MISSING_STATUS = (404, 410)
# What an error means whose type, or one that it comes from, has this name. The types of most
# packages are named, because none of these packages may be there. Every other error is a failure
# that may pass.
_MEANINGS = {
    "FileNotFoundError": "missing",
    "NotADirectoryError": "missing",
    "IsADirectoryError": "folder",
    "PermissionError": "refused",
    "NotImplementedError": "refused",
    "ImportError": "refused",
    "TypeError": "refused",
    "ValueError": "refused",
    "NoCredentialsError": "refused",
    "PartialCredentialsError": "refused",
    "ProfileNotFound": "refused",
    "DefaultCredentialsError": "refused",
    "RefreshError": "refused",
    "NonRetryableError": "refused",
}
_SILENT_S = 60.0


class ServerLostError(DriveLostError):
    """A server did not answer, or answered with a failure. What was finished before is safe."""

    place = "the server"


class RefusedError(UnavailableError):
    """A server refused a request, and would refuse it again. Look at address and credentials.

    It says nothing about the file, which may be sound. The next call opens the server anew, and
    thus finds new credentials.
    """


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
        return bool(self._find_kind())

    def is_file(self) -> bool:
        """Return whether there is a file."""
        return self._find_kind() == "file"

    def is_dir(self) -> bool:
        """Return whether there is a folder with files. A web server lists none, and is trusted."""
        return self.protocol in WEB or self._find_kind() not in ("", "file")

    def _find_kind(self) -> str:
        """Return "file", or fsspec's name for a folder; "" if there is neither."""
        with suppress(FileNotFoundError):
            return str(self._find_info()["type"])
        return ""

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
        if len(content) > count:
            raise self._refuse_parts()
        return content

    def find_size(self) -> int:
        """Return the size in bytes of a file of which parts are to be read.

        Raises:
            RefusedError: the server sends only whole files.
            FileNotFoundError: the file is not there.
        """
        if self.protocol not in WEB:
            return self.stat().st_size
        headers = {"Range": "bytes=0-0"}
        with guard_server(self):
            system, path = self._locate()
            # Without a size, fsspec would ask for it by a request that some servers refuse.
            with system.open(path, "rb", block_size=0, size=1, headers=headers) as stream:
                size = stream.r.headers.get("Content-Range", "").rpartition("/")[2]
        if not size.isdigit():
            raise self._refuse_parts()
        return int(size)

    def _refuse_parts(self) -> RefusedError:
        return RefusedError(
            f"The server of {self} sends no parts of files. Copy the file to this machine, for "
            "example with wget, and name the copy."
        )

    @property
    def server(self) -> str:
        """Return the URL without its path: the protocol, and the server or bucket."""
        return "/".join(self.url.split("/")[:3])

    def write(self, *parts: bytes | memoryview) -> None:
        """Write a file. The file appears under its name only when it is complete.

        It is then read back and compared.

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
        if self.read_bytes() != content:
            raise OSError(errno.EIO, "what was written reads back differently")

    def _send(self, content: bytes) -> None:
        system, path = self._locate()
        if self.protocol in _STORES:
            system.pipe_file(path, content)
            return
        temporary = f"{path}.{token_hex(4)}.part"
        system.pipe_file(temporary, content)
        system.mv(temporary, path)

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

    def list_sizes(self) -> dict[str, int]:
        """List a folder once; return the size in bytes of each file, by its name."""
        entries = self._list().items()
        return {name: info.get("size") or 0 for name, info in entries if info["type"] == "file"}

    def _list(self) -> dict[str, dict[str, Any]]:
        """Return fsspec's information on each file in a folder; none if there is no folder."""
        with suppress(FileNotFoundError), guard_server(self):
            system, path = self._locate()
            system.invalidate_cache()
            return {PurePosixPath(info["name"]).name: info for info in system.ls(path, detail=True)}
        return {}

    def _find_info(self) -> dict[str, Any]:
        with guard_server(self):
            system, path = self._locate()
            system.invalidate_cache()
            return dict(system.info(path))

    def _locate(self) -> tuple[Any, str]:
        """Return fsspec's file system of the server, and the path of this file in it."""
        system = _open_system(self.server, os.getpid())
        return system, system._strip_protocol(self.url) + self.query


Place = Path | UrlPath
PlaceLike = str | Place
"""A place, or the text of its path or URL."""


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
        # The environment may name a proxy. A part of a compressed file would be other bytes.
        headers = {"Accept-Encoding": "identity"}
        options["client_kwargs"] = {"timeout": silence, "trust_env": True, "headers": headers}
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
    # Your credentials may be new since a server was opened.
    _open_system.cache_clear()
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


def name_below(path: Place, folder: Place) -> str:
    """Return the path of a file relative to a folder that holds it, with slashes.

    Example:
        >>> name_below(UrlPath("s3://bucket/a/b.jpg"), UrlPath("s3://bucket"))
        'a/b.jpg'
    """
    name = str(path).removeprefix(str(folder)).strip("/")
    is_quoted = isinstance(path, UrlPath) and path.protocol in WEB
    return unquote(name) if is_quoted else name


def identify_place(place: PlaceLike) -> str:
    """Return a text that two paths have in common only if they lead to the same place.

    The text is not for people: of a URL it holds the password.

    Example:
        >>> identify_place(Path("shards")) == identify_place(Path("shards/."))
        True
    """
    if isinstance(place, UrlPath):
        return place.url + place.query
    return os.path.realpath(place)


def find_server(place: object) -> str:
    """Return the server of a URL: its protocol and host, or bucket; "" for a path.

    Example:
        >>> find_server(UrlPath("s3://bucket/shards")), find_server("shards")
        ('s3://bucket', '')
    """
    return place.server if isinstance(place, UrlPath) else ""


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
        # The library's own error is not shown: its text may hold the address with a signature.
        raise _explain_failure(path, _find_cause(error)) from None


def _explain_failure(path: UrlPath, cause: Exception) -> Exception:
    """Return the error of this package, or of Python, that stands for an error of a server."""
    meaning = _find_meaning(cause)
    if meaning == "missing":
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    if meaning == "folder":
        return IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    reason = _describe_cause(cause)
    kind: type[UnavailableError] = ServerLostError
    problem = "failed"
    cure = "Run the same again later"
    if meaning == "refused":
        _open_system.cache_clear()
        kind = RefusedError
        problem = "refused"
        cure = (
            "Look at the address, and at your credentials and rights there; they may have expired. "
            "Then run the same again"
        )
    failure = kind(
        f"{path} cannot be reached: the server {problem} ({reason}). {cure}: what is done is safe."
    )
    failure.reason = reason
    return failure


def _find_cause(error: Exception) -> Exception:
    """Return the error that a package raised an error of Python from: that one has the status.

    fsspec says of every failure of a web server that the file is not there.
    """
    cause = error.__cause__
    is_of_python = type(error).__module__ == "builtins"
    if is_of_python and isinstance(cause, Exception) and not isinstance(cause, LookupError):
        return cause
    return error


def _find_meaning(error: Exception) -> str:
    """Return what an error means: "missing", "folder", "refused" or "failed"."""
    status = _find_status(error)
    if status in _MISSING_STATUS:
        return "missing"
    if status:
        is_refused = 300 <= status < 500 and status not in _PASSING_STATUS
        return "refused" if is_refused else "failed"
    # The error of gcsfs for a refused request has neither a status nor a number.
    if type(error) is OSError and error.errno is None:
        return "refused"
    names = [kind.__name__ for kind in type(error).__mro__]
    return next((_MEANINGS[name] for name in names if name in _MEANINGS), "failed")


def _describe_cause(error: Exception) -> str:
    """Return an error in one line, without its address where a server answered."""
    status = _find_status(error)
    text = f"{type(error).__name__}: {error}"
    if status:
        text = f"{status} {getattr(error, 'message', error)}"
    return escape(" ".join(text.split()))[:200]


def _find_status(error: Any) -> int:
    """Return the HTTP status of an error; 0 if it has none."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        # So botocore tells of an answer of S3.
        return int(response["ResponseMetadata"]["HTTPStatusCode"])
    for holder in (error, response):
        for name in ("status", "code", "status_code"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return 0
