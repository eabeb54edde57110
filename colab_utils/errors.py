"""The error and the warning of this package.

Every error that a user can cause is a `ColabUtilsError`.
"""

import re

# Control characters, what breaks a line, what turns the direction of a text, and halves of
# characters.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufffe\uffff]"
)


def escape(text: str) -> str:
    r"""Return a name or a message as a terminal may show it.

    It is one line, without characters that steer the terminal.

    Example:
        >>> escape("café 猫.jpg\n\x1b[2Jok")
        'café 猫.jpg\\n\\x1b[2Jok'
    """
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _OneLine:
    """An exception whose message is escaped as it is shown."""

    def __str__(self) -> str:
        text = super().__str__()
        lines = text.split("\n")
        # Torch's report of a worker's error keeps its lines.
        if lines[0].startswith("Caught "):
            return "\n".join(map(escape, lines))
        return escape(text)


class ColabUtilsError(_OneLine, Exception):
    """One line that says what is wrong, then what to do, in two sentences.

    Example:
        >>> raise ColabUtilsError("photos.zip is a file, and no folder. Unzip it first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: photos.zip is a file, and no folder. Unzip it first.
    """

    def _render_traceback_(self) -> list[str]:
        """Return what a notebook shows: the line alone; ``%tb`` shows where it comes from."""
        return [f"{type(self).__name__}: {self}"]


class UnavailableError(ColabUtilsError):
    """A file could not be read, for a reason that says nothing about the file."""


class ColabUtilsWarning(_OneLine, UserWarning):
    """One line on something that was decided for you; the command line prints it as a note."""


def describe_error(error: BaseException) -> str:
    """Return kind and message in one line; of a DataLoader worker's error its own last line.

    Example:
        >>> describe_error(ValueError("not an image"))
        'ValueError: not an image'
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    message = lines[0]
    # Torch wraps the worker's whole traceback.
    if message.startswith("Caught ") and len(lines) > 1:
        kind, _, message = lines[-1].partition(": ")
    if isinstance(error, ColabUtilsError):
        return escape(message)
    return escape(f"{kind}: {message}")
