"""The error and the warning of this package: every error that a user can cause is a `ColabUtilsError`."""

from __future__ import annotations

__all__ = ["ColabUtilsError", "ColabUtilsWarning", "describe_error"]


class ColabUtilsError(Exception):
    """One line that says what was expected, what was found, and what to do.

    Example:
        >>> raise ColabUtilsError("expected a folder, found a file: photos.zip. Unzip it first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder, found a file: photos.zip. Unzip it first.
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the line alone; ``%tb`` shows where it comes from."""
        return [f"{type(self).__name__}: {self}"]


class ColabUtilsWarning(UserWarning):
    """One line on something that was decided for you; the command line prints it as a note."""


def describe_error(error: BaseException) -> str:
    """Kind and message in one line; of an error that a DataLoader worker raised, the worker's own last line.

    Example:
        >>> describe_error(ValueError("not an image"))
        'ValueError: not an image'
    """
    kind, lines = type(error).__name__, str(error).strip().splitlines() or [""]
    message = lines[0]
    if message.startswith("Caught ") and len(lines) > 1:  # torch wraps the worker's whole traceback
        kind, _, message = lines[-1].partition(": ")
    return message if isinstance(error, ColabUtilsError) else f"{kind}: {message}"
