"""What an error of the operating system means, and what to do: one table for all who meet one."""

from errno import EMFILE, ENFILE, ENOMEM, errorcode

SHORTAGES = (EMFILE, ENFILE, ENOMEM)
"""Numbers of errors that say that the machine lacks something, and nothing about a file."""

_CURES = {
    "EMFILE": "Raise the limit of open files (`ulimit -n 4096`, before Python starts), or use "
    "fewer workers, or fewer and larger shards (--shard-mb).",
    "ENFILE": "All programs of this machine have too many files open: end those that you do "
    "not need.",
    "ENOMEM": "Free some memory: use fewer workers, or end other programs.",
    "EAGAIN": "Close other programs, use fewer workers, or raise the limit of processes: "
    "`ulimit -u`, or pids.max of a container.",
    "EACCES": "Give yourself the right to it (`chmod u+rwX`), or name another place.",
    "EPERM": "The system does not allow it there. Name another place.",
    "EROFS": "It can only be read. Make it writable, or use another disk.",
    "ENOSPC": "Free some space there (see `df -h`, and `df -i` for the number of files), or use "
    "another disk.",
    "EDQUOT": "Your quota there is used up. Free some space, or name another folder.",
    "EFBIG": "That disk holds no file of this size. Make smaller shards (--shard-mb), or use "
    "another disk.",
    "EIO": "The disk failed, or the network behind it. Run the same again; if it stays so, use "
    "another disk.",
    "ENOTCONN": "The mount is gone. Mount it again.",
    "ECONNABORTED": "The mount is gone. Mount it again.",
    "ESTALE": "The network folder was exchanged meanwhile. Mount it again.",
    "ETIMEDOUT": "The network folder does not answer. Run the same again later, or mount it again.",
    "ENODEV": "The device is gone. Mount it again, or name another place.",
    "ENXIO": "That is no file. Name another place.",
    "ENAMETOOLONG": "Choose a shorter name.",
    "ELOOP": "Links lead in a circle there. Name the file or folder itself.",
    "EEXIST": "A file has the name of the folder. Name another folder.",
    "ENOTDIR": "A file has the name of the folder. Name another folder.",
}


def explain_os_error(error: Exception, cure: str) -> str:
    """Return what the system says, and what to do; ``cure`` where the error's number says nothing.

    Example:
        >>> explain_os_error(OSError(36, "File name too long"), "Ask somebody.")
        'File name too long. Choose a shorter name.'
    """
    reason = getattr(error, "strerror", None) or error
    name = errorcode.get(getattr(error, "errno", 0), "")
    return f"{reason}. {_CURES.get(name, cure)}"
