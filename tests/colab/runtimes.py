"""Which versions Colab's runtimes have: the named ones from ``runtimes.txt``, any other one from a
list that Colab publishes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from colab_utils.errors import ColabUtilsError

__all__ = ["list_requirements", "parse_list", "read_runtime", "read_runtimes"]

TABLE = Path(__file__).with_name("runtimes.txt")
_NO_PACKAGES = ("commit", "date", "python")


def read_runtimes() -> dict[str, dict[str, str]]:
    """Return the versions of each named runtime, the oldest one first."""
    lines = TABLE.read_text(encoding="utf-8").splitlines()
    rows = [line.split() for line in lines if not line.startswith("#")]
    names = rows[0][1:]
    return {name: {row[0]: row[column] for row in rows[1:]} for column, name in enumerate(names, 1)}


def parse_list(text: str) -> dict[str, str]:
    """Return the versions that a list of Colab's holds, of those packages that the table names.

    Args:
        text: of ``pip-freeze.txt``, followed by that of ``os-info.txt``.

    Raises:
        ColabUtilsError: a package of the table is missing, or Python is.
    """
    versions = {}
    for line in text.splitlines():
        pinned = re.match(r"([\w.-]+)==([^+\s]+)", line)
        # A wheel by its address: its file name holds the version.
        by_address = re.match(r"([\w.-]+) @ \S+/\1-([^-%+]+)[-%+]", line)
        python = re.match(r"(Python) (\d[\d.]+)", line)
        match = pinned or by_address or python
        if match:
            versions[match[1].lower()] = match[2]
    names = next(iter(read_runtimes().values())).keys() - {"commit", "date"}
    missing = sorted(names - versions.keys())
    if missing:
        raise ColabUtilsError(
            f"Colab's list names no {', '.join(missing)}. Look whether Colab still has it, or "
            "whether the form of the list changed."
        )
    return {name: versions[name] for name in sorted(names)}


def read_runtime(name: str) -> dict[str, str]:
    """Return the versions of a runtime.

    Args:
        name: of the table, or the path of a list that Colab publishes.

    Raises:
        ColabUtilsError: there is no such runtime and no such file.
    """
    runtimes = read_runtimes()
    if name in runtimes:
        return runtimes[name]
    if not Path(name).is_file():
        raise ColabUtilsError(
            f"{name!r} is no runtime of Colab's that is known here, and no file. Give one of "
            f"{', '.join(runtimes)}, or a file with Colab's pip-freeze.txt and os-info.txt."
        )
    return parse_list(Path(name).read_text(encoding="utf-8"))


def list_requirements(
    versions: Mapping[str, str], packages: Iterable[str] | None = None
) -> list[str]:
    """Return what pip installs for a runtime, as ``name==version``.

    Args:
        versions: of the runtime.
        packages: those that are wanted; all of them by default.
    """
    wanted = set(versions if packages is None else packages).difference(_NO_PACKAGES)
    return [f"{name}=={versions[name]}" for name in sorted(wanted)]
