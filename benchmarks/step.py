"""A training step on batches that lie ready, torchvision's way beside ours: `python -m benchmarks.step ...`.

Both train the same model on the same batches. torchvision's way gets float images and dense masks, as its references
hand them over; ours gets packed batches (`compute_losses`). Before anything is timed the losses of both are compared.
Without a GPU it runs small, on the CPU; the JSON says on what.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from itertools import cycle, islice
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch

from benchmarks.command import Run, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed
from colab_utils.loading.folder import CocoFolder
from colab_utils.loading.sample import pack_target
from colab_utils.show.table import make_table
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import LIGHT_MODEL, build_mask_rcnn
from colab_utils.training.step import TrainingStep

__all__ = ["compare_losses", "main", "prepare_batches", "tabulate_runs", "time_steps"]

DATA = ("kept", "objects_300")
WAYS = ("torchvision", "packed")
BATCHES, TIMED = 4, 12
DIFFERENCE = 0.01  # of each loss


def prepare_batches(data: Any, *, batch_size: int, device: str) -> list[tuple[PackedBatch, list[Any], list[Any]]]:
    """Batches on the device: packed, and as float images with dense targets."""
    dataset = CocoFolder(data.images, data.annotations, contiguous_labels=True)
    useful = (sample for sample in map(dataset.__getitem__, range(len(dataset))) if len(sample[1]["labels"]))
    samples = list(islice(useful, BATCHES * batch_size))
    batches = []
    for first in range(0, len(samples), batch_size):
        packed = collate_packed([pack_target(*sample) for sample in samples[first : first + batch_size]])
        batches.append((packed.to(device), packed.to_images(device), packed.to_targets(device)))
    return batches


def compare_losses(model: Any, batches: Sequence[tuple[PackedBatch, list[Any], list[Any]]]) -> float:
    """The largest relative difference of any loss of any batch, with the same proposals sampled.

    Raises:
        ColabUtilsError: It is over 1 %.
    """
    worst = 0.0
    for packed, images, targets in batches:
        torch.manual_seed(0)
        theirs = model(images, [dict(target) for target in targets])
        torch.manual_seed(0)
        ours = compute_losses(model, packed)
        differences = [abs(ours[name].item() / loss.item() - 1) for name, loss in theirs.items() if loss]
        worst = float(np.max([worst, *differences]))  # of a NaN too
    if not worst <= DIFFERENCE:
        raise ColabUtilsError(f"expected losses within {DIFFERENCE:.0%} of torchvision's, found {worst:.1%}")
    return worst


def time_steps(way: str, step: TrainingStep, batches: Sequence[Any]) -> dict[str, float]:
    """Median milliseconds of a step; on a GPU also the most memory that steps took beyond what was there, MB."""
    on_gpu = step.device.type == "cuda"
    clock: Callable[[], Any] = torch.cuda.synchronize if on_gpu else int
    chosen = [(packed,) if way == "packed" else (images, targets) for packed, images, targets in batches]
    step(*chosen[0])
    before = torch.cuda.memory_allocated() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times_ms = []
    for given in islice(cycle(chosen), TIMED):
        clock()
        began_s = perf_counter()
        step(*given) if way == "packed" else step(given[0], [dict(target) for target in given[1]])
        clock()
        times_ms.append((perf_counter() - began_s) * 1000)
    memory = {"memory_mb": (torch.cuda.max_memory_allocated() - before) / 1e6} if on_gpu else {}
    return {"step_ms": median(times_ms), **memory}


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest] of each way, and ours over torchvision's in the same repeat."""
    table = []
    for name in dict.fromkeys(row["data"] for row in rows):
        of = {way: [row for row in rows if (row["data"], row["way"]) == (name, way)] for way in WAYS}
        pairs = list(zip(*of.values(), strict=False))
        if not pairs:
            continue
        found: dict[str, Any] = {"data": name}
        for way, runs in of.items():
            found[f"{way}, ms a step"] = _spread([run["step_ms"] for run in runs])
        found["times as fast"] = _spread([theirs["step_ms"] / ours["step_ms"] for theirs, ours in pairs])
        for way, runs in of.items():
            if "memory_mb" in runs[0]:
                found[f"{way}, MB"] = f"{median(run['memory_mb'] for run in runs):.0f}"
        table.append(found)
    return str(make_table(table)) if table else "nothing was measured"


def _spread(values: Sequence[float]) -> str:
    return f"{median(values):.2f} [{min(values):.2f}-{max(values):.2f}]"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser("step", __doc__)
    parser.add_argument("--model", default="maskrcnn_resnet50_fpn" if device == "cuda" else LIGHT_MODEL)
    parser.add_argument("--min-size", type=int, default=800 if device == "cuda" else 320)
    parser.add_argument("--batch-size", type=int, default=8 if device == "cuda" else 2)
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        runs: list[Run] = []
        differences = {}
        for name in DATA:
            data = make_data(name, options.work, options.images, options.annotations, samples=300)
            batches = prepare_batches(data, batch_size=options.batch_size, device=device)
            classes = 1 + max(int(target["labels"].max()) for _, _, targets in batches for target in targets)
            torch.manual_seed(0)
            model = build_mask_rcnn(
                options.model, num_classes=classes, weights=None, min_size=options.min_size,
                max_size=round(options.min_size * 5 / 3),
            )  # fmt: skip
            step = TrainingStep(model, device)
            differences[name] = compare_losses(step.model, batches)
            runs += [({"data": name, "way": way}, partial(time_steps, way, step, batches)) for way in WAYS]
        about = {
            "device": device, "model": options.model, "min_size": options.min_size, "batch_size": options.batch_size,
            "differences": differences,
        }  # fmt: skip
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
