"""The log lines of a run as TensorBoard events, in a place where they outlast the machine."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from colab_utils.drive import is_on_drive
from colab_utils.errors import ColabUtilsError
from colab_utils.training.judge import Judgement
from colab_utils.training.report import LogLine

__all__ = ["Board"]

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
