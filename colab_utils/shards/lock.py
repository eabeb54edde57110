"""One writer for a folder: who writes there says so in a file, and gives a sign of life twice a minute."""

from __future__ import annotations

import json
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from time import monotonic, sleep, time
from typing import Any

from colab_utils.drive import Retries
from colab_utils.errors import ColabUtilsError
from colab_utils.runtime import show_progress, write_file
from colab_utils.shards.format import explain_write, is_running

__all__ = ["WRITER_NAME", "hold_folder"]

WRITER_NAME = "writer.json"
_SIGN_S, _SILENT_S, _LOOK_S = 30.0, 100.0, 2.0


@contextmanager
def hold_folder(folder: Path, retries: Retries | None = None) -> Iterator[None]:
    """Be the only one who writes into ``folder`` while the block lasts; the folder is made if need be.

    A writer that was killed on this machine is known at once. One on another machine may have ended with its session:
    it is gone when it gives no sign of life for 100 seconds, and that is waited for.

    Raises:
        ColabUtilsError: somebody else is at work there, or the folder cannot be written to.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with hold_folder(folder), hold_folder(folder):
        ...     pass
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected nobody else to write into ..., found process ...
    """
    path, made, done = folder / WRITER_NAME, not folder.exists(), threading.Event()

    def enter() -> None:
        with explain_write(folder):
            folder.mkdir(parents=True, exist_ok=True)
            _wait_for_silence(path)
            _sign(path)

    (retries or Retries()).run(enter)
    thread = threading.Thread(target=_sign_on, args=(path, done), name="writer", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join(timeout=5)  # it may be waiting for a Drive that does not answer
        with suppress(OSError):
            path.unlink()
            if made:
                folder.rmdir()  # if nothing came of it


def _wait_for_silence(path: Path) -> None:
    first = _read_sign(path)
    if first is None:
        return
    if first["host"] == _find_host():
        if is_running(first["pid"], first["time"]):
            raise _refuse(path, first)
        return
    deadline = monotonic() + _SILENT_S - min(max(time() - first["time"], 0), _SILENT_S)
    label = f"another machine wrote into {path.parent.name} a moment ago: is it still at work?"
    with show_progress(label, total=None, unit="look") as bar:
        while monotonic() < deadline:
            sleep(_LOOK_S)
            bar.update(1)
            now = _read_sign(path)
            if now is None:
                return
            if now != first:
                raise _refuse(path, now)


def _read_sign(path: Path) -> dict[str, Any] | None:
    """What the writer said last; None if there is none, or nothing that can be read."""
    try:
        sign = json.loads(path.read_bytes())
        return {"host": str(sign["host"]), "pid": int(sign["pid"]), "time": float(sign["time"])}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _sign(path: Path) -> None:
    write_file(path, json.dumps({"host": _find_host(), "pid": os.getpid(), "time": time()}).encode())


def _sign_on(path: Path, done: threading.Event) -> None:
    while not done.wait(_SIGN_S):
        with suppress(OSError):  # the work itself says what is wrong
            _sign(path)


def _find_host() -> str:
    """This machine since it was started: Colab gives many of them one name."""
    try:
        return f"{platform.node()} {Path('/proc/sys/kernel/random/boot_id').read_text().strip()}"
    except OSError:
        return platform.node()


def _refuse(path: Path, sign: dict[str, Any]) -> ColabUtilsError:
    here = "this machine" if sign["host"] == _find_host() else f"machine {sign['host'].split()[0]}"
    return ColabUtilsError(
        f"expected nobody else to write into {path.parent}, found process {sign['pid']} on {here} at work there. Let "
        "it end, or stop it and run the same command: it continues after the finished shards."
    )
