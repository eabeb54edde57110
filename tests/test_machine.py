"""What every module needs of the machine."""

from __future__ import annotations

import pytest

from colab_utils.errors import ColabUtilsError
from colab_utils.machine import require_linux


def test_another_system_than_linux_is_told_so(monkeypatch):
    monkeypatch.setattr("sys.platform", "win32")
    with pytest.raises(
        ColabUtilsError,
        match="expected Linux to share memory, found win32: use Colab, a Linux machine",
    ):
        require_linux("share memory")
