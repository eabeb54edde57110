"""Check the forecasts of `diagnose` against what is then measured: `python -m benchmarks.forecast
--images DIR ...`.
"""

from __future__ import annotations

import json
import random
import sys
from argparse import Namespace
from collections.abc import Iterator, Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from torch.utils.data import DataLoader, Sampler

from benchmarks.command import Row, make_parser, run_to_end
from benchmarks.data import make_data
from benchmarks.systems.base import collate
from colab_utils.course.sample_data import make_dataset
from colab_utils.diagnosis import fixes
from colab_utils.diagnosis.diagnose import diagnose
from colab_utils.loading.coco_folder import CocoFolder
from colab_utils.loading.emulated_step import EmulatedStep
from colab_utils.show.report import make_table
from colab_utils.slow_drive import read_at_full_speed, slow_down

__all__ = ["Case", "count_best_first", "list_cases", "main", "run_case", "tabulate_errors"]

DATA = ("builtin", "kept", "photos_12mp", "objects_300")
PROFILES = ("none", "fast", "typical", "bad")
STEPS_MS = (20, 100, 400)
CASE_FIELDS = (
    "data",
    "profile",
    "workers",
    "step_ms",
)
# A dense batch of 4 photos is half a GB, and each worker has two ahead.
BATCH_SIZES = {"photos_12mp": 2}


class Endless(Sampler[int]):
    """Every image in a random order, again and again, and the same from the start in each pass: no
    epoch ends while it is timed, and a few heavy images weigh the same before and after a fix.
    """

    def __init__(self, count: int) -> None:
        self._count = count

    def __iter__(self) -> Iterator[int]:
        chance = random.Random(0)
        while True:
            yield from chance.sample(range(self._count), self._count)


@dataclass(frozen=True)
class Case:
    """A dataset at the speed of a Drive profile, ``workers`` of a plain ``DataLoader``, an emulated
    step.
    """

    data: str
    profile: str
    workers: int
    step_ms: float


def list_cases(count: int, *, seed: int = 0) -> list[Case]:
    """So many cases in a random order; each dataset with each profile comes once before one comes
    again.

    Example:
        >>> len({(case.data, case.profile) for case in list_cases(16)})
        16
    """
    chance = random.Random(seed)
    rounds = []
    settings = list(product(range(5), STEPS_MS))
    for _ in range(len(settings)):
        pairs = list(product(DATA, PROFILES))
        chance.shuffle(pairs)
        rounds += pairs
    chance.shuffle(settings)
    return [Case(*pair, *settings[number % len(settings)]) for number, pair in enumerate(rounds)][
        :count
    ]


def run_case(
    case: Case, images: Path, annotations: Path, *, seconds: float
) -> list[dict[str, Any]]:
    """Diagnose, apply every fix, and give each forecast beside what was measured."""
    with read_at_full_speed():
        slow_down(images, case.profile)
        dataset = CocoFolder(images, annotations)
        loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_size=BATCH_SIZES.get(case.data, 4),
            num_workers=case.workers,
            collate_fn=collate,
            sampler=Endless(len(dataset)),
        )
        diagnosis = diagnose(loader, EmulatedStep(case.step_ms), seconds=seconds, verify=True)
    return [
        {
            **asdict(case),
            "fix": fix.id,
            "now": diagnosis.images_per_second,
            "headspace": diagnosis.headspace,
            "forecast": fix.forecast_images_per_second,
            "measured": fix.measured_images_per_second,
            "error": fix.forecast_images_per_second / fix.measured_images_per_second - 1,
            "may_be_off_by": fix.error,
            "sentence": fix.sentence,
        }
        for fix in diagnosis.fixes
        if fix.forecast_images_per_second and fix.measured_images_per_second
    ]


def tabulate_errors(rows: Sequence[Row]) -> str:
    """Median and worst error of each fix, and of all."""
    names = [*dict.fromkeys(row["fix"] for row in rows), "all"]
    table = []
    for name in names:
        errors = [abs(row["error"]) for row in rows if name in (row["fix"], "all")]
        table.append(
            {
                "fix": name,
                "forecasts": len(errors),
                "median error": f"{median(errors):.0%}",
                "worst error": f"{max(errors):.0%}",
                "within 25 %": f"{sum(e <= 0.25 for e in errors) / len(errors):.0%}",
            }
        )
    hits, cases = count_best_first(rows)
    return f"{make_table(table)}\nThe best fix had the highest forecast in {hits} of {cases} cases."


def count_best_first(rows: Sequence[dict[str, Any]]) -> tuple[int, int]:
    """Count the cases in which the fix with the highest forecast was the best that was measured, or
    within 5 % of it. Return also the number of all cases.
    """
    rates: dict[tuple[Any, ...], list[tuple[float, float]]] = {}
    for row in rows:
        case = tuple(row[name] for name in CASE_FIELDS)
        rates.setdefault(case, [])
        rates[case].append((row["forecast"], row["measured"]))
    hits = 0
    for pairs in rates.values():
        _, measured = max(pairs)
        best = max(other for _, other in pairs)
        if measured >= 0.95 * best:
            hits += 1
    return hits, len(rates)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("forecast", __doc__)
    parser.add_argument(
        "--cases", type=int, default=16, help="how many; the JSON keeps those it has (%(default)s)"
    )
    parser.add_argument("--seconds", type=float, default=10, help="of each diagnosis (%(default)s)")
    options = parser.parse_args(arguments)
    known = json.loads(options.json.read_text())["rows"] if options.json.exists() else []
    return run_to_end(
        measure(options, known),
        options.json,
        tabulate_errors,
        known=known,
        seconds=options.seconds,
    )


def measure(options: Namespace, known: Sequence[Row]) -> Iterator[Row]:
    """Yield the rows of each case that is not among the known rows."""
    # Loaders begin slowly: a trial of `diagnose` is too short to show what they settle at.
    fixes._TRIAL_SHARE = 1.5
    fixes._TRIAL_BATCHES = 150
    done = {tuple(row[name] for name in CASE_FIELDS) for row in known}
    for number, case in enumerate(list_cases(options.cases), start=1):
        if astuple(case) in done:
            continue
        data: Any
        if case.data == "builtin":
            data = make_dataset(options.work / "data" / "builtin", n=160)
        else:
            data = make_data(
                case.data, options.work, options.images, options.annotations, samples=300
            )
        print(f"{number} of {options.cases}: {case}", file=sys.stderr, flush=True)
        yield from run_case(case, data.images, data.annotations, seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
