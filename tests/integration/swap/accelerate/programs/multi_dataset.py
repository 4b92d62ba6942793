"""Several datasets dealt batch by batch from one batch sampler: `even_batches` is switched off and on for loaders."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, set_seed
from torch import nn
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, SequentialSampler, TensorDataset


class RoundRobin(BatchSampler):
    def __init__(self, lengths, batch_size):
        super().__init__(SequentialSampler(range(sum(lengths))), batch_size, True)
        self.lengths = lengths

    def __iter__(self):
        starts = [sum(self.lengths[:index]) for index in range(len(self.lengths))]
        for batch in range(min(self.lengths) // self.batch_size):
            for start in starts:
                first = start + batch * self.batch_size
                yield list(range(first, first + self.batch_size))

    def __len__(self):
        return len(self.lengths) * (min(self.lengths) // self.batch_size)


def main(folder):
    accelerator = Accelerator()
    set_seed(12)
    parts = [
        TensorDataset(torch.randn(size, 4) + shift, torch.full((size,), shift))
        for size, shift in ((16, 0.0), (20, 1.0))
    ]
    dataset = ConcatDataset(parts)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-2)
    accelerator.even_batches = False
    train = DataLoader(dataset, batch_sampler=RoundRobin([len(part) for part in parts], 4))
    train = accelerator.prepare(train)
    accelerator.even_batches = True
    evaluation = accelerator.prepare(DataLoader(dataset, batch_size=4, shuffle=False, drop_last=False))
    model, optimizer = accelerator.prepare(model, optimizer)
    losses, kinds = [], []
    for anchors, kind in train:
        embedded = nn.functional.normalize(model(anchors), dim=1)
        scores = embedded @ embedded.detach().flip(0).T
        loss = nn.functional.cross_entropy(scores * 5, torch.arange(len(scores)))
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        kinds.append(accelerator.gather(kind).tolist())
    with torch.no_grad():
        embedded = torch.cat([accelerator.gather_for_metrics(model(x)) for x, _ in evaluation])
    names = ["cosine", accelerator.process_index] if accelerator.is_main_process else [None, None]
    broadcast_object_list(names)
    return {"losses": losses, "kinds": kinds, "rows": len(embedded), "sum": embedded.abs().sum().item(), "names": names}
