"""Scripts and notebooks under watch, with no line of them changed."""

import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING, Any

from colab_utils.errors import ColabUtilsError, explain_os_error
from colab_utils.machine import require_linux

if TYPE_CHECKING:
    from colab_utils.diagnosis.passes import Pass
    from colab_utils.diagnosis.record import LoopRecord
    from colab_utils.diagnosis.summary import Summary

# The loaders that are watched: a class, and the module that defines it.
_KINDS = {
    "torch.utils.data.dataloader": "DataLoader",
    "torchdata.stateful_dataloader.stateful_dataloader": "StatefulDataLoader",
    "fastai.data.load": "DataLoader",
    "colab_utils.loading.loader": "Loader",
}
_HERE = os.path.dirname(__file__)
_TIMEOUT_S = 60
# A loader matters if its loop takes so many seconds, and this share of the longest loop.
_LEAST_S = 0.5
_LEAST_SHARE = 0.05


@dataclass(frozen=True)
class ScriptReport:
    """What the loaders of a script waited for."""

    loaders: "tuple[Summary, ...]"
    """The summary of each loader that mattered."""

    def __str__(self) -> str:
        shown = [f"== {summary.loader}\n{summary}" for summary in self.loaders]
        nothing = f"No DataLoader was in use for {_LEAST_S} s: there is nothing to say of waits."
        return "\n".join(shown) or nothing


class _Batches:
    """The batches of a loader under watch, with all attributes of the loader's own iterator."""

    def __init__(self, watching: "Pass") -> None:
        self._pass = watching
        self._batches = watching.run()
        self._plain = next(self._batches)

    def end_if_complete(self) -> None:
        """End the pass if all batches have come: a framework need not ask for one more."""
        self._pass.record.note_other()
        if self._pass.is_complete:
            # Another thread may ask for one at this moment.
            with suppress(ValueError):
                self._batches.close()

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._plain)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._plain, name)


class LoaderWatch(MetaPathFinder):
    """Watches every loader that this process iterates over, from now on.

    Modules that define loaders need not be imported yet: the script may set variables of the
    environment before it imports torch.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._records: list[LoopRecord] = []
        self._open = weakref.WeakSet[_Batches]()
        for name in _KINDS.keys() & sys.modules.keys():
            self._replace(sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """Return how a module of `_KINDS` is imported. Any other module is not found here."""
        spec = PathFinder.find_spec(name, path) if name in _KINDS else None
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_replace(module: ModuleType) -> None:
                execute(module)
                self._replace(module)

            spec.loader.exec_module = execute_and_replace  # type: ignore[method-assign]
        return spec

    def _replace(self, module: ModuleType) -> None:
        """Replace the method that iterates over a loader."""
        kind = getattr(module, _KINDS[module.__name__])
        plain = kind.__iter__
        kind.__iter__ = lambda loader: self._iterate(loader, plain)

    def _iterate(self, loader: Any, plain: Callable[[Any], Iterator[Any]]) -> Any:
        """Return the batches of a loader. ``plain`` is the method that was replaced."""
        from colab_utils.diagnosis.passes import Pass
        from colab_utils.diagnosis.processes import waiting
        from colab_utils.diagnosis.record import find_record
        from colab_utils.diagnosis.watch import WatchedLoader

        # Loaders in other processes, and those within a loader under watch, are left alone.
        if os.getpid() != self._pid or threading.get_ident() in waiting:
            return plain(loader)
        self._end_complete()
        watched = WatchedLoader(
            loader, _TIMEOUT_S, "report", record=find_record(self._records, loader, is_like=True)
        )
        batches = _Batches(Pass(watched, plain))
        self._open.add(batches)
        return batches

    def _end_complete(self) -> None:
        for batches in [*self._open]:
            batches.end_if_complete()

    def take_report(self) -> ScriptReport:
        """Return the report on all loops since the last call."""
        self._end_complete()
        if not self._records:
            return ScriptReport(())
        from colab_utils.diagnosis.summary import summarise

        summaries = list(filter(None, map(summarise, self._records)))
        self._records.clear()
        least_s = max([_LEAST_S, *(_LEAST_SHARE * summary.loop_s for summary in summaries)])
        return ScriptReport(tuple(summary for summary in summaries if summary.loop_s >= least_s))


def compile_script(path: str) -> CodeType:
    """Compile a script, as Python does.

    Raises:
        ColabUtilsError: it cannot be read, or is no Python.
    """
    require_linux("watch a script")
    cure = "Name a Python script: options of run stand before it, its own after it."
    try:
        return compile(Path(path).read_bytes(), os.path.abspath(path), "exec", dont_inherit=True)
    except OSError as error:
        raise ColabUtilsError(f"{path} cannot be read: {explain_os_error(error, cure)}") from error
    except (SyntaxError, ValueError) as error:
        raise ColabUtilsError(f"{path} is not valid Python: {error}. {cure}") from error


def run_script(
    code: CodeType, arguments: Sequence[str], finish: Callable[[ScriptReport], None]
) -> int:
    """Run a script as ``python SCRIPT`` does, and pass the report to ``finish`` in the end, also
    after an error. Of several ranks, only the first is watched. The first of ``arguments`` is the
    script's path.
    """
    pid = os.getpid()
    # Processes that are spawned import the script by the file of this module.
    module = ModuleType("__main__")
    module.__file__ = code.co_filename
    sys.modules["__main__"] = module
    sys.argv = [*arguments]
    if not sys.flags.safe_path:
        sys.path[0] = os.path.dirname(os.path.realpath(code.co_filename))
    watch = LoaderWatch() if os.environ.get("RANK", "0") == "0" else None
    try:
        exec(code, module.__dict__)
    except BaseException as error:
        _show_without_us(error)
        raise
    finally:
        # A process that the script forks may come here, too.
        if watch and os.getpid() == pid:
            finish(watch.take_report())
    return 0


def _show_without_us(error: BaseException) -> None:
    """Let Python's own hook, or the script's, show an error without the frames of this folder."""
    show = sys.excepthook
    # The first frame is that of `run_script`.
    link: Any = error.__traceback__
    trace = link.tb_next
    while link.tb_next:
        if link.tb_next.tb_frame.f_code.co_filename.startswith(_HERE):
            link.tb_next = link.tb_next.tb_next
        else:
            link = link.tb_next

    def show_error(kind: Any, error: BaseException, _: Any) -> None:
        # The frames hold all that the script has.
        sys.excepthook = show
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_error


def watch_notebook(shell: Any) -> None:
    """Watch the loaders of each cell of a notebook from now on, and print what they waited for."""
    watch = LoaderWatch()

    def print_report(*_: Any) -> None:
        report = watch.take_report()
        if report.loaders:
            print(report)

    shell.events.register("post_run_cell", print_report)
