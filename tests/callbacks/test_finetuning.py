"""Parts of a model that are trained later."""

import copy
from contextlib import nullcontext

import pytest
import torch
from support.callback_runs import loader, trainer
from support.processes import run
from torch import nn
from treadle.callbacks import BackboneFinetuning, BaseFinetuning, ModelCheckpoint
from treadle.strategies import DDP

import treadle


class Task(treadle.TaskModule):
    def __init__(self, filtered=True):
        super().__init__()
        torch.manual_seed(3)
        self.backbone = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh())
        self.head = nn.Linear(4, 1)
        self.filtered = filtered
        self.trained, self.rates, self.modes = [], [], []

    def training_step(self, batch, batch_idx):
        self.modes.append(self.backbone[1].training)
        return (self.head(self.backbone(batch[0])) - 1).pow(2).mean()

    def on_before_zero_grad(self, optimizer):
        self.trained.append(self.backbone[0].weight.grad is not None)
        self.rates.append([group["lr"] for group in optimizer.param_groups])

    def configure_optimizers(self):
        parameters = [p for p in self.parameters() if p.requires_grad or not self.filtered]
        return torch.optim.Adam(parameters, lr=0.1)


class Stages(BaseFinetuning):
    """The head; from epoch 1 on the first layer, and from epoch 2 on its normalization."""

    def freeze_before_training(self, pl_module):
        self.freeze(pl_module.backbone, train_bn=False)

    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone[0], optimizer, lr=0.03)
        if epoch == 2:
            self.unfreeze_and_add_param_group(pl_module.backbone[1], optimizer, initial_denom_lr=2)


def fit(root, *callbacks, ckpt_path=None, task=None, **flags):
    task = task or Task()
    made = trainer(root, *callbacks, **{"max_epochs": 4} | flags)
    made.fit(task, loader(6, 3), ckpt_path=ckpt_path)
    return made, task


def test_stages_as_by_hand(tmp_path):
    _, task = fit(tmp_path, Stages())
    model = Task()
    model.backbone.requires_grad_(False)
    model.backbone[1].eval()
    optimizer = torch.optim.Adam(model.head.parameters(), lr=0.1)
    for epoch in range(4):
        if epoch == 1:
            model.backbone[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(model.backbone[0].parameters()), "lr": 0.03})
        if epoch == 2:
            model.backbone[1].requires_grad_(True).train()
            optimizer.add_param_group({"params": list(model.backbone[1].parameters()), "lr": 0.05})
        for (x,) in loader(6, 3):
            optimizer.zero_grad()
            (model.head(model.backbone(x)) - 1).pow(2).mean().backward()
            optimizer.step()
    assert all(torch.equal(task.state_dict()[name], value) for name, value in model.state_dict().items())
    assert task.modes == [False] * 4 + [True] * 4


def test_a_backbone_joins_and_its_rate_grows(tmp_path):
    tuning = BackboneFinetuning(2, lambda_func=lambda epoch: 4.0, backbone_initial_ratio_lr=0.1)
    _, task = fit(tmp_path, tuning, max_epochs=5)
    assert task.trained == [False] * 4 + [True] * 6
    assert [rates[1:] for rates in task.rates[::2]] == [[], [], [pytest.approx(0.01)], [pytest.approx(0.04)], [0.1]]
    assert all(task.modes)  # train_bn


class WithoutNorm(Stages):
    def finetune_function(self, pl_module, epoch, optimizer):
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone, optimizer, train_bn=False)


@pytest.mark.parametrize("make", [WithoutNorm, lambda: BackboneFinetuning(1, train_bn=False)], ids=["base", "backbone"])
def test_train_bn_false_keeps_batch_norm_as_it_is(tmp_path, make, caplog):
    before = {name: value.clone() for name, value in Task().backbone[1].state_dict().items()}
    made, task = fit(tmp_path, make())
    norm = task.backbone[1]
    assert all(torch.equal(norm.state_dict()[name], value) for name, value in before.items())
    assert [parameter.requires_grad for parameter in task.backbone.parameters()] == [True, True, False, False]
    assert [len(group["params"]) for group in made.optimizers[0].param_groups] == [2, 2]
    assert task.modes == [False] * 8
    assert ("train_bn=False keeps 1 BatchNorm layer in the backbone frozen" in caplog.text) == (make is not WithoutNorm)


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(Stages, id="base", marks=pytest.mark.exhaustive),
        pytest.param(lambda: BackboneFinetuning(1, train_bn=False), id="backbone"),
    ],
)
def test_a_run_that_goes_on_is_the_one_that_never_stopped(tmp_path, make):
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1)
    made, whole = fit(tmp_path, make(), saver)
    expected = copy.deepcopy(made.optimizers[0].state_dict())
    for path in sorted((tmp_path / "c").iterdir()):
        again, task = fit(tmp_path, make(), ckpt_path=path)
        assert all(torch.equal(task.state_dict()[name], value) for name, value in whole.state_dict().items()), path
        assert again.optimizers[0].state_dict()["param_groups"] == expected["param_groups"]
        assert [p.requires_grad for p in task.parameters()] == [p.requires_grad for p in whole.parameters()]


class TwoOptimizers(Task):
    automatic_optimization = False

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        for optimizer in self.optimizers():
            optimizer.step()
            optimizer.zero_grad()

    def configure_optimizers(self):
        return [torch.optim.SGD(self.head.parameters(), lr=0.1), torch.optim.SGD(self.backbone[1].parameters(), lr=0.2)]


def test_of_several_optimizers_a_subclass_selects_one(tmp_path):
    class First(BackboneFinetuning):
        def finetune_function(self, pl_module, epoch, optimizer):
            if optimizer is pl_module.trainer.optimizers[0]:
                super().finetune_function(pl_module, epoch, optimizer)

    made, _ = fit(tmp_path, First(1, should_align=False), task=TwoOptimizers())
    assert [len(optimizer.param_groups) for optimizer in made.optimizers] == [2, 1]
    assert made.optimizers[0].param_groups[1]["lr"] == pytest.approx(0.1 * 0.1 * 2**2)


def test_what_is_refused(tmp_path):
    class Other(treadle.TaskModule):
        training_step = configure_optimizers = lambda *_: None

    with pytest.raises(ValueError, match="needs a module named 'backbone'"):
        trainer(tmp_path, BackboneFinetuning()).fit(Other(), loader())
    with pytest.raises(ValueError, match="returned 2 optimizers, and BackboneFinetuning would add"):
        fit(tmp_path, BackboneFinetuning(), task=TwoOptimizers())
    with pytest.raises(ValueError, match="a sharded model must train"):
        fit(tmp_path, Stages(), strategy="fsdp")
    with pytest.raises(NotImplementedError, match="freeze_before_training"):
        fit(tmp_path, BaseFinetuning())


def test_an_optimizer_of_all_parameters_trains_as_one_that_was_filtered(tmp_path):
    def train(filtered, **flags):
        task, kept = Task(filtered=filtered), ModelCheckpoint(tmp_path / str(filtered), "{epoch}", save_top_k=-1)
        made = trainer(tmp_path, BackboneFinetuning(1), *([] if flags else [kept]), max_epochs=3)
        made.fit(task, loader(), **flags)
        groups = made.optimizers[0].param_groups
        return [p.tolist() for p in task.parameters()], [(len(group["params"]), group["lr"]) for group in groups]

    expected = train(True)
    with pytest.warns(UserWarning, match="of the frozen backbone to an optimizer. BackboneFinetuning removes them"):
        assert train(False) == expected
    for epoch in (0, 1):
        assert train(False, ckpt_path=tmp_path / "False" / f"epoch={epoch}.ckpt") == expected


@pytest.mark.parametrize("in_sequence", [False, True])
def test_a_scheduler_that_has_no_rate_for_the_backbone_is_named(tmp_path, in_sequence):
    class Scheduled(Task):
        def configure_optimizers(self):
            optimizer, kinds = super().configure_optimizers(), torch.optim.lr_scheduler
            scheduler = kinds.LambdaLR(optimizer, lambda epoch: 0.9**epoch)
            if in_sequence:
                scheduler = kinds.SequentialLR(optimizer, [scheduler, kinds.ConstantLR(optimizer)], [9])
            return [optimizer], [scheduler]

    probe = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(probe, lambda epoch: 1.0)
    probe.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    probe.step()
    expected = nullcontext()
    try:
        scheduler.step()
    except ValueError:  # this torch can't; older ones leave the other groups as they are
        words = r"LR has learning rates for only 1 of the 2 parameter groups .* BackboneFinetuning\. .*ExponentialLR"
        expected = pytest.raises(ValueError, match=words)
    with expected:
        fit(tmp_path, BackboneFinetuning(1), task=Scheduled())


def test_nested_modules_are_found_once():
    shared = nn.Linear(1, 1)
    nested = [nn.ModuleDict({"a": shared, "b": nn.Sequential(nn.Linear(1, 1), nn.ReLU())}), [shared]]
    flat = BaseFinetuning.flatten_modules(nested)
    assert [type(part).__name__ for part in flat] == ["Linear", "Linear", "ReLU"]
    assert len(list(BaseFinetuning.filter_params(nested))) == 4


def in_a_world(root):
    """Train whole with DDP and with sharded optimizer states, and resume both from some of their checkpoints."""

    def train(folder, ckpt_path=None, zero=False):
        saver = [] if ckpt_path else [ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)]
        treadle.seed_everything(1)
        _, task = fit(root, Stages(), *saver, strategy=DDP(zero=zero), ckpt_path=ckpt_path)
        return {name: value.clone() for name, value in task.state_dict().items()}, task.trained

    plain, zero = root / "plain", root / "zero"
    (whole, trained), (sharded, _) = train(plain), train(zero, zero=True)
    resumed = [train(None, plain / f"step={step}.ckpt")[0] for step in (1, 2)]
    return whole, trained, sharded, [*resumed, train(None, zero / "step=2.ckpt", zero=True)[0]]


@pytest.mark.long
def test_two_processes_reduce_what_joins_later(tmp_path):
    (whole, trained, _, resumed), (other, _, sharded, _) = run(in_a_world, 2, tmp_path)
    for same in (other, sharded):
        assert all(torch.equal(whole[name], same[name]) for name in whole if "running" not in name)
    for again in resumed:
        assert all(torch.equal(whole[name], again[name]) for name in whole)
    assert trained == [False] * 1 + [True] * 3
