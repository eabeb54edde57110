"""Loaders as in timm: one iterator for all epochs, and a wrapper that takes a batch ahead."""

import planted
from torch.utils.data import DataLoader


class RepeatSampler:
    def __init__(self, sampler):
        self.sampler = sampler

    def __iter__(self):
        while True:
            yield from iter(self.sampler)


class MultiEpochsLoader(DataLoader):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._DataLoader__initialized = False
        self.batch_sampler = RepeatSampler(self.batch_sampler)
        self._DataLoader__initialized = True
        self.iterator = super().__iter__()

    def __len__(self):
        return len(self.batch_sampler.sampler)

    def __iter__(self):
        for _ in range(len(self)):
            yield next(self.iterator)


class PrefetchLoader:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        ready = None
        for batch in self.loader:
            if ready is not None:
                yield ready
            ready = batch
        yield ready


def main():
    loader = MultiEpochsLoader(planted.Photos(20), planted.BATCH_SIZE, num_workers=2)
    for _ in range(2):
        for batch in PrefetchLoader(loader):
            planted.train_on(*batch)


if __name__ == "__main__":
    main()
