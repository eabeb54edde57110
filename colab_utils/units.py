"""Bytes and seconds as people read them."""


def format_bytes(count: float) -> str:
    """Bytes as people read them.

    Example:
        >>> format_bytes(13_300_000_000)
        '13.3 GB'
    """
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def format_seconds(seconds: float) -> str:
    """A time as people read it.

    Example:
        >>> format_seconds(5.25), format_seconds(600)
        ('5.2 s', '10 minutes')
    """
    size, unit = (
        (1, "s") if seconds < 90 else (60, "minutes") if seconds < 5400 else (3600, "hours")
    )
    return (
        f"{seconds / size:.2g} {unit}" if seconds / size < 10 else f"{seconds / size:,.0f} {unit}"
    )
