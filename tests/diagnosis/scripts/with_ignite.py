import planted
import torch
from ignite.engine import Events, create_supervised_trainer
from torch.utils.data import DataLoader

if __name__ == "__main__":
    model = planted.Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    trainer = create_supervised_trainer(model, optimizer, planted.loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, planted.write_log)
    loader = DataLoader(planted.Photos(20), planted.BATCH_SIZE, num_workers=2)
    trainer.run(loader, max_epochs=2)
