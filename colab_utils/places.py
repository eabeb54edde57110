"""Places where data lies: folders, and URLs that fsspec knows, such as buckets and web servers.

A place is an address. `colab_utils.files.open_store` opens it.
"""

import os
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import quote, unquote

from colab_utils.drive import require_mounted
from colab_utils.errors import ColabUtilsError, hide_login

# A scheme has at least two letters, because "C:/" is a drive of Windows.
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/+(.*)", re.IGNORECASE | re.DOTALL)
_LOCAL = ("file", "local")
# A text that begins with one of these and a colon is a mistyped URL.
_SCHEME = re.compile(r"(s3a?|gs|gcs|az|abfss?|adl|hf|https?|sftp|ssh|smb|webdav):", re.IGNORECASE)
_WEB = ("http", "https")


@dataclass(frozen=True, order=True)
class UrlPath:
    """The address of a file or a folder at a URL.

    A `UrlPath` is not an ``os.PathLike``, so that no function takes it for a path on this machine.

    Args:
        url: the URL. It may hold a password, which is never printed.

    Example:
        >>> folder = UrlPath("s3://bucket/shards")
        >>> print(folder / "index.json")
        s3://bucket/shards/index.json
        >>> (folder / "index.json").parent == folder
        True
    """

    url: str

    def __str__(self) -> str:
        return hide_login(self.url)

    def __truediv__(self, name: str | Path) -> "UrlPath":
        text = PurePosixPath(name).as_posix()
        if self.is_web:
            text = quote(text)
        return UrlPath(f"{self.url.rstrip('/')}/{text}")

    @property
    def protocol(self) -> str:
        """Return the protocol of the URL, such as ``s3``."""
        return self.url.partition(":")[0].lower()

    @property
    def is_web(self) -> bool:
        """Return whether it lies on a web server.

        A web server sends a file if you know its name. It does not list a folder, and it cannot be
        written to.
        """
        return self.protocol in _WEB

    @property
    def name(self) -> str:
        """Return the last part of the path: the name of the file or folder."""
        name = self.url.rpartition("/")[2]
        return unquote(name) if self.is_web else name

    @property
    def parent(self) -> "UrlPath":
        """Return the folder that holds this file or folder."""
        return UrlPath(self.url.rpartition("/")[0])

    def absolute(self) -> "UrlPath":
        """Return this path: a URL is always absolute."""
        return self

    @property
    def server(self) -> str:
        """Return the URL without its path: the protocol, and the server or bucket."""
        return "/".join(self.url.split("/")[:3])

    @property
    def system(self) -> Any:
        """Return fsspec's file system of the server."""
        from colab_utils.urls import open_system

        return open_system(self.server, os.getpid())

    @property
    def key(self) -> str:
        """Return the path of the file or folder in fsspec's file system."""
        return str(self.system._strip_protocol(self.url))


Place = Path | UrlPath
PlaceLike = str | Place
"""A place, or the text of its path or URL."""


def open_place(path: "str | os.PathLike[str] | UrlPath") -> Place:
    """Return a path on this machine as a `Path`, and a URL as a `UrlPath`.

    Raises:
        ColabUtilsError: fsspec cannot open a URL of this protocol here, this is neither a path nor
            a single URL, or it is a path on Google Drive, which is not mounted.

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
        if "://" in text or _SCHEME.match(text):
            raise ColabUtilsError(
                f"{text!r} is not a URL. Write it as s3://bucket/folder, or put ./ before the name "
                "of a folder."
            )
        return _take_path(text)
    protocol = match[1].lower()
    rest = match[2]
    if protocol in _LOCAL:
        return _take_path("/" + rest)
    place = UrlPath(f"{protocol}://{rest.rstrip('/')}")
    from colab_utils.urls import require_protocol

    require_protocol(place)
    return place


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
    is_quoted = isinstance(path, UrlPath) and path.is_web
    return unquote(name) if is_quoted else name


def identify_place(place: PlaceLike) -> str:
    """Return a text that two paths have in common only if they lead to the same place.

    The text is not for people: of a URL it holds the password.

    Example:
        >>> identify_place(Path("shards")) == identify_place(Path("shards/."))
        True
    """
    if isinstance(place, UrlPath):
        return place.url
    return os.path.realpath(place)


def find_server(place: object) -> str:
    """Return the server of a URL: its protocol and host, or bucket; "" for a path.

    Example:
        >>> find_server(UrlPath("s3://bucket/shards")), find_server("shards")
        ('s3://bucket', '')
    """
    return place.server if isinstance(place, UrlPath) else ""
