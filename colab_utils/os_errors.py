"""Errors of the operating system, and what a user can do about each of them."""

from errno import EMFILE, ENFILE, ENOMEM, errorcode

SHORTAGES = (EMFILE, ENFILE, ENOMEM)
"""Error numbers for too little memory or too many open files. If a file cannot be read because of
one of these errors, the file may be sound.
"""

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
