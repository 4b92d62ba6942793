"""Two trainers after each other on one accelerator: fine-tuning, then preferences against a frozen copy."""

import copy

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class SFT:
    def __init__(self, model, accelerator, train, valid):
        self.accelerator, self.epochs = accelerator, 1
        size = 8 // accelerator.num_processes
        loaders = DataLoader(train, batch_size=size, drop_last=True), DataLoader(valid, batch_size=size)
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-2)
        self.model, self.optimizer, self.train, self.valid = accelerator.prepare(model, optimizer, *loaders)

    def __call__(self):
        losses = []
        for x, y in self.train:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            losses.append(self.accelerator.gather(loss.detach()).mean().item())
        total, count = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for x, y in self.valid:
                total += nn.functional.cross_entropy(self.model(x), y).item() * len(y)
                count += len(y)
        total, count = self.accelerator.reduce(torch.tensor([total, count])).tolist()
        return losses, total / count


class DPO(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.policy, self.reference = model, copy.deepcopy(model).requires_grad_(False)

    def forward(self, x, chosen, rejected):
        def margin(net):
            log = net(x).log_softmax(-1)
            return (log.gather(1, chosen[:, None]) - log.gather(1, rejected[:, None])).squeeze(1)

        return -nn.functional.logsigmoid(0.5 * (margin(self.policy) - margin(self.reference))).mean()

    def parameters(self, recurse=True):
        return self.policy.parameters(recurse)


def main(folder):
    accelerator = Accelerator()
    torch.manual_seed(17)
    model = nn.Linear(4, 3)
    x, y = torch.randn(64, 4), torch.randint(0, 3, (64,))
    sft = SFT(model, accelerator, TensorDataset(x[:40], y[:40]), TensorDataset(x[40:56], y[40:56]))
    losses, valid = sft()
    accelerator.wait_for_everyone()
    dpo = DPO(accelerator.unwrap_model(sft.model))
    optimizer = torch.optim.AdamW(dpo.parameters(), lr=2e-2)
    dpo, optimizer = accelerator.prepare(dpo, optimizer)
    pairs = TensorDataset(x, y, (y + 1) % 3)
    loader = accelerator.prepare(DataLoader(pairs, batch_size=8 // accelerator.num_processes, drop_last=True))
    preferences, batches = [], iter(loader)
    for _ in range(4):
        for _ in range(2):
            loss = dpo(*next(batches))
            accelerator.backward(loss / 2)
            preferences.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.clip_grad_norm_(accelerator.unwrap_model(dpo).policy.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return {"losses": losses, "valid": valid, "preferences": preferences, "weight": model.weight.abs().sum().item()}
