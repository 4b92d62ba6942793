"""Accumulate gradients in bfloat16: four micro-batches of 16 images make the step of one batch of 64.

    python examples/accumulation.py

The first two trainings take the same steps, up to rounding. The last group of an epoch may have fewer micro-batches;
its gradient is their mean.
"""

from digits import DigitsTask, build_loaders

import treadle as tl

for batch_size, accumulate, precision in [(64, 1, "32-true"), (16, 4, "32-true"), (16, 4, "bf16-mixed")]:
    tl.seed_everything(0)
    train, val, _ = build_loaders(batch_size)
    trainer = tl.Trainer(
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        precision=precision,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
    )
    trainer.fit(DigitsTask(), train, val)
    metrics = trainer.callback_metrics
    trainer.print(
        f"{accumulate} x {batch_size} in {precision}: {trainer.global_step} steps, "
        f"loss {metrics['val_loss']:.4f}, accuracy {metrics['val_acc']:.3f}"
    )
