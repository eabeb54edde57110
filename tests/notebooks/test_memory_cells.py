"""The cells of notebook 04 that count what a model keeps."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import torch

from tests.notebooks.test_exercises import read_cells


class Doubler(torch.nn.Module):
    """A model of detection's arguments, whose layers keep their inputs and their outputs."""

    def __init__(self):
        super().__init__()
        self.transform = SimpleNamespace(min_size=(0,))
        self.layer = torch.nn.Linear(1000, 1000)

    def forward(self, images, targets):
        return self.layer(torch.stack(images)).exp().sum()


def count_tensors():
    gc.collect()
    return sum(issubclass(type(value), torch.Tensor) for value in gc.get_objects())


def test_what_was_counted_is_freed():
    [source] = [cell for cell in read_cells("04").values() if "def kept_mb(" in cell]
    names = {
        "torch": torch,
        "image": torch.ones(1000),
        "target": {},
        "to_device": lambda images, targets: (images, targets),
    }
    exec(source, names)
    net = Doubler()
    names["kept_mb"](net, 250, 320)
    held = count_tensors()
    # The inputs and the outputs of the layer: 250 rows of 1,000 numbers of 4 bytes, twice.
    assert names["kept_mb"](net, 250, 320) == 2.0
    assert count_tensors() == held
