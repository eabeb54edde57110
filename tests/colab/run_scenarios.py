"""The five notebooks in the versions of a runtime of Colab's, with a stand-in for ``google.colab``
that keeps its rules. With ``--overlay``, only what is small is installed, over the ordinary
environment with its torch and its Python, and notebook 02 runs there.

Each notebook starts on a machine of its own, as on Colab: an empty /content, and no colab_utils
until the setup cell installs it. /content needs root; without it, plain folders take its place, and
Google Drive is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from colab_utils.errors import ColabUtilsError
from tests.colab.environments import ROOT, build_environment, lay_over
from tests.colab.runtimes import read_runtime, read_runtimes
from tests.notebooks.test_run_notebooks import TINY
from tools.cells import write_workshop
from tools.run_notebooks import _list_settings, inject_parameters

__all__ = ["main"]

COLAB = Path(__file__).parent
_CONTENT = Path("/content")
_HOST = Path("/var/colab")
_MOUNT = """
mount --bind "$1" /content && mount --bind "$2" /var/colab && cd /content && shift 2 && exec "$@"
"""
_START = ["unshare", "-m", "sh", "-c", _MOUNT, "sh"]


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
    before: str = ""
    """Code that runs before the first cell."""
    stops: str = ""
    """The cell that stops the notebook with one sentence; empty: all cells run."""
    says: str = ""
    """What that sentence says."""


_MOUNTED = {"SCENE": "my Drive, my GPU", "USE_GOOGLE_DRIVE": True}
SCENARIOS = (
    Scenario("bad day", {"SCENE": "bad day", "USE_GOOGLE_DRIVE": False}),
    Scenario("my Drive", _MOUNTED, answer="granted", asks=True, notebooks="01 02 03 04 04 05"),
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
OVERLAY = Scenario("overlay", {"USE_GOOGLE_DRIVE": False}, notebooks="02")


@contextmanager
def make_content() -> Iterator[bool]:
    """Say whether a notebook can have a /content of its own, for as long as the block lasts;
    nothing of it is left.
    """
    made = []
    mounts = subprocess.run(["sh", "-c", "unshare -m true"], capture_output=True).returncode == 0
    try:
        for folder in (_CONTENT, _HOST):
            if mounts and not folder.exists():
                folder.mkdir()
                made.append(folder)
        yield mounts
    finally:
        for folder in made:
            folder.rmdir()


def run_notebook(
    source: Path, target: Path, scenario: Scenario, python: Path, *, drive: str, content: bool
) -> list[str]:
    """Run one notebook on a machine of its own; return what went wrong, one line each.

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
        (home / "asked.txt").touch()
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
            command = [*_START, str(home / "content"), str(home / "host"), *command]
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
            "COLAB_DRIVE": drive,
        }
        done = subprocess.run(
            command, cwd=home / "content", env=environment, capture_output=True, text=True
        )
        asked = len((home / "asked.txt").read_text())
    return list(_find_faults(target, scenario, done, asked))


def _find_faults(
    path: Path, scenario: Scenario, done: subprocess.CompletedProcess[str], asked: int
) -> Iterator[str]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    outputs = [(cell["id"], output) for cell in cells for output in cell.get("outputs", ())]
    errors = {name: output for name, output in outputs if output["output_type"] == "error"}
    if asked != scenario.asks:
        yield f"Google Drive was asked for {asked} times, and not {int(scenario.asks)}"
    if scenario.stops:
        lines = [line for error in errors.values() for line in error["traceback"]]
        text = "\n".join(lines)
        if [*errors] != [scenario.stops] or "\n" in text or scenario.says not in text:
            expected = f"one sentence with {scenario.says!r} from the cell {scenario.stops}"
            yield f"expected {expected}, found {[*errors]}: {text}"
        return
    if done.returncode:
        printed = (done.stdout.strip() or done.stderr.strip() or "ended").splitlines()
        yield f"cells {[*errors]}: {printed[-1]}"
    for name, output in outputs:
        text = "".join(output.get("text", ()))
        warns = output.get("name") == "stderr" and ("Warning:" in text or "Traceback" in text)
        # A second run of notebook 04 must say that it is finished.
        if warns and "is finished" not in text:
            yield f"cell '{name}' warns: {text[-300:]}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all scenarios from a terminal; returns 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.colab.run_scenarios", description=__doc__
    )
    parser.add_argument("--runtime", default="now", help="a name of runtimes.txt, or a list: now")
    parser.add_argument("--overlay", action="store_true", help="small packages, and one notebook")
    options = parser.parse_args(arguments)
    work = ROOT / "runs" / ("overlay" if options.overlay else "colab")
    # The folder /content is removed then, too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        versions = read_runtime(options.runtime)
        folder = work / "env" / Path(options.runtime).name.removesuffix(".txt")
        python = build_environment(folder, versions, is_overlay=options.overlay)
        notebooks = write_workshop(work / "notebooks")
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, version in read_runtimes()["now"].items():
        if versions.get(name, version) != version:
            print(f"{name}: {versions[name]}, and not {version} as in runtimes.txt")
    has = subprocess.run([python, "--version"], check=True, capture_output=True, text=True)
    print(f"{has.stdout.strip()} (Colab has {versions['python']})")
    failed = 0
    count = 0
    with make_content() as content:
        if not content:
            print(
                "note: no /content without root: folders take its place, Google Drive is left out"
            )
        for scenario in [OVERLAY] if options.overlay else SCENARIOS:
            if scenario.asks and not content:
                continue
            with tempfile.TemporaryDirectory(prefix="colab-drive-") as drive:
                for number in scenario.notebooks.split():
                    source = next(path for path in notebooks if path.name.startswith(number))
                    count += 1
                    target = work / scenario.name.replace(" ", "_") / f"{count:02d}-{source.name}"
                    started = perf_counter()
                    faults = run_notebook(
                        source, target, scenario, python, drive=drive, content=content
                    )
                    failed += bool(faults)
                    outcome = "FAILED" if faults else "passed"
                    title = f"{scenario.name}: {source.stem}"
                    seconds = perf_counter() - started
                    print(f"{outcome}  {title} ({seconds:.0f} s)", *faults, sep="\n        ")
    print(f"{count - failed} passed, {failed} failed; the executed notebooks are in {work}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
