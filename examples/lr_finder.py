"""Find a learning rate: raise it step by step, and take the one at which the loss falls most steeply.

    python examples/lr_finder.py

The search trains a copy of the task, so the task is still untrained afterwards. `finder.plot(suggest=True)` draws the
curve.
"""

from digits import DigitsTask, build_loaders

import treadle as tl
from treadle.tuner import Tuner

tl.seed_everything(0)
train, val, _ = build_loaders(64)
task = DigitsTask(lr=1e-5)
trainer = tl.Trainer(max_epochs=3, logger=False, enable_checkpointing=False)

finder = Tuner(trainer).lr_find(task, train, min_lr=1e-5, max_lr=1.0, num_training=60)
for lr, loss in list(zip(finder.results["lr"], finder.results["loss"], strict=True))[::8]:
    trainer.print(f"lr {lr:7.5f}  loss {loss:.3f}")
trainer.print(f"suggested learning rate: {finder.suggestion():.4f}, task.lr is {task.lr:.4f}")

trainer.fit(task, train, val)
trainer.print(f"accuracy after 3 epochs: {trainer.callback_metrics['val_acc']:.3f}")
