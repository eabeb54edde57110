"""Files at URLs that fsspec knows, in buckets and at web servers.

fsspec reads and writes the files, and finds your credentials; its documentation says how to set
them. This module adds errors that say what to do. A file that it writes appears only when the file
is complete. This module is imported where a place is a URL.
"""

import errno
import io
import os
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from pathlib import PurePosixPath
from secrets import token_hex
from time import time
from typing import Any

from fsspec import get_filesystem_class
from fsspec.core import url_to_fs

from colab_utils.drive import RefusedError, ServerLostError, try_again
from colab_utils.errors import ColabUtilsError, UnavailableError, escape

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
# HTTP statuses below 500 after which the same request may succeed later.
_PASSING_STATUS = (408, 409, 425, 429)
_MISSING_STATUS = (404, 410)
# An error whose type, or one that it comes from, has one of these names is a refusal. The types are
# named, because none of their packages may be there.
_REFUSALS = (
    "PermissionError",
    "IsADirectoryError",
    "NotImplementedError",
    "ImportError",
    "TypeError",
    "ValueError",
    "NoCredentialsError",
    "PartialCredentialsError",
    "ProfileNotFound",
    "DefaultCredentialsError",
    "RefreshError",
    "NonRetryableError",
)
# Seconds without any data after which a web server counts as silent.
_SILENT_S = 60.0


@contextmanager
def guard_server(path: Any) -> Iterator[None]:
    """Replace errors of fsspec and its packages by errors that say what to do.

    Raises:
        FileNotFoundError: there is no such file, folder or bucket.
        ServerLostError: the server did not answer, or failed. The same request may succeed later.
        RefusedError: the server refused, and would refuse the same request again.
    """
    try:
        yield
    except (ColabUtilsError, CancelledError):
        # So this package tells what is wrong, or that a copy was stopped.
        raise
    except Exception as error:
        # The library's own error is not shown: its text may hold the address with a signature.
        raise _explain_failure(path, error) from None


def _ask_info(path: Any) -> Any:
    path.system.invalidate_cache()
    return path.system.info(path.key)


class UrlPieces:
    """A file at a URL whose bytes are read in pieces. Its server must send parts of files."""

    def __init__(self, path: Any) -> None:
        self._path = path
        self._size = _ask_info(path).get("size")
        if self._size is None:
            raise _refuse_parts(path)

    def read_into(self, view: memoryview, offset: int) -> int:
        """Read bytes into the buffer; return their number, which is 0 at the end of the file."""
        # Some servers refuse a request that goes beyond the end of the file.
        end = min(offset + len(view), self._size)
        if offset >= end:
            return 0
        content = self._path.system.cat_file(self._path.key, start=offset, end=end)
        if len(content) > end - offset:
            raise _refuse_parts(self._path)
        view[: len(content)] = content
        return len(content)


class UrlMethods:
    """What a `Store` does with files at URLs in its own way."""

    guard = staticmethod(guard_server)
    connect = UrlPieces
    place: Any
    locate: Any

    @try_again
    def read(self, name: Any, *, most_bytes: float = 0, at_full_speed: bool = True) -> bytes:
        """Read a whole file of any size, at full speed."""
        return bytes(name.system.cat_file(name.key))

    def _look(self, name: Any) -> tuple[str, int, float]:
        path = self.locate(name)
        if path == self.place and path.is_web:
            return "folder", -1, 0.0
        info = self._find_info(path)
        changed_s = time()
        # Each file system has a name of its own for the time.
        for key in ("created", "modified", "mtime", "last_modified", "LastModified"):
            if isinstance(info.get(key), datetime):
                changed_s = info[key].timestamp()
        kind = "file" if info["type"] == "file" else "folder"
        return kind, info.get("size") or 0, changed_s

    @try_again
    def _find_info(self, name: Any) -> dict[str, Any]:
        """Return fsspec's information on a file or folder."""
        return dict(_ask_info(name))

    @try_again
    def _list(self, name: Any) -> list[str]:
        name.system.invalidate_cache()
        listed = name.system.ls(name.key, detail=True)
        return [PurePosixPath(info["name"]).name for info in listed if info["type"] == "file"]

    @try_again
    def write(self, name: Any, *parts: bytes | memoryview) -> None:
        """Write a file, and read it back."""
        if name.is_web:
            raise ColabUtilsError(
                f"{name} can only be read. Name a folder or a bucket to write to."
            )
        content = b"".join(parts)
        try:
            with guard_server(name):
                _send(name, content)
        except FileNotFoundError as error:
            raise RefusedError(
                f"{name} cannot be written: its bucket or folder is not there. Look at the "
                "address, or make the bucket."
            ) from error
        if self.read(name) != content:
            raise ServerLostError(f"{name} reads back differently. Run the same again later.")

    @contextmanager
    def create(self, name: Any) -> Iterator[io.BytesIO]:
        """Yield memory for a file that is sent when it is complete."""
        file = io.BytesIO()
        yield file
        self.write(name, file.getvalue())

    @try_again
    def _remove(self, name: Any, is_large: bool) -> None:
        # Some servers raise no error for a missing file, so look for the file first.
        self._find_info(name)
        name.system.rm_file(name.key)

    @try_again
    def move(self, name: Any, target: Any) -> None:
        """Move a file."""
        name.system.mv(name.key, target.key)

    def touch(self, name: Any) -> None:
        """Write a file again."""
        self.write(name, self.read(name))

    @try_again
    def make(self, name: Any = "") -> None:
        """Make the folder, if the server has folders."""
        if name.protocol not in _STORES:
            name.system.makedirs(name.key, exist_ok=True)


def _refuse_parts(path: Any) -> RefusedError:
    return RefusedError(
        f"The server of {path} sends no parts of files. Copy the file to this machine, for "
        "example with wget, and name the copy."
    )


def _send(path: Any, content: bytes) -> None:
    if path.protocol in _STORES:
        path.system.pipe_file(path.key, content)
        return
    temporary = f"{path.key}.{token_hex(4)}.part"
    path.system.pipe_file(temporary, content)
    path.system.mv(temporary, path.key)


@lru_cache
def open_system(server: str, process: int) -> Any:
    """Open fsspec's file system of a server.

    The number of the process is a key of the cache, because a forked process cannot use the file
    system that its parent opened.
    """
    # The file system of the Hugging Face Hub keeps its listings all the same, and remembers which
    # repositories are missing. So whoever asks it calls `invalidate_cache` first.
    options: dict[str, Any] = {"use_listings_cache": False, "skip_instance_cache": True}
    if server.startswith("http"):
        from aiohttp import ClientTimeout

        # A large file may take long, so the total time has no limit. Only the time without any data
        # is limited.
        silence = ClientTimeout(total=None, sock_connect=_SILENT_S, sock_read=_SILENT_S)
        # The environment may name a proxy. A part of a compressed file would be other bytes.
        headers = {"Accept-Encoding": "identity"}
        options["client_kwargs"] = {"timeout": silence, "trust_env": True, "headers": headers}
    return url_to_fs(server, **options)[0]


def require_protocol(path: Any) -> None:
    """Refuse a URL if fsspec does not know its protocol, or lacks the package for it."""
    # fsspec names the package.
    with guard_server(path):
        get_filesystem_class(path.protocol)


def _explain_failure(path: Any, error: Exception) -> Exception:
    """Return the error of this package, or of Python, that stands for an error of a server."""
    status = _find_status(error)
    missing = (FileNotFoundError, NotADirectoryError)
    if status in _MISSING_STATUS or (not status and isinstance(error, missing)):
        return FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(path))
    cause = (status and error.__cause__) or error
    reason = escape(" ".join(f"{type(cause).__name__}: {cause}".split()))[:200]
    kind: type[UnavailableError] = ServerLostError
    if _is_refusal(error, status):
        kind = RefusedError
        open_system.cache_clear()
    return kind(
        f"{path} cannot be reached ({reason}). Look at the address, and at your credentials and "
        "rights there, which may have expired. Run the same again later: what is done is safe."
    )


def _is_refusal(error: Exception, status: int) -> bool:
    """Return whether the same request would be refused again. Every other failure may pass."""
    if status:
        return 300 <= status < 500 and status not in _PASSING_STATUS
    # The error of gcsfs for a refused request has neither a status nor a number.
    if type(error) is OSError and error.errno is None:
        return True
    return any(kind.__name__ in _REFUSALS for kind in type(error).__mro__)


def _find_status(error: Any) -> int:
    """Return the HTTP status of an error, or of the error that it comes from; 0 without one.

    fsspec says of every failure of a web server that the file is not there, and keeps the cause.
    """
    is_of_python = type(error).__module__ == "builtins"
    cause = error.__cause__ if is_of_python else None
    # The Hugging Face Hub keeps the status in the response.
    for holder in (cause, error, getattr(error, "response", None)):
        response = getattr(holder, "response", None)
        if isinstance(response, dict):
            # So botocore tells of an answer of S3.
            return int(response["ResponseMetadata"]["HTTPStatusCode"])
        for name in ("status", "code", "status_code"):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return value
    return 0
