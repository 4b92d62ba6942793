"""Several loaders in `fit`, `validate` and `predict`: forms, modes, weights, limits, and going on from any step."""

import itertools

import pytest
import torch
from support.models import SaveEach, SGDTask
from support.trainers import make_trainer
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import CombinedLoader

import treadle

MODES = ("min_size", "max_size_cycle", "max_size", "sequential")


def numbers(count, batch=2, shuffle=True, first=0):
    data = torch.arange(float(first), float(first + count))[:, None] / 10
    return DataLoader(TensorDataset(data), batch, shuffle=shuffle)


def parts(batch):
    """The tensors in a batch of any form."""
    if batch is None:
        return []
    if isinstance(batch, torch.Tensor):
        return [batch]
    return [t for each in (batch.values() if isinstance(batch, dict) else batch) for t in parts(each)]


class Task(SGDTask):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.net = nn.Linear(1, 1)
        self.seen, self.evaluated = [], []

    def training_step(self, batch, batch_idx):
        self.seen.append([part.flatten().tolist() for part in parts(batch)])
        return (self.net(torch.cat(parts(batch))) - 1).square().mean()

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.evaluated.append((dataloader_idx, batch_idx, [part.flatten().tolist() for part in parts(batch)]))
        self.log("mean", torch.cat(parts(batch)).mean())

    test_step = validation_step

    def predict_step(self, batch, batch_idx, dataloader_idx=0):
        return torch.cat(parts(batch)).sum()


def weights(task):
    return [p.flatten().tolist() for p in task.parameters()]


@pytest.mark.parametrize("form", [dict, list, tuple], ids=lambda form: form.__name__)
def test_a_collection_is_cycled_and_keeps_its_form(form):
    several = {"a": numbers(4, shuffle=False), "b": numbers(6, shuffle=False)}
    task, own, moved = Task(), make_trainer(), []
    task.train_dataloader = lambda: several if form is dict else form(several.values())
    task.on_before_batch_transfer = lambda batch, number: moved.append((type(batch), number)) or batch
    own.fit(task)
    assert [[len(p) for p in row] for row in task.seen] == [[2, 2]] * 3
    assert task.seen[2][0] == task.seen[0][0]
    assert own.num_training_batches == 3
    assert own.estimated_stepping_batches == 3
    assert moved == [(form, 0)] * 3


@pytest.mark.parametrize("mode", MODES)
def test_groups_are_those_of_a_loop_by_hand(mode):
    """Accumulation weighs each micro-batch with all its samples, the last, partial group too."""
    task = Task()
    loaders = [numbers(5, shuffle=False), numbers(9, shuffle=False, first=20)]
    make_trainer(accumulate_grad_batches=2, max_epochs=2).fit(task, CombinedLoader(loaders, mode))
    by_hand = Task()
    rows = {
        "min_size": [(a, b) for (a,), (b,) in zip(*loaders, strict=False)],
        "sequential": [(a,) for loader in loaders for (a,) in loader],
    }.get(mode)
    if rows is None:
        first, second = ([part for (part,) in loader] for loader in loaders)
        rows = [(*([first[n % 3]] if mode == "max_size_cycle" or n < 3 else []), b) for n, b in enumerate(second)]
    optimizer = by_hand.configure_optimizers()
    for _ in range(2):
        for start in range(0, len(rows), 2):
            group = torch.cat([part for row in rows[start : start + 2] for part in row])
            optimizer.zero_grad()
            (by_hand.net(group) - 1).square().mean().backward()
            optimizer.step()
    torch.testing.assert_close(weights(task), weights(by_hand))


@pytest.mark.long
@pytest.mark.parametrize(
    "mode",
    [pytest.param(mode, marks=() if mode in ("min_size", "sequential") else pytest.mark.exhaustive) for mode in MODES],
)
def test_going_on_from_any_step(mode, tmp_path):
    def fit(path=None, callbacks=()):
        torch.manual_seed(3)
        task = Task()
        flags = {"accumulate_grad_batches": 2, "max_epochs": 2, "val_check_interval": 2, "callbacks": list(callbacks)}
        loaders = CombinedLoader({"a": numbers(5), "b": numbers(11)}, mode)
        make_trainer(**flags).fit(task, loaders, {"x": numbers(4), "y": numbers(2)}, ckpt_path=path)
        return task

    whole = fit(callbacks=[SaveEach(tmp_path)])
    steps = sorted(int(path.name) for path in tmp_path.iterdir())
    for step in steps[:-1]:
        task = fit(tmp_path / str(step))
        assert task.seen == whole.seen[len(whole.seen) - len(task.seen) :]
        assert weights(task) == weights(whole)


def test_limits_and_validation_within_the_epoch():
    task = Task()
    own = make_trainer(limit_train_batches=4, val_check_interval=2, num_sanity_val_steps=0)
    own.fit(task, {"a": numbers(4), "b": numbers(20)}, numbers(2))
    assert len(task.seen) == 4
    assert len(task.evaluated) == 2
    task = Task()  # in sequence the limit is that of each loader
    make_trainer(limit_train_batches=2).fit(task, CombinedLoader([numbers(20, shuffle=False)] * 2, "sequential"))
    assert [n for [part] in task.seen for n in part] == [0.0, torch.tensor(0.1).item(), *task.seen[1][0]] * 2
    task = Task()
    make_trainer(limit_train_batches=0.5).fit(task, [numbers(4), numbers(20)])
    assert len(task.seen) == 5


@pytest.mark.parametrize("stage", ["validate", "test"])
def test_evaluation(stage):
    loaders = {"a": numbers(4, shuffle=False), "b": [numbers(2, shuffle=False, first=10)]}
    for given in (loaders, CombinedLoader(loaders, "sequential")):
        task = Task()
        found = getattr(make_trainer(), stage)(task, given, verbose=False)
        assert [(number, index) for number, index, _ in task.evaluated] == [(0, 0), (0, 1), (1, 0)]
        assert [round(*each.values(), 4) for each in found] == [0.15, 1.05]
    task = Task()
    [found] = getattr(make_trainer(), stage)(task, CombinedLoader(loaders, "max_size"), verbose=False)
    assert [(number, index) for number, index, _ in task.evaluated] == [(0, 0), (0, 1)]
    assert [len(row) for _, _, row in task.evaluated] == [2, 1]
    # Each batch weighs its samples: (0 + 0.1 + 1.0 + 1.1 + 0.2 + 0.3) / 6
    assert found["mean"] == pytest.approx(2.7 / 6)


def test_prediction():
    loaders = [numbers(4, shuffle=False), numbers(2, shuffle=False)]
    found = make_trainer().predict(Task(), loaders)
    assert [[round(float(n), 4) for n in each] for each in found] == [[0.1, 0.5], [0.1]]
    found = make_trainer().predict(Task(), CombinedLoader(loaders, "min_size"))
    assert [round(float(n), 4) for n in found] == [0.2]
    assert [round(float(n), 4) for n in make_trainer().predict(Task(), loaders[0])] == [0.1, 0.5]
    assert make_trainer().predict(Task(), loaders[0], return_predictions=False) is None


def test_the_checkpoint_of_other_loaders_is_refused(tmp_path):
    make_trainer(callbacks=[SaveEach(tmp_path)]).fit(Task(), [numbers(4), numbers(6)])
    for loaders, words in [
        (numbers(4), "2 combined dataloaders"),
        ([numbers(4)] * 3, "saved with 2 training"),
        (CombinedLoader([numbers(4)] * 2), "max_size_cycle"),
    ]:
        with pytest.raises(ValueError, match=words):
            make_trainer(max_epochs=2).fit(Task(), loaders, ckpt_path=tmp_path / "2")


def test_a_list_of_iterators_is_a_list_of_dataloaders():
    task, own = treadle.TaskModule(), make_trainer(limit_predict_batches=2)
    task.predict_step = lambda batch, batch_idx, dataloader_idx=0: (batch, batch_idx, dataloader_idx)
    predicted = own.predict(task, [itertools.count(), iter([5, 6, 7])])
    assert predicted == [[(0, 0, 0), (1, 1, 0)], [(5, 0, 1), (6, 1, 1)]]
    assert own.predict(task, [[0, 1], [2, 3]]) == [([0, 1], 0, 0), ([2, 3], 1, 0)]
