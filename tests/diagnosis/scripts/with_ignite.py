import planted
from ignite.engine import Events, create_supervised_trainer
from torch.utils.data import DataLoader

if __name__ == "__main__":
    trainer = create_supervised_trainer(planted.model, planted.optimizer, planted.loss)
    trainer.add_event_handler(Events.ITERATION_COMPLETED, planted.write_log)
    loader = DataLoader(planted.Photos(20), planted.BATCH_SIZE, num_workers=2)
    trainer.run(loader, max_epochs=2)
