"""Write shards on several machines: plan them, write each on any machine, then finish."""

from functools import partial
from time import perf_counter, time_ns
from typing import Any, Literal

import colab_utils
from colab_utils.data.orientation import Exif
from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.places import Place, open_place, write_place
from colab_utils.processes import ThreadPool
from colab_utils.require import require_max_bad
from colab_utils.shards.copy import COPY_STREAMS
from colab_utils.shards.index import ShardIndex, read_index
from colab_utils.shards.job_plan import JobPlan, make_plan, read_plan, save_plan
from colab_utils.shards.jobs import find_shard, name_shard, write_shard
from colab_utils.shards.lock import remove_leftovers
from colab_utils.shards.plan import (
    Annotations,
    count_processes,
    make_recipe,
    open_annotations,
    stamp_annotations,
)
from colab_utils.shards.running import run_here
from colab_utils.shards.source import ShardSource
from colab_utils.shards.stored_images import Storage
from colab_utils.shards.write import (
    ShardReport,
    begin_folder,
    check_bad,
    find_finished,
    find_known,
    finish_folder,
    join_index,
    make_report,
    write_all,
)
from colab_utils.streams import require_streams

# A message lists at most this many missing shards.
_NAMED = 100


def plan_jobs(
    images: str | Place,
    annotations: Annotations,
    *,
    shards: str | Place,
    shard_mb: float = 128,
    min_size: int = 800,
    max_size: int = 1333,
    storage: Storage = "shrink",
    exif: Exif = "auto",
) -> JobPlan:
    """Plan the shards that `write_shards` would write, so that several machines can write them.

    Every machine must see the folders at the same paths, or at the same URLs that fsspec knows. A
    job is a small tuple of two short texts and a number. Send it to any machine, and call
    `write_shard` there. A job that was killed can be run again. A job that is run twice does no
    harm. When all jobs are done, `finish` writes the index. Until then, the plan lies in the folder
    of the shards, where a second call of `plan_jobs` finds it.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        shards: the folder to write to. It is made if it does not exist.
        shard_mb: target size of a shard, in MB.
        min_size: the shorter side that training needs, in pixels.
        max_size: the longer side that training needs, in pixels.
        storage: how images are stored; see `write_shards`.
        exif: how photos are used that EXIF turns; see `write_shards`.

    Returns:
        The plan. Its ``jobs`` has one job for each shard, or none if the folder is finished.

    Raises:
        ColabUtilsError: if the input is missing or not COCO, the disk is too small, or the folder
            holds other data or cannot be written to.

    Example:
        >>> import tempfile
        >>> from colab_utils.sample_data import make_dataset
        >>> from colab_utils.shards import finish, plan_jobs, write_shard
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     made = make_dataset(folder + "/data", n=3, width=64, height=64, workers=1)
        ...     plan = plan_jobs(made.images, made.annotations, shards=folder + "/shards")
        ...     for job in plan.jobs:
        ...         _ = write_shard(job)
        ...     print(finish(folder + "/shards").images)
        3
    """
    images = open_place(images)
    folder = open_place(shards)
    recipe = make_recipe(storage, exif, min_size=min_size, max_size=max_size, shard_mb=shard_mb)
    patience = Retries()
    plan = patience.write(folder, read_plan, folder)
    # If the plan has another image folder or is of another version, a new one is made. If shards
    # with other settings are there, the calls below raise an error.
    if plan is not None and not _has_settings(plan, images, recipe):
        plan = None
    # Size and time of the JSON say that it is the one of the plan. No file of the dataset is read.
    if plan is not None and plan.source.json == stamp_annotations(annotations):
        return plan
    # The folder is finished, and no file of the dataset was changed since.
    known = patience.write(folder, find_known, folder, images, annotations, recipe)
    if known is not None:
        return _plan_nothing(folder, images, *known)
    dataset = open_annotations(images, annotations)
    # The JSON has another time here than on the machine that planned, and the same content.
    if plan is not None and plan.fingerprint == dataset.fingerprint:
        return plan
    index = patience.write(folder, find_finished, folder, images, dataset, recipe)
    if index is not None:
        return make_plan(folder, images, dataset, index.recipe)
    recipe = patience.write(folder, begin_folder, folder, images, dataset, recipe)
    plan = make_plan(folder, images, dataset, recipe)
    return patience.write(folder, save_plan, plan, dataset)


def write_part(
    images: str | Place,
    annotations: Annotations,
    *,
    part: tuple[int, int],
    workers: int | Literal["auto"] = "auto",
    streams: int | Literal["auto"] = "auto",
    max_bad: float = 0.01,
    **settings: Any,
) -> ShardReport:
    """Write one part of the shards with processes of this machine. If there is no plan, make it.

    Args:
        images: the image folder.
        annotations: COCO instance JSON.
        part: the number of the part, and how many parts there are. The parts are counted from 1.
            Number 0 means the last part, so that you may also count from 0.
        workers: number of processes; "auto" is one for each core.
        streams: number of files that each process reads at the same time; "auto" measures how many
            Drive can serve.
        max_bad: a share of all images of the dataset, from 0 to 1 (``float``), or a number
            (``int``). This part may have so many bad images at most. The same holds for the
            objects.
        **settings: the other arguments of `plan_jobs`.

    Raises:
        ColabUtilsError: as `plan_jobs` and `write_shards`.
    """
    started_s = perf_counter()
    processes = count_processes(workers)
    max_bad = require_max_bad(max_bad)
    require_streams(streams)
    plan = plan_jobs(images, annotations, **settings)
    if not plan.count:
        return finish(plan.shards)
    number, parts = part
    jobs = plan.jobs[(number - 1) % parts :: parts]
    run = partial(run_here, partial(write_shard, streams=streams), partial(iter, jobs), processes)
    return make_report(join_index(plan, write_all(plan, run, max_bad)), started_s)


def finish(shards: str | Place, *, max_bad: float = 0.01) -> ShardReport:
    """Write the index of shards that several machines have written.

    `finish` does not wait for shards that are still being written. You may call it again.

    Args:
        shards: the folder of the shards.
        max_bad: the share or the number of bad images, and of bad objects, that is allowed.

    Raises:
        ColabUtilsError: if shards are missing (the message lists them), too many images or objects
            are bad, or the folder has no shards.

    Example:
        See `plan_jobs`.
    """
    started_s = perf_counter()
    folder = open_place(shards)
    max_bad = require_max_bad(max_bad)
    patience = Retries()
    plan = patience.write(folder, read_plan, folder)
    if plan is None:
        return make_report(read_index(folder, patience), started_s)
    with ThreadPool(COPY_STREAMS) as pool:
        indexes = list(pool.map(partial(_find, folder, plan), range(plan.count)))
    missing = [str(number) for number, index in enumerate(indexes) if index is None]
    if missing:
        raise ColabUtilsError(
            f"{len(missing):,} of {plan.count:,} shards are missing in {folder}: number "
            f"{', '.join(missing[:_NAMED])}. Run their parts, or all parts, again: finished shards "
            "are left as they are. Then call finish again (preprocess: --finish)."
        )
    done = [index for index in indexes if index is not None]
    check_bad(plan, done, max_bad)
    index = finish_folder(folder, plan, done)
    patience.write(folder, remove_leftovers, folder)
    return make_report(index, started_s, plan.source)


def _has_settings(plan: JobPlan, images: Place, recipe: dict[str, Any]) -> bool:
    """Return whether a plan has this image folder and these settings, and is of this version."""
    return (
        plan.recipe.items() >= recipe.items()
        and plan.image_folder == write_place(images)
        and plan.version == colab_utils.__version__
    )


def _plan_nothing(folder: Place, images: Place, index: ShardIndex, source: ShardSource) -> JobPlan:
    """Return a plan without jobs, for a folder that is finished."""
    return JobPlan(
        shards=write_place(folder),
        image_folder=write_place(images),
        fingerprint=index.fingerprint,
        recipe=index.recipe,
        categories=list(index.categories),
        images=index.images + len(index.skipped),
        version=colab_utils.__version__,
        source=source,
        planned_ns=time_ns(),
    )


def _find(folder: Place, plan: JobPlan, number: int) -> ShardIndex | None:
    path = name_shard(folder, number)
    return Retries().run(partial(find_shard, path, plan.fingerprint, plan.recipe, plan.files))
