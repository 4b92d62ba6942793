"""A scikit-learn-like estimator: each part prepared by itself, a criterion too, and a fresh iterator in each epoch."""

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Net:
    def __init__(self, module, accelerator, epochs=2, unwrap_after_train=True):
        self.accelerator, self.epochs, self.unwrap_after_train = accelerator, epochs, unwrap_after_train
        if accelerator.device_placement:
            self.device = None
        self.criterion_ = nn.NLLLoss()
        if accelerator.num_processes == 1:  # Accelerate's DDP on CPUs refuses a module without parameters
            self.criterion_ = accelerator.prepare(self.criterion_)
        self.module_ = accelerator.prepare(module)
        self.optimizer_ = accelerator.prepare(torch.optim.SGD(module.parameters(), lr=0.2, momentum=0.9))
        self.policy_ = accelerator.prepare(torch.optim.lr_scheduler.StepLR(self.optimizer_.optimizer, step_size=3))
        self.history = []

    def get_iterator(self, dataset, training=False):
        size = (8 if training else 6) // self.accelerator.num_processes
        return self.accelerator.prepare(DataLoader(dataset, batch_size=size))

    def train_step(self, batch):
        with self.accelerator.accumulate(self.module_):
            self.optimizer_.zero_grad()
            self.module_.train()
            with self.accelerator.autocast():
                prediction = self.module_(batch[0])
                loss = self.criterion_(prediction.log_softmax(-1), batch[1])
                self.accelerator.backward(loss)
            self.optimizer_.step()
            if not self.accelerator.optimizer_step_was_skipped:
                self.policy_.step()
            return loss

    def fit(self, dataset):
        for _ in range(self.epochs):
            losses = [self.train_step(batch).item() for batch in self.get_iterator(dataset, training=True)]
            self.history.append([sum(losses) / len(losses), self.policy_.get_last_lr()[0]])
        self.accelerator.wait_for_everyone()
        if self.unwrap_after_train:
            self.module_ = self.accelerator.unwrap_model(self.module_, keep_fp32_wrapper=False)
            self.criterion_ = self.accelerator.unwrap_model(self.criterion_, keep_fp32_wrapper=False)
        return self

    def predict(self, dataset):
        self.module_.eval()
        outputs = []
        for inputs, _ in self.get_iterator(dataset):
            with torch.no_grad():
                outputs.append(self.accelerator.gather_for_metrics(self.module_(inputs)))
        return torch.cat(outputs)


def main(folder):
    AcceleratorState._reset_state()
    results = {}
    for steps in (1, 2):
        accelerator = Accelerator(gradient_accumulation_steps=steps)
        torch.manual_seed(31)
        x = torch.randn(32, 5)
        dataset = TensorDataset(x, (x.sum(1) > 0).long())
        net = Net(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2)), accelerator).fit(dataset)
        predictions = net.predict(TensorDataset(x[:15], x[:15]))
        results[f"{steps}"] = {
            "history": net.history,
            "predictions": predictions[:15].abs().sum().item(),
            "rows": len(predictions),
            "module": type(net.module_).__name__,
            "criterion": type(net.criterion_).__name__,
        }
    return results
