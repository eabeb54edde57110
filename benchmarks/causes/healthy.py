"""Loops of different shapes that wait for nothing: a diagnosis must leave them alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from time import sleep
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader
from benchmarks.causes.machine import make_copy_on_access
from benchmarks.causes.reading import Files, Stored, make_cut_file
from benchmarks.causes.stepping import make_accumulation, make_sampler, make_two_loaders
from benchmarks.causes.working import Asking, Batched, Locked, Threaded
from colab_utils.course.sample_data import make_dataset
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.loading.loader import make_loader
from colab_utils.machine import count_cores
from colab_utils.shards.write import write_shards

__all__ = ["HEALTHY"]

STEP_MS = 50


def make_in_memory(folder: Path) -> Loop:
    """Tiny tensors in memory, no workers."""
    return (
        DataLoader(TensorDataset(torch.rand(2000, 3, 32, 32), torch.zeros(2000)), 4),
        Step(),
        None,
    )


def make_two_workers(folder: Path) -> Loop:
    """Files, two workers."""
    return make_plain_loader(Photos(folder)), Step(STEP_MS), None


class NamedPhotos(Photos):
    """Each sample is a dict."""

    def __getitem__(self, index: int) -> Any:
        image, label = super().__getitem__(index)
        return {"image": image, "label": label}


def make_dict_batches(folder: Path) -> Loop:
    """Batches are dicts."""
    step = Step(STEP_MS)
    return make_plain_loader(NamedPhotos(folder)), lambda batch: step(batch["image"]), None


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """Whole batches, one after the other."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(500):
            yield torch.rand(4, 3, 32, 32), torch.full((4,), number)


def make_iterable(folder: Path) -> Loop:
    """An iterable dataset gives whole batches, ``batch_size=None``."""
    return DataLoader(Stream(), batch_size=None, num_workers=1), Step(STEP_MS), None


def make_persistent(folder: Path) -> Loop:
    """Short epochs, and workers that persist."""
    return (
        make_plain_loader(Photos(folder), batches=20, persistent_workers=True),
        Step(STEP_MS),
        None,
    )


def make_packed(folder: Path) -> Loop:
    """Shards, packed masks, and an emulated step."""
    made = make_dataset(folder / "made", n=24, width=320, height=240, workers=1)
    write_shards(made.images, made.annotations, shards=folder / "shards", workers=1)
    loader = make_loader(ShardDataset(folder / "shards"), batch_size=4, workers=1, deliver="packed")
    return loader, EmulatedStep(100), None


def make_slow_first(folder: Path) -> Loop:
    """The first batch takes a second longer, all others come in time."""
    return (
        make_plain_loader(Photos(folder), worker_init_fn=lambda worker: sleep(1)),
        Step(STEP_MS),
        None,
    )


def make_light_log(folder: Path) -> Loop:
    """One millisecond of logging after each step."""
    return make_plain_loader(Photos(folder)), Step(STEP_MS), lambda number: burn(1)


def make_variable_steps(folder: Path) -> Loop:
    """Steps of 20 to 110 ms."""
    step = Step()
    lengths = cycle((20, 80, 40, 110, 60))

    def train(images: Tensor, targets: Tensor) -> None:
        step.step_ms = next(lengths)
        step(images)

    return make_plain_loader(Photos(folder)), train, None


def make_quick_lock(folder: Path) -> Loop:
    """One lock for all workers, which each holds for a millisecond."""
    dataset = Locked(folder)
    dataset.held_ms = 1
    return make_plain_loader(dataset), Step(STEP_MS), None


def make_quick_sampler(folder: Path) -> Loop:
    """A sampler that takes a millisecond for an epoch."""
    loader, _, _ = make_sampler(folder, cpu_ms=1)
    return loader, Step(STEP_MS), None


def make_quiet_accumulation(folder: Path) -> Loop:
    """Gradients of eight batches, and a millisecond of logging after each."""
    return make_accumulation(folder, step_ms=STEP_MS, log_ms=1)


def make_quick_files(folder: Path) -> Loop:
    """Each worker opens eight files, each in a moment."""
    dataset = Files(folder)
    dataset.open_s = 0.01
    return make_plain_loader(dataset), Step(STEP_MS), None


def make_quick_threads(folder: Path) -> Loop:
    """A thread of the worker that has little to do."""
    return make_plain_loader(Photos(folder, transforms=Threaded(1)), workers=1), Step(STEP_MS), None


def make_quick_process(folder: Path) -> Loop:
    """Another program that answers at once."""
    dataset = Asking(folder)
    dataset.answer_s = 0.001
    return make_plain_loader(dataset), Step(2 * STEP_MS), None


def make_quick_batched(folder: Path) -> Loop:
    """A dataset that gives whole batches at once."""
    dataset = Batched(folder)
    dataset.cpu_ms = 1
    return make_plain_loader(dataset), Step(STEP_MS), None


def make_short_list(folder: Path) -> Loop:
    """A list of Python objects that is soon copied."""
    loader, _, _ = make_copy_on_access(folder, names=12_000)
    return loader, Step(STEP_MS), None


def make_quick_loaders(folder: Path) -> Loop:
    """Two loaders in one loop, both in time."""
    return make_two_loaders(folder, cpu_ms=0)


def make_whole_file(folder: Path) -> Loop:
    """A mapped file that stays as it is."""
    loader, _, _ = make_cut_file(folder, cut_at=None)
    return loader, Step(STEP_MS), None


def make_quick_database(folder: Path) -> Loop:
    """A database that is locked for a moment."""
    dataset = Stored(folder)
    dataset.held_ms = 1
    return make_plain_loader(dataset), Step(2 * STEP_MS), None


class Cached(Photos):
    """Keeps what it loaded: a cache that fits."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.cache: dict[int, Any] = {}

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index not in self.cache:
            self.cache[index] = super().__getitem__(index)
        return self.cache[index]


def make_cache(folder: Path) -> Loop:
    """A cache in memory that fills in the first moments."""
    return make_plain_loader(Cached(folder)), Step(STEP_MS), None


def make_many_workers(folder: Path) -> Loop:
    """Four workers for each core, which have little to do."""
    return make_plain_loader(Photos(folder), workers=4 * count_cores()), Step(2 * STEP_MS), None


class Uneven(Photos):
    """Every tenth sample takes twenty times as long as the others."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        sleep(0.02 if index % 10 == 0 else 0.001)
        return super().__getitem__(index)


def make_uneven_samples(folder: Path) -> Loop:
    """Samples of 1 and of 20 ms."""
    return make_plain_loader(Uneven(folder)), Step(2 * STEP_MS), None


def make_spawned(folder: Path) -> Loop:
    """Workers that are not forked: they import torch anew when they start."""
    loader = make_plain_loader(Photos(folder), workers=1, multiprocessing_context="spawn")
    return loader, Step(STEP_MS), None


def collate_lists(samples: list[Any]) -> tuple[Any, ...]:
    """Put samples side by side, as torchvision's references do."""
    return tuple(zip(*samples, strict=True))


def make_lists(folder: Path) -> Loop:
    """Batches are tuples of single images, and of their labels."""
    return make_plain_loader(Photos(folder), collate_fn=collate_lists), Step(STEP_MS), None


HEALTHY: dict[str, Callable[[Path], Loop]] = {
    "in_memory": make_in_memory,
    "two_workers": make_two_workers,
    "dict_batches": make_dict_batches,
    "iterable": make_iterable,
    "persistent": make_persistent,
    "packed": make_packed,
    "slow_first": make_slow_first,
    "light_log": make_light_log,
    "variable_steps": make_variable_steps,
    "quick_lock": make_quick_lock,
    "quick_sampler": make_quick_sampler,
    "quiet_accumulation": make_quiet_accumulation,
    "quick_files": make_quick_files,
    "quick_threads": make_quick_threads,
    "quick_process": make_quick_process,
    "many_workers": make_many_workers,
    "uneven_samples": make_uneven_samples,
    "spawned": make_spawned,
    "lists": make_lists,
    "quick_batched": make_quick_batched,
    "short_list": make_short_list,
    "quick_loaders": make_quick_loaders,
    "whole_file": make_whole_file,
    "quick_database": make_quick_database,
    "cache": make_cache,
}
"""The loops by name."""
