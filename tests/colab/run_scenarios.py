"""The five notebooks in the versions of a runtime of Colab's, with a stand-in for ``google.colab``
that keeps its rules.

Each notebook starts on a machine of its own, as on Colab: an empty /content, and no colab_utils
until the setup cell installs it. /content needs root; without it, plain folders take its place, and
Google Drive is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from colab_utils.errors import ColabUtilsError
from tests.colab.environments import ROOT, build_environment, lay_over
from tests.colab.runtimes import read_runtime
from tests.notebooks.test_run_notebooks import TINY
from tools.cells import write_workshop
from tools.run_notebooks import _list_settings, inject_parameters

__all__ = ["Run", "Scenario", "main", "run_notebook"]

COLAB = Path(__file__).parent
_CONTENT = Path("/content")
_HOST = Path("/var/colab")
_START = """
mount --bind "$1" /content && mount --bind "$2" /var/colab && cd /content && shift 2 && exec "$@"
"""


@dataclass(frozen=True)
class Scenario:
    """One way in which people come to the notebooks."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    """Values of the parameters cell, of those names that the notebook has."""
    answer: str = "declined"
    """What the person says who is asked for Google Drive."""
    asks: bool = False
    """Whether anybody may be asked at all."""
    notebooks: str = "01 02 03 04 05"
    lasts: bool = False
    """Whether Google Drive lasts from one notebook to the next."""
    before: str = ""
    """Code that runs before the first cell."""
    stops: str = ""
    """The cell that stops the notebook with one sentence; empty: all cells run."""
    says: str = ""
    """What that sentence says."""


_MOUNTED = {"SCENE": "my Drive, my GPU", "USE_GOOGLE_DRIVE": True}
SCENARIOS = (
    Scenario("bad day", {"SCENE": "bad day", "USE_GOOGLE_DRIVE": False}),
    Scenario(
        "my Drive", _MOUNTED, answer="granted", asks=True, notebooks="01 02 03 04 04 05", lasts=True
    ),
    Scenario(
        "declined",
        _MOUNTED,
        asks=True,
        notebooks="02",
        stops="workspace",
        says="Sign in when Colab asks",
    ),
    Scenario(
        "timeout",
        _MOUNTED,
        answer="timeout",
        asks=True,
        notebooks="02",
        stops="workspace",
        says="timeout during",
    ),
    Scenario(
        "TPU",
        notebooks="01",
        before="import sys; sys.modules['pycocotools'] = None",
        stops="setup",
        says="pycocotools",
    ),
)


@dataclass(frozen=True)
class Run:
    """A notebook that ran, or did not: what went wrong is in ``faults``, one line each."""

    notebook: Path
    seconds: float
    faults: tuple[str, ...]


@contextmanager
def make_content() -> Iterator[bool]:
    """Say whether a notebook can have a /content of its own, for as long as the block lasts;
    nothing of it is left.
    """
    made = []
    try:
        with suppress(PermissionError):
            for folder in (_CONTENT, _HOST):
                if not folder.exists():
                    folder.mkdir()
                    made.append(folder)
        mounts = (
            _CONTENT.is_dir()
            and _HOST.is_dir()
            and os.geteuid() == 0
            and bool(shutil.which("unshare"))
        )
        yield (
            mounts
            and subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode == 0
        )
    finally:
        for folder in made:
            folder.rmdir()


def run_notebook(
    source: Path, target: Path, scenario: Scenario, python: Path, *, drive: Path, content: bool
) -> Run:
    """Run one notebook on a machine of its own.

    Args:
        source: the notebook, with the wheel in its setup cell.
        target: where its executed copy is put.
        scenario: what is asked and answered.
        python: the Python of `build_environment`.
        drive: the folder that stands for Google Drive.
        content: whether /content can be had.
    """
    import nbformat

    with tempfile.TemporaryDirectory(prefix="colab-") as machine:
        home = Path(machine)
        for name in ("content", "host", "profile_default/startup"):
            (home / name).mkdir(parents=True)
        (home / "host" / "hostname").write_text("colab\n")
        # Colab's kernel has imported both before the first cell.
        (home / "profile_default" / "startup" / "00-colab.py").write_text(
            f"import google.colab, numpy\n{scenario.before}\n"
        )
        notebook = nbformat.read(source, as_version=4)
        settings = TINY | scenario.settings
        if not content:
            settings |= {
                "DRIVE_FOLDER": str(home / "content" / "drive"),
                "SSD_FOLDER": str(home / "content" / "ssd"),
            }
        known = _list_settings(notebook)
        inject_parameters(
            notebook, {name: value for name, value in settings.items() if name in known}
        )
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(notebook, target)
        own = lay_over(home / "python", python)
        command = [str(own), str(COLAB / "execute.py"), str(target.resolve())]
        if content:
            command = [
                "unshare",
                "-m",
                "sh",
                "-c",
                _START,
                "sh",
                str(home / "content"),
                str(home / "host"),
                *command,
            ]
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "JUPYTER"))
        }
        environment |= {
            "PYTHONPATH": str(COLAB),
            "IPYTHONDIR": str(home),
            "MPLCONFIGDIR": str(target.parent.parent / "fonts"),
            "COLAB_ASKED": str(home / "asked.txt"),
            "COLAB_ANSWER": scenario.answer,
            "COLAB_DRIVE": str(drive),
        }
        started = perf_counter()
        done = subprocess.run(
            command, cwd=home / "content", env=environment, capture_output=True, text=True
        )
        seconds = perf_counter() - started
        asked = (home / "asked.txt").read_text().split() if (home / "asked.txt").exists() else []
    return Run(target, seconds, tuple(_find_faults(target, scenario, done, asked)))


def _find_faults(
    path: Path, scenario: Scenario, done: subprocess.CompletedProcess[str], asked: Sequence[str]
) -> Iterator[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", ())]
    errors = [(name, output) for name, output in outputs if output["output_type"] == "error"]
    if asked and not scenario.asks:
        yield f"asked for {', '.join(asked)}"
    if scenario.asks and asked != ["request_auth"]:
        yield f"Google Drive was to be asked for once, and was asked for {len(asked)} times"
    if scenario.stops:
        lines = [
            line for _, output in errors for line in "\n".join(output["traceback"]).splitlines()
        ]
        stopped = [name for name, _ in errors]
        if stopped != [scenario.stops] or len(lines) != 1 or scenario.says not in lines[0]:
            expected = f"one sentence with {scenario.says!r} from the cell {scenario.stops}"
            yield f"expected {expected}, found {lines}"
        return
    if done.returncode:
        place = f"cell '{errors[0][0]}'" if errors else "no cell"
        printed = (done.stdout.strip() or done.stderr.strip()).splitlines()
        yield f"{place}: {printed[-1] if printed else 'ended'}"
    for name, output in outputs:
        text = "".join(output.get("text", ()))
        if output.get("name") == "stderr" and ("Warning:" in text or "Traceback" in text):
            lines = [line for line in text.splitlines() if "Warning:" in line or "Error" in line]
            # A second run of notebook 04 must say that it is finished.
            if "is finished" not in text:
                yield f"cell '{name}' warns: {(lines or text.splitlines())[-1][:200]}"


def _make_drive(work: Path, scenario: Scenario, *, is_first: bool) -> Path:
    """Return the folder that stands for Google Drive: new, or that of the notebook before where
    Drive lasts.
    """
    if not scenario.lasts:
        return Path(tempfile.mkdtemp(prefix="colab-drive-"))
    drive = work / "drive"
    if is_first:
        shutil.rmtree(drive, ignore_errors=True)
    drive.mkdir(parents=True, exist_ok=True)
    return drive


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all scenarios from a terminal; returns 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.colab.run_scenarios", description=__doc__
    )
    parser.add_argument(
        "--work", metavar="DIR", type=Path, default=ROOT / "runs" / "colab", help="runs/colab"
    )
    parser.add_argument("--runtime", default="now", help="a name of runtimes.txt, or a list: now")
    parser.add_argument(
        "--scenarios", metavar="NAME,...", default="", help="some of them, separated by commas"
    )
    options = parser.parse_args(arguments)
    work = options.work.absolute()
    # The folder /content is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        versions = read_runtime(options.runtime)
        folder = Path(options.runtime).name.removesuffix(".txt")
        python = build_environment(work / "env" / folder, versions)
        notebooks = write_workshop(work / "notebooks")
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    _print_python(python, versions["python"])
    failed = 0
    count = 0
    with make_content() as content:
        if not content:
            print(
                "note: no /content without root: folders take its place, Google Drive is left out"
            )
        for scenario in SCENARIOS:
            if options.scenarios and scenario.name not in options.scenarios.split(","):
                continue
            if scenario.asks and not content:
                continue
            for number in scenario.notebooks.split():
                source = next(path for path in notebooks if path.name.startswith(number))
                count += 1
                drive = _make_drive(work, scenario, is_first=number == "01")
                target = work / scenario.name.replace(" ", "_") / f"{count:02d}-{source.name}"
                run = run_notebook(source, target, scenario, python, drive=drive, content=content)
                failed += bool(run.faults)
                _print_run(run, f"{scenario.name}: {source.stem}")
    print(f"{count - failed} passed, {failed} failed; the executed notebooks are in {work}")
    return 1 if failed else 0


def _print_python(python: Path, wanted: str) -> None:
    done = subprocess.run([python, "--version"], check=True, capture_output=True, text=True)
    version = done.stdout.split()[1]
    is_same = version.split(".")[:2] == wanted.split(".")[:2]
    print(f"Python {version}", "" if is_same else f"(Colab has {wanted}: there is none here)")


def _print_run(run: Run, title: str) -> None:
    outcome = "FAILED" if run.faults else "passed"
    print(f"{outcome}  {title} ({run.seconds:.0f} s)", flush=True)
    for fault in run.faults:
        print(f"        {fault}")


if __name__ == "__main__":
    sys.exit(main())
