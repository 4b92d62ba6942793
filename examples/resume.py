"""Stop a training in the middle of an epoch and resume it: the weights are those of an uninterrupted run, bit for bit.

    python examples/resume.py

A checkpoint holds the model, the optimizer, the random state and the position in the data. For jobs that a cluster
restarts, pass `ckpt_path="auto"`: it resumes from the run's latest checkpoint, and starts anew if there is none.
"""

import torch
from digits import DigitsTask, build_loaders

import treadle as tl


def run(seed: int, steps: int, ckpt_path: str | None = None) -> DigitsTask:
    tl.seed_everything(seed)
    task = DigitsTask()
    saver = tl.callbacks.ModelCheckpoint("runs/resume", "{step}", every_n_train_steps=10, save_top_k=-1)
    trainer = tl.Trainer(max_steps=steps, max_epochs=-1, logger=False, callbacks=[saver])
    train, val, _ = build_loaders(64)
    trainer.fit(task, train, val, ckpt_path=ckpt_path)
    trainer.print(f"trained to step {trainer.global_step}, epoch {trainer.current_epoch}")
    return task


whole = run(seed=0, steps=50)
resumed = run(seed=1, steps=50, ckpt_path="runs/resume/step=30.ckpt")  # another seed: nothing is drawn anew
pairs = zip(whole.parameters(), resumed.parameters(), strict=True)
print("bit for bit equal:", all(torch.equal(a, b) for a, b in pairs))
