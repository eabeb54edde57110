import planted
from fastai.basics import Callback, DataLoader, DataLoaders, Learner


class Log(Callback):
    def after_batch(self):
        if self.training:
            planted.write_log()


if __name__ == "__main__":
    train = DataLoader(planted.Photos(20), planted.BATCH_SIZE, shuffle=True, num_workers=2)
    loaders = DataLoaders(train, DataLoader(planted.Photos(3), planted.BATCH_SIZE, num_workers=0))
    learner = Learner(loaders, planted.Model(), loss_func=planted.loss, cbs=[Log()])
    learner.fit(2, 0.01)
