import lightning
import planted
import torch
from torch.utils.data import DataLoader


class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = planted.Model()

    def training_step(self, batch, _):
        return planted.loss(self.model(batch[0]), batch[1])

    def validation_step(self, batch, _):
        self.log("loss", planted.loss(self.model(batch[0]), batch[1]))

    def on_train_batch_end(self, *_):
        planted.write_log()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, max_epochs=2, logger=False, enable_checkpointing=False
    )
    train = DataLoader(planted.Photos(20), planted.BATCH_SIZE, num_workers=2)
    trainer.fit(Module(), train, DataLoader(planted.Photos(3), planted.BATCH_SIZE))
