"""Whether training waits for its data: `python -m benchmarks.feeding --images DIR ... --json FILE`.

The same batches train the same model by `TrainingStep`, once from the loader as they come from shards, and once when
all of them lie ready on the device. Nothing is synchronised between the steps. Without a GPU it runs small, on the CPU,
where loading takes its time from the steps themselves; the JSON says on what.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from functools import partial
from itertools import islice
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import nn

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from benchmarks.step import DATA, add_model_options, make_model
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.training.model import fold_norms
from colab_utils.training.step import TrainingStep

__all__ = ["WAYS", "main", "tabulate_runs", "time_way"]

WAYS = ("lying ready", "from shards")
WARMUP = 4


def time_way(
    way: str, model: nn.Module, shards: Path, *, device: str, batch_size: int, batches: int
) -> dict[str, float]:
    """Images a second over ``batches`` batches, after some that do not count."""
    dataset = ShardDataset(shards, contiguous_labels=True)
    trained = copy.deepcopy(model).to(device)
    fold_norms(trained)  # as `train` does it
    trained.backbone.to(memory_format=torch.channels_last)
    step, wait = TrainingStep(trained, device), torch.cuda.synchronize if device == "cuda" else int
    workers = 1 if device == "cpu" else "auto"
    loader = make_loader(dataset, batch_size=batch_size, device=device, workers=workers, deliver="packed")  # type: ignore[arg-type]
    with closing(loader):
        torch.manual_seed(0)
        coming: Iterable[Any] = islice(loader, WARMUP + batches)
        source = iter([*coming]) if way == WAYS[0] else iter(coming)
        for batch in islice(source, WARMUP):
            step(batch)
        wait()
        began_s, images = perf_counter(), 0
        for batch in source:
            step(batch)
            images += len(batch)
        wait()
        return {"images_per_second": images / (perf_counter() - began_s)}


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest]; the ratio is of runs in the same repeat."""
    table = []
    for name in dict.fromkeys(row["data"] for row in rows):
        ready, real = (
            [row["images_per_second"] for row in rows if (row["data"], row["way"]) == (name, way)] for way in WAYS
        )
        if real:
            ratios = [ours / theirs for ours, theirs in zip(real, ready, strict=False)]
            table.append({
                "data": name, "images/s, lying ready": format_spread(ready),
                "images/s, from shards": format_spread(real),
                "of the rate of those that lie ready": format_spread(ratios),
            })  # fmt: skip
    return str(make_table(table)) if table else "nothing was measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser("feeding", __doc__)
    add_model_options(parser, device)
    parser.add_argument("--batches", type=int, default=24, help="of each run (%(default)s)")
    parser.add_argument("--repeats", type=int, default=5, help="of each, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        runs: list[Run] = []
        for name in DATA:
            data = make_data(name, options.work, options.images, options.annotations, samples=300)
            shards = data.folder / "shards"
            write_shards(data.images, data.annotations, shards=shards)
            classes = ShardDataset(shards, contiguous_labels=True).num_classes
            model = make_model(options.model, num_classes=classes, min_size=options.min_size)
            for way in WAYS:
                run: Callable[[], dict[str, float]] = partial(
                    time_way, way, model, shards, device=device, batch_size=options.batch_size, batches=options.batches
                )
                runs.append(({"data": name, "way": way}, run))
        about = {
            "device": device, "model": options.model, "min_size": options.min_size, "batch_size": options.batch_size,
            "batches": options.batches,
        }  # fmt: skip
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
