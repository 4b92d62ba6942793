"""What a checkpoint is loaded into: another model or optimizer is refused with a list, or what fits is taken."""

import copy
import json
import os
import warnings

import pytest
import torch
from safetensors.torch import load_file
from support.models import Count, take_step
from support.saved_nets import Extra, Net, prepared, same, snapshot
from support.stored import edit_manifest, replace_file
from torch import nn
from treadle.engine.checkpoint.store import read_manifest

import treadle
from treadle.testing.faults import Fault, forked


@pytest.mark.parametrize(
    ("optimizer", "line"),
    [
        (lambda m: torch.optim.SGD(m.parameters()), "torch.optim.adamw.AdamW in the checkpoint, torch.optim.sg"),
        (lambda m: torch.optim.AdamW(m.parts["head"].parameters()), "unexpected: parts.body.weight"),
        (lambda m: torch.optim.AdamW([{"params": [*m.parameters()][n::2]} for n in (0, 1)]), "in different groups"),
    ],
)
def test_another_optimizer_is_refused_before_anything_changes(saved, optimizer, line):
    accelerator, model, stepper = prepared(optimizer=optimizer)
    before = snapshot(model, stepper)
    with pytest.raises(ValueError, match="saved with a different optimizer") as error:
        accelerator.load_state(saved[0])
    assert line in str(error.value)
    same(snapshot(model, stepper), before)


def test_the_order_of_parameters_is_of_no_matter(saved):
    """By number a state would go to other parameters of the same shape without a word."""
    path, model, optimizer = saved
    accelerator, other, stepper = prepared(optimizer=lambda m: torch.optim.AdamW([*m.parameters()][::-1], lr=0.1))
    accelerator.load_state(path)
    for part in ("body", "head"):
        mine, wanted = stepper.state[other.parts[part].weight], optimizer.state[model.parts[part].weight]
        same(dict(mine), dict(wanted))


def test_the_manifest_says_what_was_trained_how(saved):
    info = read_manifest(saved[0]).info
    known = {"accumulate": 1, "batch_size": 4, "global_batch_size": 4, "strategy": "single", "precision": "32-true"}
    assert {name: info[name] for name in known} == known
    again, *_ = prepared()
    again.save_state(saved[0].parent / "again")
    other, *_ = prepared(lambda: Net(9))
    other.save_state(saved[0].parent / "other")
    marks = [read_manifest(saved[0].parent / name).info["models"][0] for name in ("saved", "again", "other")]
    assert marks[0] == marks[1] != marks[2]


def test_another_global_batch_is_said(saved):
    accelerator, *_ = prepared(accumulate=3, batch=2)
    with pytest.warns(UserWarning, match=r"batch of 4 \(micro-batches of 4 over 1 process, .*, but this run has 6"):
        accelerator.load_state(saved[0])
    accelerator, *_ = prepared(accumulate=2, batch=2)
    with warnings.catch_warnings(action="error"):
        accelerator.load_state(saved[0])


def test_loaders_for_evaluation_may_come_and_go(saved):
    path, model, optimizer = saved
    accelerator, *_ = prepared()
    accelerator.prepare_data_loader([1, 2, 3], evaluation=True)
    accelerator.load_state(path)
    accelerator.save_state(path.parent / "with")
    accelerator, other, stepper = prepared()
    accelerator.load_state(path.parent / "with")
    same(snapshot(other, stepper), snapshot(model, optimizer))


def test_loaders_that_are_made_for_each_epoch(saved):
    """A script prepares another one in each epoch: before the load there are more or fewer than were saved."""
    accelerator, *_ = prepared()
    accelerator.prepare_data_loader([1, 2, 3])
    with pytest.warns(UserWarning, match="1 training dataloader, but this run has 2, so .* are not restored"):
        accelerator.load_state(saved[0])
    assert [list(loader) for loader in accelerator.loaders][1] == [1, 2, 3]


def test_a_script_that_evaluates_prepares_the_model_alone(saved):
    accelerator = treadle.Accelerator(cpu=True)
    model = accelerator.prepare(Net())
    with pytest.warns(UserWarning, match="contains 1 optimizer, but this run has 0"):
        accelerator.load_state(saved[0])
    same(model.state_dict(), saved[1].state_dict())


class Odd(torch.optim.Optimizer):
    """Keeps lists, numbers, text and values that belong to no parameter."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr, "words": ("a", "b")})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                state["seen"] = [*state.get("seen", []), p.grad.clone()][-2:]
                state["count"] = state.get("count", 0) + 1
                p.data -= group["lr"] * p.grad
        self.state["all"] = {"norm": torch.ones(3), "name": "x"}


@pytest.mark.parametrize("make", [Odd, lambda params, lr: torch.optim.Adam(params, torch.tensor(lr), foreach=False)])
def test_any_state_of_an_optimizer(tmp_path, make):
    accelerator, model, optimizer = prepared(optimizer=lambda m: make(m.parameters(), 0.03), steps=3)
    accelerator.save_state(tmp_path / "x")
    again, other, stepper = prepared(optimizer=lambda m: make(m.parameters(), 0.1), steps=2)
    again.load_state(tmp_path / "x")
    assert repr(stepper.state_dict()) == repr(optimizer.state_dict())
    for one, net, own in ((accelerator, model, optimizer), (again, other, stepper)):
        one.backward(net(torch.ones(2, 4)).square().mean())
        own.step()
    same(other.state_dict(), model.state_dict())
    assert repr(stepper.state_dict()) == repr(optimizer.state_dict())


def test_a_layer_that_was_replaced_after_the_optimizer_was_made(tmp_path):
    def replace_head(model):  # a baseline or a target network
        model.parts["head"] = copy.deepcopy(model.parts["head"])

    accelerator, model, optimizer = prepared(steps=3)
    replace_head(accelerator.unwrap_model(model))
    accelerator.save_state(tmp_path / "x")
    again, other, stepper = prepared(steps=1)
    again.load_state(tmp_path / "x")
    same(other.state_dict(), model.state_dict())
    assert repr(stepper.state_dict()) == repr(optimizer.state_dict())


def test_parameters_of_no_model(tmp_path):
    def make():
        accelerator = treadle.Accelerator(cpu=True)
        weight = nn.Parameter(torch.ones(3))
        return accelerator, weight, accelerator.prepare(torch.optim.SGD([weight], lr=0.1, momentum=0.9))

    accelerator, weight, optimizer = make()
    accelerator.backward(weight.square().sum())
    optimizer.step()
    accelerator.save_state(tmp_path / "x")
    again, other, stepper = make()
    again.load_state(tmp_path / "x")
    same(stepper.state[other], optimizer.state[weight])


@pytest.mark.guarantee
@pytest.mark.parametrize("other", ["scheduler", "registered", "models"])
def test_what_else_differs_is_refused_before_anything_changes(tmp_path, other):
    def make(scheduler, **named):
        accelerator, model, stepper = prepared()
        accelerator.prepare(scheduler(stepper.optimizer))
        accelerator.register_for_checkpointing(**named)
        return accelerator, model, stepper

    constant, step = torch.optim.lr_scheduler.ConstantLR, lambda o: torch.optim.lr_scheduler.StepLR(o, 2)
    accelerator, *_ = make(step, note=Count(3), left=Count())
    if other == "models":
        accelerator.prepare(Net(3))
    accelerator.save_state(tmp_path / "x")
    kind = constant if other == "scheduler" else step
    name = "else" if other == "registered" else "note"
    accelerator, model, stepper = make(kind, **{name: Count()})
    before = snapshot(model, stepper)
    words = {
        "scheduler": "scheduler: StepLR in the checkpoint, ConstantLR in this run",
        "registered": "registered objects: note, left in the checkpoint, which lacks else",
        "models": "contains 2 models, but this run has 1",
    }[other]
    with pytest.raises(ValueError, match=words):
        accelerator.load_state(tmp_path / "x")
    same(snapshot(model, stepper), before)
    if other == "models":
        return
    with pytest.warns(UserWarning, match="which this run has not registered") as said:
        accelerator.load_state(tmp_path / "x", strict=False)
    texts = [str(one.message) for one in said]
    assert any(words in text and "is not restored" in text for text in texts)
    assert any("contains state for " in text and "left" in text for text in texts)
    if other == "scheduler":
        assert accelerator.registered["note"].value == 3
        assert "step_size" not in accelerator.schedulers[0].state_dict()


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam])
def test_another_precision_is_said_and_the_optimizer_goes_with_it(saved, optimizer, tmp_path):
    def make(model):
        return optimizer(model.parameters(), lr=0.1)

    prepared(optimizer=make)[0].save_state(tmp_path / "x")
    for precision in ("bf16-true", "64-true"):
        accelerator, model, stepper = prepared(optimizer=make, steps=0, mixed_precision=precision)
        with pytest.warns(UserWarning, match=f"saved with precision='32-true', but this run uses '{precision}'"):
            accelerator.load_state(tmp_path / "x")
        weight = accelerator.unwrap_model(model).parts["head"].weight
        take_step(accelerator, model, stepper, torch.ones(2, 4, dtype=weight.dtype))
        slots = stepper.state[weight]
        assert slots["exp_avg"].dtype == weight.dtype
        assert {slots[name].dtype for name in ("step", "mu_product") if name in slots} == {torch.float32}
        assert slots["step"] == 2


@pytest.mark.guarantee
@pytest.mark.parametrize(
    ("part", "content", "entries"),
    [
        ("state", {"a": 1}, r"schedulers \(list\), .*, registered \(dict\)"),
        ("state", [1], r"schedulers \(list\), .*, registered \(dict\)"),
        ("rank-00000", {"random": {}}, r"buffers \(list\)"),
        ("rank-00000", {"random": 3, "buffers": []}, r"random \(dict\)"),
        ("rank-00000", [], r"random \(dict\), buffers \(list\)"),
        ("optimizer", {"class": "x"}, r"shapes \(dict\), .*, others"),
    ],
)
def test_a_whole_file_of_another_form_is_an_ordinary_error(saved, part, content, entries):
    path, *_ = saved
    replace_file(path, f"{part}.json", json.dumps(content).encode())
    accelerator, *_ = prepared()
    with pytest.raises(ValueError, match=f"'{part}' is damaged: entries are missing or have a wrong type: {entries}"):
        accelerator.load_state(path)


def test_gradients_of_before_are_forgotten(saved):
    """The next group would step with them."""
    accelerator, model, stepper = prepared(accumulate=2, steps=0)
    with accelerator.accumulate(model):
        accelerator.backward(model(torch.full((2, 4), 9.0)).square().mean())
        stepper.step()
    assert accelerator.accumulation.position
    accelerator.load_state(saved[0])
    assert not accelerator.accumulation.position
    for _ in range(2):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(2, 4)).square().mean())
    plain = Net()
    plain.load_state_dict(saved[1].state_dict())
    plain(torch.ones(2, 4)).square().mean().backward()
    same([p.grad for p in model.parameters()], [p.grad for p in plain.parameters()])


@pytest.mark.guarantee
@pytest.mark.parametrize("calls", [1, 2])
def test_a_checkpoint_that_is_replaced_while_it_is_read(saved, calls):
    """Another job saves to the same path: the weights of one save would come with the state of another."""
    path, *_ = saved
    other, *_ = prepared(steps=5)
    accelerator, model, stepper = prepared()
    if calls == 1:
        accelerator.register_load_state_pre_hook(lambda models, folder: other.save_state(folder))
        before = snapshot(model, stepper)
        with pytest.raises(ValueError, match="was replaced or deleted while it was being read"):
            accelerator.load_state(path)
        assert accelerator.steps == 1
    else:  # as the Trainer loads it
        accelerator.load_state(path, state=False)
        before = snapshot(model, stepper)
        other.save_state(path)
        with pytest.raises(ValueError, match="was replaced after the models were loaded from it"):
            accelerator.load_state(path, models=False)
        accelerator.backward(model(torch.ones(2, 4)).square().mean())
        stepper.step()
        before = snapshot(model, stepper)
    same(snapshot(model, stepper), before)
    accelerator.load_state(path, state=False, models=calls == 2)
    accelerator.load_state(path, models=False)
    assert accelerator.steps == 5


@pytest.mark.guarantee
def test_one_model_more_without_the_models(saved):
    """It failed only after the optimizers were loaded."""
    accelerator, model, stepper = prepared()
    accelerator.prepare(Net(3))
    before = snapshot(model, stepper)
    with pytest.raises(ValueError, match="contains 1 model, but this run has 2"):
        accelerator.load_state(saved[0], models=False)
    same(snapshot(model, stepper), before)


def test_an_extra_state_that_was_no_tensor(tmp_path):
    prepared(Extra)[0].save_state(tmp_path / "x")
    accelerator, model, _ = prepared(lambda: Extra(torch.ones(2)))
    with pytest.raises(ValueError, match=r"_extra_state: a dict in the checkpoint, \(2,\) in the model"):
        accelerator.load_state(tmp_path / "x")
    with pytest.warns(UserWarning, match="_extra_state: a dict"):
        accelerator.load_state(tmp_path / "x", strict=False)
    same(model.extra, torch.ones(2))


@pytest.mark.parametrize("calls", [1, 2])
def test_another_format_of_the_weights_is_said(saved, tmp_path, calls):
    prepared(lambda: Net().double(), steps=0)[0].save_state(tmp_path / "x")
    accelerator, model, _ = prepared(steps=0)
    words = (
        r"not resume exactly:\n  parts\.body\.weight: float64 in the checkpoint, float32 in this model\n"
        r"(.*\n){2}  parts\.head\.bias: .*$"
    )
    if calls == 2:
        with warnings.catch_warnings(action="error"):
            accelerator.load_state(tmp_path / "x", state=False)  # to look at the model only
    with pytest.warns(UserWarning, match=words):
        accelerator.load_state(tmp_path / "x", models=calls == 1)
    assert model.parts["head"].weight.dtype == torch.float32


@pytest.mark.guarantee
def test_a_number_of_processes_that_nobody_has(saved):
    path, model, optimizer = saved
    edit_manifest(path, world_size=2**60)
    accelerator, other, stepper = prepared()
    accelerator.load_state(path)
    same(snapshot(other, stepper), snapshot(model, optimizer))


def test_a_registered_metric_goes_on(tmp_path):
    """Its own ``state_dict`` is empty."""
    from torchmetrics import MeanMetric, MetricCollection
    from torchmetrics.classification import BinaryAccuracy

    def make():
        accelerator = treadle.Accelerator(cpu=True)
        metrics = MeanMetric(), MetricCollection([BinaryAccuracy()])
        accelerator.register_for_checkpointing(*metrics)
        return accelerator, *metrics

    accelerator, mean, several = make()
    mean.update(torch.tensor([1.0, 4.0]))
    several.update(torch.tensor([0.9, 0.9]), torch.tensor([1, 0]))
    accelerator.save_state(tmp_path / "x")
    again, other, others = make()
    again.load_state(tmp_path / "x")
    other.update(4.0)
    assert other.compute() == 3
    assert others.compute() == several.compute() == {"BinaryAccuracy": 0.5}


@pytest.mark.guarantee
def test_a_path_whose_replacement_was_killed_between_two_renames(saved):
    path, model, _ = saved
    accelerator, *_ = prepared(steps=3)
    assert forked(lambda: accelerator.save_state(path), Fault("disk:rename:after", "kill", match="*/saved")) == -9
    assert not path.exists()
    again, other, _ = prepared()
    with pytest.warns(UserWarning, match="finished replacing it with the newer checkpoint"):
        assert again.load_state(path)["step"] == 3
    assert not torch.equal(other.parts["body"].weight, model.parts["body"].weight)


# -- a full disk -----------------------------------------------------------------------------------------------------


@pytest.mark.guarantee
@pytest.mark.parametrize("small_disk", ["size=400k"], indirect=True)
@pytest.mark.parametrize("blocking", [True, False])
def test_a_full_disk_costs_nothing_that_is_there(small_disk, blocking):
    accelerator, model, optimizer = prepared(lambda: Net(2000))  # 56 kB, and twice that for the optimizer
    accelerator.save_state(small_disk / "good")
    before = {path.name: path.read_bytes() for path in (small_disk / "good").iterdir()}
    kept = snapshot(model, optimizer)
    accelerator.backward(model(torch.ones(2, 4)).square().mean())
    optimizer.step()

    def save(target):
        accelerator.save_state(small_disk / target, blocking=blocking)
        accelerator.finish_saving()

    for target in ("next", "good"):
        with pytest.raises(OSError, match=r"can't save .*: No space left.* needs [\d,]+ bytes, but only [\d,]+ "):
            save(target)
        assert os.listdir(small_disk) == ["good"]
        assert {path.name: path.read_bytes() for path in (small_disk / "good").iterdir()} == before
    accelerator.load_state(small_disk / "good")
    same(snapshot(model, optimizer), kept)


def test_a_tensor_of_one_element_and_any_stride(tmp_path):
    def make():
        model = Net()
        model.register_buffer("picked", torch.arange(4.0)[1::2][:1])
        return model

    accelerator, model, _ = prepared(make)
    accelerator.save_state(tmp_path / "state")
    with torch.no_grad():
        model.picked.zero_()
    accelerator.load_state(tmp_path / "state")
    assert model.picked.tolist() == [1.0]
    assert load_file(tmp_path / "state" / "model.safetensors")["picked"].tolist() == [1.0]
