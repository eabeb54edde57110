"""Notebooks to hand out: the setup cell of each carries the package inside, so that a class needs
no repository.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import lzma
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

from colab_utils.errors import ColabUtilsError
from tools.set_badges import read_slug, set_title
from tools.setup_cell import ROOT, write_notebook

__all__ = ["build_wheel", "carry_wheel", "main", "write_workshop"]

_SOURCE = re.compile(r"^SOURCE = .*$", re.MULTILINE)
_PARTS = ("pyproject.toml", "README.md", "LICENSE", "requirements.txt")


def build_wheel(folder: Path, *, root: Path = ROOT) -> Path:
    """Build the package's wheel with what this environment has, without a network.

    The build runs in a copy: in the checkout it would leave folders behind, whose old files the
    next wheel would hold.

    Args:
        folder: where the wheel is put.
        root: the checkout.

    Raises:
        ColabUtilsError: setuptools is missing or too old.
    """
    with tempfile.TemporaryDirectory() as copy:
        for name in _PARTS:
            shutil.copy(root / name, copy)
        shutil.copytree(
            root / "colab_utils",
            Path(copy, "colab_utils"),
            ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
        )
        offline = ["--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
        done = subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "wheel",
                "--quiet",
                *offline,
                "--wheel-dir",
                str(folder),
                copy,
            ],
            capture_output=True,
            text=True,
            env={**os.environ, "SOURCE_DATE_EPOCH": "1600000000"},
        )
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if "rror" in line]
        reason = lines[-1] if lines else "pip failed"
        raise ColabUtilsError(
            f"The wheel cannot be built without pip and setuptools 77 or newer: {reason}. Install "
            "them: pip install pip 'setuptools>=77'"
        )
    return next(iter(folder.glob("colab_utils-*.whl")))


def carry_wheel(source: str, wheel: Path) -> str:
    """Return the setup cell with a wheel inside.

    Args:
        source: the text of the setup cell.
        wheel: the package, as `build_wheel` makes it.

    Raises:
        ColabUtilsError: the cell has no line ``SOURCE = ...``.
    """
    text = base64.b64encode(_squeeze(wheel)).decode()
    lines = "\n".join(text[at : at + 1000] for at in range(0, len(text), 1000))
    carried = (
        f"import base64\nimport lzma\nimport tempfile\n\nWHEEL = '''\n{lines}\n'''\n"
        f'SOURCE = str(Path(tempfile.mkdtemp(), "{wheel.name}"))\n'
        "Path(SOURCE).write_bytes(lzma.decompress(base64.b64decode(WHEEL)))"
    )
    carrying, count = _SOURCE.subn(lambda _: carried, source)
    if count != 1:
        raise ColabUtilsError(
            f"The setup cell has {count} lines SOURCE = ..., and needs one. Run make setup-cells."
        )
    return carrying


def _squeeze(wheel: Path) -> bytes:
    """Return the wheel with its files as they are, compressed as a whole: a quarter less than file
    by file.
    """
    plain = io.BytesIO()
    with zipfile.ZipFile(wheel) as packed, zipfile.ZipFile(plain, "w") as stored:
        for info in packed.infolist():
            stored.writestr(zipfile.ZipInfo(info.filename, info.date_time), packed.read(info))
    return lzma.compress(plain.getvalue(), preset=9)


def write_workshop(output: Path, *, root: Path = ROOT) -> list[Path]:
    """Write the notebooks with the package inside; those of an earlier call are replaced.

    Args:
        output: the folder for them; made where it is not.
        root: the checkout.

    Raises:
        ColabUtilsError: the wheel cannot be built.
    """
    written = []
    slug = read_slug(root)
    output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wheel = build_wheel(Path(folder), root=root)
        for path in sorted(root.glob("notebooks/*.ipynb")):
            notebook = json.loads(path.read_text(encoding="utf-8"))
            title = notebook["cells"][0]
            setup = next(cell for cell in notebook["cells"] if cell["id"] == "setup")
            title["source"] = set_title("".join(title["source"]), slug).splitlines(keepends=True)
            setup["source"] = carry_wheel("".join(setup["source"]), wheel).splitlines(keepends=True)
            # Colab folds the cell, and Jupyter hides it.
            setup["metadata"]["jupyter"] = {"source_hidden": True}
            write_notebook(output / path.name, notebook)
            written.append(output / path.name)
    return written


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the notebooks from a terminal; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.workshop", description=__doc__)
    parser.add_argument(
        "--output", metavar="DIR", type=Path, default=Path("runs/workshop"), help="runs/workshop"
    )
    options = parser.parse_args(arguments)
    try:
        paths = write_workshop(options.output)
    except ColabUtilsError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in paths:
        print(f"{path} ({path.stat().st_size / 1000:.0f} kB)")
    print("Hand these out. Colab opens one with File > Upload notebook; Jupyter opens it as it is.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
