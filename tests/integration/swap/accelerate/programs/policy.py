"""Policy optimization: a frozen reference, rewards and texts gathered, completions of unequal length padded."""

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather, gather_object, is_peft_model, set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def nanmin(tensor):
    return tensor[~torch.isnan(tensor)].min()


def main(folder):
    accelerator = Accelerator()
    set_seed(3)
    policy, reference = nn.Linear(4, 3), nn.Linear(4, 3)
    reference.load_state_dict(policy.state_dict())
    reference = accelerator.prepare_model(reference, evaluation_mode=True)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=5e-2)
    policy, optimizer = accelerator.prepare(policy, optimizer)
    accelerator.dataloader_config.dispatch_batches = False
    prompts = TensorDataset(torch.randn(32, 4), torch.arange(32))
    loader = accelerator.prepare(DataLoader(prompts, batch_size=8 // accelerator.num_processes))
    results = {"peft": bool(is_peft_model(policy)), "rewards": [], "kl": [], "losses": [], "texts": [], "lengths": []}
    for inputs, numbers in loader:
        actions = (numbers % 3)[:, None]
        lengths = 1 + numbers % 4
        texts = gather_object([f"text {number}" for number in numbers.tolist()])
        sent = texts if accelerator.is_main_process else [None] * len(texts)
        broadcast_object_list(sent, from_process=0)
        results["texts"].append(" ".join(sent))
        rewards = gather((inputs.sum(1) > 0).float() + 0.1 * actions.squeeze(1))
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-4)
        mine = slice(accelerator.process_index * len(inputs), (accelerator.process_index + 1) * len(inputs))
        logps = policy(inputs).log_softmax(-1).gather(1, actions).squeeze(1)
        with torch.no_grad():
            ref_logps = reference(inputs).log_softmax(-1).gather(1, actions).squeeze(1)
        kl = torch.exp(ref_logps - logps) - (ref_logps - logps) - 1
        loss = (-(torch.exp(logps - logps.detach()) * advantages[mine]) + 0.04 * kl).mean()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(policy.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        tokens = torch.arange(int(lengths.max())).expand(len(inputs), -1).clone()
        padded = accelerator.pad_across_processes(tokens, dim=1, pad_index=9)
        results["lengths"].append([accelerator.gather(lengths).sum().item(), accelerator.gather(padded).sum().item()])
        results["rewards"].append(rewards.mean().item())
        results["kl"].append(accelerator.gather_for_metrics(kl.mean()).mean().item())
        results["losses"].append(
            [accelerator.gather(loss.detach()).nanmean().item(), nanmin(accelerator.gather(logps)).item()]
        )
        totals = accelerator.reduce(torch.stack([kl.sum().detach(), torch.tensor(float(len(kl)))]), reduction="sum")
        results["losses"][-1] += totals.tolist()
    return results
