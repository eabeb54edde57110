"""Notes on the JSON that shards were made of. With them, finished shards are recognised without
reading the JSON again.

The notes lie in a file beside the index, not in the index, because they hold the time of a file. A
copy of the data has another time, but must give the same index. If the notes are missing or
damaged, the JSON is read.
"""

import json
from contextlib import suppress
from dataclasses import asdict, dataclass

from colab_utils.data.coco import CocoDataset
from colab_utils.errors import DAMAGE, UnavailableError
from colab_utils.files import FileStamp, open_store, read_file
from colab_utils.places import Place

SOURCE_NAME = ".source.json"
# A JSON of fewer bytes is read in less than a second.
_SMALL_BYTES = 8_000_000


@dataclass(frozen=True)
class ShardSource:
    """Facts about the JSON that shards were made of."""

    fingerprint: str
    """XXH3-128 of the JSON."""
    json: FileStamp
    """Its size and its time of change, when the shards were written."""
    annotations: int
    """Annotations of all images."""
    crowds: int
    """Crowds of all images."""


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
        content = json.loads(read_file(folder / SOURCE_NAME))
        source = ShardSource(**{**content, "json": FileStamp(*content["json"])})
        return source if source.fingerprint == fingerprint else None
    return None


def keep_source(folder: Place, source: ShardSource) -> None:
    """Write notes on the shards of a folder, if the folder can be written to.

    Nothing is written if the JSON is small, because reading it again takes less than a second.
    """
    if source.json.bytes < _SMALL_BYTES:
        return
    # The notes only save time.
    with suppress(OSError, UnavailableError):
        if read_source(folder, source.fingerprint) != source:
            open_store(folder, patience_s=0).write(SOURCE_NAME, json.dumps(asdict(source)).encode())
