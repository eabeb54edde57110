"""What evaluation costs for each image: `python -m benchmarks.evaluating --images DIR ... --json
FILE`.

The same model finds 100 objects in each image, one image at a time. torchvision makes its masks at
the size of the image, and they are encoded as ``references/detection/coco_eval.py`` does it; ours
are drawn in their boxes by another process. Both give the same results, which is checked before
anything is timed. The model alone is timed, too: no evaluation takes less.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from contextlib import nullcontext
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import torch
from pycocotools import mask as coco_mask
from torch import Tensor, nn

from benchmarks.command import Run, format_spread, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_data
from benchmarks.memory import CountedMemory
from benchmarks.step import make_model
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.processes import fork_pool
from colab_utils.shards.write import write_shards
from colab_utils.show.table import make_table
from colab_utils.training.detection import describe_detections, detect
from colab_utils.training.model import LIGHT_MODEL

__all__ = ["WAYS", "check_results", "main", "measure_way", "tabulate_runs"]

DATA = ("kept", "photos_12mp")
ALONE = "the model alone"
TORCHVISION = "torchvision's references"
OURS = "in boxes, another process"
WAYS = (ALONE, TORCHVISION, OURS)


def describe_stock(model: nn.Module, image: Tensor, *, device: str) -> list[Any]:
    """The masks that torchvision's references pass to pycocotools."""
    with torch.inference_mode():
        result = model([image.to(device).float().div_(255)])[0]
        masks = result["masks"].to("cpu") > 0.5
    return [coco_mask.encode(np.array(mask[0], dtype=np.uint8, order="F")) for mask in masks]


def check_results(model: nn.Module, dataset: ShardDataset, device: str) -> None:
    """Compare the masks of the first image.

    Raises:
        ColabUtilsError: They differ, or there are none.
    """
    image = dataset.decode(dataset.read(0))
    (prediction,) = detect(model, [image], device=device)
    ours = [
        result["segmentation"]
        for result in _describe(prediction, image.shape[1:], dataset.category_ids)
    ]
    theirs = describe_stock(model, image, device=device)
    same = sum(own == other for own, other in zip(ours, theirs, strict=False))
    # Pixels at exactly the threshold may differ between a GPU and a CPU.
    count = len(theirs)
    least = 0.9 * count if device == "cuda" else count
    if not theirs or len(ours) != count or same < least:
        raise ColabUtilsError(
            f"expected the masks of torchvision's references, found {same} of {count} the same"
        )


def _describe(
    result: dict[str, Any], size: Sequence[int], category_ids: dict[int, int]
) -> list[dict[str, Any]]:
    return describe_detections(result, image_id=0, size=size, category_ids=category_ids)


def measure_way(
    way: str, model: nn.Module, dataset: ShardDataset, *, device: str, images: int
) -> dict[str, float]:
    """Milliseconds an image, those in this process too, and the most megabytes of tensors on the
    device.
    """
    with fork_pool(1, torch.set_num_threads, 1) as pool:

        def evaluate_image(i: int) -> Future[Any] | None:
            image = dataset.decode(dataset.read(i))
            if way == TORCHVISION:
                describe_stock(model, image, device=device)
                return None
            (prediction,) = detect(model, [image], device=device)
            return (
                pool.submit(_describe, prediction, image.shape[1:], dataset.category_ids)
                if way == OURS
                else None
            )

        wait(filter(None, [evaluate_image(0)]))
        began_s = perf_counter()
        drawing = [evaluate_image(i) for i in range(images)]
        own_s = perf_counter() - began_s
        wait(filter(None, drawing))
        total_s = perf_counter() - began_s
        counted = CountedMemory()
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with nullcontext() if device == "cuda" else counted:
            evaluate_image(0)
        peak = torch.cuda.max_memory_allocated() if device == "cuda" else counted.peak
    return {
        "image_ms": total_s / images * 1000,
        "own_ms": own_s / images * 1000,
        "peak_mb": peak / 1e6,
    }


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Medians [lowest-highest] of each way."""
    table = []
    for data, way in dict.fromkeys((row["data"], row["way"]) for row in rows):
        rows_of_way = [row for row in rows if (row["data"], row["way"]) == (data, way)]
        table.append(
            {
                "data": data,
                "way": way,
                "ms an image": format_spread([row["image_ms"] for row in rows_of_way], ".0f"),
                "in the training process": format_spread(
                    [row["own_ms"] for row in rows_of_way], ".0f"
                ),
                "MB": f"{median(row['peak_mb'] for row in rows_of_way):,.0f}",
            }
        )
    return str(make_table(table)) if table else "nothing was measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser("evaluating", __doc__)
    parser.add_argument(
        "--model", default="maskrcnn_resnet50_fpn" if device == "cuda" else LIGHT_MODEL
    )
    parser.add_argument("--min-size", type=int, default=800 if device == "cuda" else 320)
    parser.add_argument(
        "--evaluated", type=int, default=16, help="images of each run (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=3, help="of each, in turns (%(default)s)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        runs: list[Run] = []
        for name in DATA:
            data = make_data(name, options.work, options.images, options.annotations, samples=300)
            shards = data.folder / "evaluated"
            write_shards(data.images, data.annotations, shards=shards, storage="keep")
            dataset = ShardDataset(shards, contiguous_labels=True)
            model: Any = make_model(
                options.model, num_classes=dataset.num_classes, min_size=options.min_size
            )
            # A model that has learned nothing finds 100 objects in an image.
            model.to(device).eval().roi_heads.score_thresh = 0.0
            check_results(model, dataset, device)
            images = min(options.evaluated, len(dataset))
            for way in WAYS:
                run: Callable[[], dict[str, float]] = partial(
                    measure_way, way, model, dataset, device=device, images=images
                )
                runs.append(({"data": name, "way": way}, run))
        about = {
            "device": device,
            "model": options.model,
            "min_size": options.min_size,
            "evaluated": options.evaluated,
        }
        measure_in_turns(runs, rows, repeats=options.repeats, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
