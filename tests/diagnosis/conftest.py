"""What holds for all tests of this room."""

import pytest
import torch
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter


@pytest.fixture(autouse=True)
def workers_end_soon(monkeypatch):
    """torch looks after its workers every half second, and waits as long for one that hangs before
    it kills it. Both take five seconds otherwise.
    """
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 0.5)
    monkeypatch.setattr(_MultiProcessingDataLoaderIter._try_get_data, "__defaults__", (0.5,))
