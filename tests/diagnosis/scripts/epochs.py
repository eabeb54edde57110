"""A loop in a function, with several epochs and a validation loader."""

import planted
import torch
from torch.utils.data import DataLoader


def run_epoch(model, loader, optimizer=None):
    for images, labels in loader:
        loss = planted.loss(model(images), labels)
        if optimizer:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            planted.write_log()


def main():
    model = planted.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train = DataLoader(planted.Photos(20), planted.BATCH_SIZE, shuffle=True, num_workers=2)
    validation = DataLoader(planted.Photos(4), planted.BATCH_SIZE)
    next(iter(validation))
    for _ in range(2):
        run_epoch(model, train, optimizer)
        with torch.no_grad():
            run_epoch(model, validation)


if __name__ == "__main__":
    main()
