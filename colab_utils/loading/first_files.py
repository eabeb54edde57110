"""The files of the first shard, which are read while it is still planned how large shards are."""

from contextlib import suppress
from functools import partial
from typing import Any

from colab_utils.data.coco import CocoDataset
from colab_utils.errors import ColabUtilsError
from colab_utils.places import Place
from colab_utils.reader import AHEAD_BYTES, Reader
from colab_utils.shards.jobs import ShardJob
from colab_utils.shards.plan import complete_recipe, split_images
from colab_utils.shards.records import read_image

# A guess of the bytes that an image takes in a shard, before any image is measured. Photos of COCO
# take half as many again, so of these a few more are read than the first shard has.
_GUESSED_BYTES = 100_000
# Number of files to read at the same time with "auto". A first shard is too small to measure it.
_STREAMS = 32


class FirstFiles:
    """Read the files of shard 0 in the background, from now on.

    To plan shards, some images of the folder are measured, and training waits for the first shard.
    So a slow folder is asked for the files of both at the same time. Which images come first does
    not depend on the plan; only their number does.

    Args:
        images: the image folder.
        dataset: the annotations.
        recipe: the result of `make_recipe`.
        streams: number of files to read at the same time, or "auto".
    """

    def __init__(
        self, images: Place, dataset: CocoDataset, recipe: dict[str, Any], streams: int | str
    ) -> None:
        self._count = len(dataset)
        self._streams = _STREAMS if streams == "auto" else streams
        self._reader = Reader(
            partial(read_image, images, dataset), place=images, streams=self._streams
        )
        rows = split_images(complete_recipe(recipe, _GUESSED_BYTES), self._count)[0]
        self._reader.prefetch(rows.tolist())

    def fill(self, job: ShardJob) -> ShardJob:
        """Return the job of shard 0 with the contents of its files, once they are read.

        A file that cannot be read is left out, and so are those after the first 64 MB: the process
        that writes the shard reads them.
        """
        rows = split_images(job.recipe, self._count)[0].tolist()
        self._reader.prefetch(row for row in rows if not self._reader.is_ahead(row))
        contents: dict[int, bytes] = {}
        for place, row in enumerate(rows):
            if sum(map(len, contents.values())) > AHEAD_BYTES:
                break
            with suppress(ColabUtilsError):
                contents[place] = self._reader.take(row)
        self.close()
        return job._replace(contents=contents, streams=self._streams)

    def close(self) -> None:
        """Give up all files that were not taken."""
        self._reader.close()
