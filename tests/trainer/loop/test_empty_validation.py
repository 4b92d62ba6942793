"""A validation loader without batches: within `fit` there is no validation and a warning, by itself it is an error."""

import re
import warnings

import pytest
from support.models import LoggedLine, loader
from support.processes import run
from support.trainers import Dry, make_trainer
from torch.utils.data import DataLoader
from treadle.callbacks import EarlyStopping, ModelCheckpoint

import treadle


class Task(LoggedLine):
    """Counts the hooks of validation."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def on_validation_epoch_start(self):
        self.seen.append("start")

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.seen.append(dataloader_idx)
        self.log("val_loss", self.net(batch[0]).square().mean())

    def on_validation_epoch_end(self):
        self.seen.append("end")


def fit(val, **flags):
    """The trainer, what validation called, and the warnings."""
    task = Task()
    trainer = make_trainer(**{"max_epochs": 2, **flags})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(task, loader(8), val)
    return trainer, task.seen, [str(each.message) for each in caught]


EMPTY = {
    "no samples": lambda: loader(0),
    "all dropped": lambda: loader(1, drop_last=True),
    "a list": lambda: [],
}


@pytest.mark.parametrize("empty", EMPTY.values(), ids=EMPTY)
def test_within_fit_there_is_no_validation(empty):
    val = empty()
    trainer, seen, said = fit(val)
    assert trainer.global_step == 8
    assert seen == []
    assert not trainer.has_validation
    assert [text for text in said if "validat" in text] == [text for text in said if "empty" in text or val == []]
    assert len([text for text in said if "nothing is validated" in text or "validation skips it" in text]) == 1
    if val != []:
        with pytest.raises(ValueError, match="the validation dataloader yielded no batch"):
            trainer.validate(Task(), val)


@pytest.mark.parametrize(("limit", "times"), [(0.5, 1), (0, 0)])
def test_a_share_of_nothing_is_warned_of_unless_none_is_asked_for(limit, times):
    _, seen, said = fit(loader(0), limit_val_batches=limit)
    assert seen == []
    assert sum("has an empty dataset (TensorDataset). Add samples" in text for text in said) == times
    assert sum("empty" in text for text in said) == times


def test_a_stream_that_is_empty_is_known_when_it_ends():
    trainer, seen, said = fit(DataLoader(Dry()))
    assert trainer.global_step == 8
    assert set(seen) == {"start", "end"}
    assert any("the validation dataloader yielded no batch" in text for text in said)
    with pytest.raises(ValueError, match="the validation dataloader yielded no batch"):
        trainer.validate(Task(), DataLoader(Dry()))


def test_one_of_several_is_empty():
    trainer, seen, said = fit([loader(4), loader(0), loader(2)], num_sanity_val_steps=0)
    assert seen == ["start", 0, 0, 2, "end"] * 2
    assert [text for text in said if "empty" in text and "validation dataloader with index 1 is empty" in text]
    assert len([text for text in said if "empty" in text]) == 1
    assert "val_loss/dataloader_idx_2" in trainer.callback_metrics


def test_a_monitor_that_never_comes(tmp_path):
    words = "'val_loss' was never logged.*no validation. At least one validation dataloader is empty"
    _, _, said = fit(loader(0), enable_checkpointing=None, callbacks=ModelCheckpoint(tmp_path, monitor="val_loss"))
    assert any(re.search(f"ModelCheckpoint's monitor {words}", text) for text in said)
    with pytest.raises(ValueError, match=words):
        fit(loader(0), callbacks=EarlyStopping("val_loss"))
    trainer, _, _ = fit(loader(0), enable_checkpointing=None, callbacks=ModelCheckpoint(tmp_path, monitor="loss"))
    assert trainer.checkpoint_callback.best_model_path


def test_loaders_that_are_asked_anew():
    task = Task()
    task.train_dataloader = lambda: loader(8)
    task.val_dataloader = lambda: loader(4 * (task.current_epoch % 2))
    trainer = make_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=1)
    with pytest.warns(UserWarning, match="validation dataloader is empty"):
        trainer.fit(task)
    assert task.seen == ["start", 0, 0, "end"] * 2


def on_two_processes(root):
    found = []
    for val in (loader(0), [loader(0), loader(6)], DataLoader(Dry()), loader(1)):
        trainer, seen, said = fit(val, default_root_dir=root, num_sanity_val_steps=0, max_epochs=1)
        found.append((trainer.global_step, seen, any("empty" in t or "yielded no batch" in t for t in said)))
    return found


@pytest.mark.long
def test_two_processes(tmp_path):
    for rank, found in enumerate(run(on_two_processes, 2, tmp_path)):
        assert found == [
            (2, [], rank == 0),
            (2, ["start", 1, 1, "end"], rank == 0),
            (2, ["start", "end"], rank == 0),
            # Rank 1 works on rank 0's sample, of which its own lists keep nothing.
            (2, ["start", *([0] if rank == 0 else []), "end"], False),
        ]


def test_none_disables_the_tasks_own_loader():
    task = Task()
    task.train_dataloader = lambda: loader(8)
    task.val_dataloader = None
    with pytest.warns(UserWarning, match="no validation dataloader"):
        make_trainer().fit(task)
    assert (task.seen, task.trainer.global_step) == ([], 4)


def test_none_in_a_data_module_leaves_the_tasks_loader():
    data = treadle.DataModule()
    data.train_dataloader = lambda: loader(8)
    data.val_dataloader = None
    task = Task()
    task.val_dataloader = lambda: loader(2)
    make_trainer(num_sanity_val_steps=0).fit(task, data)
    assert task.seen == ["start", 0, "end"]


def test_none_disables_the_step():
    task = Task()
    task.validation_step = None
    trainer = make_trainer()
    with pytest.warns(UserWarning, match="no validation_step"):
        trainer.fit(task, loader(8), loader(2))
    assert task.seen == []
    with pytest.raises(ValueError, match="validate needs validation_step, but"):
        trainer.validate(task, loader(2))
