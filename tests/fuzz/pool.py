"""Runs cases in forked processes with limits: 10 seconds of a core, a minute in all, 1 GB, no file
written outside of the folder and no bait read there, no program started.
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
from functools import cache
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from colab_utils import drive, machine, processes
from colab_utils.data.decoding import load_jpeg_decoder
from colab_utils.errors import ColabUtilsError
from tests.fuzz.originals import Originals, run_here
from tests.fuzz.truth import WrongDataError

CORE_SECONDS = 10
# A busy machine gives a process little of a core.
SECONDS = 60
MEGABYTES = 1024
# A process runs this many cases, because what they leave in memory ends with it.
_BATCH = 100
# A damaged dataset may name these files, outside of its folder.
_BAITS = ("/outside/secret.png", "/etc/passwd")
_WRITES = re.compile(r"os\.(mkdir|remove|rmdir|rename|link|symlink|truncate|chmod)")
_PROGRAMS = re.compile(
    r"os\.(system|exec|posix_spawn|spawn|fork)|subprocess\.Popen|socket\.connect"
)


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
        """Return what an entry point returns, or None where it refuses in one clear line; anything
        else that it raises is a bug.
        """
        try:
            return work(*arguments, **named)
        except ColabUtilsError as error:
            text = str(error)
            if len(text) < 3 or not text.isprintable():
                raise WrongDataError(f"not one printable line: {text!r:.300}") from error
            self.refused.append(text)
            return None


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


Kinds = dict[str, tuple[int, Callable[[Case], object]]]
"""Name to weight and function, which raises whatever is a bug."""


def pick_case(seed: int, number: int, kinds: Kinds) -> tuple[str, random.Random]:
    """Return the kind of a case and its random numbers: the same on every machine."""
    rng = random.Random(f"{seed} {number}")
    weights = [weight for weight, _ in kinds.values()]
    return rng.choices(list(kinds), weights)[0], rng


@dataclass
class _Worker:
    """A process that runs a batch of cases."""

    process: BaseProcess
    folder: Path
    numbers: list[int]
    """The cases whose results it has not sent yet; it runs the first of them."""


def run_cases(
    numbers: list[int], seed: int, kinds: Kinds, originals: Originals, root: Path, processes: int
) -> Generator[Result, None, None]:
    """Run these cases in processes of their own; yields each result when it is there."""
    # Without this, each process would import torchvision within the time of its first case.
    load_jpeg_decoder()
    context = multiprocessing.get_context("fork")
    batches = [numbers[start : start + _BATCH] for start in range(0, len(numbers), _BATCH)]
    folders = [root / f"worker-{place}" for place in range(processes)]
    workers = dict[Connection, _Worker]()
    try:
        while batches or workers:
            while batches and folders:
                batch = batches.pop(0)
                folder = folders.pop()
                receiver, sender = context.Pipe(duplex=False)
                work = (sender, batch, seed, kinds, originals, folder)
                process = context.Process(target=_work, args=work, daemon=True)
                process.start()
                sender.close()
                workers[receiver] = _Worker(process, folder, list(batch))
            for receiver in wait(list(workers)):
                worker = workers[receiver]
                try:
                    yield receiver.recv()
                    worker.numbers.pop(0)
                    continue
                except EOFError:
                    del workers[receiver]
                receiver.close()
                worker.process.join()
                folders.append(worker.folder)
                if worker.numbers:
                    number = worker.numbers.pop(0)
                    yield _explain_end(number, pick_case(seed, number, kinds)[0], worker)
                    batches.append(worker.numbers)
    finally:
        for worker in workers.values():
            worker.process.kill()
            worker.process.join()


def _work(
    sender: Connection,
    numbers: list[int],
    seed: int,
    kinds: Kinds,
    originals: Originals,
    folder: Path,
) -> None:
    """Run one case after another in this process, and send their results."""
    # The parent ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "case").mkdir(parents=True)
    os.dup2(os.open(folder / "stderr", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    faulthandler.enable(file=2)
    # What looks damaged is read again after a second, and most cases look so.
    drive.RETRY_WAITS_S = (0.0, 0.0, 0.0, 0.0)
    # The machine is the same in all cases: its mounts and limits are read once.
    drive._read_mounts = cache(drive._read_mounts)
    machine._read_groups = cache(machine._read_groups)
    # A forked process has lost OpenMP's threads, and would wait for them for ever.
    torch.set_num_threads(1)
    # Only one arena of memory is used, as each thread's own would take 64 MB of the address space.
    ctypes.CDLL(None).mallopt(-8, 1)
    limit = int(2**20 * (_read_memory("VmSize") + 2 * MEGABYTES))
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    processes.fork_pool = run_here  # type: ignore[attr-defined]
    tempfile.tempdir = str(folder / "case" / "tmp")
    guard = _Guard(folder / "case")
    for number in numbers:
        sender.send(_run_case(number, seed, kinds, originals, folder, guard))


class _Guard:
    """Refuses, while it is on, whatever is written outside of a folder or read from a bait there;
    ``met`` keeps the first.
    """

    def __init__(self, folder: Path) -> None:
        self.on = False
        self.met = ""
        # Beside the case's folders, memory that multiprocessing shares may be written.
        self.inside = (f"{folder.resolve()}/work/", f"{folder.resolve()}/tmp/", "/dev/shm/pym-")
        sys.addaudithook(self._look)

    def _look(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if _PROGRAMS.fullmatch(event):
            self._refuse(event)
        elif event == "open":
            changes = os.O_WRONLY | os.O_RDWR | os.O_CREAT
            self._check_path(event, arguments[0], reads=not (arguments[2] or 0) & changes)
        elif _WRITES.fullmatch(event):
            # A link may name anything.
            for path in arguments[1:] if event == "os.symlink" else arguments:
                self._check_path(event, path, reads=False)

    def _check_path(self, event: str, path: Any, *, reads: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        path = os.path.realpath(os.fsdecode(path))
        is_allowed = reads and not path.endswith(_BAITS)
        if not is_allowed and not f"{path}/".startswith(self.inside):
            self._refuse(f"{event} {path}")

    def _refuse(self, what: str) -> None:
        self.met = self.met or re.sub(r"\d+", "N", what)
        raise Outside(what)


def _run_case(
    number: int, seed: int, kinds: Kinds, originals: Originals, folder: Path, guard: _Guard
) -> Result:
    kind, rng = pick_case(seed, number, kinds)
    folders = folder / "case"
    for old in folders.iterdir():
        shutil.rmtree(old)
    for name in ("tmp", "work", "outside"):
        (folders / name).mkdir()
    (folders / "outside" / "secret.png").write_bytes(originals.dataset["images/3.png"])
    os.chdir(folders / "work")
    os.truncate(folder / "stderr", 0)
    # The highest memory is counted anew.
    Path("/proc/self/clear_refs").write_text("5")
    before = _read_memory("VmRSS")
    started_s = time.process_time()
    case = Case(rng, folders / "work", originals)
    bug = ""
    text = ""
    faulthandler.dump_traceback_later(SECONDS, exit=True, file=2)
    guard.on = True
    guard.met = ""
    try:
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            kinds[kind][1](case)
    except BaseException as error:
        bug = _name_bug(error)
        text = "".join(traceback.format_exception(error))[-4000:]
    guard.on = False
    faulthandler.cancel_dump_traceback_later()
    if guard.met and not bug.startswith("Outside"):
        bug = f"Outside: {guard.met}"
    if not bug and _read_memory("VmHWM") - before > MEGABYTES:
        bug = "more than 1 GB"
    if not bug and time.process_time() - started_s > CORE_SECONDS:
        bug = f"more than {CORE_SECONDS} s of a core"
    outcome = "refused" if case.refused else "correct"
    return Result(number, kind, "bug" if bug else outcome, bug, text)


def _read_memory(name: str) -> float:
    """Return the megabytes that the kernel counts under this name."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(f"{name}:"))


def _name_bug(error: BaseException) -> str:
    """Name an error by its kind, its place in the package and its message without numbers."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    for frame in frames:
        # Which comparison found a difference says more than where it is raised.
        if frame.name.startswith("_judge") or "/colab_utils/" in frame.filename:
            last = frame
    place = f"{Path(last.filename).name} {last.name}"
    message = re.sub(r"\d+", "N", str(error).partition("\n")[0])
    return f"{type(error).__name__} in {place}: {message:.90}"


def _explain_end(number: int, kind: str, worker: _Worker) -> Result:
    """Explain a process that ended by a signal, or because a case took too long."""
    text = (worker.folder / "stderr").read_text(errors="replace")
    # A signal counts as its number below zero.
    reason = f"exit {worker.process.exitcode}"
    if "Timeout" in text:
        reason = f"more than {SECONDS} s"
    place = re.search(r'File "[^"]*/colab_utils/([^"]*)", line \d+ in (\S+)', text)
    where = f"{place[1]} {place[2]}" if place else "?"
    return Result(number, kind, "bug", f"{reason} in {where}", text[-4000:])
