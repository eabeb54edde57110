"""Loops as people write them. Nobody planted a cause: the truth is what their code does."""

from __future__ import annotations

import copy
import fcntl
import io
import json
import random
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Sampler

from benchmarks.causes.loop import Loop, Step, burn
from colab_utils.files import read_file
from colab_utils.slow_drive import slow_down

__all__ = ["EVERYDAY", "Everyday"]

_IMAGES = 16
_SAMPLES = 4000
_BLANK = torch.zeros(4, 3, 16, 16)


class Made(Dataset[Any]):
    """Each sample is made by a function."""

    def __init__(self, make: Callable[[int], Any], count: int = _SAMPLES) -> None:
        self.make = make
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def write_photos(folder: Path) -> None:
    """Write large and small JPEG files."""
    chance = np.random.default_rng(0)
    for number in range(_IMAGES):
        pixels = chance.integers(0, 255, (60, 80, 3), np.uint8)
        large = Image.fromarray(pixels).resize((1600, 1200))
        large.save(folder / f"large-{number}.jpg")
        large.resize((640, 480)).save(folder / f"{number}.jpg")


def decode(data: Any) -> Tensor:
    """Return the pixels of a JPEG file, [3, height, width]."""
    pixels = np.array(Image.open(data).convert("RGB"))
    return torch.from_numpy(pixels).permute(2, 0, 1).contiguous()


class Photos(Made):
    """Photos of a folder, small or large."""

    def __init__(self, folder: Path, size: str = "") -> None:
        write_photos(folder)
        super().__init__(lambda index: decode(folder / f"{size}{index % _IMAGES}.jpg"))


def make_loop(dataset: Any, *, step_ms: float = 40, after: Any = None, **options: Any) -> Loop:
    """Two workers, batches of four, and a step that looks at none of them."""
    step = Step(step_ms)
    loader: DataLoader[Any] = DataLoader(dataset, **{"batch_size": 4, "num_workers": 2, **options})
    return loader, lambda *batch: step(_BLANK), after


def make_opencv(folder: Path) -> Loop:
    """OpenCV resizes and blurs, with threads of its own."""
    import cv2

    write_photos(folder)

    def get(index: int) -> Tensor:
        pixels = cv2.imread(str(folder / f"{index % _IMAGES}.jpg"))
        pixels = cv2.GaussianBlur(cv2.resize(pixels, (2000, 1500)), (31, 31), 5)
        return torch.from_numpy(cv2.resize(pixels, (320, 240)))

    return make_loop(Made(get))


def make_hdf5(folder: Path) -> Loop:
    """A chunk of HDF5 has 16 images, and is unpacked for each of them."""
    import h5py

    photos = Photos(folder)
    with h5py.File(folder / "data.h5", "w") as file:
        data = np.stack([photos[index].numpy() for index in range(_IMAGES)])
        file.create_dataset("images", data=data, chunks=data.shape, compression="gzip")
    opened: list[Any] = []

    def get(index: int) -> Tensor:
        if not opened:
            opened.append(h5py.File(folder / "data.h5", "r", rdcc_nbytes=0))
        return torch.from_numpy(opened[0]["images"][index % _IMAGES])

    return make_loop(Made(get))


def make_lmdb(folder: Path) -> Loop:
    """Small photos in an LMDB, in time."""
    import lmdb

    write_photos(folder)
    with lmdb.open(str(folder / "lmdb"), map_size=1 << 28) as table, table.begin(write=True) as put:
        for number in range(_IMAGES):
            put.put(str(number).encode(), (folder / f"{number}.jpg").read_bytes())
    opened: list[Any] = []

    def get(index: int) -> Tensor:
        if not opened:
            opened.append(lmdb.open(str(folder / "lmdb"), readonly=True, lock=False))
        with opened[0].begin() as read:
            return decode(io.BytesIO(read.get(str(index % _IMAGES).encode())))

    return make_loop(Made(get), step_ms=100)


def make_lazy_photos(folder: Path) -> Loop:
    """The dataset gives paths, and the loop decodes them."""
    write_photos(folder)
    paths = Made(lambda index: str(folder / f"large-{index % _IMAGES}.jpg"))
    loader, step, _ = make_loop(paths, step_ms=20, collate_fn=list)

    def train(batch: list[str]) -> None:
        for path in batch:
            decode(path)
        step(batch)

    return loader, train, None


def make_normalising(folder: Path) -> Loop:
    """The loop turns large batches into normalised floats."""
    loader, step, _ = make_loop(Photos(folder, "large-"), step_ms=20)

    def train(batch: Tensor) -> None:
        images = (batch.float() / 255 - 0.5) / 0.2
        images = images.clamp(-3, 3).sqrt()
        step(images)

    return loader, train, None


def make_masks(folder: Path) -> Loop:
    """Transforms of torchvision turn 20 masks."""
    from torchvision import tv_tensors
    from torchvision.transforms import v2

    transforms = v2.Compose([v2.RandomRotation(20), v2.Resize(800, antialias=True)])
    photos = Photos(folder)

    def get(index: int) -> Tensor:
        masks = tv_tensors.Mask(torch.zeros(20, 480, 640, dtype=torch.uint8))
        image, _ = transforms(tv_tensors.Image(photos[index]), masks)
        return image.float().mean()

    return make_loop(Made(get))


def make_file_lock(folder: Path) -> Loop:
    """Workers take turns at a lock of a file, for 30 ms each."""
    photos = Photos(folder)

    def get(index: int) -> Tensor:
        with open(folder / "cache.lock", "a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            time.sleep(0.03)
        return photos[index]

    return make_loop(Made(get), num_workers=4)


def make_image_log(folder: Path) -> Loop:
    """A grid of images is written every ten steps."""
    from torchvision.utils import save_image

    def log(number: int) -> None:
        if number % 10 == 0:
            save_image(torch.rand(16, 3, 256, 256), folder / "grid.png")

    return make_loop(Photos(folder), after=log)


def make_validation(folder: Path) -> Loop:
    """Every 15 steps, a second loader gives batches of large photos."""
    photos = Photos(folder, "large-")
    second: DataLoader[Any] = DataLoader(Made(photos.make, 12), 4)

    def validate(number: int) -> None:
        if number % 15 == 0:
            for _ in second:
                burn(1)

    return make_loop(Photos(folder), after=validate)


def make_warm_up(folder: Path) -> Loop:
    """The first step takes three seconds, as where a model is compiled."""
    loader, step, _ = make_loop(Photos(folder), step_ms=60)
    done: list[bool] = []

    def train(batch: Tensor) -> None:
        if not done:
            burn(3000)
            done.append(True)
        step(batch)

    return loader, train, None


def make_inner_loader(folder: Path) -> Loop:
    """Each sample comes from a DataLoader of its own."""
    photos = Photos(folder, "large-")

    def get(index: int) -> Tensor:
        return next(iter(DataLoader([photos[index + place] for place in range(4)], 4)))[0]

    return make_loop(Made(get))


class Weighing(Sampler[int]):
    """Draws each index anew from 400,000 weights."""

    def __iter__(self) -> Iterator[int]:
        weights = np.full(400_000, 1 / 400_000)
        while True:
            yield int(np.random.choice(400_000, p=weights)) % _SAMPLES

    def __len__(self) -> int:
        return _SAMPLES


def make_weights(folder: Path) -> Loop:
    """The sampler is slow, in the main process."""
    return make_loop(Photos(folder), sampler=Weighing())


def pad_far(samples: list[Tensor]) -> Tensor:
    """Put samples into canvases that are far too large."""
    canvas = torch.zeros(len(samples), 3, 2048, 2048)
    for place, sample in enumerate(samples):
        canvas[place, :, : sample.shape[1], : sample.shape[2]] = sample.float() / 255
    return (canvas - canvas.mean()) / (canvas.std() + 1e-6)


def make_padding(folder: Path) -> Loop:
    """Workers pad batches in collate_fn."""
    return make_loop(Photos(folder), collate_fn=pad_far)


def make_json(folder: Path) -> Loop:
    """All annotations are parsed for each sample."""
    photos = Photos(folder)
    entry = {"bbox": [1.5, 2.5, 3.5, 4.5], "segmentation": [[0.5] * 20]}
    (folder / "all.json").write_text(json.dumps([entry] * 20_000))

    def get(index: int) -> Tensor:
        json.loads((folder / "all.json").read_text())
        return photos[index]

    return make_loop(Made(get))


class Pooled(Made):
    """Threads of plain Python load the samples of a batch."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        with ThreadPoolExecutor(8) as pool:
            return list(pool.map(self.make, indices))


def sum_squares(index: int) -> Tensor:
    """Work in plain Python."""
    return torch.tensor(sum(number * number for number in range(400_000)) % 7)


def make_threads(folder: Path) -> Loop:
    """Threads of the main process share Python's lock."""
    return make_loop(Pooled(sum_squares), batch_size=8, num_workers=0)


def make_cache(folder: Path) -> Loop:
    """Workers keep small copies of large photos: the first pass is slow."""
    photos = Photos(folder, "large-")
    cache: dict[int, Tensor] = {}

    def get(index: int) -> Tensor:
        if index not in cache:
            cache[index] = photos[index][:, ::4, ::4].clone()
        return cache[index]

    return make_loop(Made(get, 160), step_ms=20, persistent_workers=True)


class Shuffled(IterableDataset[Tensor]):
    """Fills a buffer in each pass, and then gives samples."""

    def __init__(self, photos: Photos) -> None:
        self.photos = photos

    def __iter__(self) -> Iterator[Tensor]:
        buffer = [self.photos[index] for index in range(120)]
        random.shuffle(buffer)
        yield from buffer[:80]


def make_shuffle(folder: Path) -> Loop:
    """A buffer is filled in each pass."""
    return make_loop(Shuffled(Photos(folder)), step_ms=20)


def make_prefetch(folder: Path) -> Loop:
    """A thread reads slow files ahead."""
    write_photos(folder)
    slow_down(folder, "typical")

    def load_slowly(number: int) -> list[Tensor]:
        names = [f"{(number + place) % _IMAGES}.jpg" for place in range(4)]
        return [decode(io.BytesIO(read_file(folder / name))) for name in names]

    def load_all() -> Iterator[list[Tensor]]:
        batches: Queue[list[Tensor]] = Queue(4)

        def fill() -> None:
            for number in range(10_000):
                batches.put(load_slowly(number))

        threading.Thread(target=fill, daemon=True).start()
        while True:
            yield batches.get()

    step = Step(40)
    return load_all(), lambda *batch: step(_BLANK), None


def make_average(folder: Path) -> Loop:
    """An average of 30 million weights is updated after each step."""
    averages = [torch.zeros(3_000_000) for _ in range(10)]
    weights = [torch.ones(3_000_000) for _ in range(10)]

    def update(number: int) -> None:
        for average, weight in zip(averages, weights, strict=True):
            average.mul_(0.999).add_(weight, alpha=0.001)

    return make_loop(Photos(folder), after=update)


def make_zip(folder: Path) -> Loop:
    """A zip of 30,000 names is opened for each sample."""
    write_photos(folder)
    with zipfile.ZipFile(folder / "all.zip", "w") as archive:
        for number in range(30_000):
            archive.writestr(f"notes/{number:06}.txt", "x")
        for number in range(_IMAGES):
            archive.write(folder / f"{number}.jpg", f"{number}.jpg")

    def get(index: int) -> Tensor:
        with zipfile.ZipFile(folder / "all.zip") as archive:
            return decode(io.BytesIO(archive.read(f"{index % _IMAGES}.jpg")))

    return make_loop(Made(get))


def make_plot(folder: Path) -> Loop:
    """A curve is drawn after each step."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    def plot(number: int) -> None:
        figure, axes = plt.subplots()
        axes.plot(range(number))
        figure.savefig(folder / "curve.png")
        plt.close(figure)

    return make_loop(Photos(folder), after=plot)


def make_tensors(folder: Path) -> Loop:
    """Tensors in memory, no workers."""
    tensors = [torch.zeros(3, 64, 64) for _ in range(400)]
    return make_loop(tensors, step_ms=50, num_workers=0)


def make_photos(folder: Path) -> Loop:
    """Small photos, in time."""
    return make_loop(Photos(folder), step_ms=100, persistent_workers=True)


def make_copies(folder: Path) -> Loop:
    """A table is copied for each sample."""
    photos = Photos(folder)
    table = [{"id": number, "box": [1, 2, 3, 4]} for number in range(4000)]

    def get(index: int) -> Tensor:
        copy.deepcopy(table)
        return photos[index]

    return make_loop(Made(get))


class Everyday(NamedTuple):
    """A loop, and what is true of it."""

    make_loop: Callable[[Path], Loop]
    """Writes its files into a folder, and gives the loader, the step, and what follows each step.
    """
    expected: str
    """A regular expression for the first cause."""
    code: str = ""
    """A regular expression for the function or the library that should be named."""


EVERYDAY = {
    "opencv": Everyday(make_opencv, "work|contention", "cv2"),
    "hdf5": Everyday(make_hdf5, "work", "h5py|images"),
    "lmdb": Everyday(make_lmdb, "step"),
    "lazy_photos": Everyday(make_lazy_photos, "prepare", "decode"),
    "normalising": Everyday(make_normalising, "prepare", "train"),
    "masks_of_torchvision": Everyday(make_masks, "work|contention", "torchvision"),
    "file_lock": Everyday(make_file_lock, "lock"),
    "image_log": Everyday(make_image_log, "periodic", "save_image|encode"),
    "validation": Everyday(make_validation, "periodic|other_loader", "validate"),
    "warm_up": Everyday(make_warm_up, "step"),
    "inner_loader": Everyday(make_inner_loader, "work", "get"),
    "weights": Everyday(make_weights, "main_process", "choice"),
    "padding": Everyday(make_padding, "collate", "pad_far"),
    "json": Everyday(make_json, "work", "json"),
    "threads": Everyday(make_threads, "work", "sum_squares|genexpr"),
    "cache_of_workers": Everyday(make_cache, "work", "decode|load"),
    "shuffle": Everyday(make_shuffle, "restarts|starts"),
    "prefetch": Everyday(make_prefetch, "read|sleep", "load_slowly|read_file"),
    "average": Everyday(make_average, "between", "update"),
    "zip": Everyday(make_zip, "work", "zipfile"),
    "plot": Everyday(make_plot, "between", "matplotlib|plot"),
    "tensors": Everyday(make_tensors, "step"),
    "photos": Everyday(make_photos, "step"),
    "copies": Everyday(make_copies, "work", "copy"),
}
"""The loops by name."""
