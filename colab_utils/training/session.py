"""The steps of a training run, and the state between two of them that a checkpoint holds."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from itertools import chain, repeat
from statistics import fmean
from time import perf_counter
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch
from colab_utils.loading.loader import Loader
from colab_utils.runtime import show_progress
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.meter import Pace, StepMeter
from colab_utils.training.report import LogLine, TrainingPlan
from colab_utils.training.step import TrainingStep, compute_rate, make_optimizer

__all__ = ["TrainingSession"]

_CHECKPOINT_INTERVAL_S = 60.0


class TrainingSession:
    """The state of a run between two steps; made by ``train``, all of it goes into a checkpoint."""

    def __init__(self, plan: TrainingPlan, network: nn.Module, loader: Loader, folder: CheckpointFolder) -> None:
        optimizer = make_optimizer(network, name=plan.model, learning_rate=plan.learning_rate)
        self.step = TrainingStep(network, plan.device, optimizer=optimizer)
        self.plan, self.loader, self.folder = plan, loader, folder
        self.done = self._saved_step = 0
        self.losses: list[float] = []
        # losses still on the device, where asking for each would stall it, and the images they are of
        self._pending: list[tuple[Tensor, list[int]]] = []
        self._position = loader.state_dict()
        self._saved_s = perf_counter()
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[Any] | None = None

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint."""
        self.step.model.load_state_dict(state["model"])
        self.step.optimizer.load_state_dict(state["optimizer"])
        self.step.scaler.load_state_dict(state["scaler"])
        self.done = self._saved_step = state["step"]
        self.losses = state["losses"].tolist()
        position = state["loader"]
        if self.plan.changed:  # the order was one of other batches: rather leave images out than see them twice
            position = {**self._position, "epoch": position["epoch"] + (position["batch"] > 0)}
        self.loader.load_state_dict(position)
        self._position = position

    def run(self, *, log: Callable[[Any], object] | None, log_steps: int, checkpoint_steps: int | None) -> Pace:
        """Train until the plan's last step; returns the pace without the first step."""
        steps, meter = self.plan.steps, StepMeter(self.step.device)
        first, total, logged = Pace(), Pace(), self.done
        batches = chain.from_iterable(repeat(self.loader))
        progress = nullcontext() if log else show_progress("training", total=steps - self.done, unit="step")
        with _defer_interrupt() as interrupts, progress as bar:
            images = 0
            while self.done < steps:
                meter.mark()
                try:
                    batch = next(batches)
                except BaseException:  # whatever it is: between two steps the state is whole, so keep it
                    self.save(patiently=True)
                    raise
                meter.mark()
                rate = self._train_batch(batch)
                meter.mark()
                images += len(batch)
                if not first.images or self.done % log_steps == 0 or self.done == steps:
                    self._fetch_losses()
                    pace, images = meter.collect(images=images), 0
                    first, total = (first, total + pace) if first.images else (pace, total)
                    if log:
                        mean = fmean(self.losses[logged:])
                        log(LogLine(self.done, steps, mean, rate, pace.images_per_second, pace.wait_share))
                    logged = self.done
                if bar is not None:
                    bar.update(1)
                if self._writing and self._writing.done():
                    self._finish_writing()  # an error ends the run now, not a minute later
                minute = perf_counter() - self._saved_s >= _CHECKPOINT_INTERVAL_S and not self._writing
                due = self.done % checkpoint_steps == 0 if checkpoint_steps else minute
                if due or interrupts or self.done == steps:
                    self.save(wait=bool(interrupts) or self.done == steps, patiently=self.done == steps)
                if interrupts:
                    self.save()  # again, if it was asked for meanwhile
                    raise KeyboardInterrupt
        return total if total.images else first

    def save(self, *, wait: bool = True, patiently: bool = False) -> None:
        """Copy the state, if any step was done since the last time, and write it as a checkpoint in a thread.

        ``wait`` until it is proven; ``patiently``, see `CheckpointFolder.save`.
        """
        if self.done != self._saved_step:
            self._fetch_losses()  # a loss that is not a number must not be saved as progress
            state = {
                "plan": asdict(self.plan),
                "model": self.step.model.state_dict(),
                "optimizer": self.step.optimizer.state_dict(),
                "scaler": self.step.scaler.state_dict(),
                "loader": self._position,
                "losses": torch.tensor(self.losses, dtype=torch.float64),
            }
            self._finish_writing()
            self._writing = self._writer.submit(
                self.folder.save, _copy_to_cpu(state), step=self.done, patiently=patiently
            )
            self._saved_step, self._saved_s = self.done, perf_counter()
        if wait:
            self._finish_writing()

    def _finish_writing(self) -> None:
        writing, self._writing = self._writing, None
        try:
            if writing:
                writing.result()
        except BaseException:
            self._saved_step = -1
            raise

    def _train_batch(self, batch: PackedBatch) -> float:
        # All chance in a step comes from (seed, step), so that no random state has to be saved.
        entropy = np.random.SeedSequence([self.plan.seed, self.done]).generate_state(2, np.uint64).tolist()
        torch.manual_seed(entropy[0])
        generator = torch.Generator().manual_seed(entropy[1])
        rate = compute_rate(self.done, steps=self.plan.steps, highest=self.plan.learning_rate)
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate
        flips = (torch.rand(len(batch), generator=generator) < 0.5).tolist()
        try:
            loss = self.step(batch.to(self.step.device), flips=flips)
            self._pending.append((loss, batch.image_ids.tolist()))
        except Exception:
            self._fetch_losses()  # weights that are no numbers any more make torchvision fail in odd places
            raise
        self.done += 1
        self._position = self.loader.state_dict()
        return rate

    def _fetch_losses(self) -> None:
        fresh = torch.stack([loss for loss, _ in self._pending]).tolist() if self._pending else []
        images = [ids for _, ids in self._pending]
        self._pending.clear()
        for step, (loss, ids) in enumerate(zip(fresh, images, strict=True), len(self.losses) + 1):
            if not math.isfinite(loss):
                last = self.folder.newest or "the start"
                raise ColabUtilsError(
                    f"expected a finite loss, found {loss} at step {step}, of the images with the ids "
                    f"{', '.join(map(str, ids))}. Look at these, and start again from {last} with a learning_rate "
                    f"lower than {self.plan.learning_rate:g}."
                )
        self.losses += fresh


def _copy_to_cpu(value: Any) -> Any:
    """A copy of a state that training no longer changes."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_to_cpu, value))
    return value


@contextmanager
def _defer_interrupt() -> Iterator[list[int]]:
    """Put the first Ctrl-C into a list, so that the step in progress is finished; a second interrupts at once."""
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked:
            raise KeyboardInterrupt
        asked.append(number)

    previous = signal.getsignal(signal.SIGINT)
    # Signals reach the main thread only; a shell's background job ignores Ctrl-C, and goes on to.
    if threading.current_thread() is not threading.main_thread() or previous in (signal.SIG_IGN, None):
        yield asked
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield asked
    finally:
        signal.signal(signal.SIGINT, previous)
