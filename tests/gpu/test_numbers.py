"""Numbers that a device's haste could spoil: batches, predictions, non-finite steps, random states."""

import math

import pytest
import torch
from support.gpus import (
    CUDA,
    DEVICE,
    VISIBLE,
    Task,
    accelerator,
    are_equal,
    keep_busy,
    loader,
    needs_gpu,
    trainer,
    weights,
)
from support.processes import run
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from treadle.engine import move_data_to_device

import treadle


def test_predictions_are_complete_when_predict_returns():
    data = loader(6)
    found = trainer().predict(Task(slow=True), data)
    for batch, output in zip(data, found, strict=True):
        assert output["twice"].device.type == "cpu"
        assert torch.equal(output["twice"], 2 * batch[0])
        assert output["first"] == batch[0][0, 0]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("rows", [3, 40_000])  # below and above what is copied on a stream of its own
def test_batches_arrive_whole_while_the_device_computes(rows, workers):
    data = torch.arange(12.0)[:, None].expand(12, rows * 8).clone()
    own = accelerator()
    prepared = own.prepare(DataLoader(TensorDataset(data), 1, num_workers=workers))
    sums = []
    for (batch,) in prepared:
        keep_busy()
        sums.append(batch.double().sum() / batch.numel())
        batch.fill_(-1.0)  # it is the loop's own
    assert [value.item() for value in sums] == list(range(12))
    assert data[:, 0].tolist() == list(range(12))


@needs_gpu
def test_batches_are_pinned_and_copied_beside_the_computation():
    host = torch.ones(1 << 20)
    torch.cuda.synchronize()
    torch.cuda._sleep(200_000_000)
    began, ended = torch.cuda.Event(), torch.cuda.Event()
    began.record()
    moved = move_data_to_device(host, DEVICE)
    ended.record()
    assert not began.query()  # the host has waited for nothing
    torch.cuda.synchronize()
    assert moved.sum().item() == len(host)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("fused", [None, False])
def test_a_step_that_is_not_finite_is_named_and_not_applied(last, fused):
    class Watched(Task):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01, fused=fused)

    bad = 7 if last else 3
    task, short = Watched(bad=bad), Watched()
    with pytest.raises(ValueError, match=f"optimizer step {bad + 1}"):
        trainer().fit(task, loader())
    if not CUDA or fused is None:
        trainer(limit_train_batches=bad).fit(short, loader())
        assert are_equal(weights(task), weights(short))


def test_a_skipped_step_leaves_the_weights():
    task = Task(bad=2)
    trainer(on_nonfinite="skip").fit(task, loader())
    assert all(torch.isfinite(value).all() for value in weights(task).values())
    assert math.isnan(task.losses[2].item())


def resumed(folder):
    """Train two epochs, and one that a second Trainer goes on from: whether the weights are equal."""
    flags = {"deterministic": True, "max_epochs": 2, "gradient_clip_val": 1.0}
    data = loader(shuffle=True)
    treadle.seed_everything(3)
    whole = Task(drop=0.5)
    trainer(**flags).fit(whole, data)
    treadle.seed_everything(3)
    first = Task(drop=0.5)
    run = trainer(**{**flags, "max_epochs": 1})
    run.fit(first, data)
    run.save_checkpoint(folder / "half.ckpt")
    treadle.seed_everything(4)
    second = Task(drop=0.5)
    trainer(**flags).fit(second, loader(shuffle=True), ckpt_path=folder / "half.ckpt")
    return are_equal(weights(whole), weights(second))


def test_a_resume_is_bit_for_bit_with_deterministic_algorithms(tmp_path):
    assert run(resumed, 1, tmp_path, env=VISIBLE) == [True]


@needs_gpu
def test_a_resume_on_another_device_draws_on_from_the_same_state():
    from treadle.engine import random_state
    from treadle.engine.rng import set_random_state

    torch.cuda.manual_seed(5)
    torch.rand(3, device=DEVICE)
    state = random_state()
    expected = torch.rand(4, device=DEVICE)
    # As saved by a process that computed on a second GPU, of which the first one's state is another.
    state["cuda"], state["cuda_device"] = [torch.cuda.get_rng_state(), state["cuda"][0]], 1
    set_random_state(state)
    assert torch.equal(torch.rand(4, device=DEVICE), expected)


def seeded_process():
    from treadle.utils import set_seed

    set_seed(3, deterministic=True)
    layer = nn.Linear(64, 64).to(DEVICE)
    layer(torch.ones(8, 64, device=DEVICE)).sum().backward()  # cuBLAS refuses without its variable
    return torch.are_deterministic_algorithms_enabled()


def test_set_seed_makes_matrix_products_deterministic():
    assert run(seeded_process, 1, env=VISIBLE) == [True]


def on_default_device():
    torch.set_default_device(DEVICE)
    task = Task()
    rows = [(torch.randn(8), torch.randn(1)) for _ in range(32)]
    trainer().fit(task, DataLoader(rows, 4, shuffle=True, generator=torch.Generator(DEVICE)))
    return [value.item() for value in task.losses]


def test_a_default_device_changes_nothing_but_where_tensors_are_made():
    assert len(run(on_default_device, 1, env=VISIBLE)[0]) == 8


def test_fused_steps_equal_the_others():
    plain, chosen = Task(), Task()
    plain.configure_optimizers = lambda: torch.optim.AdamW(plain.parameters(), lr=0.01, fused=False, foreach=False)
    for task in (plain, chosen):
        trainer().fit(task, loader(20))
    for name, value in weights(plain).items():
        torch.testing.assert_close(weights(chosen)[name], value, rtol=1e-4, atol=1e-6)
    assert chosen.trainer.accelerator.optimizers[0].fused_by_choice is CUDA


def test_the_device_is_the_one_that_was_asked_for():
    task = Task()
    run = trainer()
    run.fit(task, loader(2))
    assert task.losses[0].device == run.accelerator.device == DEVICE
