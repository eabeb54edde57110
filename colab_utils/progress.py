"""Progress bars, which are drawn only where somebody can see them."""

import os
import sys
import threading
from typing import Any

from tqdm import tqdm


def show_progress(
    label: str, items: Any = None, *, total: Any = None, unit: str = "it", scale: bool = False
) -> Any:
    """Return a tqdm progress bar. It draws nothing if nobody can see it, or if another bar runs.

    Args:
        label: Text before the bar.
        items: Iterable that the bar iterates over and counts. With None, the default, you call
            ``update`` yourself.
        total: Number of items. Default: None, the length of ``items`` if it is known.
        unit: Name of one item.
        scale: Whether large numbers are shortened, such as 2.5M. Use it for bytes.

    Example:
        >>> with show_progress("copying", total=2) as bar:
        ...     _ = bar.update(2)
        >>> list(show_progress("reading", "ab"))
        ['a', 'b']
    """
    # A bar inside another bar leaves stale lines in a notebook.
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
    # tqdm's own lock is shared with forked processes. If a process were killed while it holds that
    # lock, every later bar would hang.
    _lock = threading.RLock()


# A forked process has a copy of the lock, but not the thread that may hold it. So it gets a new
# lock.
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=lambda: _Bar.set_lock(threading.RLock()))


def is_watched() -> bool:
    """Return whether somebody can see a progress bar: on a terminal or in a notebook."""
    return sys.stderr.isatty() or is_notebook()


def is_notebook() -> bool:
    """Return whether this code runs in a notebook.

    Example:
        >>> is_notebook()
        False
    """
    shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
    return getattr(shell, "kernel", None) is not None
