"""Numbers of bytes, seconds and things as short texts."""


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, such as 13.3 GB. A kB is 1000 bytes.

    Example:
        >>> format_bytes(13_300_000_000)
        '13.3 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            digits = 0 if unit == "B" else 1
            return f"{count:.{digits}f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_count(count: int, noun: str, plural: str = "") -> str:
    """Return a number of things as text. The plural is the noun with an s, if none is given.

    Example:
        >>> format_count(1, "shard"), format_count(1200, "person", "people")
        ('1 shard', '1,200 people')
    """
    name = noun if count == 1 else plural or f"{noun}s"
    return f"{count:,} {name}"


def format_seconds(seconds: float) -> str:
    """Return a time as text, in seconds, minutes or hours.

    Example:
        >>> format_seconds(5.25), format_seconds(600)
        ('5.2 s', '10 minutes')
    """
    amount = seconds
    unit = "s"
    if seconds >= 5400:
        amount = seconds / 3600
        unit = "hours"
    elif seconds >= 90:
        amount = seconds / 60
        unit = "minutes"
    number = f"{amount:.2g}" if amount < 10 else f"{amount:,.0f}"
    return f"{number} {unit}"
