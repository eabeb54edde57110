"""Checkpoints that are written in a thread while training goes on."""

from concurrent.futures import Future
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from colab_utils.places import Place
from colab_utils.processes import ThreadPool
from colab_utils.training.checkpoint import State
from colab_utils.training.checkpoint_folder import CheckpointFolder, Which

# Seconds from one checkpoint until the next is due. The first number is for the middle of an epoch,
# the second for its end.
_PAUSES_S = (60.0, 10.0)


class CheckpointWriter:
    """Writes checkpoints in a thread while training goes on, and decides when the next one is due.

    Args:
        folder: Where the checkpoints are written.
        every_steps: Steps from one checkpoint to the next. Default: one checkpoint a minute, and
            one at the end of an epoch if ten seconds have passed since the last.

    Example:
        >>> import tempfile
        >>> writer = CheckpointWriter(CheckpointFolder(tempfile.mkdtemp()))
        >>> writer.submit({"weight": torch.ones(2)}, step=3)
        >>> writer.close()
    """

    def __init__(self, folder: CheckpointFolder, every_steps: int | None = None) -> None:
        self._folder = folder
        self._every_steps = every_steps
        self._saved_s = perf_counter()
        self._thread = ThreadPool(1, "checkpoint")
        self._jobs: list[Future[Place]] = []

    def is_due(self, step: int, *, epoch_ended: bool) -> bool:
        """Return whether a checkpoint is due after this step. While the last checkpoint is being
        written, the answer is False.

        Raises:
            ColabUtilsError: The last checkpoint could not be written.
        """
        if not all(job.done() for job in self._jobs):
            return False
        self.finish()
        if self._every_steps is not None:
            return step % self._every_steps == 0
        return perf_counter() - self._saved_s >= _PAUSES_S[epoch_ended]

    def submit(
        self,
        state: State,
        *,
        step: int,
        which: Which = "newest",
        is_last: bool = False,
    ) -> None:
        """Copy a state to this machine's memory, and write it in the thread."""
        copy = copy_to_cpu(dict(state))
        job = self._thread.submit(self._folder.save, copy, step=step, which=which, is_last=is_last)
        self._jobs.append(job)
        self._saved_s = perf_counter()

    def finish(self) -> None:
        """Wait until all checkpoints are written.

        Raises:
            ColabUtilsError: One of them could not be written.
        """
        jobs = self._jobs
        self._jobs = []
        for job in jobs:
            job.result()

    def close(self) -> None:
        """End the thread, after the write in progress."""
        self._thread.shutdown()


def copy_to_cpu(value: Any) -> Any:
    """Copy all tensors in a value to the CPU, so that training does not change them while they are
    written. The copies are contiguous, because code that reads weights expects it.

    Example:
        >>> copy_to_cpu({"steps": [1], "weight": torch.zeros(1)})
        {'steps': [1], 'weight': tensor([0.])}
    """

    def copy_tensor(tensor: Tensor) -> Tensor:
        return tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    return tree_map_only(Tensor, copy_tensor, value)
