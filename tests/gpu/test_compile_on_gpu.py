"""Compiled trainings on a GPU: the losses of the plain one, also where CUDA graphs are replayed."""

import pytest
import torch
from support.gpus import DEVICE, Task, loader, needs_gpu, trainer

import treadle


def losses(kind=Task, steps=10, batch_size=4, rows=None, **flags):
    torch._dynamo.reset()
    task = kind(width=32)
    data = loader(steps, batch_size)
    if rows is not None:
        data.dataset.tensors = tuple(tensor[:rows] for tensor in data.dataset.tensors)
    run = trainer(**flags)
    run.fit(task, data, loader(3))
    return torch.stack(task.losses).cpu(), {name: float(value) for name, value in run.callback_metrics.items()}


@needs_gpu
@pytest.mark.parametrize(
    "options",
    [
        True,
        {"use_regional_compilation": False},
        {"mode": "reduce-overhead"},
        {"mode": "max-autotune-no-cudagraphs"},
        {"mode": "reduce-overhead", "use_regional_compilation": False},
    ],
    ids=str,
)
@pytest.mark.parametrize("flags", [{}, {"gradient_clip_val": 0.5}, {"precision": "bf16-mixed"}], ids=str)
def test_losses_are_those_of_the_plain_training(options, flags):
    tolerance = 0.05 if flags.get("precision") else 1e-3
    plain, plain_metrics = losses(max_epochs=2, log_every_n_steps=3, **flags)
    compiled, metrics = losses(max_epochs=2, log_every_n_steps=3, compile=options, **flags)
    torch.testing.assert_close(compiled, plain, rtol=tolerance, atol=tolerance)
    assert metrics == pytest.approx(plain_metrics, rel=tolerance, abs=tolerance)


@needs_gpu
def test_accumulation(caplog):
    plain, _ = losses(accumulate_grad_batches=2)
    compiled, _ = losses(accumulate_grad_batches=2, compile=True)
    torch.testing.assert_close(compiled, plain, rtol=1e-3, atol=1e-3)
    with pytest.raises(ValueError, match="replays CUDA graphs"):
        losses(accumulate_grad_batches=2, compile={"mode": "reduce-overhead"})


@needs_gpu
@pytest.mark.parametrize("options", [True, {"mode": "reduce-overhead"}], ids=str)
def test_a_short_last_batch_compiles_nothing(options):
    from torch._dynamo.utils import counters

    losses(compile=options, max_epochs=1)
    whole = counters["stats"]["unique_graphs"]
    counters.clear()
    losses(compile=options, max_epochs=3, rows=38)
    assert counters["stats"]["unique_graphs"] <= whole


class AsksForLosses(treadle.Callback):
    """Reads the losses of the latest micro-batches, as the report and the progress bar do."""

    def on_train_batch_end(self, trainer, task, *_):
        recent = [float(loss) for loss in trainer.accelerator.accumulation.agreement.recent_losses]
        assert recent == [loss.item() for loss in task.losses[-len(recent) :]]


@needs_gpu
def test_logged_values_that_a_graph_has_made_are_kept():
    """The loss comes out of the graph itself, and stays in the epoch's mean."""

    class Inside(Task):
        def __init__(self, **options):
            super().__init__(**options)

            class WithLoss(torch.nn.Module):
                def __init__(self, net):
                    super().__init__()
                    self.net = net

                def forward(self, x, y):
                    return torch.nn.functional.mse_loss(self.net(x), y)

            self.net = WithLoss(self.net)

        def loss(self, batch):
            return self.net(*batch)

    _, plain = losses(Inside)
    graphs = {"mode": "reduce-overhead", "use_regional_compilation": False}
    _, metrics = losses(Inside, compile=graphs, enable_progress_bar=True, callbacks=AsksForLosses())
    assert metrics == pytest.approx(plain, rel=1e-3)


def test_an_own_loop_is_compiled():
    own = treadle.Accelerator(cpu=DEVICE.type == "cpu", dynamo_backend="eager" if DEVICE.type == "cpu" else "inductor")
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    model, optimizer, data = own.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), loader())
    for x, y in data:
        own.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    assert torch.isfinite(net[0].weight).all()
