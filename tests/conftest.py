"""Data that the tests share: made by code, or the real images where they are at hand."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import time
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from colab_utils import drive, slow_drive
from colab_utils.course.sample_data import BuiltinDataset, make_dataset
from colab_utils.machine import count_cores
from colab_utils.shards.write import write_shards

# Each of these is run as a script.
collect_ignore = ["diagnosis/scripts"]
SHARED = Path(os.environ.get("COLAB_UTILS_SHARED", Path(__file__).parents[2] / "shared"))


LONGEST = (
    "tests/notebooks/test_run_notebooks.py",
    "tests/benchmarks/test_gpu.py",
    "tests/notebooks/test_setup_cell.py",
    "tests/notebooks/test_badges.py",
    "tests/fuzz/test_fuzz.py",
    "tests/training/test_train.py",
    "tests/training/test_distributed.py",
    "tests/training/test_equality.py",
    "tests/shards/test_write.py",
    "tests/loading/test_dataset.py",
)
"""The files that take longest."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest files first, so that at the end no process is left alone with one."""
    ranks = {name: rank for rank, name in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(item.nodeid.partition("::")[0], len(ranks)))


@dataclass(frozen=True)
class CocoMini:
    images: Path
    annotations: Path


@pytest.fixture(scope="session", autouse=True)
def workers_end_soon() -> None:
    """torch looks after its workers every half second, and waits as long for one that hangs before
    it kills it. Both take five seconds otherwise, in any thread and test in which a loader ends.
    """
    torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL = 0.5
    _MultiProcessingDataLoaderIter._try_get_data.__defaults__ = (0.5,)


@pytest.fixture(scope="session", autouse=True)
def ctrl_c_interrupts() -> None:
    """A shell's background job ignores Ctrl-C, and so would all that the tests start."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module")
def few_objects() -> Iterator[None]:
    """Garbage collections, of which planning the memory asks for many, leave out what the libraries
    hold anyway.
    """
    # Garbage that is frozen stays, and so do the processes that it holds.
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training writes a line of its log after each step."""
    monkeypatch.setattr("colab_utils.training.trainer._LOG_STEPS", 1)


@pytest.fixture(scope="session", autouse=True)
def short_waits() -> None:
    """What is tried again where Drive fails is tried at once."""
    drive.RETRY_WAITS_S = (0.01, 0.01, 0.01, 0.01)


@pytest.fixture(scope="session", autouse=True)
def own_link(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Tests in other processes do not take the link to the slowed Drive."""
    slow_drive._LINK = str(tmp_path_factory.mktemp("link") / "link")


@pytest.fixture(autouse=True)
def nothing_stays_slow() -> Iterator[None]:
    """No test slows down the folders of the next one."""
    yield
    os.environ.pop(slow_drive._SLOWED, None)


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    """A file of 1000 bytes."""
    path = tmp_path / "photo.jpg"
    path.write_bytes(bytes(range(200)) * 5)
    return path


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Small models train faster so, and the same on every machine."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def quiet_machine() -> None:
    """Waits until every core is free: for a test that compares two times of the same work."""
    until_s = time.monotonic() + 120
    with ThreadPoolExecutor(count_cores()) as pool:
        while max(pool.map(_measure_delay, range(count_cores()))) > 1.3:
            if time.monotonic() > until_s:
                pytest.skip(
                    "other programs kept the cores busy for two minutes: run it on an idle machine"
                )
            time.sleep(0.5)


def _measure_delay(_: int) -> float:
    """How many times as long as its CPU time a little work takes."""
    wall_s = time.perf_counter()
    cpu_s = time.thread_time()
    for _ in range(2000):
        zlib.crc32(bytes(65_536))
    return (time.perf_counter() - wall_s) / (time.thread_time() - cpu_s)


@pytest.fixture(scope="session")
def coco_mini() -> CocoMini:
    """80 real COCO images of train2017 with their annotations."""
    folder = SHARED / "data" / "coco-mini"
    if not folder.is_dir():
        pytest.skip(f"the real images are not at {folder} (set COLAB_UTILS_SHARED)")
    return CocoMini(folder / "train2017", folder / "annotations" / "instances_train2017.json")


@pytest.fixture(scope="session")
def coco_mini_val(coco_mini: CocoMini) -> CocoMini:
    """79 real COCO images of val2017 with their annotations."""
    folder = coco_mini.images.parent
    return CocoMini(folder / "val2017", folder / "annotations" / "instances_val2017.json")


@pytest.fixture(scope="session")
def tiny_dataset(tmp_path_factory: pytest.TempPathFactory) -> BuiltinDataset:
    """12 small built-in images: read it, never change it."""
    return make_dataset(
        tmp_path_factory.mktemp("tiny"), n=12, width=160, height=128, objects=(1, 4), workers=1
    )


@pytest.fixture(scope="session")
def tiny_shards(tiny_dataset: BuiltinDataset, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shards of the tiny dataset, 3 or more: read them, never change them."""
    folder = tmp_path_factory.mktemp("drive") / "shards"
    size = sum(path.stat().st_size for path in tiny_dataset.images.iterdir())
    write_shards(
        tiny_dataset.images, tiny_dataset.annotations, shards=folder, shard_mb=size / 4e6, workers=1
    )
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """The system's Chromium, by playwright; without them, the tests are skipped."""
    sync_api = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
    path = next(
        filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
    )
    if path is None:
        pytest.skip("no Chromium: apt-get install chromium")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()
