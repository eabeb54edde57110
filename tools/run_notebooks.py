"""The demo: the five notebooks run in order without a browser, as pages that anybody can read
offline.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import psutil
from numpy.typing import NDArray

from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.progress import show_progress
from colab_utils.units import format_count
from tools.pages import NotebookRun, read_title, write_demo_index, write_notebook_page
from tools.sentences import Check, Judgement, add_notes, judge, read_checks

__all__ = [
    "DemoReport",
    "NotebookError",
    "find_faults",
    "find_labs",
    "inject_parameters",
    "main",
    "run_demo",
]

_ROOT = Path(__file__).resolve().parent.parent
_MANIFEST = "demo.json"
_CELL_TIMEOUT_S = 900


class NotebookError(ColabUtilsError):
    """A cell of a notebook failed."""


@dataclass(frozen=True)
class DemoReport:
    """A finished demo: ``index`` is the page to open; ``work`` holds what the notebooks made."""

    index: Path
    work: Path
    notebooks: tuple[NotebookRun, ...]
    seconds: float

    @property
    def contradictions(self) -> list[Judgement]:
        """The sentences that the run beside them contradicts."""
        judgements = [judgement for run in self.notebooks for judgement in run.judgements]
        return [judgement for judgement in judgements if judgement.is_contradicted]

    def __str__(self) -> str:
        judged = sum(len(run.judgements) for run in self.notebooks)
        wrong = len(self.contradictions)
        marks = ""
        if wrong:
            marks = f", {wrong} contradicted by this run and marked on its page"
        return (
            f"{format_count(len(self.notebooks), 'notebook')} in {self.seconds:.0f} s, "
            f"{format_count(judged, 'sentence')} judged{marks}. Open {self.index}"
        )


def run_demo(
    output: str | Path,
    *,
    images: str | Path | None = None,
    annotations: str | Path | None = None,
    notebooks: str | Path | None = None,
    parameters: Mapping[str, Any] | None = None,
    only: Collection[str] = (),
    labs: bool = True,
) -> DemoReport:
    """Run the five notebooks in order, and write them as pages with an index whose first screen is
    the result.

    Args:
        output: folder for the pages; made where it is not. Of an earlier demo, only its own files
            are replaced.
        images: your image folder, in place of the built-in dataset.
        annotations: your COCO instance JSON.
        notebooks: folder of the notebooks. Default: ``notebooks`` beside the package.
        parameters: settings by name, such as ``{"BATCH_SIZE": 2}``, for every notebook that has
            them.
        only: names of the notebooks to run. Default: all.
        labs: whether the labs behind each notebook run, too.

    Raises:
        NotebookError: a notebook fails; it names the cell, and the page up to there is kept.
        ColabUtilsError: nbclient or nbconvert is missing, a setting is in no notebook, a check of
            a sentence is not written as it should be, or ``output`` holds files of somebody else.

    Example:
        >>> run_demo("runs/demo", images="photos")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: Only images are named. Name annotations too, or neither.
    """
    started = perf_counter()
    _require_both(images, annotations)
    paths = [path for path in _find_notebooks(notebooks) if not only or path.stem in only]
    loaded = [(path.stem, _read_notebook(path, labs=labs)) for path in paths]
    settings = dict(parameters or {})
    if images and annotations:
        settings |= {"IMAGES": os.path.abspath(images), "ANNOTATIONS": os.path.abspath(annotations)}
    _require_known(settings, [notebook for _, notebook in loaded])
    # A check that is not written as it should be is said before anything runs.
    checks = [read_checks(notebook, name) for name, notebook in loaded]
    output = Path(os.path.abspath(output))
    names = [f"{name}{suffix}" for name, _ in loaded for suffix in (".ipynb", ".html")]
    _prepare_output(output, [*names, "index.html"])
    work = Path(tempfile.mkdtemp(prefix="work-", dir=output))
    folders = {"DRIVE_FOLDER": str(work / "drive"), "SSD_FOLDER": str(work / "ssd")}
    runs: list[NotebookRun] = []
    try:
        cells = sum(cell.cell_type == "code" for _, notebook in loaded for cell in notebook.cells)
        with show_progress("demo", total=cells, unit="cell") as bar:
            for (name, notebook), judged in zip(loaded, checks, strict=True):
                bar.set_description(name)
                known = _list_settings(notebook)
                inject_parameters(
                    notebook,
                    {key: value for key, value in (folders | settings).items() if key in known},
                )
                page = output / f"{name}.html"
                runs.append(_run_notebook(notebook, page, work, judged, on_cell=bar.update))
        index = write_demo_index(
            output / "index.html",
            runs,
            comparison=_read_comparison(work, "comparison.json"),
            good_day=_read_comparison(work, "comparison_good_day.json"),
        )
    finally:
        _write_manifest(output, [*names, "index.html"], work)
    return DemoReport(index, work, tuple(runs), perf_counter() - started)


def inject_parameters(notebook: Any, values: Mapping[str, Any]) -> None:
    """Insert a cell that sets ``values`` after the cell tagged ``parameters``; the tagged cell
    stays as it is.

    Args:
        notebook: an nbformat notebook, changed in place.
        values: literals by name.

    Raises:
        ColabUtilsError: no cell is tagged ``parameters``, or it has no such name.

    Example:
        >>> import nbformat.v4 as v4
        >>> tags = {"tags": ["parameters"]}
        >>> cell = v4.new_code_cell("STEPS = 100", id="parameters", metadata=tags)
        >>> notebook = v4.new_notebook(cells=[cell])
        >>> inject_parameters(notebook, {"STEPS": 2})
        >>> [cell.source for cell in notebook.cells]
        ['STEPS = 100', 'STEPS = 2']
    """
    import nbformat.v4 as v4

    unknown = set(values) - _list_settings(notebook)
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ColabUtilsError(f"This notebook has no settings called {names}. Correct the name.")
    source = "\n".join(f"{name} = {value!r}" for name, value in values.items())
    if source:
        cell = v4.new_code_cell(
            source, id="injected-parameters", metadata={"tags": ["injected-parameters"]}
        )
        notebook.cells.insert(_find_parameters(notebook) + 1, cell)


def find_labs(sources: Iterable[str]) -> int | None:
    """Return the position of the first lab among the cells of a notebook; None where there is none.
    All cells behind it are of labs, too.

    Args:
        sources: the text of each cell.

    Example:
        >>> find_labs(["# A notebook", "print(1)", "## Lab A: balance", "print(2)"])
        2
    """
    starts = (position for position, source in enumerate(sources) if source.startswith("## Lab "))
    return next(starts, None)


def _require_both(images: str | Path | None, annotations: str | Path | None) -> None:
    if bool(images) == bool(annotations):
        return
    named = "images" if images else "annotations"
    lacking = "annotations" if images else "images"
    raise ColabUtilsError(f"Only {named} are named. Name {lacking} too, or neither.")


def _require_known(settings: Mapping[str, Any], notebooks: Sequence[Any]) -> None:
    unknown = set(settings).difference(*(_list_settings(notebook) for notebook in notebooks))
    if unknown:
        names = ", ".join(sorted(unknown))
        raise ColabUtilsError(f"No notebook has settings called {names}. Correct the name.")


def _find_parameters(notebook: Any) -> int:
    for position, cell in enumerate(notebook.cells):
        if cell.cell_type == "code" and "parameters" in cell.metadata.get("tags", ()):
            return position
    raise ColabUtilsError("No code cell is tagged 'parameters'. Tag the cell with the settings.")


def _list_settings(notebook: Any) -> set[str]:
    tree = ast.parse(notebook.cells[_find_parameters(notebook)].source)
    return {
        target.id
        for node in tree.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }


def _find_notebooks(folder: str | Path | None) -> list[Path]:
    place = Path(folder) if folder else _ROOT / "notebooks"
    notebooks = sorted(place.glob("[0-9][0-9]_*.ipynb"))
    if not notebooks:
        raise ColabUtilsError(
            f"There are no notebooks in {place}. Clone the repository and run the demo there: an "
            "installed package does not carry them."
        )
    return notebooks


def _read_notebook(path: Path, *, labs: bool = True) -> Any:
    try:
        import nbclient  # noqa: F401
        import nbconvert  # noqa: F401
        import nbformat
    except ImportError as error:
        raise ColabUtilsError(
            f"The demo needs nbclient, nbconvert and ipykernel, and {error.name} is missing. "
            "Install them: pip install nbclient nbconvert ipykernel"
        ) from None
    notebook = nbformat.read(path, as_version=4)
    if not labs:
        notebook.cells = notebook.cells[: find_labs(cell.source for cell in notebook.cells)]
    return notebook


async def _judge_cell(client: Any, checks: Sequence[Check]) -> list[Judgement]:
    """Judge a cell's sentences by what the kernel has in memory, where the text stands."""
    from jupyter_core.utils import ensure_async

    expressions = {str(number): check.make_expression() for number, check in enumerate(checks)}
    message = await ensure_async(client.kc.execute("", silent=True, user_expressions=expressions))
    reply = await client.async_wait_for_reply(message)
    answers = reply["content"].get("user_expressions", {}) if reply else {}
    return judge(checks, answers)


def _measure_cores() -> NDArray[np.float64]:
    """Return the seconds of all cores so far, and those of them that other programs had."""
    # At the top, this would import torch for whoever only reads notebooks.
    from colab_utils.diagnosis.timing import measure_tree_cpu

    times = psutil.cpu_times()[:8]
    all_s = sum(times)
    idle_s = times[3] + times[4]
    others_s = all_s - idle_s - measure_tree_cpu()
    return np.array([all_s, others_s])


def _run_notebook(
    notebook: Any,
    page: Path,
    work: Path,
    checks: Mapping[str, Sequence[Check]],
    *,
    on_cell: Callable[[], object],
) -> NotebookRun:
    import nbformat
    import zmq
    from nbclient import NotebookClient
    from nbclient.exceptions import CellControlSignal, CellExecutionError, DeadKernelError

    search = os.pathsep.join(part for part in (str(_ROOT), os.environ.get("PYTHONPATH")) if part)
    running: list[Any] = []
    judgements: list[Judgement] = []
    spent = [_measure_cores()]

    async def start_cell(cell: Any, cell_index: int) -> None:
        if cell.cell_type == "code":
            running.append(cell)
        elif cell.id in checks:
            spent.append(_measure_cores())
            all_s, others_s = spent[-1] - spent[-2]
            # The clock of the system has steps of 10 ms.
            others = float(others_s / max(all_s, 1.0))
            for judgement in await _judge_cell(client, checks[cell.id]):
                judgements.append(replace(judgement, others=others))

    class Client(NotebookClient):
        async def _async_check_alive(self) -> None:
            # To answer a widget, nbclient writes to the socket while asyncio waits for the cell's
            # reply there. The write may use up the sign that the reply has come; then asyncio waits
            # for ever. To ask for the state of the socket makes asyncio look again.
            assert self.kc
            self.kc.shell_channel.socket.get(zmq.EVENTS)
            await super()._async_check_alive()

    client = Client(
        notebook,
        timeout=_CELL_TIMEOUT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(work)}},
        on_cell_start=start_cell,
        on_cell_executed=lambda cell, cell_index, execute_reply: on_cell(),
    )
    started = perf_counter()
    failure: Exception | None = None
    try:
        # The kernel says this beside the notebook.
        with open(work / "kernel.log", "ab") as log:
            client.execute(env={**os.environ, "PYTHONPATH": search}, stdout=log, stderr=log)
    except (
        CellExecutionError,
        CellControlSignal,
        DeadKernelError,
        RuntimeError,
        TimeoutError,
    ) as error:
        failure = error
    seconds = perf_counter() - started
    run = NotebookRun(page, read_title(notebook), seconds, tuple(judgements))
    add_notes(notebook, judgements)
    write_file(run.notebook, nbformat.writes(notebook).encode())
    write_notebook_page(notebook, page)
    if failure is not None:
        cell = f"cell '{running[-1].id}'" if running else "its start"
        lines = re.sub(r"\x1b\[[0-9;]*m", "", str(failure)).strip().splitlines()
        reason = lines[-1] if lines else type(failure).__name__
        text = f"Notebook {page.stem} stopped in {cell}: {reason}"
        raise NotebookError(f"{text} (the page up to there: {page})") from failure
    return run


def _read_comparison(work: Path, name: str) -> dict[str, Any] | None:
    """What notebook 05 left in its receipt; None where another set of notebooks was run."""
    path = work / "drive" / "receipt" / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def find_faults(report: DemoReport, again: DemoReport) -> list[str]:
    """Return a line for each sentence that two runs contradict.

    Args:
        report: a demo.
        again: a second run of the notebooks with contradicted sentences, so that no single timing
            decides.
    """
    doubted = {judgement.check for judgement in report.contradictions}
    second = [judgement for judgement in again.contradictions if judgement.check in doubted]
    return [str(judgement) for judgement in second]


def _prepare_output(output: Path, names: list[str]) -> None:
    """Remove what an earlier demo left in ``output``: only the files that its manifest lists."""
    try:
        output.mkdir(parents=True, exist_ok=True)
        manifest = output / _MANIFEST
        listed = (
            json.loads(manifest.read_text(encoding="utf-8"))["files"] if manifest.is_file() else []
        )
    except (OSError, ValueError, KeyError) as error:
        raise ColabUtilsError(
            f"The folder {output} cannot be used for the demo: {error}. Choose another --output."
        ) from error
    strangers = [name for name in names if (output / name).exists() and name not in listed]
    if strangers:
        raise ColabUtilsError(
            f"{output} holds {strangers[0]}, which no demo made. Choose another --output."
        )
    # What lies in a folder comes before the folder.
    for name in sorted(listed, reverse=True):
        path = (output / name).resolve()
        if path.is_relative_to(output.resolve()):
            # A folder that holds somebody's file stays.
            with suppress(OSError):
                if path.is_dir():
                    path.rmdir()
                else:
                    path.unlink()


def _write_manifest(output: Path, names: list[str], work: Path) -> None:
    made = [name for name in names if (output / name).is_file()]
    made += [str(path.relative_to(output)) for path in (work, *work.rglob("*"))]
    write_file(output / _MANIFEST, json.dumps({"files": made}, indent=1).encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the notebooks from a terminal; returns the exit status: 1 where a cell fails and, with
    ``--strict``, where two runs contradict a sentence.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.run_notebooks", description=__doc__)
    parser.add_argument(
        "--output", metavar="DIR", default="runs/demo", help="folder for the pages (runs/demo)"
    )
    parser.add_argument("--images", metavar="DIR", help="your own image folder")
    parser.add_argument("--annotations", metavar="FILE", help="your own COCO instance JSON")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="run notebooks with contradicted sentences again, in DIR-again, and fail where both "
        "runs contradict one",
    )
    parser.add_argument("--no-labs", action="store_true", help="leave out the labs")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except NotebookError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def _run(options: argparse.Namespace) -> int:
    arguments = {
        "images": options.images,
        "annotations": options.annotations,
        "labs": not options.no_labs,
    }
    report = run_demo(options.output, **arguments)
    for judgement in report.contradictions:
        print(judgement, file=sys.stderr)
    print(report)
    if not options.strict or not report.contradictions:
        return 0
    names = {judgement.check.notebook for judgement in report.contradictions}
    again = run_demo(f"{options.output}-again", **arguments, only=names)
    print(again)
    faults = find_faults(report, again)
    if faults:
        print("error: the run contradicts these sentences:", *faults, sep="\n", file=sys.stderr)
    return min(1, len(faults))


if __name__ == "__main__":
    sys.exit(main())
