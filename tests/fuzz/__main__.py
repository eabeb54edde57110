"""Mutated files through the package's entry points: each ends in correct data, in one clear line,
or it is a bug.

``make fuzz CASES=100000``; ``python -m tests.fuzz --case 1234`` runs one case alone and shows its
traceback.
"""

from __future__ import annotations

import argparse
import multiprocessing
import pickle
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from colab_utils.machine import count_cores
from tests.fuzz.kinds import KINDS
from tests.fuzz.originals import Originals, make_originals
from tests.fuzz.pool import Result, pick_case, run_cases


def main() -> int:
    """Run the cases that were asked for; 1 if one of them is a bug."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--cases", type=int, default=5000, help="how many (default: 5000)")
    parser.add_argument(
        "--seed", type=int, default=0, help="another seed gives other cases (default: 0)"
    )
    parser.add_argument(
        "--start", type=int, default=0, help="number of the first case (default: 0)"
    )
    parser.add_argument(
        "--case", type=int, nargs="+", help="these cases alone, with their tracebacks"
    )
    parser.add_argument("--kind", choices=KINDS, help="only cases of this kind")
    parser.add_argument(
        "--processes",
        type=int,
        default=count_cores() + 1,
        help="one more than cores: some cases wait",
    )
    asked = parser.parse_args()
    numbers = asked.case or list(range(asked.start, asked.start + asked.cases))
    if asked.kind:
        numbers = [
            number for number in numbers if pick_case(asked.seed, number, KINDS)[0] == asked.kind
        ]
    found = list[Result]()
    started = time.monotonic()
    # what was found is told, and the folder removed
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    with suppress(KeyboardInterrupt), prepare() as (originals, folder):
        running = run_cases(numbers, asked.seed, KINDS, originals, folder, asked.processes)
        with closing(running):
            for result in running:
                found.append(result if asked.case else replace(result, text=""))
                if result.outcome == "bug":
                    print(f"\n{result.kind}: {result.bug} (--case {result.number})", flush=True)
                if len(found) % 100 == 0 or len(found) == len(numbers):
                    bugs = sum(one.outcome == "bug" for one in found)
                    rate = len(found) / (time.monotonic() - started)
                    end = "\n" if len(found) == len(numbers) else ""
                    print(
                        f"\r{len(found):,} of {len(numbers):,} cases, {rate:.0f} a second, {bugs} "
                        "bugs",
                        end=end,
                        flush=True,
                    )
    print(describe(found, asked.seed))
    for result in found if asked.case else ():
        print(f"\n{result.number}: {result.kind} {result.outcome}\n{result.text}")
    if any(result.outcome == "bug" for result in found):
        return 1
    return 0 if len(found) == len(numbers) else 130


@contextmanager
def prepare() -> Iterator[tuple[Originals, Path]]:
    """What is mutated, and a folder for the cases, in memory where possible; it is removed at the
    end.
    """
    memory = Path("/dev/shm")
    folder = Path(
        tempfile.mkdtemp(prefix="colab_utils-fuzz-", dir=memory if memory.is_dir() else None)
    )
    try:
        process = multiprocessing.get_context("fork").Process(
            target=make_originals, args=(folder / "made", folder / "made.pickle")
        )
        process.start()
        process.join()
        if process.exitcode:
            raise SystemExit("the data to mutate could not be made")
        yield pickle.loads((folder / "made.pickle").read_bytes()), folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def describe(results: list[Result], seed: int) -> str:
    """A table by kind, then each bug once with the command that shows it."""
    lines = [
        f"{'kind':18}{'cases':>9}{'correct':>9}{'refused':>9}{'bugs':>7}{'mean ms':>9}{'slowest s':>11}{'most MB':>9}"
    ]
    for kind in [*sorted({result.kind for result in results}), *["all"][: len(results)]]:
        mine = [result for result in results if kind in (result.kind, "all")]
        counts = Counter(result.outcome for result in mine)
        mean = 1000 * sum(result.seconds for result in mine) / len(mine)
        slowest = max(result.seconds for result in mine)
        most = max(result.megabytes for result in mine)
        lines.append(
            f"{kind:18}{len(mine):9,}{counts['correct']:9,}{counts['refused']:9,}{counts['bug']:7,}{mean:9.0f}{slowest:11.1f}{most:9.0f}"
        )
    bugs: dict[tuple[str, str], list[int]] = {}
    for result in sorted(results, key=lambda result: result.number):
        if result.outcome == "bug":
            bugs.setdefault((result.kind, result.bug), []).append(result.number)
    for (kind, bug), numbers in sorted(bugs.items(), key=lambda item: -len(item[1])):
        lines.append(
            f"{len(numbers):5,} x {kind}: {bug}\n        python -m tests.fuzz --seed {seed} "
            f"--case {numbers[0]}"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
