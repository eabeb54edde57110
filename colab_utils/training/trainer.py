"""The training loop, the state between two steps that a checkpoint holds, and what a run
reports.
"""

import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, repeat
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.clock import LoopClock
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader
from colab_utils.progress import show_progress
from colab_utils.training.checkpoint import (
    CheckpointFolder,
    CheckpointWriter,
    copy_to_cpu,
    explain_state,
)
from colab_utils.training.evaluate import AveragePrecision, EvaluationProcessError, evaluate
from colab_utils.training.step import MemoryPlan, TrainingStep, compute_rate
from colab_utils.units import format_bytes

_LOG_STEPS = 10  # between two lines of the log
_AGREE_STEPS = 10  # after which several processes ask each other whether to stop


class Trainer:
    """A run between two steps: model, optimiser, place in the order of the images, losses. Made by
    ``train``.
    """

    def __init__(
        self,
        plan: "TrainingPlan",
        step: TrainingStep,
        loader: Loader,
        folder: CheckpointFolder,
        dataset: ShardDataset,
        validation: ShardDataset | None,
        *,
        checkpoint_steps: int | None = None,
    ) -> None:
        self.plan = plan
        self.step = step
        self.loader = loader
        self.folder = folder
        self.validation = validation
        self.ranks = step.ranks
        self.writer = CheckpointWriter(folder, checkpoint_steps)
        names = dict(dataset.class_names)
        ids = dict(dataset.category_ids)
        # of each checkpoint
        self._facts = {"plan": asdict(plan), "class_names": names, "category_ids": ids}
        self.clock = LoopClock()
        self._measured = (0, 0.0, 0.0)
        self.done = 0
        self._saved_step = self.done
        self._logged_step = self.done
        self.losses: list[float] = []
        self.ap: AveragePrecision | None = None
        self.best: AveragePrecision | None = None
        # losses still on the device, where asking for each would stall it, and the images they are
        # of
        self._pending: list[tuple[Tensor, list[int]]] = []
        self._position = loader.state_dict()
        self._is_interrupted = False
        self._is_evaluating = self._is_interrupted

    def run(self, log: "Callable[[TrainingPlan | LogLine], object] | None") -> "TrainReport":
        """Train until the plan's last step, and evaluate; ``log`` gets the plan first; without it,
        show a progress bar.

        Raises:
            KeyboardInterrupt: After Ctrl-C, when the step in progress is finished and saved.
            DriveLostError: The run has ended, and Drive does not take its last checkpoint or its
                best one.
        """
        if log:
            log(self.plan)
        show = partial(tqdm, disable=True) if log or not self.ranks.is_first else show_progress
        steps = show("training", total=self.plan.steps - self.done)
        with closing(self.writer), self._save_what_was_done(), steps as bar:
            self.clock = LoopClock()
            for batch in self._load_batches():
                self._train(batch)
                bar.update()
                epoch_ended = self.loader.left == len(self.loader)
                if self.done % _LOG_STEPS == 0 or self.done in (
                    self.plan.first_step + 1,
                    self.plan.steps,
                ):
                    self._log(log)
                is_due = self.writer.is_due(self.done, epoch_ended=epoch_ended)
                # The last step's checkpoint is written below, and is waited for.
                if is_due and self.done < self.plan.steps:
                    self.save()
                self._stop_if_asked()
                if epoch_ended and self.done < self.plan.steps:
                    self.clock.stop()
                    self._evaluate()
            self._save_last()
            self._stop_if_asked()
            self._evaluate()
        if self.ranks.is_first:
            self.folder.send_waiting()
        self._measured = 0, 0.0, 0.0
        losses = tuple(LossPoint(number, loss) for number, loss in enumerate(self.losses, 1))
        return TrainReport(
            self.done,
            losses,
            *self._measure(),
            str(self.folder.newest),
            self.ap,
            self.plan,
            self.best,
        )

    def _load_batches(self) -> Iterator[Any]:
        """Batches of one epoch after the other, until the plan's last step."""
        batches = chain.from_iterable(repeat(self.loader))
        while self.done < self.plan.steps:
            self._seed(1)  # for transforms that run on the device
            self.clock.ask()
            batch = next(batches)
            self.clock.receive(self.loader.total)
            yield batch

    def _train(self, batch: Any) -> None:
        """One step with a packed batch, with images and targets, or with None where this process
        has none of them.
        """
        for group in self.step.optimizer.param_groups:
            group["lr"] = compute_rate(
                self.done, steps=self.plan.steps, highest=self.plan.learning_rate
            )
        self._seed(2)
        total = self.loader.total
        flips = None
        images, targets = batch if isinstance(batch, tuple) else (batch, None)
        if self.plan.augment == "flip":
            # of all processes
            chances = np.random.default_rng([self.plan.seed, self.done]).random(total)
            flips = (chances < 0.5)[self.ranks.rank :: self.ranks.count].tolist()
        ids: list[int] = [] if images is None or targets else images.image_ids.tolist()
        ids += [int(target["image_id"]) for target in targets or ()]
        try:
            loss = self.step(images, targets=targets, flips=flips, total=total)
        except AssertionError as error:  # torchvision's, of boxes without an area
            found = f"found: {error} End them with v2.SanitizeBoundingBoxes()."
            raise ColabUtilsError(
                f"expected boxes that can be trained on from your transforms, {found}"
            ) from error
        self.clock.end_step()
        self._pending.append((loss, ids))
        self.done += 1
        self._position = self.loader.state_dict()

    def _seed(self, use: int) -> None:
        """All random numbers come from (seed, step, process), so that no random state has to be
        saved.
        """
        entropy = [self.plan.seed, self.done, self.ranks.rank, use]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))

    def _measure(self) -> tuple[float, float]:
        """Images per second of the wall clock since the last call, and the share of it that batches
        were waited for.
        """
        now = self.clock.images, self.clock.read(), self.clock.seconds
        images, wait_s, wall_s = (a - b for a, b in zip(now, self._measured, strict=True))
        self._measured = now
        return images / wall_s, wait_s / wall_s

    def _log(self, log: "Callable[[LogLine], object] | None") -> None:
        self._fetch_losses()
        loss = fmean(self.losses[self._logged_step :])
        rate = self.step.optimizer.param_groups[0]["lr"]
        gpu_bytes = (
            torch.cuda.max_memory_allocated(self.step.device)
            if self.step.device.type == "cuda"
            else None
        )
        ap = self.ap if self.ap and self.ap.step >= self._logged_step else None
        line = LogLine(self.done, self.plan.steps, loss, rate, *self._measure(), gpu_bytes, ap)
        self._logged_step = self.done
        if log is not None:
            log(line)

    def _evaluate(self) -> None:
        """Measure the average precision, on the first process, and keep the weights if they are the
        best so far.
        """
        if self.validation and self.ranks.is_first:
            model = self.step.model
            self._is_evaluating = True
            try:
                self.ap = replace(
                    evaluate(model, self.validation, device=self.step.device), step=self.done
                )
            except EvaluationProcessError as error:
                self.ap = None
                warnings.warn(
                    f"this evaluation is skipped: {error}", ColabUtilsWarning, stacklevel=2
                )
            self._is_evaluating = False
            if self.ap and (self.best is None or self.ap.segm > self.best.segm):
                facts = {"ap": asdict(self.ap), "validation": self.validation.fingerprint}
                state = {**self._facts, "model": copy_to_cpu(model.state_dict()), **facts}
                is_last = self.done >= self.plan.steps
                self.folder.save(state, step=self.done, which="best", is_last=is_last)
                self.best = self.ap
        self.ap, self.best = self.ranks.send((self.ap, self.best))

    def save(self, *, is_last: bool = False) -> None:
        """Write the state as a checkpoint in a thread, if any step was done since the last one."""
        if self.done != self._saved_step:
            self._fetch_losses()  # a loss that is not a number must not be saved as progress
            if self.ranks.is_first:
                state = {
                    **self._facts,
                    "model": self.step.model.state_dict(),
                    "optimizer": self.step.optimizer.state_dict(),
                    "scaler": self.step.scaler.state_dict(),
                    "loader": self._position,
                    "losses": torch.tensor(self.losses, dtype=torch.float64),
                }
                self.writer.submit(state, step=self.done, is_last=is_last)
            self._saved_step = self.done

    def _save_last(self) -> None:
        """Save the state that training ends with, and send what waits on this machine, patiently.

        Where Drive does not take it, a warning says where it lies: what comes next is an
        evaluation, or the error that ended training, and neither must get lost.
        """
        try:
            # A step that was applied in part is no state to save.
            if not self.step.is_applying:
                self.save(is_last=True)
        finally:
            self.writer.finish()
            if self.ranks.is_first:
                try:
                    self.folder.send_waiting()
                except DriveLostError as error:
                    warnings.warn(str(error), ColabUtilsWarning, stacklevel=2)

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, whose model, optimiser and place in the order are loaded
        already.
        """
        self.done = state["step"]
        self.losses = state["losses"].tolist()
        self._saved_step = self.done
        self._logged_step = self.done
        self._position = self.loader.state_dict()
        best = (
            self.folder.read("best", repair=True)
            if self.validation and self.ranks.is_first
            else None
        )
        with explain_state(best):
            if best and self.validation and best["validation"] == self.validation.fingerprint:
                self.best = AveragePrecision(**best["ap"])

    def _fetch_losses(self) -> None:
        """Read the losses of the latest steps from the device, and stop where one is not a
        number.
        """
        pending = self._pending
        self._pending = []
        fresh = torch.stack([loss for loss, _ in pending]).tolist() if pending else []
        for loss, (_, ids) in zip(fresh, pending, strict=True):
            self.losses.append(loss)
            if not math.isfinite(loss):
                self._saved_step = self.done  # weights that are not numbers are not saved
                self.writer.finish()
                named = ", ".join(map(str, ids))
                start = self.folder.newest or "the start"
                found = (
                    f"found {loss} at step {len(self.losses)}, of the images with the ids {named}"
                )
                cure = (
                    f"Look at these, and go on from {start} with a learning_rate below "
                    f"{self.plan.learning_rate:g}."
                )
                raise ColabUtilsError(f"expected a finite loss, {found}. {cure}")

    @contextmanager
    def _save_what_was_done(self) -> Iterator[None]:
        """Finish the step in progress at the first Ctrl-C, and save the state at any error.

        A second Ctrl-C, or one during an evaluation, interrupts at once. Of several processes none
        does: ``torchrun`` sends several for one.
        """

        def note(number: int, _: object) -> None:
            if self.ranks.count == 1 and (self._is_interrupted or self._is_evaluating):
                raise KeyboardInterrupt
            self._is_interrupted = True

        previous = signal.getsignal(signal.SIGINT)
        is_main = threading.current_thread() is threading.main_thread()
        # signals reach the main thread only; a shell's background job ignores Ctrl-C, and so does
        # its training
        if is_main and previous not in (signal.SIG_IGN, None):
            signal.signal(signal.SIGINT, note)
        try:
            yield
        except BaseException:
            # Whatever it is: the state is that of the step before.
            self._save_last()
            raise
        finally:
            if signal.getsignal(signal.SIGINT) is note:
                signal.signal(signal.SIGINT, previous)

    def _stop_if_asked(self) -> None:
        """Stop if this process was interrupted, or any other: all of them after the same step."""
        if self.ranks.count > 1 and self.done % _AGREE_STEPS and self.done < self.plan.steps:
            return  # to ask the others takes time
        if any(self.ranks.gather(self._is_interrupted)):
            raise KeyboardInterrupt


@dataclass(frozen=True)
class TrainingPlan:
    """Everything that was decided for a run. ``str()`` gives the line for the log."""

    dataset: str
    """Fingerprint of the annotations."""
    model: str
    """One of ``MODEL_NAMES``."""
    starts_from: str
    """Its weights at the start: "coco", "imagenet" or "random"."""
    device: str
    """As torch names it."""
    precision: str
    """The dtype of autocast; float32 without it."""
    num_classes: int
    """Classes, the background included."""
    images: int
    """Images with objects: those that are trained on."""
    skipped_images: int
    """Images without objects, which are left out."""
    objects: int
    """That are trained on."""
    skipped_objects: int
    """Crowds, and boxes without area, which are left out."""
    batch_size: int
    """Images of a step, over all processes."""
    min_size: int
    """Shorter side that images are resized to, pixels."""
    max_size: int
    """Limit of the longer side, pixels."""
    learning_rate: float
    """The highest, reached after the warm-up."""
    steps: int
    """Steps of the run, those of earlier sessions included."""
    seed: int
    """Of the order of the images, the augmentation and random weights."""
    first_step: int = 0
    """Steps that earlier sessions did."""
    augment: str = "flip"
    """By name; "own" for transforms of your own."""
    norms: str = "frozen"
    """Whether pretrained batch norms are "frozen" or "trained"."""
    ranks: int = 1
    """Processes that train together."""
    memory: MemoryPlan | None = None
    """How the heaviest batch fits into the GPU's memory; None on a CPU."""

    def __str__(self) -> str:
        together = f" by {self.ranks} processes" if self.ranks > 1 else ""
        skipped = f", {self.skipped_images} without objects left out" if self.skipped_images else ""
        if self.skipped_objects:
            every = self.objects + self.skipped_objects
            skipped += (
                f", {self.skipped_objects:,} of {every:,} objects left out (crowds, or "
                "boxes without area)"
            )
        resumed = f", resumed after step {self.first_step}" if self.first_step else ""
        memory = f"\nmemory: {self.memory}" if self.memory else ""
        return (
            f"{self.model} from {self.starts_from} weights on {self.device} in "
            f"{self.precision}{together}: "
            f"{self.num_classes - 1} classes, {self.images} images{skipped}, batches of "
            f"{self.batch_size}, "
            f"shorter side {self.min_size} px, augmentation {self.augment}, learning rate "
            f"{self.learning_rate:g}, "
            f"{self.steps} steps{resumed}{memory}"
        )


@dataclass(frozen=True)
class LossPoint:
    """The total loss of one step; the first step is 1."""

    step: int
    loss: float


@dataclass(frozen=True)
class LogLine:
    """What happened since the line before, by the wall clock: evaluation, logs and checkpoints
    count.
    """

    step: int
    """Steps done so far."""
    steps: int
    """Steps of the run."""
    loss: float
    """Mean total loss of these steps."""
    learning_rate: float
    """Of the last of these steps."""
    images_per_second: float
    """Images trained per second of the wall clock."""
    wait_share: float
    """Share of the wall clock in which the device waited for a batch, 0 to 1."""
    gpu_bytes: int | None = None
    """The most that was held on the GPU; None on a CPU."""
    ap: AveragePrecision | None = None
    """Of an evaluation since the line before."""

    def __str__(self) -> str:
        memory = f"  GPU {format_bytes(self.gpu_bytes)}" if self.gpu_bytes else ""
        evaluated = f"  after step {self.ap.step}: {self.ap}" if self.ap else ""
        return (
            f"step {self.step}/{self.steps}  loss {self.loss:.3f}  lr {self.learning_rate:.5f}  "
            f"{self.images_per_second:.1f} images/s  wait {self.wait_share:.0%}{memory}{evaluated}"
        )


@dataclass(frozen=True)
class TrainReport:
    """A finished run."""

    steps: int
    """Steps of the run, those of earlier sessions included."""
    losses: tuple[LossPoint, ...]
    """Of each of these steps."""
    images_per_second: float
    """Images trained in this session per second of its wall clock, from the wait for the first
    batch to the last evaluation: waits, evaluation, logs and checkpoints count. 0 where no step was
    left to do.
    """
    wait_share: float
    """Share of the same wall clock in which the device waited for a batch, 0 to 1."""
    checkpoint: str
    """Path of the newest checkpoint."""
    ap: AveragePrecision | None
    """Of the last weights; None without ``val_shards``."""
    plan: TrainingPlan
    """What was decided for the run."""
    best: AveragePrecision | None = None
    """The highest one of masks, of the weights in ``best-STEP.pt``; None without ``val_shards``."""

    def __str__(self) -> str:
        tenth = max(1, len(self.losses) // 10)
        first, last = (
            fmean(point.loss for point in part)
            for part in (self.losses[:tenth], self.losses[-tenth:])
        )
        ap = f"; {self.ap}" if self.ap else ""
        ap += (
            f"; best after step {self.best.step}: {self.best}"
            if self.best and self.best.step != self.steps
            else ""
        )
        speed = f"{self.images_per_second:.1f} images/s, wait {self.wait_share:.0%}"
        return f"{self.steps} steps, loss {first:.2f} -> {last:.2f}, {speed}, {self.checkpoint}{ap}"
