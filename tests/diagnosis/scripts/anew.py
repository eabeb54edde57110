"""Each epoch makes its dataset and its loader anew, and accumulates gradients."""

import planted
import torch
from torch.utils.data import DataLoader


def make_loader():
    return DataLoader(planted.Photos(30), planted.BATCH_SIZE, num_workers=2)


def main():
    model = planted.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(2):
        for number, (images, labels) in enumerate(make_loader()):
            (planted.loss(model(images), labels) / 2).backward()
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
            planted.write_log()


if __name__ == "__main__":
    main()
