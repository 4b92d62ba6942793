"""Deep Q-learning from a replay buffer: lightning-bolts 0.7.0, models/rl/dqn_model.py.

A walk is played in ``training_step``; an IterableDataset samples from the buffer; the target network is
synced by ``global_step``; the run is bounded by ``max_steps``.
"""

import random
from collections import deque

import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

OFF = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class RLDataset(IterableDataset):
    def __init__(self, buffer, sample_size, rng):
        self.buffer, self.sample_size, self.rng = buffer, sample_size, rng

    def __iter__(self):
        for index in self.rng.choice(len(self.buffer), self.sample_size, replace=False):
            yield self.buffer[index]


class DQN(LightningModule):
    def __init__(self, sync_rate=5, gamma=0.9):
        super().__init__()
        self.save_hyperparameters()
        self.net, self.target_net = (nn.Sequential(nn.Linear(1, 8), nn.ReLU(), nn.Linear(8, 2)) for _ in range(2))
        self.buffer, self.rng = deque(maxlen=200), random.Random(4)
        self.state, self.plays, self.episode_reward, self.total_reward, self.rewards = 0.0, 0, 0.0, 0.0, []
        for _ in range(40):
            self.play(1.0)

    @torch.no_grad()
    def play(self, epsilon):
        explore = self.rng.random() < epsilon
        action = self.rng.randrange(2) if explore else int(self.net(torch.tensor([self.state])).argmax())
        self.plays += 1
        state = self.state + (1 if action else -1) * self.rng.random()
        reward, done = -abs(state - 2), self.plays % 12 == 0
        self.buffer.append((np.float32(self.state), action, np.float32(reward), done, np.float32(state)))
        self.state = 0.0 if done else state
        return reward, done

    def training_step(self, batch, _):
        reward, done = self.play(max(0.1, 1 - self.global_step / 20))
        self.episode_reward += reward
        states, actions, rewards, dones, next_states = batch
        values = self.net(states[:, None]).gather(1, actions[:, None]).squeeze(-1)
        with torch.no_grad():
            next_values = self.target_net(next_states[:, None]).max(1)[0]
            next_values[dones] = 0.0
        loss = nn.functional.mse_loss(values, next_values * self.hparams.gamma + rewards)
        if done:
            self.total_reward, self.episode_reward = self.episode_reward, 0.0
            self.rewards.append(self.total_reward)
        if self.global_step % self.hparams.sync_rate == 0:
            self.target_net.load_state_dict(self.net.state_dict())
        self.log_dict({"train_loss": loss, "reward": reward, "total_reward": float(self.total_reward)})
        return loss

    def configure_optimizers(self):
        return [torch.optim.Adam(self.net.parameters(), lr=0.01)]

    def train_dataloader(self):
        return DataLoader(RLDataset(self.buffer, 16, np.random.default_rng(5)), batch_size=8)


def main(root):
    seed_everything(6)
    model = DQN()
    flags = {"max_epochs": -1, "max_steps": 41, "val_check_interval": None, "log_every_n_steps": 5}
    trainer = Trainer(default_root_dir=root, enable_checkpointing=False, **flags, **OFF)
    trainer.fit(model)
    metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
    return {"rewards": model.rewards, "metrics": metrics, "step": trainer.global_step, "buffer": len(model.buffer)}
