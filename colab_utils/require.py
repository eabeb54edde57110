"""Checks of the arguments that a user passes: choices, numbers and paths."""

import math
import numbers
import os
from collections.abc import Collection
from typing import Any

from colab_utils.errors import ColabUtilsError


def require_choice(name: str, value: Any, choices: Collection[Any]) -> None:
    """Refuse a value that is not one of the choices.

    Raises:
        ColabUtilsError: The value is not one of the choices.

    Example:
        >>> require_choice("storage", "zip", ("keep", "shrink"))
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: storage must be one of keep, shrink; it is 'zip'. ...
    """
    if value not in list(choices):
        known = ", ".join(map(str, choices))
        raise ColabUtilsError(
            f"{name} must be one of {known}; it is {_describe(value)}. Choose one of them."
        )


def require_count(name: str, value: Any, *, minimum: int = 1, maximum: int | None = None) -> int:
    """Return a whole number of Python or numpy as an ``int``, and refuse any other value.

    Raises:
        ColabUtilsError: The value is not a whole number, or it is out of range.

    Example:
        >>> require_count("workers", 4, minimum=0)
        4
        >>> require_count("workers", 1.5, minimum=0)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected workers of 0 or more (a whole number), ...
    """
    is_count = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if not is_count or value < minimum or (maximum is not None and value > maximum):
        wanted = (
            f"of {minimum:,} or more" if maximum is None else f"between {minimum:,} and {maximum:,}"
        )
        raise ColabUtilsError(
            f"expected {name} {wanted} (a whole number), found {value!r}. Pass another number."
        )
    return int(value)


def require_number(
    name: str,
    value: Any,
    *,
    above: float | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    below: float | None = None,
) -> float:
    """Return a number of Python or numpy as an ``int`` or ``float``, and refuse any other value.

    Infinity is accepted if there is no upper bound.

    Raises:
        ColabUtilsError: The value is not a number, or it is out of range.

    Example:
        >>> require_number("shard_mb", 128, above=0, below=math.inf)
        128
        >>> require_number("max_bad", 2, minimum=0, maximum=1)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected max_bad between 0 and 1, found 2. Pass ...
    """
    if not _is_number(value) or not _is_within(value, above, minimum, maximum, below):
        wanted = _describe_range(above, minimum, maximum, below)
        raise ColabUtilsError(f"expected {name} {wanted}, found {value!r}. Pass another number.")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def require_max_bad(value: Any) -> float:
    """Return how much may be bad: an ``int`` is a number, and a ``float`` from 0 to 1 is a share.

    Raises:
        ColabUtilsError: The value is neither.

    Example:
        >>> require_max_bad(5), require_max_bad(0.05)
        (5, 0.05)
    """
    if isinstance(value, numbers.Integral):
        return require_count("max_bad", value, minimum=0)
    return require_number("max_bad", value, minimum=0, maximum=1)


def require_path(name: str, value: Any) -> None:
    """Refuse a value that is not a path, such as a dataset that is passed instead of its folder.

    Raises:
        ColabUtilsError: The value is neither text nor a path.

    Example:
        >>> require_path("shards", "drive/shards")
    """
    if not isinstance(value, str | os.PathLike):
        raise ColabUtilsError(
            f"{name} is {_describe(value)}, which is not a path. Pass the path of a folder, "
            "such as dataset.folder."
        )


def _describe(value: Any) -> str:
    """Return the first line of a value's text, because the text of a model has many lines."""
    return repr(value).splitlines()[0]


def _is_number(value: Any) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    return not math.isnan(value)


def _is_within(
    value: float,
    above: float | None,
    minimum: float | None,
    maximum: float | None,
    below: float | None,
) -> bool:
    if above is not None and value <= above:
        return False
    if minimum is not None and value < minimum:
        return False
    if maximum is not None and value > maximum:
        return False
    return below is None or value < below


def _describe_range(
    above: float | None, minimum: float | None, maximum: float | None, below: float | None
) -> str:
    """Return a range in words, which follow the argument's name in a message."""
    if minimum is not None and maximum is not None:
        return f"between {minimum:,} and {maximum:,}"
    words = []
    if above is not None:
        words.append(f"over {above:,}")
    if minimum is not None:
        words.append(f"of {minimum:,} or more")
    if maximum is not None:
        words.append(f"of {maximum:,} or less")
    if below == math.inf:
        words.append("finite")
    elif below is not None:
        words.append(f"below {below:,}")
    return " and ".join(words) if words else "as a number"
