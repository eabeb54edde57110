"""The training loop, and the state between two steps that a checkpoint holds."""

from __future__ import annotations

import copy
import math
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import chain, repeat
from statistics import fmean
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colab_utils.errors import ColabUtilsError, ColabUtilsWarning
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.loader import Loader
from colab_utils.runtime import show_progress
from colab_utils.training.checkpoint import CheckpointFolder, CheckpointWriter
from colab_utils.training.evaluate import AveragePrecision, EvaluationProcessError, evaluate
from colab_utils.training.settings import BestCheckpoint, LogLine, TrainingImages, TrainingPlan
from colab_utils.training.step import TrainingStep, compute_rate

__all__ = ["EMA", "StepTimer", "Throughput", "Trainer"]

_AGREE_STEPS = 10  # after which processes on GPUs ask each other whether to stop


class Trainer:
    """A run between two steps: model, optimiser, place in the order of the images, losses. Made by ``train``."""

    def __init__(
        self, plan: TrainingPlan, step: TrainingStep, loader: Loader, images: TrainingImages, folder: CheckpointFolder
    ) -> None:
        self.plan, self.step, self.loader, self.images, self.folder = plan, step, loader, images, folder
        self.ranks, self.writer = step.ranks, CheckpointWriter(folder, step.device)
        self.ema = EMA(step.model, decay=plan.ema) if plan.ema and self.ranks.is_first else None
        self.timer = StepTimer(step.device)
        self.done = self._saved_step = self._logged_step = 0
        self.losses: list[float] = []
        self.ap: AveragePrecision | None = None
        self.best: BestCheckpoint | None = None
        self._unlogged_ap: tuple[AveragePrecision | None, int] = None, 0  # and the step after which it was measured
        # losses still on the device, where asking for each would stall it, and the images they are of
        self._pending: list[tuple[Tensor, list[int]]] = []
        self._position = loader.state_dict()
        self._is_evaluating = False

    def run(self, *, log: Callable[[LogLine], object] | None, log_steps: int, checkpoint_steps: int | None) -> None:
        """Train until the plan's last step, and evaluate; without ``log``, show a progress bar.

        Raises:
            KeyboardInterrupt: After Ctrl-C, when the step in progress is finished and saved.
        """
        hides_bar = log is not None or not self.ranks.is_first
        left = self.plan.steps - self.done
        with self._defer_interrupt() as interrupts, self._save_on_error(), _show_bar(left, hidden=hides_bar) as bar:
            self.timer = StepTimer(self.step.device)
            for batch in self._load_batches():
                self._train(batch)
                bar.update(1)
                epoch_ended = self.loader.left == len(self.loader)
                if self.done % log_steps == 0 or self.timer.total.images == 0 or self.done == self.plan.steps:
                    self._log(log)
                if self._is_checkpoint_due(checkpoint_steps, epoch_ended=epoch_ended):
                    self.save()
                self._stop_if_asked(interrupts)
                if epoch_ended and self.done < self.plan.steps:
                    self._evaluate()
            self.save(wait=True, patiently=True)
            self._stop_if_asked(interrupts)
            self._evaluate()
            self.timer.collect()

    def _load_batches(self) -> Iterator[PackedBatch | tuple[list[Tensor], list[Any]] | None]:
        """Batches of one epoch after the other, until the plan's last step."""
        batches = chain.from_iterable(repeat(self.loader))
        while self.done < self.plan.steps:
            torch.manual_seed(self._draw_seed(1, *self._own_rank()))  # of transforms that run on the device
            with self.timer.wait():
                batch = next(batches)
            yield batch

    def _train(self, batch: PackedBatch | tuple[list[Tensor], list[Any]] | None) -> None:
        """One step: all its random numbers come from (seed, step), so that no random state has to be saved."""
        rate = self._compute_rate(self.done)
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate
        entropy = np.random.SeedSequence([self.plan.seed, self.done]).generate_state(2, np.uint64).tolist()
        torch.manual_seed(self._draw_seed(2, *self._own_rank()) if self.ranks.rank else entropy[0])
        if isinstance(batch, tuple):
            loss, ids = self._train_dense(*batch), [int(target["image_id"]) for target in batch[1]]
        else:
            flips, total = None, self.loader.total
            if self.plan.augment != "none":
                every = torch.rand(total, generator=torch.Generator().manual_seed(entropy[1])) < 0.5
                flips = every.tolist()[self.ranks.rank :: self.ranks.count]
            loss = self.step(batch, flips=flips, total=total)
            ids = [] if batch is None else batch.image_ids.tolist()
        self._pending.append((loss, ids))
        if self.ema:
            self.ema.update(self.step.model, steps=self.done)
        self.done += 1
        self._position = self.loader.state_dict()
        self.timer.images += self.loader.total

    def _train_dense(self, images: list[Tensor], targets: list[Any]) -> Tensor:
        try:
            return self.step(images, targets, total=self.loader.total)
        except AssertionError as error:  # torchvision's, of boxes without an area
            raise ColabUtilsError(
                f"expected images and boxes that torchvision trains on from your transforms, found: {error} "
                "End them with v2.SanitizeBoundingBoxes()."
            ) from error

    def _log(self, log: Callable[[LogLine], object] | None) -> None:
        self._fetch_losses()
        pace = self.timer.collect()
        (ap, ap_step), self._unlogged_ap = self._unlogged_ap, (None, 0)
        line = LogLine(
            self.done, self.plan.steps, fmean(self.losses[self._logged_step :]), self._compute_rate(self.done - 1),
            pace.images_per_second, pace.wait_share, self._read_memory(), ap, ap_step,
        )  # fmt: skip
        self._logged_step = self.done
        if log is not None:
            log(line)

    def _evaluate(self) -> None:
        """Measure the average precision, on the first process, and keep the weights if they are the best so far."""
        validation = self.images.validation
        if validation is None:
            return
        if self.ranks.is_first:
            model = self.ema.model if self.ema else self.step.model
            self._is_evaluating = True
            try:
                self.ap = evaluate(model, validation, device=self.step.device)
            except EvaluationProcessError as error:
                self.ap = None
                warnings.warn(f"this evaluation is skipped: {error}", ColabUtilsWarning, stacklevel=2)
            finally:
                self._is_evaluating = False
            if self.ap and (self.best is None or self.ap.segm > self.best.segm):
                facts = {"bbox": self.ap.bbox, "segm": self.ap.segm, "validation": validation.fingerprint}
                path = self.folder.save_best(
                    {**self._describe_model(), "model": model.state_dict(), **facts}, step=self.done
                )
                if path:
                    self.best = BestCheckpoint(self.done, self.ap.bbox, self.ap.segm, str(path))
        self.ap, self.best = self.ranks.send((self.ap, self.best))
        self._unlogged_ap = self.ap, self.done

    def save(self, *, wait: bool = False, patiently: bool = False) -> None:
        """Write the state as a checkpoint in a thread, if any step was done since the last one.

        ``wait`` until it is written; ``patiently``, see `CheckpointFolder.save`.
        """
        if self.done != self._saved_step:
            self._fetch_losses()  # a loss that is not a number must not be saved as progress
            if self.ranks.is_first:
                state = {
                    **self._describe_model(),
                    "model": self.step.model.state_dict(),
                    "ema": self.ema.model.state_dict() if self.ema else None,
                    "optimizer": self.step.optimizer.state_dict(),
                    "scaler": self.step.scaler.state_dict(),
                    "loader": self._position,
                    "losses": torch.tensor(self.losses, dtype=torch.float64),
                }
                self.writer.submit(state, step=self.done, patiently=patiently)
            self._saved_step = self.done
        if wait:
            self.writer.finish()

    def load_state(self, state: dict[str, Any]) -> None:
        """Continue from a checkpoint, whose model, optimiser and place in the order are loaded already."""
        if self.ema:
            self.ema.model.load_state_dict(state.get("ema") or state["model"])
        validation = self.images.validation
        best = self.folder.read("best") if validation and self.ranks.is_first else None
        if validation and best and best.get("validation") == validation.fingerprint:
            self.best = BestCheckpoint(best["step"], best["bbox"], best["segm"], best["path"])
        self.done = self._saved_step = self._logged_step = state["step"]
        self.losses = state["losses"].tolist()
        self._position = self.loader.state_dict()

    def _describe_model(self) -> dict[str, Any]:
        dataset = self.images.dataset
        return {
            "plan": asdict(self.plan),
            "class_names": {int(label): str(name) for label, name in dataset.class_names.items()},
            "category_ids": {int(label): int(category) for label, category in dataset.category_ids.items()},
        }

    def _is_checkpoint_due(self, checkpoint_steps: int | None, *, epoch_ended: bool) -> bool:
        self.writer.check()
        if checkpoint_steps:
            return self.done % checkpoint_steps == 0
        return self.writer.is_due(epoch_ended=epoch_ended)

    def _stop_if_asked(self, interrupts: list[int]) -> None:
        """Stop if this process was interrupted, or any other: all of them after the same step."""
        waits = self.step.device.type == "cuda" and self.done % _AGREE_STEPS and self.done < self.plan.steps
        if self.ranks.count > 1 and waits:
            return  # processes on GPUs would wait for their GPUs
        if any(self.ranks.gather(bool(interrupts))):
            raise KeyboardInterrupt

    def _compute_rate(self, step: int) -> float:
        return compute_rate(step, steps=self.plan.steps, highest=self.plan.learning_rate)

    def _draw_seed(self, *more: int) -> int:
        return int(np.random.SeedSequence([self.plan.seed, self.done, *more]).generate_state(1, np.uint64)[0])

    def _own_rank(self) -> list[int]:
        return [self.ranks.rank] if self.ranks.rank else []

    def _read_memory(self) -> int | None:
        if self.step.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.step.device)
        torch.cuda.reset_peak_memory_stats(self.step.device)
        return peak

    def _fetch_losses(self) -> None:
        fresh = torch.stack([loss for loss, _ in self._pending]).tolist() if self._pending else []
        images = [ids for _, ids in self._pending]
        self._pending.clear()
        for step, (loss, ids) in enumerate(zip(fresh, images, strict=True), len(self.losses) + 1):
            if not math.isfinite(loss):
                self._saved_step = self.done  # weights that are not numbers are not saved
                self.writer.finish()
                raise ColabUtilsError(
                    f"expected a finite loss, found {loss} at step {step}, of the images with the ids "
                    f"{', '.join(map(str, ids))}. Look at these, and start again from "
                    f"{self.folder.newest or 'the start'} with a learning_rate lower than {self.plan.learning_rate:g}."
                )
        self.losses += fresh

    @contextmanager
    def _save_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            if not self.step.is_applying:  # whatever it is: the state is that of the step before
                self.save(wait=True, patiently=True)
            raise

    @contextmanager
    def _defer_interrupt(self) -> Iterator[list[int]]:
        """Put the first Ctrl-C into a list, so that the step in progress is finished; a second one, or one during an
        evaluation, interrupts at once. Of several processes it never does: ``torchrun`` sends several for one.
        """
        interrupts: list[int] = []

        def note(number: int, frame: FrameType | None) -> None:
            if self.ranks.count == 1 and (interrupts or self._is_evaluating):
                raise KeyboardInterrupt
            interrupts.append(number)

        previous = signal.getsignal(signal.SIGINT)
        # Signals reach the main thread only; a shell's background job ignores Ctrl-C, and so does its training.
        if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
            yield interrupts
            return
        signal.signal(signal.SIGINT, note)
        try:
            yield interrupts
        finally:
            signal.signal(signal.SIGINT, previous)


def _show_bar(steps: int, *, hidden: bool) -> Any:
    from tqdm import tqdm

    return tqdm(disable=True) if hidden else show_progress("training", total=steps, unit="step")


class EMA:
    """An exponential moving average of a model's weights; ``model`` holds it, and can be evaluated.

    The decay grows with the steps, ``(1 + steps) / (10 + steps)`` at first, as in TensorFlow's
    ``ExponentialMovingAverage``: otherwise the first, random weights would stay in it for thousands of steps.

    Args:
        model: On its device.
        decay: Between 0 and 1; 0.999 looks back over about 1,000 steps.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> ema = EMA(layer, decay=0.999)
        >>> _ = nn.init.constant_(layer.bias, 4.0)
        >>> ema.update(layer, steps=1000)
        >>> bool(ema.model.bias < layer.bias)
        True
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self.model, self._decay = copy.deepcopy(model), decay

    @torch.no_grad()
    def update(self, model: nn.Module, *, steps: int) -> None:
        """Take in the model's weights; ``steps`` were done before this one."""
        decay = min(self._decay, (1 + steps) / (10 + steps))
        torch._foreach_lerp_([*self.model.parameters()], [*model.parameters()], 1 - decay)
        for averaged, current in zip(self.model.buffers(), model.buffers(), strict=True):
            averaged.copy_(current)


@dataclass(frozen=True)
class Throughput:
    """Some steps: images trained, seconds waited for batches, seconds of the wall clock in all."""

    images: int = 0
    wait_s: float = 0.0
    wall_s: float = 0.0

    def __add__(self, other: Throughput) -> Throughput:
        return Throughput(self.images + other.images, self.wait_s + other.wait_s, self.wall_s + other.wall_s)

    @property
    def images_per_second(self) -> float:
        """Images trained per second of the wall clock; 0 before the first step."""
        return self.images / self.wall_s if self.images else 0.0

    @property
    def wait_share(self) -> float:
        """Share of the wall clock in which the device waited for a batch, 0 to 1."""
        return min(1.0, self.wait_s / self.wall_s) if self.images else 0.0


class StepTimer:
    """Measures images and waits by the wall clock; ``total`` sums up what was collected.

    On a GPU the wait is taken between two CUDA events: the time in which the GPU had nothing to do. Nothing is
    synchronised until ``collect``.

    Example:
        >>> timer = StepTimer(torch.device("cpu"))
        >>> with timer.wait():
        ...     timer.images += 2
        >>> timer.collect().images, timer.total.images
        (2, 2)
    """

    def __init__(self, device: torch.device) -> None:
        self.images, self.total = 0, Throughput()
        self._cuda, self._since_s = device.type == "cuda", perf_counter()
        self._marks: list[Any] = []  # CUDA events, or seconds: two for each wait

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Around the wait for a batch."""
        self._mark()
        yield
        self._mark()

    def collect(self) -> Throughput:
        """What happened since the last call, everything between the steps included."""
        marks, self._marks = self._marks, []
        if self._cuda and marks:
            marks[-1].synchronize()
            marks = [marks[0].elapsed_time(mark) / 1000 for mark in marks]
        now_s = perf_counter()
        found = Throughput(self.images, sum(marks[1::2]) - sum(marks[::2]), now_s - self._since_s)
        self.images, self._since_s, self.total = 0, now_s, self.total + found
        return found

    def _mark(self) -> None:
        self._marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else perf_counter())
        if self._cuda:
            self._marks[-1].record()
