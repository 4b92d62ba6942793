"""Stop when the validation loss no longer improves, and test the checkpoint with the best accuracy.

    python examples/early_stopping.py

Both callbacks read what `validation_step` logs. The best checkpoint need not be the last one.
"""

from digits import DigitsTask, build_loaders
from treadle.callbacks import EarlyStopping, ModelCheckpoint

import treadle as tl

tl.seed_everything(0)
train, val, test = build_loaders(32)
best = ModelCheckpoint("runs/best", "{epoch}-{val_acc:.3f}", monitor="val_acc", mode="max")
stop = EarlyStopping(monitor="val_loss", patience=2, min_delta=0.01)
trainer = tl.Trainer(max_epochs=50, logger=False, callbacks=[best, stop])
task = DigitsTask(lr=0.01)
trainer.fit(task, train, val)
(result,) = trainer.test(task, test, ckpt_path="best", verbose=False)

trainer.print(f"stopped after {trainer.current_epoch} epochs: {stop.stopping_reason_message}")
trainer.print(f"best checkpoint: {best.best_model_path}")
trainer.print(f"test accuracy of its weights: {result['test_acc']:.3f}")
