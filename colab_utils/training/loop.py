"""The training loop: shards in, checkpoints, losses and COCO average precision out."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import Subset

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import make_loader
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.evaluation import evaluate
from colab_utils.training.model import GPU_MODEL, LIGHT_MODEL, assemble_mask_rcnn, build_mask_rcnn
from colab_utils.training.report import LogLine, LossPoint, TrainingPlan, TrainReport
from colab_utils.training.session import TrainingSession
from colab_utils.training.step import choose_precision, choose_rate

__all__ = ["LogLine", "TrainReport", "train"]


def train(
    shards: str | Path,
    run: str | Path,
    *,
    local: str | Path | None = None,
    limit_gb: float | None = None,
    val_shards: str | Path | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    model: str | None = None,
    weights: str | None = "coco",
    batch_size: int | Literal["auto"] = "auto",
    resume: Literal["auto", "never"] = "auto",
    seed: int = 0,
    checkpoint_steps: int | None = None,
    learning_rate: float | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    workers: int | Literal["auto"] = "auto",
    log: Callable[[TrainingPlan | LogLine], object] | None = None,
    log_steps: int = 10,
    device: str | torch.device | None = None,
) -> TrainReport:
    """Train a Mask R-CNN on shards, with checkpoints in ``run`` from which the same call goes on.

    On a CPU, a run that was killed and resumed gives the same losses as one left alone, bit for bit. A resumed run
    keeps its model, sizes, batch size and learning rate where you name none.

    Args:
        shards: Folder of shards; images without objects are left out, as in torchvision's references.
        run: Folder for the checkpoints; while Drive does not answer they wait on this machine's disk.
        local: Folder on the SSD, where ``shards`` lie on Drive: they are copied there while it trains, which begins
            with the first one that has arrived.
        limit_gb: The most that they may take in ``local``, in GB, where the disk is smaller than all of them.
        val_shards: Shards to measure the average precision on after the last step.
        steps: Steps of the whole run, those of earlier sessions included.
        epochs: Passes over the dataset instead of ``steps``. Default: 1.
        model: One of ``MODEL_NAMES``. Default: maskrcnn_resnet50_fpn_v2 on a GPU, the light one on a CPU.
        weights: ``"coco"``, or None for random weights, see ``build_mask_rcnn``.
        batch_size: Images a step. ``"auto"``: 4 on a GPU, 2 on a CPU.
        resume: ``"auto"`` goes on from the newest whole checkpoint; ``"never"`` moves older ones to
            ``run/previous-1`` and so on, and starts anew.
        seed: Decides the order of the images, the flips and the random weights.
        checkpoint_steps: Steps between checkpoints, beside those after the last step and on Ctrl-C. Default: one
            a minute. They are written in a thread while training goes on.
        learning_rate: The highest, after the warm-up. Default: ``choose_rate``.
        min_size: Shorter side in pixels. Default: 800; 192 for the light model on a CPU.
        max_size: Limit of the longer side in pixels. Default: five thirds of ``min_size``.
        workers: Loading workers, see ``make_loader``. ``"auto"`` is one on a CPU, whose cores the step needs.
        log: Called with the plan, then with a line every ``log_steps`` steps. Default: a progress bar instead.
        log_steps: Steps between log lines.
        device: Default: the GPU if there is one.

    Raises:
        DriveLostError: Drive went away, and did not come back before its shards were needed; what was done is saved.
        ColabUtilsError: Bad arguments, no image with objects, a checkpoint of another dataset or model, a
            full disk, a batch too large for the GPU, or a loss that is not a number.
        KeyboardInterrupt: After the step in progress is finished and saved.

    Example:
        >>> report = train("no/such/shards", "runs/first", steps=200, log=print)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/shards. ...
    """
    numbers = {"steps": steps, "epochs": epochs, "checkpoint_steps": checkpoint_steps, "log_steps": log_steps}
    for name, value in {**numbers, "min_size": min_size, "max_size": max_size}.items():
        if value is not None and value < 1:
            raise ColabUtilsError(f"expected {name} of at least 1, found {value}. Pass a larger number.")
    if steps and epochs:
        raise ColabUtilsError(f"expected steps or epochs, found both ({steps} and {epochs}). Pass one of them.")
    if resume not in ("auto", "never"):
        raise ColabUtilsError(f"expected resume 'auto' or 'never', found {resume!r}. Pass one of the two.")
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # read when CUDA starts: memory of batches of many sizes would fall into pieces that fit no batch
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with ExitStack() as ending:
        if local is None:
            dataset = ShardDataset(shards, contiguous_labels=True)
        else:
            dataset = arriving = ArrivingShards(shards, local, limit_gb=limit_gb, contiguous_labels=True, seed=seed)
            ending.callback(arriving.stop)
        validation = ShardDataset(val_shards, contiguous_labels=True) if val_shards else None
        if validation and validation.category_ids != dataset.category_ids:
            raise ColabUtilsError(
                f"expected the same category ids in {val_shards} as in {shards}, found others "
                f"({len(validation.category_ids)} and {len(dataset.category_ids)} categories). "
                "Make both from annotations with the same categories."
            )
        images = Subset(dataset, np.flatnonzero(dataset.has_objects).tolist())
        if not len(images):
            raise ColabUtilsError(
                f"expected images with objects in {shards}, found none in {len(dataset)} images. "
                "Check the annotations that the shards were made from."
            )
        folder = CheckpointFolder(run)
        state = folder.load_newest() if resume == "auto" else None
        known = state["plan"] if state else {}
        device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        on_gpu = device.type == "cuda"
        model = model or known.get("model") or (GPU_MODEL if on_gpu else LIGHT_MODEL)
        min_size = min_size or known.get("min_size") or (192 if model == LIGHT_MODEL and not on_gpu else 800)
        max_size = max_size or known.get("max_size") or round(min_size * 5 / 3)
        if batch_size == "auto":
            batch_size = known.get("batch_size") or (4 if on_gpu else 2)
        if batch_size == known.get("batch_size"):
            learning_rate = learning_rate or known["learning_rate"]
        torch.manual_seed(seed)
        sizes = {"num_classes": dataset.num_classes, "min_size": min_size, "max_size": max_size}
        if state:
            network = assemble_mask_rcnn(model, starts_from=known["starts_from"], **sizes)
        else:
            network = build_mask_rcnn(model, weights=weights, **sizes)
        if workers == "auto" and not on_gpu:
            workers = 1
        loader = make_loader(images, batch_size=batch_size, device=device, workers=workers, deliver="packed", seed=seed)
        plan = TrainingPlan(
            dataset=dataset.fingerprint,
            model=model,
            starts_from=network.starts_from,
            device=str(device),
            precision=str(choose_precision(device)).removeprefix("torch."),
            num_classes=dataset.num_classes,
            images=len(images),
            skipped_images=len(dataset) - len(images),
            batch_size=batch_size,
            min_size=min_size,
            max_size=max_size,
            learning_rate=learning_rate or choose_rate(model, batch_size),
            steps=steps or (epochs or 1) * len(loader),
            seed=seed,
        )
        if state:
            plan = _continue_plan(plan, state, folder)
        folder.prepare(anew=resume == "never")
        if log:
            log(plan)
        with closing(loader):
            session = TrainingSession(plan, network, loader, folder)
            if state:
                session.load_state(state)
            pace = session.run(log=log, log_steps=log_steps, checkpoint_steps=checkpoint_steps)
        return TrainReport(
            steps=session.done,
            losses=tuple(LossPoint(step, loss) for step, loss in enumerate(session.losses, 1)),
            images_per_second=pace.images_per_second,
            wait_share=pace.wait_share,
            checkpoint=str(folder.newest),
            ap=evaluate(network, validation, device=device) if validation else None,
            plan=plan,
        )


def _continue_plan(plan: TrainingPlan, state: dict[str, Any], folder: CheckpointFolder) -> TrainingPlan:
    """The plan with what a checkpoint adds; refuses one of another dataset, model, size or seed."""
    known = state["plan"]
    for key in ("dataset", "model", "min_size", "max_size", "seed"):
        if known[key] != getattr(plan, key):
            raise ColabUtilsError(
                f"expected a checkpoint with {key.replace('_', ' ')} {getattr(plan, key)}, found {known[key]} in "
                f"{folder.newest}. Train into another run folder, or pass resume='never': older checkpoints are then "
                "moved to a folder of their own."
            )
    pairs = [(known["images"], plan.images, "images"), (known["batch_size"], plan.batch_size, "images a batch")]
    changed = " and ".join(f"{now} {what}, before {then}" for then, now, what in pairs if then != now)
    return replace(plan, first_step=state["step"], changed=changed)
