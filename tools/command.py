"""What the tools' command lines share: the folders they are given, and how they end."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from colab_utils.errors import ColabUtilsError

__all__ = ["parse_folders", "print_result"]


def parse_folders(
    name: str, text: str | None, arguments: Sequence[str] | None, *, output: str
) -> tuple[Path, Path]:
    """Return the folder of the executed demo, and that for the tool's own files, which is
    ``output`` where a command line names none.
    """
    parser = argparse.ArgumentParser(prog=f"python -m tools.{name}", description=text)
    for option, folder in (("--demo", "runs/demo"), ("--output", output)):
        parser.add_argument(option, metavar="DIR", type=Path, default=Path(folder), help=folder)
    options = parser.parse_args(arguments)
    return options.demo, options.output


def print_result(work: Callable[[], str]) -> int:
    """Do what a tool is for, and print what it says, or its error in one line; returns the exit
    status.
    """
    try:
        print(work())
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
