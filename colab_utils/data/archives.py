"""Unpack a COCO export from a zip, on Drive or behind a URL."""

import errno
import io
import json
import os
import stat
import zlib
from contextlib import suppress
from lzma import LZMAError
from pathlib import Path, PureWindowsPath
from typing import Any
from zipfile import BadZipFile, ZipFile, ZipInfo

import xxhash

from colab_utils.data.coco import read_coco
from colab_utils.data.decoding import name_kind
from colab_utils.data.image_paths import list_meanings, take_base_name
from colab_utils.drive import Retries, explain_write
from colab_utils.errors import ColabUtilsError, escape
from colab_utils.files import open_pieces, write_file
from colab_utils.machine import require_space
from colab_utils.places import UrlPath, open_place, require_local_path
from colab_utils.progress import show_progress

# The files in a zip, by name.
_Members = dict[str, ZipInfo]
# Bytes of the smallest request for a part of a zip at a URL. Each request costs time.
_BLOCK_BYTES = 8_000_000
# Bytes that show what kind of file is no zip.
_HEAD_BYTES = 1_000_000
_CURE = "or name a folder on a bigger disk"
# Exceptions of zipfile: among them RuntimeError for encrypted files, ValueError for names that are
# not UTF-8, and OSError for damaged bzip2.
_DAMAGE = (BadZipFile, zlib.error, LZMAError, EOFError, RuntimeError, ValueError, OSError)
# An error with one of these numbers, or with no number, comes from a damaged zip. Others, such as
# that of a full disk, do not.
_DAMAGE_NUMBERS = {None, errno.EINVAL, errno.EISDIR, errno.ENOTDIR, errno.ENAMETOOLONG}
# Encodings of names that are not marked as UTF-8: those of macOS, then of Windows in China, Japan,
# Korea, Taiwan, Russia and the West. cp437, the default of zip, is tried before them.
_CODE_PAGES = ("utf-8", "gb18030", "cp932", "cp949", "cp950", "cp866", "cp1251", "cp1252", "cp850")
_IS_UTF8 = 0x800
# Folders that macOS and Synology add to a zip. They hold no files of the user.
_SYSTEM_FOLDERS = {"__MACOSX", "@eaDir"}
# A message lists at most this many names. At most this many images are looked up in the zip, to
# find the folder in which they lie.
_NAMED = 9


def is_archive(source: str) -> bool:
    """Return whether a dataset's name is a URL or the path of a zip.

    Example:
        >>> is_archive("https://example.org/export?format=coco"), is_archive("photos")
        (True, False)
    """
    return "://" in source or (source.lower().endswith(".zip") and not os.path.isdir(source))


def unpack_dataset(source: str, folder: Path, annotations: str = "") -> tuple[Path, Path]:
    """Unpack a COCO export: its annotations, and the images that they name.

    A zip at a URL is read where it lies: only the files that are needed come, and the zip takes no
    room on the disk. A server that sends no parts of files is refused. If the connection breaks,
    the server is asked again after a wait. Each wait is longer than the last.

    Files that were unpacked before are kept, so after a failure the next call goes on. Every file
    is compared with its checksum in the zip.

    Args:
        source: the path of a zip, or its ``https://`` or ``http://`` URL.
        folder: the folder to unpack into. Each zip gets a folder of its own in it.
        annotations: the JSON's name in the zip. By default, the zip must have only one JSON.

    Returns:
        The image folder and the COCO JSON.

    Raises:
        ColabUtilsError: if there is no zip; if it is damaged or encrypted; if it has names or links
            that lead out of it; if it has no annotations, or none of their images; or if the disk
            is full.
        DriveLostError: if Drive or the server went away. Call the function again to continue.

    Example:
        >>> unpack_dataset("no/such/export.zip", Path("datasets"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no zip at no/such/export.zip. ...
    """
    folder = require_local_path(folder)
    is_url = source.lower().startswith(("http://", "https://"))
    path = open_place(source) if is_url else require_local_path(source)
    version = 0
    if isinstance(path, Path):
        if not path.is_file():
            raise ColabUtilsError(f"There is no zip at {path}. Check IMAGES.")
        version = path.stat().st_mtime_ns
    key = xxhash.xxh3_64_hexdigest(os.fsencode(f"{source} {annotations} {version}"))
    target = folder / key
    # This file is written last. If it exists, everything was unpacked.
    done = target / "unpacked.json"
    if not done.is_file():
        with explain_write(target):
            target.mkdir(parents=True, exist_ok=True)
            try:
                file = path if isinstance(path, Path) else _UrlZip(path)
                names = _unpack(file, target / "files", annotations, str(path))
            except FileNotFoundError as error:
                raise ColabUtilsError(f"There is no zip at {path}. Check IMAGES.") from error
            except _DAMAGE as error:
                if getattr(error, "errno", None) not in _DAMAGE_NUMBERS:
                    raise
                raise ColabUtilsError(
                    f"{path} is not a whole zip of a COCO export: {_explain_damage(error, path)}"
                ) from error
            write_file(done, json.dumps(names).encode())
    images, name = json.loads(done.read_bytes())
    return target / "files" / images, target / "files" / name


def _explain_damage(error: Exception, path: Path | UrlPath) -> str:
    """Say why a zip cannot be unpacked, and what to do."""
    if isinstance(error, RuntimeError):
        return (
            "it has a password, or a compression that Python does not know (such as Deflate64 of "
            "Windows). Zip it again without a password, for example with `zip -r`."
        )
    kind = ""
    if isinstance(path, Path):
        with open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
        # A damaged zip begins like a whole one.
        kind = "" if head.startswith(b"PK") else name_kind(head)
    if kind:
        return f"it is {kind}. Then name the zip, or the folder with its images."
    return (
        f"{str(error) or type(error).__name__}. If the zip opens on your computer, copy it again. "
        "If not, export it again."
    )


def _unpack(file: "Path | _UrlZip", target: Path, annotations: str, source: str) -> tuple[str, str]:
    """Unpack the files that are needed; return the image folder and the JSON below ``target``."""
    with ZipFile(file) as archive:
        members = _fit_names(archive, source, {take_base_name(annotations)})
        text = _choose_annotations(members, annotations, source)
        _extract(archive, {text: members[text]}, target)
        coco = read_coco(target / text)
        names = [coco.file_name(i) for i in range(len(coco))]
        bases = set[str]().union(*map(list_meanings, names)) - {""}
        members = _fit_names(archive, source, bases)
        wanted = {name: members[name] for name in members if take_base_name(name) in bases}
        if not wanted:
            cure = "Name another JSON in ANNOTATIONS, or export it with its images."
            if not all(map(str.isascii, members)):
                cure = "The names in the zip are garbled: zip it again with names in UTF-8."
            raise ColabUtilsError(
                f"{source} has none of the {len(names):,} images of {text}. {cure}"
            )
        images = _find_folder(names, members, text, source)
        _extract(archive, wanted, target)
        return images, text


def _fit_names(archive: ZipFile, source: str, bases: set[str]) -> _Members:
    """Return the files in a zip by name, in the encoding that fits best.

    ``bases`` are the base names that are looked for. With the best encoding, more of them are found
    in the zip than with any other.
    """
    listings = [_list_members(archive, source)]
    if all(map(str.isascii, listings[0])):
        return listings[0]
    for page in _CODE_PAGES:
        with suppress(UnicodeError, ColabUtilsError):
            listings.append(_list_members(archive, source, page))
    return max(listings, key=lambda names: len(bases.intersection(map(take_base_name, names))))


def _choose_annotations(members: _Members, annotations: str, source: str) -> str:
    """Return the name of the only JSON in a zip, or of the one called ``annotations``.

    Raises:
        ColabUtilsError: if there is no such file, or several.
    """
    end = f"/{annotations}" if annotations else ".json"
    texts = [name for name in members if f"/{name}".endswith(end)]
    if len(texts) != 1:
        if texts:
            raise ColabUtilsError(
                f"{source} holds several files that match: {', '.join(texts[:_NAMED])}. Name in "
                "ANNOTATIONS the one that you mean."
            )
        raise ColabUtilsError(
            f"None of the {len(members):,} files in {source} is {annotations or 'a .json'}. Export "
            "COCO instances, or name in ANNOTATIONS the file that you mean."
        )
    return texts[0]


def _find_folder(names: list[str], members: _Members, text: str, source: str) -> str:
    """Return the folder below which the images lie.

    If several folders have images of these names, it is the folder of the JSON ``text``, or the
    only one that the JSON is called after: val for instances_val.json.

    If the names are paths of another machine, return "", which stands for the whole zip.
    `CocoDataset.find_image` finds such images by their base names.

    Raises:
        ColabUtilsError: if several folders have images of these names, and none is the JSON's.
    """
    for name in filter(None, names[:_NAMED]):
        slashed = name.replace("\\", "/")
        folders = [
            member.removesuffix(slashed)
            for member in members
            if f"/{member}".endswith(f"/{slashed}")
        ]
        own = text.removesuffix(take_base_name(text))
        if own in folders:
            return own
        stem = Path(text).stem.casefold()
        alike = [folder for folder in folders if _is_named_after(stem, Path(folder).name)]
        if len(folders) > 1 and len(alike) != 1:
            raise ColabUtilsError(
                f"{source} holds {name!r:.80} in several folders: "
                f"{', '.join(map(repr, folders[:_NAMED]))}. Unpack the zip, and name the folder "
                "with the images of your JSON."
            )
        if folders:
            return (alike or folders)[0]
    return ""


def _is_named_after(stem: str, folder: str) -> bool:
    """Return whether the name of a JSON ends with that of a folder: instances_val with val."""
    return f"_{stem}".endswith(f"_{folder.casefold()}")


def _list_members(archive: ZipFile, source: str, page: str = "cp437") -> _Members:
    """Return the files in a zip by name. Backslashes separate folders, as in unzip.

    Args:
        archive: the open zip.
        source: the name of the zip, for errors.
        page: the encoding of names that are not marked as UTF-8.

    Raises:
        UnicodeError: if a name cannot be decoded with this encoding.
        ColabUtilsError: if the zip has a link or an unsafe name.
    """
    members: _Members = {}
    for info in archive.infolist():
        name = info.filename
        if not info.flag_bits & _IS_UTF8:
            name = info.orig_filename.encode("cp437").decode(page)
        name = name.replace("\\", "/")
        path = PureWindowsPath(name)
        if name.endswith("/") or _is_hidden(path):
            continue
        kind = stat.S_IFMT(info.external_attr >> 16)
        problem = ""
        if path.anchor or ".." in path.parts or kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            problem = "a link or a name that leads out of it"
        elif not name or escape(name) != name:
            problem = "a name with control characters, or none at all"
        if problem:
            raise ColabUtilsError(
                f"{source} holds {name!r:.80}, {problem}, so nothing is unpacked. Zip it again "
                "with only files and folders."
            )
        members[name] = info
    return members


def _is_hidden(path: PureWindowsPath) -> bool:
    """Return whether a file was left by a system or a tool, such as ``.ipynb_checkpoints/x``."""
    folders = set(path.parts[:-1]) - {".."}
    is_in_hidden = any(folder.startswith(".") for folder in folders)
    return is_in_hidden or path.name.startswith("._") or not folders.isdisjoint(_SYSTEM_FOLDERS)


def _extract(archive: ZipFile, members: _Members, target: Path) -> None:
    """Unpack files of a zip into ``target``, except those that are complete there.

    zipfile compares the checksums of the files that it unpacks. `_is_there` compares those of the
    files that are there already.
    """
    missing = [name for name in members if not _is_there(target / name, members[name])]
    # A server can send the files in one answer if they are asked for in the order of the zip.
    missing.sort(key=lambda name: members[name].header_offset)
    require_space(target, sum(members[name].file_size for name in missing), _CURE)
    for name in show_progress("unpacking", missing, total=len(missing), unit="file"):
        members[name].filename = name
        archive.extract(members[name], target)


def _is_there(path: Path, info: ZipInfo) -> bool:
    return (
        path.is_file()
        and path.stat().st_size == info.file_size
        and zlib.crc32(path.read_bytes()) == info.CRC
    )


class _UrlZip(io.RawIOBase):
    """A zip at a URL, as `ZipFile` reads it."""

    def __init__(self, path: UrlPath) -> None:
        # This request is not tried again, so a wrong address is named at once.
        self._size = path.find_size()
        self._file = open_pieces(path, Retries(), block_bytes=_BLOCK_BYTES)
        self._place = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._place

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        place = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._size}[whence]
        if place < 0:
            raise OSError("no byte lies before the first one")
        self._place = place
        return place

    def readinto(self, buffer: Any) -> int:
        count = self._file.readinto(buffer, self._place)
        self._place += count
        return count
