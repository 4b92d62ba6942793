"""Checkpoint hooks that edit ``checkpoint["state_dict"]``: frozen parts left out, weights replaced, other shapes."""

import copy
import itertools
from pathlib import Path

import pytest
import torch
from support.models import loader
from support.processes import run
from support.trainers import make_trainer
from torch import nn
from treadle.engine.checkpoint import OpenCheckpoint

import treadle


class Captioner(treadle.TaskModule):
    """A trained head on a frozen encoder."""

    def __init__(self, classes=1):
        super().__init__()
        self.save_hyperparameters()
        self.encoder = nn.Linear(2, 2)
        self.encoder.requires_grad_(False)
        self.head = nn.Linear(2, classes)

    def training_step(self, batch, batch_idx):
        return self.head(self.encoder(batch[0])).pow(2).mean()

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", self.head(self.encoder(batch[0])).pow(2).mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.head.parameters(), lr=0.1)


class WithoutEncoder(Captioner):
    def on_save_checkpoint(self, checkpoint):
        for name in self.encoder.state_dict():
            del checkpoint["state_dict"][f"encoder.{name}"]

    def on_load_checkpoint(self, checkpoint):
        assert sorted(checkpoint["state_dict"]) == ["head.bias", "head.weight"]
        checkpoint["state_dict"].update({f"encoder.{name}": t for name, t in self.encoder.state_dict().items()})


class Filtered(Captioner):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["state_dict"] = {k: v for k, v in checkpoint["state_dict"].items() if "encoder" not in k}

    def load_state_dict(self, state_dict, strict=True):
        return super().load_state_dict(state_dict, strict=False)


def fitted(task, path, epochs=1, ckpt_path=None, weights_only=False):
    trainer = make_trainer(max_epochs=epochs)
    trainer.fit(task, loader(), loader(), ckpt_path=ckpt_path)
    trainer.save_checkpoint(path, weights_only=weights_only)
    return trainer


def names_in(path):
    return sorted(OpenCheckpoint(path).open_part("model"))


@pytest.mark.parametrize("weights_only", [False, True])
@pytest.mark.parametrize("kind", [WithoutEncoder, Filtered])
def test_a_part_that_is_left_out_stays_the_models_own(tmp_path, kind, weights_only):
    task, path = kind(), tmp_path / "c"
    trainer = fitted(task, path, weights_only=weights_only)
    assert names_in(path) == ["head.bias", "head.weight"]
    assert sorted(task.state_dict()) == ["encoder.bias", "encoder.weight", "head.bias", "head.weight"]

    loaded = kind.load_from_checkpoint(path)
    assert torch.equal(loaded.head.weight, task.head.weight)
    assert not torch.equal(loaded.encoder.weight, task.encoder.weight)  # those of a new model, as in Lightning

    other, expected = kind(), trainer.validate(task, loader(), verbose=False)
    other.encoder.load_state_dict(task.encoder.state_dict())
    assert trainer.validate(other, loader(), ckpt_path=path, verbose=False) == expected


def test_what_is_put_in_place_of_a_weight_is_saved_and_not_trained(tmp_path):
    def replace(checkpoint):
        checkpoint["state_dict"] = {name: torch.zeros_like(value) for name, value in checkpoint["state_dict"].items()}

    task = Captioner()
    task.on_save_checkpoint = replace
    fitted(task, tmp_path / "c")
    assert not any(value.any() for value in Captioner.load_from_checkpoint(tmp_path / "c").state_dict().values())
    assert task.head.weight.any()


class OfOtherShape(Captioner):
    def on_load_checkpoint(self, checkpoint):
        own = self.state_dict()
        for name, value in checkpoint["state_dict"].items():
            if value.shape != own[name].shape:
                checkpoint["state_dict"][name] = own[name]


class InPlace(Captioner):
    def on_load_checkpoint(self, checkpoint):
        checkpoint["state_dict"]["head.weight"].mul_(2)


def test_a_task_edits_what_it_loads(tmp_path):
    task = Captioner()
    fitted(task, tmp_path / "c")
    loaded = OfOtherShape.load_from_checkpoint(tmp_path / "c", classes=3)
    assert loaded.head.out_features == 3
    assert torch.equal(loaded.encoder.weight, task.encoder.weight)

    for _ in range(2):  # the file is as it was
        assert torch.equal(InPlace.load_from_checkpoint(tmp_path / "c").head.weight, 2 * task.head.weight)


def test_a_state_dict_has_to_be_left(tmp_path):
    task = Captioner()
    task.on_save_checkpoint = lambda checkpoint: checkpoint.pop("state_dict")
    with pytest.raises(ValueError, match=r"checkpoint\['state_dict'\] is None after the checkpoint hooks"):
        fitted(task, tmp_path / "c")


def test_callbacks_get_the_weights_too(tmp_path):
    seen = []

    def average(trainer, pl_module, checkpoint):
        checkpoint["averages"] = dict(checkpoint["state_dict"])

    def note(trainer, pl_module, checkpoint):
        seen.extend(sorted(checkpoint[key]) for key in ("averages", "state_dict"))

    callback = treadle.callbacks.LambdaCallback(on_save_checkpoint=average, on_load_checkpoint=note)
    trainer = make_trainer(callbacks=callback)
    trainer.fit(Captioner(), loader())
    trainer.save_checkpoint(tmp_path / "c")
    make_trainer(max_epochs=2, callbacks=callback).fit(Captioner(), loader(), ckpt_path=tmp_path / "c")
    assert seen == [["encoder.bias", "encoder.weight", "head.bias", "head.weight"]] * 2


class ReadsOptimizers(Captioner):
    def on_save_checkpoint(self, checkpoint):
        super().on_save_checkpoint(checkpoint)
        self.at_save = checkpoint["optimizer_states"]

    def on_load_checkpoint(self, checkpoint):
        return checkpoint["optimizer_states"]


def test_other_keys_are_there_at_a_save_and_an_error_at_a_load(tmp_path):
    task = ReadsOptimizers()
    trainer = fitted(task, tmp_path / "c")
    assert task.at_save == [trainer.optimizers[0].state_dict()]
    reason = r"'optimizer_states' is not in the checkpoint\. on_load_checkpoint gets only 'st"
    with pytest.raises(KeyError, match=reason):
        fitted(ReadsOptimizers(), tmp_path / "d", 2, tmp_path / "c")
    with pytest.raises(KeyError, match=reason):
        ReadsOptimizers.load_from_checkpoint(tmp_path / "c")


class Widths(treadle.DataModule):
    def __init__(self, width=3):
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self):
        return loader()


class ReadsWidths(Captioner):
    def on_load_checkpoint(self, checkpoint):
        self.seen = checkpoint["datamodule_hparams_name"], checkpoint["datamodule_hyper_parameters"]


def test_the_hyperparameters_of_the_data_module_are_there_at_a_load(tmp_path):
    trainer, path, expected, seen = make_trainer(), tmp_path / "c", (None, {"width": 5}), []
    trainer.fit(ReadsWidths(), datamodule=Widths(5))
    trainer.save_checkpoint(path)
    assert ReadsWidths.load_from_checkpoint(path).seen == expected
    note = treadle.callbacks.LambdaCallback(
        on_load_checkpoint=lambda trainer, task, checkpoint: seen.append(checkpoint["datamodule_hyper_parameters"])
    )
    task = ReadsWidths()
    make_trainer(max_epochs=2, callbacks=note).fit(task, datamodule=Widths(7), ckpt_path=path)
    assert (task.seen, seen) == (expected, [expected[1]])
    fitted(Captioner(), tmp_path / "without")
    with pytest.raises(KeyError, match="'datamodule_hparams_name' is not in the checkpoint"):
        ReadsWidths.load_from_checkpoint(tmp_path / "without")


def seeded(kind):
    torch.manual_seed(0)
    return kind()


def check_round_trip(folder, kind, **flags):
    """Save with the hooks' edits, load into another task, and resume in one with the same encoder."""
    task, resumed, straight = seeded(kind), seeded(kind), seeded(kind)
    trainer, path = make_trainer(**flags), Path(folder, f"{kind.__name__} {flags.get('strategy')}")
    trainer.fit(task, loader())
    trainer.save_checkpoint(path)
    assert names_in(path) == ["head.bias", "head.weight"]
    assert torch.equal(kind.load_from_checkpoint(path).head.weight, full_values(task)["head.weight"])
    make_trainer(max_epochs=2, **flags).fit(resumed, loader(), ckpt_path=path)
    make_trainer(max_epochs=2, **flags).fit(straight, loader())
    for name, value in full_values(straight).items():
        assert torch.equal(full_values(resumed)[name], value), name


@pytest.mark.parametrize("kind", [WithoutEncoder, Filtered])
def test_a_run_resumes_without_the_part_that_was_left_out(tmp_path, kind):
    check_round_trip(tmp_path, kind)


class Grown(treadle.TaskModule):
    """A task whose head gets its size from the checkpoint."""

    def __init__(self, classes=2, late=False):
        super().__init__()
        self.base, self.late = nn.Linear(2, 2), late
        if not late:
            self.head = nn.Linear(2, classes)
        self.classes = classes

    def configure_model(self):
        if self.late and not hasattr(self, "head"):
            self.head, self.tail = nn.Linear(2, self.classes), nn.Linear(2, 2)

    def forward(self, batch):
        return self.head(torch.tanh(self.base(batch[0])))

    def training_step(self, batch, batch_idx):
        return (self(batch) - 1).square().mean()

    def test_step(self, batch, batch_idx):
        self.log("classes", float(self(batch).shape[1]))
        self.log("loss", (self(batch) - 1).square().mean())

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.1)

    def grow(self, classes):
        self.head = nn.Linear(2, classes)


class GrownByHook(Grown):
    def on_load_checkpoint(self, checkpoint):
        self.grow(len(checkpoint["state_dict"]["head.bias"]))


class GrownByLoad(Grown):
    def load_state_dict(self, state_dict, strict=True):
        self.grow(len(state_dict["head.bias"]))
        return super().load_state_dict(state_dict, strict=strict)


def full_values(task):
    state = task.state_dict().items()
    return {name: getattr(v, "full_tensor", lambda v=v: v)().detach().clone() for name, v in state}


def grow_and_resume(folder, kinds, lates, **flags):
    """Train with five classes, resume and test in a task that begins with two; return what the ranks have, by kind."""
    results = {}
    for kind, late in itertools.product(kinds, lates):
        torch.manual_seed(0)
        straight, path = kind(5, late), Path(folder, kind.__name__)
        straight.configure_model()
        first = copy.deepcopy(straight)
        trainer = make_trainer(**flags)
        trainer.fit(first, loader())
        trainer.save_checkpoint(path)
        resumed = kind(late=late)
        make_trainer(max_epochs=2, **flags).fit(resumed, loader(), ckpt_path=path)
        make_trainer(max_epochs=2, **flags).fit(straight, loader())
        tested = make_trainer(**flags).test(kind(late=late), loader(), ckpt_path=path, verbose=False)
        expected = make_trainer(**flags).test(first, loader(), verbose=False)
        results[kind.__name__, late] = full_values(resumed), full_values(straight), tested, expected
    return results


def check_grown(results):
    for case, (resumed, straight, tested, expected) in results.items():
        assert straight["head.bias"].shape == (5,)
        assert resumed.keys() == straight.keys()
        for name, value in straight.items():
            assert torch.equal(resumed[name], value), (case, name)
        assert tested == expected, case
        assert tested[0]["classes"] == 5


@pytest.mark.long
@pytest.mark.parametrize(("precision", "kinds"), [("32-true", [GrownByHook, GrownByLoad]), ("64-true", [GrownByHook])])
def test_a_layer_whose_size_only_the_checkpoint_tells(tmp_path, precision, kinds):
    results = grow_and_resume(tmp_path, kinds, [False, True], precision=precision)
    check_grown(results)
    assert len(results) == 2 * len(kinds)
    dtypes = {value.dtype for resumed, *_ in results.values() for value in resumed.values()}
    assert dtypes == {torch.float64 if precision == "64-true" else torch.float32}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_two_processes(tmp_path, strategy):
    """Hooks edit the weights, and layers get their size from the checkpoint."""
    kinds, lates = ([GrownByHook, GrownByLoad], [False]) if strategy == "ddp" else ([GrownByHook], [False, True])
    names = [kind.__name__ for kind in kinds]
    ranks = run(grow_and_resume_in_ranks, 2, str(tmp_path), strategy, names, lates)
    for results in ranks:
        check_grown(results)
        for case, (resumed, *_) in results.items():
            for name, value in resumed.items():
                assert torch.equal(value, ranks[0][case][0][name])


def grow_and_resume_in_ranks(folder, strategy, names, lates):
    check_round_trip(folder, WithoutEncoder, devices=2, strategy=strategy)
    kinds = [globals()[name] for name in names]
    return grow_and_resume(folder, kinds, lates, devices=2, strategy=strategy)
