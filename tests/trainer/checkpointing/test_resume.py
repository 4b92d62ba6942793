"""A resumed run is the uninterrupted one, to the bit: from every kind of step, in every kind of set-up."""

import pytest
import torch
from support.models import Line, SaveIn, SGDTask, loader
from support.processes import run
from support.resume_trials import Rows, SaveEach, differences, draw, with_trainer
from support.trainers import make_trainer
from torch import nn
from torchmetrics import MeanMetric, SumMetric

SAMPLES, EPOCHS = 13, 3
BASE = draw(0, "trainer") | {
    **dict.fromkeys(
        ("drop_last", "subclass", "two_groups", "val_shuffle", "draws", "metrics", "early", "rates"), False
    ),
    **dict.fromkeys(("deterministic", "own", "workers"), False),
    **dict.fromkeys(("clip", "val_every", "limit", "keeper", "sampler")),
    **dict.fromkeys(("frequency", "accumulate", "validation", "val_epochs", "every"), 1),
    **{"data": "map", "order": "shuffle", "noise": ["torch", "numpy", "python"], "layers": ["centre", "dropout"]},
    **{"size": SAMPLES, "batch": 2, "epochs": EPOCHS},
    **{"optimizer": "sgd", "schedule": "step", "precision": "32-true", "strategy": "auto"},
}
SETTINGS = {
    "workers": {
        **{"workers": 2, "batch": 3, "validation": 0, "epochs": 2},
        **{"optimizer": "adamw", "schedule": "cycle", "accumulate": 2},
    },
    "plateau": {"schedule": "plateau", "batch": 3, "own": True, "precision": "bf16-mixed", "val_every": 2},
    "float16": {"optimizer": "adamw", "batch": 4, "precision": "16-mixed"},
    "stream": {"data": "stream", "order": "plain", "validation": 0, "optimizer": "adamw", "schedule": "epoch"},
}


def assert_same(resumed, whole, noted):
    """`resumed` continued from `whole`'s checkpoint, when so many batches had been read and rows written."""
    batches, rows = noted
    left = {"ids": whole["ids"][batches:], "losses": whole["losses"][batches:], "rows": whole["rows"][rows:]}
    assert differences(resumed, whole | left) == []


@pytest.mark.filterwarnings("ignore:the stream has no state", "ignore:.*nothing is validated", "ignore:.*lr_scheduler")
@pytest.mark.parametrize("name", SETTINGS)
def test_resume_from_any_step(tmp_path, name):
    own, saver, kept = BASE | SETTINGS[name], SaveEach(tmp_path), tmp_path / "kept"
    whole = with_trainer(own, 1, kept, saver)
    assert saver.count >= 5
    per_epoch = saver.count // own["epochs"]
    few = {1, per_epoch, per_epoch + 2}
    if not own["workers"]:
        few |= {2, per_epoch - 1, per_epoch + 1, saver.count}
    for step in sorted(few):
        resumed = with_trainer(own, step + 100, kept, ckpt_path=tmp_path / str(step))
        assert_same(resumed, whole, saver.noted[step])


@pytest.mark.long
def test_a_limit_within_an_epoch_then_more(tmp_path):
    path, kept = tmp_path / "limit", tmp_path / "kept"
    whole = with_trainer(BASE, 1, kept)
    for limit in (3, 7, 10):  # 7 batches are an epoch
        first = with_trainer(BASE, 1, kept, after=lambda trainer: trainer.save_checkpoint(path), max_steps=limit)
        assert first["progress"]["step"] == limit
        resumed = with_trainer(BASE, 5, kept, ckpt_path=path)
        for name in ("weights", "torch", "numpy", "python"):
            assert differences(resumed[name], whole[name]) == []
        assert first["ids"] + resumed["ids"] == whole["ids"]
        means = [row for row in resumed["rows"] if "loss_epoch" in row[1]]
        assert means == [row for row in whole["rows"] if "loss_epoch" in row[1]][-len(means) :]
        assert len(means) == EPOCHS - limit // 7


def test_more_epochs_for_a_finished_run(tmp_path):
    own, saver, kept = BASE | SETTINGS["plateau"], SaveEach(tmp_path), tmp_path / "kept"
    whole, short = with_trainer(own, 1, kept), with_trainer(own | {"epochs": 2}, 1, kept, saver)
    resumed = with_trainer(own, 3, kept, ckpt_path=tmp_path / str(saver.count))
    assert differences(resumed["weights"], whole["weights"]) == []
    assert resumed["ids"] == whole["ids"][len(short["ids"]) :]
    # And one that is over already trains nothing more.
    over = with_trainer(own | {"epochs": 2}, 3, kept, ckpt_path=tmp_path / str(saver.count))
    assert over["ids"] == []
    assert differences([over["weights"], over["metrics"]], [short["weights"], short["metrics"]]) == []


# Without anything random but the order, so that the number of processes makes no difference.
EXACT = BASE | {"noise": [], "layers": [], "validation": 0, "hooks_draw": False}


def train_exactly(root, world, samples, steps=()):
    """A run of `samples` a step, or, for each of `steps`, the one that resumes behind it."""
    own = EXACT | {"batch": samples // world}
    if not steps:
        return with_trainer(own, 1, root / "kept", SaveEach(root))
    return [with_trainer(own, 9, root / "kept", ckpt_path=root / str(step)) for step in steps]


def save_and_resume(root, steps):
    """A run of two processes, and resumptions in them of a run of one."""
    return train_exactly(root / "two", 2, 4), train_exactly(root / "one", 2, 4, steps)


def whole_batches(ranks):
    """The ids of each global batch, and its mean loss, from what each process saw."""
    batches = []
    for parts in zip(*[zip(rank["ids"], rank["losses"], strict=True) for rank in ranks], strict=True):
        ids = [number for part, _ in parts for number in part]
        if len(ids) > len(set(ids)):  # a process without a share repeats a sample, with no weight
            ids, parts = parts[0][0], parts[:1]
        loss = sum(len(part) * value for part, value in parts) / sum(len(part) for part, _ in parts)
        batches.append((ids, loss))
    return batches


def check_resumed(ranks, reference, steps, per_epoch):
    """The batches are those of the uninterrupted run, and each sample of the epoch comes once."""
    for number, step in enumerate(steps):
        found = whole_batches([rank[number] for rank in ranks])
        assert [ids for ids, _ in found] == [ids for ids, _ in reference[step:]]
        assert [loss for _, loss in found] == pytest.approx([loss for _, loss in reference[step:]], abs=1e-5)
        begun = [i for ids, _ in reference[per_epoch * (step // per_epoch) : step] for i in ids]
        rest = [i for ids, _ in found[: per_epoch - step % per_epoch] for i in ids]
        assert sorted(begun + rest) == list(range(SAMPLES))


@pytest.mark.filterwarnings("ignore:.*nothing is validated")
def test_another_number_of_processes(tmp_path):
    steps = (1, 2, 4, 6)  # 4 steps are an epoch
    reference = whole_batches([train_exactly(tmp_path / "one", 1, 4)])
    two, one_on_two = zip(*run(save_and_resume, 2, tmp_path, steps), strict=True)
    assert [ids for ids, _ in whole_batches(two)] == [ids for ids, _ in reference]
    check_resumed(one_on_two, reference, steps, 4)
    check_resumed([train_exactly(tmp_path / "two", 1, 4, steps)], reference, steps, 4)


class Measured(SGDTask):
    """Metric objects of every habit: logged, logged in validation, and computed and reset by hand."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(1, 1)
        self.trained, self.validated = MeanMetric(), SumMetric()
        self.by_hand = SumMetric()
        self.lasting = SumMetric()

    def training_step(self, batch, batch_idx):
        self.trained.update(batch)
        self.by_hand.update(batch)
        self.lasting.update(batch)
        self.log("trained", self.trained, on_step=False, on_epoch=True)
        return self.net(batch).mean()

    def validation_step(self, batch, batch_idx):
        self.validated.update(batch)
        self.log("validated", self.validated)

    def on_train_epoch_end(self):
        self.log("by_hand", self.by_hand.compute())
        self.by_hand.reset()
        self.log("lasting", self.lasting.compute())


@pytest.mark.parametrize("hook", ["on_step_end", "on_validation_epoch_end", "on_validation_end", "on_train_epoch_end"])
def test_metric_objects_begin_the_next_epoch_as_they_would_have(tmp_path, hook):
    data = [torch.tensor([[float(number)]]) for number in range(5)]
    rows, saver = [], SaveIn(hook, 6 if hook == "on_step_end" else 10, tmp_path / "ckpt")
    saver.after_task = 2  # as a ModelCheckpoint
    for path in (None, tmp_path / "ckpt"):
        kept = Rows()
        own = make_trainer(max_epochs=4, callbacks=[] if path else saver, logger=kept)
        own.fit(Measured(), data, data, ckpt_path=path)
        rows.append(kept.rows)
    whole, resumed = ([row for row in each if row[1]["epoch"] > 1] for each in rows)
    assert resumed == whole
    assert [row["lasting"] for _, row in rows[0] if "lasting" in row] == [10.0, 20.0, 30.0, 40.0]
    assert [row["validated"] for _, row in whole if "validated" in row] == [10.0, 10.0]


def test_a_metric_object_that_nobody_holds(tmp_path):
    metric = MeanMetric()

    class Hidden(Line):
        def training_step(self, batch, batch_idx):
            metric.update(batch[0])
            self.log("hidden", metric, on_step=False, on_epoch=True)
            return super().training_step(batch, batch_idx)

    own = make_trainer(callbacks=SaveIn("on_step_end", 1, tmp_path / "ckpt"))
    with pytest.warns(UserWarning, match="'hidden' was logged as a MeanMetric .* attribute of Hidden"):
        own.fit(Hidden(), loader())
