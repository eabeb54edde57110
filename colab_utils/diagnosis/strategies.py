"""The strategies: ways of loading that people are told to use, and ours, each with a name and what it reads."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Any

from colab_utils.diagnosis.stores import InMemory, MappedArrays, PillowFolder, SavedTensors
from colab_utils.diagnosis.ways import (
    EpochLoader,
    Setting,
    TunedLoading,
    WorkerLoading,
    load_by_process,
    load_by_thread,
    load_in_loop,
)
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader

__all__ = ["DEFAULT_STRATEGIES", "STRATEGIES", "Strategy", "find_strategy"]


@dataclass(frozen=True)
class Strategy:
    """One way of loading.

    ``form`` names what it reads (see `Forms`; its bytes are what it needs on disk); ``keeps`` says that it keeps what
    it read, so that only later epochs show its speed; ``open`` gives an iterable of batches ``(images, targets)`` as
    torchvision models take them on the device, an epoch at each pass, with a ``close()`` that ends whatever it started.
    """

    name: str
    idea: str
    form: str
    open: Callable[[Setting], Any]
    keeps: bool = False

    @property
    def on_drive(self) -> bool:
        """Whether it reads from Drive while it trains."""
        return self.form.endswith("_on_drive")


class _Arriving:
    """`make_loader` over shards that are copied meanwhile, to a folder that is empty at the start."""

    def __init__(self, setting: Setting) -> None:
        forms = setting.forms
        self._folder = Path(tempfile.mkdtemp(dir=_make(forms.ssd)))
        shards = forms.get("shards_on_drive").path
        self._dataset = ArrivingShards(shards, self._folder / "shards", profile=setting.profile)
        self._loader = make_loader(
            self._dataset, batch_size=setting.batch_size, workers=setting.workers, device=setting.device
        )

    def __iter__(self) -> Iterator[Any]:
        return iter(self._loader)

    def close(self) -> None:
        self._loader.close()
        self._dataset.stop()
        shutil.rmtree(self._folder, ignore_errors=True)


def _make(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _open_files(setting: Setting, form: str) -> PillowFolder:
    profile = setting.profile if form.endswith("_on_drive") else None
    return PillowFolder(setting.forms.get(form).path, setting.forms.annotations, profile=profile)


def _open_tensors(setting: Setting, form: str) -> SavedTensors:
    profile = setting.profile if form.endswith("_on_drive") else None
    return SavedTensors(setting.forms.get(form).path, profile, setting.forms.coco.sizes)


def _open_shards(setting: Setting, form: str) -> ShardDataset:
    on_drive = form.endswith("_on_drive")
    profile = setting.profile if on_drive else None
    return ShardDataset(setting.forms.get(form).path, profile=profile, whole_shards=on_drive)


def _use_workers(open_dataset: Callable[[Setting, str], Any], form: str, workers: int | None = None) -> Any:
    def open_loader(setting: Setting) -> EpochLoader:
        count = setting.workers if workers is None else workers
        setting = replace(setting, workers=count)
        return EpochLoader(setting, open_dataset(setting, form), WorkerLoading(count))

    return open_loader


def _use(load: Callable[[Any, Any], Iterator[Any]], form: str) -> Any:
    return lambda setting: EpochLoader(replace(setting, workers=0), _open_files(setting, form), load)


def _open_packed(setting: Setting) -> Any:
    dataset = ShardDataset(setting.forms.get("shards_on_ssd").path)
    return make_loader(dataset, batch_size=setting.batch_size, workers=setting.workers, device=setting.device)


def _list_both(
    name: str, idea: str, kind: str, make: Callable[[str], Any], *, keeps: bool = False
) -> Iterator[Strategy]:
    """A strategy over loose files on Drive, and the same over files on the SSD."""
    for ending, place, disk in (("", "Drive", "drive"), ("_on_ssd", "the local disk", "ssd")):
        form = f"{kind}_on_{disk}"
        yield Strategy(f"{name}{ending}", f"{idea} from {place}.", form, make(form), keeps)


def _list_strategies() -> Iterator[Strategy]:
    yield from _list_both("sequential", "Each image is loaded inside the training loop,", "files",
                          lambda form: _use(load_in_loop, form))  # fmt: skip
    yield from _list_both("thread_queue", "A thread loads ahead into a queue of 4 batches,", "files",
                          lambda form: _use(load_by_thread, form))  # fmt: skip
    yield from _list_both("process_queue", "A process loads ahead into a queue of 4 batches,", "files",
                          lambda form: _use(load_by_process, form))  # fmt: skip
    yield from _list_both("dataloader", "A DataLoader's workers load ahead, as in torchvision's references,", "files",
                          lambda form: _use_workers(_open_files, form))  # fmt: skip
    for count in range(5):
        yield Strategy(f"dataloader_{count}", f"The same with {count} workers.", "files_on_drive",
                       _use_workers(_open_files, "files_on_drive", count))  # fmt: skip
    yield from _list_both("saved_tensors", "Resized and converted once, a .pt an image, by a DataLoader", "tensors",
                          lambda form: _use_workers(_open_tensors, form))  # fmt: skip
    yield Strategy(
        "memory_mapped", "One .npy of all images and one of all masks, mapped into memory.", "arrays_on_ssd",
        lambda setting: EpochLoader(
            replace(setting, workers=0), MappedArrays(setting.forms.get("arrays_on_ssd").path), load_in_loop
        ),
    )  # fmt: skip
    yield Strategy(
        "in_memory", "Every sample is read from Drive into memory at the start.", "files_on_drive",
        lambda setting: EpochLoader(
            replace(setting, workers=0),
            InMemory(_open_files(setting, "files_on_drive"), total=setting.forms.total),
            load_in_loop,
        ),
        keeps=True,
    )  # fmt: skip
    yield from _list_both("autotuned", "Cache, shuffle, batch and prefetch, sizes chosen while it runs,", "files",
                          lambda form: lambda setting: EpochLoader(
                              replace(setting, workers=0), _open_files(setting, form),
                              TunedLoading(len(setting.forms) / setting.forms.total)),
                          keeps=True)  # fmt: skip
    yield Strategy("shards_on_drive", "Files packed into shards, each read whole from Drive by a DataLoader.",
                   "shards_on_drive", _use_workers(_open_shards, "shards_on_drive"))  # fmt: skip
    yield Strategy("shards_on_ssd", "The shards are copied to the local disk first.",
                   "shards_on_ssd", _use_workers(_open_shards, "shards_on_ssd"))  # fmt: skip
    yield Strategy("packed", "From those, workers send packed masks through reused memory (make_loader).",
                   "shards_on_ssd", _open_packed)  # fmt: skip
    yield Strategy("train_while_copying", "make_loader starts with the first shard that is copied (ArrivingShards).",
                   "arriving_shards_on_drive", _Arriving)  # fmt: skip


STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _list_strategies()}
DEFAULT_STRATEGIES = (
    "sequential", "thread_queue", "process_queue", "dataloader", "saved_tensors", "memory_mapped", "in_memory",
    "autotuned", "dataloader_on_ssd", "shards_on_drive", "shards_on_ssd", "packed", "train_while_copying",
)  # fmt: skip
_PEERS = {
    "webdataset": "webdataset", "litdata": "litdata", "mosaicml-streaming": "mosaicml-streaming",
    "tf_data": "tensorflow",
}  # fmt: skip


def find_strategy(name: str) -> Strategy:
    """A strategy by its name; those of other libraries lie in the repository's ``benchmarks``.

    Raises:
        ColabUtilsError: an unknown name. A library that is not installed is an error only when it is run.

    Example:
        >>> find_strategy("teleport")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected strategies among ...; found 'teleport': choose some of them
    """
    if name in STRATEGIES:
        return STRATEGIES[name]
    if name not in _PEERS:
        names = ", ".join((*STRATEGIES, *_PEERS))
        raise ColabUtilsError(f"expected strategies among {names}; found {name!r}: choose some of them")
    try:
        found: Strategy = import_module("benchmarks.peers").PEERS[name]
        return found
    except ImportError as error:
        lacking = f"expected benchmarks/ of the repository and the package {_PEERS[name]}, found no {error.name}"

    def refuse(setting: Setting) -> Any:
        raise ColabUtilsError(f"{lacking}. Clone the repository, run pip install {_PEERS[name]}, and compare there.")

    return Strategy(name, f"The library {name}.", "shards_on_ssd", refuse)
