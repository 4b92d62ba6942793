"""`SpikeWatch`: which losses and gradient norms are spikes, and what follows."""

import pytest
import torch
from support.callback_runs import loader, trainer
from support.models import SGDTask
from support.processes import run
from torch import nn
from treadle.callbacks import (
    ModelCheckpoint,
    SpikeWatch,
)

import treadle


class Losses(SGDTask):
    """Its loss is what it is told, and so is its gradient."""

    lr = 1e-9

    def __init__(self, losses):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.losses = losses

    def training_step(self, batch, batch_idx):
        loss = self.losses[self.global_step + (self.current_epoch == 9)]
        return (self.weight - self.weight.detach() + 1) * loss


def losses(**spikes):
    usual = [1 + 0.1 * (n % 3) for n in range(24)]
    for step, value in spikes.items():
        usual[int(step[1:]) - 1] = value
    return usual


def watch(root, values, *callbacks, ckpt_path=None, accumulate=1, **more):
    watching = SpikeWatch(**{"window": 10, "warmup": 4, "every_n_steps": 5} | more)
    made = trainer(root, watching, *callbacks, max_epochs=1, on_nonfinite="ignore", accumulate_grad_batches=accumulate)
    made.fit(Losses(values), loader(24 * accumulate, 1), ckpt_path=ckpt_path)
    return made, watching


@pytest.mark.parametrize("monitor", ["loss", "grad_norm"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_spikes_are_found_and_nothing_else(tmp_path, recwarn, monitor, accumulate):
    values = losses(s2=9.0, s8=5.0, s9=5.0, s14=1.35, s24=float("nan"))  # step 2 is within the warm-up
    _, watching = watch(tmp_path, values, monitor=monitor, accumulate=accumulate)
    assert [step for step, _ in watching.spikes] == [8, 9, 24]
    assert watching.spikes[0][1] == pytest.approx(5.0)
    assert "5 in step 8 (usual: 1.1), 5 in step 9" in str([str(w.message) for w in recwarn])


def test_steps_without_a_loss_are_counted(tmp_path):
    class Manual(Losses):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return loss if batch_idx % 2 else None

    watching = SpikeWatch(window=10, warmup=4, every_n_steps=6)
    with pytest.warns(UserWarning, match=r"loss spiked: 5 in step 14 "):
        trainer(tmp_path, watching, max_epochs=1).fit(Manual(losses(s14=5.0)), loader(24, 1))
    assert watching.spikes == [(14, 5.0)]


def test_what_to_do(tmp_path):
    made, _ = watch(tmp_path, losses(s8=5.0), action="stop")
    assert made.global_step == 11  # what is asked at the end of step 10 is read in the next one
    with pytest.raises(ValueError, match=r"loss spiked: 5 in step 8"):
        watch(tmp_path, losses(s8=5.0), action="raise")
    with pytest.raises(ValueError, match="warn, stop, raise"):
        SpikeWatch(action="save")
    with pytest.raises(ValueError, match="loss, grad_norm"):
        SpikeWatch("gradient")


def test_a_run_that_goes_on_finds_the_same(tmp_path):
    saver = ModelCheckpoint(tmp_path / "c", every_n_train_steps=7, save_top_k=-1)
    values = losses(s6=5.0, s16=7.0)
    _, whole = watch(tmp_path, values, saver)
    for path in (tmp_path / "c").iterdir():
        _, again = watch(tmp_path, values, ckpt_path=path)
        assert again.spikes == whole.spikes == [(6, 5.0), (16, 7.0)]


def spikes_on_two(root):
    rank = treadle.strategies.open_world("cpu").rank
    watching = SpikeWatch(window=10, warmup=4, every_n_steps=5, action="stop")
    made = trainer(root, watching, max_epochs=1, strategy="ddp")
    made.fit(Losses(losses(**({"s8": 21.0} if rank else {}))), loader(48, 1))
    return watching.spikes, made.global_step


def test_a_spike_on_one_process_is_known_to_all(tmp_path):
    first, second = run(spikes_on_two, 2, str(tmp_path))
    assert first == second == ([(8, pytest.approx(11.05))], 11)
