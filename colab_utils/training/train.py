"""The training loop: shards in, checkpoints, losses and COCO average precision out."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.loader import Loader, make_loader
from colab_utils.loading.sampler import BatchSampler
from colab_utils.loading.transforms import Transforms
from colab_utils.training.augment import Augment, choose_shapes, list_scales, view_sizes
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.distributed import Ranks, join_ranks
from colab_utils.training.evaluate import AveragePrecision, Judge, Judgement, evaluate
from colab_utils.training.memory import (
    DoesNotFitError,
    MemoryPlan,
    MemoryProbe,
    apply_memory_reductions,
    find_memory_probe,
    plan_memory,
)
from colab_utils.training.model import LIGHT_MODEL, assemble_mask_rcnn, build_mask_rcnn, fold_norms
from colab_utils.training.settings import (
    LogLine,
    LossPoint,
    RunSettings,
    TrainingImages,
    TrainingPlan,
    TrainReport,
    check_at_least_one,
    check_objects,
    choose_settings,
    open_images,
)
from colab_utils.training.step import TrainingStep, choose_rate, make_optimizer
from colab_utils.training.trainer import Board, Trainer

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
    checkpoint_minutes: float | None = None,
    learning_rate: float | None = None,
    schedule: Literal["cosine", "step"] | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    augment: Augment | None = None,
    transforms: Transforms | None = None,
    ema: float | None = None,
    workers: int | Literal["auto"] = "auto",
    log: Callable[[TrainingPlan | LogLine], object] | None = None,
    log_steps: int = 10,
    tensorboard: bool = False,
    device: str | torch.device | None = None,
) -> TrainReport:
    """Train a Mask R-CNN on shards, with checkpoints in ``run`` from which the same call goes on.

    On a CPU, a run that was killed and resumed gives the same losses as one left alone, bit for bit. A resumed run
    keeps its model, sizes, batch size, augmentation, schedule and learning rate where you name none; with another batch
    size it goes on with the images that its epoch had left. On a GPU the memory is planned before the first step: the
    heaviest batch is tried, and what it takes to make it fit is done and said.

    Under ``torchrun`` all processes train one model: each gets its share of every batch, gradients are added up, and
    the first one writes the files.

    Args:
        shards: Folder of shards; images without objects are left out, as in torchvision's references.
        run: Folder for the checkpoints; while Drive does not answer they wait on this machine's disk.
        local: Folder on the SSD, where ``shards`` lie on Drive: they are copied there while it trains, which begins
            with the first one that has arrived.
        limit_gb: The most that they may take in ``local``, in GB, where the disk is smaller than all of them.
        val_shards: Shards to measure the average precision on: after each epoch, a few images after each step, and
            after the last step. The weights with the highest one of masks are kept as ``best-STEP.pt``.
        steps: Steps of the whole run, those of earlier sessions included.
        epochs: Passes over the dataset instead of ``steps``. Default: 1.
        model: One of ``MODEL_NAMES``. Default: maskrcnn_resnet50_fpn_v2 on a GPU, the light one on a CPU, and on a GPU
            into whose memory the other does not fit, whatever is saved.
        weights: ``"coco"``, or None for random weights, see ``build_mask_rcnn``.
        batch_size: Images a step, over all processes. ``"auto"``: on a GPU the largest of 16, 8, 4, 2 and 1 a process
            whose heaviest batch fits; 2 on a CPU.
        resume: ``"auto"`` goes on from the newest whole checkpoint; ``"never"`` moves older ones to
            ``run/previous-1`` and so on, and starts anew.
        seed: Decides the order of the images, the flips and the random weights.
        checkpoint_steps: Steps between checkpoints, in place of ``checkpoint_minutes``.
        checkpoint_minutes: Minutes between checkpoints. Default: 1, or up to 5 where one takes more than a hundredth of
            that from the steps. There are others at the end of an epoch (by the same hundredth not of each short one),
            after the last step and on Ctrl-C. They are written in a thread while training goes on.
        learning_rate: The highest, after the warm-up. Default: ``choose_rate``, which follows the batch size.
        schedule: ``"cosine"``, the default, or ``"step"``, see ``compute_rate``.
        min_size: Shorter side in pixels. Default: 800; 192 for the light model on a CPU.
        max_size: Limit of the longer side in pixels. Default: five thirds of ``min_size``.
        augment: ``"flip"``, the default, mirrors by chance; ``"multiscale"`` also takes 0.6 to 1 of ``min_size``;
            ``"lsj"`` is large-scale jitter, 0.1 to 2 times a square of the input's area; ``"none"``.
        transforms: Your own ``torchvision.transforms.v2`` of (image, target), on the device, in place of ``augment``.
        ema: Average the weights with this decay, say 0.999, and judge the average. Default: no average.
        workers: Loading workers, see ``make_loader``. ``"auto"`` is one on a CPU, whose cores the step needs.
        log: Called with the plan, then with a line every ``log_steps`` steps. Default: a progress bar instead.
        log_steps: Steps between log lines.
        tensorboard: Also write the log lines as TensorBoard events, to ``run/tensorboard``.
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
    check_at_least_one(steps=steps, epochs=epochs, checkpoint_steps=checkpoint_steps, log_steps=log_steps)
    if steps and epochs:
        raise ColabUtilsError(f"expected steps or epochs, found both ({steps} and {epochs}). Pass one of them.")
    if resume not in ("auto", "never"):
        raise ColabUtilsError(f"expected resume 'auto' or 'never', found {resume!r}. Pass one of the two.")
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # read when CUDA starts: memory of batches of many sizes would fall into pieces that fit no batch
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    place = _choose_device(device)
    asked = {
        "model": model, "min_size": min_size, "max_size": max_size, "schedule": schedule, "ema": ema,
        "augment": augment if transforms is None else "own", "learning_rate": learning_rate,
        "batch_size": None if batch_size == "auto" else batch_size,
    }  # fmt: skip
    on_gpu = place.type == "cuda"
    choose_settings({}, on_gpu=on_gpu, **asked)  # what is wrong is said before anything is opened
    with ExitStack() as ending:
        ranks = ending.enter_context(join_ranks(place))
        if local is not None and ranks.count > 1:
            raise ColabUtilsError(
                f"expected one process to train while its shards are copied, found {ranks.count}. Copy them first, on "
                "every machine, and train without `local`."
            )
        images = open_images(shards, local=local, limit_gb=limit_gb, val_shards=val_shards, seed=seed)
        ending.callback(getattr(images.dataset, "stop", int))
        folder = CheckpointFolder(run)
        state = ranks.send(folder.load_newest() if resume == "auto" and ranks.is_first else None)
        known: dict[str, Any] = state["plan"] if state else {}
        settings = choose_settings(known, on_gpu=on_gpu, **asked)
        if settings.augment == "own" and transforms is None:
            raise ColabUtilsError(
                f"expected the transforms that the run in {run} was begun with, found none. Pass them again, or name "
                "an augment."
            )
        if state:
            asked_for = {**asdict(settings), "dataset": images.dataset.fingerprint, "seed": seed}
            _refuse_other(asked_for | {"num_classes": images.dataset.num_classes}, state, folder)
        check_objects(images, min_size=settings.min_size, max_size=settings.max_size)
        gauge = find_memory_probe(place) if transforms is None else None
        build = partial(_build_step, images=images, device=place, ranks=ranks, weights=weights, state=state, seed=seed)
        step, settings, memory = _fit_model(build, images, gauge, settings, chosen=bool(model or known))
        number = settings.batch_size
        if number is None:
            number = (memory.batch_size if memory else 2) * ranks.count
        if 0 < number < ranks.count:
            raise ColabUtilsError(
                f"expected at least one image for each of {ranks.count} processes, found batch_size {number}. Pass a "
                "larger one, or start fewer processes."
            )
        if workers == "auto" and not on_gpu:
            workers = 1
        loader = make_loader(
            images.subset, batch_size=number, device=place, workers=workers, seed=seed, rank=ranks.rank,
            ranks=ranks.count, deliver="packed" if transforms is None else "dense", transforms=transforms,
        )  # fmt: skip
        ending.enter_context(closing(loader))
        if on_gpu and settings.augment in ("none", "flip"):
            _fix_shapes(step, images, number, seed)
        changed = _go_on(loader, state, len(images.rows)) if state else ""
        plan = TrainingPlan(
            **asdict(settings) | {"batch_size": number},
            dataset=images.dataset.fingerprint,
            starts_from=str(step.model.starts_from),
            device=str(place),
            precision=str(step.precision).removeprefix("torch."),
            num_classes=images.dataset.num_classes,
            images=len(images.rows),
            skipped_images=len(images.dataset) - len(images.rows),
            steps=steps or _count_steps(loader, state["step"] if state else 0, epochs or 1),
            seed=seed,
            first_step=state["step"] if state else 0,
            changed=changed,
            ranks=ranks.count,
            savings=(*known.get("savings", ()), *(memory.savings if memory else ())),
            memory=str(memory) if memory else "",
        )
        plan = replace(plan, learning_rate=plan.learning_rate or choose_rate(plan.model, number))
        if ranks.is_first:
            folder.prepare(anew=resume == "never")
        judge = None
        if images.validation:
            judge = Judge(images.validation, place, steps=max(1, len(loader) // 2), ranks=ranks)
            ending.callback(judge.close)
        logs: list[Callable[[Any], object]] = [log] if log and ranks.is_first else []
        board = Board(run, first_step=plan.first_step) if tensorboard and ranks.is_first else None
        if board:
            ending.callback(board.close)
            logs.append(board.add)
        note = board.add_precision if board else bool
        session = Trainer(plan, step, loader, folder, judge=judge, note=note)
        ending.callback(session.close)
        if state:
            session.load_state(state)
        if log and ranks.is_first:
            log(plan)
        pace = session.run(
            log=lambda line: [each(line) for each in logs], quiet=bool(log) or not ranks.is_first,
            log_steps=log_steps, checkpoint_steps=checkpoint_steps, checkpoint_minutes=checkpoint_minutes,
        )  # fmt: skip
        ap = _measure_precision(session, images, ranks) if images.validation else None
        return TrainReport(
            steps=session.done,
            losses=tuple(LossPoint(step, loss) for step, loss in enumerate(session.losses, 1)),
            images_per_second=pace.images_per_second,
            wait_share=pace.wait_share,
            checkpoint=str(folder.newest),
            ap=ap,
            plan=plan,
            best=session.best,
        )


def _build_step(
    settings: RunSettings, *, images: TrainingImages, device: torch.device, ranks: Ranks, weights: str | None,
    state: dict[str, Any] | None, seed: int,
) -> TrainingStep:  # fmt: skip
    """The model on its device, the same on every rank, with its optimiser; all as in a checkpoint's ``state``."""
    torch.manual_seed(seed)
    known: dict[str, Any] = state["plan"] if state else {}
    names = {"num_classes": images.dataset.num_classes, "min_size": settings.min_size, "max_size": settings.max_size}
    if known:
        network = assemble_mask_rcnn(settings.model, starts_from=known["starts_from"], **names)
    else:
        network = build_mask_rcnn(settings.model, weights=weights, class_names=images.dataset.class_names, **names)
    fold_norms(network)
    network.backbone.to(memory_format=torch.channels_last)
    if settings.augment == "multiscale":
        network.transform.min_size = list_scales(settings.min_size)
    side = max(2, round((settings.min_size * settings.max_size) ** 0.5 / 32)) * 32
    side = side if settings.augment == "lsj" else None
    step = TrainingStep(network, device, jitter_side=side, ranks=ranks)
    step.optimizer = make_optimizer(network, name=settings.model, learning_rate=0.0)  # the schedule sets it
    ranks.copy_weights(network)
    apply_memory_reductions(step, known.get("savings", ()), images=-(-(settings.batch_size or 1) // ranks.count))
    if state:
        step.load_state(state)  # before more memory is saved: frozen layers leave the optimiser
    return step


def _fit_model(
    build: Callable[[RunSettings], TrainingStep], images: TrainingImages, gauge: MemoryProbe | None,
    settings: RunSettings, *,
    chosen: bool,
) -> tuple[TrainingStep, RunSettings, MemoryPlan | None]:  # fmt: skip
    """A step whose batches fit into the device's memory, if only of the lighter model, where none was ``chosen``."""
    step = build(settings)
    try:
        return step, settings, _plan_memory(step, images, gauge, settings)
    except DoesNotFitError:
        if chosen or settings.model == LIGHT_MODEL:
            raise
    warnings.warn(
        f"{settings.model} does not fit into the GPU's memory, whatever is saved: {LIGHT_MODEL} is trained, "
        "which costs precision. Name a model to choose, or a smaller min_size.",
        ColabUtilsWarning,
        stacklevel=3,
    )
    del step  # its memory is needed
    return _fit_model(build, images, gauge, replace(settings, model=LIGHT_MODEL), chosen=True)


def _fix_shapes(step: TrainingStep, images: TrainingImages, batch_size: int, seed: int) -> None:
    """Few padded shapes, chosen for the batches of the first epoch."""
    sizes, transform = images.dataset.sizes[images.rows], step.model.transform
    batches = BatchSampler(len(sizes), batch_size, seed, sizes=sizes)
    step.shapes = choose_shapes(view_sizes(sizes, transform), filter(len, map(step.ranks.share, batches)))


def _choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was named, or this process's GPU, or the CPU."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    place = torch.device(device)
    if place.type == "cuda" and place.index is None:
        place = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    if place.type == "cuda" and torch.cuda.is_available():
        torch.cuda.set_device(place)
    return place


def _plan_memory(
    step: TrainingStep, images: TrainingImages, gauge: MemoryProbe | None, settings: RunSettings
) -> MemoryPlan | None:
    if gauge is None:
        return None
    rows, dataset = images.rows, images.dataset
    weights = sum(parameter.nbytes for parameter in step.model.parameters())
    tables = dataset.describe(rows.tolist())
    number = settings.batch_size
    return plan_memory(
        step,
        gauge,
        read=lambda i: dataset.read_packed(int(rows[i])),
        ids=dataset.image_ids[rows],
        sizes=view_sizes(tables["sizes"], step.model.transform, jitter_side=step.jitter_side),
        counts=tables["counts"],
        batch_size=None if number is None else -(-number // step.ranks.count),
        # copies of the model, and all gradients in one piece to be added up
        reserve=weights * ((settings.ema is not None) + (images.validation is not None) + (step.ranks.count > 1)),
    )


def _go_on(loader: Loader, state: dict[str, Any], images: int) -> str:
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
    whole = -(-len(loader.dataset) // loader.batch_size)  # type: ignore[arg-type]
    return done + loader.left + (epochs - loader.epoch - 1) * whole


def _refuse_other(asked: dict[str, Any], state: dict[str, Any], folder: CheckpointFolder) -> None:
    """Refuse a checkpoint of another dataset, model, size or seed, or with weights that are no numbers."""
    for key in ("dataset", "model", "num_classes", "min_size", "max_size", "seed"):
        if state["plan"][key] != asked[key]:
            raise ColabUtilsError(
                f"expected a checkpoint with {key.replace('_', ' ')} {asked[key]}, found {state['plan'][key]} in "
                f"{folder.newest}. Train into another run folder, or pass resume='never': older checkpoints are then "
                "moved to a folder of their own."
            )
    broken = [name for name, tensor in state["model"].items() if not torch.isfinite(tensor).all()]
    if broken:
        raise ColabUtilsError(
            f"expected numbers in the weights of {folder.newest}, found others in {broken[0]} "
            f"({len(broken)} tensors). Move that file away: the one before it is taken then."
        )


def _measure_precision(session: Trainer, images: TrainingImages, ranks: Ranks) -> AveragePrecision | None:
    """The average precision of the last weights; every rank looks at its share of the images."""
    network, device = session.network, session.step.device
    if images.validation is None or session.judge is None:
        return None
    if ranks.count == 1:
        ap = evaluate(network, images.validation, device=device)
        session.keep_best(Judgement(session.done, ap, network.state_dict()), wait=True)
        return ap
    ranks.copy_buffers(network)
    session.judge.begin(network, session.done)
    judgement = session.judge.advance(to_end=True)
    if judgement:
        session.keep_best(judgement, wait=True)
    return ranks.send(judgement.ap if judgement else None)
