"""The table of the system's errors."""

from __future__ import annotations

import errno
import os

import pytest

from colab_utils import os_errors
from colab_utils.os_errors import explain_os_error


@pytest.mark.parametrize("name", list(os_errors._CURES))
def test_every_cure_is_of_a_real_error_and_follows_what_the_system_says(name):
    number = getattr(errno, name)
    text = explain_os_error(OSError(number, os.strerror(number)), "Ask somebody.")
    assert text.startswith(f"{os.strerror(number)}. ")
    assert text.endswith(".")
    assert "Ask somebody" not in text


@pytest.mark.parametrize(
    "error",
    [
        FileNotFoundError(errno.ENOENT, "No such file or directory"),
        OSError("No such file or directory"),
        ValueError("No such file or directory"),
    ],
)
def test_other_errors_have_the_cure_of_their_place(error):
    assert explain_os_error(error, "Mount it.") == "No such file or directory. Mount it."
