"""Find image files by the names that annotations give them."""

import os
import re
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from typing import Any
from unicodedata import normalize
from urllib.parse import unquote

from colab_utils.drive import find_mount, guard_drive
from colab_utils.errors import ColabUtilsError, UnavailableError, explain_os_error
from colab_utils.files import open_store
from colab_utils.places import Place, PlaceLike, find_server, open_place

# The folder below a mount of Drive that holds what Drive's shortcuts point to.
_SHORTCUTS = ".shortcut-targets-by-id"
# The ending of a zip. No file has it as its name, because a name that begins with a dot is hidden.
_ZIP = ".zip"


def find_file(folder: PlaceLike, name: str, shared_names: frozenset[str]) -> tuple[Place, bool]:
    """Return the file that a ``file_name`` means, and whether another name led to it.

    The file is always below ``folder``; see `CocoDataset.find_image` for the names that are tried.
    If the folder is a URL, each attempt takes a request. So a file is asked for only if its name
    may be that of a web address, and accents and base names are not tried.

    Args:
        folder: the image folder.
        name: the ``file_name``, as the annotations give it.
        shared_names: base names that several images have. No file is looked for under such a name.

    Raises:
        ColabUtilsError: if the name leads out of the folder, and the folder holds no file or
            several files of its base name. Also if a link at this name leads out of the folder.
        DriveLostError: if Drive went away.
    """
    if find_server(folder):
        return _find_at_url(folder, name)
    folder = Path(str(folder))
    for meaning in _list_readings(name):
        named = None if _leads_out(meaning) else _find_spelling(folder, meaning)
        if named is not None:
            return named, meaning != name
    path = None if _leads_out(name) else Path(folder, name)
    # If the folder of the name is there, a file of another folder is another image.
    if path is not None and path.parent != folder and os.path.isdir(path.parent):
        return path, False
    bases = list_meanings(name) - shared_names
    places: list[str] = []
    try:
        listed = list_base_names(str(folder))
        places = [place for base in bases for place in listed.get(base, ())]
    except UnavailableError:
        # Whoever reads the file says that Drive went away, and tries again.
        if path is None:
            raise
    if len(places) == 1:
        return Path(folder, places[0]), places[0] != name
    if path is not None:
        return path, False
    raise ColabUtilsError(
        f"The file_name {name!r:.80} leads out of {folder}, and no single file there has its base "
        "name. Put the image into that folder, and write its path in the folder as file_name."
    )


def _find_at_url(folder: Any, name: str) -> tuple[Place, bool]:
    """Return the file at a URL that a ``file_name`` means, and whether another name led to it."""
    decoded = decode_name(name).replace("\\", "/")
    if _leads_out(decoded):
        decoded = take_base_name(decoded)
    if _leads_out(decoded):
        raise ColabUtilsError(
            f"The file_name {name!r:.80} leads out of {folder}. Write the image's path in the "
            "folder as file_name."
        )
    # A name such as "50%20off.jpg" may be the file's own name.
    is_name = decoded != name and not _leads_out(name)
    if is_name and open_store(folder).find_kind(name) == "file":
        return folder / name, False
    return folder / decoded, decoded != name


def _leads_out(name: str) -> bool:
    """Return whether a name may lead out of the folder.

    Absolute paths, URLs, names with a drive of Windows, and names with ``..`` may do so.
    """
    # PureWindowsPath knows both kinds of slash, and drives.
    named = PureWindowsPath(name)
    if not named.parts or named.anchor or ".." in named.parts:
        return True
    return "\0" in name or "://" in name


def _resolve(folder: str | Path, file_name: str) -> Path:
    """Return the path of ``file_name`` below the folder.

    Raises:
        ColabUtilsError: if a link on this path leads out of the folder.
    """
    path = Path(folder) / file_name
    real = Path(os.path.realpath(path))
    if not real.is_relative_to(os.path.realpath(folder)) and not _is_shortcut(folder, real):
        raise ColabUtilsError(
            f"The link {path} leads out of {folder}, to {real}, which is not opened. Name "
            f"{real.parent} as the image folder (IMAGES), or copy the images into {folder}."
        )
    return path


def _is_shortcut(folder: str | Path, real: Path) -> bool:
    """Return whether a link from the folder to ``real`` is a shortcut that the user made on Drive.

    Such a link stays within the mount of Drive.
    """
    mount = find_mount(folder)
    return _SHORTCUTS in real.parts or (mount is not None and real.is_relative_to(mount))


def _find_spelling(folder: Path, name: str) -> Path | None:
    """Return the file below a folder that a name means, in any spelling of accents and slashes.

    None means that no such file is there.
    """
    path = _resolve(folder, name)
    if os.path.exists(path):
        return path
    path = folder
    for part in name.replace("\\", "/").split("/"):
        spellings = [path / part, path / normalize("NFC", part), path / normalize("NFD", part)]
        existing = [*filter(os.path.exists, spellings)]
        if not existing:
            return None
        path = existing[0]
    return _resolve(folder, str(path.relative_to(folder)))


def require_folder(images: PlaceLike) -> None:
    """Raise ColabUtilsError if there is no image folder. Forget the files that were listed in it
    before.
    """
    kind = open_store(open_place(images)).find_kind()
    if kind != "folder":
        cure = "Check its name."
        if kind:
            cure = "It is a file. Name a folder: if the file is an archive, unpack it first."
        raise ColabUtilsError(f"There is no image folder at {images}. {cure}")
    list_base_names.cache_clear()
    _list_alike.cache_clear()


def take_base_name(name: str) -> str:
    r"""Return the last part of a path of any operating system, in Unicode's NFC.

    Example:
        >>> take_base_name("C:\\data\\a.jpg")
        'a.jpg'
    """
    return normalize("NFC", name.replace("\\", "/").rpartition("/")[2])


def decode_name(name: str) -> str:
    """Return a name without what an address adds to it.

    Label Studio puts the name behind ``?d=``. Other addresses end with ``?`` and a key. Both have
    ``%20`` for a space.

    Example:
        >>> decode_name("https://example.org/my%20photo.jpg?v=1")
        'https://example.org/my photo.jpg'
    """
    return unquote(name.partition("?d=")[2] or name.partition("?")[0]).strip()


def list_meanings(name: str) -> set[str]:
    """Return the base names of the files that a name may mean.

    Example:
        >>> sorted(list_meanings("/data/local-files/?d=my%20photos%5Ca.jpg"))
        ['?d=my%20photos%5Ca.jpg', 'a.jpg']
    """
    return {take_base_name(reading) for reading in _list_readings(name)}


def _list_readings(name: str) -> list[str]:
    """Return a name as it is, and what it becomes if it is read as an address, once or twice."""
    readings = [name]
    while (decoded := decode_name(readings[-1])) not in readings:
        readings.append(decoded)
    return readings


@lru_cache(4)
def list_base_names(folder: str) -> dict[str, tuple[str, ...]]:
    """Return a dict from the base name of each file below a folder to its paths in the folder.

    At most two paths are given of a name that several files have.

    No links are followed but Drive's shortcuts. Hidden files and folders are left out.

    Raises:
        ColabUtilsError: if the folder cannot be listed.
    """
    places: dict[str, tuple[str, ...]] = {}
    for path in list_files(Path(folder)):
        base = take_base_name(path)
        places[base] = (*places.get(base, ()), path)[:2]
    return places


def list_files(folder: Any, *, links: bool = False) -> Iterator[str]:
    """Yield the path in a folder of each file below it, those of the outer folders first.

    Hidden files and folders are left out. No links are followed but Drive's shortcuts. With
    ``links``, links are yielded as they are, and so is all else that is no file.

    Raises:
        ColabUtilsError: if the folder cannot be listed.
        DriveLostError: if Drive went away.
    """
    try:
        with guard_drive(folder):
            yield from _walk(str(folder), links=links)
    except OSError as error:
        cure = "Check the folder. If it is a URL, name the JSON of its images (annotations)."
        reason = explain_os_error(error, cure)
        raise ColabUtilsError(f"The images in {folder} cannot be listed: {reason}") from None


def _walk(folder: str, *, links: bool) -> Iterator[str]:
    waiting = deque([folder])
    followed = {os.path.realpath(folder)}
    while waiting:
        for entry in os.scandir(waiting.popleft()):
            follows = False
            if entry.is_symlink():
                real = os.path.realpath(entry.path)
                # A shortcut may lead to a folder that it lies in: follow it only once.
                follows = real not in followed and _is_shortcut(folder, Path(real))
                followed.add(real)
            # Folders such as .Trash-0 hold what the user has deleted, and files such as ._1.jpg
            # what macOS notes of others.
            if entry.name.startswith("."):
                continue
            if entry.is_dir(follow_symlinks=follows):
                waiting.append(entry.path)
            elif links or entry.is_file(follow_symlinks=follows):
                yield os.path.relpath(entry.path, folder)


def explain_missing(folder: PlaceLike, name: str) -> str:
    """Say that an image is missing in a folder, and name a file that may be the right one."""
    with suppress(ColabUtilsError):
        for base in map(take_base_name, _list_readings(name)):
            if places := list_base_names(str(folder)).get(base):
                return (
                    f"not in {folder}, but in another folder below it, or in several folders "
                    f"({' and '.join(sorted(places))}): write the folder into file_name"
                )
            alike = _list_alike(str(folder))
            if other := alike.get(_take_stem(base)):
                return (
                    f"not in {folder}, but {other} is there: write file_name as the file is called"
                )
        if packed := alike.get(_ZIP):
            return f"not in {folder}, which holds {packed}: unpack it first"
    return f"not in {folder}"


@lru_cache(4)
def _list_alike(folder: str) -> dict[str, str]:
    """Return a dict from each stem of `_take_stem`, and from `_ZIP`, to a file that has it."""
    alike = {}
    for base in list_base_names(folder):
        alike[_take_stem(base)] = base
        if base.lower().endswith(_ZIP):
            alike[_ZIP] = base
    return alike


def _take_stem(base: str) -> str:
    """Return a base name in small letters, without its ending, and without Drive's " (1)"."""
    return re.sub(r" \(\d+\)$", "", Path(base).stem).casefold()
