"""What the benchmarks' command lines share: the data they are asked for, runs in turns, and how
they end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import psutil

from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import describe_machine

__all__ = [
    "README",
    "format_spread",
    "make_parser",
    "measure_in_turns",
    "run_to_end",
    "write_between",
]

README = Path(__file__).with_name("README.md")

NOTED_SHARE = 0.02
Run = tuple[dict[str, Any], Callable[[], dict[str, float]]]
"""What names a run, and the run itself."""


def make_parser(
    name: str, text: str | None, *, builtin: str | None = None
) -> argparse.ArgumentParser:
    """A parser that asks for COCO data, a folder to work in, and where the result goes; with
    ``builtin`` not for data, and that is the subfolder in which the built-in dataset is made.
    """
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text)
    if builtin is None:
        parser.add_argument(
            "--images", type=Path, nargs="+", metavar="DIR", required=True, help="image folders"
        )
        parser.add_argument(
            "--annotations",
            type=Path,
            nargs="+",
            metavar="FILE",
            required=True,
            help="COCO JSON of each",
        )
    parser.add_argument(
        "--work", type=Path, default=Path("runs/benchmarks", builtin or ""), help="for the data"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", required=True, help="all that is measured"
    )
    return parser


def measure_in_turns(
    runs: Sequence[Run],
    rows: list[dict[str, Any]],
    *,
    repeats: int,
    about: dict[str, Any],
    path: Path,
) -> None:
    """Do every run once, then each again; the JSON at ``path`` holds ``about`` and the ``rows`` so
    far.

    Each has the share of this machine's CPU time that its host gave to others meanwhile (steal),
    where it is told.
    """
    for repeat, (names, run) in product(range(repeats), runs):
        print(
            f"{', '.join(names.values())}: {repeat + 1} of {repeats}", file=sys.stderr, flush=True
        )
        before = psutil.cpu_times()
        row = {**names, "repeat": repeat, **run()}
        spent = [after - earlier for after, earlier in zip(psutil.cpu_times(), before, strict=True)]
        stolen = dict(zip(before._fields, spent, strict=True)).get("steal", 0.0) / max(
            sum(spent), 1e-9
        )
        if stolen > NOTED_SHARE:
            print(
                f"note: {stolen:.0%} of the CPU time went to other machines of this host",
                file=sys.stderr,
            )
        rows.append({**row, "stolen_share": stolen})
        content = {"machine": asdict(describe_machine()), **about, "rows": rows}
        write_file(path, json.dumps(content, indent=1, default=str).encode())


def format_spread(values: Sequence[float], how: str = ".2f") -> str:
    """Median [lowest-highest].

    Example:
        >>> format_spread([3, 1, 2], ".0f")
        '2 [1-3]'
    """
    return f"{median(values):{how}} [{min(values):{how}}-{max(values):{how}}]"


def write_between(marks: tuple[str, str], text: str, path: Path = README) -> None:
    """Put a text between two marks of benchmarks/README.md.

    Raises:
        ColabUtilsError: The marks are not there.
    """
    before, begin, rest = path.read_text(encoding="utf-8").partition(marks[0])
    _, end, after = rest.partition(marks[1])
    if not begin or not end:
        raise ColabUtilsError(
            f"expected the marks {marks[0]} and {marks[1]} in {path}, found none: put them back"
        )
    write_file(path, f"{before}{begin}\n{text}\n{end}{after}".encode())


def run_to_end(measure: Callable[[], None], tabulate: Callable[[], str]) -> int:
    """Measure, and print the table of what there is, however it ended; returns the exit status."""
    try:
        measure()
    except (ColabUtilsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        print(tabulate())
    return 0
