"""Train two networks against each other (a GAN) with manual optimization, on images of handwritten digits.

    python examples/gan.py
    python examples/gan.py --devices 2 --strategy fsdp     both networks are sharded

The critic steps on each batch, and the generator on the gradients of two batches. Gradients are clipped before a step.
"""

import argparse

import torch
from digits import build_loaders
from torch import Tensor, nn
from torch.nn.functional import softplus

import treadle as tl


class Gan(tl.TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(16, 128), nn.ReLU(), nn.Linear(128, 64), nn.Sigmoid())
        self.critic = nn.Sequential(nn.Linear(64, 128), nn.LeakyReLU(0.2), nn.Linear(128, 1))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        for_generator, for_critic = self.optimizers()
        real = batch[0].flatten(1)
        fake = self.generator(torch.randn(len(real), 16, device=self.device))

        with self.toggled_optimizer(for_critic):
            critic_loss = (softplus(-self.critic(real)) + softplus(self.critic(fake.detach()))).mean()
            self.manual_backward(critic_loss)
            self.clip_gradients(for_critic, gradient_clip_val=1.0)
            for_critic.step()
            for_critic.zero_grad()

        with self.toggled_optimizer(for_generator):
            self.manual_backward(softplus(-self.critic(fake)).mean() / 2)  # the gradients of two batches add up
            if batch_idx % 2 or self.trainer.is_last_batch:
                self.clip_gradients(for_generator, gradient_clip_val=1.0)
                for_generator.step()
                for_generator.zero_grad()
        self.log("critic_loss", critic_loss, prog_bar=True)
        self.log("distance", (fake.mean(0) - real.mean(0)).norm(), on_epoch=True)

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.Adam(part.parameters(), 2e-3, (0.5, 0.99)) for part in (self.generator, self.critic)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="auto", help="auto, ddp or fsdp")
    parser.add_argument("--max-epochs", type=int, default=20)
    args = parser.parse_args()
    tl.seed_everything(0)
    trainer = tl.Trainer(**vars(args), logger=False, enable_checkpointing=False)
    trainer.fit(Gan(), build_loaders(32 // trainer.world_size)[0])
    trainer.print(f"Distance {trainer.callback_metrics['distance_epoch']:.2f} between the mean images")
