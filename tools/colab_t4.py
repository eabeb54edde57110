"""Measure on a T4 of Google Colab by Google's command ``colab`` (google-colab-cli 0.6), and bring
one JSON file to ``receipts``. It needs a Google account: that command asks you to sign in.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory

from colab_utils.errors import ColabUtilsError
from tools.cells import ROOT
from tools.command import print_result

__all__ = ["main", "measure_on_t4"]

_SESSION = "colab-utils-t4"
_SCRIPT = Path(__file__).with_name("t4_script.txt")
_TIMEOUT_S = 3600


def measure_on_t4(receipts: Path, *, colab: Sequence[str], drive: bool) -> Path:
    """Rent a T4, run the script there, bring its JSON file, and give the T4 back in any case.

    Args:
        receipts: the folder for the JSON file; made where it is not.
        colab: the command, with options that come before its verbs.
        drive: whether your Google Drive is mounted there and measured, too.

    Raises:
        ColabUtilsError: the command is missing or fails, or nothing was measured.
    """
    session = ("-s", _SESSION)
    with TemporaryDirectory() as folder:
        archive = Path(folder, "colab_utils.tar.gz")
        brought = Path(folder, "t4.json")
        git = ["git", "-C", str(ROOT), "archive", "--output", str(archive), "HEAD"]
        subprocess.run(git, check=True)
        _run(colab, "new", *session, "--gpu", "T4")
        try:
            if drive:
                _run(colab, "drivemount", *session)
            _run(colab, "upload", *session, str(archive), f"content/{archive.name}")
            _run(colab, "exec", *session, "-f", str(_SCRIPT), "--timeout", str(_TIMEOUT_S))
            _run(colab, "download", *session, f"content/{brought.name}", str(brought))
        finally:
            _run(colab, "stop", *session)
        text = brought.read_text(encoding="utf-8")
    rows = []
    with suppress(ValueError, KeyError, TypeError):
        rows = json.loads(text)["gpu"]["rows"]
    if not rows:
        raise ColabUtilsError(
            "The T4 measured nothing. What its script printed stands above; run make colab again."
        )
    path = receipts / f"t4-{date.today()}.json"
    receipts.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _run(colab: Sequence[str], verb: str, *arguments: str) -> None:
    """Run the command in the terminal, where it may ask who you are."""
    try:
        status = subprocess.run([*colab, verb, *arguments]).returncode
    except OSError as error:
        raise ColabUtilsError(
            f"Google's command cannot be run ({error}). Install it: pip install google-colab-cli"
        ) from None
    if status:
        raise ColabUtilsError(
            f"`colab {verb}` ended with status {status}. Its reason stands above; `colab sessions` "
            "lists machines that still run."
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure from a terminal; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.colab_t4", description=__doc__)
    parser.add_argument("--colab", default="colab", help='the command, such as "colab --auth adc"')
    parser.add_argument("--drive", action="store_true", help="mount your Google Drive, too")
    parser.add_argument("--receipts", metavar="DIR", type=Path, default=ROOT / "receipts")
    options = parser.parse_args(arguments)

    def measure() -> str:
        command = shlex.split(options.colab)
        path = measure_on_t4(options.receipts, colab=command, drive=options.drive)
        return f"{path} holds what the T4 measured"

    return print_result(measure)


if __name__ == "__main__":
    sys.exit(main())
