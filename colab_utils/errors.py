"""The error and the warning of this package: every error that a user can cause is a `ColabUtilsError`."""

from __future__ import annotations

__all__ = ["ColabUtilsError", "ColabUtilsWarning"]


class ColabUtilsError(Exception):
    """One line that says what was expected, what was found, and what to do.

    Example:
        >>> raise ColabUtilsError("expected a folder, found a file: photos.zip. Unzip it first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder, found a file: photos.zip. Unzip it first.
    """


class ColabUtilsWarning(UserWarning):
    """One line on something that was decided for you; the command line prints it as a note."""
