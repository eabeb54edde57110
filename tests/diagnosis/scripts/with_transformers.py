import planted
import transformers


class Model(planted.Model):
    def forward(self, images, labels):
        scores = super().forward(images)
        return {"loss": planted.loss(scores, labels), "logits": scores}


class Photos(planted.Photos):
    def __getitem__(self, index):
        images, labels = super().__getitem__(index)
        return {"images": images, "labels": labels}


class Log(transformers.TrainerCallback):
    def on_step_end(self, *_, **__):
        planted.write_log()


if __name__ == "__main__":
    settings = transformers.TrainingArguments(
        planted.FOLDER + "/trainer",
        per_device_train_batch_size=planted.BATCH_SIZE,
        num_train_epochs=2,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        eval_strategy="epoch",
        dataloader_num_workers=2,
    )
    trainer = transformers.Trainer(
        Model(), settings, train_dataset=Photos(20), eval_dataset=Photos(3), callbacks=[Log()]
    )
    trainer.train()
