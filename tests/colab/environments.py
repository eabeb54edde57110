"""Environments with the versions of a runtime of Colab's: a whole one, with its Python and
torch, and a small one that lies over the environment that runs this.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from colab_utils.errors import ColabUtilsError
from tests.colab.runtimes import list_requirements

__all__ = ["ROOT", "build_environment", "build_overlay", "lay_over"]

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
    name = "python" + ".".join(version.split(".")[:2])
    versions = sorted(Path.home().glob(f".pyenv/versions/{name[6:]}.*/bin/{name}"))
    for path in (shutil.which(name), *map(str, versions)):
        if (
            path
            and subprocess.run([path, "-c", "import venv"], capture_output=True).returncode == 0
        ):
            return path
    return sys.executable


def build_environment(folder: Path, versions: Mapping[str, str]) -> Path:
    """Make an environment with all of a runtime, once, and return its Python.

    Args:
        folder: where it lies; made again when the versions change.
        versions: of the runtime.

    Raises:
        ColabUtilsError: a package cannot be had.
    """
    python = Path(find_python(versions["python"]))
    return _build(folder, python, list_requirements(versions), make_venv)


def build_overlay(folder: Path, versions: Mapping[str, str]) -> Path:
    """Make an environment with the small packages of a runtime, over the one that runs this, once,
    and return its Python.

    Args:
        folder: where it lies; made again when the versions change.
        versions: of the runtime.

    Raises:
        ColabUtilsError: a package cannot be had.
    """
    requirements = ["--no-deps", *list_requirements(versions, SMALL)]
    return _build(folder, Path(sys.executable), requirements, lay_over)


def _build(
    folder: Path,
    python: Path,
    requirements: Sequence[str],
    make: Callable[[Path, Path], Path],
) -> Path:
    installed = folder / "installed.txt"
    content = "\n".join([str(python), *requirements])
    if not installed.is_file() or installed.read_text() != content:
        shutil.rmtree(folder, ignore_errors=True)
        make(folder, python)
        _install(folder, requirements)
        installed.write_text(content)
    return folder / "bin" / "python"


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
    own = _run(own_python, "import sysconfig; print(sysconfig.get_path('purelib'))")
    below = _run(python, "import sys; print(*sys.path, sep='\\n')").splitlines()
    packages = [path for path in below if path.endswith("site-packages")]
    Path(own, "below.pth").write_text("\n".join(packages))
    return own_python


def _run(python: Path, code: str) -> str:
    """Return what some code prints."""
    done = subprocess.run([python, "-c", code], check=True, capture_output=True, text=True)
    return done.stdout.strip()


def _install(folder: Path, arguments: Sequence[str]) -> None:
    python = str(folder / "bin" / "python")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "-q"]
    done = subprocess.run([*pip, "--disable-pip-version-check", *arguments])
    if done.returncode:
        raise ColabUtilsError(
            f"pip could not install the packages of Colab into {folder}. See its lines above."
        )
