"""A loop in a function, with several epochs and a validation loader."""

import planted
import torch
from torch.utils.data import DataLoader


def run_epoch(loader, act):
    for batch in loader:
        act(*batch)


def evaluate(images, _):
    planted.model(images)


def main():
    train = DataLoader(planted.Photos(20), planted.BATCH_SIZE, shuffle=True, num_workers=2)
    validation = DataLoader(planted.Photos(4), planted.BATCH_SIZE)
    next(iter(validation))
    for _ in range(2):
        run_epoch(train, planted.train_on)
        with torch.no_grad():
            run_epoch(validation, evaluate)


if __name__ == "__main__":
    main()
