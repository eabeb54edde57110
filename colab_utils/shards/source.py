"""What shards were made of, kept so that a finished folder is known without reading the JSON and
the images that were bad.

It lies beside the index, not in it: the index depends on the data alone, and a copy of the data has
other times. Where it is missing or damaged, the data are read.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

from colab_utils.data.image_paths import find_file
from colab_utils.errors import ColabUtilsError, UnavailableError
from colab_utils.files import FileStamp, read_file, stamp_file, write_file
from colab_utils.places import Place
from colab_utils.processes import ThreadPool
from colab_utils.shards.index import ShardIndex

SOURCE_NAME = ".source.json"
# A JSON of fewer bytes is read in less than a second.
_SMALL_BYTES = 8_000_000
# Images that are asked for at the same time.
_STREAMS = 32


@dataclass(frozen=True)
class ShardSource:
    """The files that shards were made of, as they were then."""

    fingerprint: str
    """XXH3-128 of the JSON."""
    json: FileStamp
    annotations: int
    """Of all images, and so the crowds."""
    crowds: int
    skipped: dict[str, FileStamp] = field(default_factory=dict)
    """Of images that were left out, by their file_name. Those that were changed while the shards
    were written are not there.
    """


def read_source(folder: Place, fingerprint: str) -> ShardSource | None:
    """Read what the shards of a folder were made of; None where that is not known.

    Args:
        folder: the folder of the shards.
        fingerprint: that of the index: what lies there may be of earlier shards.
    """
    with suppress(OSError, AttributeError, KeyError, TypeError, ValueError, RecursionError):
        source = parse_source(json.loads(read_file(folder / SOURCE_NAME)))
        return source if source.fingerprint == fingerprint else None
    return None


def parse_source(content: dict[str, Any]) -> ShardSource:
    """Return a source from its JSON.

    Raises:
        AttributeError, KeyError, TypeError: it is not what was written.
    """
    skipped = {name: FileStamp(*stamp) for name, stamp in content["skipped"].items()}
    return ShardSource(**{**content, "json": FileStamp(*content["json"]), "skipped": skipped})


def keep_source(
    folder: Place, index: ShardIndex, images: Place, source: ShardSource, before_ns: int
) -> None:
    """Keep what the shards of a folder were made of, where the folder can be written to.

    Of a small JSON whose images are all in the shards nothing is kept: it is read in no time.

    Args:
        folder: the folder of the shards.
        index: what it holds.
        images: the image folder.
        source: the JSON.
        before_ns: when the images began to be looked at, in nanoseconds since 1970. Whoever looked
            at a file that was changed later may have seen what it was before.
    """
    if not index.skipped and source.json.bytes < _SMALL_BYTES:
        return
    stamps = stamp_images(images, [image.file_name for image in index.skipped])
    for name, stamp in list(stamps.items()):
        if stamp.modified_ns >= before_ns:
            del stamps[name]
    kept = replace(source, skipped=stamps)
    if read_source(folder, index.fingerprint) == kept:
        return
    with suppress(OSError, UnavailableError):
        write_file(folder / SOURCE_NAME, json.dumps(asdict(kept)).encode())


def list_changed(index: ShardIndex, source: ShardSource | None, images: Place) -> set[str]:
    """Return the names of images that an index skipped, and whose files may be others now."""
    names = [image.file_name for image in index.skipped]
    if source is None:
        return set(names)
    stamps = stamp_images(images, names)
    return {
        name for name in names if name not in stamps or source.skipped.get(name) != stamps[name]
    }


def stamp_images(images: Place, names: Iterable[str]) -> dict[str, FileStamp]:
    """Return the stamps of the files that these names mean; names that mean no file of the folder
    have none.

    Raises:
        DriveLostError: Drive went away.
    """
    names = list(names)
    with ThreadPool(_STREAMS) as pool:
        stamps = zip(names, pool.map(partial(_stamp_image, images), names), strict=True)
        return {name: stamp for name, stamp in stamps if stamp is not None}


def _stamp_image(images: Place, name: str) -> FileStamp | None:
    try:
        path, _ = find_file(images, name, frozenset())
        return stamp_file(path)
    except UnavailableError:
        raise
    # No file can have some names.
    except (ColabUtilsError, OSError, ValueError):
        return None
