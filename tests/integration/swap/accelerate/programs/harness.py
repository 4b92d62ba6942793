"""An evaluation harness: requests of each process, counts gathered, the shorter ones padded; logits gathered."""

from datetime import timedelta

import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from accelerate.utils import gather_object, pad_across_processes, set_seed
from torch import nn


class LM:
    def __init__(self, model):
        accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=timedelta(weeks=52))])
        self.accelerator, self.rank, self.world_size = accelerator, 0, 1
        if accelerator.num_processes > 1:
            model = accelerator.prepare_model(model, evaluation_mode=True)
            self.rank, self.world_size = accelerator.local_process_index, accelerator.num_processes
        self._model, self.device = model.to(accelerator.device), torch.device(f"{accelerator.device}")

    @property
    def model(self):
        return self.accelerator.unwrap_model(self._model)

    def all_gather(self, tensor):
        return tensor if self.world_size <= 1 else self.accelerator.gather(tensor)

    @torch.no_grad()
    def loglikelihood(self, requests):
        return [self.model(request.to(self.device)).log_softmax(-1)[:, 0].sum().item() for request in requests]


def main(folder):
    set_seed(1234)
    lm = LM(nn.Linear(3, 5))
    requests = [torch.randn(1 + index % 4, 3) for index in range(9)]
    mine = requests[lm.rank :: lm.world_size]
    counts = lm.all_gather(torch.tensor(len(mine), device=lm.device)).cpu().detach().numpy().tolist()
    counts = counts if isinstance(counts, list) else [counts]
    mine = mine + [mine[-1]] * (max(counts) - counts[lm.rank])
    results = lm.loglikelihood(mine)[: counts[lm.rank]]
    everything = gather_object([results])
    with torch.no_grad():
        logits = lm.model(torch.cat(mine))
    padded = pad_across_processes(logits, dim=0, pad_index=-100)
    if lm.world_size > 1:
        lm.accelerator.wait_for_everyone()
    return {
        "counts": counts,
        "everything": everything,
        "padded": list(padded.shape),
        "ends": padded[-1].tolist(),
        "gathered": lm.all_gather(padded).sum().item(),
    }
