"""A loop at the top of the script, whose workers stay."""

import planted
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = planted.Model()
    optimizer = torch.optim.AdamW(model.parameters())
    loader = DataLoader(
        planted.Photos(14), planted.BATCH_SIZE, num_workers=2, persistent_workers=True
    )
    for _ in range(3):
        for images, labels in loader:
            optimizer.zero_grad()
            planted.loss(model(images), labels).backward()
            optimizer.step()
            planted.write_log()
