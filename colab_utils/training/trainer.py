"""The steps of a training run, and the state between two of them that a checkpoint holds."""

from __future__ import annotations

import io
import math
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import chain, repeat
from pathlib import Path
from statistics import fmean
from time import monotonic, perf_counter, thread_time
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from colab_utils.drive import guard_drive, is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import PackedBatch, collate_packed
from colab_utils.loading.loader import Loader
from colab_utils.runtime import show_progress, write_file
from colab_utils.training.checkpoint import CheckpointFolder
from colab_utils.training.evaluate import Judge, Judgement
from colab_utils.training.settings import BestCheckpoint, LogLine, TrainingPlan
from colab_utils.training.step import TrainingStep, compute_rate

__all__ = ["Board", "StepTimer", "Throughput", "Trainer", "WeightEMA"]


class WeightEMA:
    """An exponential moving average of a model's weights; ``model`` holds it, and can be evaluated.

    The decay grows with the steps, ``(1 + steps) / (10 + steps)`` at first, as in TensorFlow's
    ``ExponentialMovingAverage``: else the first, random weights would stay in it for thousands of steps.

    Args:
        model: on its device.
        decay: between 0 and 1; 0.999 looks back over about 1,000 steps.

    Example:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> averaged = WeightEMA(layer, decay=0.999)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> averaged.update(); _ = nn.init.constant_(layer.weight, 4.0); averaged.update()
        >>> round(averaged.model.weight.item(), 2)
        3.64
    """

    def __init__(self, model: nn.Module, *, decay: float) -> None:
        self._source, self._decay, self._steps = model, decay, 0
        self._averaged = AveragedModel(model, multi_avg_fn=self._average)

    @property
    def model(self) -> nn.Module:
        """The model with the averaged weights."""
        module: nn.Module = self._averaged.module
        return module

    def update(self) -> None:
        """Take in the model's weights, after a step."""
        self._averaged.update_parameters(self._source)
        self._steps += 1

    def _average(self, averaged: Any, current: Any, count: Any) -> None:
        decay = min(self._decay, (1 + self._steps) / (10 + self._steps))
        get_ema_multi_avg_fn(decay)(averaged, current, count)

    def state_dict(self) -> dict[str, Any]:
        """Weights, and over how many steps they are averaged."""
        return {"model": self.model.state_dict(), "steps": self._steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.model.load_state_dict(state["model"])
        self._steps = state["steps"]
        self._averaged.n_averaged.fill_(state["steps"])


@dataclass(frozen=True)
class Throughput:
    """Some steps: images trained, seconds waited for batches, seconds in the steps themselves."""

    images: int = 0
    wait_s: float = 0.0
    step_s: float = 0.0

    def __add__(self, other: Throughput) -> Throughput:
        return Throughput(self.images + other.images, self.wait_s + other.wait_s, self.step_s + other.step_s)

    @property
    def images_per_second(self) -> float:
        """Images trained in a second, waiting included; 0 before the first step."""
        return self.images / (self.wait_s + self.step_s) if self.images else 0.0

    @property
    def wait_share(self) -> float:
        """Wait / (wait + step), 0 to 1: near 0 the device is always busy."""
        return self.wait_s / (self.wait_s + self.step_s) if self.images else 0.0


class StepTimer:
    """Three marks a step: before the wait, when the batch is there, when the step is done.

    On a GPU the marks are CUDA events: the wait is the time in which the GPU had nothing to do, and nothing
    is synchronised until ``collect``.

    Example:
        >>> meter = StepTimer(torch.device("cpu"))
        >>> for _ in range(3):
        ...     meter.mark()
        >>> meter.collect(images=2).images
        2
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []  # CUDA events, or seconds

    def mark(self) -> None:
        """Note the time: on a GPU, the one at which it gets here."""
        self._marks.append(torch.cuda.Event(enable_timing=True) if self._cuda else perf_counter())
        if self._cuda:
            self._marks[-1].record()

    def collect(self, *, images: int) -> Throughput:
        """The pace of the steps since the last call, in which so many images were trained."""
        times, self._marks = self._marks, []
        if self._cuda:
            times[-1].synchronize()
            times = [times[0].elapsed_time(mark) / 1000 for mark in times]
        started, ready, done = (sum(times[k::3]) for k in range(3))
        return Throughput(images, ready - started, done - ready)


_SENT_S = 60.0


class Board:
    """Writes events to ``run/tensorboard``. Google Drive does not send a file that stays open: there the events are
    written to the local disk, and copied once a minute.

    Raises:
        ColabUtilsError: TensorBoard is not installed.

    Example:
        >>> Board("runs/first").close()  # doctest: +SKIP
    """

    def __init__(self, run: str | Path, *, first_step: int = 0) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ColabUtilsError(
                "expected TensorBoard for tensorboard=True, found none. Install it: pip install tensorboard"
            ) from None
        self._folder = Path(run) / "tensorboard"
        self._here = Path(tempfile.mkdtemp(prefix="tensorboard-")) if is_on_drive(run) else self._folder
        self._writer: Any = SummaryWriter(str(self._here), purge_step=first_step + 1)
        self._sent_s = monotonic()

    def add(self, line: LogLine) -> None:
        """One log line's numbers."""
        numbers = {
            "loss": line.loss, "learning_rate": line.learning_rate, "images_per_second": line.images_per_second,
            "wait_share": line.wait_share, "gpu_gigabytes": line.gpu_bytes and line.gpu_bytes / 1e9,
        }  # fmt: skip
        for name, value in numbers.items():
            if value is not None:
                self._writer.add_scalar(f"train/{name}", value, line.step)
        if monotonic() - self._sent_s > _SENT_S:
            self._send()

    def add_precision(self, judgement: Judgement) -> None:
        """The average precision of some step's weights."""
        self._writer.add_scalar("val/AP of boxes", judgement.ap.bbox, judgement.step)
        self._writer.add_scalar("val/AP of masks", judgement.ap.segm, judgement.step)

    def close(self) -> None:
        """Write what is left."""
        self._writer.close()
        self._send()

    def _send(self) -> None:
        self._sent_s = monotonic()
        self._writer.flush()
        if self._here != self._folder:
            with suppress(OSError):  # Drive is away: the next time sends all of it
                shutil.copytree(self._here, self._folder, dirs_exist_ok=True)


_STOP_STEPS = 10  # after which ranks on GPUs ask each other whether to stop


_SHARE = 100  # a checkpoint in so many times the time that it takes from the steps


_PAUSES_S = (60.0, 300.0)  # between two, where no number of minutes is asked for


class Trainer:
    """The state of a run between two steps; made by ``train``, all of it goes into a checkpoint."""

    def __init__(
        self, plan: TrainingPlan, step: TrainingStep, loader: Loader, folder: CheckpointFolder, *,
        judge: Judge | None = None, note: Callable[[Judgement], object] = bool,
    ) -> None:  # fmt: skip
        self.plan, self.step, self.loader, self.folder, self.judge = plan, step, loader, folder, judge
        self.note = note  # called with each judgement
        self.average = WeightEMA(step.model, decay=plan.ema) if plan.ema else None
        self.best: BestCheckpoint | None = None
        self.done = self._saved_step = 0
        self.losses: list[float] = []
        # losses still on the device, where asking for each would stall it, and the images they are of
        self._pending: list[tuple[Tensor, list[int]]] = []
        self._position = loader.state_dict()
        self._saved_s, self._cost_s = perf_counter(), 0.0  # what the last checkpoint took from the steps
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: list[Future[Any]] = []

    @property
    def network(self) -> nn.Module:
        """The model that is judged: with averaged weights where there are such."""
        return self.average.model if self.average else self.step.model

    def load_state(self, state: dict[str, Any]) -> None:
        """Go on from a checkpoint, whose place in the order the loader has already."""
        if self.average:
            self.average.load_state_dict(state.get("average") or {"model": state["model"], "steps": state["step"]})
        self.best = self._find_best()
        self.done = self._saved_step = state["step"]
        self.losses = state["losses"].tolist()
        self._position = self.loader.state_dict()

    def _find_best(self) -> BestCheckpoint | None:
        """The best weights that lie in the folder, if these validation images judged them."""
        known = self.folder.load_best() if self.judge and self.step.ranks.is_first else None
        if not (self.judge and known and known.get("validation") == self.judge.fingerprint):
            return None
        return BestCheckpoint(known["step"], known["bbox"], known["segm"], known["path"])

    def run(
        self, *, log: Callable[[LogLine], object], quiet: bool, log_steps: int, checkpoint_steps: int | None,
        checkpoint_minutes: float | None,
    ) -> Throughput:  # fmt: skip
        """Train until the plan's last step; returns the pace without the first step. ``quiet``: no progress bar."""
        steps, meter, ranks = self.plan.steps, StepTimer(self.step.device), self.step.ranks
        first, total, logged = Throughput(), Throughput(), self.done
        own = [ranks.rank] if ranks.rank else []
        batches = chain.from_iterable(repeat(self.loader))
        progress = nullcontext() if quiet else show_progress("training", total=steps - self.done, unit="step")
        with _defer_interrupt(insistent=ranks.count == 1) as interrupts, progress as bar:
            images, judged = 0, list[Judgement]()
            if self.judge and self.done and not self._position["batch"] and self.done < steps:
                self.judge.begin(self.network, self.done)  # an epoch was over when the run was left
            while self.done < steps:
                meter.mark()
                epoch = self.loader.epoch
                with self._keep_state():
                    torch.manual_seed(self._draw_seed(1, *own))  # of transforms that run on the device
                    batch = next(batches)
                meter.mark()
                images += self.loader.total
                rate = self._train_batch(batch, stop=bool(interrupts))
                meter.mark()
                if not first.images or self.done % log_steps == 0 or self.done == steps:
                    self._fetch_losses()
                    pace, images = meter.collect(images=images), 0
                    first, total = (first, total + pace) if first.images else (pace, total)
                    line = LogLine(self.done, steps, fmean(self.losses[logged:]), rate, pace.images_per_second,
                                   pace.wait_share, self._read_memory())  # fmt: skip
                    with self._keep_state():
                        log(replace(line, ap=judged[-1].ap, ap_step=judged[-1].step) if judged else line)
                    logged, judged = self.done, []
                if bar is not None:
                    bar.update(1)
                if self._writing and all(job.done() for job in self._writing):
                    self._finish_writing()  # an error ends the run now, not a minute later
                ended, since_s = self.loader.epoch != epoch, perf_counter() - self._saved_s
                late = since_s >= self._choose_pause(checkpoint_minutes) or (ended and since_s >= _SHARE * self._cost_s)
                due = self.done % checkpoint_steps == 0 if checkpoint_steps else late and not self._writing
                stop = self._ask_whether_to_stop(interrupts)
                if due or stop or self.done == steps:
                    self.save(wait=stop or self.done == steps, patiently=self.done == steps)
                if stop:
                    self.save()  # again, if it was asked for meanwhile
                    raise KeyboardInterrupt
                if self.judge:
                    with self._keep_state():
                        judged += self._judge(self.judge, ended=ended and self.done < steps)
            self._end_if_asked(interrupts)  # while the last checkpoint was written
            if self.judge and (late_one := self.judge.advance(to_end=True)):
                self.keep_best(late_one)
            self._end_if_asked(interrupts)
        return total if total.images else first

    @contextmanager
    def _keep_state(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # whatever it is: between two steps the state is whole, so keep it
            self.save(patiently=True)
            raise

    def save(self, *, wait: bool = True, patiently: bool = False) -> None:
        """Copy the state, if any step was done since the last time, and write it as a checkpoint in a thread.

        ``wait`` until it is proven; ``patiently``, see `CheckpointFolder.save`.
        """
        if self.done != self._saved_step:
            self._fetch_losses()  # a loss that is not a number must not be saved as progress
            if self.step.ranks.is_first:
                self._finish_writing()
                began_s = perf_counter()
                state = {
                    **self._describe_model(self.step.model.state_dict()),
                    "average": self.average.state_dict() if self.average else None,
                    "optimizer": self.step.optimizer.state_dict(),
                    "scaler": self.step.scaler.state_dict(),
                    "loader": self._position,
                    "losses": torch.tensor(self.losses, dtype=torch.float64),
                }
                copied = _copy_to_cpu(state)
                self._cost_s = perf_counter() - began_s
                self._writing.append(self._writer.submit(self._write, copied, step=self.done, patiently=patiently))
            self._saved_step, self._saved_s = self.done, perf_counter()
        if wait:
            self._finish_writing()

    def _write(self, state: dict[str, Any], *, step: int, patiently: bool) -> None:
        began_s = thread_time()
        self.folder.save(state, step=step, patiently=patiently)
        if self.step.device.type == "cpu":  # else the steps leave a core for it
            self._cost_s += thread_time() - began_s

    def _choose_pause(self, minutes: float | None) -> float:
        """Seconds between two checkpoints."""
        return min(max(_PAUSES_S[0], _SHARE * self._cost_s), _PAUSES_S[1]) if minutes is None else 60 * minutes

    def keep_best(self, judgement: Judgement, *, wait: bool = False) -> None:
        """Write the weights that were judged, if none were better so far; ``wait`` until that is done."""
        self.note(judgement)
        if self.step.ranks.is_first and self._is_better(judgement):
            weights = _copy_to_cpu(judgement.weights)
            self._writing.append(self._writer.submit(self._write_best, judgement, weights))
        if wait:
            self._finish_writing()

    def _is_better(self, judgement: Judgement) -> bool:
        return self.best is None or judgement.ap.segm > self.best.segm

    def _write_best(self, judgement: Judgement, weights: dict[str, Any]) -> None:
        if self._is_better(judgement):  # also than what was being written when it was asked for
            ap, judge = judgement.ap, self.judge
            known = {"bbox": ap.bbox, "segm": ap.segm, "validation": judge.fingerprint if judge else ""}
            path = self.folder.save_best({**self._describe_model(weights), **known}, step=judgement.step)
            if path:
                self.best = BestCheckpoint(judgement.step, ap.bbox, ap.segm, str(path))

    def close(self) -> None:
        """Wait until nothing is written any more."""
        self._writer.shutdown()

    def _describe_model(self, weights: dict[str, Any]) -> dict[str, Any]:
        return {"plan": asdict(self.plan), "model": weights}

    def _judge(self, judge: Judge, *, ended: bool) -> list[Judgement]:
        """Go on with an evaluation, and begin one where an epoch has ended."""
        found = judge.advance(to_end=ended)
        if found:
            self.keep_best(found)  # before the next one takes the place of the weights that were judged
        if ended:
            self.step.ranks.copy_buffers(self.network)
            judge.begin(self.network, self.done)
        return [found] if found else []

    def _ask_whether_to_stop(self, interrupts: list[int]) -> bool:
        """Whether this or another rank was interrupted: all of them stop after the same step."""
        if self.step.ranks.count == 1:
            return bool(interrupts)
        if self.step.device.type == "cuda" and self.done % _STOP_STEPS and self.done < self.plan.steps:
            return False  # to look at a GPU's number is to wait for it
        return bool(self.step.stops > 0)

    def _end_if_asked(self, interrupts: list[int]) -> None:
        if self.step.ranks.agree(bool(interrupts)):
            raise KeyboardInterrupt

    def _read_memory(self) -> int | None:
        if self.step.device.type != "cuda":
            return None
        peak = torch.cuda.max_memory_allocated(self.step.device)
        torch.cuda.reset_peak_memory_stats(self.step.device)
        return peak

    def _finish_writing(self) -> None:
        writing, self._writing = self._writing, []
        try:
            for job in writing:
                job.result()
        except BaseException:
            self._saved_step = -1
            raise

    def _draw_seed(self, *more: int) -> int:
        """All chance comes from (seed, step), so that no random state has to be saved."""
        return int(np.random.SeedSequence([self.plan.seed, self.done, *more]).generate_state(1, np.uint64)[0])

    def _train_batch(self, batch: PackedBatch | tuple[list[Tensor], list[Any]] | None, *, stop: bool) -> float:
        ranks, total = self.step.ranks, self.loader.total
        entropy = np.random.SeedSequence([self.plan.seed, self.done]).generate_state(2, np.uint64).tolist()
        torch.manual_seed(self._draw_seed(2, ranks.rank) if ranks.rank else entropy[0])
        generator = torch.Generator().manual_seed(entropy[1])
        rate = compute_rate(
            self.done, steps=self.plan.steps, highest=self.plan.learning_rate, schedule=self.plan.schedule
        )
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate
        flips = ranks.share((torch.rand(total, generator=generator) < 0.5).tolist())
        try:
            if isinstance(batch, tuple):
                images, targets = batch
                ids = [int(target["image_id"]) for target in targets]
                try:
                    loss = self.step(images, targets, total=total, stop=stop)
                except AssertionError as error:  # torchvision's, of boxes without an area
                    raise ColabUtilsError(
                        f"expected images and boxes that torchvision trains on from your transforms, found: {error} "
                        "End them with v2.SanitizeBoundingBoxes()."
                    ) from error
            else:
                ids = [] if batch is None else batch.image_ids.tolist()
                packed = None if batch is None else batch.to(self.step.device)
                mirrored = None if self.plan.augment == "none" else flips
                loss = self.step(packed, flips=mirrored, total=total, stop=stop)
            self._pending.append((loss, ids))
        except Exception:
            self._fetch_losses()  # weights that are no numbers any more make torchvision fail in odd places
            raise
        if self.average:
            self.average.update()
        self.done += 1
        self._position = self.loader.state_dict()
        return rate

    def _fetch_losses(self) -> None:
        fresh = torch.stack([loss for loss, _ in self._pending]).tolist() if self._pending else []
        images = [ids for _, ids in self._pending]
        self._pending.clear()
        for step, (loss, ids) in enumerate(zip(fresh, images, strict=True), len(self.losses) + 1):
            if not math.isfinite(loss):
                wait(self._writing)  # the checkpoint that is being written counts
                last = self.folder.newest or "the start"
                raise ColabUtilsError(
                    f"expected a finite loss, found {loss} at step {step}, of the images with the ids "
                    f"{', '.join(map(str, ids))}{self._keep_batch(ids, step)}. Look at these, and start again from "
                    f"{last} with a learning_rate lower than {self.plan.learning_rate:g}."
                )
        self.losses += fresh

    def _keep_batch(self, ids: list[int], step: int) -> str:
        """Save the images of a batch for a look at them, as they lie in the shards; returns where, in words."""
        dataset: Any = self.loader.dataset
        rows = {int(image_id): row for row, image_id in enumerate(dataset.dataset.image_ids.tolist())}
        rank = self.step.ranks.rank  # each has its own images
        path = self.folder.run / f"nonfinite-{step:08d}{f'-{rank}' if rank else ''}.pt"
        with suppress(ColabUtilsError, OSError):  # it is only for a look
            batch = collate_packed([dataset.dataset.read_packed(rows[image_id]) for image_id in ids])
            data = io.BytesIO()
            tables = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
            torch.save({**tables, "masks": tuple(part.clone() for part in batch.masks)}, data)
            with guard_drive(path):
                write_file(path, data.getvalue())
            return f" (saved in {path})"
        return ""


def _copy_to_cpu(value: Any) -> Any:
    """A copy of a state that training no longer changes."""
    if isinstance(value, Tensor):
        # in the usual order of memory, as everybody's code that reads weights expects it
        return value.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
    if isinstance(value, dict):
        return {key: _copy_to_cpu(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_copy_to_cpu, value))
    return value


@contextmanager
def _defer_interrupt(*, insistent: bool) -> Iterator[list[int]]:
    """Put the first Ctrl-C into a list, so that the step in progress is finished; a second interrupts at once, where
    that is ``insistent``: ``torchrun`` sends several for one.
    """
    asked: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if asked and insistent:
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
