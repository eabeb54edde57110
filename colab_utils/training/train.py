"""Train a Mask R-CNN: ``train`` checks what was asked for, opens the data, and builds what `Trainer` runs."""

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch.utils.data import Subset

from colab_utils import __version__
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.arriving import ArrivingShards
from colab_utils.loading.batch import Transforms
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader, find_device, make_loader
from colab_utils.runtime import hash_bytes
from colab_utils.training import model as models
from colab_utils.training.agreement import require_same, share_errors
from colab_utils.training.checkpoint import CheckpointFolder, explain_state
from colab_utils.training.losses import Augment
from colab_utils.training.step import Ranks, TrainingStep, choose_rate, join_ranks, make_optimizer, plan_memory
from colab_utils.training.trainer import LogLine, Trainer, TrainingPlan, TrainReport

_State = dict[str, Any] | None


def train(
    shards: str | Path, run: str | Path, *, local: str | Path | None = None, limit_gb: float | None = None,
    val_shards: str | Path | None = None, steps: int | None = None, epochs: int | None = None, model: str | None = None,
    weights: str | Path | None = "coco", batch_size: int | Literal["auto"] = "auto",
    resume: Literal["auto", "never"] = "auto", seed: int = 0, checkpoint_steps: int | None = None,
    learning_rate: float | None = None, min_size: int | None = None, max_size: int | None = None,
    augment: Augment | Transforms | None = None, norms: models.Norms | None = None,
    workers: int | Literal["auto"] = "auto", log: Callable[[TrainingPlan | LogLine], object] | None = None,
    device: str | torch.device | None = None,
) -> TrainReport:  # fmt: skip
    """Train a Mask R-CNN on shards, with checkpoints in ``run`` from which the same call continues.

    On a CPU, a run that was killed and resumed gives the same losses as one left alone, bit for bit. A resumed run
    keeps its model, sizes, batch size, augmentation and learning rate where you name none; with another batch size it
    continues with the images that its epoch had left. On a GPU the heaviest batch is trained once before the first
    step: what it takes to make it fit is done and reported.

    Under ``torchrun`` all processes train one model by ``DistributedDataParallel``: each gets its share of every batch,
    and the first one evaluates and writes the files. Before the first step they compare their data and settings: where
    these differ, all of them end with one message.

    Args:
        shards: Folder of shards; images without objects are left out, as in torchvision's references.
        run: Folder for the checkpoints; while Drive does not answer they wait on this machine's disk, and are
            sent at the end of the run at the latest.
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
        checkpoint_steps: Steps between checkpoints. Default: one a minute, and at the end of an epoch if ten seconds
            have passed. There are others after the last step, on Ctrl-C and on errors. They are written in a thread
            while training goes on.
        learning_rate: The highest, after the warm-up. Default: ``choose_rate``, which follows the batch size.
        min_size: Shorter side in pixels. Default: 800; 192 for the light model on a CPU; 128 for the tiny one.
        max_size: Limit of the longer side in pixels, at most 10,000. Default: five thirds of ``min_size``.
        augment: ``"flip"``, the default, mirrors half of the images; ``"none"``; or your own
            ``torchvision.transforms.v2`` of (image, target), on the device.
        norms: ``"frozen"``, the default, keeps the statistics of pretrained batch norms; ``"trained"`` trains them. See
            ``build_mask_rcnn``.
        workers: Loading workers, see ``make_loader``. ``"auto"`` is one on a CPU, whose cores the step needs.
        log: Called with the plan, then with a line every ten steps. Default: a progress bar instead.
        device: Default: the GPU if there is one.

    Raises:
        DriveLostError: Drive went away, and did not come back before its shards were needed; what was done is saved.
            Or the run has ended, and Drive does not take its last checkpoint: the message says where
            it lies.
        ColabUtilsError: Bad arguments, no image with objects, a checkpoint of another dataset or model, a
            full disk, a batch too large for the GPU, or a loss that is not a number.
        KeyboardInterrupt: After the step in progress is finished and saved.

    Example:
        >>> report = train("no/such/shards", "runs/first", steps=200, log=print)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder of shards, found nothing at no/such/shards. ...
    """
    transforms = augment if callable(augment) else None
    asked = {
        "model": model, "norms": norms, "min_size": min_size, "max_size": max_size, "learning_rate": learning_rate,
        "augment": "own" if transforms else augment,
        "batch_size": None if batch_size == "auto" else batch_size,
    }  # fmt: skip
    more = {"steps": steps, "epochs": epochs, "resume": resume, "seed": seed, "checkpoint_steps": checkpoint_steps}
    _check_values(**asked, **more, shards=shards, val_shards=val_shards)
    with ExitStack() as stack:
        torch_device = _choose_device(device)
        ranks = stack.enter_context(join_ranks(torch_device))
        folder, state = CheckpointFolder(run), None
        with share_errors(ranks):
            dataset, rows, validation = _open_images(shards, local, limit_gb, val_shards, seed, ranks, stack)
            if resume == "auto" and ranks.is_first:
                state = folder.read(repair=True)
        if ranks.count > 1:
            settings = {**asked, "seed": seed, "steps": steps, "epochs": epochs}
            require_same(ranks, {**_describe_images(dataset, rows, validation), **settings})
        state = ranks.send(state)
        with explain_state(state):
            plan = _make_plan(asked, dataset, len(rows), state, device=torch_device, ranks=ranks.count, seed=seed)
        step = _build_step(plan, dataset.class_names, weights, state, ranks)
        plan = _plan_batches(plan, step, dataset, rows)
        loader = stack.enter_context(closing(make_loader(
            Subset(dataset, rows), batch_size=plan.batch_size, device=torch_device, seed=seed,
            workers=1 if workers == "auto" and torch_device.type == "cpu" else workers,
            deliver="dense" if transforms else "packed", transforms=transforms,
        )))  # fmt: skip
        with explain_state(state):
            plan = _plan_steps(plan, loader, state, steps=steps, epochs=epochs or 1)
            trainer = Trainer(plan, step, loader, folder, dataset, validation, checkpoint_steps=checkpoint_steps)
            if state:
                trainer.load_state(state)
        if ranks.is_first:
            folder.prepare(anew=resume == "never")
        return trainer.run(log if ranks.is_first else None)


def _check_values(**values: Any) -> None:
    """Refuse a value that ``train`` does not know; None where nothing is asked for."""
    augments, largest = get_args(Augment), models.LARGEST_SIDE
    count = (lambda value: 1 <= value < 1 << 31), "of at least 1"
    side = (lambda value: 1 <= value <= largest), f"of 1 to {largest:,}"
    folder = (lambda value: isinstance(value, str | PathLike)), "as the path of a folder, such as dataset.folder"
    rules: dict[str, tuple[Callable[[Any], bool], str]] = {
        "shards": folder, "val_shards": folder, "min_size": side, "max_size": side,
        "steps": count, "checkpoint_steps": count, "batch_size": count,
        "epochs": (lambda value: value >= 1 and values["steps"] is None, "of at least 1, and no steps beside them"),
        "resume": (("auto", "never").__contains__, "as 'auto' or 'never'"),
        "seed": (lambda value: value >= 0, "of 0 or more"),
        "learning_rate": (lambda value: 0 < value < float("inf"), "above 0, say 0.005"),
        "augment": ((*augments, "own").__contains__, f"as one of {', '.join(augments)} or transforms of your own"),
        "norms": (get_args(models.Norms).__contains__, "as 'frozen' or 'trained'"),
        "model": (models.BUILDERS.__contains__, f"as one of {', '.join(models.MODEL_NAMES)}"),
    }  # fmt: skip
    for name, value in values.items():
        if value is not None and not rules[name][0](value):
            found = repr(value).splitlines()[0]
            raise ColabUtilsError(f"expected {name} {rules[name][1]}, found {found}. Pass another value.")


def _choose_device(device: str | torch.device | None) -> torch.device:
    """The device that was named, or this process's GPU, or the CPU."""
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # read when CUDA starts: memory for batches of many sizes would be cut into pieces that fit no batch
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    torch_device = find_device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if torch_device.type == "cuda":
        index = torch_device.index
        torch_device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)) if index is None else index)
        torch.cuda.set_device(torch_device)
    return torch_device


def _open_images(
    shards: str | Path, local: str | Path | None, limit_gb: float | None, val_shards: str | Path | None, seed: int,
    ranks: Ranks, stack: ExitStack,
) -> tuple[ShardDataset, list[int], ShardDataset | None]:  # fmt: skip
    """The dataset, the rows of its images with objects, and the validation images."""
    if local is None:
        dataset = ShardDataset(shards, contiguous_labels=True)
    elif ranks.count > 1:
        cure = "Copy them first, on every machine, and train without `local`."
        raise ColabUtilsError(f"expected one process to train while its shards are copied, found {ranks.count}. {cure}")
    else:
        dataset = ArrivingShards(shards, local, limit_gb=limit_gb, contiguous_labels=True, seed=seed)
        stack.callback(dataset.stop)
    validation = ShardDataset(val_shards, contiguous_labels=True) if val_shards else None
    if validation and validation.category_ids != dataset.category_ids:
        found = f"found others ({len(validation.category_ids)} and {len(dataset.category_ids)} categories)"
        cure = "Make both from annotations with the same categories."
        raise ColabUtilsError(f"expected the same category ids in {val_shards} as in {shards}, {found}. {cure}")
    rows = np.flatnonzero(dataset.has_objects).tolist()
    if not rows:
        found = f"found none in {len(dataset)} images. Check the annotations that the shards were made from."
        raise ColabUtilsError(f"expected images with objects in {shards}, {found}")
    return dataset, rows, validation


def _describe_images(dataset: ShardDataset, rows: list[int], validation: ShardDataset | None) -> dict[str, Any]:
    """Return what has to be the same in all processes, so that each takes its share of the same batches."""
    facts = {
        "version of colab_utils": __version__,
        "dataset": dataset.fingerprint,
        "number of images": len(dataset),
        "number of images with objects": len(rows),
        # Copies of as many images may hold others. The sizes decide which images share a batch.
        "order of the images": hash_bytes(dataset.image_ids.tobytes(), dataset.sizes.tobytes()),
        "validation dataset": None,
        "number of validation images": None,
    }
    if validation is not None:
        facts["validation dataset"] = validation.fingerprint
        facts["number of validation images"] = len(validation)
    return facts


def choose_settings(asked: Mapping[str, Any], known: Mapping[str, Any], *, on_gpu: bool) -> dict[str, Any]:
    """Fill in the settings that nobody asked for: from the run's own plan, else the defaults.

    Args:
        asked: ``model``, ``min_size``, ``max_size``, ``augment``, ``norms``, ``batch_size`` and
            ``learning_rate``; None where nothing is asked for.
        known: The plan of an earlier session; empty for a new run.
        on_gpu: Whether it is trained on a GPU.

    Returns:
        The same names; ``batch_size`` and ``learning_rate`` are 0 where they are still to be found.
    """
    found = {name: known.get(name) if value is None else value for name, value in asked.items()}
    if found["batch_size"] != known.get("batch_size"):  # the rate follows the batch
        found["learning_rate"] = asked["learning_rate"]
    model = found["model"] or (models.GPU_MODEL if on_gpu else models.LIGHT_MODEL)
    light = 128 if model == models.TINY_MODEL else 192 if model == models.LIGHT_MODEL and not on_gpu else 800
    min_size = found["min_size"] or light
    max_size = min(round(min_size * 5 / 3), models.LARGEST_SIDE)
    defaults = {"model": model, "min_size": min_size, "max_size": max_size, "augment": "flip", "norms": "frozen",
                "batch_size": 0, "learning_rate": 0}  # fmt: skip
    return found | {name: found[name] or default for name, default in defaults.items()}


def _make_plan(
    asked: dict[str, Any], dataset: ShardDataset, images: int, state: _State, *, device: torch.device, ranks: int,
    seed: int,
) -> TrainingPlan:  # fmt: skip
    """All that is known before the model is built; steps, batch size and learning rate may be 0."""
    known = state["plan"] if state else {}
    settings = choose_settings(asked, known, on_gpu=device.type == "cuda")
    _check_values(**{name: value or None for name, value in settings.items()})  # the checkpoint's
    plan = TrainingPlan(
        **settings, dataset=dataset.fingerprint, device=str(device), starts_from=known.get("starts_from", ""),
        precision=str(models.choose_precision(device)).removeprefix("torch."), num_classes=dataset.num_classes,
        images=images, skipped_images=len(dataset) - images, objects=dataset.objects, skipped_objects=dataset.left_out,
        steps=0, seed=seed, first_step=state["step"] if state else 0, ranks=ranks,
    )  # fmt: skip
    if state:
        _check_checkpoint(plan, state, is_own=asked["augment"] == "own")
    return plan


def _check_checkpoint(plan: TrainingPlan, state: dict[str, Any], *, is_own: bool) -> None:
    """Refuse a checkpoint of other images, or of another model, size or seed."""
    before, path, elsewhere = state["plan"], state["path"], "another run folder (RUN_NAME), or pass resume='never'"
    if plan.augment == "own" and not is_own:
        found = "found none. Pass them again as augment."
        raise ColabUtilsError(f"expected the transforms that the run of {path} was begun with, {found}")
    for key in ("dataset", "images", "model", "num_classes", "min_size", "max_size", "norms", "seed"):
        if before[key] != getattr(plan, key):
            expected = f"expected a checkpoint with {key.replace('_', ' ')} {getattr(plan, key)}"
            cure = f"Train into {elsewhere}: older checkpoints are then moved to a folder of their own."
            raise ColabUtilsError(f"{expected}, found {before[key]} in {path}. {cure}")
    if before["device"] == "cpu" and plan.device.startswith("cuda"):
        text = f"{path} was begun on a CPU: on this GPU it continues with {plan.model} at {plan.min_size} pixels. For "
        text += f"GPU defaults ({models.GPU_MODEL}, 800 px) train into {elsewhere}"
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)


def _build_step(
    plan: TrainingPlan, class_names: dict[int, str], weights: str | Path | None, state: _State, ranks: Ranks
) -> TrainingStep:
    """The model on its device, the same in every process, with its optimiser; as in a checkpoint's ``state``."""
    torch.manual_seed(plan.seed)
    sizes = {name: getattr(plan, name) for name in ("num_classes", "min_size", "max_size", "norms")}
    if state:
        network = models.assemble_mask_rcnn(plan.model, starts_from=plan.starts_from, **sizes)
    else:  # the other processes take what the first one could download
        weights = weights if ranks.is_first else None
        network = ranks.send(models.build_mask_rcnn(plan.model, weights=weights, class_names=class_names, **sizes))
    models.fold_norms(network)
    network.to(memory_format=torch.channels_last)
    step = TrainingStep(network, plan.device, ranks=ranks)
    step.optimizer = make_optimizer(network, name=plan.model, learning_rate=0.0)  # the schedule sets it
    if state:
        with explain_state(state):
            step.load_state(state)
    return step


def _plan_batches(plan: TrainingPlan, step: TrainingStep, dataset: ShardDataset, rows: list[int]) -> TrainingPlan:
    """Batch size and learning rate; on a GPU what makes every batch fit."""
    ranks, number, memory = step.ranks, plan.batch_size, None
    if step.device.type == "cuda" and plan.augment != "own":
        memory = plan_memory(step, dataset, rows, batch_size=-(-number // ranks.count) or None)
        number = number or min(ranks.gather(memory.batch_size)) * ranks.count
    number = number or 2 * ranks.count
    rate, starts_from = plan.learning_rate or choose_rate(plan.model, number), str(step.model.starts_from)
    return replace(plan, batch_size=number, learning_rate=rate, memory=memory, starts_from=starts_from)


def _plan_steps(plan: TrainingPlan, loader: Loader, state: _State, *, steps: int | None, epochs: int) -> TrainingPlan:
    """Steps of the run, with the loader where a checkpoint's was."""
    if state:
        loader.load_state_dict(state["loader"])
    if steps is None:
        later = max(0, epochs - loader.epoch - 1) * -(-plan.images // plan.batch_size)
        steps = plan.first_step + (loader.left + later if loader.epoch < epochs else 0)
    if state and state["step"] >= steps:
        cure = "Pass more steps or epochs (STEPS), another run folder (RUN_NAME), or resume='never' to start anew."
        text = f"the run of {state['path']} is finished: all of its {steps} steps are done, and none is trained. {cure}"
        warnings.warn(text, ColabUtilsWarning, stacklevel=3)
    return replace(plan, steps=steps)
