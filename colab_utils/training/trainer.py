"""The training loop, and what a checkpoint saves of it between two steps."""

import math
import signal
import threading
import warnings
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from itertools import chain, repeat
from time import perf_counter
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from colab_utils.drive import DriveLostError
from colab_utils.errors import ColabUtilsError, ColabUtilsWarning, describe_error
from colab_utils.loading.clock import LoopClock
from colab_utils.loading.dataset import ShardDataset
from colab_utils.loading.loader import Loader
from colab_utils.progress import show_progress
from colab_utils.training.checkpoint import CheckpointFolder, State
from colab_utils.training.evaluate import AveragePrecision, evaluate
from colab_utils.training.prepare import OpenData
from colab_utils.training.report import (
    Log,
    LogLine,
    LossPoint,
    TrainingPlan,
    TrainReport,
    average_losses,
)
from colab_utils.training.settings import compute_rate
from colab_utils.training.step import TrainingStep

# The log gets a line after so many steps.
_LOG_STEPS = 10
# A terminal sends SIGHUP when it is closed.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Several processes ask each other after so many steps whether to stop.
_AGREE_STEPS = 10
# After so many skipped steps in a row, the weights are to blame, and not the batches. With float16,
# each skipped step halves the scale, from 2**16 on, so then the scale is not to blame either.
_MOST_SKIPPED = 20


class Trainer:
    """Trains a run step by step, and keeps its state: the model, the optimiser, the place in the
    order of the images, and the losses. ``train`` makes the trainer.

    It goes on after the steps of ``state``, a checkpoint, from which the step and the loader have
    loaded their parts. It stops so early that its last checkpoint is written by ``ends_s``, a time
    from `time.perf_counter`.
    """

    def __init__(
        self,
        plan: TrainingPlan,
        step: TrainingStep,
        loader: Loader,
        folder: CheckpointFolder,
        data: OpenData,
        *,
        state: State | None,
        ends_s: float,
    ) -> None:
        self.plan = plan
        self.step = step
        self.loader = loader
        self.folder = folder
        self.validation = data.validation
        self.ranks = step.ranks
        # Each checkpoint holds these facts about the run.
        self._facts = {
            "plan": asdict(plan),
            "class_names": dict(data.dataset.class_names),
            "category_ids": dict(data.dataset.category_ids),
        }
        # Images, seconds of waiting and seconds of the wall clock, up to the last line of the log.
        self._measured = (0, 0.0, 0.0)
        # The loss of each step. That of a skipped step may be no finite number.
        self.losses: list[float] = state["losses"].tolist() if state else []
        self.done = len(self.losses)
        self._saved_step = self.done
        self._logged_step = self.done
        self.ap: AveragePrecision | None = None
        self.best: AveragePrecision | None = None
        self.skipped = 0
        self._skipped_in_a_row = 0
        # The losses of the latest steps stay on the device, because reading each one would stall
        # it. Each tensor holds the loss, and 1 if the step was skipped. With it are the ids of the
        # step's images.
        self._pending: list[tuple[Tensor, list[int]]] = []
        self._position = loader.state_dict()
        # The number of the signal that asked this run to stop; 0 without one.
        self._signal = 0
        self._is_evaluating = False
        self._ends_s = ends_s
        # The seconds of the latest steps, waits included.
        self._steps_s = deque[float](maxlen=_AGREE_STEPS)
        self._evaluation_s = 0.0
        if state and self.done >= plan.steps:
            text = (
                f"the run of {state['path']} is finished: all of its {plan.steps} steps are done, "
                "so nothing is trained. Pass more steps or epochs (STEPS), another run folder "
                "(RUN_NAME), or resume='never' to start anew."
            )
            warnings.warn(text, ColabUtilsWarning, stacklevel=3)
        if state and self.validation and self.ranks.is_first:
            best = folder.read("best")
            if best and best["validation"] == self.validation.fingerprint:
                self.best = AveragePrecision(**best["ap"])
            else:
                # Its average precision cannot be compared with that of other images.
                folder.set_aside("best")

    def run(self, log: Log | None) -> TrainReport:
        """Train until the plan's last step or the end of the budget, evaluate, and return a report.

        ``log`` is called with the plan, then with each line. Without it, a progress bar is shown.

        Raises:
            KeyboardInterrupt: After Ctrl-C, when the step in progress is finished and saved.
            SystemExit: Likewise after SIGTERM (the status is 143) or SIGHUP (129).
            DriveLostError: The run has ended, and Drive does not take its last or its best
                checkpoint.
        """
        if log:
            log(self.plan)
        show = partial(tqdm, disable=True) if log or not self.ranks.is_first else show_progress
        steps = show("training", total=self.plan.steps - self.done)
        with self._save_what_was_done(), steps as bar:
            self.clock = LoopClock()
            batches = chain.from_iterable(repeat(self.loader))
            while self.done < self.plan.steps:
                self._seed()
                epoch = self.loader.epoch
                asked_s = self.clock.ask()
                batch = next(batches)
                self.clock.receive(self.loader.total)
                self._train(batch)
                bar.update()
                epoch_ended = self.loader.epoch > epoch
                is_first = self.done == self.plan.first_step + 1
                if is_first or self.done == self.plan.steps or self.done % _LOG_STEPS == 0:
                    self._log(log)
                # With a budget, a first checkpoint shows how long one takes.
                # Looking at the losses would make the other processes wait for their GPUs.
                if self.ranks.is_first and (
                    (is_first and self._ends_s < math.inf)
                    or self.folder.is_due(self.done, self.plan.checkpoint_steps)
                ):
                    self.save()
                self._steps_s.append(perf_counter() - asked_s)
                if self._stop_if_asked():
                    break
                if epoch_ended and self.done < self.plan.steps:
                    self.clock.stop()
                    self._evaluate()
            # What does not reach Drive is sent after the evaluation.
            self.save(is_last=True)
            self.folder.finish()
            self._stop_if_asked()
            self._evaluate()
            self.folder.finish()
        if self.ranks.is_first:
            self.folder.send_waiting()
        return TrainReport(
            steps=self.done,
            losses=tuple(LossPoint(number, loss) for number, loss in enumerate(self.losses, 1)),
            images_per_second=self.clock.images / self.clock.seconds,
            wait_share=self.clock.read() / self.clock.seconds,
            checkpoint=self.ranks.send(str(self.folder.paths.get("newest"))),
            ap=self.ap,
            plan=self.plan,
            best=self.best,
            skipped_steps=self.skipped,
        )

    def _train(self, batch: Any) -> None:
        """Train one step.

        Args:
            batch: A packed batch, or images and targets. None if this process has no image of the
                batch.
        """
        rate = compute_rate(self.done, steps=self.plan.steps, highest=self.plan.learning_rate)
        for group in self.step.optimizer.param_groups:
            group["lr"] = rate
        images, targets = batch if isinstance(batch, tuple) else (batch, None)
        total = self.loader.total
        flips = None
        if self.plan.augment == "flip":
            # All processes draw the same numbers, and each takes those of its images.
            draws = np.random.default_rng([self.plan.seed, self.done]).random(total) < 0.5
            flips = draws[self.ranks.rank :: self.ranks.count].tolist()
        loss = self.step(images, targets=targets, flips=flips, total=total)
        self.clock.end_step()
        self.done += 1
        self._position = self.loader.state_dict()
        # The table of a packed batch would keep the memory of the whole batch.
        if targets is not None:
            ids = [int(target["image_id"]) for target in targets]
        else:
            ids = [] if batch is None else batch.image_ids.tolist()
        row = torch.stack([loss, self.step.is_skipped.to(loss.dtype)])
        self._pending.append((row, ids))

    def _seed(self) -> None:
        """Seed torch's random numbers from the seed, the step and the process.

        So a checkpoint needs no random state. Transforms that run on the device draw some of them
        while a batch is loaded, and the step draws the others.
        """
        entropy = [self.plan.seed, self.done, self.ranks.rank]
        torch.manual_seed(int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]))

    def _log(self, log: Log | None) -> None:
        self._fetch_losses()
        gpu_bytes = None
        if self.step.device.type == "cuda":
            gpu_bytes = torch.cuda.max_memory_allocated(self.step.device)
        now = (self.clock.images, self.clock.read(), self.clock.seconds)
        images, wait_s, wall_s = np.subtract(now, self._measured).tolist()
        self._measured = now
        line = LogLine(
            step=self.done,
            steps=self.plan.steps,
            loss=average_losses(self.losses[self._logged_step :]),
            learning_rate=self.step.optimizer.param_groups[0]["lr"],
            images_per_second=images / wall_s,
            wait_share=wait_s / wall_s,
            gpu_bytes=gpu_bytes,
            ap=self.ap if self.ap and self.ap.step >= self._logged_step else None,
        )
        self._logged_step = self.done
        if log is not None:
            log(line)

    def _evaluate(self) -> None:
        """Evaluate on the first process if the budget has time for it.

        Until an evaluation was measured, an image is expected to take as long as in training.
        """
        self.ap = None
        if self.validation and self.ranks.is_first:
            image_s = self.ranks.count * self.clock.seconds / max(1, self.clock.images)
            if self._has_time(self._evaluation_s or image_s * len(self.validation)):
                began_s = perf_counter()
                self._is_evaluating = True
                self._measure_precision(self.validation)
                self._is_evaluating = False
                self._evaluation_s = perf_counter() - began_s
        self.ap, self.best = self.ranks.send((self.ap, self.best))

    def _measure_precision(self, validation: ShardDataset) -> None:
        """Evaluate, and save the weights if they are the best so far."""
        model = self.step.model
        try:
            measured = evaluate(model, validation, device=self.step.device)
        except (ColabUtilsError, OSError, MemoryError, torch.OutOfMemoryError) as error:
            # Training goes on without this result, and the next evaluation tries again.
            text = f"this evaluation is skipped: {describe_error(error)}"
            warnings.warn(text, ColabUtilsWarning, stacklevel=2)
            return
        self.ap = replace(measured, step=self.done)
        if self.best is None or self.ap.segm > self.best.segm:
            state = {
                **self._facts,
                "model": model.state_dict(),
                "ap": asdict(self.ap),
                "validation": validation.fingerprint,
            }
            self.folder.submit(state, step=self.done, which="best")
            self.best = self.ap

    def save(self, *, is_last: bool = False) -> None:
        """Write a checkpoint in a thread, if a step was done since the last checkpoint."""
        # If too many steps were skipped, this raises an error, so that they are not saved.
        self._fetch_losses()
        # If the last step was skipped, the weights may give no finite loss any more. They must not
        # replace those of the last checkpoint.
        limit = _MOST_SKIPPED if is_last else 1
        if self.done == self._saved_step or self._skipped_in_a_row >= limit:
            return
        if self.ranks.is_first:
            state = {
                **self._facts,
                "model": self.step.model.state_dict(),
                "optimizer": self.step.optimizer.state_dict(),
                "scaler": self.step.scaler.state_dict(),
                "loader": self._position,
                "losses": torch.tensor(self.losses, dtype=torch.float64),
            }
            self.folder.submit(state, step=self.done)
        self._saved_step = self.done

    def _save_last(self) -> None:
        """Save the last state, and send the checkpoints that wait on this machine to Drive.

        If Drive does not take them, the warning that they wait has said where they lie. An error
        would hide the error that ended training.
        """
        try:
            # In the middle of a step some weights are new and others old: that is no state to save.
            if not self.step.is_applying:
                self.save(is_last=True)
        finally:
            self.folder.finish()
            if self.ranks.is_first:
                with suppress(DriveLostError):
                    self.folder.send_waiting()

    def _fetch_losses(self) -> None:
        """Read the losses of the latest steps from the device.

        Raises:
            ColabUtilsError: Too many steps in a row were skipped.
        """
        pending = self._pending
        self._pending = []
        if not pending:
            return
        rows = torch.stack([row for row, _ in pending]).tolist()
        for (loss, is_skipped), (_, ids) in zip(rows, pending, strict=True):
            self.losses.append(loss)
            if is_skipped:
                self._note_skipped(loss, ids)
            else:
                self._skipped_in_a_row = 0

    def _note_skipped(self, loss: float, ids: list[int]) -> None:
        """Count a skipped step, warn of the first one, and stop training after too many in a row.

        All processes have skipped the same steps, so all of them stop.
        """
        text = f"step {len(self.losses)}, of the images with the ids {', '.join(map(str, ids))}"
        self._skipped_in_a_row += 1
        if self._skipped_in_a_row >= _MOST_SKIPPED:
            raise ColabUtilsError(
                "A step needs a finite loss and finite gradients, and there were none in the last "
                f"{_MOST_SKIPPED} steps. The last of these was {text}. Look at these images, and "
                "go on from the last checkpoint with a lower learning_rate."
            )
        # With float16, a gradient may overflow while the loss is finite. The scaler then tries a
        # smaller scale, which is usual.
        if self.step.scaler.is_enabled() and math.isfinite(loss):
            return
        self.skipped += 1
        if self.skipped == 1 and self.ranks.is_first:
            warnings.warn(
                f"A step was skipped, because its loss or a gradient was not finite: {text}. The "
                "weights are as they were before. Look at these images. If more steps are "
                "skipped, pass a lower learning_rate",
                ColabUtilsWarning,
                stacklevel=2,
            )

    @contextmanager
    def _save_what_was_done(self) -> Iterator[None]:
        """Save the state when the block ends with an error. Let Ctrl-C, SIGTERM and SIGHUP wait for
        the end of the step in progress.

        A second signal, or one during an evaluation, interrupts at once, but only if one process
        trains alone: ``torchrun`` sends each of its processes several signals for one Ctrl-C.
        """

        def note(number: int, _: object) -> None:
            if self.ranks.count == 1 and (self._signal or self._is_evaluating):
                _interrupt(number)
            self._signal = number

        handlers = {}
        # Only the main thread can set handlers of signals.
        if threading.current_thread() is threading.main_thread():
            handlers = {number: signal.getsignal(number) for number in _SIGNALS}
        for number, handler in [*handlers.items()]:
            # A background job of a shell ignores Ctrl-C, and nohup ignores SIGHUP. That stays so.
            if handler in (signal.SIG_IGN, None):
                del handlers[number]
            else:
                signal.signal(number, note)
        try:
            yield
        except BaseException as error:
            # Whatever the error is, the state after the last complete step is sound.
            self._save_last()
            # The signal went to the loading workers, too. Their end caused this error.
            if self._signal and isinstance(error, ColabUtilsError):
                _interrupt(self._signal)
            raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _stop_if_asked(self) -> bool:
        """Stop if a signal reached this process or another one, and return whether the budget is
        used up. All processes stop after the same step.
        """
        steps = _AGREE_STEPS if self.ranks.count > 1 else 1
        # Asking the other processes takes time, so it is done every few steps.
        if self.done % steps and self.done < self.plan.steps:
            return False
        is_over = not self._has_time(steps * max(self._steps_s, default=0.0))
        number, is_over = max(self.ranks.gather((self._signal, is_over)))
        if number:
            _interrupt(number)
        return is_over

    def _has_time(self, seconds: float) -> bool:
        """Return whether the budget has these seconds and those of the last checkpoint."""
        # Another checkpoint may be in progress when the last one begins.
        seconds += 2 * self.folder.slowest_s
        return perf_counter() + seconds < self._ends_s


def _interrupt(number: int) -> NoReturn:
    """Raise KeyboardInterrupt for Ctrl-C. Otherwise exit with the status that shells use for the
    signal.
    """
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)
