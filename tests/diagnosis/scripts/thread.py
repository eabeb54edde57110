"""A thread takes batches from a DataLoader ahead of the loop."""

import queue
import threading

import planted
from torch.utils.data import DataLoader


class Prefetcher:
    def __init__(self, loader):
        self.loader = loader

    def __iter__(self):
        batches = queue.Queue(2)
        threading.Thread(target=self.fill, args=[batches], daemon=True).start()
        return iter(batches.get, None)

    def fill(self, batches):
        for batch in self.loader:
            batches.put(batch)
        batches.put(None)


def main():
    loader = DataLoader(planted.Photos(), planted.BATCH_SIZE, num_workers=2)
    for batch in Prefetcher(loader):
        planted.train_on(*batch)


if __name__ == "__main__":
    main()
