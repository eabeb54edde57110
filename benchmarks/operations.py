"""What one training step asks of a device, counted without one: `python -m benchmarks.operations
--json FILE`.

A fast GPU waits for its next operation, and for every value that the CPU reads from it. Both can be
counted on a CPU: the operations that torch dispatches in one step (forward, backward, optimizer),
the readings (``nonzero``, scalars), the calls of ``nms``, and the bytes of the largest tensor. Ours
beside the step of torchvision's references, on the same images. The counts say nothing about the
time that an operation takes.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.command import make_parser, run_to_end
from benchmarks.step import Batch, ReferenceStep, make_model
from colab_utils.loading import masks
from colab_utils.loading.batch import collate_packed, pack_target
from colab_utils.runtime import write_file
from colab_utils.show.table import make_table
from colab_utils.training import losses
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, fold_norms
from colab_utils.training.step import TrainingStep

__all__ = ["Counted", "count_step", "main", "make_batch", "make_small"]

MODELS = ("maskrcnn_resnet50_fpn", GPU_MODEL, LIGHT_MODEL)
BATCH_SIZES = (2, 8, 16)
# pixels: the calls are the same ones, and a batch of 16 takes seconds
MIN_SIZE, USUAL_SIZE = 64, 800
REGIONS = 16  # of each image, not 512
STRIDES, RATIOS = (4, 8, 16, 32, 64), 3
WAITING = ("nonzero", "_local_scalar_dense", "masked_select")


class Counted(TorchDispatchMode):
    """Counts what torch dispatches while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.operations, self.waits, self.suppressions, self.largest_bytes = 0, 0, 0, 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        self.operations += 1
        self.waits += function.overloadpacket.__name__ in WAITING
        self.suppressions += function.overloadpacket.__name__ == "nms"
        self.largest_bytes = max(self.largest_bytes, made.nbytes if isinstance(made, Tensor) else 0)
        return made


def make_batch(size: int, *, objects: int = 8) -> Batch:
    """Images of 640 x 480 pixels with so many square objects each, at places that differ."""
    samples, chance = [], torch.Generator().manual_seed(0)
    for number in range(size):
        corners = torch.randint(0, 380, (objects, 2), generator=chance)
        boxes = torch.cat(
            [corners, corners + torch.randint(16, 100, (objects, 1), generator=chance)], 1
        )
        drawn = torch.zeros(objects, 480, 640, dtype=torch.uint8)
        for mask, (x0, y0, x1, y1) in zip(drawn, boxes.tolist(), strict=True):
            mask[y0:y1, x0:x1] = 1
        target = {
            "boxes": boxes.float(),
            "labels": torch.ones(objects, dtype=torch.int64),
            "masks": drawn,
            "image_id": number,
            "area": drawn.sum((1, 2)).float(),
            "iscrowd": torch.zeros(objects, dtype=torch.int64),
        }
        image = torch.randint(0, 255, (3, 480, 640), dtype=torch.uint8, generator=chance)
        samples.append(pack_target(image, target))
    packed = collate_packed(samples)
    return Batch(packed, packed.to_images("cpu"), packed.to_targets("cpu"))


def make_small(name: str) -> Any:
    """A model that samples few regions of small images, which makes it quick and changes no count
    but of bytes.
    """
    model: Any = make_model(name, num_classes=2, min_size=MIN_SIZE)
    model.roi_heads.fg_bg_sampler.batch_size_per_image = REGIONS
    return model


def _count_candidates(model: Any, side: int) -> int:
    """Boxes of an image of 4:3 that go into the non-maximum suppression."""
    cells = (-(-side // stride) * -(-side * 4 // (3 * stride)) for stride in STRIDES)
    return sum(min(model.rpn.pre_nms_top_n(), RATIOS * count) for count in cells)


def count_step(model: Any, batch: Batch, *, ours: bool) -> dict[str, int]:
    """Operations, waits and bytes of the largest tensor of one step, after one that is not counted.

    Optimizers are those that a GPU gets by default. Limits of memory are a GPU's, scaled down as
    the images are.
    """
    model, side = copy.deepcopy(model).train(), model.transform.min_size[0]
    candidates = _count_candidates(model, side) / _count_candidates(model, USUAL_SIZE)
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if ours:
        fold_norms(model)
        step: Any = TrainingStep(
            model, "cpu", optimizer=torch.optim.SGD(trainable, lr=1e-4, momentum=0.9, fused=True)
        )
        given: Any = batch.packed
    else:
        step, given = ReferenceStep(model, "cpu"), batch
        step.optimizer = torch.optim.SGD(
            trainable, lr=1e-4, momentum=0.9, weight_decay=1e-4, foreach=True
        )
    with ExitStack() as stack:
        for limits, share in (
            (losses._PAIRS, (side / USUAL_SIZE) ** 2),
            (losses._NMS_BOXES, candidates),
            (masks.CHUNK_BYTES, 1.0),
        ):
            stack.enter_context(patch.dict(limits, cpu=int(limits["cuda"] * share)))
        step(given)
        with Counted() as counted:
            step(given)
    return {
        "operations": counted.operations,
        "waits": counted.waits + ours,  # the one copy to the CPU, which a CPU does not see
        "nms": counted.suppressions,
        "largest_mb": round(counted.largest_bytes / 1e6),
    }


def tabulate_counts(rows: Sequence[dict[str, Any]]) -> str:
    """Ours beside the references', and their ratio."""
    table = []
    for name, size in dict.fromkeys((row["model"], row["batch_size"]) for row in rows):
        ours, theirs = (
            next(
                row
                for row in rows
                if (row["model"], row["batch_size"], row["step"]) == (name, size, step)
            )
            for step in ("ours", "references")
        )
        table.append(
            {
                "model": name,
                "batch": size,
                "operations": f"{ours['operations']:,}",
                "references'": f"{theirs['operations']:,}",
                "ratio": f"{ours['operations'] / theirs['operations']:.2f}",
                "waits": ours["waits"],
                "references' waits": theirs["waits"],
                "nms": ours["nms"],
                "references' nms": theirs["nms"],
                "largest MB": ours["largest_mb"],
                "references' MB": theirs["largest_mb"],
            }
        )
    return str(make_table(table)) if table else "nothing was counted"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("operations", __doc__, builtin="operations")
    parser.add_argument("--models", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=BATCH_SIZES)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        for name in options.models:
            model = make_small(name)
            for size in options.batch_sizes:
                batch = make_batch(size)
                for step in ("ours", "references"):
                    print(f"{name}, batch of {size}, {step}", file=sys.stderr, flush=True)
                    rows.append(
                        {
                            "model": name,
                            "batch_size": size,
                            "step": step,
                            **count_step(model, batch, ours=step == "ours"),
                        }
                    )
                    write_file(options.json, json.dumps(rows, indent=1).encode())

    return run_to_end(measure, lambda: tabulate_counts(rows))


if __name__ == "__main__":
    sys.exit(main())
