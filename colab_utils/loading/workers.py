"""What runs in the loader's worker processes, and what to say when one of them dies."""

from __future__ import annotations

import re
import shutil
import signal
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset, get_worker_info

from colab_utils.errors import ColabUtilsError
from colab_utils.loading.batch import Parcel, pack_parcel
from colab_utils.loading.sample import PackedSample, pack_target
from colab_utils.runtime import format_bytes

__all__ = ["PackedView", "explain_death", "pass_on", "start_worker"]


class PackedView(Dataset[Any]):
    """Any dataset, read as torch's loader asks it: a list of indices at a time."""

    def __init__(self, dataset: Dataset[Any], batch_size: int) -> None:
        self._dataset = dataset
        self._batch_size = batch_size

    def __getitems__(self, indices: list[int]) -> Parcel | list[PackedSample] | ColabUtilsError:
        """A batch, or the samples of a part of one; an error goes over as it is, without torch's traceback."""
        read = getattr(self._dataset, "read_packed", None)
        try:
            samples = [read(i) if read else _pack(self._dataset[i]) for i in indices]
            if len(samples) == self._batch_size:
                return pack_parcel(samples, shared=get_worker_info() is not None)
        except ColabUtilsError as error:
            return error
        return samples


def _pack(sample: Any) -> PackedSample:
    if not isinstance(sample, tuple | list) or len(sample) != 2:
        raise ColabUtilsError(
            f"expected (image, target) from your dataset, found {type(sample).__name__}. See torchvision's detection "
            "datasets for the contract."
        )
    return pack_target(*sample)


def pass_on(result: Any) -> Any:
    """The collate function of a loader whose dataset has done the work."""
    return result


def start_worker(_: int) -> None:
    """Set up a worker process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to answer


def explain_death(found: str) -> ColabUtilsError:
    """A worker's death in words, from what torch says about it."""
    import psutil

    how = re.search(r"killed by signal: ([\w ]+)|exit code \d+", found)
    free = f"{format_bytes(psutil.virtual_memory().available)} of memory"
    if Path("/dev/shm").is_dir():
        free += f" and {format_bytes(shutil.disk_usage('/dev/shm').free)} of /dev/shm"
    return ColabUtilsError(
        f"expected every worker process to live, found one ended ({how[0] if how else 'no reason given'}); now {free} "
        "are free. Mostly memory ran out: use fewer workers, a smaller prefetch or a smaller batch, and run it again."
    )
