"""Finish shards whose parts were written one by one, on one machine or on several."""

from time import perf_counter

from colab_utils.errors import ColabUtilsError
from colab_utils.files import open_store
from colab_utils.places import Place, open_place
from colab_utils.processes import ThreadPool
from colab_utils.require import require_max_bad
from colab_utils.shards.copy import COPY_STREAMS
from colab_utils.shards.folder_state import confirm_finished, inspect_folder
from colab_utils.shards.index import ShardIndex
from colab_utils.shards.jobs import find_shard, name_shard
from colab_utils.shards.lock import remove_leftovers
from colab_utils.shards.plan import open_annotations
from colab_utils.shards.write import (
    ShardReport,
    ShardRun,
    check_bad,
    finish_folder,
    make_report,
)

# A message lists at most this many missing shards.
_NAMED = 100


def finish_shards(
    images: str | Place,
    annotations: str | Place,
    *,
    shards: str | Place,
    max_bad: float = 0.01,
) -> ShardReport:
    """Write the index of shards whose parts are all written; see `write_shards`.

    `finish_shards` does not wait for shards that are still being written. You may call it again.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder of the shards.
        max_bad: the share or the number of bad images, and of bad objects, that all parts together
            may have; see `write_shards`.

    Raises:
        ColabUtilsError: if shards are missing (the message lists them), too many images or objects
            are bad, or the folder holds other data.

    Example:
        >>> import tempfile
        >>> from colab_utils.course.sample_data import make_dataset
        >>> from colab_utils.shards.write import write_shards
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     shards = folder + "/shards"
        ...     for part in (2, 2), (1, 2):
        ...         _ = write_shards(made.images, made.annotations, shards=shards, part=part)
        ...     print(finish_shards(made.images, made.annotations, shards=shards).images)
        3
    """
    started_s = perf_counter()
    images = open_place(images)
    folder = open_place(shards)
    max_bad = require_max_bad(max_bad)
    dataset = open_annotations(images, annotations)
    state = inspect_folder(folder)
    if state.index is None:
        raise ColabUtilsError(f"There are no shards in {folder}. Write their parts first.")
    state.require(dataset, {})
    index = confirm_finished(state, images, dataset)
    if index is None:
        run = ShardRun(folder, images, dataset, state.recipe)
        done = _find_all(run)
        check_bad(dataset, done, max_bad)
        index = finish_folder(run, done)
        remove_leftovers(open_store(folder))
    return make_report(index, dataset, started_s)


def _find_all(run: ShardRun) -> list[ShardIndex]:
    """Return an index of each shard.

    Raises:
        ColabUtilsError: if shards are missing, or have another recipe than the first one.
    """
    store = open_store(run.folder)

    def find(number: int) -> ShardIndex | None:
        name = name_shard(run.folder, number).name
        return find_shard(store, name, run.dataset.fingerprint, run.recipe)

    with ThreadPool(COPY_STREAMS) as pool:
        indexes = list(pool.map(find, range(len(run.list_shards()))))
    missing = [str(number) for number, index in enumerate(indexes) if index is None]
    if missing:
        raise ColabUtilsError(
            f"{len(missing):,} of {len(indexes):,} shards are missing in {run.folder}, or were "
            f"made with other settings: number {', '.join(missing[:_NAMED])}. Write their parts, "
            "or all parts, again: finished shards are left as they are. Then finish again."
        )
    return [index for index in indexes if index is not None]
