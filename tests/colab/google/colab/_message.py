"""Questions to the person at the browser."""

import os

from google.colab import errors


class MessageError(errors.Error):
    """The browser answered with an error."""


def blocking_request(request_type, request="", timeout_sec=5, parent=None):
    """Ask, and wait for the answer."""
    with open(os.environ["COLAB_ASKED"], "a", encoding="utf-8") as asked:
        asked.write(f"{request_type}\n")
    if os.environ["COLAB_ANSWER"] == "declined":
        raise MessageError("Error: credential propagation was unsuccessful")
