"""What stands behind Lightning's names does what Lightning's does; expected values are those of lightning 2.6.6."""

import torch
from support.trainers import make_trainer
from treadle.compat.core.optimizer import LightningOptimizer
from treadle.compat.demos.boring_classes import BoringModel


def test_the_optimizer_of_a_step_is_a_lightning_optimizer() -> None:
    class Task(BoringModel):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            assert isinstance(self.optimizers(), LightningOptimizer)
            assert type(self.optimizers().optimizer) is torch.optim.SGD
            self.manual_backward(self.step(batch))
            self.optimizers().step()

    make_trainer(fast_dev_run=1).fit(Task())
