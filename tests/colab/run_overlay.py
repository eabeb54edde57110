"""The tests that see versions, and one small notebook, with the packages of a runtime of Colab's.

Only what is small is installed, into an environment that lies over the ordinary one: torch and
Python stay the ordinary ones. ``make test-colab`` has those of Colab, too.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from time import perf_counter

from colab_utils.errors import ColabUtilsError
from tests.colab.environments import ROOT, build_overlay
from tests.colab.run_scenarios import Scenario, run_notebook
from tests.colab.runtimes import read_runtime
from tools.cells import write_workshop

__all__ = ["main"]

TESTS = (
    "tests/data",
    "tests/shards/test_arrays.py",
    "tests/shards/test_index.py",
    "tests/shards/test_records.py",
    "tests/shards/test_write.py",
    "tests/loading/test_batch.py",
    "tests/loading/test_dataset.py",
    "tests/loading/test_masks.py",
    "tests/loading/test_targets.py",
)
"""Whatever numpy, Pillow and pycocotools decide."""
_SLOW = ("other_processes", "memory_does_not_grow", "killed")
"""Parts of the names of those that take long, and see processes rather than versions."""
_NOTEBOOK = "02_preprocess_to_shards"


def run_tests(python: Path) -> bool:
    """Run the tests in an environment, and say whether they passed.

    Warnings are no errors: those of old versions are not ours.
    """
    pytest = ["-m", "pytest", "-p", "no:cacheprovider", "-W", "default", "-n", "2"]
    done = subprocess.run(
        [str(python), *pytest, "-k", f"not ({' or '.join(_SLOW)})", "-m", "not clock", *TESTS],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
    )
    return done.returncode == 0


def run_small_notebook(python: Path, work: Path) -> bool:
    """Run a notebook in an environment, as its setup cell installs the package there, and say
    whether it passed.
    """
    notebooks = write_workshop(work / "notebooks")
    source = next(path for path in notebooks if path.stem == _NOTEBOOK)
    scenario = Scenario("overlay", {"USE_GOOGLE_DRIVE": False})
    with tempfile.TemporaryDirectory(prefix="colab-drive-") as drive:
        target = work / "executed" / source.name
        run = run_notebook(source, target, scenario, python, drive=Path(drive), content=False)
    for fault in run.faults:
        print(f"{_NOTEBOOK}: {fault}")
    return not run.faults


def run_overlay(versions: Mapping[str, str], work: Path) -> int:
    """Run all with the versions of a runtime; returns the number of what failed.

    Args:
        versions: of the runtime.
        work: the folder for the environment and the notebook.
    """
    started = perf_counter()
    python = build_overlay(work / "env", versions)
    built = perf_counter()
    outcomes = (run_tests(python), run_small_notebook(python, work))
    print(
        f"overlay: {built - started:.0f} s to make it, {perf_counter() - built:.0f} s for the tests"
        f" and the notebook"
    )
    failed = outcomes.count(False)
    print(f"{len(outcomes) - failed} passed, {failed} failed", flush=True)
    return failed


def main(arguments: Sequence[str] | None = None) -> int:
    """Run from a terminal; returns 0 where nothing went wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.colab.run_overlay", description=__doc__)
    parser.add_argument("--runtime", default="now", help="a name of runtimes.txt, or a list: now")
    options = parser.parse_args(arguments)
    try:
        versions = read_runtime(options.runtime)
        folder = Path(options.runtime).name.removesuffix(".txt")
        return 1 if run_overlay(versions, ROOT / "runs" / "overlay" / folder) else 0
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
