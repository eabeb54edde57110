"""Lighter models and pruning, compared with the usual models: `python -m benchmarks.models --json
FILE`.

Each trains on the built-in dataset from random weights for the same number of steps: milliseconds a
step and an evaluated image, memory, and average precision. Memory is what does not depend on the
device: weights with gradients and the optimiser's averages, and what the forward pass keeps for the
backward pass. The large models are timed, and trained only with ``--all``: on a CPU that takes an
hour.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from itertools import chain, product, repeat
from pathlib import Path
from statistics import mean, median
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.models.detection.mask_rcnn import MaskRCNNHeads, MaskRCNNPredictor

from benchmarks.command import Run, make_parser, measure_in_turns, run_to_end
from benchmarks.data import make_judged_data
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.show.table import make_table
from colab_utils.training.detection import describe_detections, detect
from colab_utils.training.evaluate import evaluate
from colab_utils.training.losses import compute_losses
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, assemble_mask_rcnn
from colab_utils.training.schedule import choose_rate, compute_rate, make_optimizer
from colab_utils.training.step import TrainingStep

__all__ = [
    "MODELS",
    "build",
    "count_kept_bytes",
    "main",
    "measure_model",
    "prune_weights",
    "tabulate_runs",
]

LARGE = (GPU_MODEL, "maskrcnn_resnet50_fpn")
SMALL_HEADS = f"{LIGHT_MODEL}, heads of half the channels"
PRUNED = f"{LIGHT_MODEL}, half of the weights pruned"
MODELS = (*LARGE, LIGHT_MODEL, SMALL_HEADS, PRUNED)
BATCH_SIZE = 2
TIMED = 8
PRUNED_SHARE = 0.5
"""Of the weights."""
PRUNED_AFTER = 0.5
"""Of the steps."""


def build(name: str, *, num_classes: int, min_size: int) -> nn.Module:
    """One of `MODELS`, from random weights."""
    known, _, change = name.partition(", ")
    sizes = {"min_size": min_size, "max_size": round(min_size * 5 / 3)}
    model = assemble_mask_rcnn(known, num_classes=num_classes, starts_from="random", **sizes)
    if change and name == SMALL_HEADS:
        heads = model.roi_heads
        channels = model.backbone.out_channels
        hidden = heads.box_head.fc7.out_features // 2
        narrow = channels // 2
        heads.box_head = TwoMLPHead(channels * 7 * 7, hidden)
        heads.box_predictor = FastRCNNPredictor(hidden, num_classes)
        heads.mask_head = MaskRCNNHeads(channels, (narrow,) * 4, 1)
        heads.mask_predictor = MaskRCNNPredictor(narrow, narrow, num_classes)
    return model


def prune_weights(model: nn.Module) -> None:
    """Set the smallest half of all convolutions' and linear layers' weights to zero, for good while
    it trains.
    """
    layers = [
        (layer, "weight") for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)
    ]
    prune.global_unstructured(layers, prune.L1Unstructured, amount=PRUNED_SHARE)


def count_kept_bytes(model: nn.Module, batch: Any) -> int:
    """Bytes that a forward pass keeps for the backward pass, the model's own weights left out."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, tuple[int, Tensor]] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            # The tensor is held, because its address would be given out again.
            kept[storage.data_ptr()] = storage.nbytes(), tensor.detach()
        # The tensor itself leads to its graph, which leads to it: none of them would be freed.
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        compute_losses(model, batch)
    return sum(size for size, _ in kept.values())


def measure_model(
    name: str, work: Path, *, steps: int, seed: int, min_size: int, device: str
) -> dict[str, float]:
    """Train (0 ``steps``: not), evaluate, and time one model."""
    torch.manual_seed(seed)
    data = ShardDataset(work / "train", contiguous_labels=True)
    validation = ShardDataset(work / "val", contiguous_labels=True)
    model = build(name, num_classes=data.num_classes, min_size=min_size)
    known = name.partition(", ")[0]
    step = TrainingStep(
        model, device, optimizer=make_optimizer(model, name=known, learning_rate=0.0)
    )
    highest = choose_rate(known, BATCH_SIZE)
    result = dict[str, float]()
    loader = make_loader(
        data, batch_size=BATCH_SIZE, workers=1, seed=seed, device=device, deliver="packed"
    )
    with closing(loader):
        batches: Any = chain.from_iterable(repeat(loader))
        for number in range(steps):
            if name == PRUNED and number == int(PRUNED_AFTER * steps):
                prune_weights(model)
                # The optimizer is one of the new parameters.
                step.optimizer = make_optimizer(model, name=known, learning_rate=0.0)
            for group in step.optimizer.param_groups:
                group["lr"] = compute_rate(number, steps=steps, highest=highest)
            step(next(batches), flips=(torch.rand(BATCH_SIZE) < 0.5).tolist())
        batch = next(batches)
        result["step_ms"] = _time(lambda _: step(batch), device)
        result["kept_mb"] = count_kept_bytes(model, batch) / 1e6
    state = {
        id(t): t
        for values in step.optimizer.state.values()
        for t in values.values()
        if torch.is_tensor(t)
    }
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    # What is pruned is a mask, in a buffer.
    tensors = [*model.parameters(), *model.buffers(), *gradients, *state.values()]
    result["weights_mb"] = sum(tensor.nbytes for tensor in tensors) / 1e6
    if steps:
        ap = evaluate(model, validation, device=device)
        result |= {"box_ap": ap.bbox, "mask_ap": ap.segm}
    model.eval()
    images = [validation.decode(validation.read(i)) for i in range(TIMED + 2)]

    def detect_image(i: int) -> None:
        (objects,) = detect(model, [images[i]], device=device)
        describe_detections(
            objects, image_id=i, size=images[i].shape[1:], category_ids=validation.category_ids
        )

    result["detect_ms"] = _time(detect_image, device)
    return result


def _time(call: Callable[[int], Any], device: str) -> float:
    """Median milliseconds of a call, after two that do not count."""
    clock: Callable[[], Any] = torch.cuda.synchronize if device == "cuda" else int
    times_ms = []
    for i in range(TIMED + 2):
        clock()
        began_s = perf_counter()
        call(i)
        clock()
        times_ms.append((perf_counter() - began_s) * 1000)
    return median(times_ms[2:])


def tabulate_runs(rows: Sequence[dict[str, Any]]) -> str:
    """Means over the seeds."""
    table = []
    for name in dict.fromkeys(row["model"] for row in rows):
        runs = [row for row in rows if row["model"] == name]
        result = {
            key: mean(run[key] for run in runs)
            for key in runs[0]
            if key not in ("model", "seed", "repeat")
        }
        table.append(
            {
                "model": name,
                "ms a step": f"{result['step_ms']:.0f}",
                "ms an image evaluated": f"{result['detect_ms']:.0f}",
                "weights, gradients, averages, MB": f"{result['weights_mb']:.0f}",
                "kept for backward, MB": f"{result['kept_mb']:.0f}",
                "box AP": _spread([run.get("box_ap") for run in runs]),
                "mask AP": _spread([run.get("mask_ap") for run in runs]),
                "seeds": len(runs),
            }
        )
    return str(make_table(table)) if table else "nothing was measured"


def _spread(values: Sequence[float | None]) -> str:
    seen = [value for value in values if value is not None]
    return f"{mean(seen):.3f} [{min(seen):.3f}-{max(seen):.3f}]" if seen else "not trained"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    parser = make_parser("models", __doc__, builtin="quality")
    parser.add_argument("--steps", type=int, default=400, help="of each run (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each model (%(default)s)")
    parser.add_argument("--min-size", type=int, default=800 if device == "cuda" else 192)
    parser.add_argument(
        "--all", action="store_true", help="train the large models too; always on a GPU"
    )
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        make_judged_data(options.work)
        runs: list[Run] = []
        for seed, name in product(range(options.seeds), MODELS):
            trains = options.all or device == "cuda" or name not in LARGE
            measured = partial(
                measure_model,
                name,
                options.work,
                steps=options.steps if trains else 0,
                seed=seed,
                min_size=options.min_size,
                device=device,
            )
            runs.append(({"model": name, "seed": str(seed)}, measured))
        about = {
            "device": device,
            "steps": options.steps,
            "min_size": options.min_size,
            "batch_size": BATCH_SIZE,
        }
        measure_in_turns(runs, rows, repeats=1, about=about, path=options.json)

    return run_to_end(measure, lambda: tabulate_runs(rows))


if __name__ == "__main__":
    sys.exit(main())
