"""Planted causes in the training process: the sampler, the step, and what follows it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, repeat
from pathlib import Path
from time import sleep

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader

_EVERY = 8


def make_between(folder: Path) -> Loop:
    """The main process logs for 60 ms after each step."""

    def log(number: int) -> None:
        burn(60)
        with (folder / "log.txt").open("a") as file:
            file.write(f"step {number}\n")

    return make_plain_loader(Photos(folder)), Step(), log


def make_periodic(folder: Path) -> Loop:
    """A checkpoint takes a second, every ten steps, in the main process after the step."""
    step = Step()

    def save_checkpoint(number: int) -> None:
        if number % 10 == 9:
            torch.save(step.model.state_dict(), folder / "checkpoint.pt")
            # A slow disk takes so long for a large model.
            sleep(1)

    return make_plain_loader(Photos(folder)), step, save_checkpoint


def make_step(folder: Path) -> Loop:
    """The step takes 100 ms, and loading takes next to nothing: here nothing is to be won."""
    return make_plain_loader(Photos(folder)), Step(100), None


class Accumulating(Step):
    """Sums gradients over some batches."""

    batches = 0

    def __call__(self, images: Tensor, targets: Tensor | None = None) -> None:
        """Learn, and step now and then."""
        self.batches += 1
        if self.batches % _EVERY == 0:
            super().__call__(images)
        else:
            burn(self.step_ms)


def make_accumulation(folder: Path, *, step_ms: float = 20, log_ms: float = 60) -> Loop:
    """The optimizer steps every eighth batch, and the process logs for 60 ms after each one."""
    return make_plain_loader(Photos(folder)), Accumulating(step_ms), lambda number: burn(log_ms)


class Weighing(Sampler[int]):
    """Weighs all samples anew, for so many milliseconds."""

    def __init__(self, cpu_ms: float) -> None:
        self.cpu_ms = cpu_ms

    def __len__(self) -> int:
        return 60

    def __iter__(self) -> Iterator[int]:
        burn(self.cpu_ms)
        return iter([index % 50 for index in range(60)])


def make_sampler(folder: Path, *, cpu_ms: float = 500) -> Loop:
    """The sampler takes half a second at the start of each epoch, and workers persist."""
    sampler = Weighing(cpu_ms)
    workers = {"num_workers": 2, "persistent_workers": True}
    return DataLoader(Photos(folder), 4, sampler=sampler, **workers), Step(), None


def make_two_loaders(folder: Path, *, cpu_ms: float = 30.0) -> Loop:
    """Two loaders in one loop: the watched one is quick, the other one takes 60 ms a batch."""

    def augment(image: Tensor, label: int) -> tuple[Tensor, int]:
        burn(cpu_ms)
        return image, label

    slow = make_plain_loader(Photos(folder, transforms=augment))
    others = chain.from_iterable(repeat(slow))
    step = Step()

    def train(images: Tensor, targets: Tensor) -> None:
        next(others)
        step(images)

    return make_plain_loader(Photos(folder)), train, None
