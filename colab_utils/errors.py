"""What goes wrong, in words: every error that a user can cause is one of these."""

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
    """A clear word about something that was decided for you; the command line prints it as a note."""
