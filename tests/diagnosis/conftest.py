"""What holds for all tests of this room."""

import pytest
import torch


@pytest.fixture(autouse=True)
def workers_end_soon(monkeypatch):
    """torch waits for a worker that hangs for half a second before it kills it, not for five."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
