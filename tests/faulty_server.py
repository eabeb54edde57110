"""A server of files that fails on command, as an fsspec protocol of its own.

Its files lie in a folder of this machine, so that processes that are forked see the same ones.
"""

from __future__ import annotations

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable
from typing import ClassVar

from fsspec import register_implementation
from fsspec.implementations.local import LocalFileSystem

Fault = Callable[[str, str], None]
"""Raises what a call of this name for this path is to fail with."""


class FaultyFileSystem(LocalFileSystem):
    """Files below ``root``, where each call may fail; ``calls`` counts them by name."""

    protocol = "faulty"
    root = ""
    calls: ClassVar[Counter[str]] = Counter()
    fault: Fault | None = None
    sends_whole_files = False

    @classmethod
    def reset(cls, root: object) -> None:
        """Serve another folder, without faults."""
        cls.root = str(root)
        cls.calls.clear()
        cls.fault = None
        cls.sends_whole_files = False

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        path = str(path).removeprefix("faulty:").removeprefix(cls.root).strip("/")
        return f"{cls.root}/{path}".rstrip("/")

    @classmethod
    def _begin(cls, call: str, path: str) -> None:
        cls.calls[call] += 1
        if cls.fault is not None:
            cls.fault(call, path)

    def info(self, path, **kwargs):
        self._begin("info", os.fspath(path))
        return super().info(path, **kwargs)

    def ls(self, path, detail=True, **kwargs):
        self._begin("ls", path)
        return super().ls(path, detail=detail, **kwargs)

    def cat_file(self, path, start=None, end=None, **kwargs):
        self._begin("read", path)
        if self.sends_whole_files:
            start = None
            end = None
        return super().cat_file(path, start=start, end=end, **kwargs)

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        self._begin("write", path)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        return super().pipe_file(path, value, mode=mode, **kwargs)


register_implementation("faulty", FaultyFileSystem, clobber=True)


def fail_times(
    times: float, error: Exception, *, call: str = "read", name: str = "", first: int = 0
) -> Fault:
    """Return a fault of so many calls of a name, after the first ones, for files whose path holds
    a text.
    """
    count = itertools.count()

    def fail(failing: str, path: str) -> None:
        if failing == call and name in path and first <= next(count) < first + times:
            raise error

    return fail


def fail_from(first: int, error: Exception, *, call: str = "read") -> Fault:
    """Return a fault of every call of a name after the first ones."""
    return fail_times(math.inf, error, call=call, first=first)
