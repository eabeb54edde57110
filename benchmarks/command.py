"""What the benchmarks' command lines share: the data they are asked for, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from colab_utils.errors import ColabUtilsError

__all__ = ["make_parser", "run_to_end"]


def make_parser(name: str, text: str | None) -> argparse.ArgumentParser:
    """A parser that asks for COCO data, a folder to work in, and where the result goes."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=text)
    parser.add_argument("--images", type=Path, nargs="+", metavar="DIR", required=True, help="image folders")
    parser.add_argument("--annotations", type=Path, nargs="+", metavar="FILE", required=True, help="COCO JSON of each")
    parser.add_argument("--work", type=Path, default=Path("runs/benchmarks"), help="for the data")
    parser.add_argument("--json", type=Path, metavar="FILE", required=True, help="all that is measured")
    return parser


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
