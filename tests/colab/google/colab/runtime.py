"""The machine."""

__all__ = ["unassign"]


def unassign():
    """Give the machine back."""
    raise SystemExit("the machine is given back")
