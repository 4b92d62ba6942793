"""Shards in a world of one: the same numbers as a whole model, in every variant, on whatever device."""

import pytest
import torch
from support.gpus import DEVICE, VISIBLE, Task, are_equal, loader, trainer, weights
from support.processes import run
from torch import nn
from treadle.strategies import FSDP

import treadle

pytestmark = pytest.mark.long


def trained(strategy, **flags):
    treadle.seed_everything(0)
    task = Task()
    trainer(strategy=strategy, **flags).fit(task, loader())
    return weights(task)


def shard(options, flags):
    if "mixed_precision" in options:
        from torch.distributed.fsdp import MixedPrecisionPolicy

        options = {"mixed_precision": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}
    return trained(FSDP(auto_wrap_policy={nn.Linear}, **options), **flags), trained("single", **flags)


@pytest.mark.parametrize(
    ("options", "flags", "tolerance"),
    [
        ({}, {}, 1e-5),
        pytest.param({"activation_checkpointing_policy": True}, {}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param({"reshard_after_forward": False}, {}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param({"cpu_offload": True}, {}, 1e-5, marks=pytest.mark.exhaustive),
        ({}, {"precision": "bf16-mixed"}, 0.02),
        pytest.param({"mixed_precision": "bf16"}, {"precision": "bf16-mixed"}, 0.03, marks=pytest.mark.exhaustive),
        pytest.param({}, {"precision": "bf16-true"}, 0.05, marks=pytest.mark.exhaustive),
        pytest.param({}, {"gradient_clip_val": 0.1}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param({}, {"accumulate_grad_batches": 2}, 1e-5, marks=pytest.mark.exhaustive),
        pytest.param({"sync_each_batch": True}, {"accumulate_grad_batches": 2}, 1e-5, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_every_variant_trains_as_a_whole_model_does(options, flags, tolerance):
    ((sharded, plain),) = run(shard, 1, options, flags, env=VISIBLE)
    for name, value in plain.items():
        torch.testing.assert_close(sharded[name].float(), value.float(), rtol=tolerance, atol=tolerance)


def overflowing():
    class Overflowing(Task):
        def loss(self, batch):
            return super().loss(batch) * 1e4

    task = Overflowing()
    trainer(strategy=FSDP(), precision="16-mixed").fit(task, loader(20))
    return weights(task)


def test_float16_gradients_that_overflow_are_left_out():
    (found,) = run(overflowing, 1, env=VISIBLE)
    assert all(torch.isfinite(value).all() for value in found.values())


def interrupted():
    class Failing(Task):
        def on_after_backward(self):
            if self.global_step == 2 and self.fails:
                raise KeyError("on purpose")

    task = Failing()
    task.fails = True
    flags = {"strategy": FSDP(auto_wrap_policy={nn.Linear})}
    try:
        trainer(**flags).fit(task, loader())
    except KeyError:
        task.fails = False
    trainer(**flags).fit(task, loader())
    return all(torch.isfinite(value).all() for value in weights(task).values())


def test_a_model_whose_backward_failed_trains_on():
    assert run(interrupted, 1, env=VISIBLE) == [True]


def saved_and_loaded(folder):
    flags = {"strategy": FSDP(auto_wrap_policy={nn.Linear})}
    first = trainer(**flags)
    task = Task()
    first.fit(task, loader())
    first.save_checkpoint(f"{folder}/c.ckpt")
    other = Task()
    trainer(**flags, max_epochs=1).fit(other, loader(), ckpt_path=f"{folder}/c.ckpt")
    single = Task()
    trainer(max_epochs=1).fit(single, loader(), ckpt_path=f"{folder}/c.ckpt")
    return are_equal(weights(task), weights(other)), are_equal(weights(task), weights(single))


def test_a_checkpoint_is_the_same_for_shards_and_whole_models(tmp_path):
    assert run(saved_and_loaded, 1, str(tmp_path), env=VISIBLE) == [(True, True)]


class Configured(treadle.TaskModule):
    """Built by the strategy, where it wants it."""

    def configure_model(self):
        self.net = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1))
        nn.init.normal_(self.net[0].weight, std=0.3)
        self.net[2].weight.data.uniform_(-0.1, 0.1)

    def on_fit_start(self):
        self.start = weights(self)

    def training_step(self, batch):
        return nn.functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def initial(strategy):
    treadle.seed_everything(7)
    task = Configured()
    trainer(strategy=FSDP(auto_wrap_policy={nn.Linear}) if strategy == "fsdp" else strategy).fit(task, loader(2))
    return task.start, torch.rand(3, device=DEVICE).cpu(), torch.rand(3)


def test_a_model_that_is_built_in_place_starts_alike_under_every_strategy():
    ((sharded, *after_sharded),) = run(initial, 1, "fsdp", env=VISIBLE)
    ((plain, *after_plain),) = run(initial, 1, "single", env=VISIBLE)
    assert are_equal(sharded, plain)
    assert all(map(torch.equal, after_sharded, after_plain))  # what is drawn afterwards, too


def test_where_it_ran():
    assert run(where, 1, env=VISIBLE) == [DEVICE.type]


def where():
    return trainer(strategy=FSDP()).accelerator.device.type
