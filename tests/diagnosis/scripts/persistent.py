"""A loop at the top of the script, whose workers stay."""

import planted
from torch.utils.data import DataLoader

if __name__ == "__main__":
    loader = DataLoader(
        planted.Photos(14), planted.BATCH_SIZE, num_workers=2, persistent_workers=True
    )
    for _ in range(3):
        for batch in loader:
            planted.train_on(*batch)
