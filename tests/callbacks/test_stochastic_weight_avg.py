"""Stochastic weight averaging, against torch's own parts in a loop by hand."""

import pytest
import torch
import torchmetrics
from support import averaged_runs
from support.callback_runs import loader, trainer
from support.processes import run
from torch import nn
from torch.optim.swa_utils import SWALR, AveragedModel, update_bn
from treadle.callbacks import Callback, EarlyStopping, LambdaCallback, ModelCheckpoint, StochasticWeightAveraging

import treadle


class Task(averaged_runs.Task):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


def swa(**more):
    return StochasticWeightAveraging(**{"swa_lrs": 0.02, "swa_epoch_start": 3, "annealing_epochs": 2} | more)


def fit(root, *callbacks, task=None, **flags):
    return averaged_runs.fit(root, *callbacks, task=task or Task(), **{"max_epochs": 6} | flags)


@pytest.mark.parametrize(("strategy", "annealing"), [("cos", 0), ("cos", 2), ("linear", 2)])
def test_as_torch_does_it(tmp_path, strategy, annealing):
    averaging, found = swa(annealing_strategy=strategy, annealing_epochs=annealing), []
    notes = LambdaCallback(on_train_epoch_start=lambda t, _: found.append(t.optimizers[0].param_groups[0]["lr"]))
    _, task = fit(tmp_path, averaging, notes)
    model = Task()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    usual = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    averaged, annealed, rates = AveragedModel(model), None, []
    for epoch in range(6):
        if epoch == 2:
            annealed = SWALR(optimizer, 0.02, annealing, strategy)
        rates.append(optimizer.param_groups[0]["lr"])
        for (x,) in loader(12, 3):
            optimizer.zero_grad()
            model.net(x).pow(2).mean().backward()
            optimizer.step()
        if annealed is None:
            usual.step()
        else:
            averaged.update_parameters(model)
            annealed.step()
    update_bn(loader(12, 3), averaged.module.net)
    assert found == pytest.approx(rates)
    for name, value in averaged.module.state_dict().items():
        assert torch.allclose(task.state_dict()[name].float(), value.float(), atol=1e-5), name
    assert averaging.n_averaged == 4


@pytest.mark.parametrize("epoch", [pytest.param(1, marks=pytest.mark.exhaustive), 3])
def test_a_run_that_goes_on_is_the_one_that_never_stopped(tmp_path, epoch):
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1)
    _, whole = fit(tmp_path, swa(), saver)
    for step in (4 * epoch + 4, 4 * epoch + 2):  # at an epoch's end, and within it
        path = next(p for p in (tmp_path / "c").iterdir() if p.name.endswith(f"step={step}.ckpt"))
        _, task = fit(tmp_path, swa(), ckpt_path=path)
        assert all(torch.equal(task.state_dict()[name], value) for name, value in whole.state_dict().items())


def test_unequal_batches_weigh_what_they_hold_and_a_next_fit_draws_the_same(tmp_path):
    made, task = fit(tmp_path, swa(), samples=11)
    inputs = torch.cat([x for (x,) in loader(11, 3)])
    hidden = task.net[0](inputs)
    parts = hidden.split(3)
    mean = sum(part.mean(0) * len(part) for part in parts) / 11
    assert torch.allclose(task.net[1].running_mean, mean, atol=1e-6)
    assert task.net[1].momentum == 0.1
    assert made.sources.train.epoch == 6


def test_a_run_that_is_stopped_early_ends_with_the_averages(tmp_path):
    averaging = swa()
    fit(tmp_path, averaging, EarlyStopping("val_loss", stopping_threshold=1e9), min_epochs=4)
    assert averaging.n_averaged == 2


def test_groups_that_join_later_are_annealed_from_their_own_rate(tmp_path):
    class Grows(Callback):
        def on_train_epoch_start(self, trainer, task):
            if trainer.current_epoch == 3:
                trainer.optimizers[0].add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": 0.5})

        def on_train_batch_start(self, trainer, *_):
            rates[trainer.current_epoch] = [group["lr"] for group in trainer.optimizers[0].param_groups]

    rates = {}
    fit(tmp_path, Grows(), swa(swa_epoch_start=3, annealing_epochs=4, annealing_strategy="linear"))
    assert rates[2] == pytest.approx([0.1 * 0.9**2])
    assert [rates[epoch][1] for epoch in (3, 4, 5)] == pytest.approx([0.5 + (0.02 - 0.5) * n / 4 for n in (1, 2, 3)])


def test_the_pass_for_the_statistics_leaves_the_tasks_metrics_alone(tmp_path):
    class Measured(Task):
        def __init__(self):
            super().__init__()
            self.mean = torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.mean.update(1.0)
            self.log("mean", self.mean, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    _, task = fit(tmp_path, swa(), task=Measured())
    assert float(task.mean.weight) == 0  # the next fit begins with nothing


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="fraction of max_epochs"):
        fit(tmp_path, swa(swa_epoch_start=0.5), max_epochs=-1, max_steps=4)
    with pytest.raises(ValueError, match="2 rates for 1 parameter group"):
        fit(tmp_path, swa(swa_lrs=[0.1, 0.1]))
    for wrong in ({"swa_epoch_start": 1.5}, {"swa_epoch_start": 0}, {"swa_lrs": 0}, {"annealing_strategy": "sine"}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            swa(**wrong)


def on_two(root, strategy):
    treadle.seed_everything(1)
    task = Task()
    trainer(root, swa(), strategy=strategy, max_epochs=4).fit(task, loader(12, 3))
    state = {n: v.full_tensor() if hasattr(v, "full_tensor") else v for n, v in task.state_dict().items()}
    return {name: value.detach().clone() for name, value in state.items()}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_two_processes_have_one_model_and_the_statistics_of_all_data(tmp_path, strategy):
    first, second = run(on_two, 2, str(tmp_path), strategy)
    assert all(torch.equal(first[name], second[name]) for name in first if "tracked" not in name)
    hidden = torch.cat([x for (x,) in loader(12, 3)]) @ first["net.0.weight"].T + first["net.0.bias"]
    assert torch.allclose(first["net.1.running_mean"], hidden.mean(0), atol=1e-6)
