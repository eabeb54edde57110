"""Mutated files through the package's entry points: each ends in correct data, in one clear line,
or it is a bug.

``make fuzz CASES=100000``; ``python -m tests.fuzz --case 1234`` runs one case alone and shows its
traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from colab_utils.machine import count_cores
from tests.fuzz.kinds import KINDS
from tests.fuzz.originals import Originals, make_originals
from tests.fuzz.pool import Result, run_cases


def main() -> int:
    """Run the cases that were asked for; 1 if one of them is a bug."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--cases", type=int, default=5000, help="how many (default: 5000)")
    parser.add_argument("--seed", type=int, default=0, help="another one gives other cases")
    parser.add_argument("--case", type=int, help="this case alone, with its traceback")
    options = parser.parse_args()
    numbers = list(range(options.cases))
    if options.case is not None:
        numbers = [options.case]
    results = list[Result]()
    # A run that is stopped still tells what it found, and removes its folder.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), prepare() as (originals, folder):
        # Cases wait for half of their time.
        processes = 3 * count_cores()
        running = run_cases(numbers, options.seed, KINDS, originals, folder, processes)
        with closing(running):
            for result in running:
                if result.outcome == "bug":
                    print(f"{result.kind}: {result.bug} (--case {result.number})", flush=True)
                if options.case is not None:
                    print(result.text)
                # A hundred thousand tracebacks would fill the memory.
                results.append(replace(result, text=""))
                if len(results) % 100 == 0:
                    print(f"{len(results):,} of {len(numbers):,}", flush=True)
    print(describe(results, options.seed))
    if any(result.outcome == "bug" for result in results):
        return 1
    if len(results) < len(numbers):
        return 130
    return 0


@contextmanager
def prepare() -> Iterator[tuple[Originals, Path]]:
    """Yield what is mutated, and a folder for the cases, in memory where possible; it is removed
    at the end.
    """
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="colab_utils-fuzz-", dir=memory if memory.is_dir() else None
    ) as name:
        folder = Path(name)
        with ProcessPoolExecutor(1, multiprocessing.get_context("fork")) as pool:
            originals = pool.submit(make_originals, folder / "made").result()
        yield originals, folder


def describe(results: list[Result], seed: int) -> str:
    """Count the endings by kind, then name each bug once with the command that shows it."""
    counts = Counter(f"{result.kind} {result.outcome}" for result in results)
    lines = [f"{count:7,} x {ending}" for ending, count in sorted(counts.items())]
    bugs: dict[str, list[int]] = {}
    for result in results:
        if result.outcome == "bug":
            cause = f"{result.kind}: {result.bug}"
            bugs.setdefault(cause, []).append(result.number)
    for cause, numbers in bugs.items():
        lines.append(f"{len(numbers):5,} x {cause}")
        lines.append(f"        python -m tests.fuzz --seed {seed} --case {min(numbers)}")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
