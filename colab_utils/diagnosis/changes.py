"""What changed since an earlier diagnosis, or an earlier run under `watch`."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from colab_utils.errors import ColabUtilsError
from colab_utils.places import require_local_path

# A change of at most this many standard errors is noise.
_SURE = 2


@dataclass(frozen=True)
class Change:
    """Comparison of a run with an earlier one."""

    ratio: float
    """Images per second, divided by those of the earlier run."""
    noise: float
    """How far the ratio may be from 1 if the runs are equally fast: two standard errors."""
    fails: bool
    """Whether the ratio is below ``fail_below``."""
    sentence: str

    def __str__(self) -> str:
        return self.sentence


def compare_runs(
    before: Mapping[str, float], after: Mapping[str, float], *, fail_below: float = 0.0
) -> Change:
    """Compare two runs as `read_run` returns them. The change fails if its ratio is below
    ``fail_below``.

    Example:
        >>> before = {"images_per_second": 12.0, "wait_share": 0.8, "error": 0.02}
        >>> after = {"images_per_second": 48.0, "wait_share": 0.1, "error": 0.02}
        >>> print(compare_runs(before, after))
        12.0 → 48.0 images/s, 4.00 times as many: more than the noise (6%). Waits 80% → 10%.
    """
    ratio = after["images_per_second"] / max(before["images_per_second"], 1e-9)
    noise = _SURE * math.hypot(before["error"], after["error"])
    size = "more than the noise" if abs(ratio - 1) > noise else "within the noise"
    sentence = (
        f"{before['images_per_second']:.1f} → {after['images_per_second']:.1f} images/s, "
        f"{ratio:.2f} times as many: {size} ({noise:.0%}). "
        f"Waits {before['wait_share']:.0%} → {after['wait_share']:.0%}."
    )
    return Change(ratio, noise, ratio < fail_below, sentence)


def read_run(path: str | Path) -> dict[str, float]:
    """Read ``images_per_second``, ``wait_share`` and ``error`` from a file that `Summary.save` or
    ``diagnose --json`` wrote.

    Raises:
        ColabUtilsError: there is no such file, or it holds something else.

    Example:
        >>> read_run("no/such/before.json")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: There is no JSON of an earlier run at ...
    """
    file = require_local_path(path)
    try:
        run = json.loads(file.read_text(encoding="utf-8"))
        # A diagnosis calls the share of waiting ``stall_share``.
        run.setdefault("wait_share", run.get("stall_share"))
        return {key: float(run[key]) for key in ("images_per_second", "wait_share", "error")}
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ColabUtilsError(
            f"There is no JSON of an earlier run at {path}. Write one with --json or Summary.save."
        ) from None
