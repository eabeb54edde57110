"""The plan of shards that several machines write.

``plan.json`` holds what all shards have in common. The folder ``plan-KEY`` beside it holds the
annotations of each shard, the arrays of shards in which no image can be used, and the files that
stop a run. When the index is written, the plan and its folder are removed.
"""

import io
import json
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from secrets import token_hex
from threading import Event
from time import monotonic, time_ns
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np

import colab_utils
from colab_utils.data.coco import CocoDataset
from colab_utils.errors import ColabUtilsError
from colab_utils.files import FileStamp, hash_bytes, parse_file, read_file, write_file
from colab_utils.places import Place, UrlPath, open_place, write_place
from colab_utils.shards.plan import split_images
from colab_utils.shards.source import ShardSource, parse_source

PLAN_NAME = "plan.json"

_FILES = re.compile(r"plan-[0-9a-f]{16}")
# The errors that reading a damaged file raises.
_DAMAGE = (AttributeError, KeyError, TypeError, ValueError, RecursionError, BadZipFile)
# Seconds after which a job checks again whether to stop.
_LOOK_S = 1.0


class ShardJob(NamedTuple):
    """One shard to write. It can be sent to any machine that sees the folder."""

    shards: str
    """The folder of the shards."""
    number: int
    run: str
    """Key of the plan, then a text that is new in each run and each try. An engine that caches the
    results of calls therefore never takes a new job for an old one.
    """

    @property
    def stop_file(self) -> Place:
        """Return the file that makes every job of the run give up at its next image."""
        key, _, rest = self.run.partition("-")
        token, _, _ = rest.partition("-")
        return open_place(self.shards) / f"plan-{key}" / f"stop-{token}"


def parse_job(job: Any) -> ShardJob:
    """Return a job. It may come as a list, as from JSON.

    Raises:
        ColabUtilsError: it is not a job.
    """
    if isinstance(job, list | tuple) and [type(value) for value in job[1:]] == [int, str]:
        return ShardJob(*job)
    raise ColabUtilsError(
        f"{job!r:.100} is not a job. Pass one of the jobs of plan_jobs: two texts and a number."
    )


@dataclass(frozen=True)
class JobPlan:
    """The shards to write, planned by `plan_jobs`. ``jobs`` has one job for each shard."""

    shards: str
    """The folder of the shards: a URL, or an absolute path that is the same on every machine."""
    image_folder: str
    """The folder of the images: a URL, or an absolute path that is the same on every machine."""
    fingerprint: str
    """XXH3-128 of the annotations file."""
    recipe: dict[str, Any]
    """How images are stored; see `ShardIndex`."""
    categories: list[dict[str, Any]]
    images: int
    """Images in the whole dataset."""
    version: str
    """Version of the package. All shards are written by the same version."""
    source: ShardSource
    """The files that the shards are made of."""
    planned_ns: int
    """When the plan was made, in nanoseconds since 1970."""
    count: int = 0
    """Number of shards to write; 0 if the folder is finished."""

    @property
    def key(self) -> str:
        """Return a hash that is the same for all plans of the same shards."""
        return hash_bytes(json.dumps(_describe(self), sort_keys=True).encode())

    @property
    def files(self) -> Place:
        """Return the folder of the files that belong to this plan."""
        return open_place(self.shards) / f"plan-{self.key}"

    @property
    def jobs(self) -> list[ShardJob]:
        """Return the jobs of a new run, one for each shard. Any machine may run any job."""
        run = f"{self.key}-{token_hex(4)}"
        return [ShardJob(self.shards, number, run) for number in range(self.count)]


class RunStop(Event):
    """An event that makes jobs give up. It is set when its file is in the folder of the shards.

    Args:
        job: any job of the run.
    """

    def __init__(self, job: ShardJob) -> None:
        super().__init__()
        self._file = job.stop_file
        self._next_look_s = 0.0

    def is_set(self) -> bool:
        """Return whether the run was stopped. The file is looked for once a second at most."""
        if monotonic() >= self._next_look_s:
            self._next_look_s = monotonic() + _LOOK_S
            # Errors of the server are ignored here. The job meets them when it reads or writes.
            with suppress(ColabUtilsError):
                if self._file.exists():
                    self.set()
        return super().is_set()


def make_plan(
    folder: Place, images: Place, dataset: CocoDataset, recipe: dict[str, Any]
) -> JobPlan:
    """Return the plan of a dataset's shards. Nothing is written."""
    return JobPlan(
        shards=write_place(folder),
        image_folder=write_place(images),
        fingerprint=dataset.fingerprint,
        recipe=recipe,
        categories=list(dataset.categories),
        images=len(dataset),
        version=colab_utils.__version__,
        source=describe_source(dataset),
        planned_ns=time_ns(),
    )


def describe_source(dataset: CocoDataset) -> ShardSource:
    """Return facts about the JSON that was read. By these facts it is recognised later."""
    fingerprint = dataset.fingerprint
    return ShardSource(fingerprint, dataset.stamp, len(dataset.ids), dataset.crowds)


def read_plan(folder: Place) -> JobPlan | None:
    """Read the plan of a folder of shards; None if there is none.

    Raises:
        ColabUtilsError: if the plan is damaged.
        DriveLostError: if Drive went away.
    """
    with suppress(FileNotFoundError, NotADirectoryError):
        return _read(folder / PLAN_NAME, partial(_parse_plan, folder))
    return None


def save_plan(plan: JobPlan, dataset: CocoDataset) -> JobPlan:
    """Write a plan and the annotations of each shard; return the plan with the number of shards.

    Several machines may do this at the same time, because they all write the same annotations.
    """
    parts = split_images(plan.recipe, plan.images)
    plan = replace(plan, count=len(parts))
    plan.files.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(map(dataset.select, parts)):
        write_file(_name_part(plan, number), _dump_part(part))
    content = {
        "key": plan.key,
        "plan": _describe(plan),
        "source": asdict(plan.source),
        "planned_ns": plan.planned_ns,
    }
    write_file(open_place(plan.shards) / PLAN_NAME, json.dumps(content, indent=1).encode())
    return plan


def remove_plan(folder: Place) -> None:
    """Remove the plan of a folder, with all its files."""
    (folder / PLAN_NAME).unlink(missing_ok=True)
    for files in folder.glob("plan-*"):
        if not _FILES.fullmatch(files.name):
            continue
        if isinstance(files, UrlPath):
            files.remove_all()
        else:
            shutil.rmtree(files, ignore_errors=True)


def load_part(plan: JobPlan, number: int) -> CocoDataset:
    """Load the annotations of one shard.

    Raises:
        ColabUtilsError: if the annotations are missing or damaged.
        DriveLostError: if Drive went away.
    """
    path = _name_part(plan, number)
    try:
        return _read(path, _parse_part)
    except FileNotFoundError:
        raise _explain_damage(path, "it is missing") from None


def _read(path: Place, parse: Callable[[bytes], Any]) -> Any:
    try:
        return parse_file(path, partial(read_file, path), parse)
    except _DAMAGE as error:
        raise _explain_damage(path, error) from None


def _explain_damage(path: Place, reason: object) -> ColabUtilsError:
    return ColabUtilsError(
        f"The plan of shards cannot be read in {path} ({reason!s:.100}). Delete {PLAN_NAME} in the "
        "folder of the shards and run the same again: finished shards stay."
    )


def _describe(plan: JobPlan) -> dict[str, Any]:
    content = asdict(plan)
    # The key is made without these, as they may differ between two plans of the same shards.
    for name in ("shards", "source", "planned_ns"):
        del content[name]
    return content


def _parse_plan(folder: Place, content: bytes) -> JobPlan:
    raw = json.loads(content)
    plan = JobPlan(
        shards=write_place(folder),
        source=parse_source(raw["source"]),
        planned_ns=raw["planned_ns"],
        **raw["plan"],
    )
    if plan.key != raw["key"]:
        raise ValueError("another checksum")
    return plan


def _name_part(plan: JobPlan, number: int) -> Place:
    return plan.files / f"{number:06d}.npz"


def _dump_part(part: CocoDataset) -> memoryview:
    """Return the content of the file that holds a shard's annotations."""
    tables: dict[str, Any] = {
        name: value for name, value in vars(part).items() if isinstance(value, np.ndarray)
    }
    head = [part.fingerprint, part.stamp, part.categories, part.names, sorted(part.shared_names)]
    texts = {"head": json.dumps(head).encode(), "texts": part.texts}
    for name, text in texts.items():
        tables[name] = np.frombuffer(text, np.uint8)
    file = io.BytesIO()
    np.savez(file, **tables)
    return file.getbuffer()


def _parse_part(content: bytes) -> CocoDataset:
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        tables = dict(file)
    texts = {name: tables.pop(name).tobytes() for name in ("head", "texts")}
    fingerprint, stamp, categories, names, shared_names = json.loads(texts.pop("head"))
    return CocoDataset(
        fingerprint=fingerprint,
        stamp=FileStamp(*stamp),
        categories=tuple(categories),
        names=tuple(names),
        shared_names=frozenset(shared_names),
        **texts,
        **tables,
    )
