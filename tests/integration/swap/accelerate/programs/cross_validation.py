"""Cross validation: objects prepared anew for each fold on one accelerator, predictions gathered and averaged."""

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset


def main(folder):
    set_seed(61)
    accelerator = Accelerator(cpu=True, mixed_precision="no")
    x = torch.randn(48, 4)
    dataset = TensorDataset(x, (x[:, 0] > 0).long())
    size = 4 // accelerator.num_processes
    folds, results, test_predictions, test_references = 3, {"losses": [], "accuracy": []}, [], []
    for fold in range(folds):
        valid = set(range(fold * 12, fold * 12 + 12))
        train_loader = DataLoader(Subset(dataset, [i for i in range(36) if i not in valid]), batch_size=size)
        valid_loader = DataLoader(Subset(dataset, sorted(valid)), batch_size=size)
        test_loader = DataLoader(Subset(dataset, range(37, 48)), batch_size=size)
        set_seed(100 + fold)
        model = nn.Linear(4, 2).to(accelerator.device)
        optimizer = torch.optim.AdamW(params=model.parameters(), lr=5e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=len(train_loader))
        model, optimizer, train_loader, valid_loader, test_loader, scheduler = accelerator.prepare(
            model, optimizer, train_loader, valid_loader, test_loader, scheduler
        )
        for inputs, targets in train_loader:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            results["losses"].append(accelerator.gather(loss.detach()).mean().item())
        model.eval()
        right = count = 0
        for inputs, targets in valid_loader:
            with torch.no_grad():
                predictions = model(inputs).argmax(-1)
            predictions, references = accelerator.gather_for_metrics((predictions, targets))
            right, count = right + (predictions == references).sum().item(), count + len(references)
        results["accuracy"].append([right / count, count])
        found = []
        for inputs, targets in test_loader:
            with torch.no_grad():
                logits = model(inputs)
            logits, references = accelerator.gather_for_metrics((logits, targets))
            found.append(logits.cpu())
            if fold == 0:
                test_references.append(references.cpu())
        test_predictions.append(torch.cat(found, dim=0))
        accelerator.free_memory()
    references = torch.cat(test_references, dim=0)
    mean = torch.stack(test_predictions, dim=0).sum(dim=0).div(folds)
    results |= {
        "test": mean.sum().item(),
        "rows": len(references),
        "right": (mean.argmax(-1) == references).sum().item(),
    }
    return results
