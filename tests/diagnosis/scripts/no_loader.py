"""A loop as in nanoGPT: batches are cut out of an array, and there is no loader."""

import planted
import torch

data = torch.randn(10_000)


def get_batch():
    starts = torch.randint(len(data) - 192, (planted.BATCH_SIZE,))
    return torch.stack([data[start : start + 192] for start in starts]), starts % 2


for _ in range(planted.BATCHES):
    planted.train_on(*get_batch())
