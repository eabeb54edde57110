"""Runs cases in forked processes with limits: 10 seconds, 1 GB, no file outside of the folder, no
program started.
"""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Generator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from colab_utils import drive
from colab_utils.data import checks
from colab_utils.errors import ColabUtilsError
from tests.fuzz.originals import Originals, run_here
from tests.fuzz.truth import WrongDataError

SECONDS = 10
MEGABYTES = 1024
REFUSED: Any = type("Refused", (), {"__bool__": lambda self: False})()
_CASES_A_PROCESS = 2000  # then a fresh one: what a case leaves in memory ends with it
_ROOT = Path(__file__).parents[2]
_WRITES = {
    "os.mkdir",
    "os.remove",
    "os.rmdir",
    "os.rename",
    "os.link",
    "os.symlink",
    "os.truncate",
    "os.chmod",
}
_PROGRAMS = {
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "subprocess.Popen",
    "socket.connect",
    "os.fork",
}


class Outside(BaseException):
    """A file outside of the case's folder was opened or written, or a program was started."""


@dataclass
class Case:
    """What a kind of case works with."""

    rng: random.Random
    folder: Path
    """Its own folder, empty at first; what lies in ``../outside`` must not be opened."""
    originals: Originals
    refused: list[str] = field(default_factory=list)
    """What was refused, and why: in one line."""

    def attempt(self, work: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """What an entry point returns, or `REFUSED`; anything that it raises but one clear line is
        a bug.
        """
        try:
            return work(*arguments, **named)
        except ColabUtilsError as error:
            if len(text := str(error)) < 3 or not text.isprintable():
                raise WrongDataError(
                    f"a message that is not one printable line: {text!r:.300}"
                ) from error
            self.refused.append(text)
            return REFUSED


@dataclass(frozen=True)
class Result:
    """How a case ended."""

    number: int
    kind: str
    outcome: str
    """``"correct"``, ``"refused"`` or ``"bug"``."""
    bug: str = ""
    """The same for all cases with the same cause."""
    text: str = ""
    """The traceback."""
    seconds: float = 0.0
    megabytes: float = 0.0
    """At the highest, more than before the case."""


Kinds = dict[str, tuple[int, Callable[[Case], object]]]
"""Name to weight and function, which raises whatever is a bug."""


def pick_case(seed: int, number: int, kinds: Kinds) -> tuple[str, random.Random]:
    """The kind of a case and its random numbers: the same on every machine."""
    rng = random.Random(f"{seed} {number}")
    return rng.choices(list(kinds), [weight for weight, _ in kinds.values()])[0], rng


def run_cases(
    numbers: list[int], seed: int, kinds: Kinds, originals: Originals, root: Path, processes: int
) -> Generator[Result, None, None]:
    """Run these cases in processes of their own; yields each result when it is there."""
    context = multiprocessing.get_context("fork")
    left = list(reversed(numbers))
    running = dict[Connection, list[Any]]()
    places = list(range(processes))  # the number of a process's folder
    try:
        while left or running:
            while left and places:
                ours, theirs = context.Pipe()
                place = places.pop()
                process = context.Process(
                    target=_work,
                    args=(theirs, seed, kinds, originals, root / f"worker-{place}"),
                    daemon=True,
                )
                process.start()
                theirs.close()
                ours.send(number := left.pop())
                running[ours] = [process, place, number, _CASES_A_PROCESS]
            for connection in wait(list(running), 1.0):
                process, place, number, todo = entry = running[connection]
                try:
                    yield connection.recv()
                    if left and todo:
                        connection.send(number := left.pop())
                        entry[2:] = number, todo - 1
                        continue
                    connection.send(None)
                except (EOFError, ConnectionError):
                    process.join()
                    yield _explain_end(
                        number,
                        pick_case(seed, number, kinds)[0],
                        process.exitcode,
                        root / f"worker-{place}",
                    )
                process.join()
                connection.close()
                places.append(running.pop(connection)[1])
    finally:
        for process, *_ in running.values():
            process.kill()
            process.join()


def _work(
    connection: Connection, seed: int, kinds: Kinds, originals: Originals, folder: Path
) -> None:
    """A process: one case after another, as the parent sends their numbers."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # the parent ends this process
        signal.signal(ending, signal.SIG_IGN)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "case").mkdir(parents=True)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    faulthandler.enable(file=2)
    # What looks damaged is read again after a second, and most cases look so.
    drive.RETRY_WAITS_S = (0.01, 0.01, 0.01, 0.01)
    # a forked process has lost OpenMP's threads, and would wait for them for ever
    torch.set_num_threads(1)
    # one arena: each thread's own would take 64 MB of the address space
    ctypes.CDLL(None).mallopt(-8, 1)
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + 2 * MEGABYTES * 2**20,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    checks.fork_pool = run_here  # type: ignore[attr-defined]
    tempfile.tempdir = str(folder / "case" / "tmp")
    guard = _Guard(folder / "case")
    while (number := connection.recv()) is not None:
        connection.send(_run_case(number, seed, kinds, originals, folder, guard))


class _Guard:
    """Refuses, while it is on, whatever leaves a folder; ``met`` keeps the first."""

    def __init__(self, folder: Path) -> None:
        self.inside = tuple(f"{os.path.realpath(folder)}/{name}/" for name in ("work", "tmp"))
        self.inside += ("/dev/shm/pym-",)  # memory that multiprocessing shares
        self.on = False
        self.met = ""
        self.readable = tuple(
            f"{os.path.realpath(one)}/"
            for one in (sys.prefix, sys.base_prefix, _ROOT, "/proc", "/sys")
        )
        self.readable += (
            f"{sys.prefix}/",
            "/dev/null",
            "/dev/urandom",
            "/usr/share/zoneinfo",
            "/etc/localtime",
        )
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or (event != "open" and event not in _WRITES and event not in _PROGRAMS):
            return
        named = arguments[
            event == "os.symlink" : 1 if event not in ("os.rename", "os.link", "os.symlink") else 2
        ]
        paths = [one for one in named if isinstance(one, str | bytes | os.PathLike)]
        for path in map(os.path.realpath, map(os.fsdecode, paths)):
            writes = event != "open" or (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            known = f"{path}/".startswith(self.inside) or (
                not writes and path.startswith(self.readable)
            )
            if event in _PROGRAMS or not known:
                self.met = self.met or f"{event} {'' if event in _PROGRAMS else path}"
                raise Outside(self.met)


def _run_case(
    number: int, seed: int, kinds: Kinds, originals: Originals, folder: Path, guard: _Guard
) -> Result:
    kind, rng = pick_case(seed, number, kinds)
    case = folder / "case"
    for old in case.iterdir():
        shutil.rmtree(old)
    for name in ("tmp", "work", "outside"):
        (case / name).mkdir()
    (case / "outside" / "secret.png").write_bytes(originals.dataset["images/3.png"])
    os.chdir(case / "work")
    os.truncate(folder / "stderr", 0)
    Path("/proc/self/clear_refs").write_text("5")  # the highest memory starts anew
    before = _read_memory("VmRSS")
    started = time.perf_counter()
    outcome = "correct"
    bug = ""
    text = ""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
    guard.on = True
    guard.met = ""
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            kinds[kind][1](work := Case(rng, case / "work", originals))
        outcome = "refused" if work.refused else "correct"
    except BaseException as error:
        outcome = "bug"
        bug = _name_bug(error)
        text = "".join(traceback.format_exception(error))
        del error
    guard.on = False
    faulthandler.cancel_dump_traceback_later()
    if guard.met and not bug.startswith("Outside"):
        outcome = "bug"
        bug = f"Outside: {re.sub('[0-9]+', 'N', guard.met)}"
    seconds = time.perf_counter() - started
    megabytes = _read_memory("VmHWM") - before
    if megabytes > MEGABYTES and outcome != "bug":
        outcome = "bug"
        bug = "more than 1 GB"
    return Result(number, kind, outcome, bug, text[-4000:], seconds, megabytes)


def _read_memory(name: str) -> float:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(found[1]) / 1024 if found else 0.0


def _name_bug(error: BaseException) -> str:
    """Kind, place in the package and message without numbers."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if "/colab_utils/" in frame.filename] or frames[-1:]
    place = f"{Path(ours[-1].filename).name} {ours[-1].name}"
    if isinstance(error, WrongDataError):  # which calls led there
        place = next(
            (frame.name for frame in reversed(frames) if frame.name.startswith("_judge")),
            frames[-1].name,
        )
    message = re.sub(r"\d+", "N", (str(error).splitlines() or [""])[0])
    return f"{type(error).__name__} in {place}: {message:.90}"


def _explain_end(number: int, kind: str, exitcode: int | None, folder: Path) -> Result:
    """A process that ended by a signal, or because a case took too long."""
    text = (folder / "stderr").read_text(errors="replace")
    places = re.findall(r'File "[^"]*/colab_utils/([^"]*)", line \d+ in (\S+)', text)
    what = (
        f"signal {-exitcode}"
        if exitcode and exitcode < 0
        else f"more than {SECONDS} s"
        if "Timeout" in text
        else "exit"
    )
    place = " ".join(places[0]) if places else "?"
    return Result(
        number,
        kind,
        "bug",
        f"{what} in {place}",
        text[-4000:],
        SECONDS if "Timeout" in text else 0.0,
    )
