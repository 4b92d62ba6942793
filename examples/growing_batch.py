"""Train with a learning rate that warms up, stays and decays, and with batches that grow: the digits of `digits.py`.

    python examples/growing_batch.py                batches of 32, then 64, then 128 images
    python examples/growing_batch.py --by-epoch     accumulates 1, 2 and 4 batches of 32 images, by epoch
    python examples/growing_batch.py --devices 2    the same steps

A micro-batch has 32 images at all times, so memory does not grow.
"""

import argparse

import torch
from digits import DigitsTask, build_loaders
from treadle.callbacks import BatchSizeScheduler, GradientAccumulationScheduler

import treadle as tl
from treadle.optim import lr_schedule


class ScheduledDigits(DigitsTask):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=5e-3)
        steps = self.trainer.estimated_stepping_batches  # knows of the growing batches
        rate = lr_schedule("warmup_stable_decay", optimizer, steps, warmup_steps=0.05, decay_steps=0.3)
        return [optimizer], [{"scheduler": rate, "interval": "step"}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--by-epoch", action="store_true", help="change the accumulation at epochs")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", help="auto, ddp or fsdp")
    parser.add_argument("--max-epochs", type=int, default=10)
    options = vars(parser.parse_args())

    tl.seed_everything(0)
    by_epoch, by_step = GradientAccumulationScheduler({2: 2, 5: 4}), BatchSizeScheduler({0: 32, 80: 64, 140: 128})
    growing = by_epoch if options.pop("by_epoch") else by_step
    trainer = tl.Trainer(**options, callbacks=[growing], logger=False, enable_checkpointing=False)
    task, (train, val, test) = ScheduledDigits(), build_loaders(32 // trainer.world_size)
    trainer.fit(task, train, val)
    (result,) = trainer.test(task, test, verbose=False)
    trainer.print(f"Test accuracy {result['test_acc']:.3f} after {trainer.global_step} steps")


if __name__ == "__main__":
    main()
