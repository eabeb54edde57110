"""Progress bars, where somebody sees them."""

import os
import sys
import threading
from typing import Any

from tqdm import tqdm


def show_progress(
    label: str, items: Any = None, *, total: Any = None, unit: str = "it", scale: bool = False
) -> Any:
    """Return a tqdm bar, silent where nobody sees it, or where one runs already.

    It gives ``items`` one after the other, if there are any, and counts them; ``scale`` counts
    bytes.

    Example:
        >>> with show_progress("copying", total=2) as bar:
        ...     _ = bar.update(2)
        >>> list(show_progress("reading", "ab"))
        ['a', 'b']
    """
    # A bar in a bar leaves stale lines in notebooks.
    silent = not is_watched() or len(tqdm._instances) > 0
    return _Bar(
        items,
        total=total,
        desc=label,
        unit=unit,
        unit_scale=scale,
        unit_divisor=1024,
        disable=silent,
    )


class _Bar(tqdm):
    # tqdm's own lock is shared with forked processes: one that is killed while it draws would stop
    # every later bar.
    _lock = threading.RLock()


# A thread that held the lock is not in the forked process.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


def is_watched() -> bool:
    """Return whether somebody sees a progress bar: on a terminal, or in a notebook's kernel."""
    return sys.stderr.isatty() or is_notebook()


def is_notebook() -> bool:
    """Return whether this runs in a notebook's kernel.

    Example:
        >>> is_notebook()
        False
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
