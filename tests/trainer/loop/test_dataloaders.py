"""`overfit_batches`, `reload_dataloaders_every_n_epochs`, and what a data module can do."""

import itertools
from unittest.mock import Mock

import pytest
import torch
from support.models import Line, SaveEach, Stream
from support.seen_batches import Task, data, trainer
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, SubsetRandomSampler
from treadle.callbacks import LambdaCallback

import treadle

# -- overfit_batches -------------------------------------------------------------------------------------------------


class Lazy(Sampler):
    def __iter__(self):
        for _ in range(6):
            yield int(torch.randint(6, ()))

    def __len__(self):
        return 6


class Backwards(RandomSampler):
    def __iter__(self):
        return iter(range(5, -1, -1))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"sampler": Backwards(range(6))}, [[5, 4], [3, 2]]),
        ({"shuffle": True}, [[0, 1], [2, 3]]),
        ({"sampler": SubsetRandomSampler([5, 2, 4, 0])}, [[5, 2], [4, 0]]),
        ({"sampler": Lazy()}, None),
        ({}, [[0, 1], [2, 3]]),
    ],
    ids=["custom", "shuffle", "subset", "lazy", "in order"],
)
def test_overfitting_reads_one_order(settings, expected):
    loader, task = DataLoader(data(6), 2, **settings), Task()
    own = trainer(overfit_batches=2, num_sanity_val_steps=0, max_epochs=3)
    if not settings:
        own.fit(task, loader, DataLoader(data(6), 2))
    else:
        with pytest.warns(UserWarning, match="overfit_batches disables shuffling in the training dataloader") as caught:
            own.fit(task, loader, DataLoader(data(6), 2, shuffle=True))
        assert len([w for w in caught if "disables shuffling" in str(w.message)]) == 2  # training's, validation's
    assert task.seen == task.seen[:2] * 3
    assert expected is None or task.seen[:2] == expected
    assert task.evaluated == [[0, 1], [2, 3]] * 3
    assert own.train_dataloader is loader


def test_overfitting_goes_on_in_its_order(tmp_path):
    def fit(path=None, callbacks=()):
        torch.manual_seed(2)
        task = Task()
        loader = DataLoader(data(6), 2, sampler=Lazy())
        trainer(overfit_batches=2, max_epochs=3, callbacks=list(callbacks)).fit(task, loader, ckpt_path=path)
        return task.seen

    whole = fit(callbacks=[SaveEach(tmp_path)])
    for step in range(1, 6):
        torch.rand(step)
        assert fit(tmp_path / str(step)) == whole[step:]


# -- reload_dataloaders_every_n_epochs -------------------------------------------------------------------------------


class Growing(treadle.DataModule):
    """Its data follow from the epoch, and from a count of its own that is saved."""

    def __init__(self):
        self.asked, self.validated, self.collected = [], [], 0

    def train_dataloader(self):
        epoch = self.trainer.current_epoch
        self.asked.append((epoch, self.collected))
        generator = torch.Generator().manual_seed(epoch)
        return DataLoader(data(6, 100 * epoch + 10 * self.collected), 2, shuffle=True, generator=generator)

    def val_dataloader(self):
        self.validated.append(self.trainer.current_epoch)
        return DataLoader(data(2, 1000 * self.trainer.current_epoch), 2)

    def state_dict(self):
        return {"collected": self.collected}

    def load_state_dict(self, state_dict):
        self.collected = state_dict["collected"]


class Collects(treadle.Callback):
    def __init__(self, folder=None, steps=True):
        self.folder, self.steps = folder, steps

    def on_train_epoch_end(self, trainer, task):
        trainer.datamodule.collected += 1
        if self.folder:
            trainer.save_checkpoint(self.folder / f"epoch-{trainer.current_epoch}")

    def on_step_end(self, trainer, task):
        if self.folder and self.steps:
            trainer.save_checkpoint(self.folder / f"step-{trainer.global_step}")


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_loaders_are_asked_for_anew_and_a_run_goes_on_with_the_ones_it_had(every, tmp_path):
    def fit(path=None, folder=None):
        torch.manual_seed(4)
        task, module = Task(), Growing()
        flags = {"reload_dataloaders_every_n_epochs": every, "max_epochs": 4, "callbacks": [Collects(folder)]}
        trainer(num_sanity_val_steps=0, **flags).fit(task, datamodule=module, ckpt_path=path)
        return task, module

    whole, module = fit(folder=tmp_path)
    assert module.asked == [(epoch, epoch) for epoch in range(0, 4, every)]
    assert [min(row) // 100 for row in whole.seen[::3]] == [epoch - epoch % every for epoch in range(4)]
    assert [row[0] for row in whole.evaluated] == [1000 * (epoch - epoch % every) for epoch in range(4)]
    for step in range(1, 12):
        if every == 2 and step % 6 in (4, 5):
            continue  # in an epoch whose loaders were made from a count that has changed since
        task, module = fit(tmp_path / f"step-{step}")
        assert task.seen == whole.seen[step:], step
        assert module.asked[0][0] == (step - 1) // 3 // every * every
    for epoch in range(3):
        task, module = fit(tmp_path / f"epoch-{epoch}")
        if every == 1 or epoch == 1:
            assert task.seen == whole.seen[3 * epoch + 3 :]
            assert module.asked == [(e, e) for e in range(epoch + 1, 4, every)]  # once for each


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "wanted"),
    [
        # In which epoch training's and validation's loaders are made: once at the start, and then when due.
        ({"check_val_every_n_epoch": 4}, ([0, 3, 6], [0, 3, 7])),
        ({"check_val_every_n_epoch": 1}, ([0, 3, 6], [0, 3, 6])),
        ({"check_val_every_n_epoch": 2, "val_check_interval": 1}, ([0, 3, 6], [0, 1, 5])),
        ({"limit_val_batches": 0}, ([0, 3, 6], [0])),
    ],
)
def test_validation_loaders_are_made_anew_for_the_validation_that_uses_them(flags, wanted, tmp_path):
    def fit(path=None, folder=None):
        task, module = Task(), Growing()
        callbacks = [Collects(folder, steps=False)]
        every = {"reload_dataloaders_every_n_epochs": 3, "max_epochs": 8, "callbacks": callbacks, **flags}
        trainer(num_sanity_val_steps=1, **every).fit(task, datamodule=module, ckpt_path=path)
        return module, task.evaluated[path is None and "limit_val_batches" not in flags :]

    module, evaluated = fit(folder=tmp_path)
    assert ([epoch for epoch, _ in module.asked], module.validated) == wanted
    assert {row[0] for row in evaluated} <= {1000 * epoch for epoch in module.validated}
    for epoch in (0, 4, 6):  # a resumed run evaluates the same samples
        rest = fit(tmp_path / f"epoch-{epoch}")[1]
        assert rest == evaluated[len(evaluated) - len(rest) :]
        assert rest or "limit_val_batches" in flags or epoch == 6


def test_a_passed_loader_is_not_made_anew_and_that_is_told():
    task = Task()
    task.train_dataloader = Mock(side_effect=AssertionError)
    flags, message = {"reload_dataloaders_every_n_epochs": 1}, "has no effect on the {} dataloaders that were passed"
    with pytest.warns(UserWarning, match=message.format("training")):
        trainer(limit_val_batches=0, **flags).fit(task, DataLoader(data(2)))
    with pytest.warns(UserWarning, match=message.format("training and validation")):
        trainer(**flags).fit(task, DataLoader(data(2)), DataLoader(data(2)))


def test_a_buffer_that_is_filled_meanwhile():
    task = Task()
    task.train_dataloader = lambda: DataLoader(Stream(data(2 * task.current_epoch + 1)), 1)
    trainer(reload_dataloaders_every_n_epochs=1, max_epochs=3).fit(task)
    assert task.seen == [[0], *([0], [1], [2]), *([0], [1], [2], [3], [4])]


class Joined(DataLoader):
    """Two loaders, the shorter of them again and again. There is nothing to read after ``len(self)`` batches."""

    def __init__(self, longer, shorter):
        self.parts = longer, shorter
        super().__init__(longer.dataset, longer.batch_size)

    def __iter__(self):
        longer, shorter = self.parts
        return ([torch.cat((one, other))] for (one,), (other,) in zip(longer, itertools.cycle(shorter), strict=True))


@pytest.mark.parametrize("limit", [1.0, 3, 2, 5])
def test_a_loader_of_ones_own_is_not_read_beyond_its_length(limit):
    joined = Joined(DataLoader(data(6), 2), DataLoader(data(2, 10), 1))
    expected = [[0, 1, 10], [2, 3, 11], [4, 5, 10]]
    expected = expected if limit == 1.0 else expected[:limit]
    task, one = Task(), trainer(**{f"limit_{kind}_batches": limit for kind in ("train", "val", "test", "predict")})
    task.test_step = task.predict_step = task.validation_step
    one.fit(task, joined, joined)
    assert task.seen == expected * 2
    assert one.global_step == len(task.seen)
    assert task.evaluated[-len(expected) :] == expected
    for stage in (one.validate, one.test, one.predict):
        task.evaluated = []
        stage(task, joined)
        assert task.evaluated == expected


def test_a_prediction_drops_no_samples():
    loaders = (
        DataLoader(data(5), 2, drop_last=True),
        DataLoader(data(5), batch_sampler=BatchSampler(RandomSampler(range(5)), 2, drop_last=True)),
    )
    for loader in loaders:
        task = Task()
        task.test_step = task.predict_step = task.validation_step
        trainer().predict(task, loader)
        assert sorted(itertools.chain(*task.evaluated)) == [0, 1, 2, 3, 4]
        trainer().test(task, loader)
        assert len(task.evaluated) == 3 + 2


def test_workers_of_old_loaders_end_and_passed_loaders_stay():
    task, made, held = Task(), [], []

    def make():
        made.append(DataLoader(data(2), 2, num_workers=1, persistent_workers=True))
        return made[-1]

    task.train_dataloader = make
    counts = LambdaCallback(on_train_epoch_start=lambda trainer, _: held.append(len(trainer.accelerator.loaders)))
    trainer(reload_dataloaders_every_n_epochs=1, callbacks=counts).fit(task)
    assert len(made) == 2
    assert held == [1, 1]


# -- data modules ----------------------------------------------------------------------------------------------------


def test_a_data_module_whose_method_returns_nothing_is_named():
    class Forgets(treadle.DataModule):
        def train_dataloader(self):
            DataLoader(torch.ones(4, 1))

    with pytest.raises(TypeError, match=r"^Forgets\.train_dataloader returned None\. Return the dataloader\.$"):
        trainer().fit(Line(), Forgets())
    with pytest.raises(TypeError, match=r"^the training dataloader is the class Forgets\. Pass Forgets\(\)\.$"):
        trainer().fit(Line(), Forgets)


def test_a_base_class_method_set_on_the_instance_is_no_loader():
    module, run = treadle.DataModule(), trainer(max_epochs=1)
    module.train_dataloader = lambda: DataLoader(data(2))
    module.val_dataloader = module.val_dataloader  # as libraries do where there is no validation set
    run.fit(Task(), datamodule=module)
    assert (run.global_step, run.has_validation) == (2, False)
