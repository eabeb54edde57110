"""Train a Mask R-CNN: ``train`` checks what was asked for, opens the data, and builds what `Trainer` runs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.transforms import Transforms
from colab_utils.training.augment import Augment, choose_shapes, list_scales, resize_all
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.distributed import Ranks, join_ranks
from colab_utils.training.memory import find_memory_probe, plan_memory
from colab_utils.training.model import GPU_MODEL, assemble_mask_rcnn, build_mask_rcnn, fold_norms
from colab_utils.training.settings import (
    LogLine,
    LossPoint,
    TrainingImages,
    TrainingPlan,
    TrainReport,
    check_at_least_one,
    check_objects,
    choose_settings,
    open_images,
)
from colab_utils.training.step import TrainingStep, choose_rate, make_optimizer
from colab_utils.training.trainer import Trainer

__all__ = ["LogLine", "TrainReport", "TrainingPlan", "train"]


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
    weights: str | Path | None = "coco",
    batch_size: int | Literal["auto"] = "auto",
    resume: Literal["auto", "never"] = "auto",
    seed: int = 0,
    checkpoint_steps: int | None = None,
    learning_rate: float | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    augment: Augment | Transforms | None = None,
    ema: float | None = None,
    workers: int | Literal["auto"] = "auto",
    log: Callable[[TrainingPlan | LogLine], object] | None = None,
    log_steps: int = 10,
    device: str | torch.device | None = None,
) -> TrainReport:
    """Train a Mask R-CNN on shards, with checkpoints in ``run`` from which the same call continues.

    On a CPU, a run that was killed and resumed gives the same losses as one left alone, bit for bit. A resumed run
    keeps its model, sizes, batch size, augmentation and learning rate where you name none; with another batch size it
    continues with the images that its epoch had left. On a GPU the heaviest batch is trained once before the first
    step: what it takes to make it fit is done and reported.

    Under ``torchrun`` all processes train one model by ``DistributedDataParallel``: each gets its share of every batch,
    and the first one evaluates and writes the files.

    Args:
        shards: Folder of shards; images without objects are left out, as in torchvision's references.
        run: Folder for the checkpoints; while Drive does not answer they wait on this machine's disk.
        local: Folder on the SSD, where ``shards`` lie on Drive: they are copied there during training, which begins
            with the first one that has arrived.
        limit_gb: The most that they may take in ``local``, in GB, where the disk is smaller than all of them.
        val_shards: Shards to measure the average precision on, after each epoch and after the last step. The weights
            with the highest one of masks are kept as ``best-STEP.pt``.
        steps: Steps of the run, those of earlier sessions included.
        epochs: Passes over the dataset instead of ``steps``. Default: 1.
        model: One of ``MODEL_NAMES``. Default: maskrcnn_resnet50_fpn_v2 on a GPU, the light one on a CPU.
        weights: ``"coco"``; the folder of another run, to continue from its weights with other data; or None for
            random weights. See ``build_mask_rcnn``.
        batch_size: Images a step, over all processes. ``"auto"``: on a GPU the largest of 16, 8, 4, 2 and 1 a process
            whose heaviest batch fits; 2 a process on a CPU, and with transforms of your own.
        resume: ``"auto"`` continues from the newest complete checkpoint; ``"never"`` moves older ones to
            ``run/previous-1`` and so on, and starts anew.
        seed: Decides the order of the images, the flips and the random weights.
        checkpoint_steps: Steps between checkpoints. Default: one a minute, or up to five minutes where one takes more
            than a hundredth of that from the steps, and at the end of an epoch. There are others after the last step,
            on Ctrl-C and on errors. They are written in a thread while training goes on.
        learning_rate: The highest, after the warm-up. Default: ``choose_rate``, which follows the batch size.
        min_size: Shorter side in pixels. Default: 800; 192 for the light model on a CPU.
        max_size: Limit of the longer side in pixels. Default: five thirds of ``min_size``.
        augment: ``"flip"``, the default, mirrors half of the images; ``"multiscale"`` also takes 0.6 to 1 of
            ``min_size``; ``"none"``; or your own ``torchvision.transforms.v2`` of (image, target), on the device.
        ema: Average the weights with this decay, say 0.999, and evaluate the average. Default: no average.
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
    _check_arguments(steps=steps, epochs=epochs, checkpoint_steps=checkpoint_steps, log_steps=log_steps, resume=resume)
    place = _choose_device(device)
    transforms = augment if callable(augment) else None
    asked = {
        "model": model, "min_size": min_size, "max_size": max_size, "ema": ema, "learning_rate": learning_rate,
        "augment": "own" if transforms else augment, "batch_size": None if batch_size == "auto" else batch_size,
    }  # fmt: skip
    choose_settings({}, on_gpu=place.type == "cuda", **asked)  # what is wrong is reported before anything is opened
    with ExitStack() as stack:
        ranks = stack.enter_context(join_ranks(place))
        images = open_images(
            shards, local=local, limit_gb=limit_gb, val_shards=val_shards, seed=seed, ranks=ranks.count
        )
        if isinstance(images.dataset, ArrivingShards):
            stack.callback(images.dataset.stop)
        folder = CheckpointFolder(run)
        state = ranks.send(folder.load_newest() if resume == "auto" and ranks.is_first else None)
        plan = _make_plan(asked, images, state, device=place, ranks=ranks, seed=seed)
        if state:
            _check_checkpoint(plan, state, folder, transforms)
        check_objects(images, min_size=plan.min_size, max_size=plan.max_size)
        step, plan = _build_step(plan, images, weights=weights, state=state, device=place, ranks=ranks)
        plan = _plan_batches(plan, step, images, plans_memory=transforms is None)
        loader = make_loader(
            images.subset, batch_size=plan.batch_size, device=place, seed=seed, rank=ranks.rank, ranks=ranks.count,
            workers=1 if workers == "auto" and place.type == "cpu" else workers,
            deliver="dense" if transforms else "packed", transforms=transforms,
        )  # fmt: skip
        stack.enter_context(closing(loader))
        changed = _restore_order(loader, state, len(images.rows)) if state else ""
        total = steps or _count_steps(loader, plan.first_step, epochs or 1)
        plan = replace(plan, steps=total, changed=changed)
        if ranks.is_first:
            folder.prepare(anew=resume == "never")
        trainer = Trainer(plan, step, loader, images, folder)
        stack.callback(trainer.writer.close)
        if state:
            trainer.load_state(state)
            _explain_resumed(plan, state, run)
        own_log = log if ranks.is_first else None
        if own_log:
            own_log(plan)
        trainer.run(log=own_log, log_steps=log_steps, checkpoint_steps=checkpoint_steps)
        pace = trainer.timer.total
        return TrainReport(
            steps=trainer.done,
            losses=tuple(LossPoint(number, loss) for number, loss in enumerate(trainer.losses, 1)),
            images_per_second=pace.images_per_second,
            wait_share=pace.wait_share,
            checkpoint=str(folder.newest),
            ap=trainer.ap,
            plan=plan,
            best=trainer.best,
        )


def _check_arguments(*, steps: int | None, epochs: int | None, resume: str, **more: int | None) -> None:
    check_at_least_one(steps=steps, epochs=epochs, **more)
    if steps and epochs:
        raise ColabUtilsError(f"expected steps or epochs, found both ({steps} and {epochs}). Pass one of them.")
    if resume not in ("auto", "never"):
        raise ColabUtilsError(f"expected resume 'auto' or 'never', found {resume!r}. Pass one of the two.")


def _choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was named, or this process's GPU, or the CPU."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # read when CUDA starts: memory for batches of many sizes would be cut into pieces that fit no batch
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    try:
        place = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device is None else device)
    except (RuntimeError, TypeError):
        raise ColabUtilsError(
            f"expected a device such as 'cpu' or 'cuda', found {device!r}. Pass one of them."
        ) from None
    if place.type != "cuda":
        return place
    if not torch.cuda.is_available():
        raise ColabUtilsError(
            f"expected a GPU for device {device!r}, found none. On Colab, choose Runtime > Change runtime type; or pass "
            "device='cpu'."
        )
    if place.index is None:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(place)
    return place


def _make_plan(
    asked: dict[str, Any], images: TrainingImages, state: dict[str, Any] | None, *, device: torch.device, ranks: Ranks,
    seed: int,
) -> TrainingPlan:  # fmt: skip
    """All that is known before the model is built; batch size and learning rate may be 0 until `_plan_batches`."""
    known: dict[str, Any] = state["plan"] if state else {}
    settings = choose_settings(known, on_gpu=device.type == "cuda", **asked)
    settings |= {name: settings[name] or 0 for name in ("batch_size", "learning_rate")}
    return TrainingPlan(
        **settings, dataset=images.dataset.fingerprint, starts_from=known.get("starts_from", ""), device=str(device),
        precision="", num_classes=images.dataset.num_classes, images=len(images.rows),
        skipped_images=len(images.dataset) - len(images.rows), steps=0, seed=seed,
        first_step=state["step"] if state else 0, ranks=ranks.count,
    )  # fmt: skip


def _check_checkpoint(
    plan: TrainingPlan, state: dict[str, Any], folder: CheckpointFolder, transforms: Transforms | None
) -> None:
    """Refuse a checkpoint of another dataset, model, size or seed, or with weights that are not numbers."""
    if plan.augment == "own" and transforms is None:
        raise ColabUtilsError(
            f"expected the transforms that the run in {folder.run} was begun with, found none. Pass them again as "
            "augment, or name one."
        )
    for key in ("dataset", "model", "num_classes", "min_size", "max_size", "seed"):
        if state["plan"][key] != getattr(plan, key):
            raise ColabUtilsError(
                f"expected a checkpoint with {key.replace('_', ' ')} {getattr(plan, key)}, found {state['plan'][key]} "
                f"in {folder.newest}. Train into another run folder, or pass resume='never': older checkpoints are "
                "then moved to a folder of their own."
            )
    broken = [name for name, tensor in state["model"].items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ColabUtilsError(
            f"expected numbers in the weights of {folder.newest}, found others in {broken[0]} "
            f"({len(broken)} tensors). Move that file away: the one before it is loaded then."
        )


def _build_step(
    plan: TrainingPlan, images: TrainingImages, *, weights: str | Path | None, state: dict[str, Any] | None,
    device: torch.device, ranks: Ranks,
) -> tuple[TrainingStep, TrainingPlan]:  # fmt: skip
    """The model on its device, the same in every process, with its optimiser; as in a checkpoint's ``state``."""
    torch.manual_seed(plan.seed)
    sizes = {"num_classes": plan.num_classes, "min_size": plan.min_size, "max_size": plan.max_size}
    network, starts_from = None, plan.starts_from
    if not state and ranks.is_first:  # the others take what the first one could download
        names = images.dataset.class_names
        network = build_mask_rcnn(plan.model, weights=weights, class_names=names, **sizes)
        starts_from = str(network.starts_from)
    starts_from = ranks.send(starts_from)
    if network is None:
        network = assemble_mask_rcnn(plan.model, starts_from=starts_from, **sizes)
    if not state:
        network.load_state_dict(ranks.send(network.state_dict()))
    fold_norms(network)
    network.backbone.to(memory_format=torch.channels_last)
    if plan.augment == "multiscale":
        network.transform.min_size = list_scales(plan.min_size)
    step = TrainingStep(network, device, ranks=ranks)
    step.optimizer = make_optimizer(network, name=plan.model, learning_rate=0.0)  # the schedule sets it
    if state:
        step.load_state(state)
    precision = str(step.precision).removeprefix("torch.")
    return step, replace(plan, starts_from=starts_from, precision=precision)


def _plan_batches(
    plan: TrainingPlan, step: TrainingStep, images: TrainingImages, *, plans_memory: bool
) -> TrainingPlan:
    """Batch size and learning rate, and on a GPU what makes every batch fit and the shapes that batches are padded to."""
    dataset, rows, ranks, transform = images.dataset, images.rows, step.ranks, step.model.transform
    probe, number = find_memory_probe(step.device) if plans_memory else None, plan.batch_size
    if probe:
        memory = plan_memory(
            step, probe, read=lambda i: dataset.read_packed(int(rows[i])),
            sizes=resize_all(dataset.sizes[rows], transform), counts=dataset.describe(rows.tolist())["counts"],
            batch_size=-(-number // ranks.count) if number else None,
            reserve=sum(p.nbytes for p in step.model.parameters()) if plan.ema else 0,
        )  # fmt: skip
        number = number or min(ranks.gather(memory.batch_size)) * ranks.count
        plan = replace(plan, parts=memory.parts, checkpointing=memory.checkpointing, memory=str(memory))
    number = number or 2 * ranks.count
    if 0 < number < ranks.count:
        raise ColabUtilsError(
            f"expected at least one image for each of {ranks.count} processes, found batch_size {number}. Pass a "
            "larger one, or start fewer processes."
        )
    if step.device.type == "cuda" and plan.augment in ("none", "flip"):
        # fewer shapes, chosen for the batches of the first epoch: memory is cut into the same pieces again and again
        sizes = dataset.sizes[rows]
        batches = (
            batch[ranks.rank :: ranks.count] for batch in BatchSampler(len(sizes), number, plan.seed, sizes=sizes)
        )
        step.shapes = choose_shapes(resize_all(sizes, transform), filter(len, batches))
    return replace(plan, batch_size=number, learning_rate=plan.learning_rate or choose_rate(plan.model, number))


def _restore_order(loader: Loader, state: dict[str, Any], images: int) -> str:
    """Put the loader where a checkpoint's was; returns what is not as it was then, in words."""
    position, plan = state["loader"], state["plan"]
    changed = []
    if plan["batch_size"] != loader.batch_size:
        changed.append(f"{loader.batch_size} images a batch, before {plan['batch_size']}")
    if plan["images"] != images:
        changed.append(f"{images} images, before {plan['images']}")
    try:
        if plan["images"] != images:
            raise ColabUtilsError("another order")
        loader.load_state_dict(position)
    except ColabUtilsError:  # of other images: rather leave some out than see them twice
        epoch = position["epoch"] + (position["batch"] > 0)
        loader.load_state_dict({**loader.state_dict(), "epoch": epoch, "batch": 0})
        changed.insert(0, "in a new epoch")
    return ", ".join(changed)


def _count_steps(loader: Loader, done: int, epochs: int) -> int:
    """Steps until so many epochs are over, those that were done included."""
    if loader.epoch >= epochs:
        return done
    each = -(-len(loader.dataset) // loader.batch_size)  # type: ignore[arg-type]
    return done + loader.left + (epochs - loader.epoch - 1) * each


def _explain_resumed(plan: TrainingPlan, state: dict[str, Any], run: str | Path) -> None:
    """Say in one line what a user may not expect of a resumed run."""
    lines = []
    if state["step"] >= plan.steps:
        lines.append(
            f"the run in {run} is finished: all of its {plan.steps} steps are done, and none is trained. Pass more "
            "steps or epochs, another run folder, or resume='never' to start anew."
        )
    if state["plan"]["device"] == "cpu" and plan.device.startswith("cuda"):
        lines.append(
            f"the run in {run} was begun on a CPU: on this GPU it continues with {plan.model} at {plan.min_size} "
            f"pixels. For a GPU's defaults ({GPU_MODEL} at 800 pixels) pass another run folder, or resume='never'."
        )
    for line in lines:
        warnings.warn(line, ColabUtilsWarning, stacklevel=3)
