"""What the scripts of this folder share: photos, a model whose step takes a while, and the stall
that the first argument names. The second argument is a folder of pipes that answer slowly.
"""

import sys
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

STALL, FOLDER = sys.argv[1:3]
STEP_S = 0.03
BATCH_SIZE = 4
BATCHES = 40


def read_file(index):
    return (Path(FOLDER) / f"photo-{index % 8}").read_bytes()


def draw_masks():
    until_s = time.thread_time() + 0.03
    while time.thread_time() < until_s:
        pass


def write_log():
    """What a loop does after its step."""
    if STALL == "gap":
        time.sleep(0.08)


class Photos(Dataset):
    def __init__(self, batches=BATCHES):
        self.count = BATCH_SIZE * batches

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if STALL == "read":
            read_file(index)
        if STALL == "work":
            draw_masks()
        return torch.full((3, 8, 8), float(index)), index % 2


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(192, 2)

    def forward(self, images):
        time.sleep(STEP_S)
        return self.layer(images.flatten(1))


loss = nn.functional.cross_entropy
model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)


def train_on(images, labels):
    optimizer.zero_grad()
    loss(model(images), labels).backward()
    optimizer.step()
    write_log()
