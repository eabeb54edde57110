"""Checks of the arguments that a user passes: choices, numbers and paths."""

import importlib
import math
import numbers
import re
from collections.abc import Collection
from typing import Any

from colab_utils.errors import ColabUtilsError

# What to install for an import whose name is another one.
_DISTRIBUTIONS = {"PIL.Image": "pillow", "pycocotools.mask": "pycocotools"}
_AMOUNT = r"(\d+(?:\.\d+)?)"
# The last group is a number without a unit.
_TIME = re.compile(rf"(?=.)(?:{_AMOUNT}h)?(?:{_AMOUNT}m)?(?:{_AMOUNT}s)?|{_AMOUNT}")
_UNITS_S = (3600, 60, 1, 1)


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


def require_count(name: str, value: Any, *, minimum: int = 1, maximum: float = math.inf) -> int:
    """Return a whole number of Python or numpy as an ``int``, and refuse any other value.

    Raises:
        ColabUtilsError: The value is not a whole number, or it is out of range.

    Example:
        >>> require_count("workers", 4, minimum=0)
        4
        >>> require_count("workers", 1.5, minimum=0)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected workers as a whole number, found 1.5. Pass ...
    """
    if not isinstance(value, numbers.Integral):
        raise ColabUtilsError(
            f"expected {name} as a whole number, found {value!r}. Pass another number."
        )
    return int(require_number(name, value, minimum=minimum, maximum=maximum))


def require_number(
    name: str,
    value: Any,
    *,
    above: float = -math.inf,
    minimum: float = -math.inf,
    maximum: float = math.inf,
) -> float:
    """Return a number of Python or numpy as an ``int`` or ``float``, and refuse any other value.

    Raises:
        ColabUtilsError: The value is not a finite number, or it is out of range.

    Example:
        >>> require_number("shard_mb", 128, above=0)
        128
        >>> require_number("max_bad", 2, minimum=0, maximum=1)
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected max_bad of 0 or more and of 1 or less, ...
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    # No comparison with NaN is true.
    if not is_number or not (above < value < math.inf and minimum <= value <= maximum):
        limits = {"over {:,}": above, "of {:,} or more": minimum, "of {:,} or less": maximum}
        given = [words.format(limit) for words, limit in limits.items() if abs(limit) < math.inf]
        wanted = " and ".join(given) or "as a number"
        raise ColabUtilsError(f"expected {name} {wanted}, found {value!r}. Pass another number.")
    return int(value) if isinstance(value, numbers.Integral) else float(value)


def require_seconds(name: str, value: Any) -> float:
    """Return the seconds of a number, or of a text such as "1h30m".

    Raises:
        ColabUtilsError: The value is neither, or it is not over 0.

    Example:
        >>> require_seconds("budget", "1h30m"), require_seconds("budget", 45)
        (5400.0, 45)
    """
    if isinstance(value, str):
        match = _TIME.fullmatch(value)
        if match is None:
            raise ColabUtilsError(
                f"expected {name} as a time, found {value!r}. Pass a text such as 2h, 90m, 1h30m "
                "or 45s, or a number of seconds."
            )
        amounts = zip(match.groups("0"), _UNITS_S, strict=True)
        value = sum(float(amount) * unit_s for amount, unit_s in amounts)
    return require_number(name, value, above=0)


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


def require_part(value: Any) -> tuple[int, int] | None:
    """Return the number of a part, from 1, and the number of all parts; None for None.

    Raises:
        ColabUtilsError: The value is not two whole numbers, or there is no such part.

    Example:
        >>> require_part((3, 16))
        (3, 16)
    """
    if value is None:
        return None
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise ColabUtilsError(f"part is {_describe(value)}. Pass (i, n), such as (3, 16).")
    number, parts = value
    parts = require_count("n of part=(i, n)", parts)
    return require_count("i of part=(i, n)", number, maximum=parts), parts


def require_packages(*names: str) -> None:
    """Refuse to begin where a package cannot be imported, so that no data are blamed for it.

    Raises:
        ColabUtilsError: An import failed, for example because numpy was replaced since Python
            began.

    Example:
        >>> require_packages("json", "no_such_package")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: no_such_package cannot be imported (No module ...
    """
    for name in names:
        try:
            importlib.import_module(name)
        # Binary packages that do not fit each other raise all of these.
        except (ImportError, ValueError, AttributeError) as error:
            raise ColabUtilsError(
                f"{name} cannot be imported ({error}). If a package was installed since Python "
                "began, restart it (on Colab: Runtime > Restart session). If that does not help, "
                f"run pip install --force-reinstall {_DISTRIBUTIONS.get(name, name)}."
            ) from None


def _describe(value: Any) -> str:
    """Return the first line of a value's text, because the text of a model has many lines."""
    return repr(value).splitlines()[0]
