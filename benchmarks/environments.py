"""An environment for each peer, on top of the packages that are installed here: `python -m
benchmarks.environments`.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import sysconfig
import venv
from importlib import metadata
from pathlib import Path

from colab_utils.errors import ColabUtilsError

__all__ = ["build_environment", "find_python", "list_versions", "read_sections"]

REQUIREMENTS = Path(__file__).with_name("requirements.txt")
_FAILED = "failed.txt"


def read_sections(text: str) -> dict[str, list[str]]:
    """The requirements of each environment: the lines below its ``# [name]``, comments left out.

    Example:
        >>> read_sections("# [spdl]\\n#: pkg-config\\nspdl>=0.1\\n# [litdata]\\nlitdata")
        {'spdl': ['spdl>=0.1'], 'litdata': ['litdata']}
    """
    parts = re.split(r"^# \[(\w+)\]$", text, flags=re.MULTILINE)[1:]
    bodies = [
        [line for line in body.splitlines() if line and not line.startswith("#")]
        for body in parts[1::2]
    ]
    return dict(zip(parts[::2], bodies, strict=True))


def find_python(environment: str, work: Path) -> Path:
    """The Python of an environment; this one where it has no name.

    Raises:
        ColabUtilsError: if its environment is not there, or could not be built.
    """
    if not environment:
        return Path(sys.executable)
    folder = work.absolute() / "envs" / environment
    if (folder / _FAILED).exists():
        raise ColabUtilsError(f"could not be installed: {(folder / _FAILED).read_text()}")
    if not (folder / "bin" / "python").exists():
        raise ColabUtilsError("is not installed: run make peers")
    return folder / "bin" / "python"


def list_versions(environment: str) -> dict[str, str]:
    """The versions of what a section names, where it is installed; empty for no section."""
    lines = read_sections(REQUIREMENTS.read_text()).get(environment, [])
    return {
        name: metadata.version(name) for name in (re.split(r"[<>=~!]", line)[0] for line in lines)
    }


def build_environment(environment: str, work: Path) -> str:
    """Build an environment; answers what went wrong, empty where nothing did."""
    folder = work / "envs" / environment
    venv.create(folder, clear=True, with_pip=False)
    python = folder / "bin" / "python"
    purelib = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
    # What is installed here, torch above all, is found there too, after the peer's own packages.
    Path(purelib, "installed_here.pth").write_text(sysconfig.get_path("purelib"))
    requirements = read_sections(REQUIREMENTS.read_text())[environment]
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        str(python),
        "install",
        "--quiet",
        *requirements,
    ]
    done = subprocess.run(
        pip,
        capture_output=True,
        text=True,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
    )
    reason = ""
    if done.returncode:
        errors = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        reason = (errors or done.stderr.splitlines() or ["pip failed"])[-1][:300]
        (folder / _FAILED).write_text(reason)
    return reason


def main() -> int:
    """Build the environments that are missing, and say which could not be built."""
    sections = read_sections(REQUIREMENTS.read_text())
    parser = argparse.ArgumentParser(prog="python -m benchmarks.environments", description=__doc__)
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("runs/benchmarks"),
        help="folder for data and environments",
    )
    parser.add_argument(
        "--only", choices=sections, action="append", help="one environment, or several times one"
    )
    options = parser.parse_args()
    for name in options.only or sections:
        try:
            find_python(name, options.work)
            result = "there already"
        except ColabUtilsError:
            result = build_environment(name, options.work) or "installed"
        print(f"{name}: {result}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
