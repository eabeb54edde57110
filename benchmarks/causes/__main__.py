"""Plant each cause of a stall: `python -m benchmarks.causes --json FILE` says what `watch` and
`diagnose` make of it.

Each planted loop runs for some seconds under `watch`; then `diagnose` looks at the same loader and
step. A cause counts as named where the first cause of either has its id, and the advice fits.
Healthy loops must have no cause. That other programs have the cores is never planted, and may be
said of any loop. With ``--load 2``, two other processes keep two cores busy
meanwhile.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.causes.healthy import HEALTHY
from benchmarks.causes.loop import run_loop
from benchmarks.causes.planted import CAUSES
from benchmarks.command import Row, make_parser, run_to_end
from colab_utils.diagnosis.cures import Cause
from colab_utils.diagnosis.diagnose import diagnose
from colab_utils.diagnosis.watch import WatchedLoader
from colab_utils.errors import ColabUtilsError
from colab_utils.show.report import make_table

__all__ = ["main", "try_cause", "try_healthy"]

# For a batch that never comes, and for one of any other loop. Workers may have to import torch.
TIMEOUT_S = 10.0
PATIENCE_S = 60.0
# These loops end with an error: `diagnose` would, too.
ENDING = ("hang", "cut_file", "spawned_hang")


def watch_loop(
    make_loop: Callable[[Path], Any], folder: Path, seconds: float, timeout_s: float
) -> tuple[list[Cause], str]:
    """Return the causes that a summary of the running loop names, and the truth by its clocks."""
    watched: list[WatchedLoader] = []

    def around(loader: Any) -> WatchedLoader:
        if not watched:
            watched.append(WatchedLoader(loader, timeout_s, "raise"))
        return watched[0]

    truth = "the loop ended with an error"
    try:
        truth = str(run_loop(make_loop, folder, seconds=seconds, around=around))
    except (ColabUtilsError, RuntimeError) as error:
        print(error, file=sys.stderr)
    try:
        summary = watched[0].summary()
    except ColabUtilsError as error:
        return [], str(error)
    return [*summary.causes] or [Cause("step", summary.parts[1].share, "", summary.verdict)], truth


def try_cause(name: str, *, seconds: float) -> dict[str, Any]:
    """Run a planted cause, and say whether it was named."""
    planted = CAUSES[name]
    with TemporaryDirectory() as folder:
        timeout_s = TIMEOUT_S if name in ENDING else PATIENCE_S
        seen, truth = watch_loop(planted.make_loop, Path(folder), seconds, timeout_s)
        if name not in ENDING:
            loader, step, _ = planted.make_loop(Path(folder))
            seen_there = [*diagnose(loader, step, seconds=seconds).causes]
        else:
            seen_there = []
    first = [causes[0] for causes in map(leave_out_machine, (seen, seen_there)) if causes]
    right = [cause for cause in first if cause.id == planted.expected]
    fits = any(re.search(planted.advice, cause.next) for cause in right)
    return {
        "planted": name,
        "truth": truth,
        "watch": describe_causes(seen),
        "diagnose": describe_causes(seen_there),
        "named": bool(right),
        "advice fits": fits,
        "next": first[-1].next if first else "",
    }


def try_healthy(name: str, *, seconds: float) -> dict[str, Any]:
    """Run a healthy loop: any cause is a false alarm."""
    with TemporaryDirectory() as folder:
        seen, truth = watch_loop(HEALTHY[name], Path(folder), seconds, PATIENCE_S)
    return {
        "planted": f"healthy: {name}",
        "truth": truth,
        "watch": describe_causes(seen),
        "named": all(cause.id == "step" for cause in leave_out_machine(seen)),
    }


def leave_out_machine(causes: Sequence[Cause]) -> list[Cause]:
    """Leave out that other programs have the cores: that is no matter of the loop."""
    return [cause for cause in causes if cause.id != "other_programs"]


def describe_causes(causes: Sequence[Cause]) -> str:
    """Ids with their shares."""
    return ", ".join(f"{cause.id} {cause.share:.0%}" for cause in causes) or "none"


# The program burns until this process ends. It is started by a process that ends at once, because
# what is busy beside a training is no child of it.
BURN = """
import os, sys, time
while os.path.exists(f"/proc/{sys.argv[1]}"):
    until_s = time.monotonic() + 1
    while time.monotonic() < until_s:
        pass
"""
START = """
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", *sys.argv[1:]], stdout=subprocess.DEVNULL).pid)
"""


@contextmanager
def load_cores(count: int) -> Iterator[None]:
    """Other processes that keep so many cores busy."""
    command = [sys.executable, "-c", START, BURN, str(os.getpid())]
    others = [
        int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
        for _ in range(count)
    ]
    try:
        yield
    finally:
        for other in others:
            os.kill(other, signal.SIGKILL)


def tabulate(rows: Sequence[Row]) -> str:
    """One row a loop."""
    table = [
        {key: row.get(key) for key in ("planted", "watch", "diagnose", "named", "advice fits")}
        for row in rows
    ]
    return str(make_table(table))


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = make_parser("causes", __doc__, builtin="causes")
    parser.add_argument(
        "--seconds",
        type=float,
        default=12,
        help="of each loop, and of each diagnosis (%(default)s)",
    )
    parser.add_argument("--names", nargs="+", help="only these, or healthy (all of them)")
    parser.add_argument("--load", type=int, default=0, help="other busy processes (%(default)s)")
    options = parser.parse_args(arguments)
    about = {"seconds": options.seconds, "load": options.load}
    return run_to_end(measure(options), options.json, tabulate, **about)


def measure(options: Namespace) -> Iterator[Row]:
    """Yield what each loop shows."""
    names = options.names or [*CAUSES, *HEALTHY]
    if names == ["healthy"]:
        names = [*HEALTHY]
    torch.set_num_threads(1)
    with load_cores(options.load):
        for name in names:
            yield (try_healthy if name in HEALTHY else try_cause)(name, seconds=options.seconds)


if __name__ == "__main__":
    sys.exit(main())
