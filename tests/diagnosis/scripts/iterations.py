"""A loop that counts iterations and not epochs: at the end of the data it asks a new iterator."""

import planted
from torch.utils.data import DataLoader


def main():
    loader = DataLoader(planted.Photos(15), planted.BATCH_SIZE, shuffle=True, num_workers=2)
    batches = iter(loader)
    for _ in range(planted.BATCHES):
        try:
            batch = next(batches)
        except StopIteration:
            batches = iter(loader)
            batch = next(batches)
        planted.train_on(*batch)


if __name__ == "__main__":
    main()
