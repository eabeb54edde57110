"""Planted causes: one small training loop for each thing that stalls a training, and healthy loops
beside them.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Protocol, cast

from benchmarks.causes.loop import Loop

__all__ = ["CAUSES", "Cause", "get_cause"]

CAUSES = (
    "read",
    "bandwidth",
    "transform",
    "masks",
    "collate",
    "handoff",
    "too_many_workers",
    "restarts",
    "slow_sample",
    "memory",
    "hang",
    "between",
    "periodic",
    "step",
    "contention",
    "lock",
    "sampler",
    "accumulation",
    "first_samples",
    "helper_threads",
    "other_process",
    "batched",
    "copy_on_access",
    "two_loaders",
    "cut_file",
    "spawned_hang",
    "database",
)
"""The modules of this package that plant one."""


class Cause(Protocol):
    """What each of these modules defines."""

    EXPECTED: str
    """The cause that a diagnosis should name."""
    NEXT: str
    """A regular expression that the advice should match."""
    EPOCHS: int
    """So many epochs last for about a minute."""

    def make_loop(self, folder: Path) -> Loop:
        """Write the files into ``folder``, and give the loader, the step, and what follows each
        step.
        """


def get_cause(name: str) -> Cause:
    """The module of a cause.

    Example:
        >>> get_cause("bandwidth").EXPECTED
        'read'
    """
    return cast(Cause, import_module(f"benchmarks.causes.{name}"))
