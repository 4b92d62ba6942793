"""Programs for a Fabric, Lightning's or ours, in the shapes of its published examples, on handwritten digits.

Each takes the class and the number of processes, and returns numbers that all processes agree on.
"""

import copy
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Subset, TensorDataset

WORDS = 12


def digits(count=400):
    # The file of scikit-learn, whose own import takes seconds in each process.
    folder = Path(importlib.util.find_spec("sklearn").submodule_search_locations[0])
    rows = np.loadtxt(folder / "datasets" / "data" / "digits.csv.gz", delimiter=",", max_rows=count)
    return TensorDataset(torch.tensor(rows[:, :-1]).float() / 16, torch.tensor(rows[:, -1].astype(int)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 10))

    def forward(self, x):
        return F.log_softmax(self.net(x), dim=1)


def begin(Fabric, devices, seed):
    fabric = Fabric(accelerator="cpu", devices=devices)
    fabric.launch()
    fabric.seed_everything(seed)
    return fabric


def evaluate(fabric, model, loader):
    model.eval()
    right = torch.zeros(())
    with torch.no_grad():
        for x, y in loader:
            right += (model(x).argmax(1) == y).sum()
    model.train()
    return fabric.all_reduce(right, reduce_op="sum").item()


def classify(Fabric, devices):
    """Two micro-batches per step, clipped, with a schedule and a checkpoint."""
    fabric = begin(Fabric, devices, 1)
    data = digits()
    train = DataLoader(Subset(data, range(300)), batch_size=32, shuffle=True)
    test = DataLoader(Subset(data, range(300, 400)), batch_size=30)
    train, test = fabric.setup_dataloaders(train, test)
    model = Net()
    optimizer = torch.optim.Adadelta(model.parameters())
    model, optimizer = fabric.setup(model, optimizer)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)
    numbers = []
    for _ in range(2):
        for index, (x, y) in enumerate(train):
            steps = index % 2 == 1
            with fabric.no_backward_sync(model, enabled=not steps):
                loss = F.nll_loss(model(x), y)
                fabric.backward(loss / 2)
            if steps:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        schedule.step()
        numbers += [fabric.all_reduce(loss.detach()).item(), evaluate(fabric, model, test)]
    return numbers


def imitate(Fabric, devices):
    """A generator and a discriminator, each with an optimizer."""
    fabric = begin(Fabric, devices, 3)
    loader = fabric.setup_dataloaders(DataLoader(digits(200), batch_size=20, shuffle=True))
    generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 64), nn.Sigmoid())
    judge = nn.Sequential(nn.Linear(64, 32), nn.LeakyReLU(0.2), nn.Linear(32, 1))
    to_fool = torch.optim.Adam(generator.parameters(), lr=0.002, betas=(0.5, 0.999))
    to_judge = torch.optim.Adam(judge.parameters(), lr=0.002, betas=(0.5, 0.999))
    generator, to_fool = fabric.setup(generator, to_fool)
    judge, to_judge = fabric.setup(judge, to_judge)
    for x, _ in loader:
        to_judge.zero_grad()
        real = judge(x)
        fabric.backward(F.binary_cross_entropy_with_logits(real, torch.ones_like(real)))
        fake = generator(torch.randn(len(x), 8, device=fabric.device))
        verdict = judge(fake.detach())
        on_fake = F.binary_cross_entropy_with_logits(verdict, torch.zeros_like(verdict))
        fabric.backward(on_fake)
        to_judge.step()
        to_fool.zero_grad()
        verdict = judge(fake)
        fooled = F.binary_cross_entropy_with_logits(verdict, torch.ones_like(verdict))
        fabric.backward(fooled)
        to_fool.step()
    return fabric.all_reduce(torch.stack([on_fake.detach(), fooled.detach()])).tolist()


def adapt(Fabric, devices):
    """Meta-learning: an inner step on a copy, its loss's gradient for the model."""
    fabric = begin(Fabric, devices, 4)
    fabric.seed_everything(4 + fabric.global_rank)
    data = digits(300)
    model = nn.Linear(64, 10)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(fabric.broadcast(parameter.detach()))
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(5):
        optimizer.zero_grad()
        for _ in range(2):
            chosen = torch.randperm(300)[:20]
            x, y = fabric.to_device(data[chosen])
            learner = copy.deepcopy(model.module)
            loss = F.cross_entropy(learner(x[:10]), y[:10])
            for parameter, gradient in zip(
                learner.parameters(), torch.autograd.grad(loss, learner.parameters()), strict=True
            ):
                parameter.data -= 0.5 * gradient
            outer = F.cross_entropy(learner(x[10:]), y[10:])
            fabric.backward(outer)
            for parameter, adapted in zip(model.parameters(), learner.parameters(), strict=True):
                parameter.grad = adapted.grad if parameter.grad is None else parameter.grad + adapted.grad
        for parameter in model.parameters():
            parameter.grad = fabric.all_reduce(parameter.grad / 2, reduce_op="mean")
        optimizer.step()
    return [fabric.all_reduce(outer.detach()).item(), model.weight.detach().pow(2).sum().item()]


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 16)
        self.rnn = nn.LSTM(16, 16, batch_first=True)
        self.head = nn.Linear(16, WORDS)

    def forward(self, words):
        return self.head(self.rnn(self.embedding(words))[0])


def write(Fabric, devices):
    """A language model, clipped by value, with its perplexity over all processes."""
    fabric = begin(Fabric, devices, 5)
    with fabric.rank_zero_first(local=False):
        text = torch.arange(1001).pow(2) % WORDS
    rows = TensorDataset(text[:1000].view(-1, 10), text[1:1001].view(-1, 10))
    loader = fabric.setup_dataloaders(DataLoader(rows, batch_size=10, shuffle=True))
    with fabric.init_module():
        model = Words()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=1.0))
    for words, following in loader:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(words).flatten(0, 1), following.flatten())
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, clip_val=0.25)
        optimizer.step()
    return fabric.all_gather(loss.detach()).flatten().tolist()


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.actor, self.critic = nn.Linear(4, 2), nn.Linear(4, 1)

    def act(self, state):
        return torch.distributions.Categorical(logits=self.actor(state)).sample()

    def evaluate_actions(self, state, action):
        spread = torch.distributions.Categorical(logits=self.actor(state))
        return spread.log_prob(action), spread.entropy(), self.critic(state).squeeze(-1)


def play(Fabric, devices):
    """Reinforcement learning: each process plays, all learn from all games; methods of the model are run."""
    fabric = begin(Fabric, devices, 6)
    agent = Agent()
    agent, optimizer = fabric.setup(agent, torch.optim.Adam(agent.parameters(), lr=0.05))
    agent.mark_forward_method("act")
    agent.mark_forward_method("evaluate_actions")
    fabric.seed_everything(60 + fabric.global_rank)
    for _ in range(6):
        with torch.no_grad():
            states = torch.randn(16, 4, device=fabric.device)
            actions = agent.act(states)
            rewards = (actions == (states[:, 0] > 0)).float()
        gathered = fabric.all_gather({"states": states, "actions": actions, "rewards": rewards})
        states, actions, rewards = (value.reshape(-1, *value.shape[1 + (devices > 1) :]) for value in gathered.values())
        mine = slice(fabric.global_rank, None, fabric.world_size)
        logs, entropy, values = agent.evaluate_actions(states[mine], actions[mine])
        advantage = rewards[mine] - values
        loss = -(logs * advantage.detach()).mean() + advantage.pow(2).mean() - 0.01 * entropy.mean()
        optimizer.zero_grad(set_to_none=True)
        fabric.backward(loss)
        fabric.clip_gradients(agent, optimizer, max_norm=0.5)
        optimizer.step()
    return [fabric.all_reduce(rewards.mean()).item(), fabric.all_reduce(loss.detach()).item()]


PROGRAMS = {program.__name__: program for program in (classify, imitate, adapt, write, play)}

if __name__ == "__main__":  # the numbers of Lightning: python fabric_programs.py PROGRAM PROCESSES
    from lightning.fabric import Fabric as Peer

    result = PROGRAMS[sys.argv[1]](Peer, int(sys.argv[2]))
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f'    ("{sys.argv[1]}", {sys.argv[2]}): {result},')
