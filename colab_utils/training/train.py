"""Train a Mask R-CNN: ``train`` opens data, chooses settings, prepares a step and makes a plan."""

import os
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict
from math import inf
from pathlib import Path
from time import perf_counter
from typing import Literal

import torch
from torch.utils.data import Subset

from colab_utils import __version__
from colab_utils.data.defects import warn_of_faults
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.devices import find_device
from colab_utils.loading.loader import make_loader
from colab_utils.loading.samples import Transforms
from colab_utils.places import PlaceLike, open_place
from colab_utils.require import require_choice, require_seconds
from colab_utils.shards.lock import hold_folder
from colab_utils.training.checkpoint import CheckpointFolder, State
from colab_utils.training.layers import use_cpu
from colab_utils.training.prepare import OpenData, find_images, open_images, prepare_step
from colab_utils.training.report import Log, TrainReport, make_plan
from colab_utils.training.settings import (
    OWN_TRANSFORMS,
    Augment,
    TrainSettings,
    choose_settings,
    read_settings,
)
from colab_utils.training.step import join_ranks, share_errors
from colab_utils.training.trainer import Trainer

# A sample that takes longer than these seconds is tried once more by a new process.
_MAX_WAIT_S = 60.0


def train(
    shards: PlaceLike | None = None,
    run: PlaceLike | None = None,
    *,
    images: PlaceLike | None = None,
    annotations: PlaceLike | None = None,
    drive: PlaceLike | None = None,
    ssd: str | Path | None = None,
    val_shards: PlaceLike | None = None,
    steps: int | None = None,
    epochs: int | None = None,
    model: str | None = None,
    weights: PlaceLike | None = "coco",
    batch_size: int | Literal["auto"] = "auto",
    resume: Literal["auto", "never"] = "auto",
    seed: int = 0,
    checkpoint_steps: int | None = None,
    budget: str | float | None = None,
    learning_rate: float | None = None,
    min_size: int | None = None,
    max_size: int | None = None,
    augment: Augment | Transforms | None = None,
    workers: int | Literal["auto"] = "auto",
    log: Log | None = None,
) -> TrainReport:
    """Train a Mask R-CNN on shards, with checkpoints in ``run``. The same call resumes from them.

    On a CPU, a run that was killed and resumed gives the same losses as an uninterrupted one, bit
    for bit. A resumed run keeps its model, sizes, batch size, augmentation and learning rate. Of
    these, you may name another batch size, augmentation or learning rate. With another batch size
    it continues with the images that are left of its epoch.

    The model is trained on the GPU if there is one, else on the CPU. ``CUDA_VISIBLE_DEVICES``
    chooses another GPU, or none. On a GPU the heaviest batch is tried before the first step. If it
    does not fit, the batch size is made smaller, or each batch is trained in parts; the plan
    reports it.

    Under ``torchrun`` all processes train one model by ``DistributedDataParallel``: each gets its
    share of every batch, and the first one evaluates and writes the files. With ``ssd`` one process
    on each host copies or writes the shards, and the others read them. Before the first step the
    processes compare their data and settings. If these differ, all processes end with the same
    message.

    Args:
        shards: Folder of shards, or its URL, such as ``s3://bucket/shards``; images without objects
            are left out, as in torchvision's references.
        run: Folder for the checkpoints, or a URL that fsspec knows, such as ``s3://bucket/run``.
            Only one ``train`` at a time can write into it. While Drive or the server does not
            answer, checkpoints wait on this machine's disk. They are sent at the end of the run at
            the latest.
        images: Image folder, or its URL, instead of ``shards``. Training begins at once, while the
            shards are written; see ``open_dataset``.
        annotations: COCO instance JSON of ``images``.
        drive: Folder on Drive for the shards that are made of ``images``. The next session reads
            them.
        ssd: Folder on this machine's SSD. ``shards`` are copied into it during training, which
            begins when the first shard has arrived. Leave it out if the disk is too small for all
            shards: they are then read where they lie. With ``images``, their shards are written
            into it.
        val_shards: Shards to measure the average precision on, after each epoch and after the last
            step. The weights with the highest average precision of masks are kept as
            ``best-STEP.pt``.
        steps: Steps of the run, those of earlier sessions included.
        epochs: Passes over the dataset instead of ``steps``. Default: 1.
        model: maskrcnn_resnet50_fpn_v2, the default on a GPU, maskrcnn_resnet50_fpn,
            maskrcnn_mobilenet_v3_large_fpn, the default on a CPU, or maskrcnn_tiny_fpn.
        weights: ``"coco"``; the folder of another run, to continue from its weights with other
            data; or None for random weights. See ``build_mask_rcnn``.
        batch_size: Images a step, over all processes. On a GPU, ``"auto"`` tries 16, 8, 4, 2 and 1
            images a process, and takes the first of them whose heaviest batch fits. On a CPU, and
            with transforms of your own, it takes 2 images a process.
        resume: ``"auto"`` continues from the newest complete checkpoint. ``"never"`` starts anew,
            and moves older checkpoints to ``run/previous-1``, ``run/previous-2`` and so on.
        seed: Decides the order of the images, the flips and the random weights.
        checkpoint_steps: Steps between checkpoints. Default: one checkpoint a minute. A checkpoint
            is also written after the last step, on Ctrl-C, on SIGTERM and on errors. Checkpoints
            are written in a thread while training goes on.
        budget: Time that this call may take, such as ``"2h"``, ``"90m"``, ``"1h30m"``, or a number
            of seconds. Training stops so early that its last checkpoint is written by then, as
            measured by its steps and checkpoints, but not before its first step (its tenth, with
            several processes). The same call goes on in the next session. An evaluation for which
            there is no time is left out.
        learning_rate: The highest learning rate, reached after the warm-up. Default:
            ``choose_rate`` of the batch size.
        min_size: Shorter side in pixels. Default: 800; 192 for the light model on a CPU; 128 for
            the tiny one. With more than 800, write the shards with the same ``min_size`` first:
            ``write_shards`` and ``images`` make larger images smaller than that, and training would
            enlarge them again.
        max_size: Limit of the longer side in pixels, at most 10,000. Default: five thirds of
            ``min_size``.
        augment: ``"flip"``, the default, mirrors half of the images; ``"none"`` mirrors none. Or
            your own ``torchvision.transforms.v2`` of (image, target), which run on the device.
        workers: Loading workers, see ``make_loader``. On a CPU ``"auto"`` is one worker, because
            the step needs the cores. An image that takes longer than a minute is tried once
            more by a new process.
        log: Called with the plan, then with a line every ten steps. Default: a progress bar is
            shown instead.

    Raises:
        DriveLostError: Drive went away, and did not come back before its shards were needed. The
            steps so far are saved. Or the run has ended, and Drive does not take its last
            checkpoint. Then the message says where the checkpoint lies.
        ColabUtilsError: Bad arguments, no image with objects, a checkpoint of another dataset or
            model, another process that trains in ``run``, a full disk, a batch too large for the
            GPU, a loss that is not a number, or a default dtype of torch other than float32.
        KeyboardInterrupt: Ctrl-C was pressed. The step in progress is finished and saved first.
        SystemExit: SIGTERM came (status 143), or SIGHUP (status 129). The step in progress is
            finished and saved first.

    Example:
        >>> report = train("no/such/shards", "runs/first", steps=200, log=print)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There are no shards in ...
    """
    ends_s = perf_counter() + (inf if budget is None else require_seconds("budget", budget))
    transforms = augment if callable(augment) else None
    asked = read_settings(
        locals()
        | {
            "augment": OWN_TRANSFORMS if transforms else augment,
            "batch_size": None if batch_size == "auto" else batch_size,
        }
    )
    require_choice("resume", resume, ("auto", "never"))
    if steps and epochs:
        raise ColabUtilsError(f"Both steps and epochs ({epochs}) are given. Pass one of them.")
    if run is None:
        raise ColabUtilsError("A run needs a folder for its checkpoints. Pass it as run.")
    # These two are opened late. A place that cannot be read is refused now.
    for place in (weights, val_shards):
        open_place(place or ".")
    with ExitStack() as stack:
        stack.enter_context(_use_training_defaults())
        device = _choose_device()
        ranks = stack.enter_context(join_ranks(device))
        folder = CheckpointFolder(run)
        state: State | None = None
        with share_errors(ranks) as facts:
            dataset = open_images(
                shards, images=images, annotations=annotations, drive=drive, ssd=ssd, seed=seed
            )
            stack.callback(dataset.stop)
            data = find_images(dataset, shards or images, val_shards)
            if ranks.is_first:
                for shown in (dataset, data.validation):
                    # Loose files tell of their bad objects when they are opened.
                    if isinstance(shown, ShardDataset):
                        warn_of_faults(shown.folder, shown.index.faults)
                stack.enter_context(hold_folder(folder.run))
                state = folder.read() if resume == "auto" else None
            facts["version of colab_utils"] = __version__
            facts.update(data.describe(), **asdict(asked))
        state = ranks.send(state)

        step, settings = prepare_step(
            _choose_settings(asked, state, data, transforms=transforms, device=device),
            data,
            device=device,
            ranks=ranks,
            weights=weights,
            state=state,
        )
        if workers == "auto" and device.type == "cpu":
            workers = 1
        loader = make_loader(
            Subset(dataset, data.rows.tolist()),
            batch_size=settings.batch_size,
            device=device,
            seed=seed,
            workers=workers,
            deliver="dense" if transforms else "packed",
            transforms=transforms,
            max_wait_s=_MAX_WAIT_S if workers != 0 else None,
        )
        stack.enter_context(closing(loader))
        with share_errors(ranks):
            if state:
                loader.load_state_dict(data.match_state(state["loader"], state["plan"]["order"]))
            plan = make_plan(step, settings, data, loader, first_step=state["step"] if state else 0)
            loader.expects_pass = plan.steps - plan.first_step > loader.left
            trainer = Trainer(plan, step, loader, folder, data, state=state, ends_s=ends_s)
            if ranks.is_first:
                folder.prepare(anew=state is None)
        return trainer.run(log if ranks.is_first else None)


@contextmanager
def _use_training_defaults() -> Iterator[None]:
    """Enable gradients, and use the CPU as torch's default device.

    Raises:
        ColabUtilsError: Torch's default dtype, which all threads share, is not float32.
    """
    dtype = torch.get_default_dtype()
    if dtype != torch.float32:
        raise ColabUtilsError(
            f"torch's default dtype is {dtype}, and models are trained in torch.float32. Call "
            "torch.set_default_dtype(torch.float32) first."
        )
    with use_cpu(), torch.inference_mode(False), torch.enable_grad():
        yield


def _choose_device() -> torch.device:
    """Return this process's GPU, or the CPU."""
    # torch 2.8 knows the second name alone, and torch 2.9 warns of it where it stands alone.
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    if not any(name in os.environ for name in names):
        # CUDA reads this setting when it starts. Without it, batches of different sizes leave gaps
        # in the memory that are too small for the next batch.
        os.environ.update(dict.fromkeys(names, "expandable_segments:True"))
    if not torch.cuda.is_available():
        return torch.device("cpu")
    device = find_device(torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))))
    torch.cuda.set_device(device)
    return device


def _choose_settings(
    asked: TrainSettings,
    state: State | None,
    data: OpenData,
    *,
    transforms: Transforms | None,
    device: torch.device,
) -> TrainSettings:
    """Return the settings of the run, and refuse a checkpoint that does not fit them."""
    settings = choose_settings(asked, state["plan"] if state else {}, on_gpu=device.type == "cuda")
    if state:
        if "optimizer" not in state:
            raise ColabUtilsError(
                f"{state['path']} holds a model alone, as best-*.pt does, so no run can go on from "
                "it. Move this file away: the previous checkpoint is loaded then."
            )
        if settings.augment == OWN_TRANSFORMS and transforms is None:
            raise ColabUtilsError(
                f"The run of {state['path']} was begun with transforms, and this call has none. "
                "Pass them again as augment."
            )
        session = vars(settings) | data.facts
        for name in ("dataset", "model", "num_classes", "min_size", "max_size", "seed"):
            if state["plan"][name] != session[name]:
                raise ColabUtilsError(
                    f"The checkpoint {state['path']} has {name.replace('_', ' ')} "
                    f"{state['plan'][name]}, and this training has {session[name]}. Train into "
                    "another run folder (RUN_NAME), or pass resume='never': older checkpoints are "
                    "then moved to a folder of their own."
                )
    return settings
