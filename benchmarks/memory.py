"""What a training step holds and takes: `python -m benchmarks.memory --json FILE`.

Forward and backward pass of Mask R-CNN at 800 x 1333 pixels, by torchvision's own path, from packed
batches, and with each batch in two parts. On a GPU its allocator says what was held; without one
the bytes of all tensors are counted, which leaves out what a GPU's libraries need for themselves.
"""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Sequence
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from benchmarks.command import Run, make_parser, measure_in_turns, run_to_end
from benchmarks.gpu import make_batch
from benchmarks.step import Batch, make_model
from colab_utils.show.table import make_table
from colab_utils.training.step import TrainingStep

__all__ = ["CountedMemory", "main", "measure_step", "tabulate_runs"]

OBJECTS = (7, 300)
TORCHVISION = "torchvision's own path"
PACKED = "packed batches"
PARTS = "+ each batch in 2 parts"
# To look for what has gone takes long.
_LOOK_BYTES = 300_000


class CountedMemory(TorchDispatchMode):
    """Counts the bytes of all storages that live, as a GPU's allocator does, and runs out above
    ``limit``.
    """

    def __init__(self, limit: float = float("inf")) -> None:
        super().__init__()
        self.limit = limit
        self.held = 0
        self.peak = 0
        self._known: dict[int, tuple[StorageWeakRef, int]] = {}

    def count(self, tensors: Any) -> None:
        """Take in what was made before: weights."""
        for tensor in tensors:
            self._add(tensor)

    def count_held(self) -> int:
        """Bytes of all that lives now."""
        self._known = {key: known for key, known in self._known.items() if not known[0].expired()}
        self.held = sum(size for _, size in self._known.values())
        return self.held

    def reset_peak(self) -> None:
        """Begin to look for the highest sum anew."""
        self.peak = self.count_held()

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                self._add(leaf)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._known and not self._known[key][0].expired():
            return
        self.held += storage.nbytes() - (self._known[key][1] if key in self._known else 0)
        self._known[key] = StorageWeakRef(storage), storage.nbytes()
        if self.held > min(self.peak + _LOOK_BYTES, self.limit):
            self.peak = max(self.peak, self.count_held())
        if self.held > self.limit:
            raise torch.cuda.OutOfMemoryError(
                f"CUDA out of memory: {self.held:,} of {self.limit:,} bytes"
            )


def measure_step(model: nn.Module, batch: Batch, device: str, *, way: str) -> dict[str, float]:
    """The most megabytes of a step's gradients, weights left out, and the CPU seconds of another.

    Infinite where a GPU's memory runs out.
    """
    step = TrainingStep(copy.deepcopy(model).to(device), device)
    step.parts = 2 if way == PARTS else 1
    moved = [
        {key: value.to(device) for key, value in target.items() if isinstance(value, Tensor)}
        for target in batch.targets
    ]
    given = (
        ([image.to(device) for image in batch.images], moved)
        if way == TORCHVISION
        else (batch.packed.to(device),)
    )
    torch.manual_seed(0)
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        fits = step.add_gradients(*given) is not None
        peak = torch.cuda.max_memory_allocated() - before if fits else math.inf
    else:
        with (counted := CountedMemory()):
            step.add_gradients(*given)
        peak = counted.peak
    began_s = process_time()
    step.add_gradients(*given)
    return {"peak_mb": peak / 1e6, "cpu_s": process_time() - began_s, "parts": step.parts}


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """What each way holds and takes, and how much that is beside torchvision's own path."""
    firsts = {row["objects"]: row for row in rows if row["way"] == TORCHVISION}
    table = []
    for row in rows:
        first = firsts[row["objects"]]
        table.append(
            {
                "objects an image": row["objects"],
                "way": row["way"],
                "MB": f"{row['peak_mb']:,.0f}",
                "of torchvision's MB": f"{row['peak_mb'] / first['peak_mb']:.2f}",
                "CPU seconds": f"{row['cpu_s']:.1f}",
            }
        )
    return str(make_table(table)) if table else "nothing was measured"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser("memory", __doc__, builtin="memory")
    parser.add_argument("--batch-size", type=int, default=2)
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        runs: list[Run] = []
        model = make_model("maskrcnn_resnet50_fpn", num_classes=2, min_size=800)
        for objects in OBJECTS:
            batch = make_batch(options.batch_size, objects=objects, height=800, width=1333)
            for way in (TORCHVISION, PACKED, PARTS):
                run = partial(measure_step, model, batch, device, way=way)
                runs.append(({"objects": f"{objects}", "way": way}, run))
        about = {
            "device": device,
            "batch_size": options.batch_size,
        }
        measure_in_turns(runs, rows, repeats=1, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
