"""Planted causes of slow work in the workers, and of what they wait for."""

from __future__ import annotations

import multiprocessing
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.causes.loop import Loop, Photos, Step, burn, make_plain_loader
from colab_utils.course.sample_data import make_dataset
from colab_utils.loading.coco_folder import CocoFolder


def add_noise(image: Tensor, label: int) -> tuple[Tensor, int]:
    """Add noise, slowly."""
    burn(80)
    return image + 0.1 * torch.rand(image.shape), label


def make_transform(folder: Path) -> Loop:
    """A random transform takes 80 ms of CPU for each image."""
    return make_plain_loader(Photos(folder, transforms=add_noise), batches=300), Step(), None


def collate_lists(samples: list[tuple[Any, Any]]) -> tuple[Any, ...]:
    """As torchvision's references do."""
    return tuple(zip(*samples, strict=True))


def make_masks(folder: Path) -> Loop:
    """Each image has 300 polygons, which become 300 dense masks."""
    made = make_dataset(folder, n=4, width=160, height=120, objects=(300, 300), workers=1)
    dataset = CocoFolder(made.images, made.annotations)
    return make_plain_loader(dataset, collate_fn=collate_lists), Step(), None


def collate_slowly(samples: list[Any]) -> Any:
    """Put samples together, slowly."""
    burn(300)
    return default_collate(samples)


def make_collate(folder: Path) -> Loop:
    """The function that makes a batch of samples takes 300 ms of CPU."""
    return make_plain_loader(Photos(folder), batches=300, collate_fn=collate_slowly), Step(), None


class Frames(Dataset[tuple[Tensor, Tensor]]):
    """Whole batches of black frames: the system makes their memory when somebody touches it."""

    def __len__(self) -> int:
        return 600

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.empty(8, 3, 1024, 1280), torch.full((8,), index)


def make_handoff(folder: Path) -> Loop:
    """Batches of 126 MB cost nothing to make, and much to hand over from the worker through shared
    memory.
    """
    return DataLoader(Frames(), batch_size=None, num_workers=2), Step(), None


class Batched(Photos):
    """Loads the samples of a batch at once."""

    cpu_ms = 15.0

    def __getitems__(self, indices: list[int]) -> list[Any]:
        burn(self.cpu_ms * len(indices))
        return [self[index] for index in indices]


def make_batched(folder: Path) -> Loop:
    """A dataset gives whole batches by ``__getitems__``: 15 ms of work for each sample."""
    return make_plain_loader(Batched(folder)), Step(), None


class Threaded:
    """A transform in another thread of the worker."""

    pool: ThreadPoolExecutor | None = None

    def __init__(self, cpu_ms: float = 40) -> None:
        self.cpu_ms = cpu_ms

    def __call__(self, image: Tensor, label: int) -> tuple[Tensor, int]:
        """Let the thread work, and wait for it."""
        self.pool = self.pool or ThreadPoolExecutor(1)
        self.pool.submit(burn, self.cpu_ms).result()
        return image, label


def make_helper_threads(folder: Path) -> Loop:
    """A thread of its own works on a sample, as in OpenCV and ffmpeg: work, and no waiting."""
    return make_plain_loader(Photos(folder, transforms=Threaded()), workers=1), Step(), None


class Asking(Photos):
    """Waits for another process before it loads."""

    answer_s = 0.05

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        subprocess.run(["sleep", str(self.answer_s)], check=True)
        return super().__getitem__(index)


def make_other_process(folder: Path) -> Loop:
    """Each sample waits for a program of its own, as with ffmpeg: for 50 ms."""
    return make_plain_loader(Asking(folder)), Step(), None


class Locked(Photos):
    """Loads under a lock."""

    held_ms = 25.0
    lock = multiprocessing.Lock()

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with self.lock:
            burn(self.held_ms)
        return super().__getitem__(index)


def make_lock(folder: Path) -> Loop:
    """All workers take turns at one lock, as with HDF5: 25 ms of work for each sample."""
    return make_plain_loader(Locked(folder)), Step(), None
