"""The clocks: what batches and calls cost, in wall time and in CPU time; and each stage of loading,
timed alone.
"""

import copy
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, is_dataclass
from functools import partial
from itertools import repeat
from time import perf_counter, process_time, thread_time
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from colab_utils.data.masks import unpack_masks
from colab_utils.errors import ColabUtilsError, describe_error
from colab_utils.loading.dataset import CocoFolder, ShardDataset
from colab_utils.loading.loader import Loader
from colab_utils.runtime import list_processes, quiet_fork

_ROUNDS = 3  # of a batch from each worker
_IMAGES = 64  # that are timed at most
_HANDED_BATCHES = 40
_TIMEOUT_S = 60.0  # for all stages of a sample, and three times what they should take
# attributes of torchvision's datasets
_TRANSFORMS = ("transforms", "transform", "target_transform")


@dataclass(frozen=True)
class BatchTimes:
    """What `time_batches` measured."""

    wait_s: tuple[float, ...]
    """Seconds of waiting for each batch."""
    step_s: tuple[float, ...]
    """Seconds of its step."""
    images: int
    """In all batches."""
    cpu_s: float
    """CPU seconds of this process and its children."""
    step_cpu_s: float
    """CPU seconds of this process in steps: of all threads, as a GPU's backward pass is launched by
    another one.
    """

    @property
    def batch_s(self) -> NDArray[np.float64]:
        """Wait + step, seconds, float64 [batches]."""
        return np.maximum(np.add(self.wait_s, self.step_s), 1e-9)

    @property
    def images_per_second(self) -> float:
        """Images divided by the time of waiting and stepping."""
        return self.images / float(self.batch_s.sum())

    @property
    def wait_share(self) -> float:
        """Stall share: wait / (wait + step), 0 to 1."""
        return sum(self.wait_s) / float(self.batch_s.sum())

    @property
    def cpu_ms_per_image(self) -> float:
        """CPU milliseconds that loading an image took, over all processes, without the steps."""
        return max(0.0, self.cpu_s - self.step_cpu_s) / self.images * 1000

    @property
    def error(self) -> float:
        """Standard error of the mean of wait + step, as a share of it."""
        return find_error(self.batch_s)

    def find_load_ms(self, workers: int) -> float:
        """Milliseconds that a worker takes for an image where it is waited for; without workers it
        rests in a step.
        """
        at_work_s = sum(self.wait_s) + (sum(self.step_s) if workers else 0.0)
        return 1000 * max(1, workers) * at_work_s / self.images


def find_error(seconds: NDArray[np.float64]) -> float:
    """Standard error of the mean, as a share of it."""
    return float(seconds.std() / np.sqrt(len(seconds)) / max(seconds.mean(), 1e-9))


def time_batches(
    loader: Iterable[Any],
    step: Callable[..., Any] | None = None,
    *,
    batches: int,
    warmup: int = 2,
    warmup_s: float = np.inf,
    max_s: float = 60,
    least: int = 1,
    on_batch: Callable[[int, Any], None] | None = None,
) -> BatchTimes:
    """Time ``batches`` batches of any loader: how long each was waited for, and how long its step
    took.

    A loader that ends earlier is iterated again. Where this process uses CUDA, it is synchronised
    around each step. Slow workers deliver in rounds, a batch from each: whole rounds are timed.

    Args:
        loader: anything iterable over batches.
        step: called as ``step(images, targets)`` where a batch is such a pair, else as
            ``step(batch)``.
        batches: how many to time at most.
        warmup: batches that come first, untimed: at least a round.
        warmup_s: fewer after so many seconds, and after ``max_s``.
        max_s: when to stop, seconds: after three rounds and ``least`` batches; after three times
            ``max_s``, counted from the first timed batch, with the rounds there are.
        least: so many batches even after ``max_s``.
        on_batch: called with number (from 0) and batch after each timed batch, while the clocks
            stand.

    Raises:
        ColabUtilsError: the loader yields nothing, too little, or raises, or the step does; the
            message says at which batch.

    Example:
        >>> from colab_utils.loading.emulated_step import EmulatedStep
        >>> times = time_batches([("images", "targets")], EmulatedStep(2), batches=3)
        >>> len(times.wait_s), times.wait_share < 0.5
        (3, True)
    """
    waits, steps, images, step_cpu_s = list[float](), list[float](), 0, 0.0
    lanes = max(1, count_workers(loader))
    untimed = max(warmup, lanes) if warmup else 0
    cpu_began_s = measure_tree_cpu()
    with closing(fetch_batches(loader)) as source:
        began_s = timed_s = asked_s = perf_counter()
        for seen, batch in enumerate(source, start=1):
            _synchronize()  # what the loader queued on the device belongs to the wait
            got_s, got_cpu_s = perf_counter(), process_time()
            try:
                if step is not None:
                    step(*batch) if _is_pair(batch) else step(batch)
                    _synchronize()
            except Exception as error:
                found = f"expected a step that takes batch {seen}, found {describe_error(error)}"
                raise ColabUtilsError(
                    f"{found}. Try it alone: step(*next(iter(loader)))"
                ) from error
            ended_s, ended_cpu_s = perf_counter(), process_time()
            if seen <= untimed:
                if ended_s - began_s > min(warmup_s, max_s) and seen % lanes == 0:
                    untimed = seen
                if seen == untimed:
                    cpu_began_s, timed_s = measure_tree_cpu(), ended_s
            else:
                waits.append(got_s - asked_s)
                steps.append(ended_s - got_s)
                step_cpu_s += ended_cpu_s - got_cpu_s
                images += count_images(batch)
                if on_batch is not None:
                    on_batch(len(waits) - 1, batch)
                enough = len(waits) >= max(least, _ROUNDS * lanes) and ended_s - began_s > max_s
                late = ended_s - timed_s > _ROUNDS * max_s
                if len(waits) >= batches or (len(waits) % lanes == 0 and (enough or late)):
                    break
            asked_s = perf_counter()
        cpu_s = measure_tree_cpu() - cpu_began_s  # before the workers end
    if not waits:
        found = (
            f"expected more than {warmup} batches (the warm-up), found fewer and no second epoch"
        )
        raise ColabUtilsError(f"{found}: pass a loader that can be iterated again, or warmup=0")
    return BatchTimes(tuple(waits), tuple(steps), max(images, 1), cpu_s, step_cpu_s)


def _synchronize() -> None:
    # the first step may begin to use it
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Stage:
    """What one stage of loading, or of training, takes **per image**, milliseconds."""

    name: str
    median_ms: float
    """Wall time: half of the calls take no longer."""
    p95_ms: float
    """Wall time: 95 % of the calls take no longer."""
    cpu_ms: float
    """Mean CPU time."""
    mean_ms: float = 0.0
    """Mean wall time: what decides how many images a second come through."""

    @classmethod
    def from_calls(
        cls, name: str, wall_ms: Sequence[float] | NDArray[np.float64], cpu_ms: float
    ) -> "Stage":
        """From the wall time of each call, milliseconds [calls]."""
        median, p95 = np.percentile(wall_ms, (50, 95)).tolist()
        return cls(name, median, p95, cpu_ms, float(np.mean(wall_ms)))

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.median_ms:.1f} ms an image (p95 {self.p95_ms:.1f} ms, CPU "
            f"{self.cpu_ms:.1f} ms)"
        )


def time_calls(
    name: str,
    call: Callable[[Any], Any],
    arguments: Iterable[Any],
    *,
    max_s: float,
    images: float = 1,
) -> Stage:
    """Time ``call(argument)`` for each of ``arguments`` (one at least), in this thread, for about
    ``max_s`` seconds.

    A call handles so many ``images``: the stage is per image.
    """
    wall_ms = []
    began_s, cpu_began_s = perf_counter(), thread_time()
    for argument in arguments:
        call_began_s = perf_counter()
        try:
            call(argument)
        except StopIteration:  # of a stream that is over
            break
        ended_s = perf_counter()
        wall_ms.append((ended_s - call_began_s) * 1000 / images)
        if ended_s - began_s > max_s:
            break
    return Stage.from_calls(
        name, wall_ms, (thread_time() - cpu_began_s) / len(wall_ms) / images * 1000
    )


def count_workers(loader: Any) -> int:
    """Workers of a `Loader` or a ``DataLoader``; 0 where a loader does not say.

    Example:
        >>> count_workers([1, 2])
        0
    """
    pipeline = getattr(loader, "pipeline", None)
    if isinstance(pipeline, list) and pipeline:  # webdataset's WebLoader, around a DataLoader
        return count_workers(pipeline[0])
    workers: int = getattr(loader, "workers", getattr(loader, "num_workers", 0))
    return workers


def fetch_batches(loader: Iterable[Any]) -> Generator[Any, None, None]:
    """The batches of one epoch after the other; an error in the loader becomes one line that says
    where.
    """
    number, batches = 0, None
    while True:
        before = number
        try:
            with quiet_fork():
                batches = iter(loader)
            for batch in batches:
                number += 1
                yield batch
        except Exception as error:
            if not getattr(loader, "persistent_workers", False):
                getattr(batches, "_shutdown_workers", int)()  # the traceback would keep them alive
            cure = "" if isinstance(error, ColabUtilsError) else ": correct the dataset"
            found = f"found {describe_error(error)}{cure}".replace("found expected a batch, ", "")
            raise ColabUtilsError(
                f"expected batch {number + 1} from the loader, {found}"
            ) from error
        if number == 0:
            raise ColabUtilsError(
                "expected batches from the loader, found none: lower the batch size"
            )
        if number == before:
            return  # an iterator: it cannot start again


def _is_pair(batch: Any) -> bool:
    """Whether a batch is ``(images, targets)``; a list of two dicts is two samples."""
    return type(batch) in (tuple, list) and len(batch) == 2 and not isinstance(batch[0], Mapping)


def count_images(batch: Any) -> int:
    """Images in a batch: of columns such as ``(images, targets, ...)`` or a dict, of a list of
    samples, of a tensor.
    """
    columns = (
        batch
        if isinstance(batch, tuple | list)
        else batch.values()
        if isinstance(batch, Mapping)
        else [batch]
    )
    first = batch[0] if isinstance(batch, list) and batch and not _is_pair(batch) else None
    if isinstance(first, Mapping | tuple | str) or getattr(first, "ndim", 0) == 3:
        return len(batch)
    for column in columns:
        if hasattr(column, "__len__") and getattr(column, "ndim", 1) > 0:
            return len(column)
    return 1


def measure_tree_cpu() -> float:
    """CPU seconds that this process and all its children have used so far, ended children
    included.
    """
    total_s = 0.0
    for process in list_processes():
        with suppress(psutil.Error):  # it ended a moment ago: its parent counts it now
            # user and system, its own and of its ended children
            total_s += sum(process.cpu_times()[:4])
    return total_s


class LoadingStages(NamedTuple):
    """What `time_stages` found; all of it is empty where a loader does not let itself be taken
    apart.
    """

    stages: dict[str, Stage]
    """By name: of an image's way to a sample, then of a whole batch."""
    indices: list[int]
    """Of the images that were timed."""
    unseen: str
    """Why samples could not be timed."""


def time_stages(loader: Any, batch: Any, *, images: int, seconds: float) -> LoadingStages:
    """Take a loader apart, in about ``seconds``; ``batch`` is one of its own, of so many
    ``images``.

    Samples are loaded in a worker of its own: a file that a dataset opens, or a thread that it
    starts, would else be inherited by all later workers.
    """
    dataset: Any = getattr(loader, "dataset", None)
    stages, unseen, indices = dict[str, Stage](), "", list[int]()
    has_samples = (
        isinstance(dataset, CocoFolder | ShardDataset)
        or getattr(loader, "batch_sampler", None) is not None
    )
    streams = isinstance(dataset, IterableDataset) and isinstance(loader, DataLoader)
    if streams or (
        has_samples and hasattr(dataset, "__len__") and not isinstance(dataset, IterableDataset)
    ):
        indices = (
            [] if streams else np.random.default_rng(0).permutation(len(dataset))[:_IMAGES].tolist()
        )
        dense, collate = not isinstance(loader, Loader), getattr(loader, "collate_fn", None)
        # an item of a stream may be a batch
        count = 1 if streams and loader.batch_size is not None else images
        in_worker = partial(
            _time_in_worker, indices, images=count, dense=dense, collate=collate, seconds=seconds
        )
        names = ("worker_init_fn", "multiprocessing_context")
        settings: dict[str, Any] = {name: getattr(loader, name, None) for name in names}
        settings |= {
            "batch_sampler": None if streams else [indices[-1:]],
            "timeout": _TIMEOUT_S + 3 * seconds,
        }
        worker = DataLoader(dataset, collate_fn=in_worker, num_workers=1, **settings)
        try:
            with closing(fetch_batches(worker)) as batches:
                stages = next(batches)
        except ColabUtilsError as error:  # whatever somebody's own dataset does
            indices, unseen = [], str(error).partition("found ")[2]
    tensors = find_tensors(batch)
    if (
        isinstance(loader, DataLoader)
        and loader.num_workers
        and {one.device.type for one in tensors} == {"cpu"}
    ):
        stages["hand-off"] = time_handoff(batch, images=images, seconds=0.2 * seconds)
    return LoadingStages(stages, indices, unseen)


def _time_in_worker(
    indices: list[int],
    _: Any,
    *,
    images: int,
    dense: bool,
    collate: Callable[[Any], Any] | None,
    seconds: float,
) -> dict[str, Stage]:
    """A ``collate_fn`` that times the stages of the dataset as the worker has it that calls
    this.
    """
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    if isinstance(dataset, IterableDataset):
        return {
            "sample": time_calls(
                "sample", next, repeat(iter(dataset)), max_s=seconds / 2, images=images
            )
        }
    if isinstance(dataset, CocoFolder | ShardDataset):
        stages = time_dataset_stages(dataset, indices, dense=dense, seconds=seconds / 2)
    else:
        stages = time_samples(dataset, indices, seconds=seconds / 2)
    if collate and len(indices) >= images:
        samples = [dataset[index] for index in indices[:images]]
        stages["collate"] = time_calls(
            "collate", collate, repeat(samples, 50), max_s=seconds / 8, images=images
        )
    return stages


def time_dataset_stages(
    dataset: Any, indices: Sequence[int], *, dense: bool, seconds: float
) -> dict[str, Stage]:
    """Time each stage of loading an image alone, in about ``seconds``: ``read``, ``decode`` and
    ``masks``.

    Takes a `ShardDataset` or a `CocoFolder`. ``dense`` says whether samples hold dense masks.
    """
    blobs: list[bytes] = []

    def load_masks(index: int) -> None:
        masks = dataset.read_masks(index)
        if dense and isinstance(dataset, ShardDataset):
            unpack_masks(masks, *dataset.sizes[index].tolist())

    # no warm-up: it would put the first file into memory
    read = time_calls(
        "read", lambda index: blobs.append(dataset.read(index)), indices, max_s=seconds / 2
    )
    dataset.decode(blobs[0])
    load_masks(indices[0])
    decode = time_calls("decode", dataset.decode, blobs, max_s=seconds / 4)
    masks = time_calls("masks", load_masks, indices[: len(blobs)], max_s=seconds / 4)
    return {stage.name: stage for stage in (read, decode, masks)}


def time_samples(dataset: Any, indices: Sequence[int], *, seconds: float) -> dict[str, Stage]:
    """Time anybody's map-style dataset: ``sample``, and ``transform`` where it has torchvision's
    attributes for it.

    The second is the difference to a shallow copy of the dataset without transforms.
    """
    whole = time_calls("sample", dataset.__getitem__, indices, max_s=seconds / 2)
    if has := [name for name in _TRANSFORMS if callable(getattr(dataset, name, None))]:
        with suppress(Exception):  # it may not do without its transforms
            bare = copy.copy(dataset)
            vars(bare).update(dict.fromkeys(has))
            without = time_calls("sample", bare.__getitem__, indices, max_s=seconds / 2)
            wall_ms, cpu_ms = (
                max(whole.mean_ms - without.mean_ms, 0.0),
                max(whole.cpu_ms - without.cpu_ms, 0.0),
            )
            return {
                "sample": without,
                "transform": Stage.from_calls("transform", [wall_ms], cpu_ms),
            }
    return {"sample": whole}


def time_handoff(batch: Any, *, images: int, seconds: float) -> Stage:
    """A batch that lies ready, through one worker and torch's own queue.

    It is copied each time, as shared memory that was handed over once is not handed over anew; the
    copy is taken off.
    """
    copying = time_calls("copy", copy.deepcopy, repeat(batch, 8), max_s=seconds / 4, images=images)
    batches: Any = [batch] * 1000
    through = DataLoader(batches, batch_size=None, num_workers=1, collate_fn=copy.deepcopy)
    times = time_batches(through, batches=_HANDED_BATCHES, max_s=seconds)
    wall_ms = np.array(times.wait_s) * 1000 / images - copying.mean_ms
    cpu_ms = times.cpu_s * 1000 / len(wall_ms) / images - copying.cpu_ms
    return Stage.from_calls("hand-off", np.maximum(wall_ms, 0.0), max(cpu_ms, 0.0))


def find_tensors(batch: Any) -> list[Tensor]:
    """Every tensor in lists, tuples, dicts and dataclasses.

    Example:
        >>> [tensor.nbytes for tensor in find_tensors(({"image": torch.zeros(2)}, [torch.zeros(3)], 4))]
        [8, 12]
    """
    if isinstance(batch, Tensor):
        return [batch]
    columns = vars(batch) if is_dataclass(batch) else batch
    values = (
        columns.values()
        if isinstance(columns, Mapping)
        else columns
        if isinstance(columns, list | tuple)
        else ()
    )
    return [tensor for value in values for tensor in find_tensors(value)]
