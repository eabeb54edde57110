"""Find image files by the names that annotations give them."""

import os
from functools import lru_cache
from pathlib import Path, PureWindowsPath
from unicodedata import normalize
from urllib.parse import unquote

from colab_utils.drive import guard_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.require import require_local_path


def resolve_name(folder: str | Path, file_name: str) -> Path:
    """The file of a COCO ``file_name`` as it is named, where no link leads out of the folder."""
    path = Path(folder) / file_name
    if not (real := Path(os.path.realpath(path))).is_relative_to(os.path.realpath(folder)):
        found = f"the link {path} to {real}, which is not opened"
        raise ColabUtilsError(
            f"expected an image below {folder}, found {found}. Copy the image itself there."
        )
    return path


def require_folder(images: str | Path) -> None:
    """Raise ColabUtilsError where there is no image folder; one that is there will be listed
    afresh.
    """
    with guard_drive(images):
        if not require_local_path(images).is_dir():
            raise ColabUtilsError(
                f"expected an image folder, found none at {images}. On Colab, mount Drive first."
            )
    list_base_names.cache_clear()


def leads_out(name: str) -> bool:
    """Whether a name is none of a file below a folder: absolute, a URL, of a drive of Windows, or
    with ``..``.
    """
    named = PureWindowsPath(name)  # knows both kinds of slash, and drives
    return (
        not named.parts
        or bool(named.anchor)
        or ".." in named.parts
        or "\0" in name
        or "://" in name
    )


def take_base_name(name: str) -> str:
    r"""A name's last part, whatever the machine it comes from, with composed accents.

    Example:
        >>> take_base_name("C:\\data\\a.jpg"), take_base_name("https://example.org/my%20photo.jpg?v=1")
        ('a.jpg', 'my photo.jpg')
    """
    if "://" in name:
        name = unquote(name.partition("?")[0])
    return normalize("NFC", name.replace("\\", "/").rpartition("/")[2])


@lru_cache(4)
def list_base_names(folder: str) -> dict[str, str | None]:
    """Where the file of each base name lies below a folder; None where several have it. No link is
    followed.

    Raises:
        ColabUtilsError: the folder cannot be listed.
    """
    found = dict[str, str | None]()
    folders = [folder]
    try:
        with guard_drive(folder):
            for one in folders:
                for entry in os.scandir(one):
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    elif entry.is_file(follow_symlinks=False):
                        base = normalize("NFC", entry.name)
                        found[base] = None if base in found else os.path.relpath(entry.path, folder)
    except OSError as error:
        raise ColabUtilsError(
            f"expected to list the images in {folder}, found: {error}. Check the folder."
        ) from None
    return found
