"""The training of the manifests in this folder: it may be ended at any time, and resumes when it is started again.

    python train.py --checkpoints checkpoints            one process
    torchrun --nproc-per-node 2 train.py --checkpoints checkpoints

The task is that of `digits.py`, which is next to this file in the image, see `Dockerfile`.
"""

import argparse

from digits import DigitsTask, build_loaders
from treadle.callbacks import ModelCheckpoint

import treadle as tl


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", required=True, help="a folder that all pods share")
    parser.add_argument("--max-epochs", type=int, default=12)
    args = parser.parse_args(arguments)
    tl.seed_everything(0)
    train, val, _ = build_loaders(64)
    trainer = tl.Trainer(
        max_epochs=args.max_epochs,
        # last.ckpt is what a pod that is told to end leaves; the others are for pods that vanish.
        callbacks=[ModelCheckpoint(args.checkpoints, save_last=True, every_n_train_steps=20)],
        # Ten seconds less than terminationGracePeriodSeconds.
        grace="00:00:00:50",
        logger=False,
        enable_progress_bar=False,
    )
    trainer.fit(DigitsTask(), train, val, ckpt_path="auto")


if __name__ == "__main__":
    main()
