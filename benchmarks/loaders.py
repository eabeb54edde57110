"""Measure every loader on the same work: `python -m benchmarks.loaders --images DIR --annotations
FILE --json FILE`.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.command import make_parser
from benchmarks.data import Data, make_data
from benchmarks.environments import find_python
from benchmarks.report import format_scenario, summarise
from benchmarks.scenarios import SCENARIOS, Scenario, judge
from benchmarks.systems import SYSTEMS, get_system
from benchmarks.systems.base import BATCH_SIZE, Crew
from benchmarks.worker import Job
from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import describe_machine

__all__ = ["main", "run_apart", "run_scenario"]

ROOT = Path(__file__).parents[1]
_COMMAND = ["-m", "benchmarks.worker"]
# A trial takes this share of the time of a repeat.
TRIAL_S = 0.4


@dataclass
class Row:
    """A system in a scenario, while it is measured; ``reason`` says why it could not be."""

    job: Job
    reason: str = ""
    difference: str = ""
    crew: Crew | None = None
    kb_per_image: float | None = None
    trials: dict[str, float] = field(default_factory=dict)
    check: dict[str, Any] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    repeats: list[dict[str, Any]] = field(default_factory=list)

    def describe(self) -> dict[str, Any]:
        """Ready for JSON."""
        return {
            **vars(self),
            "job": self.job.system,
            "system": self.job.system,
            "crew": str(self.crew) if self.crew else "",
            "figures": summarise(self.repeats) if self.repeats else None,
        }


def run_scenario(
    scenario: Scenario, systems: Sequence[str], settings: argparse.Namespace
) -> tuple[dict[str, Any], list[Row]]:
    """Prepare, try, check, measure in turns; what could not be done has a reason in its row."""
    rows = [_plan_row(scenario, system, settings) for system in systems]
    for row in rows:
        _attempt(row, "prepare", settings)
    # What was written must not be on its way to the disk while others are measured.
    os.sync()
    for row in rows:
        _attempt(row, "trial", settings)
        _attempt(row, "check", settings)
    for repeat in range(settings.repeats):
        for row in rows:
            _attempt(row, "measure", settings, f" {repeat + 1} of {settings.repeats}")
    figures = {
        row.job.system: summarise(row.repeats) for row in rows if row.repeats and not row.difference
    }
    targets = [judge(target, figures) for target in scenario.targets]
    return {
        "name": scenario.name,
        "rows": [row.describe() for row in rows],
        "targets": targets,
    }, rows


def _plan_row(scenario: Scenario, system: str, settings: argparse.Namespace) -> Row:
    kind = get_system(system)

    def make(name: str) -> Data:
        return make_data(
            name, settings.work, settings.images, settings.annotations, samples=settings.samples
        )

    data = make("kept" if kind.size_800 else scenario.data)
    reference = make("pixels_800") if kind.size_800 else data
    folder = settings.work / "forms" / f"{kind.store}-{data.name}"
    return Row(Job("prepare", system, data, reference, folder.absolute(), step_ms=scenario.step_ms))


def _attempt(row: Row, task: Any, settings: argparse.Namespace, number: str = "") -> None:
    if row.reason:
        return
    print(f"{row.job.system}, {row.job.data.name}: {task}{number}", file=sys.stderr, flush=True)
    try:
        _TASKS[task](row, settings)
    except ColabUtilsError as error:
        row.reason = str(error)
        print(f"  {row.reason}", file=sys.stderr, flush=True)


def _prepare(row: Row, settings: argparse.Namespace) -> None:
    job = row.job
    done = row.job.folder / ".done"
    python = find_python(get_system(job.system).environment, settings.work)
    made_from = (job.data.folder / "made.json").read_text()
    if not get_system(job.system).store or (done.exists() and done.read_text() == made_from):
        return
    shutil.rmtree(job.folder, ignore_errors=True)
    job.folder.mkdir(parents=True)
    run_apart(job, python, timeout_s=1800)
    done.write_text(made_from)


def _try_crews(row: Row, settings: argparse.Namespace) -> None:
    system = get_system(row.job.system)
    python = find_python(system.environment, settings.work)
    job = replace(row.job, task="trial", seconds=TRIAL_S * settings.seconds)
    result = run_apart(job, python, timeout_s=120 + 100 * len(system.crews))
    row.kb_per_image = result["kb_per_image"]
    row.versions = result["versions"]
    row.trials = {str(crew): rate for crew, rate in zip(system.crews, result["rates"], strict=True)}
    best = max(range(len(system.crews)), key=result["rates"].__getitem__)
    if not result["rates"][best]:
        raise ColabUtilsError(result["errors"][-1])
    row.crew = system.crews[best]
    batches = max(8, round(settings.seconds * result["rates"][best] / BATCH_SIZE))
    row.job = replace(row.job, crew=row.crew, batches=batches, seconds=10 * settings.seconds)


def _check(row: Row, settings: argparse.Namespace) -> None:
    python = find_python(get_system(row.job.system).environment, settings.work)
    row.check = run_apart(replace(row.job, task="check"), python, timeout_s=300)
    row.difference = row.check["difference"]


def _measure(row: Row, settings: argparse.Namespace) -> None:
    python = find_python(get_system(row.job.system).environment, settings.work)
    row.repeats.append(
        run_apart(replace(row.job, task="measure"), python, timeout_s=180 + row.job.seconds)
    )


_TASKS = {"prepare": _prepare, "trial": _try_crews, "check": _check, "measure": _measure}


def run_apart(job: Job, python: Path, *, timeout_s: float) -> dict[str, Any]:
    """Do a job in a process of its own, in the environment of its system."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "ignore"}
    process = subprocess.Popen(
        [python, *_COMMAND, job.dump()],
        cwd=ROOT,
        env=environment,
        text=True,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        answer, stderr = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        raise ColabUtilsError(f"did not finish to {job.task} within {timeout_s:.0f} s") from None
    finally:
        if process.poll() is None:
            # Its workers are in the same group.
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    try:
        content: dict[str, Any] = json.loads(answer)
    except ValueError:
        last = (stderr.strip().splitlines() or ["nothing said"])[-1]
        raise ColabUtilsError(
            f"ended with code {process.returncode} in {job.task}: {last[:300]}"
        ) from None
    if "error" in content:
        raise ColabUtilsError(f"{job.task}: {content['error'][:300]}")
    return content


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("loaders", __doc__)
    parser.add_argument("--systems", help=f"some of: {', '.join(SYSTEMS)}")
    parser.add_argument(
        "--scenario", action="append", choices=SCENARIOS, help="one scenario, or several times one"
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="of each system, in turns (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=8, help="length of a repeat (%(default)s)")
    parser.add_argument(
        "--samples", type=int, default=320, help="records in an epoch, about (%(default)s)"
    )
    options = parser.parse_args(arguments)
    if len(options.images) != len(options.annotations) or min(options.repeats, options.samples) < 1:
        parser.error(
            "as many --annotations as --images are needed, and 1 or more --repeats and --samples"
        )
    try:
        _run_all(options)
    except (ColabUtilsError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _run_all(options: argparse.Namespace) -> None:
    wanted = options.systems.split(",") if options.systems else list(SYSTEMS)
    unknown = [name for name in wanted if name not in SYSTEMS]
    if unknown:
        raise ColabUtilsError(
            f"expected systems among {', '.join(SYSTEMS)}; found {', '.join(unknown)}: choose again"
        )
    options.work.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {
        "machine": asdict(describe_machine()),
        "date": date.today().isoformat(),
        "versions": {},
        "samples": options.samples,
        "repeats": options.repeats,
        "seconds": options.seconds,
        "batch_size": BATCH_SIZE,
        "scenarios": [],
    }
    todo = [SCENARIOS[name] for name in options.scenario or SCENARIOS]
    todo = [scenario for scenario in todo if any(name in wanted for name in scenario.systems)]
    for number, scenario in enumerate(todo):
        result, rows = run_scenario(
            scenario, [name for name in scenario.systems if name in wanted], options
        )
        results["scenarios"].append(result)
        for row in rows:
            results["versions"].update(row.versions)
        write_file(options.json, json.dumps(results, indent=1, default=str).encode())
        print(format_scenario(result), end="\n\n", flush=True)
        later = {later.data for later in todo[number + 1 :]}
        # All forms together would fill a small disk.
        for row in rows:
            if row.job.data.name not in later:
                shutil.rmtree(row.job.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
