"""The error and the warning of this package: every error that a user can cause is a
`ColabUtilsError`.
"""

import re

# control characters, what breaks a line, what turns the direction of a text, and halves of
# characters
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ud800-\udfff\ufffe\uffff]"
)


def escape(text: str) -> str:
    r"""A name or a message as a terminal may show it: in one line, and without characters that
    steer the terminal.

    Example:
        >>> escape("café 猫.jpg\n\x1b[2Jok")
        'café 猫.jpg\\n\\x1b[2Jok'
    """
    return _UNSEEN.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


class _OneLine:
    """An exception whose message is escaped as it is shown; torch's report of a worker's error
    keeps its lines.
    """

    def __str__(self) -> str:
        lines = super().__str__().split("\n")
        return (
            "\n".join(map(escape, lines))
            if lines[0].startswith("Caught ")
            else escape("\n".join(lines))
        )


class ColabUtilsError(_OneLine, Exception):
    """One line that says what was expected, what was found, and what to do.

    Example:
        >>> raise ColabUtilsError("expected a folder, found a file: photos.zip. Unzip it first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: expected a folder, found a file: photos.zip. Unzip ...
    """

    def _render_traceback_(self) -> list[str]:
        """What a notebook shows: the line alone; ``%tb`` shows where it comes from."""
        return [f"{type(self).__name__}: {self}"]


class ColabUtilsWarning(_OneLine, UserWarning):
    """One line on something that was decided for you; the command line prints it as a note."""


def describe_error(error: BaseException) -> str:
    """Kind and message in one line; of an error that a DataLoader worker raised, the worker's own
    last line.

    Example:
        >>> describe_error(ValueError("not an image"))
        'ValueError: not an image'
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    message = lines[0]
    if message.startswith("Caught ") and len(lines) > 1:  # torch wraps the worker's whole traceback
        kind, _, message = lines[-1].partition(": ")
    return escape(message if isinstance(error, ColabUtilsError) else f"{kind}: {message}")
