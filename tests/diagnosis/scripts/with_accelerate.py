import planted
from accelerate import Accelerator
from torch.utils.data import DataLoader


def main():
    accelerator = Accelerator(cpu=True)
    loader = DataLoader(planted.Photos(20), planted.BATCH_SIZE, shuffle=True, num_workers=2)
    model, optimizer, loader = accelerator.prepare(planted.model, planted.optimizer, loader)
    for _ in range(2):
        for images, labels in loader:
            accelerator.backward(planted.loss(model(images), labels))
            optimizer.step()
            optimizer.zero_grad()
            planted.write_log()


if __name__ == "__main__":
    main()
