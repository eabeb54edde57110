"""Secrets of the person at the browser."""

from google.colab import _message, errors

__all__ = ["SecretNotFoundError", "get"]


class SecretNotFoundError(errors.Error):
    """There is no such secret."""


def get(key):
    """Ask for a secret."""
    _message.blocking_request("userdata")
    raise SecretNotFoundError(f"Secret {key} does not exist.")
