"""What the benchmarks' command lines share: the data they are asked for, and how rows are measured
until they end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from colab_utils.errors import ColabUtilsError
from colab_utils.files import write_file
from colab_utils.machine import describe_machine

__all__ = [
    "README",
    "Row",
    "format_spread",
    "make_parser",
    "run_to_end",
    "write_between",
]

README = Path(__file__).with_name("README.md")

Row = dict[str, Any]
"""What was measured, with what names it."""


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


def run_to_end(
    measured: Iterable[Row],
    path: Path,
    tabulate: Callable[[list[Row]], object],
    *,
    known: Iterable[Row] = (),
    **about: Any,
) -> int:
    """Measure one row after the other; the JSON at ``path`` holds this machine, ``about``, the
    ``known`` rows of an earlier run, and the rows so far. However it ends, the table of what there
    is is printed; returns the exit status.
    """
    rows = [*known]
    content = {"machine": asdict(describe_machine()), **about, "rows": rows}
    try:
        for row in measured:
            rows.append(row)
            print(row, file=sys.stderr, flush=True)
            write_file(path, json.dumps(content, indent=1, default=str).encode())
    except (ColabUtilsError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        print(tabulate(rows) if rows else "nothing was measured")
    return 0
