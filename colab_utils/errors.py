"""The errors and the warning of this package, and what to do about errors of the system.

Every error that a user can cause is a `ColabUtilsError`.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from errno import EAGAIN, EMFILE, ENFILE, ENOMEM, errorcode

# Control characters, characters that break a line or change the direction of text, spaces that look
# like the usual one, and surrogates, which are halves of characters.
_UNSEEN = re.compile(
    "[\x00-\x1f\x7f-\xa0\u061c\u2000-\u200a\u200e\u200f\u2028-\u202f\u205f\u2066-\u206f"
    "\ud800-\udfff\ufffe\uffff]"
)
# The name and the password in a URL, and the query of a web address, which may be a signature.
_LOGIN = re.compile(r"([a-z][a-z0-9+.-]+:/+)[^\s/?#]*@", re.IGNORECASE)
_QUERY = re.compile(r"(https?:/[^\s?]*)\?\S*?(?=\W*(?:\s|$))", re.IGNORECASE)

DAMAGE = (AttributeError, LookupError, OverflowError, RecursionError, TypeError, ValueError)
"""The errors that reading damaged JSON or damaged arrays raises."""

# Error numbers that mean: the system starts no more processes or threads, opens no more files, or
# has too little memory. If a file cannot be read because of one of these, the file may be sound.
_LIMITS = (EAGAIN, EMFILE, ENFILE, ENOMEM)

_CURES = {
    "EMFILE": "Raise the limit of open files (`ulimit -n 4096`, before Python starts), or use "
    "fewer workers, or fewer and larger shards (--shard-mb).",
    "ENFILE": "The programs on this machine have too many files open. End programs that you do "
    "not need.",
    "ENOMEM": "Free some memory: use fewer workers, or end other programs.",
    "EAGAIN": "Close other programs, use fewer workers, or raise the limit of processes: "
    "`ulimit -u`, or pids.max of a container.",
    "EACCES": "Give yourself access to it (`chmod u+rwX`), or name another place.",
    "EPERM": "The system forbids this there. Name another place.",
    "EROFS": "Make the disk writable, or use another disk.",
    "ENOSPC": "Free some space there (see `df -h`, and `df -i` for the number of files), or use "
    "another disk.",
    "EDQUOT": "Your quota there is used up. Free some space, or name another folder.",
    "EFBIG": "That disk cannot hold a file of this size. Make smaller shards (--shard-mb), or use "
    "another disk.",
    "EIO": "The disk failed, or the network behind it. Run the same again. If it fails again, "
    "use another disk.",
    "ENOTCONN": "The mount is gone. Mount it again.",
    "ECONNABORTED": "The mount is gone. Mount it again.",
    "ESTALE": "The network folder was replaced while it was in use. Mount it again.",
    "ETIMEDOUT": "The network folder does not answer. Run the same again later, or mount it again.",
    "ENODEV": "The device is gone. Mount it again, or name another place.",
    "ENXIO": "That is not a file. Name another place.",
    "ENAMETOOLONG": "Choose a shorter name.",
    "ELOOP": "The links there lead in a circle. Name the file or folder itself.",
    "EEXIST": "A file has the name of the folder. Name another folder.",
    "ENOTDIR": "A file has the name of the folder. Name another folder.",
}


def hide_login(text: str) -> str:
    """Return a text without the name and the password of each URL in it.

    Example:
        >>> hide_login("ftp://me:secret@host/photos")
        'ftp://host/photos'
    """
    return _LOGIN.sub(r"\1", text)


def escape(text: str) -> str:
    r"""Return a name or a message as text that is safe to print on a terminal.

    The result is one line. Characters that control the terminal are replaced by escape sequences.
    Of a URL, only host and path are shown.

    Example:
        >>> escape("café 猫.jpg\n\x1b[2Jok")
        'café 猫.jpg\\n\\x1b[2Jok'
        >>> escape("no answer (https://me:secret@host/a.zip?signature=secret)")
        'no answer (https://host/a.zip)'
    """
    text = _QUERY.sub(r"\1", hide_login(text))
    return _UNSEEN.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


class _OneLine:
    """An exception whose message is escaped when it is shown."""

    def __str__(self) -> str:
        text = super().__str__()
        lines = text.split("\n")
        # An error that comes from a DataLoader worker has a traceback in its message. The lines of
        # the traceback are kept.
        if lines[0].startswith("Caught "):
            return "\n".join(map(escape, lines))
        return escape(text)


class ColabUtilsError(_OneLine, Exception):
    """An error that a user can cause. Its message is one line: what is wrong, then what to do.

    Example:
        >>> raise ColabUtilsError("photos.zip is a file, not a folder. Unzip it first.")
        Traceback (most recent call last):
        colab_utils.errors.ColabUtilsError: photos.zip is a file, not a folder. Unzip it first.
    """

    def _render_traceback_(self) -> list[str]:
        """Return the one line that a notebook shows. ``%tb`` shows the traceback."""
        return [f"{type(self).__name__}: {self}"]


MACHINE_FAULTS = (MemoryError, ImportError)
"""Exceptions that say what is wrong with this machine. They never say that data are bad."""


class UnavailableError(ColabUtilsError):
    """A file could not be read, for a reason outside the file, such as a lost Drive."""


class ColabUtilsWarning(_OneLine, UserWarning):
    """A warning about a decision that was made for you. The command line prints it as a note."""


def describe_error(error: BaseException) -> str:
    """Return the type and the message of an error in one line.

    An error from a DataLoader worker is described by the error inside the worker. A
    `ColabUtilsError` is described by its message alone.

    Example:
        >>> describe_error(ValueError("not an image"))
        'ValueError: not an image'
    """
    kind = type(error).__name__
    lines = str(error).strip().splitlines() or [""]
    message = lines[0]
    # Torch's message holds the worker's traceback, and its last line is the error in the worker.
    if message.startswith("Caught ") and len(lines) > 1:
        kind, _, message = lines[-1].partition(": ")
    if isinstance(error, ColabUtilsError):
        return escape(message)
    return escape(f"{kind}: {message}")


def explain_os_error(error: Exception, cure: str) -> str:
    """Return what the system says, then what to do about it.

    Args:
        error: The error that was raised.
        cure: What to do about an error that has no cure in the table.

    Example:
        >>> explain_os_error(OSError(36, "File name too long"), "Ask somebody.")
        'File name too long. Choose a shorter name.'
    """
    reason = getattr(error, "strerror", None) or error
    name = errorcode.get(getattr(error, "errno", 0), "")
    return f"{reason}. {_CURES.get(name, cure)}"


@contextmanager
def explain_limits() -> Iterator[None]:
    """Explain the error if the block can start no more processes or threads, or open no more files.

    Raises:
        UnavailableError: a limit of the system is reached; the message says what to do.

    Example:
        >>> with explain_limits():
        ...     raise RuntimeError("can't start new thread")
        Traceback (most recent call last):
        colab_utils.errors.UnavailableError: A limit of the system is reached: can't ...
    """
    try:
        yield
    except (OSError, RuntimeError) as error:
        cause: Exception = error
        if str(error) == "can't start new thread":
            cause = BlockingIOError(EAGAIN, str(error))
        if getattr(cause, "errno", None) not in _LIMITS:
            raise
        reason = explain_os_error(cause, "")
        raise UnavailableError(f"A limit of the system is reached: {reason}") from None
