"""Each epoch makes its dataset and its loader anew, and accumulates gradients."""

import planted
from torch.utils.data import DataLoader


def make_loader():
    return DataLoader(planted.Photos(30), planted.BATCH_SIZE, num_workers=2)


def main():
    for _ in range(2):
        for number, (images, labels) in enumerate(make_loader()):
            (planted.loss(planted.model(images), labels) / 2).backward()
            if number % 2:
                planted.optimizer.step()
                planted.optimizer.zero_grad()
            planted.write_log()


if __name__ == "__main__":
    main()
