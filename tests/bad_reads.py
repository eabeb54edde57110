"""A disk whose reads give other bytes than the file holds, for a while."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from colab_utils import files

__all__ = ["BadReads", "alter", "cut"]


def cut(content: bytes) -> bytes:
    """As of a read that comes back short, and then says that the file has ended."""
    return content[: len(content) // 2]


def alter(content: bytes) -> bytes:
    """As many bytes; each time others in their middle."""
    middle = len(content) // 2
    return content[:middle] + os.urandom(8) + content[middle + 8 :]


class BadReads:
    """The next ``times`` reads of files with this suffix give what ``change`` makes of their
    content.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        suffix: str,
        change: Callable[[bytes], bytes],
        times: int,
    ) -> None:
        self.suffix = suffix
        self.change = change
        self.times = times
        monkeypatch.setattr(files, "open", self.open, raising=False)

    def open(self, path: str | Path, *arguments: Any, **options: Any) -> Any:
        """Open a file, as Python does."""
        file = open(path, *arguments, **options)  # noqa: SIM115
        if not self.times or Path(path).suffix != self.suffix:
            return file
        self.times -= 1
        double = mock.MagicMock(wraps=file)
        double.__enter__.return_value = double
        double.__exit__.side_effect = lambda *_: file.close()
        double.read.side_effect = lambda: self.change(file.read())
        return double
