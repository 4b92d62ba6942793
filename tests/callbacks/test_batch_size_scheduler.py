"""The samples per optimizer step change during the run, at the same steps on any number of processes."""

import pytest
import torch
from support.callback_runs import Tiny, trainer
from support.models import Stream
from support.processes import run
from torch.utils.data import DataLoader, TensorDataset
from treadle.callbacks import (
    BatchSizeFinder,
    BatchSizeScheduler,
    Callback,
    GradientAccumulationScheduler,
    ModelCheckpoint,
)

SCHEDULE = {0: 4, 3: 8, 5: 12}
# Two epochs of 40 samples: the sizes change within the first one, and the last group of the second is shorter.
GROUPS = [4, 4, 4, 8, 8, 12, 12, 12, 12, 4]
DATA = torch.randn(40, 2, generator=torch.Generator().manual_seed(4))


class Notes(Callback):
    def __init__(self):
        self.samples, self.numbers, self.estimated = [], [], None

    def on_fit_start(self, trainer, task):
        self.estimated = trainer.estimated_stepping_batches

    def on_before_optimizer_step(self, trainer, *_):
        self.samples.append(trainer.accelerator.cursor.micro.group_samples)
        self.numbers.append(trainer.accumulate_grad_batches)


def train(root, *callbacks, size=2, shuffle=False, workers=0, stream=False, ckpt_path=None, **flags):
    notes, task = Notes(), Tiny()
    data = Stream(DATA.split(1)) if stream else TensorDataset(DATA)
    source = DataLoader(data, size, shuffle=shuffle, num_workers=workers)
    made = trainer(root, BatchSizeScheduler(SCHEDULE), notes, *callbacks, limit_val_batches=0, **flags)
    made.fit(task, source, ckpt_path=ckpt_path)
    return made, notes, made.accelerator.get_state_dict(task)["net.weight"]


@pytest.mark.parametrize("workers", [0, 1])
def test_groups_and_their_number(tmp_path, workers):
    """Workers read ahead of the steps, so the groups must not depend on when they are planned."""
    made, notes, _ = train(tmp_path, workers=workers)
    assert notes.samples == GROUPS
    assert notes.numbers == [2, 2, 2, 4, 4, 6, 6, 6, 6, 6]
    assert made.global_step == notes.estimated == made.estimated_stepping_batches == 10
    assert made.accumulate_grad_batches == 1
    assert made.accelerator.accumulation.plan_group is None


def step_by_hand():
    by_hand = Tiny()
    optimizer = by_hand.configure_optimizers()
    for part in torch.cat([DATA, DATA]).split(GROUPS):
        optimizer.zero_grad()
        by_hand.net(part).pow(2).mean().backward()
        optimizer.step()
    return by_hand.net.weight.detach()


def run_on_two(root):
    """The same runs on two processes, with half the batch size."""
    flags = {"strategy": "ddp"}, {"strategy": "fsdp"}, {"strategy": "ddp", "workers": 1}
    runs = [train(f"{root}/{number}", size=1, **more) for number, more in enumerate(flags)]
    saver = ModelCheckpoint(f"{root}/c", save_top_k=-1, every_n_train_steps=3, filename="{step}")
    _, _, whole = train(root, saver, size=1, shuffle=True, strategy="ddp")
    made, _, resumed = train(root, size=1, shuffle=True, strategy="ddp", ckpt_path=f"{root}/c/step=6.ckpt")
    assert made.global_step == 10
    assert torch.equal(resumed, whole)
    for stream in (False, True):  # each process reads all of the data, so there are twice as many samples
        _, notes, _ = train(root, size=1, stream=stream, strategy="ddp", use_distributed_sampler=False)
        assert notes.samples == [*GROUPS, *[12] * 6, 8]
    return [(notes.samples, notes.estimated, weight) for _, notes, weight in runs]


@pytest.mark.long
def test_steps_are_those_by_hand(tmp_path):
    weights = [train(tmp_path)[2]]
    for samples, estimated, weight in run(run_on_two, 2, str(tmp_path))[0]:
        assert (samples, estimated) == (GROUPS, 10)
        weights.append(weight)
    for weight in weights:
        torch.testing.assert_close(weight, step_by_hand(), rtol=1e-5, atol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("stream", [False, True], ids=["data", "stream"])
def test_a_run_that_resumes_at_any_step_is_the_one_that_never_stopped(tmp_path, stream):
    saver = ModelCheckpoint(tmp_path / "c", save_top_k=-1, every_n_train_steps=1)
    _, notes, whole = train(tmp_path, saver, shuffle=not stream, stream=stream)
    assert notes.samples == GROUPS
    paths = sorted((tmp_path / "c").iterdir())
    assert len(paths) == 10
    for path in paths:
        made, _, resumed = train(tmp_path, shuffle=not stream, stream=stream, ckpt_path=path)
        assert made.global_step == 10
        assert torch.equal(resumed, whole)


def test_a_skipped_step_counts(tmp_path):
    class Spoiled(Tiny):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss * float("nan") if self.trainer.current_epoch == 0 and batch_idx == 2 else loss

    notes = Notes()
    made = trainer(tmp_path, BatchSizeScheduler(SCHEDULE), notes, on_nonfinite="skip")
    made.fit(Spoiled(), DataLoader(TensorDataset(DATA), 2))
    assert made.progress.skipped == 1
    assert notes.samples == [GROUPS[0], *GROUPS[2:]]


def test_errors(tmp_path):
    with pytest.raises(ValueError, match=r"scheduling=\{2: 4\} must contain step 0"):
        BatchSizeScheduler({2: 4})
    with pytest.raises(ValueError, match=r"scheduling\[0\]=4 must be a multiple of 3, the samples of a micro-batch"):
        train(tmp_path, size=3)
    with pytest.raises(ValueError, match=r"accumulate_grad_batches=2.* and BatchSizeScheduler both set"):
        train(tmp_path, accumulate_grad_batches=2)
    with pytest.raises(ValueError, match="BatchSizeScheduler and GradientAccumulationScheduler both set the number"):
        train(tmp_path, GradientAccumulationScheduler({1: 2}))
    with pytest.raises(ValueError, match="needs a dataloader with a fixed batch size"):
        train(tmp_path, size=None)
    with pytest.raises(ValueError, match=r"BatchSizeFinder\(keep_global_batch=True\) and BatchSizeScheduler both set"):
        train(tmp_path, BatchSizeFinder(keep_global_batch=True))
