"""A loader under watch: its batches come unchanged, and a summary says where the time went."""

import weakref
from collections.abc import Iterable, Iterator
from typing import Any, Literal, get_args

from torch.utils.data import DataLoader

from colab_utils.diagnosis.cures import Stall
from colab_utils.diagnosis.passes import Pass
from colab_utils.diagnosis.record import LoopRecord, find_record
from colab_utils.diagnosis.summary import Summary, print_summary, summarise
from colab_utils.errors import ColabUtilsError
from colab_utils.machine import require_linux
from colab_utils.require import require_choice, require_number

OnStall = Literal["report", "raise"]

# Attributes of a WatchedLoader itself. All others are those of the loader.
_OWN = ("timeout_s", "on_stall", "stalls")
# The records of the last loaders: `watch` may be called for one of them again.
_RECORDS: list[LoopRecord] = []
_KEPT = 16


def watch(
    loader: Iterable[Any],
    *,
    timeout_s: float = 60,
    on_stall: OnStall = "report",
) -> "WatchedLoader":
    """Watch a loader: its batches come unchanged, and you see where the time goes.

    When your loop ends or breaks off, a summary is printed: waits, steps and the time between
    steps, the causes, and what to do. A later pass prints a summary only if the causes have
    changed. A last summary is printed when the program ends, or when the watched loader is deleted.
    ``summary()`` returns a summary at any time. A step ends when an optimizer of torch steps.
    If the same line of your code makes a loader again and again, from the same dataset, all passes
    count as those of one loader.

    A batch that takes longer than ``timeout_s`` is explained within a second, by a
    `ColabUtilsWarning` and a `Stall` in ``stalls``. They name the worker, its sample, its file and
    its system call, and say whether the worker ended, waits in a read or for a lock, or is
    only slow. If the explanation changes during the wait, a new warning and a new `Stall` come.
    A worker reports its samples only if the watched loader forked it. The file of a sample is named
    if the dataset has a method ``find_path(index)``, as the datasets of this package have.

    If a framework prepares your loader, watch the loader that it returns. Some frameworks make a
    new loader from yours, and that one would not be watched.

    Args:
        loader: A ``DataLoader``, a loader of `make_loader`, or anything that can be iterated over.
        timeout_s: Seconds to wait for a batch before the wait is explained.
        on_stall: "report" goes on waiting; only a worker that ended is an error. "raise" raises an
            error with the explanation. In the main thread, the error comes at once; in another
            thread, it comes when the loader returns.

    Raises:
        ColabUtilsError: an argument is not valid. While you iterate: see ``on_stall``.

    Example:
        >>> watched = watch([1, 2, 3], timeout_s=5)
        >>> list(watched), len(watched), watched.stalls
        ([1, 2, 3], 3, [])
    """
    require_linux("watch a loader")
    require_choice("on_stall", on_stall, get_args(OnStall))
    require_number("timeout_s", timeout_s, above=0)
    if not hasattr(loader, "__iter__") or isinstance(loader, str | bytes):
        name = type(loader).__name__
        raise ColabUtilsError(f"The {name} cannot be iterated over. Pass your DataLoader.")
    kind = WatchedDataLoader if isinstance(loader, DataLoader) else WatchedLoader
    record = find_record(_RECORDS, loader, is_like=False)
    del _RECORDS[:-_KEPT]
    watched = kind(loader, timeout_s, on_stall, record=record)
    weakref.finalize(watched, print_summary, record, only_news=False)
    return watched


class WatchedLoader:
    """A loader under watch, made by `watch`. It also has all attributes of the loader.

    Attributes:
        timeout_s: Seconds to wait for a batch before the wait is explained.
        on_stall: What to do about a wait that takes too long, as in `watch`.
        stalls: Every `Stall` that was reported.
    """

    def __init__(
        self,
        loader: Any,
        timeout_s: float,
        on_stall: OnStall,
        *,
        record: LoopRecord | None = None,
    ) -> None:
        self._loader = loader
        self._prints = record is not None
        self._record = record or LoopRecord(loader)
        self.timeout_s = timeout_s
        self.on_stall = on_stall
        self.stalls: list[Stall] = self._record.stalls

    def summary(self) -> Summary:
        """Summarise where the time of all passes so far went, and why.

        Raises:
            ColabUtilsError: no batch has come yet.
        """
        summary = summarise(self._record)
        if summary is None:
            raise ColabUtilsError("No batch was seen yet. Loop over the watched loader first.")
        return summary

    def __len__(self) -> int:
        return len(self._loader)

    def __bool__(self) -> bool:
        return bool(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the loader, as frameworks do with ``worker_init_fn``."""
        if name.startswith("_") or name in _OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __iter__(self) -> Iterator[Any]:
        batches = Pass(self).run()
        # A DataLoader starts its workers when it is asked for an iterator, so this one does, too.
        next(batches)
        return batches


class WatchedDataLoader(WatchedLoader, DataLoader[Any]):  # type: ignore[misc]
    """A ``DataLoader`` under watch. It is itself a ``DataLoader``, because some frameworks divide
    the data among processes only for such a loader.

    The constructor of ``DataLoader`` never runs: all attributes are those of the loader under
    watch.
    """


def take_watched(loader: Any) -> Any:
    """Return the loader that a `WatchedLoader` watches. Return any other loader as it is.

    Example:
        >>> take_watched(watch([1, 2])), take_watched([1, 2])
        ([1, 2], [1, 2])
    """
    while isinstance(loader, WatchedLoader):
        loader = loader._loader
    return loader
