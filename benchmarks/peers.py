"""Other libraries as strategies of `compare`: one adapter from a `System` of benchmarks/systems to
a `Strategy`.

`python -m benchmarks.compare` passes them in. Each library reads a format of its own, written from
the same shards.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from benchmarks.data import Data
from benchmarks.systems import get_system
from colab_utils.comparison.loaders import Setting, deliver
from colab_utils.comparison.strategies import Strategy
from colab_utils.loading.dataset import ShardDataset

__all__ = ["PEERS"]


@dataclass(frozen=True)
class Shards(Data):
    """Shards in the place of image files."""

    def open(self) -> Any:
        """The samples."""
        return ShardDataset(self.folder)


class Peer:
    """A system as `compare` iterates over it: samples as they are, in batches of the setting, on
    its device.
    """

    def __init__(self, setting: Setting, system: str) -> None:
        self._setting = setting
        kind = get_system(system)
        shards = setting.prepared.get("shards_on_ssd").folder
        data = Shards(shards, _name_codec(ShardDataset(shards)), len(setting.prepared), copies=1)
        folder = setting.prepared.ssd / f"{system}-{setting.prepared.name}"
        if not folder.with_suffix(".done").exists():
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            kind.prepare(data, folder)
            folder.with_suffix(".done").touch()
        crew = next((crew for crew in kind.crews if crew.size == setting.workers), kind.crews[-1])
        as_they_are: Any = type(kind.__name__, (kind,), {"flips": False})
        self._system = as_they_are(data, folder, crew)

    def __iter__(self) -> Iterator[Any]:
        # In a library's forked workers torch would complain of loaders that are garbage by now.
        gc.collect()
        samples: list[Any] = []
        for batch in self._system:
            for sample in self._system.unpack(batch):
                samples.append(sample)
                if len(samples) == self._setting.batch_size:
                    yield deliver(tuple(zip(*samples, strict=True)), self._setting.device)
                    samples = []
        if samples:
            yield deliver(tuple(zip(*samples, strict=True)), self._setting.device)

    def close(self) -> None:
        """End the library's workers."""
        self._system.close()


def _name_codec(dataset: ShardDataset) -> str:
    """A name for `Data`, which tells by it whether records hold JPEGs."""
    jpegs = (bytes(dataset.read(row)[:3]) == b"\xff\xd8\xff" for row in range(len(dataset)))
    return "jpg" if all(jpegs) else "pixels"


def _make_strategy(name: str, system: str, idea: str) -> Strategy:
    return Strategy(name, idea, "shards_on_ssd", partial(Peer, system=system))


PEERS = {
    strategy.name: strategy
    for strategy in (
        _make_strategy("webdataset", "webdataset", "WebDataset tars of the same samples."),
        _make_strategy("litdata", "litdata", "LitData chunks of the same samples."),
        _make_strategy("mosaicml-streaming", "mosaicml", "MDS shards of the same samples."),
        _make_strategy("tf_data", "tf_data", "tf.data over TFRecords of the same samples."),
    )
}
"""Strategies by name; each needs its library (benchmarks/requirements.txt)."""
