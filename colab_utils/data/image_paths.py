"""Find image files by the names that annotations give them."""

import os
from contextlib import suppress
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from unicodedata import normalize
from urllib.parse import unquote

from colab_utils.drive import find_mount, guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.os_errors import explain_os_error
from colab_utils.places import WEB, Place, PlaceLike, UrlPath, open_place

# The folder below a mount of Drive that holds what Drive's shortcuts point to.
_SHORTCUTS = ".shortcut-targets-by-id"


def find_file(folder: PlaceLike, name: str, shared_names: frozenset[str]) -> tuple[Place, bool]:
    """Return the file that a ``file_name`` means, and whether another name led to it.

    The file is always below ``folder``; see `CocoDataset.find_image` for the names that are tried.
    If the folder is a URL, no file is looked for, because each attempt would take a request.
    Instead, what a web address adds to a name, such as ``?`` and a key, is removed from
    ``file_name``, and the file is assumed to have the remaining name. If this name leads out of the
    folder, only its base name is used.

    Args:
        folder: the image folder.
        name: the ``file_name``, as the annotations give it.
        shared_names: base names that several images have. No file is looked for under such a name.

    Raises:
        ColabUtilsError: if the name leads out of the folder, and the folder holds no file or
            several files of its base name. Also if a link at this name leads out of the folder.
        DriveLostError: if Drive went away.
    """
    if isinstance(folder, UrlPath):
        place = _decode_name(name).replace("\\", "/")
        if _leads_out(place):
            place = take_base_name(name)
        return folder / place, place != name
    return _find_local(folder, name, shared_names)


def _find_local(folder: str | Path, name: str, shared_names: frozenset[str]) -> tuple[Path, bool]:
    meant = _decode_name(name)
    path = None if _leads_out(name) else _resolve(folder, name)
    if path is not None:
        named = _find_spelling(folder, name, path)
        if named is not None and (meant == name or os.path.exists(named)):
            return named, False
    if meant != name:
        with suppress(ColabUtilsError):
            decoded, _ = _find_local(folder, meant, shared_names)
            if os.path.exists(decoded):
                return decoded, True
    base = take_base_name(name)
    relative = None if base in shared_names else list_base_names(str(folder)).get(base, "")
    if relative:
        return Path(folder, relative), True
    if path is not None:
        return path, False
    number = "no file there has" if relative == "" else "several images or files have"
    raise ColabUtilsError(
        f"The file_name {name!r:.80} leads out of {folder}, and {number} its base name. Put the "
        "image into that folder, and write its path in the folder as file_name."
    )


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
    roots = [parent / _SHORTCUTS for parent in Path(os.path.realpath(folder)).parents]
    mount = find_mount(folder)
    if mount is not None:
        roots.append(mount)
    return any(real.is_relative_to(root) for root in roots)


def _find_spelling(folder: str | Path, name: str, path: Path) -> Path | None:
    """Return the file that a name means, however its accents and slashes are written.

    None means that the file has to be found by its base name.
    """
    slashed = name.replace("\\", "/")
    if (name.isascii() and "/" not in slashed) or os.path.exists(path):
        return path
    for spelling in (normalize("NFC", slashed), normalize("NFD", slashed)):
        alike = _resolve(folder, spelling)
        if os.path.exists(alike):
            return alike
    if slashed == name and os.path.isdir(path.parent):
        return path
    return None


def require_folder(images: PlaceLike) -> None:
    """Raise ColabUtilsError if there is no image folder. Forget the files that were listed in it
    before.
    """
    with guard_drive(images):
        folder = open_place(images)
        # Many web servers do not list their files, so nothing can be checked.
        is_web = isinstance(folder, UrlPath) and folder.protocol in WEB
        if not is_web and not folder.is_dir():
            cure = "Check its name."
            if isinstance(folder, UrlPath):
                cure = "Look at the names of the bucket and of the folder."
            elif folder.is_file():
                cure = "It is a file. Name a folder: if the file is an archive, unpack it first."
            raise ColabUtilsError(f"There is no image folder at {images}. {cure}")
    list_base_names.cache_clear()
    _list_stems.cache_clear()


def take_base_name(name: str) -> str:
    r"""Return the last part of a path of any operating system, or of a URL, in Unicode's NFC.

    Example:
        >>> take_base_name("C:\\data\\a.jpg")
        'a.jpg'
        >>> take_base_name("https://example.org/my%20photo.jpg?v=1")
        'my photo.jpg'
    """
    if "://" in name:
        name = unquote(name.partition("?")[0])
    return normalize("NFC", name.replace("\\", "/").rpartition("/")[2])


def _decode_name(name: str) -> str:
    """Return a name without what an address adds to it.

    Label Studio puts the name behind ``?d=``. Other addresses end with ``?`` and a key. Both have
    ``%20`` for a space.
    """
    return unquote(name.partition("?d=")[2] or name.partition("?")[0]).strip()


def list_meanings(name: str) -> set[str]:
    """Return the base names of the files that a name may mean.

    Example:
        >>> sorted(list_meanings("/data/local-files/?d=my%20photos%5Ca.jpg"))
        ['?d=my%20photos%5Ca.jpg', 'a.jpg']
    """
    return {take_base_name(name), take_base_name(_decode_name(name))}


@lru_cache(4)
def list_base_names(folder: str) -> dict[str, str | None]:
    """Return a dict from the base name of each file below a folder to its path in the folder.

    The path is None if several files have this name.

    No links are followed but Drive's shortcuts. Hidden folders are left out.

    Raises:
        ColabUtilsError: if the folder cannot be listed.
    """
    places: dict[str, str | None] = {}
    folders = [folder]
    followed = {os.path.realpath(folder)}
    try:
        with guard_drive(folder):
            # The loop adds to this list the folders that it meets.
            for parent in folders:
                for entry in os.scandir(parent):
                    follows = False
                    if entry.is_symlink():
                        real = os.path.realpath(entry.path)
                        # A shortcut may lead to a folder that it lies in: follow it only once.
                        follows = real not in followed and _is_shortcut(folder, Path(real))
                        followed.add(real)
                    if entry.is_dir(follow_symlinks=follows):
                        # Folders such as .Trash-0 hold what the user has deleted.
                        if not entry.name.startswith("."):
                            folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=follows):
                        base = normalize("NFC", entry.name)
                        is_new = base not in places
                        places[base] = os.path.relpath(entry.path, folder) if is_new else None
    except OSError as error:
        reason = explain_os_error(error, "Check the folder.")
        raise ColabUtilsError(f"The images in {folder} cannot be listed: {reason}") from None
    return places


def explain_missing(folder: PlaceLike, name: str) -> str:
    """Say that an image is missing in a folder, and name a file that may be the right one."""
    if isinstance(folder, UrlPath):
        return f"not in {folder}"
    base = take_base_name(name)
    with suppress(ColabUtilsError):
        places = list_base_names(str(folder))
        place = places.get(base)
        if place:
            return f"not in {folder}, but in {Path(folder, place).parent}: name that folder"
        if base in places:
            return (
                f"not in {folder}, but in several folders below it: write the folder into file_name"
            )
        alike = _list_stems(str(folder)).get(Path(base).stem.casefold())
        if alike:
            return f"not in {folder}, but {alike} is there: write file_name as the file is called"
    return f"not in {folder}"


@lru_cache(4)
def _list_stems(folder: str) -> dict[str, str]:
    """Return a dict from each stem in small letters to the name of a file that has this stem.

    A stem is the base name of a file without its ending.
    """
    return {Path(base).stem.casefold(): base for base in list_base_names(folder)}
