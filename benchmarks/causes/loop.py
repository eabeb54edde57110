"""What the planted causes share: photos, a step that trains a tiny model, work for the CPU, and the
user's loop.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, thread_time
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, RandomSampler

__all__ = [
    "Loop",
    "Photos",
    "Step",
    "Truth",
    "burn",
    "make_plain_loader",
    "run_loop",
]

Loop = tuple[Iterable[Any], Callable[..., None], Callable[[int], None] | None]
"""What the user iterates over, the step, and what the user's process does after each step, given
its number.
"""

# Some 50 microseconds of work release Python's lock.
_WORK = np.linspace(0, 1, 8192)
# The tiny model sees an image of so many pixels a side.
_SIDE = 16


def burn(cpu_ms: float) -> None:
    """Keep this thread busy with numpy for so many milliseconds of CPU time."""
    until_s = thread_time() + cpu_ms / 1000
    while thread_time() < until_s:
        np.sin(_WORK)


class Photos(Dataset[tuple[Tensor, int]]):
    """Small JPEG files in ``folder``, made here: ``count`` of them, each with so many
    ``extra_bytes`` at its end.

    ``read`` gives a file's bytes. ``transforms`` takes and returns ``(image, label)``, as in
    torchvision's datasets.
    """

    def __init__(
        self,
        folder: Path,
        *,
        count: int = 50,
        extra_bytes: int = 0,
        read: Callable[[Path], bytes] = Path.read_bytes,
        transforms: Callable[[Tensor, int], tuple[Tensor, int]] | None = None,
    ) -> None:
        self.folder = folder
        self.paths = [folder / f"photo-{number}.jpg" for number in range(count)]
        self.read = read
        self.transforms = transforms
        chance = np.random.default_rng(0)
        for path in self.paths:
            Image.fromarray(chance.integers(0, 256, (32, 32, 3), np.uint8)).save(path, "JPEG")
            with path.open("ab") as file:
                file.write(bytes(extra_bytes))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        pixels = np.array(Image.open(io.BytesIO(self.read(self.paths[index]))))
        image = torch.from_numpy(pixels).permute(2, 0, 1) / 255
        label = index % 10
        return self.transforms(image, label) if self.transforms else (image, label)


def make_plain_loader(
    dataset: Dataset[Any],
    *,
    batches: int = 500,
    batch_size: int = 4,
    workers: int = 2,
    **options: Any,
) -> DataLoader[Any]:
    """A plain ``DataLoader``. An epoch has so many ``batches``: all samples in a random order,
    again and again.
    """
    chance = torch.Generator().manual_seed(0)
    count = batches * batch_size
    sampler = RandomSampler(dataset, num_samples=count, generator=chance)  # type: ignore[arg-type]
    return DataLoader(
        dataset, batch_size, sampler=sampler, num_workers=workers, generator=chance, **options
    )


class Step:
    """Train a tiny model with SGD. A step repeats its passes for ``step_ms`` milliseconds of CPU
    time, and takes longer where others take the core away; the optimizer steps once.
    """

    def __init__(self, step_ms: float = 20) -> None:
        self.step_ms = step_ms
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = nn.Sequential(
                nn.Flatten(), nn.Linear(3 * _SIDE**2, 8), nn.ReLU(), nn.Linear(8, 1)
            )
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def __call__(self, images: Any, targets: Any = None) -> None:
        """Learn how bright the images are."""
        until_s = thread_time() + self.step_ms / 1000
        pixels = torch.stack([image[:, :_SIDE, :_SIDE] for image in images]).float()
        brightness = pixels.mean((1, 2, 3))[:, None]
        while True:
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.model(pixels), brightness).backward()
            if thread_time() >= until_s:
                break
        self.optimizer.step()


@dataclass(frozen=True)
class Truth:
    """What the loop's own clocks say. The shares leave out the wait for the very first batch."""

    wall_s: float
    """Of the whole run, workers' first start included."""
    wait_s: tuple[float, ...]
    """Seconds of waiting for each batch."""
    step_s: tuple[float, ...]
    """Seconds of its step."""
    between_s: tuple[float, ...]
    """Seconds of what followed the step."""
    starts: tuple[int, ...]
    """The number of each epoch's first batch, from 0."""

    def __str__(self) -> str:
        total_s = max(sum(self.wait_s[1:] + self.step_s + self.between_s), 1e-9)
        starts_s = [self.wait_s[number] for number in self.starts[1:]]
        return (
            f"wait {sum(self.wait_s[1:]) / total_s:.0%} (starts {sum(starts_s) / total_s:.0%}), "
            f"step {sum(self.step_s) / total_s:.0%}, between {sum(self.between_s) / total_s:.0%}; "
            f"a step takes {1000 * median(self.step_s):.0f} ms; "
            f"{len(self.step_s)} batches, {len(self.starts)} epochs in {self.wall_s:.1f} s"
        )


def run_loop(
    make_loop: Callable[[Path], Loop],
    folder: Path,
    *,
    seconds: float,
    around: Callable[[Any], Iterable[Any]] = lambda loader: loader,
) -> Truth:
    """Run the user's plain loop, epoch after epoch, for about so many ``seconds``, and read the
    clocks meanwhile.

    ``around`` takes the loader in each epoch, and gives what is iterated over: a tool that looks
    on.
    """
    loader, step, after = make_loop(folder)
    waits = list[float]()
    steps = list[float]()
    betweens = list[float]()
    starts = list[int]()
    began_s = perf_counter()
    asked_s = began_s
    while True:
        starts.append(len(steps))
        for batch in around(loader):
            got_s = perf_counter()
            if (
                type(batch) in (tuple, list)
                and len(batch) == 2
                and not isinstance(batch[0], Mapping)
            ):
                step(*batch)
            else:
                step(batch)
            stepped_s = perf_counter()
            if after is not None:
                after(len(steps))
            ended_s = perf_counter()
            waits.append(got_s - asked_s)
            steps.append(stepped_s - got_s)
            betweens.append(ended_s - stepped_s)
            if ended_s - began_s > seconds:
                return Truth(
                    ended_s - began_s, tuple(waits), tuple(steps), tuple(betweens), tuple(starts)
                )
            asked_s = ended_s
