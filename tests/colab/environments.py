"""Environments with the versions of a runtime of Colab's: a whole one, with its Python and
torch, and a small one that lies over the environment that runs this.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from colab_utils.errors import ColabUtilsError
from tests.colab.runtimes import list_requirements

__all__ = ["ROOT", "build_environment", "lay_over"]

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "aiohttp",
    "fsspec",
    "ipython-genutils",
    "ipywidgets",
    "matplotlib",
    "numpy",
    "pillow",
    "psutil",
    "pycocotools",
    "tqdm",
    "widgetsnbextension",
    "xxhash",
)
"""What an overlay replaces."""


def find_python(version: str) -> str:
    """Find a Python of Colab's minor version where there is one, else the Python that runs this."""
    path = shutil.which("python" + ".".join(version.split(".")[:2]))
    if path and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0:
        return path
    return sys.executable


def build_environment(
    folder: Path, versions: Mapping[str, str], *, is_overlay: bool = False
) -> Path:
    """Make an environment with the packages of a runtime, once, and return its Python.

    Args:
        folder: where it lies; made again when the versions change.
        versions: of the runtime.
        is_overlay: whether it has the small packages alone, and lies over the one that runs this.

    Raises:
        ColabUtilsError: a package cannot be had.
    """
    base = Path(sys.executable if is_overlay else find_python(versions["python"]))
    requirements = list_requirements(versions, SMALL if is_overlay else None)
    if is_overlay:
        requirements.append("--no-deps")
    python = folder / "bin" / "python"
    installed = folder / "installed.txt"
    content = "\n".join([str(base), *requirements])
    if installed.is_file() and installed.read_text() == content:
        return python
    shutil.rmtree(folder, ignore_errors=True)
    make = lay_over if is_overlay else make_venv
    make(folder, base)
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    done = subprocess.run([*pip, "--disable-pip-version-check", *requirements])
    if done.returncode:
        raise ColabUtilsError(
            f"pip could not install the packages of Colab into {folder}. See its lines above."
        )
    installed.write_text(content)
    return python


def make_venv(folder: Path, python: Path) -> Path:
    """Make an environment without packages, and return its Python."""
    subprocess.run([str(python), "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def lay_over(folder: Path, python: Path) -> Path:
    """Make an environment whose own packages come before those of another one, and return its
    Python. Links to packages under development are not followed in the other one.

    Args:
        folder: where it lies.
        python: of the environment below.
    """
    own_python = make_venv(folder, python)
    script = "import sys\nfor path in sys.path:\n  if path.endswith('site-packages'): print(path)"
    [own] = folder.glob("lib/python*/site-packages")
    with open(own / "below.pth", "wb") as below:
        subprocess.run([python, "-c", script], check=True, stdout=below)
    return own_python
