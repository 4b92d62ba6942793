"""Write a callback: it measures how far each step moves the weights of each layer, relative to their size.

    python examples/custom_callback.py

About 0.001 is healthy; 0.1 is a learning rate that is too high, and 0.00001 a layer that hardly learns.
"""

from typing import Any

import torch
from digits import DigitsTask, build_loaders
from torch import Tensor

import treadle as tl


class UpdateRatio(tl.Callback):
    """Log |change| / |weight| of each matrix and convolution, every few steps.

    Args:
        every_n_steps: Steps from one measurement to the next.
    """

    def __init__(self, every_n_steps: int = 10) -> None:
        self.every_n_steps, self.largest = every_n_steps, 0.0
        self._before: dict[str, Tensor] = {}

    def on_before_optimizer_step(self, trainer: tl.Trainer, pl_module: tl.TaskModule, optimizer: Any) -> None:
        if trainer.global_step % self.every_n_steps == 0:
            weights = ((name, p) for name, p in pl_module.named_parameters() if p.ndim > 1)
            self._before = {name: p.detach().clone() for name, p in weights}

    def on_step_end(self, trainer: tl.Trainer, pl_module: tl.TaskModule) -> None:
        for name, before in self._before.items():
            ratio = torch.dist(pl_module.get_parameter(name).detach(), before) / before.norm()
            self.log(f"update/{name.removesuffix('.weight')}", ratio)
            self.largest = max(self.largest, float(ratio))
        self._before.clear()

    def state_dict(self) -> dict[str, Any]:  # a part of each checkpoint
        return {"largest": self.largest}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.largest = state_dict["largest"]


if __name__ == "__main__":
    tl.seed_everything(0)
    callback = UpdateRatio()
    trainer = tl.Trainer(max_epochs=3, callbacks=[callback], logger=False, enable_checkpointing=False)
    train, val, _ = build_loaders(64)
    trainer.fit(DigitsTask(), train, val)
    for name, value in trainer.callback_metrics.items():
        if name.startswith("update/"):
            trainer.print(f"{name:15} {value:.4f}")
    trainer.print(f"largest         {callback.largest:.4f}")
