"""Unpack a COCO export from a zip, on Drive or behind a URL."""

import json
import os
import re
import stat
import zlib
from functools import partial
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path, PureWindowsPath
from urllib.error import HTTPError
from urllib.parse import quote
from urllib.request import build_opener
from zipfile import BadZipFile, ZipFile, ZipInfo

import xxhash

from colab_utils.data.coco import read_coco
from colab_utils.data.decoding import name_kind
from colab_utils.data.image_paths import list_meanings, take_base_name
from colab_utils.drive import explain_write
from colab_utils.errors import DAMAGE, ColabUtilsError, escape
from colab_utils.files import write_file
from colab_utils.machine import require_space
from colab_utils.places import require_local_path
from colab_utils.progress import show_progress

# The files in a zip, by name.
_Members = dict[str, ZipInfo]
_ENDINGS = (".zip", ".tar", ".gz", ".tgz", ".bz2", ".xz", ".7z", ".rar")
_PIECE_BYTES = 1_000_000
# A server that sends nothing for so long is given up.
_SILENT_S = 60.0
# Errors of a damaged zip, and of a server that stops in the middle of it. A password and an unknown
# compression raise a RuntimeError, and damaged bzip2 an OSError without a number.
_DAMAGE = (
    BadZipFile,
    zlib.error,
    LZMAError,
    EOFError,
    RuntimeError,
    HTTPException,
    OSError,
    *DAMAGE,
)
# Google Drive divides a large folder into zips with such names.
_PART = re.compile(r"-\d{3}\.zip$")
# Names that systems and tools add to a zip begin like this. They hold no files of the user.
_HIDDEN = (".", "__MACOSX", "@eaDir")
_CURE = "or name a folder on a bigger disk"
# A message lists at most this many names.
_NAMED = 9


def is_archive(source: str) -> bool:
    """Return whether a dataset's name is a URL or the path of a zip or of another archive.

    Example:
        >>> is_archive("https://example.org/export?format=coco"), is_archive("photos")
        (True, False)
    """
    return "://" in source or (source.lower().endswith(_ENDINGS) and not os.path.isdir(source))


def unpack_dataset(source: str, folder: Path, annotations: str = "") -> tuple[Path, Path]:
    """Unpack a COCO export: its annotations, and the images that they name.

    A zip at a URL is downloaded to the disk first, and removed when it is unpacked. What was
    unpacked as a whole is found by the next call. Every file is compared with its checksum in the
    zip.

    Args:
        source: the path of a zip, or its ``https://`` or ``http://`` URL.
        folder: the folder to unpack into. Each zip gets a folder of its own in it.
        annotations: the JSON's name in the zip. By default, the zip must have only one JSON.

    Returns:
        The image folder and the COCO JSON.

    Raises:
        ColabUtilsError: if there is no zip; if it is damaged or encrypted; if it has names or links
            that lead out of it; if it has no annotations, or none of their images; if it is one of
            several parts; or if the disk is full.
        DriveLostError: if Drive went away. Call the function again to continue.

    Example:
        >>> unpack_dataset("no/such/export.zip", Path("datasets"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no zip at no/such/export.zip. Check IMAGES.
    """
    folder = require_local_path(folder)
    is_url = source.lower().startswith(("http://", "https://"))
    path = folder / "download.zip" if is_url else require_local_path(source)
    if not is_url and not path.is_file():
        raise ColabUtilsError(f"There is no zip at {path}. Check IMAGES.")
    version = 0 if is_url else path.stat().st_mtime_ns
    key = xxhash.xxh3_64_hexdigest(os.fsencode(f"{source} {annotations} {version}"))
    target = folder / key
    # This file is written last. If it exists, everything was unpacked.
    done = target / "unpacked.json"
    if not done.is_file():
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
            try:
                if is_url:
                    _download(source, path)
                names = _unpack(path, target / "files", annotations, source)
            except _DAMAGE as error:
                if getattr(error, "errno", None) and not isinstance(error, ConnectionError):
                    raise
                raise ColabUtilsError(
                    f"{source} is not a whole zip: {_explain_damage(error, path)}"
                ) from error
            finally:
                if is_url:
                    path.unlink(missing_ok=True)
            write_file(done, json.dumps(names).encode())
    images, name = json.loads(done.read_bytes())
    return target / "files" / images, target / "files" / name


def _download(url: str, path: Path) -> None:
    """Download a file.

    Raises:
        ColabUtilsError: the server does not send the file.
    """
    # Names with spaces and letters of any language are allowed in an address.
    address = quote(url, safe=":/?#[]@!$&'()*+,;=%~")
    try:
        # The proxies of the environment are looked up anew.
        answer = build_opener().open(address, timeout=_SILENT_S)
    except (OSError, HTTPException, ValueError) as error:
        if isinstance(error, HTTPError):
            error.close()
        # Other errors than those of the server may quote a password in the address.
        reason = error if isinstance(error, OSError) else type(error).__name__
        raise ColabUtilsError(
            f"The zip at {url} cannot be read: {reason}. Check IMAGES and the network."
        ) from None
    with answer, open(path, "wb") as file:
        size = int(answer.headers.get("Content-Length") or 0)
        # There must be room for the zip, and for what is in it.
        require_space(path.parent, 2 * size, _CURE)
        pieces = iter(partial(answer.read, _PIECE_BYTES), b"")
        count = size // _PIECE_BYTES
        for piece in show_progress("download", pieces, total=count, unit="MB"):
            file.write(piece)


def _explain_damage(error: Exception, path: Path) -> str:
    """Say why a zip cannot be unpacked, and what to do."""
    if isinstance(error, RuntimeError):
        return (
            "it has a password, or a compression that Python does not know (such as Deflate64 of "
            "Windows). Zip it again without a password, for example with `zip -r`."
        )
    with open(path, "rb") as file:
        head = file.read(_PIECE_BYTES)
    # A damaged zip begins like a whole one.
    kind = "" if head.startswith(b"PK") else name_kind(head)
    if kind:
        return f"it is {kind}. Then name the zip, or the folder with its images."
    return (
        f"{str(error) or type(error).__name__}. If the zip opens on your computer, copy it again. "
        "If not, export it again."
    )


def _unpack(file: Path, target: Path, annotations: str, source: str) -> tuple[str, str]:
    """Unpack the files that are needed; return the image folder and the JSON below ``target``."""
    with _open_zip(file) as archive:
        members = _list_members(archive, source)
        text = _choose_annotations(members, annotations, source)
        _extract(archive, {text: members[text]}, target)
        coco = read_coco(target / text)
        names = [coco.file_name(i) for i in range(len(coco))]
        bases = _find_bases(names, members, source)
        wanted = {name: members[name] for name in members if take_base_name(name) in bases}
        images = _find_folder(names, members, text, source)
        _extract(archive, wanted, target)
        return images, text


def _open_zip(file: Path) -> ZipFile:
    """Open a zip. macOS writes names in UTF-8 without saying so."""
    try:
        return ZipFile(file, metadata_encoding="utf-8")
    except UnicodeDecodeError:
        return ZipFile(file)


def _find_bases(names: list[str], members: _Members, source: str) -> set[str]:
    """Return the base names of the images in a zip. Say how many images are not in it.

    Raises:
        ColabUtilsError: if none of them is in it, or if others are in another archive.
    """
    bases = set(map(take_base_name, members)) - {""}
    missing = [name for name in names if not list_meanings(name) & bases]
    inner = [name for name in members if name.lower().endswith(_ENDINGS)]
    cure = ""
    if inner:
        cure = f"The zip holds {inner[0]}: unpack both, and name the folder of the images."
    elif _PART.search(source):
        cure = "It is one of several zips: unpack all of them, and name the folder."
    elif len(missing) == len(names):
        cure = "Name another JSON in ANNOTATIONS, or zip it again with its images, names in UTF-8."
    if missing and cure:
        raise ColabUtilsError(
            f"{len(missing):,} of the {len(names):,} images of the JSON are not in {source}, such "
            f"as {missing[0]!r:.80}. {cure}"
        )
    return set[str]().union(*map(list_meanings, names)) & bases


def _choose_annotations(members: _Members, annotations: str, source: str) -> str:
    """Return the name of the only JSON in a zip, or of the one called ``annotations``.

    Raises:
        ColabUtilsError: if there is no such file, or several.
    """
    end = f"/{annotations}" if annotations else ".json"
    texts = [name for name in members if f"/{name}".endswith(end)]
    if len(texts) != 1:
        shown = ", ".join((texts or [*members])[:_NAMED])
        raise ColabUtilsError(
            f"{len(texts)} files in {source} are {annotations or 'a .json'}: it holds {shown}. "
            "Name in ANNOTATIONS the JSON that you mean, or export COCO instances."
        )
    return texts[0]


def _find_folder(names: list[str], members: _Members, text: str, source: str) -> str:
    """Return the folder below which the images lie.

    If several folders have images of these names, it is the folder of the JSON ``text``. If the
    names are paths of another machine, return "", which stands for the whole zip:
    `CocoDataset.find_image` finds such images by their base names.

    Raises:
        ColabUtilsError: if several folders have images of these names, and none is the JSON's.
    """
    own = text.removesuffix(take_base_name(text))
    for name in names[:_NAMED]:
        end = name.replace("\\", "/") or "/"
        folders = [name.removesuffix(end) for name in members if f"/{name}".endswith(f"/{end}")]
        if own in folders:
            return own
        if len(folders) > 1:
            raise ColabUtilsError(
                f"{source} holds {end!r:.80} in several folders, such as {folders[0]!r} and "
                f"{folders[1]!r}. Unpack the zip, and name the folder with the images of your JSON."
            )
        if folders:
            return folders[0]
    return ""


def _list_members(archive: ZipFile, source: str) -> _Members:
    """Return the files in a zip by name. Backslashes separate folders, as in unzip.

    Raises:
        ColabUtilsError: if the zip has a link or an unsafe name.
    """
    members: _Members = {}
    for info in archive.infolist():
        name = info.filename.replace("\\", "/")
        path = PureWindowsPath(name)
        is_link = stat.S_ISLNK(info.external_attr >> 16)
        if is_link or path.anchor or ".." in path.parts or escape(name) != name:
            raise ColabUtilsError(
                f"{source} holds {name!r:.80}, a link or a name that leads out of it or cannot be "
                "shown, so nothing is unpacked. Zip it again with only files and folders."
            )
        is_hidden = any(part.startswith(_HIDDEN) for part in path.parts)
        if not is_hidden and not name.endswith("/"):
            members[name] = info
    return members


def _extract(archive: ZipFile, members: _Members, target: Path) -> None:
    """Unpack files of a zip into ``target``. zipfile compares their checksums."""
    require_space(target, sum(info.file_size for info in members.values()), _CURE)
    files = show_progress("unpacking", members.items(), total=len(members), unit="file")
    for name, info in files:
        info.filename = name
        archive.extract(info, target)
