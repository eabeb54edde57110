"""One strategy at a time: checked against the reference, run cold, run warm; and what `diagnose` forecasts of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import islice
from time import perf_counter
from typing import Any

from torch.utils.data import DataLoader

from colab_utils.diagnosis.clocks import BatchTimes, describe_error, time_batches
from colab_utils.diagnosis.layers import diagnose
from colab_utils.diagnosis.likeness import find_difference
from colab_utils.diagnosis.parts import drop_cached
from colab_utils.diagnosis.resources import measure_memory
from colab_utils.diagnosis.stores import PillowFolder
from colab_utils.diagnosis.strategies import Strategy
from colab_utils.diagnosis.ways import Setting, end_workers
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.folder import CocoFolder
from colab_utils.runtime import quiet_fork

__all__ = ["FORECASTS", "Trial", "TrialRunner", "forecast_fixes"]

_MAX_RUN_S = 30.0  # for one repeat of one strategy
FORECASTS = {
    "image files on the local SSD": "dataloader_on_ssd", "shards on the local SSD": "shards_on_ssd",
    "packed masks": "packed", "samples in memory": "in_memory",
}  # fmt: skip
"""Fixes that `diagnose` forecasts, and the strategy that is each."""


@dataclass
class Trial:
    """A strategy while it is being measured."""

    strategy: Strategy
    place: str
    note: str = ""
    difference: str = "not checked"
    failed: bool = False
    cold: BatchTimes | None = None
    ram_bytes: int = 0
    times: list[BatchTimes] = field(default_factory=list)


class TrialRunner:
    """Runs one strategy at a time: to check it, cold, or warm."""

    def __init__(self, fast: Setting, slow: Setting, step: Any, *, batches: int, timeline_s: float) -> None:
        self._fast, self._slow, self._step, self._batches, self._timeline_s = fast, slow, step, batches, timeline_s
        self._reference = CocoFolder(fast.forms.images, fast.forms.annotations)
        self._epoch = -(-len(self._reference) // fast.batch_size)

    def try_to(self, run: Callable[[Trial], None], row: Trial) -> None:
        """Where a strategy fails, a note says why, and it is not run again."""
        try:
            if not row.failed:
                run(row)
        except Exception as error:
            row.note, row.failed = describe_error(error), True

    def check(self, row: Trial) -> None:
        """Hold an epoch against the reference."""
        with closing(row.strategy.open(self._fast)) as loader:
            row.difference = find_difference(islice(loader, self._epoch), self._reference)

    def run_cold(self, row: Trial) -> None:
        """The first batches, with nothing of the files in the system's memory, from the first one on."""
        path = self._slow.forms.get(row.strategy.form).path
        for file in path.rglob("*") if path.is_dir() else (path,):
            drop_cached(file)
        began_s = perf_counter()
        with closing(row.strategy.open(self._slow)) as loader:
            opened_s = perf_counter() - began_s  # who reads everything at the start waits here
            cold = time_batches(loader, self._step, batches=10_000, warmup=0, max_s=self._timeline_s)
        waits = (cold.wait_s[0] + opened_s, *cold.wait_s[1:])
        row.cold = replace(cold, wait_s=waits, first_batch_s=cold.first_batch_s + opened_s)

    def run_warm(self, row: Trial) -> None:
        """Timed batches after a warm-up, which is an epoch where a strategy keeps what it reads."""
        before = measure_memory()
        with closing(row.strategy.open(self._slow)) as loader:
            warmup = self._epoch if row.strategy.keeps else 2
            times = time_batches(loader, self._step, batches=self._batches, warmup=warmup, max_s=_MAX_RUN_S)
            row.ram_bytes = max(row.ram_bytes, measure_memory() - before)
        row.times.append(times)


def forecast_fixes(setting: Setting, step: Any, *, seconds: float) -> dict[str, float]:
    """What `diagnose` forecasts of a plain ``DataLoader`` over the files on Drive; images a second, by fix."""
    dataset = PillowFolder(setting.forms.images, setting.forms.annotations, profile=setting.profile)

    def take(images: Any, targets: Any) -> None:
        step([image.to(setting.device).float().div_(255) for image in images], targets)

    taken = step if getattr(step, "emulated", False) else take
    with quiet_fork():
        loader: DataLoader[Any] = DataLoader(
            dataset, batch_size=setting.batch_size, shuffle=True, num_workers=setting.workers, collate_fn=_collate,
            persistent_workers=setting.workers > 0,
        )  # fmt: skip
    try:
        found = diagnose(loader, taken, seconds=seconds)
    except ColabUtilsError:
        return {}  # its row says why
    finally:
        end_workers(loader)
    return {fix.name: fix.forecast_images_per_second for fix in found.fixes if fix.name in FORECASTS}


def _collate(samples: list[Any]) -> tuple[Any, ...]:
    return tuple(zip(*samples, strict=True))
