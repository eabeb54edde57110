"""Notes on the files that shards were made of. With them, a finished folder is recognised without
reading the JSON and the bad images again.

The notes lie in a file beside the index, not in the index, because they hold the times of files.
A copy of the data has other times, but must give the same index. If the notes are missing or
damaged, the data are read.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from colab_utils.data.coco import CocoDataset
from colab_utils.data.image_paths import find_file
from colab_utils.errors import DAMAGE, ColabUtilsError, UnavailableError
from colab_utils.files import FileStamp, read_file, stamp_file, write_file
from colab_utils.places import Place
from colab_utils.processes import ThreadPool
from colab_utils.shards.index import ShardIndex

SOURCE_NAME = ".source.json"
# A JSON of fewer bytes is read in less than a second.
_SMALL_BYTES = 8_000_000
# Image files that are looked up at the same time.
_STREAMS = 32


@dataclass(frozen=True)
class ShardSource:
    """Sizes and times that the JSON and the bad images had when the shards were written."""

    fingerprint: str
    """XXH3-128 of the JSON."""
    json: FileStamp
    annotations: int
    """Annotations of all images."""
    crowds: int
    """Crowds of all images."""
    skipped: dict[str, FileStamp] = field(default_factory=dict)
    """The files of images that were left out, by their file_name. A file that was changed while the
    shards were written is not listed.
    """


def describe_source(dataset: CocoDataset) -> ShardSource:
    """Return facts about the JSON that was read. By these facts it is recognised later."""
    fingerprint = dataset.fingerprint
    return ShardSource(fingerprint, dataset.stamp, len(dataset.ids), dataset.crowds)


def read_source(folder: Place, fingerprint: str) -> ShardSource | None:
    """Read the notes on the shards of a folder; None if there are none.

    Args:
        folder: the folder of the shards.
        fingerprint: the fingerprint in the index. Notes with another fingerprint belong to earlier
            shards, and are not returned.
    """
    with suppress(OSError, *DAMAGE):
        source = _parse(json.loads(read_file(folder / SOURCE_NAME)))
        return source if source.fingerprint == fingerprint else None
    return None


def _parse(content: dict[str, Any]) -> ShardSource:
    skipped = {name: FileStamp(*stamp) for name, stamp in content["skipped"].items()}
    return ShardSource(**{**content, "json": FileStamp(*content["json"]), "skipped": skipped})


def keep_source(
    folder: Place, index: ShardIndex, images: Place, source: ShardSource, before_ns: int
) -> None:
    """Write notes on the shards of a folder, if the folder can be written to.

    Nothing is written if all images are in the shards and the JSON is small, because reading it
    again takes less than a second.

    Args:
        folder: the folder of the shards.
        index: the index of this folder.
        images: the image folder.
        source: the notes on the JSON.
        before_ns: the time before the first image was read, in nanoseconds since 1970. A file that
            was changed later is not noted, because its older content may have been read.
    """
    if not index.skipped and source.json.bytes < _SMALL_BYTES:
        return
    # The notes only save time.
    with suppress(OSError, UnavailableError):
        stamps = stamp_images(images, [image.file_name for image in index.skipped])
        unchanged = {name: stamp for name, stamp in stamps.items() if stamp.modified_ns < before_ns}
        kept = replace(source, skipped=unchanged)
        if read_source(folder, index.fingerprint) != kept:
            write_file(folder / SOURCE_NAME, json.dumps(asdict(kept)).encode())


def list_changed(index: ShardIndex, source: ShardSource | None, images: Place) -> set[str]:
    """Return the names of the images that were left out and whose files may have changed since."""
    names = [image.file_name for image in index.skipped]
    if source is None:
        return set(names)
    stamps = stamp_images(images, names)
    return {
        name for name in names if name not in stamps or source.skipped.get(name) != stamps[name]
    }


def stamp_images(images: Place, names: list[str]) -> dict[str, FileStamp]:
    """Return the size and time of the file of each name. A name without a file is left out.

    Raises:
        DriveLostError: if Drive went away.
    """
    with ThreadPool(_STREAMS) as pool:
        stamps = zip(names, pool.map(partial(_stamp_image, images), names), strict=True)
        return {name: stamp for name, stamp in stamps if stamp is not None}


def _stamp_image(images: Place, name: str) -> FileStamp | None:
    try:
        path, _ = find_file(images, name, frozenset())
        return stamp_file(path)
    except UnavailableError:
        raise
    # Some names can belong to no file, such as names with a null character.
    except (ColabUtilsError, OSError, ValueError):
        return None
