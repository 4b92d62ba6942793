"""A model behind a forwarding wrapper, trackers looked through by class, `autocast` and `no_sync` combined."""

from contextlib import contextmanager, nullcontext
from functools import partial, wraps

import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, WandBTracker
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


@contextmanager
def combine_contexts(a, b):
    with a() as one, b() as two:
        yield one, two


def forward_contexts(accelerator, model, steps):
    for i in range(steps):
        yield partial(
            combine_contexts,
            accelerator.autocast,
            nullcontext if i == steps - 1 else partial(accelerator.no_sync, model),
        )


class Forwarding:
    def __init__(self, parent, child):
        self.parent, self.child = parent, child

    def __getattr__(self, key):
        return getattr(self.parent, key) if hasattr(self.parent, key) else getattr(self.child, key)

    def __call__(self, *args, **kwargs):
        return self.__getattr__("__call__")(*args, **kwargs)


def auto_unwrap(klass):
    init = klass.__init__

    @wraps(init)
    def __init__(self, *args, **kwargs):
        init(self, *args, **kwargs)
        assert isinstance(self.accelerator, Accelerator)
        self.model = Forwarding(self.model, self.accelerator.unwrap_model(self.model))

    klass.__init__ = __init__
    return klass


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self):
        super().__init__()
        self.rows, self.config = [], None

    @property
    def tracker(self):
        return self.rows

    def store_init_configuration(self, values):
        self.config = values

    def log(self, values, step=None, **kwargs):
        self.rows.append([step, *values.values()])


class Autoencoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.net, self.codebook_size = nn.Linear(4, 4), 12

    def forward(self, *, vertices, faces):
        recon = (self.net(vertices) - vertices).pow(2).mean()
        commit = faces.float().mean() * self.net.bias.pow(2).sum()
        return recon + commit, (recon, commit)


@auto_unwrap
class Trainer:
    def __init__(self, model, dataset, **accelerator_kwargs):
        self.accelerator = Accelerator(**accelerator_kwargs)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(dataset, batch_size=8 // self.accelerator.num_processes, drop_last=True)
        self.model, self.loader = self.accelerator.prepare(model, loader)
        self.optimizer = self.accelerator.prepare(self.optimizer)

    def train(self, steps):
        batches, norms = iter(self.loader), []
        for step in range(steps):
            for context in forward_contexts(self.accelerator, self.model.parent, 2):
                vertices, faces = next(batches)
                with context():
                    total, (recon, commit) = self.model(vertices=vertices, faces=faces)
                    self.accelerator.backward(total / 2)
            logged = [self.accelerator.reduce(value.detach(), "mean").item() for value in (total, recon, commit)]
            self.accelerator.log(dict(zip(("total", "recon", "commit"), logged, strict=True)), step=step)
            norms.append(float(self.accelerator.clip_grad_norm_(self.model.parameters(), 0.3)))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return norms


def main(folder):
    torch.manual_seed(13)
    dataset = TensorDataset(torch.randn(48, 4), torch.randint(0, 5, (48, 3)))
    trainer = Trainer(Autoencoder(), dataset, log_with=Kept())
    accelerator = trainer.accelerator
    accelerator.init_trackers("mesh", config={"lr": 1e-2})
    found = next((each for each in accelerator.trackers if isinstance(each, WandBTracker)), None)
    norms = trainer.train(3)
    main_process = accelerator.is_main_process
    kept = accelerator.get_tracker("kept") if main_process else None
    results = {"norms": norms, "wandb": found is not None, "codebook": trainer.model.codebook_size}
    if main_process:
        results |= {
            "rows": kept.rows,
            "config": kept.config,
            "unwrapped": len(accelerator.get_tracker("kept", unwrap=True)),
        }
    accelerator.end_training()
    return results
