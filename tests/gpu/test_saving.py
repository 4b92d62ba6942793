"""Checkpoints that are written while a device computes on."""

import pytest
import torch
from support.gpus import CUDA, Net, Task, accelerator, are_equal, keep_busy, loader, needs_gpu, trainer, weights
from torch import nn

import treadle


def prepared(**options):
    torch.manual_seed(0)
    own, net = accelerator(**options), Net()
    model, optimizer, data = own.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05), loader(16))
    return own, model, optimizer, data


def test_saves_beside_a_slow_device_hold_their_own_step(tmp_path):
    own, model, optimizer, data = prepared()
    expected = {}
    for number, (x, y) in enumerate(data):
        keep_busy()
        own.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        if number % 4 == 3:
            own.finish_saving()
            own.save_state(tmp_path / f"beside{number}", blocking=False)
            own.finish_saving() if number == 7 else None
            moments = [optimizer.state[p]["exp_avg"].clone() for p in net_parameters(own, model)]
            expected[number] = (weights(own.unwrap_model(model)), moments)
    own.finish_saving()
    for number, (saved, moments) in expected.items():
        other, other_model, other_optimizer, _ = prepared()
        other.load_state(tmp_path / f"beside{number}")
        assert are_equal(weights(other.unwrap_model(other_model)), saved), number
        for parameter, moment in zip(net_parameters(other, other_model), moments, strict=True):
            assert torch.equal(other_optimizer.state[parameter]["exp_avg"], moment), number


def net_parameters(own, model):
    return list(own.unwrap_model(model).parameters())


@needs_gpu
def test_a_step_waits_on_the_device_until_its_optimizer_is_copied(tmp_path):
    """Large enough that the copy takes longer than the next step."""
    own = accelerator()
    net = nn.Linear(8192, 8192, bias=False)
    model, optimizer = own.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.5))
    x = torch.ones(1, 8192, device=own.device)
    for _ in range(2):
        own.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    moments = optimizer.state[net.weight]["exp_avg"].clone()
    own.save_state(tmp_path / "beside", blocking=False)
    for _ in range(3):
        own.backward(model(x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    own.finish_saving()
    assert not torch.equal(optimizer.state[net.weight]["exp_avg"], moments)
    own.load_state(tmp_path / "beside")
    assert torch.equal(optimizer.state[net.weight]["exp_avg"], moments)


@needs_gpu
def test_the_slab_holds_no_more_than_the_state(tmp_path):
    own = accelerator()
    net = nn.Linear(4096, 4097)  # a power of two and a little: torch's own pinned memory would take twice as much
    model, optimizer = own.prepare(net, torch.optim.AdamW(net.parameters()))
    own.backward(model(torch.ones(1, 4096, device=own.device)).sum())
    optimizer.step()
    own.save_state(tmp_path / "c", blocking=False)
    own.finish_saving()
    on_device = ("model.safetensors", "optimizer.safetensors")  # random states are on the host already
    places = own.checkpointer.host_copies._buffers.items()
    buffers = [buffer for (file, _), buffer in places if file in on_device]
    held = {buffer.untyped_storage().data_ptr(): buffer.untyped_storage().nbytes() for buffer in buffers}
    state = 3 * sum(parameter.nbytes for parameter in net.parameters())
    assert sum(held.values()) < 1.01 * state
    assert all(buffer.is_pinned() for buffer in buffers if buffer.numel() > 1)


def test_a_crash_saves_the_last_step(tmp_path):
    class Failing(Task):
        def training_step(self, batch, batch_idx):
            if batch_idx == 5:
                raise RuntimeError("on purpose")
            return super().training_step(batch, batch_idx)

    task, callback = Failing(), treadle.callbacks.OnExceptionCheckpoint(tmp_path, filename="crash")
    with pytest.raises(RuntimeError, match="on purpose"):
        trainer(callbacks=callback, default_root_dir=tmp_path).fit(task, loader())
    saved = weights(task)
    (path,) = tmp_path.glob("crash*")
    short = Task()
    trainer(limit_train_batches=5).fit(short, loader())
    assert are_equal(saved, weights(short))
    again = Task()
    trainer(default_root_dir=tmp_path).fit(again, loader(), ckpt_path=path)
    whole = Task()
    trainer().fit(whole, loader())
    if not CUDA:  # on a GPU equal up to the order of sums
        assert are_equal(weights(again), weights(whole))
    for name, value in weights(whole).items():
        torch.testing.assert_close(weights(again)[name], value, rtol=1e-4, atol=1e-5)
