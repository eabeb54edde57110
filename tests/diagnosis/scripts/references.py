"""A loop as in torchvision's references: a logger goes over the loader."""

import time

import planted
import torch
from torch.utils.data import DataLoader


class MetricLogger:
    def __init__(self):
        self.losses = []

    def log_every(self, iterable, every):
        for number, item in enumerate(iterable):
            yield item
            if number % every == 0:
                print("loss", self.losses[-1], time.time())


def train_one_epoch(model, optimizer, loader, logger):
    model.train()
    for images, targets in logger.log_every(loader, 10):
        losses = planted.loss(model(torch.stack(images)), torch.tensor(targets))
        optimizer.zero_grad()
        losses.backward()
        optimizer.step()
        planted.write_log()
        logger.losses.append(losses.item())


def collate(batch):
    return tuple(zip(*batch, strict=True))


def main():
    dataset = planted.Photos()
    batches = torch.utils.data.BatchSampler(
        torch.utils.data.RandomSampler(dataset), planted.BATCH_SIZE, drop_last=True
    )
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=2, collate_fn=collate)
    train_one_epoch(planted.model, planted.optimizer, loader, MetricLogger())


if __name__ == "__main__":
    main()
