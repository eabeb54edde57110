"""Refuse values that a function does not know, in one line that names what it takes instead."""

import math
import numbers
import os
import re
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NoReturn

from colab_utils.errors import ColabUtilsError

_LARGEST_COUNT = (1 << 31) - 1
# `Path` makes one slash of two; a single letter and a colon are a drive of Windows.
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.IGNORECASE)


def require_choice(name: str, value: Any, choices: Sequence[Any]) -> None:
    """Refuse a value that is none of the choices.

    Raises:
        ColabUtilsError: The value is none of them.

    Example:
        >>> require_choice("resume", "never", ("auto", "never"))
    """
    if value in choices:
        return
    if len(choices) == 2:
        _refuse(name, f"as {choices[0]!r} or {choices[1]!r}", value)
    _refuse(name, f"as one of {', '.join(map(str, choices))}", value)


def require_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> None:
    """Refuse what is no whole number from ``least`` to ``most``.

    Without ``most``, the limit is the largest whole number of 32 bits.

    Raises:
        ColabUtilsError: The value is less or more, or no whole number.

    Example:
        >>> require_count("steps", 200)
    """
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    limit = _LARGEST_COUNT if most is None else most
    if is_whole and least <= value <= limit:
        return
    if most is not None:
        _refuse(name, f"of {least:,} to {most:,}", value)
    if is_whole and value > limit:
        _refuse(name, f"of at most {limit:,}", value)
    _refuse(name, f"of at least {least:,}", value)


def require_number(name: str, value: Any, *, above: float) -> None:
    """Refuse what is no finite number above a limit.

    Raises:
        ColabUtilsError: The value is not above it, or no finite number.

    Example:
        >>> require_number("learning_rate", 0.005, above=0)
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= above:
        _refuse(name, f"above {above:g}", value)


def require_path(name: str, value: Any) -> None:
    """Refuse what is no path, such as a dataset in place of its folder.

    Raises:
        ColabUtilsError: The value is neither text nor a path.

    Example:
        >>> require_path("shards", "drive/shards")
    """
    if not isinstance(value, str | PathLike):
        _refuse(name, "as the path of a folder, such as dataset.folder", value)


def require_local_path(path: str | os.PathLike[str]) -> Path:
    """Return the path of a folder or a file of this machine; a URL would become a local folder of that name.

    Raises:
        ColabUtilsError: it is a URL.

    Example:
        >>> require_local_path("data/12:30/a.json")
        PosixPath('data/12:30/a.json')
        >>> require_local_path("gs://bucket/shards")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder or file of this machine, found the URL gs://bucket/...
    """
    if _URL.match(os.fspath(path)):
        cure = "Mount it (with gcsfuse or rclone, say) and name that folder, or copy it to a folder first"
        raise ColabUtilsError(f"expected a folder or file of this machine, found the URL {path}. {cure}.")
    return Path(path)


def _refuse(name: str, expected: str, value: Any) -> NoReturn:
    # A model describes itself in many lines.
    first_line = repr(value).splitlines()[0]
    raise ColabUtilsError(f"expected {name} {expected}, found {first_line}. Pass another value.")
