"""The errors of Colab's package; they have no public base class beside this one."""


class Error(Exception):
    """Base class for all Colab errors."""
