"""What other tools say about the planted causes: `python -m benchmarks.causes.peers --json FILE`.

Each loop runs in a process of its own under TraceML (`traceml run`, its summary at the end) and
under gpuprof (its insights), which have to be installed beside this package: `pip install
traceml-ai gpuprof`. Their advice counts as fitting by the same words as that of `python -m
benchmarks.causes`, and by some of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil
import torch
from torch import nn

from benchmarks.causes import CAUSES, get_cause
from benchmarks.causes.loop import Loop, run_loop
from benchmarks.command import make_parser, run_to_end
from colab_utils.files import write_file
from colab_utils.show.table import make_table

__all__ = ["TOOLS", "main"]

TOOLS = ("TraceML", "gpuprof")
# These are words in which a peer's advice fits, beside those of a cause's NEXT.
ALSO = {
    "read": "storage|Increase .*workers",
    "bandwidth": "storage",
    "between": "logging",
    "periodic": "checkpointing",
    "contention": "CPU stalls",
}
# A process has so long to end after its loop.
GRACE_S = 60.0


def run_under(tool: str, name: str, seconds: float) -> None:
    """In a process of its own: the loop with the tool around it, as the tool's own first page
    shows.
    """
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        if tool == "gpuprof":
            import gpuprof

            with gpuprof.profile(name):
                run_loop(get_cause(name).make_loop, Path(folder), seconds=seconds)
            return
        import traceml_ai as traceml

        traceml.init(mode="auto")

        def make_loop(folder: Path) -> Loop:
            loader, step, after = get_cause(name).make_loop(folder)

            def traced(*batch: Any) -> None:
                with traceml.trace_step(getattr(step, "model", nn.Identity())):
                    step(*batch)

            return loader, traced, after

        run_loop(make_loop, Path(folder), seconds=seconds)


def run_to_summary(
    command: list[str], folder: Path, environment: dict[str, str], limit_s: float
) -> str:
    """What a command prints; after ``limit_s`` it gets a Ctrl-C, as from somebody who waits no
    longer.
    """
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            return process.communicate(timeout=limit_s)[0]
        except subprocess.TimeoutExpired:
            started = psutil.Process(process.pid).children(recursive=True)
            process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=GRACE_S / 3)[0]
        except subprocess.TimeoutExpired:
            return ""
        finally:
            # Otherwise the next run of TraceML finds its port taken.
            for running in [process, *started]:
                with suppress(psutil.NoSuchProcess):
                    running.kill()


def ask(tool: str, name: str, seconds: float) -> dict[str, Any]:
    """What the tool says of a planted cause."""
    with TemporaryDirectory() as folder:
        script = [__file__, "--args"] if tool == "TraceML" else [__file__]
        command = [sys.executable, *script, "--one", tool, name, str(seconds)]
        if tool == "TraceML":
            traceml = str(Path(sys.executable).with_name("traceml"))
            command = [traceml, "run", "--run-name", "run", "--logs-dir", folder, *command[1:]]
        environment = os.environ | {"PYTHONPATH": os.getcwd(), "PYTHONWARNINGS": "ignore"}
        printed = run_to_summary(command, Path(folder), environment, seconds + GRACE_S)
        # A command of its own says what to do about each insight.
        if tool == "gpuprof" and printed:
            report = [str(Path(sys.executable).with_name("gpuprof")), "insights", "gpuprof.db", "1"]
            printed += subprocess.run(
                report, cwd=folder, env=environment, capture_output=True, text=True
            ).stdout
    says, advice = READERS[tool](printed)
    fits = any(
        re.search(words, advice) for words in (get_cause(name).NEXT, ALSO.get(name)) if words
    )
    return {
        "planted": name,
        "tool": tool,
        "says": says or "nothing",
        "advice": advice,
        "advice fits": fits,
        "all": printed,
    }


def read_traceml(printed: str) -> tuple[str, str]:
    """Return its verdict, and what to do next."""
    return _read_line(printed, "Verdict"), _read_line(printed, "Next")


def _read_line(printed: str, key: str) -> str:
    """Return what follows a key in TraceML's frame of text, or nothing."""
    match = re.search(rf"{key}: (.*?)\s*(\||$)", printed, re.M)
    return match[1] if match else ""


def read_gpuprof(printed: str) -> tuple[str, str]:
    """Return its first insight, and what it advises there."""
    insights = re.findall(
        r"^ *\[(?:CRIT|HIGH|MED|LOW|INFO)\]\s+(.*)\n((?: {10}.*\n)+)", printed, re.M
    )
    if not insights:
        return "", ""
    insight, advice = insights[0]
    return insight, " ".join(advice.split())


READERS: dict[str, Callable[[str], tuple[str, str]]] = {
    "TraceML": read_traceml,
    "gpuprof": read_gpuprof,
}


def tabulate(rows: Sequence[dict[str, Any]]) -> str:
    """One row a loop and tool."""
    table = [
        {key: str(row[key])[:70] for key in ("planted", "tool", "says", "advice fits")}
        for row in rows
    ]
    return str(make_table(table)) if table else "nothing was tried"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    first_parser = argparse.ArgumentParser(add_help=False)
    first_parser.add_argument("--one", nargs=3)
    if result := first_parser.parse_known_args(arguments)[0].one:
        run_under(result[0], result[1], float(result[2]))
        return 0
    parser = make_parser("causes.peers", __doc__, builtin="peers")
    parser.add_argument("--seconds", type=float, default=12, help="of each loop (%(default)s)")
    parser.add_argument("--names", nargs="+", default=CAUSES, help="only these (all of them)")
    options = parser.parse_args(arguments)
    rows: list[dict[str, Any]] = []

    def measure() -> None:
        for name in options.names:
            for tool in TOOLS:
                rows.append(ask(tool, name, options.seconds))
                print(
                    {key: rows[-1][key] for key in ("planted", "tool", "says")},
                    file=sys.stderr,
                    flush=True,
                )
                write_file(
                    options.json,
                    json.dumps({"seconds": options.seconds, "rows": rows}, indent=1).encode(),
                )

    return run_to_end(measure, lambda: tabulate(rows))


if __name__ == "__main__":
    sys.exit(main())
