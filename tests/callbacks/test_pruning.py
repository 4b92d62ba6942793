"""Pruning, against torch's own functions in a loop by hand."""

import pytest
import torch
from support.callback_runs import loader, trainer
from support.failing_runs import Fails
from support.processes import run
from torch import nn
from torch.nn.utils import prune
from treadle.callbacks import (
    Callback,
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    averaged_weights,
)

import treadle


class Task(treadle.TaskModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - 1).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val", self.net(batch[0]).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.02)


def fit(root, *callbacks, ckpt_path=None, validate=True, **flags):
    task = Task()
    made = trainer(root, *callbacks, **{"max_epochs": 3} | flags)
    made.fit(task, loader(6, 3), loader(2) if validate else None, ckpt_path=ckpt_path)
    return made, task


def zeros(task):
    return sum(int((p == 0).sum()) for p in task.parameters())


@pytest.mark.parametrize("lottery", [False, True])
@pytest.mark.parametrize("whole", [True, False], ids=["global", "local"])
def test_as_torch_does_it(tmp_path, lottery, whole):
    pruning = ModelPruning(
        "l1_unstructured",
        amount=0.3,
        parameter_names=["weight"],
        use_global_unstructured=whole,
        use_lottery_ticket_hypothesis=lottery,
    )
    _, task = fit(tmp_path, pruning)
    model = Task()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    layers = [model.net[0], model.net[2]]
    first = [layer.weight.detach().clone() for layer in layers]
    for _ in range(3):
        for (x,) in loader(6, 3):
            optimizer.zero_grad()
            (model.net(x) - 1).pow(2).mean().backward()
            optimizer.step()
        model.net(x)  # torch compares what the last forward saw; we what the last step left
        if whole:
            prune.global_unstructured([(layer, "weight") for layer in layers], prune.L1Unstructured, amount=0.3)
        else:
            for layer in layers:
                prune.l1_unstructured(layer, "weight", amount=0.3)
        for layer, value in zip(layers, first, strict=True) if lottery else ():
            layer.weight_orig.data.copy_(value)
    for layer in layers:
        prune.remove(layer, "weight")
    assert set(task.state_dict()) == set(Task().state_dict())
    assert all(torch.equal(task.state_dict()[name], value) for name, value in model.state_dict().items())
    assert zeros(task) >= 12


@pytest.mark.long
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param({"pruning_fn": "random_unstructured", "amount": 0.3}, marks=pytest.mark.exhaustive),
        {"pruning_fn": "l1_unstructured", "amount": lambda epoch: 1 + epoch, "prune_on_train_epoch_end": False},
        {
            "pruning_fn": "ln_structured",
            "use_global_unstructured": False,
            "pruning_dim": 0,
            "pruning_norm": 2,
            "parameter_names": ["weight"],
            "amount": 1,
            "apply_pruning": lambda epoch: epoch == 1,
            "use_lottery_ticket_hypothesis": lambda epoch: False,
        },
    ],
    ids=["random", "growing", "structured"],
)
def test_a_run_that_goes_on_is_the_one_that_never_stopped(tmp_path, arguments):
    treadle.seed_everything(5)
    validate = "prune_on_train_epoch_end" in arguments
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1)
    _, whole = fit(tmp_path, ModelPruning(**arguments, make_pruning_permanent=False), saver, validate=validate)
    for path in sorted((tmp_path / "c").iterdir()):
        pruning = ModelPruning(**arguments, make_pruning_permanent=False)
        _, task = fit(tmp_path, pruning, ckpt_path=path, validate=validate)
        state = dict(task.named_parameters()) | dict(task.named_buffers())
        for name, value in (*whole.named_parameters(), *whole.named_buffers()):
            assert torch.equal(state[name], value), (path, name)


def test_a_checkpoint_loads_into_a_model_that_nobody_has_pruned(tmp_path):
    pruning = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False, verbose=2)
    made, task = fit(tmp_path, pruning, ModelCheckpoint(tmp_path / "c"))
    plain = Task.load_from_checkpoint(made.checkpoint_callback.best_model_path)
    assert zeros(plain) > 20
    assert all(torch.equal(plain.state_dict()[name], value) for name, value in task.state_dict().items())
    again = plain.state_dict()
    masks = {name: mask.clone() for name, mask in task.named_buffers()}
    again["net.0.weight"][:2] = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    task.load_state_dict(again)  # the masks stay, but all that is loaded counts
    assert all(torch.equal(task.state_dict()[name], value) for name, value in again.items())
    assert torch.equal(task.net[0].weight_mask[2:], masks["net.0.weight_mask"][2:])
    assert torch.equal(task.net[2].weight_mask, masks["net.2.weight_mask"])
    made.validate(task, loader(2), ckpt_path=made.checkpoint_callback.best_model_path, verbose=False)


# -- beside other callbacks, and again ---------------------------------------------------------------------------------


def trained(**more):
    arguments = {"amount": 0.5, "use_lottery_ticket_hypothesis": False, "parameter_names": ["weight"]}
    return ModelPruning("l1_unstructured", **arguments | more)


class Masked(Callback):
    """Notes the model's masks at the end, and the weights after each step."""

    def __init__(self):
        self.steps, self.masks = [], {}

    def on_step_end(self, trainer, task):
        pairs = [(task.net[n], getattr(task.net[n], "weight_orig", task.net[n].weight)) for n in (0, 2)]
        self.steps.append([weight.detach().clone() for _, weight in pairs])

    def on_train_end(self, trainer, task):
        self.masks = {n: task.net[n].weight_mask.clone() for n in (0, 2)}


@pytest.mark.parametrize("kind", ["ema", pytest.param("swa", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("first", ["pruning", "averages"])
def test_averages_are_pruned_in_either_order(tmp_path, kind, first):
    def callbacks(folder):
        one = EMAWeightAveraging(decay=0.5) if kind == "ema" else StochasticWeightAveraging(0.02, swa_epoch_start=1)
        pair = [trained(), one] if first == "pruning" else [one, trained()]
        return [*pair, ModelCheckpoint(tmp_path / folder, save_top_k=-1, filename="{epoch}")]

    notes = Masked()
    _, task = fit(tmp_path, notes, *callbacks("a"))
    assert set(task.state_dict()) == set(Task().state_dict())
    for place, n in enumerate((0, 2)):
        steps = [weights[place] for weights in notes.steps]
        if kind == "ema":
            average = steps[0]
            for value in steps[1:]:
                average = 0.5 * average + 0.5 * value
        else:
            average = torch.stack(steps[1::2]).mean(0)
        assert torch.allclose(task.net[n].weight, average * notes.masks[n], atol=1e-6)
        assert (notes.masks[n] == 0).any()
    for epoch in (0, 1):
        path = tmp_path / "a" / f"epoch={epoch}.ckpt"
        fresh, averaged = Task(), averaged_weights(path)
        fresh.load_state_dict(averaged)
        saved = Task.load_from_checkpoint(path)
        assert zeros(fresh) == zeros(saved) > 0
        _, again = fit(tmp_path, *callbacks(f"b{epoch}"), ckpt_path=path)
        assert all(torch.equal(again.state_dict()[name], value) for name, value in task.state_dict().items())


def test_an_earlier_checkpoint_is_tested_with_its_own_mask(tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, filename="{epoch}")
    made, task = fit(tmp_path, trained(make_pruning_permanent=False), saver)
    path = tmp_path / "c" / "epoch=0.ckpt"
    fresh = trainer(tmp_path).validate(Task(), loader(2), ckpt_path=path, verbose=False)
    assert made.validate(task, loader(2), ckpt_path=path, verbose=False) == fresh


def test_a_model_that_has_masks_is_trained_again(tmp_path):
    def plain(task):
        return {name: value.clone() for name, value in task.state_dict().items()}

    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1, filename="{step}")
    _, task = fit(tmp_path, trained(make_pruning_permanent=False), saver)
    once = plain(task)
    for pruning in (trained(make_pruning_permanent=False), trained()):
        trainer(tmp_path, pruning, max_epochs=1).fit(task, loader(6, 3))
        assert set(task.state_dict()) == set(Task().state_dict())
        assert len(task.net[0]._state_dict_hooks) == (0 if pruning._permanent else 1)
    assert zeros(task) > 0
    _, task = fit(tmp_path, trained(make_pruning_permanent=False))
    for path in (tmp_path / "c" / "step=1.ckpt", tmp_path / "c" / "step=4.ckpt"):  # before it was pruned; in between
        trainer(tmp_path, trained(make_pruning_permanent=False), max_epochs=3).fit(task, loader(6, 3), ckpt_path=path)
        assert all(torch.equal(task.state_dict()[name], value) for name, value in once.items())


def test_after_an_error_the_model_has_no_masks(tmp_path):
    task, pruning = Task(), trained()
    with pytest.raises(RuntimeError, match="planned"):
        trainer(tmp_path, pruning, Fails("epoch_start", 4), max_epochs=3).fit(task, loader(6, 3))
    assert {name for name, _ in task.named_parameters()} == {name for name, _ in Task().named_parameters()}
    assert not list(task.buffers())
    assert zeros(task) > 0
    trainer(tmp_path, pruning, max_epochs=1).fit(task, loader(6, 3))
    assert not list(task.buffers())


def test_a_lottery_ticket_after_a_validation_with_averages(tmp_path):
    class Looks(Callback):
        def on_validation_end(self, trainer, task):
            seen.append(all(torch.equal(task.net[n].weight_orig, first[f"net.{n}.weight"]) for n in (0, 2)))

    seen, first = [], Task().state_dict()
    pruning = trained(prune_on_train_epoch_end=False, use_lottery_ticket_hypothesis=True)
    fit(tmp_path, EMAWeightAveraging(decay=0.5), pruning, Looks())
    assert seen == [True, True, True]
    with pytest.raises(ValueError, match=r"the averages of EMAWeightAveraging .* List EMAWeightAveraging before"):
        fit(tmp_path, trained(prune_on_train_epoch_end=False), EMAWeightAveraging())


def test_what_is_refused(tmp_path):
    stranger = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="a Linear that is not in the model"):
        fit(tmp_path, ModelPruning("l1_unstructured", [(stranger, "weight")]))
    task = Task()
    misnamed = trainer(tmp_path, ModelPruning("l1_unstructured", [(task.net[0], "scale")]))
    with pytest.raises(ValueError, match=r"'scale', which is not a parameter of net\.0 \(parameters: weight, bias\)"):
        misnamed.fit(task, loader(6, 3))
    with pytest.raises(ValueError, match="full layers"):
        fit(tmp_path, ModelPruning("l1_unstructured"), strategy="fsdp")
    for wrong, error, words in (
        (("l2_unstructured",), ValueError, "l1_unstructured"),
        (("ln_structured",), ValueError, "pruning_dim"),
        (("l1_unstructured", [stranger]), TypeError, "pairs"),
        ((prune.LnStructured,), ValueError, "use_global_unstructured=False"),
        ((print,), TypeError, "BasePruningMethod"),
        (("l1_unstructured", (), ["scale"]), ValueError, "weight"),
    ):
        with pytest.raises(error, match=words):
            ModelPruning(*wrong)
    with pytest.raises(ValueError, match=r"resample_parameters=True is not supported\. Remove it"):
        ModelPruning("l1_unstructured", resample_parameters=True)


def in_a_world(root):
    treadle.seed_everything(1)
    return {
        n: v.clone() for n, v in fit(root, ModelPruning("random_unstructured"), strategy="ddp")[1].state_dict().items()
    }


def test_two_processes_prune_alike(tmp_path):
    first, second = run(in_a_world, 2, str(tmp_path))
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert sum(int((value == 0).sum()) for value in first.values()) >= 28


def test_two_callbacks_prune_one_parameter(tmp_path):
    def callbacks(task):
        options = {"make_pruning_permanent": False, "use_lottery_ticket_hypothesis": False, "amount": 0.25}
        pairs = ([(task.net[0], "weight")], [(task.net[0], "weight"), (task.net[2], "weight")])
        return [ModelPruning("l1_unstructured", chosen, **options) for chosen in pairs]

    def run_epochs(epochs, ckpt_path=None):
        treadle.seed_everything(1)
        task = Task()
        made = trainer(tmp_path, *callbacks(task), max_epochs=epochs)
        made.fit(task, loader(6, 3), ckpt_path=ckpt_path)
        made.save_checkpoint(tmp_path / str(epochs))
        return {name: value.tolist() for name, value in task.state_dict().items()}

    whole = run_epochs(2)
    assert 0 < sum(value == 0 for row in whole["net.0.weight"] for value in row) < 12
    run_epochs(1)
    assert run_epochs(2, tmp_path / "1") == whole


def test_all_parameters_are_pruned_by_default(tmp_path):
    task, every = Task(), ModelPruning("l1_unstructured", parameters_to_prune=None)
    pairs = ModelPruning.sanitize_parameters_to_prune(task)
    assert pairs == [(part, name) for name in ("weight", "bias") for part in (task.net[0], task.net[2])]
    assert ModelPruning.sanitize_parameters_to_prune(task, pairs[:1]) == pairs[:1]
    trainer(tmp_path, every, max_epochs=1).fit(task, loader(6, 3))
    total = sum(p.numel() for p in task.parameters())
    assert sum(int((p == 0).sum()) for p in task.parameters()) == pytest.approx(total / 2, abs=1)
