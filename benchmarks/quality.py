"""Average precision after the same training by torchvision's own path and by ours: `python -m
benchmarks.quality ...`.

Both train the same model from the same random weights on the built-in dataset, in the same order,
for several seeds: once from dense targets, through ``model(images, targets)`` with torchvision's
transform, and once from packed batches. With ``--norms``, frozen batch norms beside trained ones
instead: the backbone is first trained on other images, and its weights are taken as published ones
are. With ``--small``, the tiny model on small pictures, which takes minutes.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

from torch import Tensor
from torchvision.transforms import v2

from benchmarks.command import Run, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_judged_data
from colab_utils.sample_data import make_dataset
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.training.model import TINY_MODEL, load_trained_model
from colab_utils.training.train import train

__all__ = ["main", "pretrain", "tabulate_runs", "train_once"]

WAYS = ("torchvision", "packed")
NORMS = ("frozen norms", "trained norms")
IMAGES, SEED = 400, 1000  # that the backbone is trained on first
SMALL = {"model": TINY_MODEL, "batch_size": 4, "learning_rate": 0.002, "min_size": 120}
PICTURES = {"width": 160, "height": 120, "objects": (1, 3), "categories": ("ball", "heart")}


def pretrain(work: Path, steps: int) -> dict[str, Tensor]:
    """The weights of a backbone that was trained on other images, by the names of published
    ones.
    """
    run = work / f"pretrained-{steps}"
    made = make_dataset(work / "others-data", n=IMAGES, seed=SEED)
    write_shards(made.images, made.annotations, shards=work / "others")
    train(work / "others", run, steps=steps, weights=None, log=lambda line: None)
    body = load_trained_model(run).backbone.body
    return {f"features.{name}": value for name, value in body.state_dict().items()}


def make_small_data(work: Path) -> None:
    """Shards of small pictures: 400 in ``train``, and 100 others in ``val``."""
    for part, count, seed in (("train", IMAGES, 100), ("val", IMAGES // 4, 101)):
        made = make_dataset(work / f"{part}-images", n=count, seed=seed, **PICTURES)  # type: ignore[arg-type]
        write_shards(made.images, made.annotations, shards=work / part)


def train_once(
    way: str,
    seed: int,
    work: Path,
    steps: int,
    backbone: dict[str, Tensor] | None = None,
    *,
    small: bool = False,
) -> dict[str, float]:
    """AP of boxes and masks on images that were not trained on, and the mean loss of the last tenth
    of the steps.
    """
    settings: dict[str, Any] = {
        "augment": v2.RandomHorizontalFlip(0.5) if way == "torchvision" else "flip"
    }
    settings |= SMALL if small else {}
    settings |= {"norms": way.partition(" ")[0]} if way in NORMS else {"weights": None}
    fetched = patch("colab_utils.training.model._fetch_pretrained", return_value=backbone)
    with TemporaryDirectory(dir=work) as run, fetched:
        report = train(
            work / "train",
            Path(run) / "run",
            steps=steps,
            seed=seed,
            log=lambda line: None,
            val_shards=work / "val",
            **settings,
        )
    assert report.ap is not None
    last = [point.loss for point in report.losses[-max(1, steps // 10) :]]
    return {"box AP": report.ap.bbox, "mask AP": report.ap.segm, "loss": mean(last)}


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Mean ± standard deviation over the seeds of each way."""
    table = []
    for way in dict.fromkeys(row["way"] for row in rows):
        found: dict[str, Any] = {"path": way}
        for name in ("box AP", "mask AP", "loss"):
            values = [row[name] for row in rows if row["way"] == way]
            found[name] = f"{mean(values):.3f} ± {stdev(values) if len(values) > 1 else 0:.3f}"
        table.append({**found, "seeds": sum(row["way"] == way for row in rows)})
    return str(make_table(table)) if table else "nothing was measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("quality", __doc__, builtin="quality")
    parser.add_argument("--steps", type=int, default=400, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each path (%(default)s)")
    parser.add_argument(
        "--norms", type=int, metavar="STEPS", help="frozen or trained norms, after so many steps"
    )
    parser.add_argument("--small", action="store_true", help="the tiny model on small pictures")
    options = parser.parse_args(arguments)
    if options.small and options.norms:
        parser.error("expected --norms or --small: the norms are those of the light model")
    work = options.work / "small" if options.small else options.work
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        (make_small_data if options.small else make_judged_data)(work)
        backbone = pretrain(work, options.norms) if options.norms else None
        runs: list[Run] = [
            (
                {"way": way, "seed": str(seed)},
                partial(train_once, way, seed, work, options.steps, backbone, small=options.small),
            )
            for seed, way in product(range(options.seeds), NORMS if backbone else WAYS)
        ]
        measure_in_turns(
            runs,
            rows,
            repeats=1,
            about={"steps": options.steps, "norms": options.norms},
            path=options.json,
        )

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
